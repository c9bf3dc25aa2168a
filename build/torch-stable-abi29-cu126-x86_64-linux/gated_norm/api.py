"""Public function of the gated norm behind the recurrence."""

from typing import Optional

from torch import Tensor

from ..checks import check_device, check_floating
from ..sm90 import notice_torch_path
from . import autograd, torch_path
from .capability import explain_unsupported
from .torch_path import ACTIVATIONS

__all__ = ["rms_norm_gated"]


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

    Notes:
        On SM90, bfloat16 or float16 x and g with D = 128 and no bias are served by kernels of one launch forward and two
        backward, the same bits for the same input. Second derivatives are available on the PyTorch path alone.
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
    unsupported = explain_unsupported(x, g, weight, bias)
    if unsupported is None:
        return autograd.forward(x, g, weight, float(eps), activation != "sigmoid")
    if x.is_cuda:
        notice_torch_path("rms_norm_gated", unsupported)
    return torch_path.forward(x, g, weight, bias, activation, eps)
