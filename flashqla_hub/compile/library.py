"""C++ sources -> one shared library per CPU, with zig's clang: glibc 2.28, no C++ run time, PyTorch only by name."""

import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .cubin import run
from .errors import CompilerError
from .tools import ROOT, Tools

MACHINES = ("x86_64", "aarch64")
CSRC = ROOT / "torch-ext" / "flashqla" / "csrc"
GLIBC = "2.28"

COMPILE_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fasynchronous-unwind-tables",  # libtorch's exceptions pass over our frames
    "-fno-threadsafe-statics",  # their guard functions live in the C++ run time
    "-fno-sanitize=undefined",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-c23-extensions",  # #embed
)
LINK_FLAGS = ("-nostdlib++", "-Wl,--no-as-needed", "-ltorch_cpu", "-ldl", "-Wl,-z,undefs", "-Wl,--build-id=none", "-s")


def hand_written_sources(*folders: str) -> dict[str, bytes]:
    """Path relative to csrc -> content, of the C++ files in those folders of csrc."""
    paths = [path for folder in folders for path in (CSRC / folder).rglob("*") if path.suffix in (".h", ".cpp")]
    return {path.relative_to(CSRC).as_posix(): path.read_bytes() for path in sorted(paths)}


def build_library(
    tools: Tools,
    machine: str,
    namespace: str,
    sources: Mapping[str, bytes],
    zig_cache: Path | None = None,
    defines: Sequence[str] = (),
) -> bytes:
    """Compiles all `.cpp` among the sources into one library and returns its bytes.

    The sources are laid into a fresh folder and compiled there under relative names, so that the bytes depend neither on
    where the project lies nor on an earlier build.

    Args:
        machine: one of MACHINES.
        namespace: op namespace, a Python identifier.
        sources: relative path -> content; headers and cubins among them.
        zig_cache: where zig keeps its libc stubs between calls; None for a fresh one.
        defines: further macros, for libraries that exist only in tests.

    Raises:
        CompilerError: the compiler refused, or a cubin is not in the library afterwards.
    """
    if not namespace.isidentifier():
        raise ValueError(f"the op namespace is {namespace!r}, and torch.ops takes Python identifiers; rename it.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, content in sources.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        target = f"{machine}-linux-gnu.{GLIBC}"
        zig_folders = {"ZIG_LOCAL_CACHE_DIR": f"{folder}/zig", "ZIG_GLOBAL_CACHE_DIR": f"{zig_cache or folder / 'zig'}"}
        environment = {**os.environ, **zig_folders}
        _make_torch_stub(tools, target, folder, environment)
        macros = [f'-DOPS_NS="{namespace}"', *(f"-D{define}" for define in defines)]
        units = sorted(name for name in sources if name.endswith(".cpp"))
        compile_part = [tools.zig, "cc", "-target", target, "-x", "c++", *COMPILE_FLAGS, "-I.", *macros, *units]
        run([*compile_part, "-x", "none", "-L.", *LINK_FLAGS, "-o", "library.so"], folder, environment)
        library = (folder / "library.so").read_bytes()
    for name, content in sources.items():
        if name.endswith(".cubin") and content not in library:
            raise CompilerError(f"the {machine} library does not hold the current {name}; zig reused a stale object.")
    return library


def host_machine() -> str:
    """The name in MACHINES of the CPU that runs this."""
    return platform.machine()


def _make_torch_stub(tools: Tools, target: str, folder: Path, environment: Mapping[str, str]) -> None:
    """An empty libtorch_cpu.so: the linker records the name, and the loader finds PyTorch's own."""
    (folder / "stub.c").write_text("")
    soname = "-Wl,-soname,libtorch_cpu.so"
    run([tools.zig, "cc", "-target", target, "-shared", "stub.c", soname, "-o", "libtorch_cpu.so"], folder, environment)
