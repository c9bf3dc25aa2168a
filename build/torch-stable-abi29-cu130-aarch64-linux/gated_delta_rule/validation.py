"""Rules that hold for every implementation, checked from shapes, dtypes and devices before any work.

Each error is one sentence with the argument, the rule, the value and the way out.
"""

from typing import Optional

import torch
from torch import Tensor

from ..checks import FLOATING, check_cu_seqlens, check_device, check_floating, check_written
from .plan import CHUNK_SIZES, PLANS


def check_flags(**flags) -> None:
    """Raise TypeError unless each is True or False: a tensor here is an argument in the place of another."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"{name} is {_kind(value)}; it must be True or False: pass the arguments behind initial_state by name."
            )


def check_plan(plan: str) -> None:
    """Raise ValueError unless the plan is one of PLANS."""
    if not isinstance(plan, str) or plan not in PLANS:
        raise ValueError(f"plan is {plan!r}; it must be one of {', '.join(map(repr, PLANS))}.")


def check_values(v: Tensor) -> None:
    """Raise unless v can say how many tokens and value heads there are."""
    check_floating("v", v)
    _check_dimensions("v", v)


def check_raw_gates(g, use_gate, beta, use_beta_sigmoid) -> None:
    """Raise ValueError if there is nothing to activate."""
    for name, x, option, wanted in (
        ("g", g, "use_gate_in_kernel", use_gate),
        ("beta", beta, "use_beta_sigmoid_in_kernel", use_beta_sigmoid),
    ):
        if x is None and wanted:
            raise ValueError(
                f"{name} is None with {option}=True; pass the raw values to activate, or leave {option} out."
            )


def check_inputs(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, state_v_first) -> None:
    """Raise ValueError or TypeError for inputs that no implementation takes."""
    if _are_sound(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, state_v_first):
        return
    _check_tensors(q=q, k=k, v=v, g=g, beta=beta)
    _check_heads(q, k, v)
    _check_gates(v, g=g, beta=beta)
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale is {_kind(scale)}; it must be a number or None: pass float(scale).")
    if not isinstance(chunk_size, int) or chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size is {chunk_size}; it must be 16, 32 or 64, and 64 suits every length.")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, "q", q, "[1, B * T, ...]")
    if initial_state is not None:
        _check_state("initial_state", q, v, initial_state, cu_seqlens, state_v_first)


def are_sound_options(scale, chunk_size) -> bool:
    """Whether they keep their rules; False for what only `check_inputs` can tell."""
    return (scale is None or type(scale) in (float, int)) and type(chunk_size) is int and chunk_size in CHUNK_SIZES


def _are_sound(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, state_v_first) -> bool:
    """The rules of `check_inputs` without their sentences, in one pass over the attributes, since every call pays for it.

    False sends the call to the rules one by one, which find the sentence. So this may be stricter than they are, as it
    is about the type of the numbers, and never laxer.
    """
    for x in (q, k, v, g, beta):
        if not isinstance(x, Tensor):
            return False
    q_shape, v_shape, dtype, device = q.shape, v.shape, v.dtype, v.device
    if len(q_shape) != 4 or len(v_shape) != 4 or k.shape != q_shape:
        return False
    batch, tokens, heads, dim_k = q_shape
    v_batch, v_tokens, v_heads, dim_v = v_shape
    gate_shape = (batch, tokens, v_heads)
    return (
        (v_batch == batch and v_tokens == tokens and dim_k > 0 and heads > 0 and v_heads % heads == 0)
        and (g.shape == gate_shape and beta.shape == gate_shape)
        and (dtype in FLOATING and q.dtype == dtype and k.dtype == dtype)
        and (g.dtype in FLOATING and beta.dtype in FLOATING)
        and (q.device == device and k.device == device and g.device == device and beta.device == device)
        and are_sound_options(scale, chunk_size)
        and (cu_seqlens is None or _are_sound_bounds(cu_seqlens, batch, device))
        and (
            initial_state is None
            or _is_sound_state(
                initial_state,
                batch if cu_seqlens is None else cu_seqlens.shape[0] - 1,
                (v_heads, dim_v, dim_k) if state_v_first else (v_heads, dim_k, dim_v),
                device,
            )
        )
    )


def _are_sound_bounds(cu_seqlens, batch: int, device) -> bool:
    return (
        isinstance(cu_seqlens, Tensor)
        and cu_seqlens.dtype in (torch.int32, torch.int64)
        and cu_seqlens.dim() == 1
        and cu_seqlens.shape[0] > 0
        and batch == 1
        and cu_seqlens.device == device
    )


def _is_sound_state(state, sequences: int, sizes: tuple, device) -> bool:
    return (
        isinstance(state, Tensor)
        and state.dtype in FLOATING
        and state.shape == (sequences, *sizes)
        and state.device == device
    )


def check_pool(q, v, states, state_indices, sequences: int, state_v_first: bool) -> None:
    """Raise unless `states` is a pool of states and `state_indices` names one for each sequence."""
    if states is None:
        raise ValueError("initial_state is None with state_indices; pass the pool of states that they point into.")
    if not isinstance(state_indices, Tensor) or state_indices.dtype not in (torch.int32, torch.int64):
        kind = state_indices.dtype if isinstance(state_indices, Tensor) else _kind(state_indices)
        raise TypeError(f"state_indices is {kind}; it must be an int32 or int64 tensor: pass it with .to(torch.int32).")
    if _shape(state_indices) != [sequences]:
        raise ValueError(
            f"state_indices has shape {_shape(state_indices)}; it must be [N] = [{sequences}], one entry per sequence: "
            "pass -1 for sequences to skip."
        )
    check_floating("initial_state", states)
    for name, x in (("initial_state", states), ("state_indices", state_indices)):
        check_device(name, x, "v", v)
    sizes = [v.shape[3], q.shape[3]] if state_v_first else [q.shape[3], v.shape[3]]
    if _shape(states)[1:] != [v.shape[2], *sizes]:
        layout = "[slots, HV, V, K]" if state_v_first else "[slots, HV, K, V]"
        raise ValueError(
            f"initial_state has shape {_shape(states)}; with state_indices it must be a pool {layout}, behind the first "
            f"axis {[v.shape[2], *sizes]}: check state_v_first."
        )


def check_in_place(states: Optional[Tensor]) -> None:
    """Raise unless there are states to update in place, each in memory of its own."""
    if states is None:
        raise ValueError(
            "inplace_final_state is True and initial_state is None; pass the states that are to be updated, zeros at first."
        )
    check_written("initial_state", states)


def check_no_gradient(name: str, *tensors: Optional[Tensor]) -> None:
    """Raise where autograd would have to follow an update in place."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            f"{name} is given and an input requires a gradient, but the states are updated in place: "
            f"call under torch.no_grad(), or leave {name} out."
        )


