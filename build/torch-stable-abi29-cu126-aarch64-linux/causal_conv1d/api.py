"""Public functions of the short convolution in front of the recurrence. Names and meaning are causal-conv1d's."""

from typing import Optional, Tuple, Union

from torch import Tensor

from ..sm90 import notice_torch_path
from . import autograd, capability, torch_path, validation

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
        y [B, D, T] in x's dtype; with `return_final_states` also the final states. From the SM90 kernels y lies in rows of
        channels, whatever the layout of x: y.transpose(1, 2) is contiguous, as the next operator reads it.

    Raises:
        ValueError, TypeError: one sentence naming the argument, the rule, the value and the way out.
    """
    return_final_states = return_final_states or final_states_out is not None
    sequence, initial_states = checked_operands(
        x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, return_final_states
    )
    if final_states_out is not None:
        validation.check_state("final_states_out", final_states_out, x, weight.shape[1] - 1, exactly=True)
    unsupported = capability.explain_unsupported(x, weight)
    if unsupported is None:
        silu = activation is not None
        y, final = autograd.forward(x, weight, bias, sequence, initial_states, silu, return_final_states)
        y = y.transpose(1, 2)
    else:
        if x.is_cuda:
            notice_torch_path("causal_conv1d_fn", unsupported)
        y, final = torch_path.forward(x, weight, bias, activation, sequence, initial_states)
    if not return_final_states:
        return y
    if final_states_out is not None:
        final = final_states_out.copy_(final)
    return y, final


def checked_operands(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    activation: Optional[str],
    seq_idx: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    initial_states: Optional[Tensor],
    return_final_states: bool,
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """The sequence of each token, int32 [B, T], and the initial states with W - 1 tokens; None where there are none.

    Args, raises: as `causal_conv1d_fn`.
    """
    validation.check_convolution(x, weight, bias, activation)
    validation.check_boundaries(x, seq_idx, cu_seqlens, initial_states, return_final_states)
    history = weight.shape[1] - 1
    if initial_states is not None:
        validation.check_state("initial_states", initial_states, x, history)
        initial_states = initial_states[..., initial_states.shape[2] - history :].to(x.dtype)
    sequence = seq_idx if cu_seqlens is None else torch_path.sequence_of_tokens(cu_seqlens, x.shape[2])
    return None if sequence is None else torch_path.narrow_sequence(sequence), initial_states


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    conv_state_indices: Optional[Tensor] = None,
) -> Tensor:
    """The convolution of one or a few new tokens, with the earlier ones in `conv_state`, which is updated in place.

    Args:
        x: [B, D] or [B, D, T], the new tokens.
        conv_state: [B, D, S] with S >= W - 1, the last tokens; afterwards it ends with x.
        weight, bias, activation: as in `causal_conv1d_fn`.
        conv_state_indices: [B] int32 or int64, the row of conv_state [N, D, S] that belongs to each row of x; rows of x
            whose index lies outside [0, N) give 0 and leave every state alone. No row may be named twice. Row b by default.

    Returns:
        y, in the shape and dtype of x.

    Raises:
        ValueError, TypeError: one sentence naming the argument, the rule, the value and the way out.
    """
    validation.check_floating("x", x)
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    validation.check_convolution(tokens, weight, bias, activation)
    validation.check_state_indices(tokens, conv_state, conv_state_indices, weight.shape[1])
    unsupported = capability.explain_unsupported_update(tokens, conv_state, weight, bias)
    if unsupported is None:
        y = autograd.update(tokens, conv_state, weight, bias, conv_state_indices, activation is not None).transpose(
            1, 2
        )
        return y.squeeze(-1) if x.dim() == 2 else y
    if x.is_cuda:
        notice_torch_path("causal_conv1d_update", unsupported)
    return torch_path.update(tokens, conv_state, weight, bias, activation, conv_state_indices).view_as(x)
