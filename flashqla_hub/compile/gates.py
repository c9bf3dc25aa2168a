"""What must hold before a cubin or a library may be shipped; each violation is one sentence."""

import re
from collections.abc import Mapping

from .cubin import Resources
from .elf import Import, SharedLibrary
from .launch_plan import LaunchPlan
from .torch_shims import OLDEST_TORCH, SINCE

MAX_SHARED_MEMORY = 227 * 1024  # per block on SM90, CUDA C++ Programming Guide, table of compute capabilities
SERIALIZED = "C75"  # ptxas notes C7507, C7508, C7512, C7515 and their neighbours: wgmma is serialised or moved
LOCAL_MEMORY_OPCODES = ("LDL", "STL")

MAX_GLIBC = (2, 28)  # manylinux_2_28
ALLOWED_LIBRARIES = ("libtorch_cpu.so", "libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
LARGEST_PAGE = {"x86_64": 4096, "aarch64": 65536}  # bytes; Linux on Grace comes with pages of 64 KiB
MAX_LIBRARY = 6_000_000  # bytes; every machine that loads the kernel downloads one
OPENED_LIBRARIES = ("libcuda.so.1", "libtorch_cuda.so")  # by name, at the first call on a GPU
REACHING_OUT = re.compile(
    r"syscall|system|popen|v?fork|clone|execl?[vep]*|fexecve|execve(at)?|posix_spawnp?|ptrace"
    r"|socket(pair)?|connect|bind|listen|accept4?|send(to|m?msg)?|recv(from|m?msg)?|getaddrinfo|gethostbyname\w*"
    r"|f?open(64|at|at64)?|freopen(64)?|creat(64)?|fwrite|p?write(64|v)?|unlink(at)?|remove|rename(at2?)?|mkdir(at)?|mkstemps?"
)
CPP_RUNTIME_IMPORTS = ("_ZdlPv",)  # operator delete, out of the C++ run time that libtorch brings along


def kernel_failures(
    plan: LaunchPlan, resources: Resources, opcodes: Mapping[str, int], minimum: Mapping[str, int]
) -> list[str]:
    """Sentences on spills, serialised wgmma, missing instructions and shared memory; empty when all is well.

    Args:
        minimum: SASS opcode -> how many the spec promises at least.
    """
    name, failures = plan.name, []
    spilled = resources.spill_stores + resources.spill_loads
    if spilled or resources.stack:
        failures.append(
            f"{name} spills {resources.spill_stores} bytes of stores and {resources.spill_loads} of loads on a stack of "
            f"{resources.stack}; give the role more registers or fewer live values."
        )
    local = {opcode: opcodes.get(opcode, 0) for opcode in LOCAL_MEMORY_OPCODES if opcodes.get(opcode, 0)}
    if local and not spilled:
        failures.append(
            f"{name} uses local memory ({_counts(local)}) without reporting spills; look for indexed arrays."
        )
    for warning in resources.warnings:
        if warning.startswith(f"({SERIALIZED}"):
            failures.append(
                f"{name} loses wgmma overlap, ptxas says {warning.strip()!r}; reorder the waits of that role."
            )
    for opcode, count in minimum.items():
        if opcodes.get(opcode, 0) < count:
            failures.append(
                f"{name} has {opcodes.get(opcode, 0)} {opcode} instructions and its spec promises {count}; "
                f"part of the kernel was lowered to something else or vanished."
            )
    shared = resources.static_shared_memory + plan.dynamic_shared_memory
    if shared > MAX_SHARED_MEMORY:
        failures.append(
            f"{name} needs {shared} bytes of shared memory and a block has {MAX_SHARED_MEMORY}; drop a stage."
        )
    return failures


def library_failures(library: SharedLibrary, machine: str) -> list[str]:
    """Sentences on everything that would keep the library from loading on manylinux_2_28 with PyTorch 2.9."""
    failures = []
    if library.machine != machine:
        failures.append(f"the library for {machine} is built for {library.machine}.")
    if library.alignment < LARGEST_PAGE[machine]:
        failures.append(
            f"the {machine} library is aligned to {library.alignment} bytes, and systems with pages of {LARGEST_PAGE[machine]} "
            "could not map it."
        )
    for name in library.needed:
        if name not in ALLOWED_LIBRARIES:
            failures.append(f"the {machine} library needs {name}; allowed are {', '.join(ALLOWED_LIBRARIES)}.")
    failures += [sentence for symbol in library.imports if (sentence := _import_failure(symbol, machine))]
    return failures + reaching_out(library)


def reaching_out(library: SharedLibrary) -> list[str]:
    """Sentences on every import by which the library could open a connection or a file, or start a process.

    Of system calls that stay unnamed, `syscall`, none is allowed either.
    """
    return [
        f"the {library.machine} library imports {symbol.name}, which opens a connection or a file or starts a process; "
        "the kernel does none of these, so remove it."
        for symbol in library.imports
        if REACHING_OUT.fullmatch(symbol.name)
    ]


def unknown_libraries(data: bytes) -> list[str]:
    """Names of shared libraries in the bytes of a library that are neither needed nor opened by a known one."""
    known = {*ALLOWED_LIBRARIES, *OPENED_LIBRARIES}
    found = {name.decode() for name in re.findall(rb"[\w.+-]+\.so(?:\.\d+)*(?![\w.])", data)}
    return sorted(name for name in found if name not in known and not re.fullmatch(r"_flashqla_[0-9a-f]{12}\.so", name))


def size_failures(data: bytes, machine: str) -> list[str]:
    """One sentence if the file is larger than a kernel's library may be."""
    if len(data) <= MAX_LIBRARY:
        return []
    return [
        f"the {machine} library has {len(data)} bytes, and at most {MAX_LIBRARY} may be shipped; drop specialisations."
    ]


def used_shims(library: SharedLibrary) -> dict[str, str]:
    """libtorch function -> PyTorch release that introduced it, of those the library imports."""
    names = sorted(symbol.name for symbol in library.imports if symbol.name in SINCE)
    return {name: _dotted(SINCE[name]) for name in names}


def newest_glibc(library: SharedLibrary) -> str:
    """The highest GLIBC version that the library asks for."""
    versions = [version for symbol in library.imports if (version := _glibc_version(symbol))]
    return _dotted(max(versions, default=(0,)))


def _import_failure(symbol: Import, machine: str) -> str | None:
    version = _glibc_version(symbol)
    if version is not None:
        if version <= MAX_GLIBC:
            return None
        return f"the {machine} library asks for {symbol.name}@{symbol.version}; manylinux_2_28 ends at {_dotted(MAX_GLIBC)}."
    if symbol.is_weak or symbol.name in CPP_RUNTIME_IMPORTS:
        return None
    if symbol.name not in SINCE:
        return f"the {machine} library imports {symbol.name}, which is neither glibc's nor listed in torch_shims.py."
    if SINCE[symbol.name] > OLDEST_TORCH:
        return f"the {machine} library imports {symbol.name} of PyTorch {_dotted(SINCE[symbol.name])}; the oldest served is 2.9."
    return None


def _glibc_version(symbol: Import) -> tuple[int, ...] | None:
    prefix, _, number = (symbol.version or "").partition("_")
    return tuple(map(int, number.split("."))) if prefix == "GLIBC" else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
