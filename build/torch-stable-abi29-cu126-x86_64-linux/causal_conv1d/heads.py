"""The convolution in front of the recurrence in one pass: SiLU, the split into q, k and v, and the L2 norm of q and k.

For layers; not part of the public interface. On the SM90 kernels one launch reads the projection and writes what the
recurrence reads. Elsewhere, and where a gradient may be asked for, the convolution and PyTorch operations do the same.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..checks import can_call_directly
from . import api, capability, sm90_path, torch_path, validation

HEAD_DIM = 128
WIDTHS = range(1, 5)
L2NORM_EPS = 1e-6


class Heads(NamedTuple):
    """q, k [B, T, H, K] of norm 1 and v [B, T, HV, V], parts of the rows of one tensor; final states [B, D, W - 1] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    final_states: Optional[Tensor]


def convolve_heads(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    activation: Optional[str],
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    *,
    seq_idx: Optional[Tensor] = None,
    cu_seqlens: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    return_final_states: bool = False,
) -> Heads:
    """y = act(conv(x)) as in `causal_conv1d_fn`, split into heads; q and k divided by sqrt(|q|^2 + 1e-6).

    Args:
        x: [B, D, T], the channels of q, k and v one behind the other, D = 2 * num_k_heads * head_k_dim + HV * head_v_dim.
        weight, bias, activation, seq_idx, cu_seqlens, initial_states, return_final_states: as in `causal_conv1d_fn`.

    Call the recurrence on q, k and v with use_qk_l2norm_in_kernel=False.

    Raises:
        ValueError, TypeError: as `causal_conv1d_fn`.
    """
    options = (seq_idx, cu_seqlens, initial_states, return_final_states)
    key_channels = num_k_heads * head_k_dim
    if _explain_separate(x, weight, bias, initial_states, head_k_dim) is None:
        y, final_states = _in_one_pass(x, weight, bias, activation, 2 * key_channels, *options)
        q, k, v = _split(y, num_k_heads, head_k_dim, head_v_dim)
        return Heads(q, k, v, final_states if return_final_states else None)
    y = api.causal_conv1d_fn(
        x,
        weight,
        bias,
        seq_idx=seq_idx,
        initial_states=initial_states,
        return_final_states=return_final_states,
        activation=activation,
        cu_seqlens=cu_seqlens,
    )
    y, final_states = y if return_final_states else (y, None)
    q, k, v = _split(y.transpose(1, 2), num_k_heads, head_k_dim, head_v_dim)
    return Heads(_normalize(q), _normalize(k), v, final_states)


def _explain_separate(x, weight, bias, initial_states, head_k_dim: int) -> Optional[str]:
    """Say why one pass does not serve; None if it does."""
    if not can_call_directly(x, weight, bias, initial_states):
        return "autograd or a tracer looks at the call"
    if head_k_dim != HEAD_DIM or x.dim() != 3 or x.shape[1] % HEAD_DIM:
        return f"heads have {head_k_dim} channels, and one pass normalises heads of {HEAD_DIM}"
    if weight.dim() != 2 or weight.shape[1] not in WIDTHS:
        return "the width is beyond 4"
    return capability.explain_unsupported(x, weight)


def _in_one_pass(
    x, weight, bias, activation, normed_channels, seq_idx, cu_seqlens, initial_states, return_final_states
):
    validation.check_convolution(x, weight, bias, activation)
    validation.check_boundaries(x, seq_idx, cu_seqlens, initial_states, return_final_states)
    history = weight.shape[1] - 1
    if initial_states is not None:
        validation.check_state("initial_states", initial_states, x, history)
        initial_states = initial_states[..., initial_states.shape[2] - history :].to(x.dtype)
    sequence = seq_idx if cu_seqlens is None else torch_path.sequence_of_tokens(cu_seqlens, x.shape[2])
    sequence = None if sequence is None else sequence.to(torch.int32)
    silu = activation is not None
    return sm90_path.forward(
        x, weight, bias, sequence, initial_states, silu, return_final_states, normed_channels=normed_channels
    )


def _split(y: Tensor, num_k_heads: int, head_k_dim: int, head_v_dim: int):
    """q, k and v as views of y [B, T, D]."""
    key_channels = num_k_heads * head_k_dim
    q, k, v = y.split((key_channels, key_channels, y.shape[2] - 2 * key_channels), dim=2)
    return (*(z.unflatten(2, (num_k_heads, head_k_dim)) for z in (q, k)), v.unflatten(2, (-1, head_v_dim)))


def _normalize(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPS)).to(x.dtype)
