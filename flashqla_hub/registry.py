"""Registration in the mapping of `kernels`, which transformers consults each time it kernelizes a model."""

import os
from typing import Any

from .mapping import TORCH_PATH_DEVICES, KernelLayer, Source, layer_mapping
from .models import HUB_NAMES, mark_layers, unmark_layers
from .package.download import REPO_ID, VERSION

# What the mapping held under our names for a device without capabilities: there a registration replaces the earlier one.
_replaced: dict[tuple[str, str], dict | None] = {}


def register(
    source: str | os.PathLike = REPO_ID, *, version: int = VERSION, trust_remote_code: bool | list[str] = False
) -> None:
    """Put the kernel into the mapping of `kernels`, for every model that transformers kernelizes from now on.

    Afterwards `from_pretrained(..., use_kernels=True)`, `model.set_use_kernels(True)` and `kernels.kernelize(model, ...)`
    install it for inference and training, on the CPU and, under the names that have a CUDA kernel, on GPUs of compute
    capability 9.0. The names are those of `models.HUB_NAMES`: the whole layers, their functions and their norm. Layer classes
    without a name, such as Qwen3-Next's, get theirs (`models.mark_layers`). Other families that have the short convolution or
    the gated norm under these names get them too. Other names are left alone. A KernelConfig that names the same functions
    takes precedence on the CPU.

    Models served this way know packed sequences from `cu_seq_lens_q` and `seq_idx` only. Pass both, as
    DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True) does: `position_ids` that restart are
    seen only in models given to `flashqla_hub.kernelize` or loaded with `flashqla_hub.kernel_config`.

    Args:
        source: Repository on the Hub, or a folder (a Path, or text that begins with ".", "/" or "~"): the root of a
            kernel repository, or its build/. A folder needs no network.
        version: Version of the kernel's contract on the Hub.
        trust_remote_code: Load it although the Hub does not list its publisher as trusted; code you chose to trust.

    Raises:
        PackageError: the kernel cannot be loaded; one sentence. If merely no build of it fits this machine, a warning
            says so and nothing is registered.
    """
    chosen = Source.of(source, version, trust_remote_code)
    if chosen.available("register"):
        add(chosen)


def add(source: Source) -> None:
    """Register a kernel that is known to load."""
    from kernels import register_kernel_mapping

    mark_layers()
    for name in HUB_NAMES:
        for device in TORCH_PATH_DEVICES:
            _remember_what_is_there(name, device)
    register_kernel_mapping(layer_mapping(source))


def remove() -> None:
    """Take the kernel out of the mapping, and put back what it replaced there."""
    unmark_layers()
    for name in HUB_NAMES:
        registered = _registered(name)
        for device in TORCH_PATH_DEVICES:
            if device in registered and is_ours(registered[device].repos):
                _put_back(name, device)
        if "cuda" in registered:
            _drop_our_intervals(registered)
        if not registered:
            _mapping().pop(name, None)


def is_ours(repositories: dict | None) -> bool:
    """Whether a {mode: repository} of the mapping was registered by this package."""
    return bool(repositories) and any(isinstance(layer, KernelLayer) for layer in repositories.values())


def _mapping() -> dict[str, dict[str, Any]]:
    """{hub name: {device type: repositories}}, live. `kernels` lets others add to its mapping, but not read or remove."""
    from kernels.layer.globals import _KERNEL_MAPPING

    return _KERNEL_MAPPING.get()


def _registered(name: str) -> dict[str, Any]:
    return _mapping().get(name, {})


def _remember_what_is_there(name: str, device: str) -> None:
    repositories = _registered(name).get(device)
    current = None if repositories is None else repositories.repos
    if not is_ours(current):
        _replaced[name, device] = current


def _put_back(name: str, device: str) -> None:
    from kernels import Device

    registered = _registered(name)
    before = _replaced.pop((name, device), None)
    if before is None:
        del registered[device]
    else:
        registered[device].insert(Device(type=device), before)


def _drop_our_intervals(registered: dict[str, Any]) -> None:
    """Rebuild the capability intervals of "cuda" without ours: the tree of `kernels` has no removal."""
    from kernels import CUDAProperties, Device

    kept = type(registered["cuda"])()
    nodes = [registered["cuda"].repos_by_capability.root]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        nodes += (node.left, node.right)
        if not is_ours(node.data):
            kept.insert(Device(type="cuda", properties=CUDAProperties(node.start, node.end)), node.data)
    if kept.repos_by_capability.root is None:
        del registered["cuda"]
    else:
        registered["cuda"] = kept
