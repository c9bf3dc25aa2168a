"""Public function of the gated norm behind the recurrence."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_device, check_floating

__all__ = ["rms_norm_gated"]

ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: str = "swish",
    eps: float = 1e-6,
) -> Tensor:
    """RMS norm over the last dimension, then the gate: y = (weight * x / sqrt(mean(x^2) + eps) + bias) * act(g).

    The norm and the gate are computed in float32 (float64 for float64 inputs); the normalised values are rounded to x's
    dtype before the weight, the cast order of transformers' Qwen3.5 and Qwen3-Next. Differentiable.

    Args:
        x, g: [..., D], values and gate, any floating dtype.
        weight: [D].
        bias: [D], or None.
        activation: "silu" or "swish" (the same), or "sigmoid".
        eps: added to the mean square.

    Returns:
        y [..., D] in x's dtype.

    Raises:
        ValueError, TypeError: one sentence naming the argument, the rule, the value and the way out.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}: apply others to the gate yourself."
        )
    for name, tensor in (("x", x), ("g", g), ("weight", weight), ("bias", bias)):
        if tensor is not None or name != "bias":
            check_floating(name, tensor)
            check_device(name, tensor, "x", x)
    if x.dim() == 0:
        raise ValueError("x has shape []; it must be [..., D]: unsqueeze it.")
    if g.shape != x.shape:
        raise ValueError(
            f"g has shape {list(g.shape)} and x {list(x.shape)}; the gate must match the values: reshape it."
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and tuple(parameter.shape) != tuple(x.shape[-1:]):
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}; it must be [{x.shape[-1]}], the last dimension of x: "
                "reshape x so that the normalised values come last."
            )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = x.to(dtype)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    out = weight * normed.to(x.dtype)
    if bias is not None:
        out = out + bias
    return (out * ACTIVATIONS[activation](g.to(dtype))).to(x.dtype)
