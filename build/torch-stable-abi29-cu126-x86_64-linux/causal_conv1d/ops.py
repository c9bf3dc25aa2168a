"""The torch.library ops of the convolution: opaque to torch.compile, with shapes for tracing. For SM90 alone; elsewhere
PyTorch's own operations make up the convolution (torch_path.py), and PyTorch differentiates them.

Defined once per process even if two copies of this build are loaded, as those of the recurrence are.
"""

from typing import List, Optional, Tuple

from torch import Tensor

from .._ops import ops
from ..checks import can_call_directly
from ..library import define_op
from . import sm90_path

FORWARD = "causal_conv1d_fwd"
BACKWARD = "causal_conv1d_bwd"
UPDATE = "causal_conv1d_update"
PARTS_FORWARD = "causal_conv1d_parts_fwd"
PARTS_BACKWARD = "causal_conv1d_parts_bwd"


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    sequence: Optional[Tensor],
    initial_states: Optional[Tensor],
    silu: bool,
    output_final_states: bool,
) -> Tuple[Tensor, Tensor]:
    """y [B, T, D] of x [B, D, T], and the final states [B, D, W - 1], or no rows of them if not asked for.

    `sequence` is int32 [B, T]; initial states have the dtype of x and exactly W - 1 tokens.
    """
    return sm90_path.forward(x, weight, bias, sequence, initial_states, silu, output_final_states)


def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    sequence: Optional[Tensor],
    initial_states: Optional[Tensor],
    dfinal_states: Optional[Tensor],
    silu: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [B, T, D], dweight, dbias and the gradient of the initial states in the dtypes of their inputs; empty for None."""
    return sm90_path.backward(x, (dy,), weight, bias, sequence, initial_states, dfinal_states, silu)


def causal_conv1d_parts_fwd(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], sequence: Optional[Tensor], sizes: List[int], silu: bool
) -> Tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D] as three tensors of so many channels, so that their gradients need not be put together."""
    parts, start = [], 0
    for size in sizes:
        own = slice(start, start + size)
        own_bias = None if bias is None else bias[own]
        parts.append(sm90_path.forward(x[:, own], weight[own], own_bias, sequence, None, silu, False)[0])
        start += size
    return tuple(parts)


def causal_conv1d_parts_bwd(
    x: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    sequence: Optional[Tensor],
    silu: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    """dx [B, T, D], dweight and dbias of the gradients of the three parts."""
    return sm90_path.backward(x, (dq, dk, dv), weight, bias, sequence, None, None, silu)[:3]


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    conv_state_indices: Optional[Tensor],
    silu: bool,
) -> Tensor:
    """y [B, T, D] of x [B, D, T]; moves the states on in place."""
    return sm90_path.update(x, conv_state, weight, bias, conv_state_indices, silu)


def forward(x, weight, bias, sequence, initial_states, silu, output_final_states) -> Tuple[Tensor, Tensor]:
    """The forward op, or what it calls where nobody differentiates or watches: its dispatch costs more than the kernel."""
    arguments = (x, weight, bias, sequence, initial_states)
    call = sm90_path.forward if can_call_directly(*arguments) else ops.causal_conv1d_fwd
    return call(*arguments, silu, output_final_states)


def update(x, conv_state, weight, bias, conv_state_indices, silu) -> Tensor:
    """The update op, or what it calls where nobody watches."""
    arguments = (x, conv_state, weight, bias, conv_state_indices)
    call = sm90_path.update if can_call_directly(*arguments) else ops.causal_conv1d_update
    return call(*arguments, silu)


def _token_major(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1])


def _states(x: Tensor, weight: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(x.shape[0] if wanted else 0, x.shape[1], weight.shape[1] - 1)


def _forward_fake(x, weight, bias, sequence, initial_states, silu, output_final_states):
    return _token_major(x), _states(x, weight, output_final_states)


def _backward_fake(x, dy, weight, bias, sequence, initial_states, dfinal_states, silu):
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return _token_major(x), weight.new_empty(weight.shape), dbias, _states(x, weight, initial_states is not None)


def _parts_forward_fake(x, weight, bias, sequence, sizes, silu):
    return tuple(x.new_empty(x.shape[0], x.shape[2], size) for size in sizes)


def _parts_backward_fake(x, dq, dk, dv, weight, bias, sequence, silu):
    return _backward_fake(x, None, weight, bias, sequence, None, None, silu)[:3]


def _update_fake(x, conv_state, weight, bias, conv_state_indices, silu):
    return _token_major(x)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "causal_conv1d_fn has no second derivative on the SM90 kernels; take it once, or pass float32 tensors, "
        "which PyTorch convolves and differentiates."
    )


def define(setup_context, backward, setup_parts, backward_of_parts) -> bool:
    """Define the ops with shapes and autograd unless another copy of this build has; True if they were new."""
    if hasattr(ops, FORWARD):
        return False
    define_op(FORWARD, causal_conv1d_fwd, _forward_fake, backward=backward, setup_context=setup_context)
    define_op(BACKWARD, causal_conv1d_bwd, _backward_fake, backward=_refuse_double_backward)
    define_op(
        PARTS_FORWARD,
        causal_conv1d_parts_fwd,
        _parts_forward_fake,
        backward=backward_of_parts,
        setup_context=setup_parts,
    )
    define_op(PARTS_BACKWARD, causal_conv1d_parts_bwd, _parts_backward_fake, backward=_refuse_double_backward)
    define_op(UPDATE, causal_conv1d_update, _update_fake, mutates_args=("conv_state",))
    return True
