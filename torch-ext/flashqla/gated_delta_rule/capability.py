"""Which inputs the SM90 kernels take, and a sentence for those they do not."""

import warnings
from typing import Optional

from torch import Tensor

# Names that have an SM90 kernel in this version.
SM90_KERNELS = ()

_noticed = set()


def explain_unsupported(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Optional[str]:
    """Say why a call with these tensors is served by the PyTorch path; None if an SM90 kernel serves it.

    Usable before the call, and on a machine without a GPU. Tensors as in `chunk_gated_delta_rule`.
    """
    rules = (
        ("gated_delta_rule" in SM90_KERNELS, "this version of the kernel has no SM90 build yet"),
        (q.is_cuda, f"the tensors are on {q.device}, and the SM90 kernels run on CUDA"),
    )
    return next((reason for holds, reason in rules if not holds), None)


def notice_torch_path(name: str, reason: str) -> None:
    """Say once per reason that a CUDA call takes the PyTorch path."""
    if (name, reason) not in _noticed:
        _noticed.add((name, reason))
        warnings.warn(f"{name} runs on its PyTorch path: {reason}.", stacklevel=2)
