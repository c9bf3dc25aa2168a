"""Rules of the short convolution, checked from shapes, dtypes and devices before any work."""

from typing import Optional

import torch
from torch import Tensor

ACTIVATIONS = (None, "silu", "swish")


def check_convolution(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: Optional[str]) -> None:
    """Raise ValueError or TypeError for inputs that no implementation takes."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}; it must be None, 'silu' or 'swish': apply others to the output."
        )
    if x.dim() != 3:
        raise ValueError(
            f"x has shape {list(x.shape)}; it must be [batch, channels, tokens]: transpose or unsqueeze it."
        )
    if weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; it must be [channels, width] with {x.shape[1]} channels: "
            "squeeze the middle dimension of a Conv1d weight."
        )
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise ValueError(f"bias has shape {list(bias.shape)}; it must be [{x.shape[1]}], one entry per channel.")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be floating: pass {name}.float().")
        if tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device} and x on {x.device}; all inputs must share a device: pass {name}.to(x.device)."
            )


def check_boundaries(x: Tensor, seq_idx, cu_seqlens, initial_states, return_final_states: bool) -> None:
    """Raise for packing arguments that contradict each other or the shape of x."""
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("seq_idx and cu_seqlens are both given; they say the same thing: pass one of them.")
    if seq_idx is not None and seq_idx.shape != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"seq_idx has shape {list(seq_idx.shape)}; it must be [batch, tokens] = {[x.shape[0], x.shape[2]]}."
        )
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}; it must be int32 or int64 [N + 1]."
            )
        if x.shape[0] != 1:
            raise ValueError(
                f"x has batch size {x.shape[0]} with cu_seqlens; packed sequences lie in one row: flatten the batch."
            )
    for name, boundary in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if boundary is None:
            continue
        if boundary.device != x.device:
            raise ValueError(f"{name} is on {boundary.device} and x on {x.device}; pass {name}.to(x.device).")
        if initial_states is not None or return_final_states:
            raise ValueError(
                f"{name} is given with initial or final states; a packed row starts every sequence from zeros: "
                "convolve the sequences one by one to carry states."
            )


def check_state(name: str, state: Tensor, x: Tensor, min_length: int) -> None:
    """Raise unless `state` is [batch, channels, >= min_length] beside x."""
    if state.dim() != 3 or state.shape[:2] != x.shape[:2] or state.shape[2] < min_length:
        raise ValueError(
            f"{name} has shape {list(state.shape)}; it must be [batch, channels, tokens] = "
            f"{[*x.shape[:2], min_length]} with at least {min_length} tokens."
        )
    if state.device != x.device:
        raise ValueError(f"{name} is on {state.device} and x on {x.device}; pass {name}.to(x.device).")
