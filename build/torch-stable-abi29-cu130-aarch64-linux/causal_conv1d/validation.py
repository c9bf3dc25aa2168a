"""Rules of the short convolution, checked from shapes, dtypes and devices before any work."""

from typing import Optional

import torch
from torch import Tensor

from ..checks import check_cu_seqlens, check_cu_seqlens_values, check_device, check_floating, check_written

ACTIVATIONS = (None, "silu", "swish")
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def check_convolution(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: Optional[str]) -> None:
    """Raise ValueError or TypeError for inputs that no implementation takes."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}; it must be None, 'silu' or 'swish': apply others to the output."
        )
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None or name != "bias":
            check_floating(name, tensor)
            check_device(name, tensor, "x", x)
    if x.dim() != 3:
        raise ValueError(
            f"x has shape {list(x.shape)}; it must be [batch, channels, tokens]: transpose or unsqueeze it."
        )
    if weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] == 0:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; it must be [channels, width] with {x.shape[1]} channels: "
            "squeeze the middle dimension of a Conv1d weight."
        )
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise ValueError(
            f"bias has shape {list(bias.shape)}; it must be [{x.shape[1]}], one entry per channel: check its layer."
        )


def check_boundaries(x: Tensor, seq_idx, cu_seqlens, initial_states, return_final_states: bool) -> None:
    """Raise for packing arguments that contradict each other or the shape of x."""
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError("seq_idx and cu_seqlens are both given; they say the same thing: pass one of them.")
    if seq_idx is not None:
        _check_seq_idx(x, seq_idx)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, "x", x, "[1, D, B * T]")
        if not torch.compiler.is_compiling():  # the recurrence behind the convolution looks at them when it runs
            check_cu_seqlens_values(cu_seqlens, x.shape[2])
    for name, boundary in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if boundary is not None and (initial_states is not None or return_final_states):
            raise ValueError(
                f"{name} is given with initial or final states; a packed row starts every sequence from zeros: "
                "convolve the sequences one by one to carry states."
            )


def check_state(name: str, state: Tensor, x: Tensor, tokens: int, exactly: bool = False) -> None:
    """Raise unless `state` is [batch, channels, tokens] beside x, with `tokens` tokens or (unless `exactly`) more."""
    check_floating(name, state)
    check_device(name, state, "x", x)
    length = state.shape[2] if state.dim() == 3 else -1
    if length < tokens or (exactly and length > tokens) or state.shape[:2] != x.shape[:2]:
        rule = "exactly" if exactly else "at least"
        raise ValueError(
            f"{name} has shape {list(state.shape)}; it must be [batch, channels, tokens] = {[*x.shape[:2], tokens]} with "
            f"{rule} {tokens} tokens: allocate it for this batch and width."
        )


def check_state_indices(x: Tensor, conv_state: Tensor, conv_state_indices: Optional[Tensor], width: int) -> None:
    """Raise unless `conv_state` has a row for each row of x, or `conv_state_indices` [batch] names one."""
    if conv_state_indices is None:
        check_state("conv_state", conv_state, x, width - 1)
        check_written("conv_state", conv_state)
        return
    if not isinstance(conv_state_indices, Tensor) or conv_state_indices.dtype not in (torch.int32, torch.int64):
        kind = conv_state_indices.dtype if isinstance(conv_state_indices, Tensor) else type(conv_state_indices).__name__
        raise TypeError(
            f"conv_state_indices is {kind}; it must be an int32 or int64 tensor: pass the row of conv_state for each row of x."
        )
    if tuple(conv_state_indices.shape) != (x.shape[0],):
        raise ValueError(
            f"conv_state_indices has shape {list(conv_state_indices.shape)}; it must be [batch] = [{x.shape[0]}]: "
            "pass one row of conv_state, or -1, for each row of x."
        )
    check_device("conv_state_indices", conv_state_indices, "x", x)
    check_floating("conv_state", conv_state)
    check_device("conv_state", conv_state, "x", x)
    sizes = list(conv_state.shape)
    if len(sizes) != 3 or sizes[0] == 0 or sizes[1] != x.shape[1] or sizes[2] < width - 1:
        raise ValueError(
            f"conv_state has shape {sizes}; with conv_state_indices it must be [rows, {x.shape[1]}, tokens] with at least "
            f"one row and {width - 1} tokens: allocate it for these channels and this width."
        )
    check_written("conv_state", conv_state)


def _check_seq_idx(x: Tensor, seq_idx: Tensor) -> None:
    if not isinstance(seq_idx, Tensor) or seq_idx.dtype not in INTEGERS:
        kind = seq_idx.dtype if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        raise TypeError(f"seq_idx is {kind}; it must be an integer tensor: pass the number of each token's sequence.")
    if seq_idx.shape != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"seq_idx has shape {list(seq_idx.shape)}; it must be [batch, tokens] = {[x.shape[0], x.shape[2]]}: "
            "pass one number per token."
        )
    check_device("seq_idx", seq_idx, "x", x)
