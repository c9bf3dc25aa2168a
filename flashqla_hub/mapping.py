"""Which hub names this kernel serves on which device, and the layers as the mapping of `kernels` takes them."""

import functools
import os
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .models import HUB_NAMES, PART_NAMES, WHOLE_LAYERS
from .package.download import REPO_ID, VERSION
from .package.errors import PackageError
from .package.loading import load, local_folder

# Parts of the layer, by hub name, that have a kernel for compute capability 9.0.
SM90_KERNELS: tuple[str, ...] = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "RMSNormGated",
)
SM90 = (9, 0)

# Devices on which the PyTorch path serves every name. Elsewhere transformers has kernels or paths of its own.
TORCH_PATH_DEVICES = ("cpu",)


@dataclass(frozen=True)
class Source:
    """Where the kernel comes from: a repository on the Hub, or a folder by its absolute path."""

    location: str
    version: int = VERSION
    trust_remote_code: bool | tuple[str, ...] = False

    @classmethod
    def of(
        cls,
        source: str | os.PathLike = REPO_ID,
        version: int = VERSION,
        trust_remote_code: bool | list[str] = False,
    ) -> "Source":
        folder = local_folder(source)
        trusted = trust_remote_code if isinstance(trust_remote_code, bool) else tuple(trust_remote_code)
        return cls(str(source if folder is None else folder), version, trusted)

    def module(self) -> ModuleType:
        """The loaded kernel; loaded once in a process.

        Raises:
            PackageError: it cannot be loaded; one sentence.
        """
        return _loaded(self)

    def available(self, caller: str) -> bool:
        """Load the kernel; if no build of it fits this machine, warn that `caller` replaces nothing and return False.

        Raises:
            PackageError: it cannot be loaded for a reason that the user can repair; one sentence.
        """
        try:
            self.module()
        except (PackageError, OSError) as error:
            if not self._lacks_build(error):
                raise
            warnings.warn(f"flashqla_hub.{caller} replaces nothing: {error}", stacklevel=3)
            return False
        return True

    def _lacks_build(self, error: Exception) -> bool:
        """`kernels` reports a missing build as a missing file, 0.16 also as an OSError of its metadata reader."""
        folder = local_folder(self.location)
        if folder is not None and not folder.is_dir():
            return False
        if isinstance(error, PackageError):
            return isinstance(error.__cause__, FileNotFoundError)
        return "metadata.json" in str(error)


@functools.cache
def _loaded(source: Source) -> ModuleType:
    trusted = source.trust_remote_code
    # Each name is registered for devices that it fits, and a model on the CPU must load beside a GPU of another
    # architecture: hence no check of the current GPU here.
    return load(
        source.location,
        version=source.version,
        trust_remote_code=trusted if isinstance(trusted, bool) else list(trusted),
        check_arch=False,
    )


@dataclass(frozen=True)
class KernelLayer:
    """One layer of the kernel, in the role that repositories have in the mapping of `kernels`.

    LayerRepository of `kernels` would ask the Hub once per name, need a network even if LOCAL_KERNELS names a folder,
    and check the architecture of a GPU that a model on the CPU does not use.
    """

    source: Source
    layer_name: str

    def load(self) -> type[torch.nn.Module]:
        layer = getattr(self.source.module().layers, self.layer_name, None)
        if layer is None:
            raise PackageError(
                f"the kernel from {self.source.location} has no layer {self.layer_name}, so it is older than this "
                "flashqla_hub: update it (for one from the Hub, flashqla_hub.download), or install the flashqla_hub of its time."
            )
        return layer

    def __str__(self) -> str:
        return f"{self.source.location}, layer {self.layer_name}"


def layer_mapping(source: Source) -> dict[str, dict[Any, KernelLayer]]:
    """{hub name: {device: layer}}, as `kernels` takes it.

    A bare layer, not one per mode, serves inference and training. CUDA is registered for capability 9.0 alone: under
    plain "cuda" other GPUs would find it too, and transformers' set_use_kernels would replace it by its own default.
    """
    from kernels import CUDAProperties, Device

    capability = 10 * SM90[0] + SM90[1]
    sm90 = Device(type="cuda", properties=CUDAProperties(min_capability=capability, max_capability=capability))
    mapping: dict[str, dict[Any, KernelLayer]] = {}
    for name in HUB_NAMES:
        layer = KernelLayer(source, WHOLE_LAYERS.get(name, name))
        mapping[name] = {device: layer for device in TORCH_PATH_DEVICES}
        if name in sm90_names():
            mapping[name][sm90] = layer
    return mapping


def sm90_names() -> tuple[str, ...]:
    """The hub names that this kernel serves on capability 9.0: parts with a kernel, and whole layers once every part has one."""
    return HUB_NAMES if set(PART_NAMES) <= set(SM90_KERNELS) else SM90_KERNELS


def names_for(device_type: str) -> tuple[str, ...]:
    """The hub names that this kernel serves on a type of device: "cpu", "cuda" (meaning the current GPU), ..."""
    if explain_device(device_type) is not None:
        return ()
    return HUB_NAMES if device_type in TORCH_PATH_DEVICES else sm90_names()


def explain_device(device_type: str) -> str | None:
    """Why this kernel serves no name at all on a type of device; None if it serves some."""
    if device_type in TORCH_PATH_DEVICES:
        return None
    if device_type != "cuda":
        return f"the kernel serves {', '.join(TORCH_PATH_DEVICES)} and cuda, not {device_type}"
    if not torch.cuda.is_available():
        return "the kernel serves GPUs of compute capability 9.0, and this process sees no GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != SM90:
        return f"the kernel serves GPUs of compute capability 9.0, and this one has {major}.{minor}"
    return None


def explain_absence(name: str, device_type: str) -> str | None:
    """Why this kernel does not serve one hub name on a type of device; None if it does."""
    if name in names_for(device_type):
        return None
    return explain_device(device_type) or f"this version of the kernel has no {name} for {device_type}"
