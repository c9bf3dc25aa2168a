"""Importing the kernel is free: no GPU, no compiler, no network, hardly any time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS_BEYOND_TORCH = 0.3

PROBE = """
import builtins, json, socket, subprocess, sys, time
import torch
import torch.library
from kernels import get_local_kernel
from pathlib import Path

touched = []
def refuse(name):
    def refused(*args, **kwargs):
        touched.append(name)
        raise RuntimeError(name)
    return refused

socket.socket.connect = refuse("a connection")
subprocess.Popen.__init__ = refuse("a process")
torch.cuda._lazy_init = refuse("the GPU")
for name in ("is_available", "device_count", "get_device_properties", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, refuse(name))
real_import = builtins.__import__
def watched(name, *args, **kwargs):
    if name.split(".")[0] in BLOCKED:
        touched.append(name)
        raise ImportError(name)
    return real_import(name, *args, **kwargs)
builtins.__import__ = watched

before = set(sys.modules)
sys.path.insert(0, PARENT)
started = time.process_time()
import VARIANT as kernel
seconds = time.process_time() - started
new = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"touched": touched, "seconds": seconds, "new": new, "public": sorted(kernel.__all__)}))
"""
BLOCKED = {"tilelang", "tvm", "triton", "numpy", "transformers", "flash_attn", "fla", "einops"}


@pytest.fixture(scope="module")
def answer(kernel, tmp_path_factory) -> dict:
    """What a process without a GPU saw while it imported the kernel as a plain package."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "variant_under_test").symlink_to(Path(kernel.__file__).parent)
    code = PROBE.replace("BLOCKED", repr(BLOCKED)).replace("PARENT", repr(str(folder)))
    code = code.replace("VARIANT", "variant_under_test")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_import_touches_nothing(answer):
    assert answer["touched"] == []


def test_the_import_is_quick(answer):
    """Processor time, so that a busy machine does not count."""
    assert answer["seconds"] < SECONDS_BEYOND_TORCH


def test_the_import_loads_the_kernel_and_nothing_of_others(answer):
    others = [name for name in answer["new"] if name not in sys.stdlib_module_names | {"variant_under_test", "torch"}]
    assert others == []


def test_the_public_names_are_the_contract_of_version_1(answer):
    assert answer["public"] == [
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "chunk_gated_delta_rule",
        "chunk_gated_delta_rule_bwd",
        "chunk_gated_delta_rule_fwd",
        "explain_unsupported",
        "fused_recurrent_gated_delta_rule",
        "layers",
        "rms_norm_gated",
    ]
