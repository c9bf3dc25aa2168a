"""build/ is a function of the sources, and each build's ops keep to a namespace that only equal builds share."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fresh_process import RunPython
from source_tree import build, copy_sources

from flashqla_hub.package.assemble import assemble, assemble_variant, namespace, read_tree, shipped_files, write_tree
from flashqla_hub.package.errors import PackageError
from flashqla_hub.package.kernel_data import Build, Digest, DigestAlgorithm, Metadata
from flashqla_hub.package.project import Project, read_project
from flashqla_hub.package.variants import VARIANTS, Variant

(UNIVERSAL,) = (variant for variant in VARIANTS if variant.name == "torch-universal")
LOAD_TWO = """
import pathlib, sys
from kernels import get_local_kernel
from small_call import assert_computes

first = get_local_kernel(pathlib.Path(sys.argv[1]))
{between}
second = get_local_kernel(pathlib.Path(sys.argv[2]))
"""
# Copies of one build have one module name, and `kernels` lets them share submodules. A loader that gave every copy a name
# of its own would run them twice, as this makes it do.
FORGET = "for name in [name for name in sys.modules if name.startswith(first.__name__)]: del sys.modules[name]"


@dataclass(frozen=True)
class FakeLibrary:
    """Stands for compiled ops: its bytes are `content`, whatever the namespace."""

    content: bytes = b"\x7fELF"
    tools: Mapping[str, bytes] = field(default_factory=lambda: {"compiler": b"1.0"})

    def inputs(self) -> Mapping[str, bytes]:
        return self.tools

    def compile(self, namespace: str) -> bytes:
        return self.content


def native_variant(library: FakeLibrary) -> Variant:
    return Variant("torch-stable-abi29-cu126-x86_64-linux", backend="cuda", archs=("9.0a",), library=library)


def test_two_folders_give_the_same_bytes(tmp_path: Path):
    first, second = (copy_sources(tmp_path / name) for name in ("first", "second/deeper"))
    for root in (first, second):
        build(root)
    assert read_tree(first / "build") == read_tree(second / "build")
    assert "torch-universal/metadata.json" in read_tree(first / "build")


def test_committing_the_build_does_not_change_it(built: Path):
    before = read_tree(built / "build")
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", "-C", str(built), *command], check=True, timeout=30)
    build(built)
    assert read_tree(built / "build") == before


def test_build_replaces_what_an_earlier_one_left(built: Path):
    stale = built / "build/torch-universal/stale.py"
    stale.write_text("")
    build(built)
    assert not stale.exists()


def test_build_does_not_replace_a_folder_that_it_did_not_make(project: Project, tmp_path: Path):
    mine = tmp_path / "mine"
    (mine / "letters").mkdir(parents=True)
    with pytest.raises(PackageError, match=r"holds letters, which no build wrote"):
        write_tree(assemble(project, [UNIVERSAL]), mine)
    assert (mine / "letters").is_dir()


def test_namespace_is_an_identifier_and_the_metadata_id(project: Project):
    files = assemble_variant(project, UNIVERSAL)
    unique = namespace(project, shipped_files(project), UNIVERSAL)
    assert unique.isidentifier()
    assert json.loads(files["metadata.json"])["id"] == unique
    assert f'NAMESPACE = "{unique}"'.encode() in files["_ops.py"]


def test_one_changed_byte_changes_the_namespace(project: Project):
    files = shipped_files(project)
    changed = {**files, "layers.py": files["layers.py"] + b"\n"}
    renamed = {("layer.py" if path == "layers.py" else path): content for path, content in files.items()}
    assert len({namespace(project, each, UNIVERSAL) for each in (files, changed, renamed)}) == 3


def test_namespace_depends_on_what_compiles_the_library(project: Project):
    files = shipped_files(project)
    variants = [UNIVERSAL, *(native_variant(FakeLibrary(tools={"compiler": v})) for v in (b"1.0", b"1.1"))]
    assert len({namespace(project, files, variant) for variant in variants}) == 3


def test_card_does_not_change_the_namespace(project: Project):
    before = namespace(project, shipped_files(project), UNIVERSAL)
    (project.root / "CARD.md").write_text("another card")
    assert namespace(project, shipped_files(project), UNIVERSAL) == before


def test_bytecode_and_the_stand_in_for_ops_are_not_shipped(project: Project):
    before = assemble_variant(project, UNIVERSAL)
    (project.sources / "__pycache__").mkdir(exist_ok=True)
    (project.sources / "__pycache__/layers.cpython-311.pyc").write_bytes(b"0")
    (project.sources / "_ops.py").write_text("ops = None")
    assert assemble_variant(project, UNIVERSAL) == before


def test_symbolic_link_is_refused(project: Project):
    (project.sources / "linked.py").symlink_to(project.sources / "layers.py")
    with pytest.raises(PackageError, match=r"linked\.py is a symbolic link"):
        shipped_files(project)


def test_digest_is_the_one_that_kernels_computes(built: Path):
    variant = built / "build/torch-universal"
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert set(digest.files) == set(read_tree(variant)) - {"metadata.json"}


def test_native_variant_carries_its_library_and_architectures(project: Project, tmp_path: Path):
    variant = native_variant(FakeLibrary())
    files = assemble(project, [UNIVERSAL, variant])
    write_tree(files, tmp_path / "build")
    metadata = Metadata.read_from_file(tmp_path / "build" / variant.name / "metadata.json")
    assert metadata.backend.archs == ["9.0a"]
    assert files[f"{variant.name}/{metadata.id}.so"] == b"\x7fELF"
    python = [{path: files[f"{v.name}/{path}"] for path in shipped_files(project)} for v in (UNIVERSAL, variant)]
    assert python[0] == python[1]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile a library")
def test_library_is_loaded_once_for_two_copies_of_a_build(project: Project, tmp_path: Path, run_python: RunPython):
    source = '#include <stdio.h>\n__attribute__((constructor)) static void loaded(void) { puts("loaded"); fflush(stdout); }\n'
    (tmp_path / "library.c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "library.so"), str(tmp_path / "library.c")]
    subprocess.run(command, check=True, timeout=60)
    variant = native_variant(FakeLibrary(content=(tmp_path / "library.so").read_bytes()))
    copies = [tmp_path / "first" / variant.name, tmp_path / "second" / variant.name]
    for copy in copies:
        write_tree(assemble(project, [variant]), copy.parent)
    done = run_python("-c", LOAD_TWO.format(between=FORGET), *copies)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["loaded"]


@pytest.mark.parametrize("between", ["", FORGET], ids=["shared", "apart"])
def test_two_copies_of_one_build_work_in_one_process(
    released: Path, tmp_path: Path, run_python: RunPython, between: str
):
    shutil.copytree(released / "build", tmp_path / "copy/build")
    code = LOAD_TWO.format(between=between) + (
        "assert first is not second and first.__name__ == second.__name__\n"
        "for kernel in (first, second, first): assert_computes(kernel)"
    )
    done = run_python("-c", code, released, tmp_path / "copy")
    assert done.returncode == 0, done.stderr


def test_two_different_builds_work_in_one_process(released: Path, sources: Path, run_python: RunPython):
    with (sources / "torch-ext/flashqla/layers.py").open("a") as file:
        file.write("\nREVISION = 2\n")
    code = LOAD_TWO.format(between="") + (
        "assert first.__name__ != second.__name__\n"
        "assert second.layers.REVISION == 2 and not hasattr(first.layers, 'REVISION')\n"
        "for kernel in (first, second, first): assert_computes(kernel)"
    )
    done = run_python("-c", code, released, build(sources))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("edition = 5", "edition = 3", "edition"),
        ('license = "mit"\n', "", "license"),
        ('repo-id = "qwen/flashqla"', "", "repo-id"),
        ("[torch-noarch]\n", "[torch-noarc]\n", "(Framework|exactly one)"),
        ('name = "flashqla"', "name = ", "build.toml"),
    ],
)
def test_build_toml_is_refused_in_one_sentence(sources: Path, old: str, new: str, message: str):
    path = sources / "build.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(PackageError, match=message) as caught:
        read_project(sources)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(Build is None, reason="kernels 0.16 has no reader for build.toml")
def test_build_toml_is_read_by_kernels(sources: Path):
    path = sources / "build.toml"
    path.write_text(path.read_text().replace("[general.hub]", "[general.hub]\nsurprise = 1"))
    with pytest.raises(PackageError, match=r"kernels refuses .*surprise"):
        read_project(sources)


def test_folder_without_build_toml_is_named(tmp_path: Path):
    with pytest.raises(PackageError, match=r"holds no build\.toml"):
        read_project(tmp_path)
