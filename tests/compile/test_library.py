"""The compiled library: the same bytes everywhere, nothing more than promised in its imports, loadable twice."""

import os
import platform
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from flashqla_hub.compile import torch_shims
from flashqla_hub.compile.cache import Cache, default_folder
from flashqla_hub.compile.cubin import compile_ptx
from flashqla_hub.compile.elf import read_shared_library
from flashqla_hub.compile.inputs import inputs_digest
from flashqla_hub.compile.library import MACHINES, build_library, hand_written_sources
from flashqla_hub.compile.product import judge_library
from flashqla_hub.compile.tools import ROOT

EMPTY_OP = b"""
#include "../runtime/registration.h"
static void nothing(StableIValue*, uint64_t, uint64_t) {}
static const flashqla::OpRegistration op("nothing() -> ()", "nothing", nothing);
"""
NAMESPACE = "flashqla_library_test"


def build(tools, machine, zig_cache=None):
    sources = hand_written_sources("runtime") | {"ops/nothing.cpp": EMPTY_OP}
    return build_library(tools, machine, NAMESPACE, sources, zig_cache)


@pytest.fixture(scope="module")
def libraries(tools):
    return {machine: build(tools, machine, default_folder() / "zig") for machine in MACHINES}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_library_loads_on_manylinux_2_28_with_the_oldest_pytorch(libraries, machine):
    entry = judge_library(libraries[machine], machine)
    assert "libtorch_cpu.so" in entry["needed"]
    assert set(entry["torch_shims"].values()) == {"2.9"}


def test_this_pytorch_exports_every_listed_shim():
    libtorch = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    assert set(torch_shims.SINCE) <= set(read_shared_library(libtorch.read_bytes()).exports)


def test_a_library_exports_nothing(libraries):
    for machine in MACHINES:
        exported = {name for name in read_shared_library(libraries[machine]).exports if "flashqla" in name}
        assert exported == set()


def test_two_builds_give_the_same_bytes(tools, libraries):
    machine = platform.machine()
    assert sha256(build(tools, machine)).hexdigest() == sha256(libraries[machine]).hexdigest()


def test_ptx_depends_on_neither_folder(tools, tmp_path):
    counter = "namespace { __device__ float counter; }"
    source = counter + ' extern "C" __global__ void f(float* x) { x[threadIdx.x] += atomicAdd(&counter, 1.0f); }'
    texts = []
    for name in ("one", "two/deeper"):
        (tmp_path / name).mkdir(parents=True)
        texts.append(compile_ptx(tools, "f", source, tmp_path / name))
    assert "_f_cu_" in texts[0], "the counter's name holds a trace of the file"
    assert texts[0] == texts[1]


def test_a_damaged_cache_entry_is_made_again(tmp_path):
    cache, made = Cache(tmp_path), []

    def make():
        made.append(1)
        return b"result"

    assert cache.get_or_make("kind", {"a": 1}, make) == b"result"
    assert cache.get_or_make("kind", {"a": 1}, make) == b"result"
    assert len(made) == 1
    [entry] = (tmp_path / "kind").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    assert cache.get_or_make("kind", {"a": 1}, make) == b"result"
    assert cache.get_or_make("kind", {"a": 2}, make) == b"result"
    assert len(made) == 3


def run_python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ""})


LOAD = "import sys, torch\nfor path in sys.argv[1:]: torch.ops.load_library(path)\n"


def test_the_library_loads_without_cuda_and_leaves_cpu_tensors_alone(libraries, tmp_path):
    path = tmp_path / "library.so"
    path.write_bytes(libraries[platform.machine()])
    done = run_python(f"{LOAD}print(torch.ops.{NAMESPACE}.nothing.default._schema)", path)
    assert done.stdout.strip() == f"{NAMESPACE}::nothing() -> ()", done.stderr


def test_a_second_copy_leaves_the_first_in_charge(libraries, tmp_path):
    paths = [tmp_path / "one.so", tmp_path / "two.so"]
    for path in paths:
        path.write_bytes(libraries[platform.machine()])
    done = run_python(f"{LOAD}print(torch.ops.{NAMESPACE}.nothing.default._schema)", *paths)
    assert done.stdout.strip() == f"{NAMESPACE}::nothing() -> ()", done.stderr
    assert done.returncode == 0


def test_the_inputs_digest_follows_names_and_contents(tmp_path):
    for folder in ("requirements", "flashqla_hub/kernels", "flashqla_hub/compile", "torch-ext/flashqla/csrc"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, tmp_path / folder)
    unchanged = inputs_digest(tmp_path)
    assert unchanged == inputs_digest()
    source = tmp_path / "torch-ext/flashqla/csrc/runtime/kernel.cpp"
    source.write_text(source.read_text() + "\n")
    changed = inputs_digest(tmp_path)
    source.rename(source.with_name("renamed.cpp"))
    assert len({unchanged, changed, inputs_digest(tmp_path)}) == 3
