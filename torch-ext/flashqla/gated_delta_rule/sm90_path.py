"""The way to the SM90 kernels: rows as their tile loads want them, then one op of the library."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._ops import ops
from ..library import BASE_ALIGNMENT, aligned, call_op
from .plan import PLANS

ROW_ALIGNMENT = 8  # elements of 16 bits in the 16 bytes that a tile load aligns to


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
    plan: str,
) -> Tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HV, 128], final state [N, HV, 128, 128] float32, and no residuals: the backward recomputes from the inputs."""
    o, final_state = call(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, False, True, plan)
    return o, final_state, final_state.new_empty(0)


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: Optional[float],
    use_qk_l2norm: bool,
    state_v_first: bool,
    output_final_state: bool,
    plan: str,
) -> Tuple[Tensor, Tensor]:
    """o [B, T, HV, 128] and the final state float32, in the layout of the initial one; no sequences if not asked for."""
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    return call_op(
        ops.sm90_gated_delta_rule_fwd,
        _loadable(q),
        _loadable(k),
        _loadable(v),
        g,
        beta,
        initial_state,
        cu_seqlens,
        q.shape[3] ** -0.5 if scale is None else scale,
        use_qk_l2norm,
        state_v_first,
        output_final_state,
        PLANS[plan],
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    do: Optional[Tensor],
    dht: Optional[Tensor],
    scale: float,
    use_qk_l2norm: bool,
    plan: str,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta in their dtypes and of the initial state in float32, without sequences if there is none.

    `do` and `dht` are zero where they are None.
    """
    wants_dh0 = initial_state is not None
    if wants_dh0:
        initial_state = initial_state.contiguous()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    if dht is not None:
        dht = dht.contiguous()
    dq, dk, dv, dg, dbeta, dh0 = call_op(
        ops.sm90_gated_delta_rule_bwd,
        _loadable(q),
        _loadable(k),
        _loadable(v),
        g,
        beta,
        initial_state,
        cu_seqlens,
        v.new_zeros(v.shape) if do is None else _loadable(do.to(v.dtype)),
        dht,
        scale,
        use_qk_l2norm,
        False,
        wants_dh0,
        PLANS["off" if q.dtype == torch.float16 else plan],  # no GPU has judged segments in float16 yet
    )
    return dq, dk, dv, dg.to(g.dtype), dbeta.to(beta.dtype), dh0


def _loadable(x: Tensor) -> Tensor:
    """x [B, T, H, D] itself if tiles can be loaded from it, as from a view of a packed projection; else a copy.

    An expanded tensor, with a stride of 0, is copied: a tensor map describes memory, not repetition. D is a multiple of 8.
    """
    if x.shape[1] == 1 < x.shape[0]:  # the batch walks the tokens, and the one token of a row may have any stride
        x = x.as_strided(x.shape, (x.stride(0), x.stride(0), x.stride(2), x.stride(3)))
    if x.is_contiguous() and x.data_ptr() % BASE_ALIGNMENT == 0:
        return x
    batch, tokens, heads, _ = x.shape
    batch_stride, token_stride, head_stride, stride = x.stride()
    if (
        stride == 1
        and (heads <= 1 or (head_stride > 0 and head_stride % ROW_ALIGNMENT == 0))
        and (batch * tokens <= 1 or (token_stride > 0 and token_stride % ROW_ALIGNMENT == 0))
        and (batch == 1 or batch_stride == tokens * token_stride)
        and x.data_ptr() % BASE_ALIGNMENT == 0
    ):
        return x
    return aligned(x)
