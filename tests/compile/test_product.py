"""The product as a whole: every gate passed, the same bytes from everywhere, with and without the cache."""

import json
import platform
import re
from hashlib import sha256

import pytest

from flashqla_hub.compile import torch_shims
from flashqla_hub.compile.cache import Cache, default_folder
from flashqla_hub.compile.elf import read_shared_library
from flashqla_hub.compile.gates import MAX_SHARED_MEMORY
from flashqla_hub.compile.library import MACHINES
from flashqla_hub.compile.product import MANIFEST, compile_kernels, compile_product, link_library

NAMESPACE = "_flashqla_product_test"


def read_all(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def specs(tools):
    from flashqla_hub.kernels.spec import SPECS

    return SPECS


@pytest.fixture(scope="module")
def compiled(specs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    return compile_product(folder / "out", NAMESPACE, specs, default_folder())


def test_names_are_unique_and_every_spec_is_compiled(specs, compiled):
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    assert [kernel.plan.name for kernel in compiled.kernels] == names


def test_specs_promise_their_tensor_cores_and_tma(specs):
    for spec in specs:
        if spec.name.startswith(("factor", "recurrence")):
            assert {"HGMMA", "UTMALDG"} <= set(spec.minimum_instructions), f"{spec.name} promises too little"


def test_roles_change_their_registers_in_the_direction_that_they_say(compiled):
    """An illegal instruction else, as soon as a warp comes there; no compiler says so."""
    for kernel in compiled.kernels:
        at_launch = kernel.resources.registers
        for direction, count in re.findall(r"warpgroup_reg_(alloc|dealloc)<(\d+)>", kernel.source):
            more = int(count) - at_launch if direction == "alloc" else at_launch - int(count)
            assert more >= 0, f"{kernel.plan.name}: {direction} {count} of {at_launch} registers"


def test_the_manifest_tells_what_was_shipped(compiled):
    manifest = json.loads(compiled.manifest.read_text())
    for kernel in compiled.kernels:
        entry = manifest["kernels"][kernel.plan.name]
        assert entry["cubin"] == {"bytes": len(kernel.cubin), "sha256": sha256(kernel.cubin).hexdigest()}
        resources = entry["resources"]
        assert resources["spill_stores"] == resources["spill_loads"] == resources["stack"] == 0
        assert resources["static_shared_memory"] + resources["dynamic_shared_memory"] <= MAX_SHARED_MEMORY
    for machine in MACHINES:
        library = compiled.libraries[machine].read_bytes()
        assert manifest["libraries"][machine]["sha256"] == sha256(library).hexdigest()
        assert all(kernel.cubin in library for kernel in compiled.kernels)


def test_listed_shims_are_exactly_the_imported_ones(compiled):
    for path in compiled.libraries.values():
        names = {symbol.name for symbol in read_shared_library(path.read_bytes()).imports}
        assert {name for name in names if "torch" in name} == set(torch_shims.SINCE)


def test_one_library_alone_has_the_same_bytes(compiled):
    machine = platform.machine()
    library = link_library(machine, NAMESPACE, compiled.kernels, default_folder())
    assert library == compiled.libraries[machine].read_bytes()


def test_the_namespace_changes_the_library_and_no_cubin(specs, compiled, tmp_path):
    other = compile_product(tmp_path / "out", NAMESPACE + "x", specs, default_folder())
    assert [kernel.cubin for kernel in other.kernels] == [kernel.cubin for kernel in compiled.kernels]
    for machine in MACHINES:
        assert other.libraries[machine].read_bytes() != compiled.libraries[machine].read_bytes()


@pytest.mark.slow
def test_without_any_cache_every_byte_of_a_kernel_is_the_same(specs, compiled, tools):
    """Of one kernel a family, since the others are made by the same steps; `make verify-build` compares all libraries."""
    one_each = {spec.name.partition("_")[0]: spec for spec in reversed(specs)}
    cached = {kernel.plan.name: kernel for kernel in compiled.kernels}
    for again in compile_kernels(one_each.values(), tools, Cache(None)):
        kernel = cached[again.plan.name]
        assert (again.source, again.cubin, again.plan) == (kernel.source, kernel.cubin, kernel.plan)


def test_another_folder_gives_the_same_bytes(specs, compiled, tmp_path):
    again = compile_product(tmp_path / "a" / "deeper" / "place", NAMESPACE, specs, default_folder())
    assert read_all(again.manifest.parent) == read_all(compiled.manifest.parent)


def test_a_folder_with_other_files_is_left_alone(specs, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="holds something other than an earlier result"):
        compile_product(tmp_path, NAMESPACE, specs, default_folder())
    assert (tmp_path / MANIFEST).exists() is False
    assert (tmp_path / "mine.txt").read_text() == "keep"
