"""What several tests on a GPU measure: relative errors, and what a call puts on the GPU."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def relative(actual: Tensor, truth: Tensor) -> float:
    """|actual - truth| / |truth| in float64, on the device of the truth; 0 without elements."""
    if not truth.numel():
        return 0.0
    return ((actual.double().to(truth.device) - truth).norm() / truth.norm()).item()


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Names of the kernels and copies that a call puts on the GPU, after one that may compile or allocate something."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
