"""The runtime declares the CUDA driver and PyTorch's C interface by hand; a compiler compares that with the real headers."""

import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

from flashqla_hub.compile.library import CSRC

SOURCE = Path(__file__).with_name("check_declarations.cpp")


def test_declarations_agree_with_cuda_h_and_with_this_pytorch(tools):
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    cuda = Path(str(metadata.distribution("nvidia-cuda-nvcc").locate_file("nvidia/cu13/include")))
    includes = [CSRC, cuda, Path(torch.__file__).parent / "include"]
    command = [compiler, "-std=c++20", "-fsyntax-only", *(f"-I{include}" for include in includes), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
