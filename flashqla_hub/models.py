"""The gated delta rule layers of transformers: which classes they are, and the objects in them that a kernel replaces.

Classes are recognised by where they are defined and what they are called, so nothing here imports transformers.
"""

import sys
from importlib import import_module
from typing import NamedTuple

from torch import nn

# What a kernel can take over, by the name that transformers gives it: four functions of the layer, and its norm.
FUNCTION_NAMES = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
NORM_NAME = "RMSNormGated"
PART_NAMES = (*FUNCTION_NAMES, NORM_NAME)


class Family(NamedTuple):
    """A family of models: its layer class, and the name by which a kernel may replace that whole layer.

    Attributes:
        class_name: Name of the layer class in the family's modeling module.
        hub_name: Name for kernels; None if the kernel has no such layer.
        layer: The layer of the kernel that serves it.
    """

    class_name: str
    hub_name: str | None = None
    layer: str | None = None


# Only qwen3_5 and qwen3_5_moe give their layer class a name for kernels; `mark_layers` gives one to the others.
FAMILIES = {
    "qwen3_next": Family("Qwen3NextGatedDeltaNet", "Qwen3NextGatedDeltaNet", "Qwen3NextGatedDeltaNet"),
    "qwen3_5": Family("Qwen3_5GatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe": Family("Qwen3_5MoeGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5GatedDeltaNet"),
    "qwen4_exp": Family("Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet", "Qwen3_5GatedDeltaNet"),
    "olmo_hybrid": Family("OlmoHybridGatedDeltaNet"),
}

# {hub name: layer of the kernel} of the whole layers, and the hub names of everything that the kernel serves.
WHOLE_LAYERS = {family.hub_name: family.layer for family in FAMILIES.values() if family.hub_name is not None}
HUB_NAMES = (*WHOLE_LAYERS, *PART_NAMES)


class GatedDeltaNet(NamedTuple):
    """One layer of a model: its path, its module, and the objects by hub name that a kernel may replace in it.

    The whole layer comes first if the kernel has one for its family. The functions are the objects that the layer's code
    calls. They belong to the modeling module, so all models of a family in the process share them; the layer and its norm
    belong to this model alone.
    """

    path: str
    module: nn.Module
    replaceable: dict[str, nn.Module]


def gated_delta_nets(model: nn.Module) -> list[GatedDeltaNet]:
    """The gated delta rule layers of `model`, in the order of its modules."""
    return [
        GatedDeltaNet(path, module, _replaceable(family, module))
        for path, module in model.named_modules()
        if (family := _family_of(module)) is not None
    ]


def mark_layers() -> None:
    """Give the layer classes that transformers leaves closed their hub name, as `kernels` would find it on open ones.

    Only on classes, and only of families that the installed transformers has with its kernels switched on.
    """
    from kernels import replace_kernel_forward_from_hub

    for name, family in FAMILIES.items():
        layer_class = _layer_class(name)
        if family.hub_name is not None and layer_class is not None and not hasattr(layer_class, _HUB_NAME):
            replace_kernel_forward_from_hub(layer_class, family.hub_name)
            _marked.add(layer_class)


def unmark_layers() -> None:
    """Close again what `mark_layers` opened."""
    for layer_class in _marked:
        for name in (_HUB_NAME, "kernel_condition"):
            if name in vars(layer_class):
                delattr(layer_class, name)
    _marked.clear()


_HUB_NAME = "kernel_layer_name"
_marked: set[type[nn.Module]] = set()


def _layer_class(family: str) -> type[nn.Module] | None:
    """The layer class of a family; None if transformers lacks the family, or defined it without names for kernels."""
    try:
        module = import_module(_modeling_name(family))
    except ModuleNotFoundError as error:
        if error.name != "transformers" and not str(error.name).startswith("transformers.models."):
            raise
        return None
    return getattr(module, FAMILIES[family].class_name, None) if functions_of(module.__name__) else None


def functions_of(modeling_module: str) -> dict[str, nn.Module]:
    """The replaceable functions of a modeling module, by hub name; none if `kernels` was off when it was imported."""
    return {
        getattr(value, _HUB_NAME): value
        for value in vars(sys.modules[modeling_module]).values()
        if isinstance(value, nn.Module) and getattr(value, _HUB_NAME, None) in FUNCTION_NAMES
    }


def imported_modeling_modules() -> list[str]:
    """The modeling modules of transformers that this process has imported, of every family.

    Other families have the short convolution under the same names, and transformers kernelizes it there, too.
    """
    return [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]


def backbones(model: nn.Module) -> list[nn.Module]:
    """The modules that run the stacks of layers: for each gated delta rule layer, its innermost owner of `layers`."""
    modules = dict(model.named_modules())
    found: dict[int, nn.Module] = {}
    for net in gated_delta_nets(model):
        parts = net.path.split(".")
        ancestors = (modules[".".join(parts[:length])] for length in reversed(range(len(parts))))
        owner = next(
            (module for module in ancestors if isinstance(getattr(module, "layers", None), nn.ModuleList)), None
        )
        if owner is not None:
            found[id(owner)] = owner
    return list(found.values())


def _family_of(module: nn.Module) -> str | None:
    """The family whose gated delta rule layer `module` is or derives from."""
    for name, family in FAMILIES.items():
        for ancestor in type(module).__mro__:
            if ancestor.__name__ == family.class_name and ancestor.__module__ == _modeling_name(name):
                return name
    return None


def _replaceable(family: str, layer: nn.Module) -> dict[str, nn.Module]:
    functions = functions_of(_modeling_name(family))
    hub_name = FAMILIES[family].hub_name
    whole = {hub_name: layer} if functions and hub_name is not None else {}
    return {**whole, **functions, **_norm_of(layer)}


def _modeling_name(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def _norm_of(layer: nn.Module) -> dict[str, nn.Module]:
    norm = next((child for child in layer.children() if getattr(child, _HUB_NAME, None) == NORM_NAME), None)
    return {} if norm is None else {NORM_NAME: norm}
