"""Install the kernel in the gated delta rule layers of a model, and take it out again."""

import os
import warnings
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import boundaries, registry, serving
from .mapping import Source, explain_device, layer_mapping, names_for
from .models import (
    GatedDeltaNet,
    backbones,
    functions_of,
    gated_delta_nets,
    imported_modeling_modules,
    mark_layers,
)
from .package.download import REPO_ID, VERSION

if TYPE_CHECKING:
    from kernels import Mode

PLANS = ("auto", "invariant", "off")

# Models that hold the kernel by our doing, so that `unregister` finds their layers, norms and hooks.
_adopted: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def kernelize(
    model: nn.Module,
    *,
    source: str | os.PathLike = REPO_ID,
    version: int = VERSION,
    trust_remote_code: bool | list[str] = False,
    device: str | torch.device | None = None,
    mode: "Mode | None" = None,
    plan: str = "auto",
) -> nn.Module:
    """Install the kernel in every gated delta rule layer of a transformers model, for inference and training.

    It replaces the whole layer where the kernel has one for the family, and below it the functions
    `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule`, `causal_conv1d_fn`, `causal_conv1d_update` and the layer's
    `RMSNormGated`. They serve families without a whole layer, and the calls that the whole layer leaves to transformers'
    own forward. Nothing else is touched: kernels that you installed elsewhere stay. It also registers the kernel (see
    `register`), so that it stays when transformers kernelizes the model again, as `train()` and `eval()` do if
    `model.use_kernels` is True.

    Rows that pack several sequences are recognised from `cu_seq_lens_q`, `seq_idx`, or `position_ids` that restart
    (see `boundaries.pass_boundaries`).

    The functions belong to the modeling module, not to the model: kernelizing one model changes all models of its family
    in the process.

    Args:
        model: A model with layers of Qwen3-Next, Qwen3.5 (dense or MoE), Qwen4-Exp or OLMo-Hybrid, also inside wrappers
            such as PEFT's. Changed in place.
        source: Repository on the Hub, or a folder (a Path, or text that begins with ".", "/" or "~"): the root of a
            kernel repository, or its build/. A folder needs no network.
        version: Version of the kernel's contract on the Hub.
        trust_remote_code: Load it although the Hub does not list its publisher as trusted; code you chose to trust.
        device: Where the model runs; the device of its parameters by default.
        mode: A `kernels.Mode`; by default Mode.TRAINING or Mode.INFERENCE after `model.training`. The kernel serves both,
            so it need not be installed again when the model changes mode.
        plan: How the SM90 kernels cut long sequences, "auto", "invariant" (the same bits in any batch and with the heads
            spread over any number of GPUs) or "off"; see `chunk_gated_delta_rule`. It belongs to the layers and functions.

    Returns:
        The model. `report(model)` tells what serves each layer.

    Raises:
        ValueError, TypeError: the model has no gated delta rule layer, or `device` or `mode` is wrong; one sentence.
        PackageError: the kernel cannot be loaded; one sentence.

    Warns:
        UserWarning: nothing could be installed, and why; the model works as before.
    """
    if plan not in PLANS:
        raise ValueError(f"plan is {plan!r}; it must be one of {', '.join(map(repr, PLANS))}.")
    nets = required_nets(model, "kernelize")
    device_type = device_type_of(model, device)
    mode = _checked_mode(model, mode)
    reason = explain_nothing(nets, device_type)
    if reason is not None:
        warnings.warn(f"flashqla_hub.kernelize replaces nothing in {type(model).__name__}: {reason}.", stacklevel=2)
        return model
    chosen = Source.of(source, version, trust_remote_code)
    if chosen.available("kernelize"):
        mark_layers()
        _replace_forwards(nets, chosen, device_type, mode)
        for net in nets:
            for layer in net.replaceable.values():
                serving.set_plan(layer, plan)
        registry.add(chosen)
        adopt(model, chosen)
    return model


def unregister(model: nn.Module | None = None) -> None:
    """Undo `register`, `kernelize` and `kernel_config`: the mapping, and the original forwards of all layers.

    The mapping of `kernels` holds afterwards what it held before. The functions of every modeling module get the forward
    of transformers back, and so do the layers and norms of models given to `kernelize` or loaded with `kernel_config`.

    Args:
        model: A model that transformers itself kernelized after `register`, whose layers and norms only the model can name.
    """
    registry.remove()
    functions = [function for name in imported_modeling_modules() for function in functions_of(name).values()]
    models = [*_adopted, *([] if model is None else [model])]
    layers = [layer for model in models for net in gated_delta_nets(model) for layer in net.replaceable.values()]
    for layer in (*functions, *layers):
        if serving.is_ours(layer):
            serving.restore_original(layer)
    for model in models:
        _abandon(model)
    _adopted.clear()


