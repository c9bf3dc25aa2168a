"""Loads the compiled library the way the shipped Python does, without anything that is not on a GPU machine.

FLASHQLA_LIBRARY names the file, `<op namespace>.so`; without it the one that `python -m flashqla_hub compile` wrote for this
CPU is taken.
"""

import os
import platform
from pathlib import Path

import torch

COMPILED = Path(__file__).parents[2] / "dist" / "compiled" / platform.machine()


def find_library() -> Path | None:
    """The library to test, or None."""
    named = os.environ.get("FLASHQLA_LIBRARY")
    if named:
        return Path(named)
    return next(iter(sorted(COMPILED.glob("*.so"))), None)


def load_ops(path: Path):
    """torch.ops.<namespace> with the ops of that library."""
    torch.ops.load_library(str(path))
    return getattr(torch.ops, path.stem)
