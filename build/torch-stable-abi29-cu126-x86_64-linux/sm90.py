"""Where the SM90 kernels run, and the notice of a CUDA call that they do not serve; for the operators' capability modules."""

import warnings
from typing import Optional

import torch

from ._ops import ops

_noticed = set()
_capabilities = {}


def explain_device(x: torch.Tensor, op: str) -> Optional[str]:
    """Say why the compiled `op` does not run where x lies; None if it does."""
    if not x.is_cuda:  # asking x.device for its type costs ten times as much host time
        return f"the tensors are on {x.device}, and the SM90 kernels run on CUDA"
    if not hasattr(ops, op):
        return "this build of the kernel has no library for SM90 GPUs (H100, H200, GH200)"
    found = _capability(x.device.index or 0)
    if found != (9, 0):
        return f"the GPU has compute capability {'.'.join(map(str, found))}, and the SM90 kernels need 9.0"
    return None


def _capability(device_index: int) -> tuple:
    """Asked once for each device. Not by functools.cache, of which torch.compile would warn."""
    if device_index not in _capabilities:
        found = torch.cuda.get_device_capability(device_index) if torch.cuda.is_available() else (0, 0)
        _capabilities[device_index] = found
    return _capabilities[device_index]


def notice_torch_path(name: str, reason: str) -> None:
    """Say once per reason that a CUDA call takes the PyTorch path. Not while torch.compile traces, which takes no warning."""
    if not torch.compiler.is_compiling() and (name, reason) not in _noticed:
        _noticed.add((name, reason))
        warnings.warn(f"{name} runs on its PyTorch path: {reason}.", stacklevel=2)
