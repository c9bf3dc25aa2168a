"""Gate activations on their way to an implementation: SM90 kernels as torch.library ops with autograd, or PyTorch.

    g = -exp(A_log) softplus(a + dt_bias)        beta = strength sigmoid(b), strength 1 or 2

Both in one launch, with what is left out (a with A_log and dt_bias, or b) neither read nor written.
"""

from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

from .._ops import ops
from ..checks import can_call_directly
from ..library import call_op, define_op
from ..sm90 import explain_device, notice_torch_path
from . import gates

FORWARD = "gated_delta_gates_fwd"
BACKWARD = "gated_delta_gates_bwd"
SM90_FORWARD = "sm90_gated_delta_gates_fwd"
SM90_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def activate(
    a: Optional[Tensor],
    b: Optional[Tensor],
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    allow_neg_eigval: bool,
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """g and beta [B, T, HV] in float32 (float64 for float64 inputs); None for what is None."""
    unsupported = explain_unsupported(a, b, A_log, dt_bias)
    if unsupported is None:
        arguments = (a, b, A_log, dt_bias)
        call = gated_delta_gates_fwd if can_call_directly(*arguments) else ops.gated_delta_gates_fwd
        g, beta = call(*arguments, 2.0 if allow_neg_eigval else 1.0)
        return None if a is None else g, None if b is None else beta
    if (b if a is None else a).is_cuda:
        notice_torch_path("the activation of the gates", unsupported)
    return (
        None if a is None else gates.log_decay(a, A_log, dt_bias),
        None if b is None else gates.writing_strength(b, allow_neg_eigval),
    )


def explain_unsupported(
    a: Optional[Tensor], b: Optional[Tensor], A_log: Optional[Tensor], dt_bias: Optional[Tensor]
) -> Optional[str]:
    """Say why these gates are activated on the PyTorch path; None if an SM90 kernel does it."""
    return next(_reasons(a, b, A_log, dt_bias), None)


def _reasons(a, b, A_log, dt_bias) -> Iterator[str]:
    first = b if a is None else a
    reason = explain_device(first, SM90_FORWARD)
    if reason is not None:
        yield reason
    if first.dtype not in SM90_DTYPES:
        yield f"the gates have dtype {first.dtype}, and the SM90 kernels take bfloat16, float16 and float32"
    if b is not None and b.dtype != first.dtype:
        yield f"g has dtype {first.dtype} and beta {b.dtype}, and the SM90 kernels take the same"
    for name, parameter in (("A_log", A_log), ("dt_bias", dt_bias)):
        if parameter is not None and parameter.dtype not in (first.dtype, torch.float32):
            yield f"{name} has dtype {parameter.dtype}, and the SM90 kernels take that of the gates or float32"


def gated_delta_gates_fwd(
    a: Optional[Tensor], b: Optional[Tensor], A_log: Optional[Tensor], dt_bias: Optional[Tensor], strength: float
) -> Tuple[Tensor, Tensor]:
    """g and beta in float32, contiguous; empty for what is None."""
    return call_op(
        ops.sm90_gated_delta_gates_fwd, _one_run(a), _one_run(b), _one_run(A_log), _one_run(dt_bias), strength
    )


def gated_delta_gates_bwd(
    dg: Optional[Tensor],
    dbeta: Optional[Tensor],
    a: Optional[Tensor],
    b: Optional[Tensor],
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    strength: float,
) -> Tuple[Tensor, Tensor, Tensor]:
    """da and db in their dtypes, and the gradients of A_log and dt_bias as the rows of a float32 [2, HV]."""
    tensors = (_one_run(x) for x in (dg, dbeta, a, b, A_log, dt_bias))
    return call_op(ops.sm90_gated_delta_gates_bwd, *tensors, strength)


def _one_run(x: Optional[Tensor]) -> Optional[Tensor]:
    """x [B, T, HV] itself if the batch is one run of tokens, as in a part of a projection; else a copy."""
    if x is None or x.dim() == 1:
        return x if x is None else x.contiguous()
    batch, tokens, _ = x.shape
    return x if batch == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1) else x.contiguous()


def _activated(x: Optional[Tensor], like: Tensor) -> Tensor:
    return like.new_empty([0] if x is None else x.shape, dtype=torch.float32)


def _forward_fake(a, b, A_log, dt_bias, strength):
    like = b if a is None else a
    return _activated(a, like), _activated(b, like)


def _backward_fake(dg, dbeta, a, b, A_log, dt_bias, strength):
    like = b if a is None else a
    da, db = (like.new_empty([0] if x is None else x.shape) for x in (a, b))
    return da, db, like.new_empty([2, like.shape[-1]], dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    *tensors, strength = inputs
    ctx.save_for_backward(*tensors)
    ctx.strength = strength
    ctx.set_materialize_grads(False)


def _backward(ctx, dg: Optional[Tensor], dbeta: Optional[Tensor]):
    a, b, A_log, dt_bias = ctx.saved_tensors
    if dg is None or a is None:
        dg = a = A_log = dt_bias = None
    if dbeta is None or b is None:
        dbeta = b = None
    if a is None and b is None:
        return None, None, None, None, None
    da, db, sums = ops.gated_delta_gates_bwd(dg, dbeta, a, b, A_log, dt_bias, ctx.strength)
    parameters = (
        None if parameter is None else row.to(parameter.dtype)
        for parameter, row in zip((A_log, dt_bias), sums.unbind())
    )
    return None if a is None else da, None if b is None else db, *parameters, None


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "the gates of chunk_gated_delta_rule have no second derivative on the SM90 kernels; take it once, "
        "or activate them outside with PyTorch and pass g and beta."
    )


def define() -> bool:
    """Define both ops with shapes and autograd unless another copy of this build has; True if they were new."""
    if hasattr(ops, FORWARD):
        return False
    define_op(FORWARD, gated_delta_gates_fwd, _forward_fake, backward=_backward, setup_context=_setup_context)
    define_op(BACKWARD, gated_delta_gates_bwd, _backward_fake, backward=_refuse_double_backward)
    return True


define()
