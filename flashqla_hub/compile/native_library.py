"""The compiled library as the package builder wants it (flashqla_hub.package.variants.NativeLibrary)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

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
        """The bytes of the library, from the cache where it has them; a process makes each library once.

        Raises:
            ToolsMissing, LoweringError, CompilerError, GateFailure: see flashqla_hub.compile.product.
        """
        return _library(self.machine, namespace)


@cache
def _library(machine: str, namespace: str) -> bytes:
    from .product import link_library

    return link_library(machine, namespace, _kernels(), default_folder())


@cache
def _kernels():
    """Every kernel of the product, compiled and judged."""
    from .cache import Cache
    from .product import compile_kernels
    from .tools import find_tools

    tools = find_tools()  # before the specs, whose kernels import tilelang
    from flashqla_hub.kernels.spec import SPECS

    return compile_kernels(SPECS, tools, Cache(default_folder()))
