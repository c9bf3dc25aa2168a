"""The way to the SM90 kernels: rows as their tile loads want them, then one op of the library."""

from typing import Optional, Tuple

from torch import Tensor

from .._ops import ops

ROW_ALIGNMENT = 8  # elements of 16 bits in the 16 bytes that a tile load aligns to
BASE_ALIGNMENT = 16  # bytes


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: float,
    use_qk_l2norm: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HV, 128], final state [N, HV, 128, 128] float32, and no residuals: the backward recomputes from the inputs."""
    q, k, v = (_loadable(x) for x in (q, k, v))
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    state_v_first, output_final_state = False, True
    o, final_state, _ = ops.sm90_gated_delta_rule_fwd(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, state_v_first, output_final_state
    )
    return o, final_state, final_state.new_empty(0)


def _loadable(x: Tensor) -> Tensor:
    """x [B, T, H, D] itself if tiles can be loaded from it, as from a view of a packed projection; else a copy.

    An expanded tensor, with a stride of 0, is copied: a tensor map describes memory, not repetition.
    """
    batch, tokens, heads, _ = x.shape
    strides = [x.stride(axis) for axis, size in ((1, batch * tokens), (2, heads)) if size > 1]
    rows = x.stride(3) == 1 and all(stride > 0 and stride % ROW_ALIGNMENT == 0 for stride in strides)
    one_run = batch == 1 or x.stride(0) == tokens * x.stride(1)
    if rows and one_run and x.data_ptr() % BASE_ALIGNMENT == 0:
        return x
    copy = x.contiguous()
    return copy.clone() if copy.data_ptr() % BASE_ALIGNMENT else copy
