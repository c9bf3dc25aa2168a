"""The compiled library as the package builder wants it (flashqla_hub.package.variants.NativeLibrary)."""

from collections.abc import Mapping
from dataclasses import dataclass

from .cache import default_folder
from .inputs import input_files


@dataclass(frozen=True)
class AheadOfTimeLibrary:
    """The library for one CPU: "x86_64" or "aarch64"."""

    machine: str

    def inputs(self) -> Mapping[str, bytes]:
        """Sources and tool pins; reading them needs no compiler."""
        return input_files()

    def compile(self, namespace: str) -> bytes:
        """The bytes of the library, from the cache where it has them.

        Raises:
            ToolsMissing, LoweringError, CompilerError, GateFailure: see flashqla_hub.compile.product.
        """
        from flashqla_hub.kernels.spec import SPECS

        from .product import compile_library

        return compile_library(self.machine, namespace, SPECS, default_folder())
