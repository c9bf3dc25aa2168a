"""Autograd of the forward op: what is kept for the backward, and the gradients in the order of its arguments.

Also the two ops as they are, for callers that keep the residuals themselves.
"""

from typing import Optional

import torch
from torch import Tensor

from . import ops


def forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, chunk_size):
    """o and final state, differentiable; residuals are kept only if a gradient can be asked for."""
    inputs = (q, k, v, g, beta, initial_state)
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    o, final_state, _ = ops.ops.gated_delta_rule_fwd(
        *inputs, cu_seqlens, scale, use_qk_l2norm, chunk_size, differentiable
    )
    return o, final_state


@torch.no_grad()
def forward_alone(*arguments):
    """o, final state and residuals, not recorded by autograd; arguments as in `forward`."""
    return ops.ops.gated_delta_rule_fwd(*arguments, True)


@torch.no_grad()
def backward_alone(*arguments):
    """Gradients of q, k, v, g, beta and the initial state; arguments as in the op `gated_delta_rule_bwd`."""
    return ops.ops.gated_delta_rule_bwd(*arguments)


def _setup_context(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, chunk_size, _ = inputs
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, output[2])
    ctx.options = (scale, use_qk_l2norm, chunk_size)
    ctx.set_materialize_grads(False)


def _backward(ctx, do: Optional[Tensor], dht: Optional[Tensor], _):
    q, k, v, g, beta, initial_state, cu_seqlens, residuals = ctx.saved_tensors
    *grads, dh0 = ops.ops.gated_delta_rule_bwd(
        q, k, v, g, beta, initial_state, cu_seqlens, residuals, do, dht, *ctx.options
    )
    dh0 = None if initial_state is None else dh0.to(initial_state.dtype)
    return (*grads, dh0, None, None, None, None, None)


ops.define(_setup_context, _backward)
