"""Autograd of the convolution's forward op: the inputs are kept, and the backward computes the rest again."""

from typing import Optional

import torch
from torch import Tensor

from . import ops


def _setup_context(ctx, inputs, output):
    *tensors, silu, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.silu = silu
    ctx.set_materialize_grads(False)


def _backward(ctx, dy: Optional[Tensor], dfinal_states: Optional[Tensor]):
    x, weight, bias, sequence, initial_states = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x.transpose(1, 2))
    if dfinal_states is not None:
        dfinal_states = dfinal_states.to(x.dtype) if dfinal_states.numel() else None
    dx, dweight, dbias, dinitial = ops.ops.causal_conv1d_bwd(
        x, dy, weight, bias, sequence, initial_states, dfinal_states, ctx.silu
    )
    return (
        dx.transpose(1, 2),
        dweight,
        None if bias is None else dbias,
        None,
        None if initial_states is None else dinitial,
        None,
        None,
    )


def _setup_parts(ctx, inputs, output):
    *tensors, _, silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.silu = silu


def _backward_of_parts(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
    x, weight, bias, sequence = ctx.saved_tensors
    dx, dweight, dbias = ops.ops.causal_conv1d_parts_bwd(x, dq, dk, dv, weight, bias, sequence, ctx.silu)
    return dx.transpose(1, 2), dweight, None if bias is None else dbias, None, None, None


ops.define(_setup_context, _backward, _setup_parts, _backward_of_parts)

forward = ops.forward
forward_parts = ops.ops.causal_conv1d_parts_fwd
update = ops.update
