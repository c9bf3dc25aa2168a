"""The torch.library ops: opaque to torch.compile, with shapes for tracing. The one way to an implementation.

Both ops are defined once per process even if two copies of this build are loaded (a local folder beside the Hub cache):
their namespace names the build by its digest, so equal names mean equal code.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._ops import ops
from ..checks import check_cu_seqlens_values
from ..library import define_op
from ..sm90 import notice_torch_path
from . import capability, sm90_path, torch_path, validation

FORWARD = "gated_delta_rule_fwd"
BACKWARD = "gated_delta_rule_bwd"


def gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: float,
    use_qk_l2norm: bool,
    chunk_size: int,
    save_for_backward: bool,
    plan: str,
) -> Tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HV, V], final state [N, HV, K, V], and residuals for the backward (empty unless asked for)."""
    unsupported = capability.explain_unsupported(q, k, v, g, beta)
    if unsupported is None:
        return _with_bounds_explained(
            sm90_path.forward,
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            cu_seqlens,
            scale,
            use_qk_l2norm,
            save_for_backward,
            plan,
        )
    _check_bounds(cu_seqlens, q)
    _notice_on_cuda("chunk_gated_delta_rule", unsupported, q)
    with torch.autocast(q.device.type, enabled=False):
        return torch_path.forward(
            q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, chunk_size, save_for_backward
        )


def is_compiled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> bool:
    """Whether the compiled op serves a forward with these tensors."""
    return capability.explain_unsupported(q, k, v, g, beta) is None


def forward_directly(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, state_v_first, output_final_state, plan
) -> Optional[Tuple[Tensor, Optional[Tensor]]]:
    """o and the final state in the layout asked for, by the compiled op; None where it does not serve.

    The op above is for autograd and tracers. Where neither looks, its dispatch would cost more host time than the kernels'
    launches.
    """
    if capability.explain_unsupported(q, k, v, g, beta) is not None:
        return None
    o, final_state = sm90_path.call(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, state_v_first, output_final_state, plan
    )
    return o, final_state if output_final_state else None


def gated_delta_rule_bwd(
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
    chunk_size: int,
    plan: str,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta in their dtypes and of the initial state in the dtype of the final state.

    The SM90 kernels give a dh0 without sequences where there is no initial state.
    """
    unsupported = capability.explain_unsupported_backward(q, k, v, g, beta)
    if unsupported is None:
        validation.check_residuals(residuals, sm90_path.residual_shape(q, v, cu_seqlens, plan))
        return _with_bounds_explained(
            sm90_path.backward,
            *(q, k, v, g, beta, initial_state, cu_seqlens),
            *(residuals, do, dht, scale, use_qk_l2norm, plan),
        )
    _check_bounds(cu_seqlens, q)
    _notice_on_cuda("the backward of chunk_gated_delta_rule", unsupported, q)
    validation.check_residuals(residuals, torch_path.residual_shape(q, v, cu_seqlens, chunk_size))
    with torch.autocast(q.device.type, enabled=False):
        return torch_path.backward(
            q, k, v, g, beta, initial_state, cu_seqlens, residuals, do, dht, scale, use_qk_l2norm, chunk_size
        )


def _with_bounds_explained(compiled, q, k, v, g, beta, initial_state, cu_seqlens, *arguments):
    """What the compiled op returns. It looks at the bounds itself, by the same wish, and has no sentence for them."""
    try:
        return compiled(q, k, v, g, beta, initial_state, cu_seqlens, *arguments)
    except RuntimeError:
        _check_bounds(cu_seqlens, q)
        raise


def _check_bounds(cu_seqlens: Optional[Tensor], q: Tensor) -> None:
    if cu_seqlens is not None:
        check_cu_seqlens_values(cu_seqlens, q.shape[1])


def _notice_on_cuda(name: str, reason: str, q: Tensor) -> None:
    if q.is_cuda:
        notice_torch_path(name, reason)


def _state_shape(q: Tensor, v: Tensor, cu_seqlens: Optional[Tensor]) -> list:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return [sequences, v.shape[2], q.shape[3], v.shape[3]]


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _forward_fake(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, chunk_size, save_for_backward, plan
):
    dtype = torch_path.compute_dtype(q)
    residuals, residual_dtype = [0], dtype
    if save_for_backward and not is_compiled(q, k, v, g, beta):
        residuals = torch_path.residual_shape(q, v, cu_seqlens, chunk_size)
    elif save_for_backward and q.dtype == sm90_path.RESIDUAL_DTYPE:
        residuals, residual_dtype = sm90_path.residual_shape(q, v, cu_seqlens, plan), q.dtype
    state = q.new_empty(_state_shape(q, v, cu_seqlens), dtype=dtype)
    return _contiguous(v), state, q.new_empty(residuals, dtype=residual_dtype)


def _backward_fake(
    q, k, v, g, beta, initial_state, cu_seqlens, residuals, do, dht, scale, use_qk_l2norm, chunk_size, plan
):
    shape = _state_shape(q, v, cu_seqlens)
    if initial_state is None and capability.explain_unsupported_backward(q, k, v, g, beta) is None:
        shape[0] = 0
    state = q.new_empty(shape, dtype=torch_path.compute_dtype(q))
    return (*(_contiguous(x) for x in (q, k, v, g, beta)), state)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "chunk_gated_delta_rule has no second derivative; take it once, or differentiate "
        "a reference implementation such as transformers' torch_chunk_gated_delta_rule twice."
    )


def define(setup_context, backward) -> bool:
    """Define both ops with shapes and autograd unless another copy of this build has; True if they were new."""
    if hasattr(ops, FORWARD):
        return False
    define_op(FORWARD, gated_delta_rule_fwd, _forward_fake, backward=backward, setup_context=setup_context)
    define_op(BACKWARD, gated_delta_rule_bwd, _backward_fake, backward=_refuse_double_backward)
    return True
