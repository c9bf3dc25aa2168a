"""A decoded token of the GatedDeltaNet layer, everything between its projections, as one launch on SM90.

Results have the bits of the operators one by one: convolution update, recurrence, gated norm. What is out of the ordinary is
left to those: other widths and head sizes, parameters of other dtypes, more than four value heads a key head, gradients,
hooks on the norm or a norm that is not ours.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ._ops import ops
from .checks import PLAIN_TYPES, can_call_directly
from .gated_norm.torch_path import ACTIVATIONS
from .library import aligned, call_op, define_op
from .sm90 import explain_device

STEP = "gated_delta_net_step"
SM90_STEP = "sm90_gated_delta_net_step"
SM90_DTYPES = (torch.bfloat16, torch.float16)
SM90_HEAD_DIM, SM90_WIDTH = 128, 4
SM90_HEADS_PER_KEY = 4  # at most: their blocks meet
SM90_SEQUENCES = 65535  # at most

norm_forward: Optional[Any] = None
"""The forward of a norm module that computes `rms_norm_gated` and nothing else; `layers` says which it is."""


def step(
    layer: nn.Module, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, conv: Tensor, states: Tensor
) -> Optional[Tensor]:
    """What the layer's last projection takes, [B, 1, HV * 128], with both states moved on in place; None if it is not served.

    Args:
        layer: Module of transformers, for its parameters and sizes.
        qkv, z, b, a: results of its projections for one token, [B, 1, ...].
        conv: [B, C, width], the last inputs of the convolution.
        states: [B, HV, K, V].
    """
    weight, norm = layer.conv1d.weight, layer.norm
    if torch.is_grad_enabled() or not (
        _is_plain_norm(norm)
        and _has_sizes(layer, qkv, z, a, conv, states)
        and _has_dtypes(layer, qkv, z, b, a, conv, states)
        and explain_device(qkv, SM90_STEP) is None
    ):
        return None
    tensors = (
        *(qkv, conv, weight.squeeze(1), layer.conv1d.bias),
        *(z, a, b, layer.A_log, layer.dt_bias, states, norm.weight),
    )
    if can_call_directly(*tensors):
        call = gated_delta_net_step
    elif torch.compiler.is_compiling() and all(type(x) in PLAIN_TYPES for x in tensors if x is not None):
        call = ops.gated_delta_net_step
    else:
        return None
    is_silu = getattr(norm, "activation", "silu") != "sigmoid"
    return call(*tensors, layer.activation is not None, float(norm.variance_epsilon), is_silu)


def _has_sizes(layer: nn.Module, qkv: Tensor, z: Tensor, a: Tensor, conv: Tensor, states: Tensor) -> bool:
    batch, _, channels = qkv.shape
    heads, weight, rate, bias = a.shape[2], layer.conv1d.weight, layer.A_log, layer.dt_bias
    key_heads = (channels // SM90_HEAD_DIM - heads) // 2
    return (
        layer.head_k_dim == layer.head_v_dim == SM90_HEAD_DIM
        and key_heads > 0
        and (2 * key_heads + heads) * SM90_HEAD_DIM == channels
        and heads % key_heads == 0
        and 0 < heads // key_heads <= SM90_HEADS_PER_KEY
        and batch <= SM90_SEQUENCES
        and z.shape[2] == heads * SM90_HEAD_DIM
        and tuple(rate.shape) == tuple(bias.shape) == (heads,)
        and tuple(weight.shape) == (channels, 1, SM90_WIDTH)
        and tuple(conv.shape) == (batch, channels, SM90_WIDTH)
        and tuple(states.shape) == (batch, heads, SM90_HEAD_DIM, SM90_HEAD_DIM)
        and conv.is_contiguous()
        and states.is_contiguous()
    )


def _has_dtypes(layer: nn.Module, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, conv: Tensor, states: Tensor) -> bool:
    dtype, bias = qkv.dtype, layer.conv1d.bias
    either = (dtype, torch.float32)
    return (
        dtype in SM90_DTYPES
        and z.dtype == b.dtype == a.dtype == conv.dtype == layer.conv1d.weight.dtype == dtype
        and (bias is None or bias.dtype == dtype)
        and states.dtype == torch.float32
        and layer.A_log.dtype in either
        and layer.dt_bias.dtype in either
        and layer.norm.weight.dtype in either
    )


def _is_plain_norm(norm: nn.Module) -> bool:
    """Whether calling the module is to call `rms_norm_gated` with its weight, of the right size."""
    forward = vars(norm).get("forward")
    return (
        forward is not None
        and norm_forward is not None
        and getattr(forward, "__func__", None) is norm_forward
        and tuple(norm.weight.shape) == (SM90_HEAD_DIM,)
        and getattr(norm, "activation", "silu") in ACTIVATIONS
        and not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)
        and not _has_any_global_hook()
    )


def gated_delta_net_step(
    qkv: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Optional[Tensor],
    z: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    norm_weight: Tensor,
    conv_silu: bool,
    eps: float,
    norm_silu: bool,
) -> Tensor:
    """y [B, 1, HV * 128] of one token a sequence; moves conv_state [B, C, 4] and states [B, HV, 128, 128] on in place."""
    history, pool = aligned(conv_state), aligned(states)
    y = call_op(
        ops.sm90_gated_delta_net_step,
        *(_columns(qkv), history, aligned(conv_weight), aligned(conv_bias), _columns(z), _columns(a), _columns(b)),
        *(aligned(A_log), aligned(dt_bias), pool, aligned(norm_weight)),
        *(conv_silu, eps, norm_silu),
    )
    for state, moved in ((conv_state, history), (states, pool)):
        if moved is not state:
            state.copy_(moved)
        torch.autograd.graph.increment_version(state)
    return y


def _columns(x: Tensor) -> Tensor:
    """x [B, 1, columns] itself if its columns lie side by side; else a copy."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _step_fake(qkv, conv_state, conv_weight, conv_bias, z, *others):
    return z.new_empty(z.shape)


def define() -> bool:
    """Define the op with shapes unless another copy of this build has; True if it was new."""
    if hasattr(ops, STEP):
        return False
    define_op(STEP, gated_delta_net_step, _step_fake, mutates_args=("conv_state", "states"))
    return True


define()
