"""Which convolutions the SM90 kernels take, and a sentence for those they do not."""

from typing import Iterator, Optional

import torch
from torch import Tensor

from ..sm90 import explain_device

SM90_FORWARD = "sm90_causal_conv1d_fwd"
SM90_DTYPES = (torch.bfloat16, torch.float16)
SM90_WIDTHS = range(1, 9)
SM90_CHANNELS = 8  # a token's channels are loaded in vectors of so many


def explain_unsupported(x: Tensor, weight: Tensor) -> Optional[str]:
    """Say why `causal_conv1d_fn` with these tensors runs on the PyTorch path; None if an SM90 kernel serves it."""
    return next(_reasons(x, weight), None)


def explain_unsupported_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, *others: Optional[Tensor]
) -> Optional[str]:
    """The same for `causal_conv1d_update`, whose kernel is for inference; `others` are further inputs with gradients."""
    return next(_update_reasons(x, conv_state, weight, others), None)


def _reasons(x: Tensor, weight: Tensor) -> Iterator[str]:
    yield from _common_reasons(x, weight)
    if x.shape[1] % SM90_CHANNELS:
        yield f"x has {x.shape[1]} channels, and the SM90 kernels take multiples of {SM90_CHANNELS}"


def _update_reasons(x: Tensor, conv_state: Tensor, weight: Tensor, others: tuple) -> Iterator[str]:
    yield from _common_reasons(x, weight)
    if conv_state.dtype != x.dtype:
        yield f"conv_state has dtype {conv_state.dtype} and x {x.dtype}, and the SM90 kernel takes the same"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, conv_state, weight, *others)):
        yield "a gradient may be asked for, and the SM90 kernel is for inference"


def _common_reasons(x: Tensor, weight: Tensor) -> Iterator[str]:
    reason = explain_device(x, SM90_FORWARD)
    if reason is not None:
        yield reason
    if x.dtype not in SM90_DTYPES:
        yield f"x has dtype {x.dtype}, and the SM90 kernels take bfloat16 and float16"
    if weight.dtype == torch.float64:
        yield "weight has dtype torch.float64, and the SM90 kernels take float32 at most"
    if weight.shape[1] not in SM90_WIDTHS:
        yield f"the width is {weight.shape[1]}, and the SM90 kernels take {SM90_WIDTHS[0]} to {SM90_WIDTHS[-1]}"
