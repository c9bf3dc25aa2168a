"""Rules that the operators share: what is a tensor, where it lies, and how sequences are packed.

Each error is one sentence with the argument, the rule, the value and the way out.
"""

import os
from typing import Optional

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.nn import Parameter

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Looking at the values of a CUDA tensor waits for the GPU and breaks graph capture, so on CUDA it is done on request only.
CHECK_CU_SEQLENS = "FLASHQLA_CHECK_CU_SEQLENS"


# Types whose operations PyTorch alone carries out; every other subclass may want to see them.
PLAIN_TYPES = (Tensor, Parameter)
_PLAIN_OR_LEFT_OUT = frozenset((*PLAIN_TYPES, type(None)))


def is_eager(*tensors: Optional[Tensor]) -> bool:
    """Whether none but autograd has to see a call: nothing traces, watches or transforms it, and every tensor is a plain one.

    None stands for an argument that is left out.
    """
    return not (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or maybe_current_level() is not None
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    ) and _PLAIN_OR_LEFT_OUT.issuperset(map(type, tensors))


def wants_gradient(*tensors: Optional[Tensor]) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def can_call_directly(*tensors: Optional[Tensor]) -> bool:
    """Whether a compiled op may be called as it is, without the op around it that autograd and tracers know.

    True if the call is eager and no gradient is wanted. It costs about a microsecond and saves the wrapping op, about 25.
    """
    return is_eager(*tensors) and not wants_gradient(*tensors)


def check_floating(name: str, x: Tensor) -> None:
    """Raise TypeError unless x is a tensor of a dtype that the operators compute with."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; it must be a tensor: convert it with torch.as_tensor.")
    if x.dtype not in FLOATING:
        raise TypeError(
            f"{name} has dtype {x.dtype}; it must be bfloat16, float16, float32 or float64: pass {name}.float()."
        )


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both tensors share a device."""
    if x.device != other.device:
        raise ValueError(
            f"{name} is on {x.device} and {other_name} on {other.device}; all inputs must share a device: "
            f"pass {name}.to({other_name}.device)."
        )


def check_written(name: str, state: Tensor) -> None:
    """Raise ValueError unless each element of a state that is updated in place has an address of its own."""
    if 0 in state.stride() and any(size > 1 and stride == 0 for size, stride in zip(state.shape, state.stride())):
        raise ValueError(
            f"{name} has strides {list(state.stride())}; it is updated in place and must not repeat memory: pass {name}.clone()."
        )


def check_cu_seqlens(cu_seqlens: Tensor, name: str, row: Tensor, flattened: str) -> None:
    """Raise unless the bounds have the type, shape and device of a row packed in `row`, the argument `name`."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(
            f"cu_seqlens is {kind}; it must be an int32 or int64 tensor: pass torch.tensor(bounds, device={name}.device)."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [N + 1], the bounds of N sequences: "
            "pass lengths.cumsum(0) with a 0 in front."
        )
    if row.shape[0] != 1:
        raise ValueError(
            f"{name} has batch size {row.shape[0]} with cu_seqlens; packed sequences lie in one row: "
            f"pass tensors flattened to {flattened}, or leave cu_seqlens out."
        )
    check_device("cu_seqlens", cu_seqlens, name, row)


def check_cu_seqlens_values(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless cu_seqlens starts at 0, never decreases and ends within the row."""
    if not cu_seqlens.is_cpu and os.environ.get(CHECK_CU_SEQLENS, "0") != "1":
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
