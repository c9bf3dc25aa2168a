"""Rules that hold for every implementation, checked from shapes, dtypes and devices before any work.

Each error is one sentence with the argument, the rule, the value and the way out.
"""

import os
from typing import Optional

import torch
from torch import Tensor

from .plan import CHUNK_SIZES

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Looking at the values of a CUDA tensor waits for the GPU and breaks graph capture, so on CUDA it is done on request only.
CHECK_CU_SEQLENS = "FLASHQLA_CHECK_CU_SEQLENS"


def check_flags(**flags) -> None:
    """Raise TypeError unless each is True or False: a tensor here is an argument in the place of another."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"{name} is {_kind(value)}; it must be True or False: pass the arguments behind initial_state by name."
            )


def check_values(v: Tensor) -> None:
    """Raise unless v can say how many tokens and value heads there are."""
    _check_floating("v", v)
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
    _check_tensors(q=q, k=k, v=v, g=g, beta=beta)
    _check_heads(q, k, v)
    _check_gates(v, g=g, beta=beta)
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale is {_kind(scale)}; it must be a number or None: pass float(scale).")
    if not isinstance(chunk_size, int) or chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size is {chunk_size}; it must be 16, 32 or 64, and 64 suits every length.")
    if cu_seqlens is not None:
        _check_cu_seqlens(q, cu_seqlens)
    if initial_state is not None:
        _check_state("initial_state", q, v, initial_state, cu_seqlens, state_v_first)


def check_gradients(q, v, residuals, do, dht, cu_seqlens, state_v_first) -> None:
    """Raise for gradients that do not fit the outputs they belong to, and for residuals that are no tensor."""
    _check_floating("residuals", residuals)
    if do is not None:
        _check_floating("do", do)
        _check_device("do", do, v)
        if do.shape != v.shape:
            raise ValueError(
                f"do has shape {_shape(do)}; it must be that of o, [B, T, HV, V] = {_shape(v)}: "
                "pass the gradient of the forward's o."
            )
    if dht is not None:
        _check_state("dht", q, v, dht, cu_seqlens, state_v_first)


def check_residuals(residuals: Tensor, expected: list) -> None:
    """Raise unless `residuals` has the shape that the forward of the same call would have kept."""
    if _shape(residuals) != expected:
        raise ValueError(
            f"residuals has shape {_shape(residuals)}; the forward of this call keeps {expected}: "
            "pass what chunk_gated_delta_rule_fwd returned for the same inputs and chunk_size."
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
        _check_floating(name, parameter)
        if tuple(parameter.shape) != (v.shape[2],):
            raise ValueError(
                f"{name} has shape {_shape(parameter)}; it must have one entry per value head, [{v.shape[2]}]: "
                "pass the parameter of the layer that made v."
            )
        _check_device(name, parameter, v)
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError(
            "allow_neg_eigval=True has an effect only with use_beta_sigmoid_in_kernel=True; "
            "set both, or pass a beta that already reaches 2."
        )


def check_cu_seqlens_values(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless cu_seqlens starts at 0, never decreases and ends within the row."""
    if cu_seqlens.device.type != "cpu" and os.environ.get(CHECK_CU_SEQLENS, "0") != "1":
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts at {bounds[0]}; it must start at 0: prepend the first bound.")
    for n, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        if stop < start:
            raise ValueError(
                f"cu_seqlens decreases from {start} to {stop} at entry {n + 1}; it must hold cumulative lengths: "
                "pass lengths.cumsum(0) with a 0 in front."
            )
    if bounds[-1] > num_tokens:
        raise ValueError(
            f"cu_seqlens ends at {bounds[-1]} but the row has {num_tokens} tokens; "
            "its last entry must not exceed the row: pass the bounds of this row only."
        )


def _shape(x: Tensor) -> list:
    return list(x.shape)


def _kind(x) -> str:
    return type(x).__name__


def _check_floating(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {_kind(x)}; it must be a tensor: convert it with torch.as_tensor.")
    if x.dtype not in FLOATING:
        raise TypeError(
            f"{name} has dtype {x.dtype}; it must be bfloat16, float16, float32 or float64: pass {name}.float()."
        )


def _check_dimensions(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(
            f"{name} has shape {_shape(x)}; it must have four dimensions, [batch, tokens, heads, head size]: "
            "transpose or unflatten it."
        )


def _check_device(name: str, x: Tensor, v: Tensor) -> None:
    if x.device != v.device:
        raise ValueError(
            f"{name} is on {x.device} and v on {v.device}; all inputs must share a device: pass {name}.to(v.device)."
        )


def _check_tensors(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        _check_floating(name, x)
    v = tensors["v"]
    for name, x in tensors.items():
        _check_device(name, x, v)
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


def _check_cu_seqlens(q: Tensor, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else _kind(cu_seqlens)
        raise TypeError(
            f"cu_seqlens is {kind}; it must be an int32 or int64 tensor: pass torch.tensor(bounds, device=q.device)."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"cu_seqlens has shape {_shape(cu_seqlens)}; it must be [N + 1], the bounds of N sequences: "
            "pass lengths.cumsum(0) with a 0 in front."
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"q has batch size {q.shape[0]} with cu_seqlens; packed sequences lie in one row: "
            "pass tensors flattened to [1, B * T, ...], or leave cu_seqlens out."
        )
    _check_device("cu_seqlens", cu_seqlens, q)


def _check_state(name: str, q, v, state: Tensor, cu_seqlens: Optional[Tensor], state_v_first: bool) -> None:
    _check_floating(name, state)
    _check_device(name, state, v)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = [v.shape[3], q.shape[3]] if state_v_first else [q.shape[3], v.shape[3]]
    expected = [sequences, v.shape[2], *sizes]
    if _shape(state) != expected:
        layout = "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]"
        raise ValueError(
            f"{name} has shape {_shape(state)}; it must be {layout} = {expected}, one state per sequence: "
            "check the number of sequences and state_v_first."
        )
