"""The way to the SM90 kernels of the gated norm: rows as their loads want them, then one op of the library."""

from typing import Tuple

from torch import Tensor

from .._ops import ops
from ..library import BASE_ALIGNMENT, aligned, call_op

ROW_ALIGNMENT = 8  # elements of 16 bits in the 16 bytes of a load


def forward(x: Tensor, g: Tensor, weight: Tensor, eps: float, is_silu: bool) -> Tensor:
    """y, contiguous, in the shape of x."""
    return call_op(ops.sm90_rms_norm_gated_fwd, _loadable(x), _loadable(g), aligned(weight), eps, is_silu)


def backward(
    dy: Tensor, x: Tensor, g: Tensor, weight: Tensor, eps: float, is_silu: bool
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, g and the weight in their dtypes, contiguous."""
    return call_op(
        ops.sm90_rms_norm_gated_bwd, _loadable(dy), _loadable(x), _loadable(g), aligned(weight), eps, is_silu
    )


def _loadable(x: Tensor) -> Tensor:
    """x [..., heads, D] itself if its rows lie at 16-byte addresses and the axes before `heads` are one run; else a copy."""
    if x.data_ptr() % BASE_ALIGNMENT == 0 and (x.is_contiguous() or _is_run_of_rows(x)):
        return x
    return aligned(x)


def _is_run_of_rows(x: Tensor) -> bool:
    """Whether C++ can see a strided x as [tokens, heads, D]: see `as_rows` in csrc/ops/rows.h."""
    if x.stride(-1) != 1 or any(n > 1 and stride % ROW_ALIGNMENT for n, stride in zip(x.shape[:-1], x.stride())):
        return False
    has_heads = x.dim() >= 3 and x.shape[-2] != 1
    run = None
    for axis in range(x.dim() - (3 if has_heads else 2), -1, -1):
        if x.shape[axis] == 1:
            continue
        if run is not None and x.stride(axis) != run:
            return False
        run = x.shape[axis] * x.stride(axis)
    return True
