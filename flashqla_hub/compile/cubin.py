"""CUDA source -> PTX (nvcc 13.0) -> cubin (ptxas 12.9), and what ptxas and the disassembler report about it.

nvcc 13.0's front end spills least on large kernels, and ptxas 12.9 writes ELF ABI 7, which CUDA 12 (R525+) and CUDA 13
drivers load; ABI 8 of ptxas 13 needs R580+. The PTX between them is relabelled from ISA 9.0 to 8.8: ptxas refuses what
it does not know, so a relabelled file either means the same or fails to assemble. `-lineinfo` would put paths into the
cubin and is not used.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CompilerError
from .tools import Tools

NVCC_FLAGS = ("--ptx", "-O3", "-std=c++20", "-gencode", "arch=compute_90a,code=compute_90a", "-w", "-DNDEBUG")
PTX_ISA = "8.8"  # the newest that ptxas 12.9 takes
PTXAS_FLAGS = ("-arch=sm_90a", "-O3", "-v", "--warn-on-spills")
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Resources:
    """What ptxas says about one kernel; bytes except for registers, warnings as printed."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared_memory: int
    warnings: tuple[str, ...]


def compile_ptx(tools: Tools, name: str, source: str, folder: Path) -> str:
    """CUDA source -> PTX text with the relabelled ISA version and without traces of where it was compiled.

    nvcc puts a hash of the source's absolute path into the names of symbols with internal linkage, and they reach the
    cubin: `_INTERNAL_<hash>_<length>_<file>_cu_...`.
    """
    path, ptx = folder / f"{name}.cu", folder / f"{name}.ptx"
    path.write_text(source)
    includes = [f"-I{include}" for include in tools.device_includes]
    run([tools.nvcc, "-ccbin", tools.host_compiler, *NVCC_FLAGS, *includes, "-o", ptx.name, path.name], folder)
    text, count = re.subn(r"(?m)^\.version\s+\S+", f".version {PTX_ISA}", ptx.read_text())
    if count != 1:
        raise CompilerError(f"nvcc wrote {count} .version lines for {name}; exactly one is needed to relabel it.")
    return re.sub(rf"[0-9a-f]{{8}}(?=_\d+_{re.escape(name)}_cu_)", "00000000", text)


def assemble(tools: Tools, name: str, ptx: str, folder: Path) -> tuple[bytes, Resources]:
    """PTX text -> cubin and ptxas's report."""
    path, cubin = folder / f"{name}.ptx", folder / f"{name}.cubin"
    path.write_text(ptx)
    report = run([tools.ptxas, *PTXAS_FLAGS, path.name, "-o", cubin.name], folder)
    return cubin.read_bytes(), parse_report(report)


def parse_report(report: str) -> Resources:
    """Reads `ptxas -v`: maximum of registers, sums of the rest over all functions of the cubin.

    Raises:
        CompilerError: a line that every report has is absent, so nothing can be said about spills.
    """

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, report)]

    registers, stack = numbers(r"Used (\d+) registers"), numbers(r"(\d+) bytes stack frame")
    if not registers or not stack:
        raise CompilerError(f"ptxas reported neither registers nor stack, so spills cannot be excluded: {report[:400]}")
    return Resources(
        registers=max(registers),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        stack=sum(stack),
        static_shared_memory=sum(numbers(r"(\d+) bytes smem")),
        warnings=tuple(re.findall(r"\(C\d+\)[^\n]*", report)),
    )


def count_instructions(tools: Tools, name: str, cubin: bytes, folder: Path) -> Counter[str]:
    """SASS opcode without modifiers -> how often it stands in the cubin (`HGMMA.64x128x16...` counts as `HGMMA`)."""
    path = folder / f"{name}.cubin"
    path.write_bytes(cubin)
    return parse_sass(run([tools.nvdisasm, "-c", path.name], folder))


def parse_sass(text: str) -> Counter[str]:
    """Counts opcodes in nvdisasm's listing, whose instructions stand behind an offset such as `/*0a30*/`."""
    return Counter(re.findall(r"(?m)^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", text))


def run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Runs a compiler in `folder`, in our environment unless another is given, and returns stdout and stderr.

    Raises:
        CompilerError: it failed or took longer than TIMEOUT_SECONDS.
    """
    words = [str(word) for word in command]
    tool = Path(words[0]).name
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{tool} did not end within {TIMEOUT_SECONDS} s: {' '.join(words)}") from None
    if done.returncode:
        raise CompilerError(f"{tool} failed with status {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout + done.stderr
