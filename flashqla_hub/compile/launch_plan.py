"""What the host must do to launch one compiled kernel, as plain data.

`flashqla_hub.compile.lowering` reads a plan from the lowered host program, `launcher_source` prints it as C++, and the
manifest stores it, so that tests and other launchers need neither TileLang nor the C++ text. Sizes, strides and grid
extents are C++ expressions over int64_t symbols such as "(H * 256)"; every symbol is listed in `symbols` or `scalars`.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Tensor:
    """A tensor parameter; `strides` counts elements."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True)
class Scalar:
    """A number that the caller passes."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Symbol:
    """A run-time number read off a tensor: its `kind` along `axis`, minus `offset` (1 for N in a shape [N + 1])."""

    name: str
    dtype: str
    tensor: str
    axis: int
    kind: Literal["size", "stride"]
    offset: int = 0


@dataclass(frozen=True)
class TensorMap:
    """Arguments of cuTensorMapEncodeTiled; innermost dimension first, strides in bytes, enumerators as numbers."""

    name: str
    tensor: str
    dtype: int
    dims: tuple[str, ...]
    strides: tuple[str, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    out_of_bounds: int


@dataclass(frozen=True)
class Argument:
    """One argument of the kernel, in its order: a tensor map, a tensor's address, or a number of type `dtype`."""

    kind: Literal["map", "pointer", "value"]
    value: str
    dtype: str


@dataclass(frozen=True)
class LaunchPlan:
    """Everything between a call with tensors and cuLaunchKernelEx."""

    name: str
    kernel: str
    tensors: tuple[Tensor, ...]
    scalars: tuple[Scalar, ...]
    symbols: tuple[Symbol, ...]
    maps: tuple[TensorMap, ...]
    arguments: tuple[Argument, ...]
    grid: tuple[str, str, str]
    block: tuple[str, str, str]
    cluster: tuple[str, str, str]
    dynamic_shared_memory: int
    programmatic_launch: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LaunchPlan":
        parts = {"tensors": Tensor, "scalars": Scalar, "symbols": Symbol, "maps": TensorMap, "arguments": Argument}
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        for key, part in parts.items():
            values[key] = tuple(part(**_with_tuples(item)) for item in data[key])
        return cls(**values)


def _with_tuples(item: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
