"""Who serves the gated delta rule in a run: this kernel, or what it is compared with.

transformers decides at its import which library its layers call, so a choice holds for a whole process and is made before
transformers is imported.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from .settings import FinetuneError

OURS = "flashqla"
PLAIN = "plain"
ROUNDING = "plain-eager"
FLA = "fla"
FLA_FLASH_QLA = "fla+flashqla"
ONE_BY_ONE = "one-by-one"

# What transformers calls instead of its own code if it is installed.
ACCELERATING = ("fla", "causal_conv1d")


@dataclass(frozen=True)
class Implementation:
    """One way to serve the layers.

    Attributes:
        title: What it is, for the report.
        needs: {module: distribution} that must be installed; a run of it must have called them all.
        hides: Modules that transformers must not find.
        environment: Variables that must be set before anything is imported.
        attention: Attention implementation that belongs to it; None for that of the settings.
        is_ours: Whether this kernel serves it.
        keeps_apart: Whether it keeps packed documents apart; without that it computes them one after the other.
        compared_steps: Steps of a comparison, unless the user says otherwise.
    """

    title: str
    needs: tuple[tuple[str, str], ...] = ()
    hides: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    attention: str | None = None
    is_ours: bool = False
    keeps_apart: bool = False
    compared_steps: int = 50


_FLA = ("fla", "flash-linear-attention")
IMPLEMENTATIONS = {
    OURS: Implementation("qwen/flashqla", is_ours=True, keeps_apart=True),
    PLAIN: Implementation("transformers", hides=ACCELERATING, compared_steps=10),
    ROUNDING: Implementation("transformers, eager attention", hides=ACCELERATING, attention="eager", compared_steps=10),
    FLA: Implementation("FLA", (_FLA,), environment=(("FLA_FLASH_QLA", "0"),)),
    FLA_FLASH_QLA: Implementation(
        "FLA and FlashQLA",
        (_FLA, ("flash_qla", "flash-qla")),
        environment=(("FLA_FLASH_QLA", "1"),),
    ),
    ONE_BY_ONE: Implementation("qwen/flashqla, one document at a time", is_ours=True, compared_steps=10),
}
BASELINES = tuple(name for name in IMPLEMENTATIONS if name != OURS)


def baselines(packed: bool) -> tuple[str, ...]:
    """What a run can be compared with; documents one at a time mean something only to one that packs them."""
    return BASELINES if packed else tuple(name for name in BASELINES if name != ONE_BY_ONE)


def explain_missing(name: str, device: str) -> str | None:
    """Why this machine cannot run it; None if it can."""
    for module, distribution in IMPLEMENTATIONS[name].needs:
        if find_spec(module) is None:
            return f"{distribution} is not installed"
        if not device.startswith("cuda"):
            return f"{distribution} needs a GPU and this run is on {device}"
    return None


def isolate(name: str) -> None:
    """Let this process find what the implementation is made of, and nothing else; before transformers is imported.

    Raises:
        FinetuneError: transformers has already met what it must not find.
    """
    implementation = IMPLEMENTATIONS[name]
    os.environ.update(implementation.environment)
    for module in implementation.hides:
        if sys.modules.get(module) is not None and "transformers" in sys.modules:
            raise FinetuneError(f"{module} is already imported, so this process cannot run {name}; start another one.")
        if find_spec(module) is not None:
            sys.modules[module] = None  # to Python, and so to transformers, a module that is not there


def require_called(name: str, functions: Sequence[str]) -> None:
    """Raise FinetuneError if the last library that the run is named after has not served a step.

    `functions` are those that ran in one, if one was watched; otherwise the library must at least have been imported.
    """
    for module, distribution in IMPLEMENTATIONS[name].needs[-1:]:
        called = [function for function in functions if function.startswith(f"{module}.")]
        if not called if functions else sys.modules.get(module) is None:
            raise FinetuneError(
                f"{distribution} is installed but the layers did not call it, so this is no run of {name}."
            )
