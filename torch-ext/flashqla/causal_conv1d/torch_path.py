"""Short depthwise causal convolution in PyTorch, on every device and dtype.

    y[t] = act(bias + sum_j weight[W - 1 - j] x[t - j]),  over the j for which token t - j belongs to the same sequence

Computed in float32 for 16-bit inputs, also under autocast, and rounded once.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """The convolution of rows whose tokens belong to sequences [B, T]; tokens of sequence < 0 are not read and give 0."""
    dtype = _compute_dtype(x, weight)
    width = weight.shape[1]
    belongs = (sequence >= 0).unsqueeze(1)
    values, weight = torch.where(belongs, x.to(dtype), 0), weight.to(dtype)
    out = values * weight[:, -1:]
    for back in range(1, min(width, x.shape[-1])):
        same = (sequence[:, back:] == sequence[:, :-back]).unsqueeze(1)
        earlier = torch.where(same, values[..., :-back], 0) * weight[:, width - 1 - back, None]
        out = out + F.pad(earlier, (back, 0))
    if bias is not None:
        out = out + bias.to(dtype)[:, None]
    return torch.where(belongs, _activate(out, activation), 0).to(x.dtype)


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence of each token [1, T], -1 behind the last bound."""
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    return sequence.masked_fill(sequence == cu_seqlens.shape[0] - 1, -1).unsqueeze(0)


def _activate(x: Tensor, activation: Optional[str]) -> Tensor:
    return x if activation is None else F.silu(x)


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
