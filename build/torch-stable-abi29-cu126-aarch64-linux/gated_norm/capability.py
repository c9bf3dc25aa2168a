"""Which gated norms the SM90 kernels take, and a sentence for those they do not."""

from typing import Iterator, Optional

import torch
from torch import Tensor

from ..sm90 import explain_device

SM90_FORWARD = "sm90_rms_norm_gated_fwd"
SM90_DTYPES = (torch.bfloat16, torch.float16)
SM90_DIM = 128
SM90_RANK = 5  # dimensions


def explain_unsupported(x: Tensor, g: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Optional[str]:
    """Say why `rms_norm_gated` with these tensors runs on the PyTorch path; None if an SM90 kernel serves it."""
    return next(_reasons(x, g, weight, bias), None)


def _reasons(x: Tensor, g: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Iterator[str]:
    reason = explain_device(x, SM90_FORWARD)
    if reason is not None:
        yield reason
    if x.dtype not in SM90_DTYPES:
        yield f"x has dtype {x.dtype}, and the SM90 kernels take bfloat16 and float16"
    if g.dtype != x.dtype:
        yield f"g has dtype {g.dtype} and x {x.dtype}, and the SM90 kernels take the same"
    if weight.dtype not in (x.dtype, torch.float32):
        yield f"weight has dtype {weight.dtype}, and the SM90 kernels take that of x or float32"
    if x.shape[-1] != SM90_DIM:
        yield f"D is {x.shape[-1]}, and the SM90 kernels take {SM90_DIM}"
    if len(x.shape) > SM90_RANK:
        yield f"x has {len(x.shape)} dimensions, and the SM90 kernels take at most {SM90_RANK}"
    if bias is not None:
        yield "there is a bias, and the SM90 kernels have none"
