"""Finds the compilers: wheels pinned in requirements/build.txt, plus the machine's g++ as nvcc's preprocessor."""

import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from .errors import ToolsMissing

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "build.txt"
INSTALL = "pip install -r requirements/build.txt"


@dataclass(frozen=True)
class Tools:
    """Paths of the compilers and the exact versions of the wheels they came from."""

    nvcc: Path
    host_compiler: Path
    ptxas: Path
    nvdisasm: Path
    zig: Path
    device_includes: tuple[Path, ...]
    versions: dict[str, str]


@cache
def pinned_versions() -> dict[str, str]:
    """Distribution name -> exact version, from the `name==version` lines of requirements/build.txt."""
    lines = REQUIREMENTS.read_text().splitlines()
    return dict(match.groups() for line in lines if (match := re.fullmatch(r"([\w.-]+)==([\w.]+)", line.strip())))


def find_tools() -> Tools:
    """Locates every tool.

    Raises:
        ToolsMissing: a wheel is absent, has another version than its pin, or g++ is not on PATH.
    """
    for name, wanted in pinned_versions().items():
        _require(name, wanted)
    tilelang = _file("tilelang", "tilelang/__init__.py").parent
    return Tools(
        nvcc=_file("nvidia-cuda-nvcc", "nvidia/cu13/bin/nvcc"),
        host_compiler=_find_host_compiler(),
        ptxas=_file("nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/bin/ptxas"),
        nvdisasm=_file("nvidia-cuda-nvdisasm", "nvidia/cu13/bin/nvdisasm"),
        zig=_file("ziglang", "ziglang/zig"),
        device_includes=(tilelang / "src", tilelang / "3rdparty" / "cutlass" / "include"),
        versions=dict(pinned_versions()),
    )


def explain_missing_tools() -> str | None:
    """One sentence on why nothing can be compiled here, or None when everything is in place."""
    try:
        find_tools()
    except ToolsMissing as error:
        return str(error)
    return None


def _require(name: str, wanted: str) -> None:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ToolsMissing(
            f"{name} {wanted} is needed to compile the kernels and is not installed: {INSTALL}."
        ) from None
    if found != wanted:
        raise ToolsMissing(f"{name} {found} is installed, but the kernels are compiled with {wanted}: {INSTALL}.")


def _file(distribution: str, relative: str) -> Path:
    path = Path(str(metadata.distribution(distribution).locate_file(relative)))
    if not path.is_file():
        raise ToolsMissing(
            f"{distribution} is installed without {relative}; reinstall it: {INSTALL} --force-reinstall."
        )
    return path


def _find_host_compiler() -> Path:
    """g++, which nvcc runs as a preprocessor; the PTX is the same with g++ 11 and 12 (measured byte for byte)."""
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    if found is None:
        raise ToolsMissing(f"{wanted} is not on PATH, and nvcc preprocesses with it: install g++ or point CXX at one.")
    return Path(found)
