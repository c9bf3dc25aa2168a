"""Every gate closes: on real compiler output where a small program can provoke it, on altered reports elsewhere."""

from dataclasses import replace

import pytest

from flashqla_hub.compile import gates
from flashqla_hub.compile.cubin import (
    Resources,
    assemble,
    compile_ptx,
    count_instructions,
    parse_report,
    parse_sass,
)
from flashqla_hub.compile.elf import Import, SharedLibrary
from flashqla_hub.compile.errors import CompilerError
from flashqla_hub.compile.gates import kernel_failures, library_failures, size_failures
from flashqla_hub.compile.launch_plan import LaunchPlan

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x, int n) {
  float v[64];
  for (int i = 0; i < 64; i++) v[i] = x[i * 1024 + threadIdx.x];
  for (int j = 0; j < n; j++)
    for (int i = 0; i < 64; i++) v[i] = v[i] * v[(i + 1) % 64] + v[(i + 7) % 64];
  for (int i = 0; i < 64; i++) x[i * 1024 + threadIdx.x] = v[i];
}
"""

# Adds to a wgmma accumulator without waiting for the wgmma.
SERIALISED = """
#include <cstdint>
extern "C" __global__ void __launch_bounds__(128) serialised(float* out, uint64_t a, uint64_t b) {
  float x = out[threadIdx.x], y = 0, z = 0, w = 0;
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 4; i++) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(x), "+f"(y), "+f"(z), "+f"(w) : "l"(a + i), "l"(b));
    x += 1.0f;
  }
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  out[threadIdx.x] = x + y + z + w;
}
"""

CLEAN = Resources(registers=168, spill_stores=0, spill_loads=0, stack=0, static_shared_memory=1024, warnings=())
PLAN = LaunchPlan("k", "k_kernel", (), (), (), (), (), ("1",) * 3, ("1",) * 3, (1, 1, 1), 100_000, False)
LIBRARY = SharedLibrary(
    machine="x86_64",
    needed=("libtorch_cpu.so", "libc.so.6"),
    imports=(Import("memcpy", "GLIBC_2.14", False), Import("aoti_torch_check", None, False)),
    exports=(),
    alignment=4096,
)


def compile_text(tools, name, source, folder):
    cubin, resources = assemble(tools, name, compile_ptx(tools, name, source, folder), folder)
    return resources, count_instructions(tools, name, cubin, folder)


def test_a_clean_kernel_passes():
    assert kernel_failures(PLAN, CLEAN, {"HGMMA": 20}, {"HGMMA": 20}) == []


def test_spills_are_refused(tools, tmp_path):
    resources, opcodes = compile_text(tools, "spilling", SPILLING, tmp_path)
    assert resources.spill_stores > 0 and opcodes["STL"] > 0
    [sentence] = kernel_failures(PLAN, resources, opcodes, {})
    assert "spills" in sentence


def test_serialised_wgmma_is_refused(tools, tmp_path):
    resources, opcodes = compile_text(tools, "serialised", SERIALISED, tmp_path)
    assert opcodes["HGMMA"] == 4
    sentences = kernel_failures(PLAN, resources, opcodes, {})
    assert any("C7511" in sentence and "loses wgmma overlap" in sentence for sentence in sentences)


@pytest.mark.parametrize("code", ["C7507", "C7508", "C7512", "C7515"])
def test_every_named_note_of_ptxas_is_refused(code):
    report = f"ptxas info : ({code}) Potential Performance Loss\n 0 bytes stack frame\n Used 90 registers"
    [sentence] = kernel_failures(PLAN, parse_report(report), {}, {})
    assert code in sentence


@pytest.mark.parametrize(
    ("resources", "opcodes", "minimum", "words"),
    [
        (CLEAN, {"HGMMA": 19}, {"HGMMA": 20}, "has 19 HGMMA instructions and its spec promises 20"),
        (CLEAN, {}, {"UTMALDG": 6}, "has 0 UTMALDG"),
        (CLEAN, {"LDL": 2}, {}, "local memory (2 LDL)"),
        (replace(CLEAN, stack=64), {}, {}, "on a stack of 64"),
        (replace(CLEAN, static_shared_memory=140_000), {}, {}, "needs 240000 bytes of shared memory"),
    ],
)
def test_a_kernel_that_must_not_ship_is_refused(resources, opcodes, minimum, words):
    [sentence] = kernel_failures(PLAN, resources, opcodes, minimum)
    assert words in sentence


def test_a_report_without_registers_is_refused():
    with pytest.raises(CompilerError, match="spills cannot be excluded"):
        parse_report("ptxas info : Compile time = 7 ms")


def test_predicated_and_modified_opcodes_are_counted():
    listing = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0a10*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0a20*/             @UP1 UTMALDG.4D [UR16], [UR4] ;
        /*0a30*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
    .L_x_1:
    """
    assert parse_sass(listing) == {"LDC": 1, "HGMMA": 2, "UTMALDG": 1}


def test_a_good_library_passes():
    assert library_failures(LIBRARY, "x86_64") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": "aarch64"}, "is built for aarch64"),
        ({"alignment": 2048}, "is aligned to 2048 bytes"),
        ({"needed": ("libstdc++.so.6",)}, "needs libstdc++.so.6"),
        ({"needed": ("libcuda.so.1",)}, "needs libcuda.so.1"),
        ({"imports": (Import("dlopen", "GLIBC_2.34", False),)}, "dlopen@GLIBC_2.34; manylinux_2_28 ends at 2.28"),
        ({"imports": (Import("_ZSt4cout", "GLIBCXX_3.4", False),)}, "imports _ZSt4cout"),
        ({"imports": (Import("torch_new_stable_ivalue", None, False),)}, "imports torch_new_stable_ivalue"),
        ({"imports": (Import("connect", "GLIBC_2.2.5", False),)}, "imports connect, which opens a connection"),
        ({"imports": (Import("execve", "GLIBC_2.2.5", False),)}, "imports execve, which opens a connection"),
        ({"imports": (Import("fopen64", "GLIBC_2.2.5", False),)}, "imports fopen64, which opens a connection"),
        ({"imports": (Import("syscall", "GLIBC_2.2.5", False),)}, "imports syscall, which opens a connection"),
    ],
)
def test_a_library_that_would_not_load_everywhere_is_refused(change, words):
    [sentence] = library_failures(replace(LIBRARY, **change), "x86_64")
    assert words in sentence


def test_pages_of_64_kib_are_served_on_aarch64():
    library = replace(LIBRARY, machine="aarch64", alignment=65536)
    assert library_failures(library, "aarch64") == []
    [sentence] = library_failures(replace(library, alignment=4096), "aarch64")
    assert "pages of 65536" in sentence


def test_a_library_that_is_too_large_is_refused():
    assert size_failures(b"x" * 6_000_000, "x86_64") == []
    [sentence] = size_failures(b"x" * 6_000_001, "x86_64")
    assert "has 6000001 bytes" in sentence


def test_a_shim_newer_than_the_oldest_pytorch_is_refused(monkeypatch):
    monkeypatch.setitem(gates.SINCE, "aoti_torch_check", (2, 10))
    [sentence] = library_failures(LIBRARY, "x86_64")
    assert "aoti_torch_check of PyTorch 2.10" in sentence
