"""The convolution in front of the recurrence: SiLU, the split into q, k and v, and, for inference, the L2 norm of q and k.

For layers; not part of the public interface. Without gradients one launch of the SM90 kernels reads the projection and writes
what the recurrence reads. With gradients q, k and v are tensors of their own, so that their gradients need not be copied into
one; the recurrence then normalises. Elsewhere the convolution and a split do the same.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..checks import can_call_directly
from . import api, autograd, capability, sm90_path

HEAD_DIM = 128
WIDTHS = range(1, 5)


class Heads(NamedTuple):
    """q, k [B, T, H, K] and v [B, T, HV, V].

    Attributes:
        is_normed: whether q and k have been divided by sqrt(|.|^2 + 1e-6); call the recurrence with
            use_qk_l2norm_in_kernel=not is_normed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    is_normed: bool


def convolve_heads(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    activation: Optional[str],
    key_channels: int,
    head_k_dim: int,
    head_v_dim: int,
    *,
    seq_idx: Optional[Tensor] = None,
    cu_seqlens: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
) -> Heads:
    """y = act(conv(x)) as in `causal_conv1d_fn`, split into heads.

    Args:
        x: [B, D, T], `key_channels` channels of q, as many of k, and then those of v.
        weight, bias, activation, seq_idx, cu_seqlens, initial_states: as in `causal_conv1d_fn`.

    Raises:
        ValueError, TypeError: as `causal_conv1d_fn`.
    """
    sizes = [key_channels, key_channels, x.shape[1] - 2 * key_channels]
    is_served = capability.explain_unsupported(x, weight) is None
    is_normed = is_served and _is_one_pass(x, weight, bias, initial_states, head_k_dim)
    if is_normed or (is_served and _is_in_parts(x, weight, bias, initial_states, sizes)):
        options = (seq_idx, cu_seqlens, initial_states, False)
        sequence, initial_states = api.checked_operands(x, weight, bias, activation, *options)
        silu = activation is not None
        if is_normed:
            normed = 2 * key_channels
            y, _ = sm90_path.forward(x, weight, bias, sequence, initial_states, silu, False, normed_channels=normed)
            parts = y.split(sizes, dim=2)
        else:
            parts = autograd.forward_parts(x, weight, bias, sequence, sizes, silu)
    else:
        y = api.causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, activation=activation, cu_seqlens=cu_seqlens)
        parts = y.transpose(1, 2).split(sizes, dim=2)
    q, k, v = (part.unflatten(2, (-1, dim)) for part, dim in zip(parts, (head_k_dim, head_k_dim, head_v_dim)))
    return Heads(q, k, v, is_normed)


def _is_one_pass(x: Tensor, weight: Tensor, bias: Optional[Tensor], initial_states, head_k_dim: int) -> bool:
    """Whether one launch does all; heads of 128 channels alone lie in a warp."""
    return (
        head_k_dim == HEAD_DIM
        and x.shape[1] % HEAD_DIM == 0
        and weight.shape[1] in WIDTHS
        and can_call_directly(x, weight, bias, initial_states)
    )


def _is_in_parts(x: Tensor, weight: Tensor, bias: Optional[Tensor], initial_states, sizes) -> bool:
    """Whether q, k and v are made as tensors of their own: where gradients will come back for each."""
    wants_gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return wants_gradients and initial_states is None and not any(n % capability.SM90_CHANNELS for n in sizes)
