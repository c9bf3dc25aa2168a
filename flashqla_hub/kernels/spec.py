"""Which kernels exist. Importing this module needs neither TileLang nor a GPU; `build()` needs TileLang."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any

from ._decode_tiles import DECODE_LAYOUTS

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
WIDE_DTYPES = DTYPES | {"fp32": "float32"}

TOKEN_COUNTS = (1, 4)  # kernels for one token and for up to four
CONVOLUTION_TAPS = (4, 8)  # kernels for widths up to 4 and up to 8

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

# For kernels whose launch says how many blocks form a cluster, by an argument.
CLUSTERED = MappingProxyType(dict(PASS_CONFIGS) | {"flashqla.cluster": "cluster"})

# For kernels that have every fence between plain and asynchronous accesses to shared memory themselves.
OWN_FENCES = MappingProxyType(dict(PASS_CONFIGS) | {"flashqla.own_fences": True})

# For kernels that run beside others: a pair of SMs gets blocks of the same code, since blocks 2 i and 2 i + 1 are a cluster
# (docs/design/2026-12-01-instructions.md).
PAIRED = MappingProxyType(dict(OWN_FENCES) | {"flashqla.cluster": 2})


@dataclass(frozen=True)
class FactorSpec:
    """Per chunk and key head: gate sums, key norms and the chunk's solve of every value head."""

    dtype: str
    form: str = "operand"  # or "kept", for the backward too, or "errors", for the backward alone
    # K K^T is 8 wgmma of depth 16; a warp joins 8-blocks (2 + 2 mma.sync), 16-blocks (2 + 2) and 32-blocks (a loop of 4,
    # then 6).
    minimum_instructions: Mapping[str, int] = field(
        default_factory=lambda: {"HGMMA": 8, "HMMA": 18, "LDSM": 17, "UTMALDG": 2}
    )
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"factor_{self.dtype}" if self.form == "operand" else f"factor_{self.form}_{self.dtype}"

    def build(self) -> Any:
        from .factor import build_factor

        return build_factor(DTYPES[self.dtype], self.form)


@dataclass(frozen=True)
class RecurrenceSpec:
    """Outputs and states of one value head of a part of one sequence per block."""

    dtype: str
    form: str = "outputs"  # or "long", for long sequences among many short ones, or "kept", for training
    # One program for both state warpgroups: 8 + 4 + 4 + 8 wgmma (K S, A Z, state, Q S) and P N's 4 in either mode; 8 more
    # are Q K^T. Replayed chunks have 8 + 4 + 4 of their own, and a link 6 of depth 64. The tiles of V and O go through
    # transposing matrix loads and stores, four a slot.
    minimum_instructions: Mapping[str, int] = field(
        default_factory=lambda: {"HGMMA": 80, "UTMALDG": 11, "UTMASTG": 4, "LDSM": 16, "STSM": 8, "USETMAXREG": 3}
    )
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"recurrence_{self.dtype}" if self.form == "outputs" else f"recurrence_{self.form}_{self.dtype}"

    def build(self) -> Any:
        from .recurrence import build_recurrence

        return build_recurrence(DTYPES[self.dtype], self.form)


@dataclass(frozen=True)
class ShortSpec:
    """Outputs and states of the value heads of a key head of one short sequence per block."""

    dtype: str
    # Q K^T 8 wgmma, K S 8, A Z 4 with and without a state, Q S 8, P N 4, state 4; of half a chunk Q K^T 8, A Z and P N 2 each
    # in four places.
    minimum_instructions: Mapping[str, int] = field(
        default_factory=lambda: {"HGMMA": 60, "UTMALDG": 28, "LDSM": 12, "STSM": 12}
    )
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"short_{self.dtype}"

    def build(self) -> Any:
        from .short import build_short

        return build_short(DTYPES[self.dtype])


