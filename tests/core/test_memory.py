"""Peak memory of forward and backward: states of chunks are kept, never states of tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATE_OF_EVERY_TOKEN = 2048 * 4 * 128 * 128 * 4  # bytes in float32, for 2048 tokens and 4 value heads


def growth(folder: Path, tokens: int) -> int:
    """Bytes by which a process grows over one forward and backward of [1, tokens], 2 key and 4 value heads of 128."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # a freed tensor leaves the process at once
    command = [sys.executable, "-m", "tests.core.peak_memory", str(folder), str(tokens)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process from /proc")
def test_memory_holds_no_state_per_token_and_grows_with_the_length(kernel_folder):
    short, long = growth(kernel_folder, 2048), growth(kernel_folder, 4096)
    assert short < STATE_OF_EVERY_TOKEN
    assert short < long <= 2.2 * short
