"""The committed libraries belong to these sources: compiling anew gives the kernels inside them, byte for byte.

`make check` refuses a tree that lacks a library or holds one of other sources. `make verify-build` does what is done here
for every library as a whole.
"""

from itertools import groupby

import pytest

from flashqla_hub.compile.cache import Cache, default_folder
from flashqla_hub.compile.kernel_build import compile_kernel, lower_kernel
from flashqla_hub.compile.product import judge_library, link_library
from flashqla_hub.compile.tools import ROOT
from flashqla_hub.package import check, repository_rules
from flashqla_hub.package.assemble import assemble, library_name, namespace, shipped_files, write_tree
from flashqla_hub.package.project import read_project
from flashqla_hub.package.repository_rules import recompilation_problems
from flashqla_hub.package.subject import read_subject
from flashqla_hub.package.variants import VARIANTS

COMPILED = [variant for variant in VARIANTS if variant.library is not None]
MAIN = "recurrence"  # every forward ends in a kernel of this name


def committed_path(variant):
    project = read_project(ROOT)
    return project.build / variant.name / library_name(namespace(project, shipped_files(project), variant))


@pytest.fixture(scope="module")
def committed():
    """Variant -> library in build/, of those with a library."""
    absent = [variant.name for variant in COMPILED if not (ROOT / "build" / variant.name).is_dir()]
    if absent:
        pytest.skip(f"build/ lacks {', '.join(absent)}, which `make check` refuses; run `make build`")
    paths = {variant: committed_path(variant) for variant in COMPILED}
    stale = [path.name for path in paths.values() if not path.is_file()]
    assert not stale, f"build/ is of other sources: {', '.join(stale)} is not there; run `make build`"
    return {variant: path.read_bytes() for variant, path in paths.items()}


def test_the_main_forward_kernel_without_any_cache_is_the_committed_one(committed, tools):
    from flashqla_hub.kernels.spec import SPECS

    spec = next(spec for spec in SPECS if spec.name.startswith(MAIN))
    cubin = compile_kernel(lower_kernel(spec, tools, Cache(None)), tools, Cache(None)).cubin
    for variant, library in committed.items():
        assert cubin in library, f"{variant.name} holds another {spec.name}"


def test_every_kernel_is_the_committed_one(committed, product):
    for variant, library in committed.items():
        assert [kernel.plan.name for kernel in product if kernel.cubin not in library] == [], variant.name


def test_a_library_that_is_linked_again_has_the_committed_bytes(committed, product):
    """Also after build/ is committed: nothing in it is an input."""
    by_machine = sorted(committed, key=lambda variant: variant.library.machine)
    for machine, variants in groupby(by_machine, key=lambda variant: variant.library.machine):
        for name, same in groupby(variants, key=lambda variant: committed_path(variant).stem):
            linked = link_library(machine, name, product, default_folder())
            assert all(committed[variant] == linked for variant in same)


def test_committed_libraries_pass_the_gates(committed):
    for variant, library in committed.items():
        judge_library(library, variant.library.machine)


def test_loops_of_the_scan_stand_once_in_its_code(product):
    """Unrolled four times, as the compiler likes to, its stores alone outgrow the 32 KB of code that an SM keeps."""
    from flashqla_hub.kernels.spec import SPECS

    promised = {spec.name: spec.minimum_instructions["UTMASTG"] for spec in SPECS if "backward_scan" in spec.name}
    found = {kernel.plan.name: kernel.opcodes["UTMASTG"] for kernel in product if kernel.plan.name in promised}
    assert promised and found == promised


def test_another_byte_in_a_library_is_found_by_recompiling(tools, tmp_path, monkeypatch):
    """Also without a committed library: the whole of build/ is made in a folder of its own."""
    project, variant = read_project(ROOT), COMPILED[0]
    files = assemble(project, [variant])
    monkeypatch.setattr(repository_rules, "assemble", lambda project, *_, **__: files)
    for part in ("build.toml", "CARD.md", "torch-ext"):
        (tmp_path / part).symlink_to(ROOT / part)
    write_tree(files, tmp_path / "build")
    subject = read_subject(tmp_path)
    assert recompilation_problems(subject) == []
    library = next((tmp_path / "build").rglob("*.so"))
    content = library.read_bytes()
    library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    [problem] = recompilation_problems(subject)
    assert library.name in problem and "is not what the compilers make of the sources" in problem
    monkeypatch.setattr(check, "CHECKS", {})
    assert [result.problems for result in check.run_checks(subject, recompile=True)] == [(problem,)]