@dataclass(frozen=True)
class ConvolutionSpec:
    """The short convolution of tokens in rows."""

    dtype: str
    taps: int
    mode: str  # "exact" for this width and rows of one sequence, "general" for widths up to it and any sequences
    norms_heads: bool = False  # the form for the layer, which also normalises the heads of q and k
    # A round of four tokens has a load and a store each.
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 8, "STG": 4})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"convolution_{'normed_' if self.norms_heads else ''}{self.mode}_{self.taps}_{self.dtype}"

    def build(self) -> Any:
        from .convolution import build_convolution

        return build_convolution(DTYPES[self.dtype], self.taps, self.mode, self.norms_heads)


@dataclass(frozen=True)
class ConvolutionBackwardSpec:
    """Gradients of the short convolution, those of the weights as one sum a tile."""

    dtype: str
    taps: int
    mode: str  # as above, and "states" for rows with states before and after
    # A round of four tokens has two loads and a store each.
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 16, "STG": 4})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"convolution_backward_{self.mode}_{self.taps}_{self.dtype}"

    def build(self) -> Any:
        from .convolution_backward import build_convolution_backward

        return build_convolution_backward(DTYPES[self.dtype], self.taps, self.mode)


@dataclass(frozen=True)
class ConvolutionGradientsSpec:
    """Gradients of the convolution's weights and bias from the sums of the tiles."""

    dtype: str
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 1, "STG": 2})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"convolution_gradients_{self.dtype}"

    def build(self) -> Any:
        from .convolution_gradients import build_convolution_gradients

        return build_convolution_gradients((DTYPES | {"fp32": "float32"})[self.dtype])


@dataclass(frozen=True)
class ConvolutionTurnedSpec:
    """The short convolution of channels in rows, whose output lies in rows of channels, for widths up to `taps`."""

    dtype: str
    taps: int
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 24, "STG": 8})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"convolution_turned_{self.taps}_{self.dtype}"

    def build(self) -> Any:
        from .convolution_turned import build_convolution_turned

        return build_convolution_turned(DTYPES[self.dtype], self.taps)


@dataclass(frozen=True)
class ConvolutionUpdateSpec:
    """The short convolution of a few new tokens and a state that it moves on, for widths up to `taps`."""

    dtype: str
    taps: int
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 8, "STG": 2})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"convolution_update_{self.taps}_{self.dtype}"

    def build(self) -> Any:
        from .convolution_update import build_convolution_update

        return build_convolution_update(DTYPES[self.dtype], self.taps)


@dataclass(frozen=True)
class NormSpec:
    """The gated RMS norm."""

    dtype: str
    # Four rows a thread: x and g in, y out, and a weight of either width.
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 11, "STG": 4, "HMUL2": 4})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"norm_{self.dtype}"

    def build(self) -> Any:
        from .norm import build_norm

        return build_norm(DTYPES[self.dtype])


@dataclass(frozen=True)
class NormBackwardSpec:
    """Gradients of the gated RMS norm."""

    dtype: str
    few: bool = False  # the form for fewer rows, which has three of them a thread
    # x, g and dy in, dx and dg out, a weight of either width, and a share of its gradient, of two rows a thread and more.
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 12, "STG": 7})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"norm_backward_{'few_' if self.few else ''}{self.dtype}"

    def build(self) -> Any:
        from .norm_backward import build_norm_backward
        from .norm_backward_few import build_norm_backward_few

        return (build_norm_backward_few if self.few else build_norm_backward)(DTYPES[self.dtype])


@dataclass(frozen=True)
class PartialSumsSpec:
    """Sums over the parts that the blocks of a backward kernel have left."""

    dtype: str
    # It waits for the kernel before it on the stream.
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"ACQBULK": 1})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"partial_sums_{self.dtype}"

    def build(self) -> Any:
        from .partial_sums import build_partial_sums

        return build_partial_sums(DTYPES[self.dtype])


