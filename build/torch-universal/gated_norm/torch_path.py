"""The gated norm in PyTorch: every device, dtype and size. PyTorch differentiates it."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def forward(x: Tensor, g: Tensor, weight: Tensor, bias: Optional[Tensor], activation: str, eps: float) -> Tensor:
    """y [..., D] in x's dtype; arguments as in `rms_norm_gated`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = x.to(dtype)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    out = weight * normed.to(x.dtype)
    if bias is not None:
        out = out + bias
    return (out * ACTIVATIONS[activation](g.to(dtype))).to(x.dtype)
