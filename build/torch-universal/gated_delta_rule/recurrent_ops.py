"""The recurrence token by token on SM90, for generation, as torch.library ops. The PyTorch path is the chunk form's.

Inference alone: where a gradient is wanted, `chunk_gated_delta_rule` computes the same. Defined once per process even if two
copies of this build are loaded.
"""

from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

from .._ops import ops
from ..checks import can_call_directly, check_cu_seqlens_values
from ..library import BASE_ALIGNMENT, aligned, call_op, define_op, narrow_indices
from ..sm90 import explain_device

FORWARD = "fused_recurrent_fwd"
UPDATE = "fused_recurrent_update"
SM90_FORWARD = "sm90_fused_recurrent_fwd"
SM90_HEAD_DIM = 128
SM90_DTYPES = (torch.bfloat16, torch.float16)
ROW_ALIGNMENT = 8  # elements of 16 bits in the 16 bytes of a load
SM90_STATE_DTYPES = (torch.float32, torch.bfloat16)

# Tokens of a sequence up to which one launch, token by token, beats the chunk form's launches
# (docs/design/2026-11-29-around-the-recurrence.md).
FEW_TOKENS = 16


def explain_unsupported(
    tensors: Tuple[Tensor, Tensor, Tensor],
    gates: Tuple[Optional[Tensor], ...],
    states: Optional[Tensor],
    sequences: int,
    in_place: bool,
) -> Optional[str]:
    """Say why the call is not served token by token on SM90; None if it is.

    Args:
        tensors: q, k and v.
        gates: g, beta, A_log and dt_bias.
        states: initial states, or the pool whose states are updated in place.
    """
    return next(_reasons(tensors, gates, states, sequences, in_place), None)


def _reasons(tensors, gates, states, sequences, in_place) -> Iterator[str]:
    q, _, v = tensors
    reason = explain_device(q, SM90_FORWARD)
    if reason is not None:
        yield reason
    if q.dtype not in SM90_DTYPES:
        yield f"q has dtype {q.dtype}, and the SM90 kernels take bfloat16 and float16"
    for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if size != SM90_HEAD_DIM:
            yield f"{name} is {size}, and the SM90 kernels take head size {SM90_HEAD_DIM}"
    if v.shape[2] == 0:
        yield "there are no value heads, and the SM90 kernels take at least one"
    for name, x in zip(("g", "beta", "A_log", "dt_bias"), gates):
        if x is not None and x.dtype not in (q.dtype, torch.float32):
            yield f"{name} has dtype {x.dtype}, and the SM90 kernels take that of q or float32"
    if in_place and states.dtype not in SM90_STATE_DTYPES:
        yield f"the states have dtype {states.dtype}, and the SM90 kernels update float32 and bfloat16"
    if in_place and not states.is_contiguous():
        yield "the states are not contiguous, and the SM90 kernels update them in place"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, *gates, states)):
        yield "a gradient may be asked for, and the SM90 kernel is for inference"
    if not in_place and q.shape[0] * q.shape[1] > FEW_TOKENS * max(sequences, 1):
        yield f"sequences have more than {FEW_TOKENS} tokens, for which the chunk form is faster"


def fused_recurrent_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: float,
    strength: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
    output_final_state: bool,
) -> Tuple[Tensor, Tensor]:
    """o [B, T, HV, 128] and the final states float32, in the layout of the initial ones; none if not asked for.

    Args:
        g: raw if A_log is given, else the log decay.
        strength: factor of sigmoid(beta); 0 takes beta as it is.
    """
    tensors = _token_inputs(q, k, v, g, beta, A_log, dt_bias)
    options = (scale, strength, use_qk_l2norm, state_v_first, output_final_state)
    states = aligned(initial_state)
    return call_op(ops.sm90_fused_recurrent_fwd, *tensors, states, _contiguous(cu_seqlens, q.shape[1]), *options)


def fused_recurrent_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    states: Tensor,
    state_indices: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: float,
    strength: float,
    use_qk_l2norm: bool,
    state_v_first: bool,
) -> Tensor:
    """o [B, T, HV, 128]; moves the states of the pool on where they lie, of sequence n the nth if there are no indices."""
    tensors = _token_inputs(q, k, v, g, beta, A_log, dt_bias)
    bounds, options = _contiguous(cu_seqlens, q.shape[1]), (scale, strength, use_qk_l2norm, state_v_first)
    indices = narrow_indices(state_indices, states.shape[0])
    pool = aligned(states)
    o = call_op(ops.sm90_fused_recurrent_update, *tensors, pool, indices, bounds, *options)
    if pool is not states:
        states.copy_(pool)
    torch.autograd.graph.increment_version(states)
    return o


def forward(*arguments):
    """The first op, or what it calls where nobody watches: its dispatch costs more than the kernel."""
    call = fused_recurrent_fwd if can_call_directly(*arguments[:9]) else ops.fused_recurrent_fwd
    return call(*arguments)


def update(*arguments):
    """The second op, or what it calls where nobody watches."""
    call = fused_recurrent_update if can_call_directly(*arguments[:10]) else ops.fused_recurrent_update
    return call(*arguments)


def _token_inputs(q, k, v, g, beta, A_log, dt_bias) -> tuple:
    parameters = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
    return (*(_rows(x) for x in (q, k, v)), _table(g), _table(beta), *parameters)


def _rows(x: Tensor) -> Tensor:
    """x [B, T, H, D] itself if its rows lie at 16-byte addresses and the batch is one run of tokens; else a copy."""
    batch, tokens, heads, _ = x.shape
    batch_stride, token_stride, head_stride, stride = x.stride()
    if (
        stride == 1
        and (heads == 1 or head_stride % ROW_ALIGNMENT == 0)
        and (tokens == 1 or token_stride % ROW_ALIGNMENT == 0)
        and (batch == 1 or batch_stride == tokens * token_stride or (tokens == 1 and batch_stride % ROW_ALIGNMENT == 0))
        and x.data_ptr() % BASE_ALIGNMENT == 0
    ):
        return x
    return aligned(x)


def _table(x: Tensor) -> Tensor:
    """x [B, T, HV] itself if heads lie side by side and the batch is one run of tokens; else a copy."""
    batch, tokens, heads = x.shape
    side_by_side = x.stride(2) == 1 or heads == 1
    return x if side_by_side and (batch == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1)) else x.contiguous()


def _contiguous(cu_seqlens: Optional[Tensor], tokens: int) -> Optional[Tensor]:
    if cu_seqlens is None:
        return None
    check_cu_seqlens_values(cu_seqlens, tokens)
    return cu_seqlens.contiguous()


def _forward_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = [sequences if options[-1] else 0, v.shape[2], q.shape[3], v.shape[3]]
    return v.new_empty(v.shape), q.new_empty(shape, dtype=torch.float32)


def _update_fake(q, k, v, *others):
    return v.new_empty(v.shape)


def define() -> bool:
    """Define both ops with shapes unless another copy of this build has; True if they were new."""
    if hasattr(ops, FORWARD):
        return False
    define_op(FORWARD, fused_recurrent_fwd, _forward_fake)
    define_op(UPDATE, fused_recurrent_update, _update_fake, mutates_args=("states",))
    return True


define()
