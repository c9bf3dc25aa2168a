"""Which inputs the SM90 kernels take, and a sentence for those they do not."""

import warnings
from functools import cache
from typing import Iterator, Optional

import torch
from torch import Tensor

from .._ops import ops

SM90_FORWARD = "sm90_gated_delta_rule_fwd"
SM90_HEAD_DIM = 128
SM90_DTYPES = (torch.bfloat16, torch.float16)

_noticed = set()


def explain_unsupported(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Optional[str]:
    """Say why a forward with these tensors is served by the PyTorch path; None if an SM90 kernel serves it.

    Usable before the call, and on a machine without a GPU. Tensors as in `chunk_gated_delta_rule`.
    """
    return next(_reasons(q, v), None)


def _reasons(q: Tensor, v: Tensor) -> Iterator[str]:
    if not q.is_cuda:
        yield f"the tensors are on {q.device}, and the SM90 kernels run on CUDA"
    if not hasattr(ops, SM90_FORWARD):
        yield "this build of the kernel has no library for SM90 GPUs (H100, H200, GH200)"
    if q.is_cuda and _capability(q.device.index or 0) != (9, 0):
        found = ".".join(str(part) for part in _capability(q.device.index or 0))
        yield f"the GPU has compute capability {found}, and the SM90 kernels need 9.0"
    if q.dtype not in SM90_DTYPES:
        yield f"q has dtype {q.dtype}, and the SM90 kernels take bfloat16 and float16"
    for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if size != SM90_HEAD_DIM:
            yield f"{name} is {size}, and the SM90 kernels take head size {SM90_HEAD_DIM}"


@cache
def _capability(device_index: int) -> tuple:
    return torch.cuda.get_device_capability(device_index) if torch.cuda.is_available() else (0, 0)


def notice_torch_path(name: str, reason: str) -> None:
    """Say once per reason that a CUDA call takes the PyTorch path."""
    if (name, reason) not in _noticed:
        _noticed.add((name, reason))
        warnings.warn(f"{name} runs on its PyTorch path: {reason}.", stacklevel=2)
