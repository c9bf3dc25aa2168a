"""Which inputs the SM90 kernels take, and a sentence for those they do not."""

from typing import Optional

import torch
from torch import Tensor

from ..sm90 import explain_device

SM90_FORWARD = "sm90_gated_delta_rule_fwd"
SM90_HEAD_DIM = 128
SM90_DTYPES = (torch.bfloat16, torch.float16)


def explain_unsupported(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Optional[str]:
    """Say why a forward with these tensors is served by the PyTorch path; None if an SM90 kernel serves it.

    Usable before the call, and on a machine without a GPU. Tensors as in `chunk_gated_delta_rule`.
    """
    reason = explain_device(q, SM90_FORWARD)
    if reason is not None:
        return reason
    if q.dtype not in SM90_DTYPES:
        return f"q has dtype {q.dtype}, and the SM90 kernels take bfloat16 and float16"
    dim_k, (*_, v_heads, dim_v) = q.shape[-1], v.shape
    if dim_k == dim_v == SM90_HEAD_DIM and v_heads > 0:
        return None
    for name, size in (("K", dim_k), ("V", dim_v)):
        if size != SM90_HEAD_DIM:
            return f"{name} is {size}, and the SM90 kernels take head size {SM90_HEAD_DIM}"
    return "there are no value heads, and the SM90 kernels take at least one"


def explain_unsupported_backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Optional[str]:
    """The same of a backward, whose kernels take what those of a forward take."""
    return explain_unsupported(q, k, v, g, beta)
