"""The torch.library ops of the gated norm on SM90: opaque to torch.compile, with shapes for tracing.

Elsewhere PyTorch's own operations make up the norm (torch_path.py), and PyTorch differentiates them. Defined once per
process even if two copies of this build are loaded, as those of the recurrence are.
"""

from typing import Tuple

from torch import Tensor

from .._ops import ops
from ..checks import can_call_directly
from ..library import define_op
from . import sm90_path

FORWARD = "rms_norm_gated_fwd"
BACKWARD = "rms_norm_gated_bwd"


def rms_norm_gated_fwd(x: Tensor, g: Tensor, weight: Tensor, eps: float, is_silu: bool) -> Tensor:
    """y in the shape of x, contiguous."""
    return sm90_path.forward(x, g, weight, eps, is_silu)


def rms_norm_gated_bwd(
    dy: Tensor, x: Tensor, g: Tensor, weight: Tensor, eps: float, is_silu: bool
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, g and the weight, contiguous."""
    return sm90_path.backward(dy, x, g, weight, eps, is_silu)


def forward(x: Tensor, g: Tensor, weight: Tensor, eps: float, is_silu: bool) -> Tensor:
    """The forward op, or what it calls where nobody differentiates or watches: its dispatch costs more than the kernel."""
    call = sm90_path.forward if can_call_directly(x, g, weight) else ops.rms_norm_gated_fwd
    return call(x, g, weight, eps, is_silu)


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _forward_fake(x, g, weight, eps, is_silu):
    return _contiguous(x)


def _backward_fake(dy, x, g, weight, eps, is_silu):
    return _contiguous(x), _contiguous(g), _contiguous(weight)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "rms_norm_gated has no second derivative on the SM90 kernels; take it once, or pass float32 tensors, "
        "which PyTorch norms and differentiates."
    )


def define(setup_context, backward) -> bool:
    """Define both ops with shapes and autograd unless another copy of this build has; True if they were new."""
    if hasattr(ops, FORWARD):
        return False
    define_op(FORWARD, rms_norm_gated_fwd, _forward_fake, backward=backward, setup_context=setup_context)
    define_op(BACKWARD, rms_norm_gated_bwd, _backward_fake, backward=_refuse_double_backward)
    return True
