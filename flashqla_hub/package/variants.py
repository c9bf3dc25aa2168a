"""The build variants: one directory of `build/` each, named as `kernels` chooses between them.

`kernels` takes the most specific variant that fits the installed torch, CUDA, processor and system, and
`torch-universal` where none does. That one is plain Python: it serves the CPU, and every torch or platform without a
compiled library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kernels.variants import parse_variant

from ..compile.native_library import AheadOfTimeLibrary


class NativeLibrary(Protocol):
    """A shared library that registers ops. Frozen, so that a variant stays a value."""

    def inputs(self) -> Mapping[str, bytes]:
        """Everything that decides the library's bytes but the namespace: sources, flags and tool versions, by name."""

    def compile(self, namespace: str) -> bytes:
        """The library, whose ops are registered under `torch.ops.<namespace>`; the same inputs give the same bytes."""


@dataclass(frozen=True)
class Variant:
    """One way in which the kernel is shipped.

    Attributes:
        name: Directory under `build/`, in the spelling of `kernels`.
        backend: Backend type in metadata.json. The metadata has no word for "universal": a variant that needs no
            accelerator says "cpu", which no version of `kernels` compares with the machine.
        archs: CUDA architectures that the library was compiled for; `get_kernel` refuses other devices.
        library: The ops beyond Python, None for plain Python.
    """

    name: str
    backend: str
    archs: tuple[str, ...] = ()
    library: NativeLibrary | None = None


MACHINES = ("x86_64", "aarch64")

# A library uses the stable ABI of torch 2.9, which later versions keep, and no CUDA run time. `kernels` matches CUDA by major
# version with a minor at least the variant's, so the same library lies under one name for CUDA 12 and one for CUDA 13.
CUDA_VERSIONS = ("cu126", "cu130")

VARIANTS = (
    *(
        Variant(f"torch-stable-abi29-{cuda}-{machine}-linux", "cuda", ("9.0a",), AheadOfTimeLibrary(machine))
        for cuda in CUDA_VERSIONS
        for machine in MACHINES
    ),
    Variant(name="torch-universal", backend="cpu"),
)


def is_variant_name(name: str) -> bool:
    """Whether `kernels` can read `name` as a build variant; it skips every other directory of `build/`."""
    try:
        parse_variant(name)
    except ValueError:
        return False
    return True
