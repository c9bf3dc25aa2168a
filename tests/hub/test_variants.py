"""Which build `kernels` chooses on which machine."""

import pytest
from kernels.backends import CPU, CUDA, ROCm
from kernels.variants import _resolve_variant_for_system, parse_variant
from packaging.version import Version

from flashqla_hub.package.variants import VARIANTS, is_variant_name

UNIVERSAL = "torch-universal"
BUILT = [
    UNIVERSAL,
    "torch-stable-abi29-cu126-x86_64-linux",
    "torch-stable-abi29-cu126-aarch64-linux",
    "torch-stable-abi29-cu130-x86_64-linux",
    "torch-stable-abi29-cu130-aarch64-linux",
]


def chosen(names, torch, backend, cpu="x86_64", system="linux"):
    """The variant that `kernels` prefers on a machine, None if none fits."""
    accepted, _ = _resolve_variant_for_system(
        variants=[parse_variant(name) for name in names],
        selected_backend=backend,
        cpu=cpu,
        os=system,
        torch_version=Version(torch),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    return accepted[0].variant_str if accepted else None


def cuda(version: str) -> CUDA:
    return CUDA(version=Version(version))


@pytest.mark.parametrize(
    ("torch", "version", "cpu", "expected"),
    [
        ("2.8", "12.8", "x86_64", UNIVERSAL),
        ("2.9", "12.6", "x86_64", "torch-stable-abi29-cu126-x86_64-linux"),
        ("2.9", "12.8", "x86_64", "torch-stable-abi29-cu126-x86_64-linux"),
        ("2.13", "12.9", "aarch64", "torch-stable-abi29-cu126-aarch64-linux"),
        ("2.13", "12.4", "x86_64", UNIVERSAL),
        ("2.9", "13.0", "x86_64", "torch-stable-abi29-cu130-x86_64-linux"),
        ("2.15", "13.4", "x86_64", "torch-stable-abi29-cu130-x86_64-linux"),
        ("2.13", "13.0", "aarch64", "torch-stable-abi29-cu130-aarch64-linux"),
        ("2.15", "14.0", "x86_64", UNIVERSAL),
    ],
)
def test_builds_serve_each_cuda_machine(torch: str, version: str, cpu: str, expected: str):
    assert chosen(BUILT, torch, cuda(version), cpu) == expected


@pytest.mark.parametrize("system", ["linux", "darwin", "windows"])
@pytest.mark.parametrize("backend", [CPU(), ROCm(version=Version("6.4"))], ids=["cpu", "rocm"])
def test_every_other_machine_gets_plain_python(backend, system: str):
    assert chosen(BUILT, "2.13", backend, system=system) == UNIVERSAL


@pytest.mark.parametrize("backend", [CPU(), cuda("12.8"), cuda("13.2")], ids=["cpu", "cu128", "cu132"])
@pytest.mark.parametrize("torch", ["2.5", "2.9", "2.13", "3.0"])
def test_what_is_built_now_fits_everywhere(torch: str, backend):
    assert chosen([variant.name for variant in VARIANTS], torch, backend) is not None


@pytest.mark.parametrize(("version", "cpu"), [("12.6", "x86_64"), ("13.0", "aarch64")])
def test_choice_does_not_depend_on_the_order_of_the_listing(version: str, cpu: str):
    assert chosen(BUILT, "2.13", cuda(version), cpu) == chosen(BUILT[::-1], "2.13", cuda(version), cpu)


def test_every_variant_is_spelled_as_kernels_reads_it():
    names = [variant.name for variant in VARIANTS]
    assert sorted(names) == sorted(BUILT) and all(map(is_variant_name, names))
    assert not is_variant_name("notes") and not is_variant_name("torch-stable-abi29-cu12x-x86_64-linux")
