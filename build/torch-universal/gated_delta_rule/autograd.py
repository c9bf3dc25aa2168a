"""Autograd of the forward op: what is kept for the backward, and the gradients in the order of its arguments.

Also the two ops as they are, for callers that keep the residuals themselves.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from ..checks import can_call_directly, is_eager, wants_gradient
from . import ops

CHECKED, UNCHECKED = True, False  # whether the arguments are known to keep their rules


class _Refused(Exception):
    """The op failed on arguments that nobody has checked."""


def forward_directly(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    scale,
    use_qk_l2norm,
    chunk_size,
    state_v_first,
    output_final_state,
    plan,
) -> Optional[Tuple[Tensor, Optional[Tensor]]]:
    """What `forward` returns, by the compiled op with at most our own autograd around it; None for whatever it does not take.

    The arguments may be anything: their rules are checked after a failure, which names the one that was broken.
    """
    inputs = (q, k, v, g, beta, initial_state)
    if not is_eager(*inputs, cu_seqlens):
        return None
    try:
        if not wants_gradient(*inputs):
            return ops.forward_directly(
                *inputs, cu_seqlens, scale, use_qk_l2norm, state_v_first, output_final_state, plan
            )
        if not ops.is_compiled(q, k, v, g, beta):
            return None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        state = state_k_first(initial_state, state_v_first)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the caller goes the checked way, where the same error is raised again if no rule explains it
        return None
    try:
        options = (cu_seqlens, scale, use_qk_l2norm, chunk_size, plan, UNCHECKED)
        o, final_state = _Forward.apply(q, k, v, g, beta, state, options)
    except _Refused:  # nothing else: hooks of saved tensors may raise what others wait for
        return None
    return o, public_state(final_state, output_final_state, state_v_first)


def forward(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    scale,
    use_qk_l2norm,
    chunk_size,
    state_v_first,
    output_final_state,
    plan,
):
    """o, differentiable, and the final state in the layout of the initial one, None unless asked for.

    Residuals are kept only if a gradient can be asked for.
    """
    inputs = (q, k, v, g, beta, state_k_first(initial_state, state_v_first))
    differentiable = wants_gradient(*inputs)
    options = (cu_seqlens, scale, use_qk_l2norm, chunk_size)
    if differentiable and is_eager(*inputs, cu_seqlens):
        o, final_state = _Forward.apply(*inputs, (*options, plan, CHECKED))
    else:
        o, final_state, _ = ops.ops.gated_delta_rule_fwd(*inputs, *options, differentiable, plan)
    return o, public_state(final_state, output_final_state, state_v_first)


def state_k_first(state: Optional[Tensor], state_v_first: bool) -> Optional[Tensor]:
    """A state as the ops take it, [N, HV, K, V]."""
    return state.mT if state_v_first and state is not None else state


def public_state(state: Tensor, wanted: bool, state_v_first: bool) -> Optional[Tensor]:
    """A state of the ops as the caller asked for it."""
    if not wanted:
        return None
    return state.mT.contiguous() if state_v_first else state


@torch.no_grad()
def forward_alone(*arguments, plan):
    """o, final state and residuals, not recorded by autograd; arguments as in `forward`."""
    call = ops.gated_delta_rule_fwd if can_call_directly(*arguments[:7]) else ops.ops.gated_delta_rule_fwd
    return call(*arguments, True, plan)


@torch.no_grad()
def backward_alone(*arguments):
    """Gradients of q, k, v, g, beta and the initial state; arguments as in the op `gated_delta_rule_bwd`."""
    return _gradients(*arguments)


def _gradients(*arguments):
    """The backward op, or what it calls where not even autograd looks.

    Several gradients at once (`is_grads_batched`, vectorised Jacobians) come in a tensor that only the dispatcher can take apart.
    """
    is_batched = any(x is not None and is_legacy_batchedtensor(x) for x in arguments[8:10])
    is_direct = not is_batched and can_call_directly(*arguments[:10])
    return (ops.gated_delta_rule_bwd if is_direct else ops.ops.gated_delta_rule_bwd)(*arguments)


def _setup_context(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, chunk_size, _, plan = inputs
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, output[2])
    ctx.options = (scale, use_qk_l2norm, chunk_size, plan)
    ctx.set_materialize_grads(False)


def _backward(ctx, do: Optional[Tensor], dht: Optional[Tensor], _):
    q, k, v, g, beta, initial_state, cu_seqlens, residuals = ctx.saved_tensors
    *grads, dh0 = _gradients(q, k, v, g, beta, initial_state, cu_seqlens, residuals, do, dht, *ctx.options)
    if initial_state is None:
        dh0 = None
    elif dh0.dtype != initial_state.dtype:
        dh0 = dh0.to(initial_state.dtype)
    return (*grads, dh0, *[None] * 6)


class _Forward(torch.autograd.Function):
    """The op with its formulas where only autograd looks: its dispatch costs more host time than this.

    What no gradient flows to comes as one argument, since each costs host time.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, options):
        cu_seqlens, scale, use_qk_l2norm, chunk_size, plan, is_checked = options
        inputs = (q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm, chunk_size, True, plan)
        try:
            output = ops.gated_delta_rule_fwd(*inputs)
        except Exception as error:
            if is_checked or isinstance(error, torch.OutOfMemoryError):
                raise
            raise _Refused from error
        _setup_context(ctx, inputs, output)
        return output[:2]

    @staticmethod
    def backward(ctx, do, dht):
        return (*_backward(ctx, do, dht, None)[:6], None)


ops.define(_setup_context, _backward)
