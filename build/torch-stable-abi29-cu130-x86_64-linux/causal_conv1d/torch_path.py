"""Short depthwise causal convolution in PyTorch, on every device and dtype.

    y[t] = act(bias + sum_j weight[W - 1 - j] x[t - j]),  over the j for which token t - j belongs to the same sequence

Computed in float32 for 16-bit inputs, also under autocast, and rounded once.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    activation: Optional[str],
    sequence: Optional[Tensor],
    initial_states: Optional[Tensor],
) -> Tuple[Tensor, Optional[Tensor]]:
    """y [B, D, T] and the final states [B, D, W - 1], None for rows of several sequences; initial states have W - 1 tokens."""
    if sequence is not None:
        return convolve_packed(x, weight, bias, activation, sequence), None
    history = weight.shape[1] - 1
    extended = F.pad(x, (history, 0)) if initial_states is None else torch.cat([initial_states, x], dim=-1)
    return convolve(extended, weight, bias, activation, x.shape[2]), extended[..., extended.shape[2] - history :]


def convolve(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: Optional[str], num_tokens: int) -> Tensor:
    """The last `num_tokens` outputs for x [B, D, W - 1 + tokens], which begins with its history."""
    if 0 in (x.shape[0], x.shape[1], num_tokens):
        parameters = weight.sum() if bias is None else weight.sum() + bias.sum()
        return x[..., :num_tokens] + 0 * parameters.to(x.dtype)  # so that they get a gradient of 0, not none
    dtype = _compute_dtype(x, weight)
    bias = None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        out = F.conv1d(x.to(dtype), weight.to(dtype).unsqueeze(1), bias, groups=x.shape[1])
    return _activate(out[..., out.shape[-1] - num_tokens :], activation).to(x.dtype)


def convolve_packed(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: Optional[str], sequence: Tensor
) -> Tensor:
    """The convolution of rows whose tokens belong to sequences [B, T]; tokens of sequence < 0 are not read and give 0.

    History restarts wherever the number changes, also where an earlier one comes again.
    """
    dtype = _compute_dtype(x, weight)
    width = weight.shape[1]
    belongs = (sequence >= 0).unsqueeze(1)
    run = F.pad((sequence[:, 1:] != sequence[:, :-1]).cumsum(1), (min(1, sequence.shape[1]), 0))
    values, weight = torch.where(belongs, x.to(dtype), 0), weight.to(dtype)
    out = values * weight[:, -1:]
    for back in range(1, min(width, x.shape[-1])):
        same = (run[:, back:] == run[:, :-back]).unsqueeze(1)
        earlier = torch.where(same, values[..., :-back], 0) * weight[:, width - 1 - back, None]
        out = out + F.pad(earlier, (back, 0))
    if bias is not None:
        out = out + bias.to(dtype)[:, None]
    return torch.where(belongs, _activate(out, activation), 0).to(x.dtype)


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence of each token, int32 [1, T], -1 behind the last bound."""
    token = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True, out_int32=True)
    return sequence.masked_fill(token >= cu_seqlens[-1], -1).unsqueeze(0)


def narrow_sequence(sequence: Tensor) -> Tensor:
    """Numbers [B, T] as int32. Of 64-bit ones, any half of which may be equal or negative, the runs are counted."""
    if sequence.dtype != torch.int64:
        return sequence.to(torch.int32)
    changes = F.pad(sequence[:, 1:] != sequence[:, :-1], (min(1, sequence.shape[1]), 0))
    return changes.cumsum(1, dtype=torch.int32).masked_fill(sequence < 0, -1)


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    activation: Optional[str],
    conv_state_indices: Optional[Tensor],
) -> Tensor:
    """y [B, D, T] of new tokens x; moves the states on in place, of those rows that `conv_state_indices` [B] names."""
    if conv_state_indices is None:
        rows = conv_state
    else:
        is_used = (conv_state_indices >= 0) & (conv_state_indices < conv_state.shape[0])
        slot = torch.where(is_used, conv_state_indices, 0).long()
        rows = conv_state[slot]
    extended = torch.cat([rows.to(x.dtype), x], dim=-1)
    out = convolve(extended, weight, bias, activation, x.shape[2])
    moved = extended[..., x.shape[2] :]
    if conv_state_indices is None:
        conv_state.copy_(moved)
        return out
    # A row of x for every state, or -1: no copy of the indices to the host, and rows without a state write nowhere.
    slots = conv_state.shape[0]
    owner = slot.new_full((slots + 1,), -1)
    owner[torch.where(is_used, slot, slots)] = torch.arange(slot.shape[0], device=slot.device)
    owner = owner[:slots, None, None]
    if slot.shape[0]:
        moved = moved[owner.flatten().clamp(min=0)]
        conv_state.copy_(torch.where(owner >= 0, moved.to(conv_state.dtype), conv_state))
    return torch.where(is_used[:, None, None], out, 0)


def _activate(x: Tensor, activation: Optional[str]) -> Tensor:
    return x if activation is None else F.silu(x)


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