def check_gradients(q, v, residuals, do, dht, cu_seqlens, state_v_first) -> None:
    """Raise for gradients that do not fit the outputs they belong to, and for residuals that are no tensor."""
    check_floating("residuals", residuals)
    if do is not None:
        check_floating("do", do)
        check_device("do", do, "v", v)
        if do.shape != v.shape:
            raise ValueError(
                f"do has shape {_shape(do)}; it must be that of o, [B, T, HV, V] = {_shape(v)}: "
                "pass the gradient of the forward's o."
            )
    if dht is not None:
        _check_state("dht", q, v, dht, cu_seqlens, state_v_first)


def check_residuals(residuals: Tensor, expected: list) -> None:
    """Raise unless `residuals` has the shape that the forward of the same call would have kept, or is empty."""
    if _shape(residuals) not in (expected, [0]):
        raise ValueError(
            f"residuals has shape {_shape(residuals)}; the forward of this call keeps {expected}: "
            "pass what chunk_gated_delta_rule_fwd returned for the same inputs, chunk_size and plan."
        )


def check_gate_options(use_gate, A_log, dt_bias, use_beta_sigmoid, allow_neg_eigval, v) -> None:
    """Raise ValueError or TypeError for gate options that contradict each other or do not fit v's heads."""
    if use_gate and A_log is None:
        raise ValueError("A_log is None with use_gate_in_kernel=True; pass the layer's A_log of shape [HV].")
    for name, parameter in (("A_log", A_log), ("dt_bias", dt_bias)):
        if parameter is None:
            continue
        if not use_gate:
            raise ValueError(
                f"{name} is given but use_gate_in_kernel is False, so it would be ignored; "
                "pass use_gate_in_kernel=True with raw gate inputs, or leave it out."
            )
        check_floating(name, parameter)
        if tuple(parameter.shape) != (v.shape[2],):
            raise ValueError(
                f"{name} has shape {_shape(parameter)}; it must have one entry per value head, [{v.shape[2]}]: "
                "pass the parameter of the layer that made v."
            )
        check_device(name, parameter, "v", v)
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError(
            "allow_neg_eigval=True has an effect only with use_beta_sigmoid_in_kernel=True; "
            "set both, or pass a beta that already reaches 2."
        )


def _shape(x: Tensor) -> list:
    return list(x.shape)


def _kind(x) -> str:
    return type(x).__name__


def _check_dimensions(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(
            f"{name} has shape {_shape(x)}; it must have four dimensions, [batch, tokens, heads, head size]: "
            "transpose or unflatten it."
        )


def _check_tensors(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        check_floating(name, x)
    v = tensors["v"]
    for name, x in tensors.items():
        check_device(name, x, "v", v)
        if name in ("q", "k") and x.dtype != v.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype} and v {v.dtype}; q, k and v must agree: pass {name}.to(v.dtype)."
            )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_dimensions(name, x)
    if q.shape != k.shape:
        raise ValueError(
            f"k has shape {_shape(k)} and q {_shape(q)}; they must be equal, [B, T, H, K]: check how they were split."
        )
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"v has shape {_shape(v)} and q {_shape(q)}; batch and tokens must be equal: pass v as [B, T, HV, V]."
        )
    if q.shape[3] == 0:
        raise ValueError(
            f"q has shape {_shape(q)}; its last dimension, the key size, must be at least 1: check how it was split."
        )
    if q.shape[2] == 0 or v.shape[2] % q.shape[2] != 0:
        raise ValueError(
            f"v has {v.shape[2]} heads and q {q.shape[2]}; value heads must be a multiple of key heads, "
            "so that consecutive value heads share one: check the head split of the projection."
        )


def _check_gates(v: Tensor, **gates: Tensor) -> None:
    for name, x in gates.items():
        if x.shape != v.shape[:3]:
            raise ValueError(
                f"{name} has shape {_shape(x)}; it must be [B, T, HV] = {_shape(v)[:3]}, one entry per token and value head: "
                "transpose it, or repeat it for the value heads."
            )


def _check_state(name: str, q, v, state: Tensor, cu_seqlens: Optional[Tensor], state_v_first: bool) -> None:
    check_floating(name, state)
    check_device(name, state, "v", v)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = [v.shape[3], q.shape[3]] if state_v_first else [q.shape[3], v.shape[3]]
    expected = [sequences, v.shape[2], *sizes]
    if _shape(state) != expected:
        layout = "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]"
        raise ValueError(
            f"{name} has shape {_shape(state)}; it must be {layout} = {expected}, one state per sequence: "
            "check the number of sequences and state_v_first."
        )