@dataclass(frozen=True)
class GatesSpec:
    """Gate activations of the layer."""

    dtype: str
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"MUFU": 4, "STG": 8})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"gates_{self.dtype}"

    def build(self) -> Any:
        from .gates import build_gates

        return build_gates(WIDE_DTYPES[self.dtype])


@dataclass(frozen=True)
class GatesBackwardSpec:
    """Gradients of the gate activations."""

    dtype: str
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"MUFU": 4, "STG": 3})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"gates_backward_{self.dtype}"

    def build(self) -> Any:
        from .gates_backward import build_gates_backward

        return build_gates_backward(WIDE_DTYPES[self.dtype])


@dataclass(frozen=True)
class DecodeSpec:
    """The recurrence token by token, on states in one of two layouts."""

    dtype: str
    layout: str
    # Eight accesses to the state, in and out, and outputs; lines of a state and of a token's rows that are ordered ahead.
    # It lets the kernel behind begin, and waits for the end of that before it.
    minimum_instructions: Mapping[str, int] = field(
        default_factory=lambda: {"LDG": 16, "STG": 9, "CCTL": 4, "PREEXIT": 1, "ACQBULK": 1}
    )
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"decode_{self.dtype}_{self.layout}"

    def build(self) -> Any:
        from .decode import build_decode

        return build_decode(DTYPES[self.dtype], DECODE_LAYOUTS[self.layout])


@dataclass(frozen=True)
class DecodeLayerSpec:
    """A decoded token of the layer between its projections: convolution, recurrence and norm, on float32 states [K, V]."""

    dtype: str
    layout: str
    # Eight accesses to the state, in and out, two stores of histories, and outputs; beside what a decode step has, a barrier
    # of the cluster, and stores to the shared memory of other blocks, which a barrier counts.
    minimum_instructions: Mapping[str, int] = field(
        default_factory=lambda: {
            **{"LDG": 20, "STG": 11, "CCTL": 9, "PREEXIT": 1, "ACQBULK": 1},
            **{"UCGABAR_ARV": 1, "UCGABAR_WAIT": 1, "STAS": 2, "SYNCS": 3},
        }
    )
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: CLUSTERED)

    @property
    def name(self) -> str:
        return f"decode_layer_{self.dtype}_{self.layout}"

    def build(self) -> Any:
        from .decode_layer import build_decode_layer

        return build_decode_layer(DTYPES[self.dtype], DECODE_LAYOUTS[self.layout])


@dataclass(frozen=True)
class TokenProductsSpec:
    """Products of at most `count` tokens with several matrices."""

    dtype: str
    count: int
    shares: bool = False  # the form for few rows, of which the warps of a block share the columns
    # Four rows of each of four matrices, and of every token, in one turn at least.
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 32, "STG": 4})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"token_products_{'shared_' if self.shares else ''}{self.count}_{self.dtype}"

    def build(self) -> Any:
        from .token_products import build_token_products

        return build_token_products(DTYPES[self.dtype], self.count, self.shares)


@dataclass(frozen=True)
class BackwardPlanSpec:
    """Chunk records and spans of a backward; zeros in the gradients of rows without a sequence."""

    name: str = "backward_plan"
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"STG": 13})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    def build(self) -> Any:
        from .backward_plan import build_backward_plan

        return build_backward_plan()


@dataclass(frozen=True)
class BackwardRowsSpec:
    """Per chunk: norms of keys and queries, and scales of the rows of every value head for the backward."""

    dtype: str
    # Four rows of q or of k on the way; nine pairs of scales.
    minimum_instructions: Mapping[str, int] = field(default_factory=lambda: {"LDG": 12, "STG": 12})
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PASS_CONFIGS)

    @property
    def name(self) -> str:
        return f"backward_rows_{self.dtype}"

    def build(self) -> Any:
        from .backward_rows import build_backward_rows

        return build_backward_rows(DTYPES[self.dtype])


