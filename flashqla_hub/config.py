"""A KernelConfig of transformers that serves training as well as inference."""

import os
import warnings

from torch import nn
from transformers import KernelConfig

from . import installation
from .mapping import Source, layer_mapping
from .package.download import REPO_ID, VERSION


class FlashQLAKernelConfig(KernelConfig):
    """What `kernel_config` returns. Its mapping stays empty until transformers hands over the model.

    A plain KernelConfig registers a kernel for the mode that the model is in, and from_pretrained returns models in eval
    mode: training would silently go without the kernel. It also refuses the CPU, capability ranges, and, in
    from_pretrained, local folders.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def sanitize_kernel_mapping(self, model: nn.Module) -> None:
        installation.required_nets(model, "kernel_config")

    def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
        reason = installation.explain_nothing(installation.gated_delta_nets(model), installation.device_type_of(model))
        if reason is not None:
            warnings.warn(
                f"flashqla_hub.kernel_config replaces nothing in {type(model).__name__}: {reason}.", stacklevel=2
            )
        elif self.source.available("kernel_config"):
            self.kernel_mapping = layer_mapping(self.source)
            installation.adopt(model, self.source)


def kernel_config(
    source: str | os.PathLike = REPO_ID, *, version: int = VERSION, trust_remote_code: bool | list[str] = False
) -> FlashQLAKernelConfig:
    """The kernel as `kernel_config` of `from_pretrained(..., use_kernels=True)` or `set_use_kernels(True, ...)`.

    The kernel then serves this model's layers, and through their shared functions those of its family, in both modes;
    transformers' defaults for other layers stay. Packed rows are recognised as in a model given to
    `flashqla_hub.kernelize`. One config may serve several models.

    Args:
        source: Repository on the Hub, or a folder (a Path, or text that begins with ".", "/" or "~"): the root of a
            kernel repository, or its build/. A folder needs no network.
        version: Version of the kernel's contract on the Hub.
        trust_remote_code: Load it although the Hub does not list its publisher as trusted; code you chose to trust.

    Raises:
        ValueError: when the model is loaded: it has no gated delta rule layer.
        PackageError: when the model is loaded: the kernel cannot be loaded; one sentence.
    """
    return FlashQLAKernelConfig(Source.of(source, version, trust_remote_code))
