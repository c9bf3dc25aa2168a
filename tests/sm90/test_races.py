"""compute-sanitizer's racecheck on small calls of the forward and the backward: it must report nothing.

It needs kernels in which every lane arrives at the barriers, since it does not follow one lane that arrives for its warp
(docs/design/2026-11-30-races.md):

    python -m flashqla_hub compile --every-lane-arrives --out dist/every_lane
    FLASHQLA_EVERY_LANE_LIBRARY=dist/every_lane/x86_64/NAMESPACE.so python -m pytest tests/sm90/test_races.py
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .small_calls import CASES, OPS

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
LIBRARY = os.environ.get("FLASHQLA_EVERY_LANE_LIBRARY")
HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
LIMIT = 120  # seconds; a call takes about 6

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU"),
    pytest.mark.skipif(SANITIZER is None, reason="there is no compute-sanitizer"),
    pytest.mark.skipif(LIBRARY is None, reason="FLASHQLA_EVERY_LANE_LIBRARY names no library"),
]


def hazards(report):
    """Errors and warnings, which the summary counts in this order; pairs that are not worth one are not counted."""
    found = re.search(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", report)
    assert found, report
    return int(found[1]) + int(found[2])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.id for case in CASES])
def test_racecheck_reports_nothing(op, number):
    command = [SANITIZER, "--tool", "racecheck", "--launch-timeout", "0", "--print-limit", "100"]
    command += [sys.executable, "-m", "tests.sm90.small_calls", op, str(number)]
    environment = os.environ | {"FLASHQLA_LIBRARY": LIBRARY, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT)
    report = done.stdout + done.stderr
    assert f"ran {op} {CASES[number].id}" in report, report
    assert hazards(report) == 0, report
