"""The way to the SM90 kernels: one op of the library, which copies what their tile loads cannot read."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._ops import ops
from ..library import call_op
from .plan import PLANS


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
    do: Optional[Tensor],
    dht: Optional[Tensor],
    scale: float,
    use_qk_l2norm: bool,
    plan: str,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta in their dtypes and of the initial state in float32, without sequences if there is none.

    `do` and `dht` are zero where they are None.
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
    )
    return dq, dk, dv, _converted(dg, g), _converted(dbeta, beta), dh0


def _converted(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of `like`; asking first costs half of what `to` does."""
    return x if x.dtype == like.dtype else x.to(like.dtype)
