"""What serves each gated delta rule layer of a model, and why."""

from dataclasses import dataclass

from torch import nn

from . import serving
from .installation import device_type_of, explain_nothing, required_nets
from .mapping import explain_absence, names_for
from .models import PART_NAMES, WHOLE_LAYERS

OURS = "qwen/flashqla"
ORIGINAL = "transformers"


@dataclass(frozen=True)
class Served:
    """One replaceable part of one layer.

    Attributes:
        layer: Path of the layer in the model.
        name: Hub name of the part, such as "chunk_gated_delta_rule".
        by: "qwen/flashqla", the name of another kernel, or "transformers" for the original forward.
        reason: Where the kernel was loaded from, or why the original forward is in place.
    """

    layer: str
    name: str
    by: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What `report` found; `str(report)` is a table, with the reasons below it."""

    model: str
    device: str
    parts: tuple[Served, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Paths of the gated delta rule layers, in the order of the model."""
        return tuple(dict.fromkeys(part.layer for part in self.parts))

    def served_by(self, layer: str) -> dict[str, str]:
        """{hub name: who serves it} of one layer."""
        return {part.name: part.by for part in self.parts if part.layer == layer}

    def served_whole(self, layer: str) -> bool:
        """Whether the kernel has the whole forward of a layer, not just functions in it."""
        return any(part.layer == layer and part.name in WHOLE_LAYERS and part.by == OURS for part in self.parts)

    def _summary(self) -> str:
        whole = [layer for layer in self.layers if self.served_whole(layer)]
        rest = [layer for layer in self.layers if layer not in whole]
        partly = [layer for layer in rest if OURS in self.served_by(layer).values()]
        return f"{len(whole)} served whole, {len(partly)} by functions, {len(rest) - len(partly)} not"

    def __str__(self) -> str:
        names = tuple(name for name in (*WHOLE_LAYERS, *PART_NAMES) if any(part.name == name for part in self.parts))
        header = ("layer", *names)
        rows = [(layer, *(self.served_by(layer).get(name, "-") for name in names)) for layer in self.layers]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
        reasons = dict.fromkeys((part.by, part.reason) for part in self.parts)
        title = f"{self.model} on {self.device}: {len(self.layers)} gated delta rule layers, {self._summary()}"
        return "\n".join([title, *map(str.rstrip, lines), *(f"{by}: {reason}" for by, reason in reasons)])


def report(model: nn.Module) -> Report:
    """List what serves each gated delta rule layer of the model right now.

    It looks at the functions that the layers really call, whoever installed them: this package, transformers or the user.

    Raises:
        ValueError: the model has no gated delta rule layer, or holds no data on any device; one sentence.
    """
    nets = required_nets(model, "report")
    device_type = device_type_of(model)
    nothing = explain_nothing(nets, device_type)
    parts = []
    for net in nets:
        whole = (name for name in WHOLE_LAYERS if name in net.replaceable)
        for name in (*whole, *PART_NAMES):
            by, reason = _who_serves(net.replaceable.get(name), name, device_type, nothing)
            parts.append(Served(net.path, name, by, reason))
    return Report(type(model).__name__, device_type, tuple(parts))


def is_active(model: nn.Module) -> bool:
    """Whether the kernel serves everything in the model that it has for the model's device, and has something for it.

    Raises:
        ValueError: as `report`.
    """
    found = report(model)
    names = names_for(found.device)
    return bool(names) and all(part.by == OURS for part in found.parts if part.name in names)


def _who_serves(layer: nn.Module | None, name: str, device_type: str, nothing: str | None) -> tuple[str, str]:
    if layer is None:
        return ORIGINAL, nothing or f"the layer has no {name} that a kernel could replace"
    kernel = serving.serving_kernel(layer)
    if kernel is not None:
        other, folder = serving.name_and_folder(layer, kernel)
        return (OURS if serving.is_ours(layer) else other), f"loaded from {folder}"
    if serving.current_forward(layer) is not type(layer).forward:
        forward = serving.current_forward(layer)
        return forward.__module__, f"{forward.__qualname__} replaced the forward"
    absent = nothing or explain_absence(name, device_type)
    return (
        ORIGINAL,
        absent or "the kernel is not installed here, or something undid it: call flashqla_hub.kernelize(model)",
    )
