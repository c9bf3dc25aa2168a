"""Which kernels exist. Importing this module needs neither TileLang nor a GPU; `build()` needs TileLang."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

PASS_CONFIGS = MappingProxyType(
    {
        # The kernels order their shared memory themselves, with mbarriers and named barriers.
        "tl.disable_thread_storage_sync": True,
        # Sharing one place between tiles of different life would need the barriers that the line above leaves out.
        "tl.disable_shared_memory_reuse": True,
        # Indices are masked where they can leave a tensor; checks on the others cost registers and divisions.
        "tl.disable_safe_memory_legalize": True,
    }
)


@dataclass(frozen=True)
class FactorSpec:
    """Per chunk and key head: gate sums, key norms and the chunk's solve of every value head."""

    dtype: str
    # K K^T is 8 wgmma of depth 16; each side joins 16-blocks (2 + 2 mma.sync) and 32-blocks (a loop of 4, then 6).
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"HGMMA": 8, "HMMA": 28, "UTMALDG": 2})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"factor_{self.dtype}"

    def build(self) -> Any:
        from .factor import build_factor

        return build_factor(DTYPES[self.dtype])


@dataclass(frozen=True)
class RecurrenceSpec:
    """Outputs and states of one value head of a part of one sequence per block."""

    dtype: str
    # One program for both state warpgroups: 8 + 4 + 4 + 8 wgmma (K S, A Z, state, Q S) and P N's 4 in either mode; 8 more
    # are Q K^T. Replayed chunks have 8 + 4 + 4 of their own, and a link 6 of depth 64. The tiles of V and O go through
    # transposing matrix loads and stores, four a slot.
    minimum_instructions: Mapping[str, int] = field(
        default_factory=lambda: {"HGMMA": 80, "UTMALDG": 19, "UTMASTG": 4, "LDSM": 16, "STSM": 8, "USETMAXREG": 3}
    )
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"recurrence_{self.dtype}"

    def build(self) -> Any:
        from .recurrence import build_recurrence

        return build_recurrence(DTYPES[self.dtype])


SPECS = (
    *(FactorSpec(dtype) for dtype in DTYPES),
    *(RecurrenceSpec(dtype) for dtype in DTYPES),
)