def adopt(model: nn.Module, source: Source) -> None:
    """Have the model pass boundaries on, and keep the kernel when transformers kernelizes it with a KernelConfig."""
    _adopted.add(model)
    mark_layers()
    for backbone in backbones(model):
        boundaries.install(backbone)
    for mapping in _kernel_config_mappings(model):
        for name, layers in layer_mapping(source).items():
            mapping.setdefault(name, {}).update(layers)


def _abandon(model: nn.Module) -> None:
    for backbone in backbones(model):
        boundaries.uninstall(backbone)
    for mapping in _kernel_config_mappings(model):
        for name, layers in list(mapping.items()):
            kept = {device: layer for device, layer in layers.items() if not isinstance(layer, registry.KernelLayer)}
            mapping.update({name: kept}) if kept else mapping.pop(name)


def _kernel_config_mappings(model: nn.Module) -> list[dict]:
    """{hub name: {device: repository}} of each KernelConfig in the model; a config may be one that replaces all defaults."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "kernel_config", None))}
    return [config.kernel_mapping for config in configs.values()]


def required_nets(model: nn.Module, caller: str) -> list[GatedDeltaNet]:
    """The gated delta rule layers of the model; ValueError if it has none, TypeError if it is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; {caller} needs a loaded model: pass what "
            "AutoModelForCausalLM.from_pretrained returns."
        )
    nets = gated_delta_nets(model)
    if not nets:
        raise ValueError(
            f"model is a {type(model).__name__} without a gated delta rule layer; {caller} serves Qwen3-Next, Qwen3.5, "
            "Qwen4-Exp and OLMo-Hybrid of transformers: pass one of them."
        )
    return nets


def device_type_of(model: nn.Module, device: str | torch.device | None = None) -> str:
    """ "cpu", "cuda", "rocm", ...: the type of `device`, by default of the first parameter that holds data."""
    if device is None:
        devices = (parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
        device = next(devices, None)
        if device is None:
            raise ValueError("device is None and no parameter of the model holds data; pass the device it will run on.")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; it must name a device of torch, such as 'cpu' or 'cuda'.") from error
    return "rocm" if kind == "cuda" and torch.version.hip is not None else kind


def explain_nothing(nets: list[GatedDeltaNet], device_type: str) -> str | None:
    """Why nothing can be installed in these layers on a type of device; None if something can."""
    if not any(net.replaceable for net in nets):
        return _explain_closed_layers()
    if _mapping_disabled():
        return "the environment variable DISABLE_KERNEL_MAPPING is set: unset it and start again"
    return explain_device(device_type)


def _explain_closed_layers() -> str:
    """Why transformers defined its layers without the names that `kernels` looks for."""
    import kernels
    import transformers
    from transformers.dependency_versions_table import deps
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        return (
            f"transformers {transformers.__version__} works with {deps.get('kernels', 'no kernels')} and not with the "
            f"installed {kernels.__version__}: pip install 'flashqla_hub[transformers]' brings a pair that fits"
        )
    return "transformers has its kernels switched off: set the environment variable USE_HUB_KERNELS=YES and start again"


def _mapping_disabled() -> bool:
    """`kernels` reads DISABLE_KERNEL_MAPPING once, at import, and keeps the answer to itself."""
    from kernels.layer.globals import _DISABLE_KERNEL_MAPPING

    return _DISABLE_KERNEL_MAPPING


def _checked_mode(model: nn.Module, mode: "Mode | None") -> "Mode":
    from kernels import Mode

    if mode is None:
        return Mode.TRAINING if model.training else Mode.INFERENCE
    if not isinstance(mode, Mode):
        raise TypeError(f"mode is {mode!r}; it must be a kernels.Mode, such as Mode.TRAINING, or None.")
    if Mode.TRAINING not in mode and Mode.INFERENCE not in mode:
        raise ValueError(f"mode is {mode}; it must contain Mode.TRAINING or Mode.INFERENCE.")
    return mode


def _replace_forwards(nets: list[GatedDeltaNet], source: Source, device_type: str, mode: "Mode") -> None:
    """Run `kernels.kernelize` on our layers alone, with our mapping alone, so that no other layer is touched."""
    from kernels import kernelize, use_kernel_mapping

    names = names_for(device_type)
    layers = nn.ModuleList(layer for net in nets for name, layer in net.replaceable.items() if name in names)
    wrappers = {layer: layer.forward for layer in layers if serving.is_wrapped(layer)}
    with use_kernel_mapping(layer_mapping(source), inherit_mapping=False):
        kernelize(layers, device=device_type, mode=mode, use_fallback=False)
    for layer, wrapper in wrappers.items():
        replaced, layer.forward = layer.forward, wrapper
        serving.set_forward(layer, replaced)
