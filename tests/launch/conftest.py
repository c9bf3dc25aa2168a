"""Libraries and child processes of the launch tests. They need a C compiler, the build tools and a PyTorch without CUDA."""

import os
import platform
import shutil
from pathlib import Path

import fake_gpu
import pytest
import torch
from stand_in_kernels import STAND_INS

from flashqla_hub.compile.cache import Cache, default_folder
from flashqla_hub.compile.library import build_library, hand_written_sources
from flashqla_hub.compile.product import compile_kernels, generated_sources
from flashqla_hub.compile.tools import explain_missing_tools, find_tools

NAMESPACE = "flashqla_launch_test"


@pytest.fixture(scope="session")
def fakes(tmp_path_factory) -> Path:
    """Folder of the compiled fakes."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler to build the fake CUDA driver with")
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch has CUDA, and the fakes take its place only where it has none")
    folder = tmp_path_factory.mktemp("fakes")
    fake_gpu.build_fakes(compiler, folder)
    return folder


@pytest.fixture(scope="session")
def tools():
    missing = explain_missing_tools()
    if missing:
        pytest.skip(missing)
    return find_tools()


@pytest.fixture(scope="session")
def stand_ins(tools):
    return compile_kernels(STAND_INS, tools, Cache(default_folder()))


@pytest.fixture(scope="session")
def stand_in_library(stand_ins, tools, tmp_path_factory) -> Path:
    """A library of the runtime and the stand-in kernels, each with an op of its own."""
    sources = hand_written_sources("runtime") | generated_sources(stand_ins)
    zig_cache = default_folder() / "zig"
    library = build_library(tools, platform.machine(), NAMESPACE, sources, zig_cache, ["FLASHQLA_STAGE_OPS"])
    path = tmp_path_factory.mktemp("library") / f"{NAMESPACE}.so"
    path.write_bytes(library)
    return path


@pytest.fixture(scope="session")
def stand_in_process(fakes, stand_in_library, stand_ins):
    """A process that lasts as long as the session, for tests that do not care what ran before."""
    process = fake_gpu.Process(fakes, stand_in_library, NAMESPACE, [kernel.source for kernel in stand_ins])
    yield process
    process.stop()


@pytest.fixture
def fresh_process(fakes, stand_in_library, stand_ins):
    """A process in which no kernel has been loaded yet."""
    process = fake_gpu.Process(fakes, stand_in_library, NAMESPACE, [kernel.source for kernel in stand_ins])
    yield process
    process.stop()


@pytest.fixture(scope="session")
def product(tools):
    """All kernels of the product, compiled and judged."""
    from flashqla_hub.kernels.spec import SPECS

    return compile_kernels(SPECS, tools, Cache(default_folder()))


@pytest.fixture(scope="session")
def product_library(product, tools, tmp_path_factory) -> Path:
    """The library as it is shipped, for this machine's CPU."""
    sources = hand_written_sources("runtime", "ops") | generated_sources(product)
    library = build_library(tools, platform.machine(), NAMESPACE, sources, default_folder() / "zig")
    path = tmp_path_factory.mktemp("product") / f"{NAMESPACE}.so"
    path.write_bytes(library)
    return path


@pytest.fixture(scope="session")
def product_process(fakes, product_library, product):
    process = fake_gpu.Process(fakes, product_library, NAMESPACE, [kernel.source for kernel in product])
    yield process
    process.stop()
