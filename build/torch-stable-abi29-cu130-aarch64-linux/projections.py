"""The projections of a layer's input, together: what autograd would add up in passes of its own, their products add up.

    y_i = x W_i^T                     dx = sum_i dy_i W_i,  dW_i = dy_i^T x

Modules that are anything but a plain linear layer are called as modules, so that adapters, quantised weights, shards and hooks
count. Of many tokens, narrow projections, such as those of the gates, come from one product with their weights side by side. Of a
few tokens in inference, all come from one launch of an SM90 kernel, which reads each weight once.
"""

from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ._ops import ops
from .checks import PLAIN_TYPES, can_call_directly, is_eager
from .library import aligned, call_op, define_op
from .sm90 import explain_device

MANY_TOKENS = 64  # below, a copy of narrow weights costs more than a second product
NARROW = 256  # outputs of a projection whose time is that of reading x
SM90_PRODUCTS = "sm90_token_products"
SM90_DTYPES = (torch.bfloat16, torch.float16)
SM90_TOKENS, SM90_MATRICES, SM90_COLUMNS = 4, 4, 512  # at most, at most, and in multiples of


def project(x: Tensor, modules: Sequence[nn.Module]) -> Tuple[Tensor, ...]:
    """Output [..., outputs_i] of each module for x [..., hidden]."""
    if not all(_is_plain(module, x) for module in modules) or _has_any_global_hook():
        return tuple(module(x) for module in modules)
    weights = [module.weight for module in modules]
    if _fit_one_launch(x, weights):
        if can_call_directly(x, *weights):
            return _in_one_launch(token_products, x, weights)
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return _in_one_launch(ops.token_products, x, weights)
    if not _pay_together(x, weights):
        return tuple(module(x) for module in modules)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights)):
        return _Projections.apply(x, *weights)
    return _products(x, weights)


def _fit_one_launch(x: Tensor, weights: Sequence[Tensor]) -> bool:
    return (
        x.dtype in SM90_DTYPES
        and x.shape[-1] % SM90_COLUMNS == 0
        and len(weights) <= SM90_MATRICES
        and x.numel() <= SM90_TOKENS * x.shape[-1]
        and all(weight.is_contiguous() for weight in weights)
        and explain_device(x, SM90_PRODUCTS) is None
        and not torch.is_autocast_enabled(x.device.type)
    )


def _in_one_launch(op, x: Tensor, weights: Sequence[Tensor]) -> Tuple[Tensor, ...]:
    return op(x, *weights, *[None] * (SM90_MATRICES - len(weights)))[: len(weights)]


def _pay_together(x: Tensor, weights: Sequence[Tensor]) -> bool:
    return (
        len(weights) > 1
        and is_eager(x, *weights)
        and x.numel() > MANY_TOKENS * x.shape[-1]
        and not x.is_meta  # of which autocast does not know
        and not torch.is_autocast_enabled(x.device.type)
    )


def _is_plain(module: nn.Module, x: Tensor) -> bool:
    if type(module) is not nn.Linear or module.bias is not None:
        return False
    weight = module.weight
    return (
        type(weight) in PLAIN_TYPES
        and weight.dtype == x.dtype
        and weight.device == x.device
        and tuple(weight.shape[1:]) == (x.shape[-1],)  # not what sharding leaves of it
        and "forward" not in vars(module)
        and not (
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        )
    )


def _products(x: Tensor, weights: Sequence[Tensor]) -> Tuple[Tensor, ...]:
    """x W_i^T, those of the narrow weights from one product."""
    narrow = [weight for weight in weights if weight.shape[0] <= NARROW]
    if len(narrow) < 2:
        return tuple(F.linear(x, weight) for weight in weights)
    together = F.linear(x, torch.cat(narrow)).split([weight.shape[0] for weight in narrow], dim=-1)
    parts = iter(together)
    return tuple(next(parts) if weight.shape[0] <= NARROW else F.linear(x, weight) for weight in weights)


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, *weights)
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return _products(x, weights)

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        with torch.autocast(weights[0].device.type, enabled=False):  # in the dtype of the forward
            dx, dweights = _gradients(x, weights, grads, ctx.needs_input_grad)
        return None if dx is None else dx.view(ctx.shape), *dweights


def _gradients(x: Optional[Tensor], weights: Sequence[Tensor], grads, needs) -> Tuple[Optional[Tensor], list]:
    """dx [tokens, hidden] and the gradient of each weight, None where not needed; x may be None if no weight's is."""
    needs_dx, *needs = needs
    rows = None if x is None else x.flatten(0, -2)
    dx: Optional[Tensor] = None
    dweights: list = [None] * len(weights)
    for members in _groups(weights, grads):
        dy = _beside([grads[i].flatten(0, -2) for i in members], dim=1)
        weight = _beside([weights[i] for i in members], dim=0)
        if needs_dx:
            dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
        if any(needs[i] for i in members):
            parts = (dy.t() @ rows).split([weights[i].shape[0] for i in members])
            for i, part in zip(members, parts):
                dweights[i] = part if needs[i] else None
    return dx, dweights


def _groups(weights: Sequence[Tensor], grads: Sequence[Optional[Tensor]]) -> list:
    """Numbers of the projections that have a gradient, in groups of one product each: narrow ones together, wide ones alone.

    The largest is last, so that what is rounded between the products is small beside the sum.
    """
    known = [i for i, grad in enumerate(grads) if grad is not None]
    narrow = [i for i in known if weights[i].shape[0] <= NARROW]
    wide = sorted((i for i in known if weights[i].shape[0] > NARROW), key=lambda i: weights[i].shape[0])
    return ([narrow] if narrow else []) + [[i] for i in wide]


def _beside(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=dim)


def token_products(
    x: Tensor, w0: Tensor, w1: Optional[Tensor], w2: Optional[Tensor], w3: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """x W_i^T of at most `SM90_TOKENS` rows of x, for inference; no columns where there is no weight."""
    return call_op(getattr(ops, SM90_PRODUCTS), *(aligned(tensor) for tensor in (x, w0, w1, w2, w3)))


def _token_products_fake(x, *weights):
    return tuple(x.new_empty([*x.shape[:-1], 0 if weight is None else weight.shape[0]]) for weight in weights)


def define() -> bool:
    """Define the op unless another copy of this build has; True if it was new."""
    if hasattr(ops, "token_products"):
        return False
    define_op("token_products", token_products, _token_products_fake)
    return True


define()
