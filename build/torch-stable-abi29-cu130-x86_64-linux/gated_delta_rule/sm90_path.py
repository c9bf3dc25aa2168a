"""The way to the SM90 kernels: one op of the library, which copies what their tile loads cannot read."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from .._ops import ops
from ..library import call_op
from .plan import PLANS, num_borders, range_slots

CHUNK = 64  # tokens of a chunk of the kernels
RESIDUAL_DTYPE = torch.bfloat16  # of what a forward keeps, and of the inputs of one that keeps anything
TRIANGLE = [96, 32]  # three quarters of a chunk's lower triangular [64, 64] tile
BOUNDS_OF_TILE = 96 * 32 // 2  # float32 numbers in the place of such a tile
BORDER_SLOTS = 11  # of such tiles, which hold the states between two ranges of the backward in float32


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
    save_for_backward: bool,
    plan: str,
) -> Tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HV, 128], final state [N, HV, 128, 128] float32, and residuals of `residual_shape` if they are to be saved."""
    arguments = (q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, False, True)
    if save_for_backward and q.dtype == RESIDUAL_DTYPE:
        ranges = range_slots(*_sizes(q, v, cu_seqlens), plan)
        return call_op(ops.sm90_gated_delta_rule_fwd_kept, *arguments, PLANS[plan], ranges)
    o, final_state = call(*arguments, plan)
    return o, final_state, final_state.new_empty(0)


def residual_shape(q: Tensor, v: Tensor, cu_seqlens: Optional[Tensor], plan: str) -> List[int]:
    """Shape of what a forward keeps: the solve of each chunk in bfloat16, and behind them the bounds of all, in float32.

    Behind those, where the backward takes several ranges of chunks, the states between them, [HV, V, K] in float32. Nothing in
    float16, whose backward wants another form and makes it itself, as it does where there is nothing.
    """
    if q.dtype != RESIDUAL_DTYPE:
        return [0]
    tokens, sequences, v_heads = _sizes(q, v, cu_seqlens)
    slots = tokens // CHUNK + sequences
    bounds = (slots + BOUNDS_OF_TILE - 1) // BOUNDS_OF_TILE
    return [slots + bounds + BORDER_SLOTS * num_borders(tokens, sequences, v_heads, plan), v_heads, *TRIANGLE]


def _sizes(q: Tensor, v: Tensor, cu_seqlens: Optional[Tensor]) -> Tuple[int, int, int]:
    """Tokens, sequences and value heads."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.shape[0] * q.shape[1], sequences, v.shape[2]


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
    return call_op(
        ops.sm90_gated_delta_rule_fwd,
        q,
        k,
        v,
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
    residuals: Tensor,
    do: Optional[Tensor],
    dht: Optional[Tensor],
    scale: float,
    use_qk_l2norm: bool,
    plan: str,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta in their dtypes and of the initial state in float32, without sequences if there is none.

    `do` and `dht` are zero where they are None, and empty residuals are made again.
    """
    dq, dk, dv, dg, dbeta, dh0 = call_op(
        ops.sm90_gated_delta_rule_bwd,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        v.new_zeros(v.shape) if do is None else _converted(do, v),
        dht,
        scale,
        use_qk_l2norm,
        False,
        initial_state is not None,
        PLANS["off" if q.dtype == torch.float16 else plan],  # no GPU has judged segments in float16 yet
        residuals if residuals.numel() else None,
        range_slots(*_sizes(q, v, cu_seqlens), plan) if residuals.numel() else 0,
    )
    return dq, dk, dv, _converted(dg, g), _converted(dbeta, beta), dh0


def _converted(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of `like`; asking first costs half of what `to` does."""
    return x if x.dtype == like.dtype else x.to(like.dtype)