@dataclass(frozen=True)
class BackwardScanSpec:
    """States before each chunk and gradients of those behind it, half of a value head and one direction per block."""

    dtype: str
    # Forward 8 + 4 + 4 wgmma (K S, solve, state), reverse 8 + 4 + 8 + 4 + 4 (K dS, scores, solve, queries, keys), with and
    # without outputs; a link 6 of depth 64 in either direction; 8 more are Q K^T. It waits for the kernel before it in three
    # places, and lets the one behind it begin.
    minimum_instructions: Mapping[str, int] = field(
        default_factory=lambda: (
            {"HGMMA": 144, "UTMALDG": 28, "UTMASTG": 6, "LDSM": 24, "STSM": 24} | {"ACQBULK": 3, "PREEXIT": 1}
        )
    )
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: PAIRED)

    @property
    def name(self) -> str:
        return f"backward_scan_{self.dtype}"

    def build(self) -> Any:
        from .backward_scan import build_backward_scan

        return build_backward_scan(DTYPES[self.dtype])


@dataclass(frozen=True)
class BackwardGradientsSpec:
    """Gradients of q, k, g and beta of a chunk and key head, from the states and their gradients."""

    dtype: str
    # Queries 8 + 4 (state, pairs), keys 8, a loop, and 3 times 4, pairs 8 + 8 (products, scores), a loop.
    minimum_instructions: Mapping[str, int] = field(
        default_factory=lambda: {"HGMMA": 48, "UTMALDG": 19, "USETMAXREG": 4}
    )
    pass_configs: Mapping[str, Any] = field(default_factory=lambda: OWN_FENCES)

    @property
    def name(self) -> str:
        return f"backward_gradients_{self.dtype}"

    def build(self) -> Any:
        from .backward_gradients import build_backward_gradients

        return build_backward_gradients(DTYPES[self.dtype])


SPECS = (
    *(FactorSpec(dtype) for dtype in DTYPES),
    FactorSpec("bf16", "kept"),
    FactorSpec("fp16", "errors"),
    *(RecurrenceSpec(dtype) for dtype in DTYPES),
    *(ShortSpec(dtype) for dtype in DTYPES),
    *(RecurrenceSpec(dtype, "long") for dtype in DTYPES),
    RecurrenceSpec("bf16", "kept"),
    BackwardPlanSpec(),
    *(BackwardRowsSpec(dtype) for dtype in DTYPES),
    *(BackwardScanSpec(dtype) for dtype in DTYPES),
    *(BackwardGradientsSpec(dtype) for dtype in DTYPES),
    *(ConvolutionSpec(*key) for key in product(DTYPES, CONVOLUTION_TAPS, ("exact", "general"))),
    *(ConvolutionSpec(dtype, 4, mode, norms_heads=True) for dtype in DTYPES for mode in ("exact", "general")),
    *(ConvolutionBackwardSpec(*key) for key in product(DTYPES, CONVOLUTION_TAPS, ("exact", "general", "states"))),
    *(ConvolutionGradientsSpec(dtype) for dtype in (*DTYPES, "fp32")),
    *(ConvolutionTurnedSpec(*key) for key in product(DTYPES, CONVOLUTION_TAPS)),
    *(ConvolutionUpdateSpec(*key) for key in product(DTYPES, CONVOLUTION_TAPS)),
    *(NormSpec(dtype) for dtype in DTYPES),
    *(NormBackwardSpec(dtype, few) for few in (False, True) for dtype in DTYPES),
    *(PartialSumsSpec(dtype) for dtype in DTYPES),
    *(GatesSpec(dtype) for dtype in WIDE_DTYPES),
    *(GatesBackwardSpec(dtype) for dtype in WIDE_DTYPES),
    *(DecodeSpec(*key) for key in product(DTYPES, DECODE_LAYOUTS)),
    *(DecodeLayerSpec(*key) for key in product(DTYPES, ("kv_f32", "kv_f32_few"))),
    *(TokenProductsSpec(*key) for key in product(DTYPES, TOKEN_COUNTS, (False, True))),
)
