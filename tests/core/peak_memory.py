"""Print by how many bytes one forward and backward raises the peak memory of this process.

python -m tests.core.peak_memory FOLDER_OF_THE_KERNEL TOKENS
"""

import ctypes
import re
import resource
import sys
from pathlib import Path

import torch
from kernels import get_local_kernel

from .inputs import make_problem, solve


def peak_bytes() -> int:
    """High-water mark of this program alone; getrusage would start from the resident set of the process that began it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main(folder: str, tokens: str) -> None:
    torch.set_num_threads(1)
    kernel = get_local_kernel(Path(folder))
    solve(kernel, make_problem(1, 64, 2, 4).to(torch.float32))  # what a first call allocates once
    problem = make_problem(1, int(tokens), 2, 4).to(torch.float32)
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that a call could use again would hide part of its growth
    before = resident_bytes()
    solve(kernel, problem)
    print(max(0, peak_bytes() - before))


if __name__ == "__main__":
    main(*sys.argv[1:])
