"""Public functions of the short convolution in front of the recurrence. Names and meaning are causal-conv1d's."""

from typing import Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_path, validation

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    return_final_states: bool = False,
    final_states_out: Optional[Tensor] = None,
    activation: Optional[str] = None,
    cu_seqlens: Optional[Tensor] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Depthwise causal convolution over tokens, then SiLU if asked; differentiable.

    y[t] = act(bias + sum_j weight[W - 1 - j] x[t - j]), over tokens of the same sequence.

    Args:
        x: [B, D, T], any floating dtype and stride.
        weight: [D, W], any floating dtype.
        bias: [D], or None.
        seq_idx: [B, T] integers, the sequence of each token; history restarts where it changes, and tokens with a
            negative index give 0.
        initial_states: [B, D, W - 1], the tokens before the first; zeros by default. Of a longer one the end counts.
        return_final_states: also return the last W - 1 tokens [B, D, W - 1].
        final_states_out: write them here, exactly [B, D, W - 1], any floating dtype.
        activation: None, "silu" or "swish" (the same).
        cu_seqlens: [N + 1] int32 or int64, sequences packed in the one row of the batch, in place of `seq_idx`; tokens
            behind the last bound give 0. Values are checked as in `chunk_gated_delta_rule`, but not under torch.compile.

    Returns:
        y [B, D, T] in x's dtype; with `return_final_states` also the final states.

    Raises:
        ValueError, TypeError: one sentence naming the argument, the rule, the value and the way out.
    """
    validation.check_convolution(x, weight, bias, activation)
    return_final_states = return_final_states or final_states_out is not None
    validation.check_boundaries(x, seq_idx, cu_seqlens, initial_states, return_final_states)
    if seq_idx is not None or cu_seqlens is not None:
        sequence = seq_idx if cu_seqlens is None else torch_path.sequence_of_tokens(cu_seqlens, x.shape[2])
        return torch_path.convolve_packed(x, weight, bias, activation, sequence)
    history = weight.shape[1] - 1
    if final_states_out is not None:
        validation.check_state("final_states_out", final_states_out, x, history, exactly=True)
    if initial_states is None:
        extended = F.pad(x, (history, 0))
    else:
        validation.check_state("initial_states", initial_states, x, history)
        extended = torch.cat([initial_states[..., initial_states.shape[2] - history :].to(x.dtype), x], dim=-1)
    out = torch_path.convolve(extended, weight, bias, activation, x.shape[2])
    if not return_final_states:
        return out
    final = extended[..., extended.shape[2] - history :]
    if final_states_out is not None:
        final = final_states_out.copy_(final)
    return out, final


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
) -> Tensor:
    """The convolution of one or a few new tokens, with the earlier ones in `conv_state`, which is updated in place.

    Args:
        x: [B, D] or [B, D, T], the new tokens.
        conv_state: [B, D, S] with S >= W - 1, the last tokens; afterwards it ends with x.
        weight, bias, activation: as in `causal_conv1d_fn`.

    Returns:
        y, in the shape and dtype of x.

    Raises:
        ValueError, TypeError: one sentence naming the argument, the rule, the value and the way out.
    """
    validation.check_floating("x", x)
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    validation.check_convolution(tokens, weight, bias, activation)
    validation.check_state("conv_state", conv_state, tokens, weight.shape[1] - 1)
    extended = torch.cat([conv_state.to(tokens.dtype), tokens], dim=-1)
    out = torch_path.convolve(extended, weight, bias, activation, tokens.shape[2])
    conv_state.copy_(extended[..., tokens.shape[2] :])
    return out.view_as(x)
