"""The gated delta rule layers of transformers: which classes they are, and the objects in them that a kernel replaces.

Classes are recognised by where they are defined and what they are called, so nothing here imports transformers.
"""

import sys
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
LAYER_NAMES = (*FUNCTION_NAMES, NORM_NAME)

# The layer class of each family. Only qwen3_5 and qwen3_5_moe give that class itself a name for kernels, so all
# families are served through the functions and the norm, which have the same names and signatures in each of them.
FAMILIES = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
    "qwen4_exp": "Qwen4ExpTextGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
}


class GatedDeltaNet(NamedTuple):
    """One layer of a model: its path, its module, and the objects by hub name that a kernel may replace in it.

    The functions are the objects that the layer's code calls. They belong to the modeling module, so all models of a
    family in the process share them; the norm belongs to this layer alone.
    """

    path: str
    module: nn.Module
    replaceable: dict[str, nn.Module]


def gated_delta_nets(model: nn.Module) -> list[GatedDeltaNet]:
    """The gated delta rule layers of `model`, in the order of its modules."""
    return [
        GatedDeltaNet(path, module, {**functions_of(owner), **_norm_of(module)})
        for path, module in model.named_modules()
        if (owner := _modeling_module(module)) is not None
    ]


def functions_of(modeling_module: str) -> dict[str, nn.Module]:
    """The replaceable functions of a modeling module, by hub name; none if `kernels` was off when it was imported."""
    return {
        value.kernel_layer_name: value
        for value in vars(sys.modules[modeling_module]).values()
        if isinstance(value, nn.Module) and getattr(value, "kernel_layer_name", None) in FUNCTION_NAMES
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


def _modeling_module(module: nn.Module) -> str | None:
    """The modeling module that `module` comes from if it is a gated delta rule layer or derives from one."""
    for family, class_name in FAMILIES.items():
        for ancestor in type(module).__mro__:
            if ancestor.__name__ == class_name and ancestor.__module__ == _modeling_name(family):
                return ancestor.__module__
    return None


def _modeling_name(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


def _norm_of(layer: nn.Module) -> dict[str, nn.Module]:
    norm = next((child for child in layer.children() if getattr(child, "kernel_layer_name", None) == NORM_NAME), None)
    return {} if norm is None else {NORM_NAME: norm}
