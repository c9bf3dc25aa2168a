"""The way to the SM90 kernels of the convolution: operands as their vector loads want them, then one op of the library."""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._ops import ops
from ..library import BASE_ALIGNMENT, aligned, call_op, narrow_indices

VECTOR = 8  # channels that lie side by side


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    sequence: Optional[Tensor],
    initial_states: Optional[Tensor],
    silu: bool,
    output_final_states: bool,
    normed_channels: int = 0,
) -> Tuple[Tensor, Tensor]:
    """y [B, T, D] of x [B, D, T], and the final states [B, D, W - 1], or no rows of them if not asked for.

    The first `normed_channels` of y are heads of 128 channels, and normalised.
    """
    weight, bias = _weights(x, weight, bias)
    turned = x.transpose(1, 2)
    return call_op(
        ops.sm90_causal_conv1d_fwd,
        turned if normed_channels == 0 and _has_token_runs(x) else _rows(turned),
        weight,
        bias,
        aligned(sequence),
        aligned(initial_states),
        silu,
        output_final_states,
        normed_channels,
    )


def backward(
    x: Tensor,
    dy: Sequence[Tensor],
    weight: Tensor,
    bias: Optional[Tensor],
    sequence: Optional[Tensor],
    initial_states: Optional[Tensor],
    dfinal_states: Optional[Tensor],
    silu: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [B, T, D], dweight, dbias and the gradient of the initial states in the dtypes of their inputs; empty for None.

    dy: one to three parts of the gradient of y, [B, T, channels], the channels of one behind those of the other.
    """
    narrow, narrow_bias = _weights(x, weight, bias)
    first, *others = (_rows(part) for part in dy)
    dx, dweight, dbias, dinitial = call_op(
        ops.sm90_causal_conv1d_bwd,
        _rows(x.transpose(1, 2)),
        first,
        narrow,
        narrow_bias,
        aligned(sequence),
        aligned(initial_states),
        aligned(dfinal_states),
        silu,
        *others,
    )
    return dx, dweight.to(weight.dtype), dbias if bias is None else dbias.to(bias.dtype), dinitial


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    conv_state_indices: Optional[Tensor],
    silu: bool,
) -> Tensor:
    """y [B, T, D] of x [B, D, T]; moves the states on in place."""
    weight, bias = _weights(x, weight, bias)
    indices = narrow_indices(conv_state_indices, conv_state.shape[0])
    y = call_op(ops.sm90_causal_conv1d_update, x, conv_state, weight, bias, indices, silu)
    torch.autograd.graph.increment_version(conv_state)
    return y


def _weights(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
    """Both in the dtype of x, or both in float32, which loses nothing of either."""
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        weight, bias = weight.float(), None if bias is None else bias.float()
    return aligned(weight), aligned(bias)


def _has_token_runs(x: Tensor) -> bool:
    """Whether the tokens of x [B, D, T] lie side by side, which a kernel of its own turns."""
    _, channels, tokens = x.shape
    return tokens > 1 and channels > 1 and x.stride(2) == 1 and x.stride(1) >= tokens


def _rows(x: Tensor) -> Tensor:
    """x [B, T, D] itself if vectors of its channels can be loaded, as from a part of a packed projection; else a copy."""
    batch, tokens, channels = x.shape
    batch_stride, token_stride, stride = x.stride()
    if (
        (stride == 1 or channels == 1)
        and (tokens <= 1 or (token_stride > 0 and token_stride % VECTOR == 0))
        and (batch <= 1 or (batch_stride > 0 and batch_stride % VECTOR == 0))
        and x.data_ptr() % BASE_ALIGNMENT == 0
    ):
        return x if tokens > 1 and batch > 1 else x.as_strided(x.shape, _strides(x))
    copy = aligned(x)
    return copy.as_strided(copy.shape, (tokens * channels, channels, 1))  # whatever strides a size of 1 has been given


def _strides(x: Tensor) -> Tuple[int, int, int]:
    """Strides that a size of 1 leaves open, made multiples of the vector."""
    batch, tokens, channels = x.shape
    token_stride = x.stride(1) if tokens > 1 else channels
    return x.stride(0) if batch > 1 else tokens * token_stride, token_stride, 1
