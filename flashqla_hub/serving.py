"""Which forward serves a replaceable layer at the moment, and how to put the original one back."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType, ModuleType

from torch import nn

KERNEL_NAME = "flashqla"


def current_forward(layer: nn.Module) -> Callable:
    """The function behind `layer.forward`, below the wrapper that accelerate puts around it to move offloaded weights."""
    bound = layer._old_forward if is_wrapped(layer) else layer.forward
    return getattr(bound, "__func__", bound)


def set_forward(layer: nn.Module, forward: Callable) -> None:
    """Replace the forward of `layer`, below accelerate's wrapper if it has one.

    Replacing the wrapper, as `kernels` and transformers do, would leave offloaded weights on the meta device.
    """
    vars(layer)["_old_forward" if is_wrapped(layer) else "forward"] = forward


def set_plan(layer: nn.Module, plan: str) -> None:
    """Tell the kernel's forward of `layer` how to cut long sequences."""
    layer.flashqla_plan = plan


def restore_original(layer: nn.Module) -> None:
    """Give `layer` the forward of its class again."""
    vars(layer).pop("flashqla_plan", None)
    if is_wrapped(layer):
        set_forward(layer, MethodType(type(layer).forward, layer))
    else:
        vars(layer).pop("forward", None)


def is_wrapped(layer: nn.Module) -> bool:
    """Whether accelerate's wrapper, a partial that calls `_old_forward`, is the layer's forward; it has no public sign."""
    return "_old_forward" in vars(layer) and isinstance(vars(layer).get("forward"), partial)


def serving_kernel(layer: nn.Module) -> ModuleType | None:
    """The loaded kernel whose code is the layer's forward; None for transformers' own."""
    from kernels import get_loaded_kernels

    package = getattr(current_forward(layer), "__module__", "").partition(".")[0]
    return next((loaded.module for loaded in get_loaded_kernels() if loaded.module.__name__ == package), None)


def name_and_folder(layer: nn.Module, kernel: ModuleType) -> tuple[str, str]:
    """The kernel's name as users know it, its repository on the Hub if it came from there, and the folder of its code."""
    from kernels import get_loaded_kernels

    loaded = next(loaded for loaded in get_loaded_kernels() if loaded.module is kernel)
    name = str(loaded.metadata.name) if loaded.repo_info is None else loaded.repo_info.repo_id
    # Two copies of one build share their modules, so the code itself knows best where it is from.
    return name, str(Path(current_forward(layer).__code__.co_filename).parent)


def is_ours(layer: nn.Module) -> bool:
    """Whether this kernel serves the layer, from wherever it was loaded."""
    from kernels import get_loaded_kernels

    kernel = serving_kernel(layer)
    return any(loaded.module is kernel and str(loaded.metadata.name) == KERNEL_NAME for loaded in get_loaded_kernels())
