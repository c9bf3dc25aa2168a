"""`check` accepts what the sources give, and each of its rules is seen to fail."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh_process import RunPython
from source_tree import build, commit_all, smallest_library

from flashqla_hub.compile.tools import explain_missing_tools
from flashqla_hub.package.assemble import read_tree
from flashqla_hub.package.check import CHECKS, check_command, load_problems, run_checks
from flashqla_hub.package.errors import PackageError
from flashqla_hub.package.subject import Subject, read_subject

VARIANT = Path("build/torch-universal")
COMPILED = Path("build/torch-stable-abi29-cu130-x86_64-linux")
MODULE = VARIANT / "layers.py"
Breakage = Callable[[Path], None]


def append(path: Path, text: str) -> Breakage:
    def breakage(root: Path) -> None:
        (root / path).write_text((root / path).read_text() + "\n" + text + "\n")

    return breakage


def replace(path: Path, old: str, new: str) -> Breakage:
    def breakage(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return breakage


def remove(path: Path) -> Breakage:
    return lambda root: (root / path).unlink()


def write(path: Path, text: str) -> Breakage:
    def breakage(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    return breakage


def change_metadata(**changes: object) -> Breakage:
    def breakage(root: Path) -> None:
        path = root / VARIANT / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return breakage


def library_of(root: Path) -> Path:
    (library,) = (root / COMPILED).glob("*.so")
    return library


def remove_library(root: Path) -> None:
    library_of(root).unlink()


def change_library(root: Path) -> None:
    library_of(root).write_bytes(b"another library")


def import_connect(root: Path) -> None:
    library_of(root).write_bytes(smallest_library("snprintf", "connect"))


def name_a_library(root: Path) -> None:
    library_of(root).write_bytes(library_of(root).read_bytes() + b"\0libcurl.so.4\0")


def problems_of(check: str, root: Path) -> list[str]:
    return CHECKS[check](read_subject(root))


REGISTRATION = "import torch\nfrom ._ops import add_op_namespace_prefix\n"
BROKEN = [
    ("layout", write(VARIANT / "../surprise.txt", ""), "surprise.txt is neither a build variant"),
    ("layout", lambda root: shutil.rmtree(root / VARIANT), "torch-universal is missing"),
    ("layout", remove(VARIANT / "__init__.py"), "has no __init__.py"),
    ("layout", remove(VARIANT / "_ops.py"), "has no _ops.py"),
    ("layout", write(VARIANT / "flashqla/__init__.py", ""), "repeats the kernel inside itself"),
    ("layout", write(VARIANT / "flashqla.so", ""), "has the libraries"),
    ("layout", remove_library, "has the libraries [], not ['_flashqla_"),
    ("no bytecode", write(VARIANT / "__pycache__/layers.cpython-311.pyc", ""), "is compiled Python"),
    ("metadata", write(VARIANT / "metadata.json", "{}"), "kernels cannot read"),
    ("metadata", change_metadata(id="_flashqla_0123456789ab"), "is not the op namespace"),
    ("metadata", change_metadata(id="flashqla"), "12 hexadecimal digits"),
    ("metadata", change_metadata(version=2), "version 2 is not build.toml's 1"),
    ("metadata", change_metadata(license="apache-2.0"), "license 'apache-2.0' is not"),
    ("metadata", change_metadata(**{"python-depends": ["einops"]}), "python-depends is not empty"),
    ("metadata", change_metadata(backend={"type": "cuda"}), "backend 'cuda' is not 'cpu'"),
    ("digests", append(MODULE, "# changed"), "torch-universal differs from its digest"),
    ("digests", change_metadata(digest=None), "has no digest"),
    ("digests", change_library, "cu130-x86_64-linux differs from its digest"),
    ("public names", append(VARIANT / "__init__.py", "__all__ += ['more']"), "assign __all__ once"),
    ("public names", replace(VARIANT / "__init__.py", '"chunk_gated_delta_rule",', ""), "first in __all__"),
    ("public names", write(MODULE, ""), "layers.py defines no class"),
    ("imports", append(MODULE, "import einops"), "imports einops"),
    ("imports", append(MODULE, "def f():\n    from tilelang import language"), "imports tilelang"),
    ("imports", append(MODULE, "import flashqla"), "imports flashqla"),
    ("imports", append(MODULE, "from .. import nothing"), "imports from outside the kernel"),
    ("Python 3.9", append(MODULE, "def f(x):\n    match x:\n        case 1:\n            pass"), "is not Python 3.9"),
    ("Python 3.9", append(MODULE, "def f(x: int | None): pass"), "annotation int | None is evaluated"),
    ("Python 3.9", append(MODULE, "x: int | None = None"), "annotation int | None is evaluated"),
    ("Python 3.9", append(MODULE, "Maybe = int | None"), "X | None as a value"),
    ("Python 3.9", append(MODULE, "isinstance(1, int | str)"), "isinstance with X | Y"),
    ("Python 3.9", append(MODULE, "from itertools import pairwise"), "itertools.pairwise"),
    ("Python 3.9", append(MODULE, "import typing\nx: typing.Self"), "typing.Self"),
    ("Python 3.9", append(MODULE, "list(zip([], [], strict=True))"), "zip(strict=...)"),
    ("Python 3.9", append(MODULE, "import tomllib"), "module tomllib"),
    ("Python 3.9", append(MODULE, "def f(x, i):\n    return x[*i]"), "a starred index"),
    ("no network, process, eval, pickle", append(MODULE, "import socket"), "uses socket"),
    ("no network, process, eval, pickle", append(MODULE, "from urllib import request"), "uses urllib"),
    ("no network, process, eval, pickle", append(MODULE, "import subprocess as s"), "uses subprocess"),
    ("no network, process, eval, pickle", append(MODULE, "import pickle"), "uses pickle"),
    ("no network, process, eval, pickle", append(MODULE, "f = eval"), "uses eval"),
    ("no network, process, eval, pickle", append(MODULE, "exec('1')"), "uses exec"),
    ("no network, process, eval, pickle", append(MODULE, "import os\nos.system('ls')"), "uses os.system"),
    ("no network, process, eval, pickle", append(MODULE, "from os import system"), "uses os.system"),
    ("no network, process, eval, pickle", append(MODULE, "import torch\ntorch.load('x')"), "uses torch.load"),
    ("no network, process, eval, pickle", append(MODULE, "import torch.hub as h\nh.load('x')"), "uses torch.hub.load"),
    ("no network, process, eval, pickle", append(MODULE, "from importlib import import_module"), "uses importlib"),
    ("no network, process, eval, pickle", append(MODULE, "import builtins\nbuiltins.exec('1')"), "uses builtins"),
    ("no network, process, eval, pickle", append(MODULE, "import ctypes"), "uses ctypes"),
    ("no network, process, eval, pickle", append(MODULE, "text = open('x')"), "uses open"),
    ("no network, process, eval, pickle", append(MODULE, "def f(p):\n    p.write_text('x')"), "uses write_text"),
    ("no network, process, eval, pickle", append(MODULE, "import os\ngetattr(os, 'system')"), "uses os.system"),
    ("no network, process, eval, pickle", append(MODULE, "import os\nn = 'x'\ngetattr(os, n)"), "with a computed name"),
    ("no network, process, eval, pickle", append(MODULE, "x = (1).__class__.__subclasses__()"), "uses __subclasses__"),
    ("no network, process, eval, pickle", append(MODULE, "import torch.distributed as d"), "uses torch.distributed"),
    ("no network, process, eval, pickle", append(MODULE, "import torch\ntorch.jit.load('x')"), "uses torch.jit.load"),
    (
        "no network, process, eval, pickle",
        append(MODULE, "import torch\ntorch.ops.load_library('x')"),
        "uses torch.ops.load_library",
    ),
    ("libraries reach nothing", change_library, "this is no 64-bit little-endian ELF file"),
    ("libraries reach nothing", import_connect, "x86_64 library imports connect, which opens a connection or a file"),
    ("libraries reach nothing", name_a_library, "it names the library libcurl.so.4, which nobody knows"),
    (
        "op namespace",
        append(MODULE, "import torch\n@torch.library.custom_op('mine::f', mutates_args=())\ndef f(x): pass"),
        "torch.library.custom_op with a name of its own",
    ),
    (
        "op namespace",
        append(MODULE, "from torch.library import define\ndefine('mine::f', '(Tensor x) -> Tensor')"),
        "torch.library.define with a name of its own",
    ),
    (
        "op namespace",
        append(MODULE, REGISTRATION + "name = 'mine::f'\ntorch.library.register_fake(name)"),
        "torch.library.register_fake with a name of its own",
    ),
    (
        "op namespace",
        append(
            MODULE, REGISTRATION + "n = add_op_namespace_prefix('f')\n@torch.library.register_fake(n)\ndef f(x): pass"
        ),
        "torch.library.register_fake with a name of its own",
    ),
    ("card", remove(Path("build/CARD.md")), "CARD.md is missing"),
    ("card", replace(Path("build/CARD.md"), "library_name: kernels", "library_name: torch"), "library_name: kernels"),
    ("card", replace(Path("build/CARD.md"), "license: mit", "license: [mit"), "license: mit"),
    ("card", replace(Path("build/CARD.md"), "`rms_norm_gated`", "rms"), "does not name rms_norm_gated"),
    ("card", replace(Path("build/CARD.md"), "`RMSNormGated`", "norm"), "does not name RMSNormGated"),
    ("card", append(Path("build/CARD.md"), "{{ repo_id }}"), "unfilled template"),
    ("build/ equals the sources", append(MODULE, "# changed"), "torch-universal/layers.py"),
    ("build/ equals the sources", write(VARIANT / "extra.py", ""), "torch-universal/extra.py"),
    ("build/ equals the sources", append(Path("CARD.md"), "More."), "CARD.md"),
    ("build/ equals the sources", remove_library, "cu130-x86_64-linux/_flashqla_"),
    ("build/ equals the sources", change_library, "cu130-x86_64-linux/metadata.json"),
    ("build/ equals the sources", remove(Path("torch-ext/flashqla/__init__.py")), "has no __init__.py"),
    (
        "loads with kernels",
        append(VARIANT / "__init__.py", "import torch\ntorch.library.define('mine::f', '(Tensor x) -> Tensor')"),
        "registers mine::f outside its namespace",
    ),
    ("loads with kernels", append(VARIANT / "__init__.py", "raise KeyError('broken')"), "KeyError: 'broken'"),
    (
        "loads with kernels",
        append(MODULE, "import socket\nsocket.create_connection(('127.0.0.1', 9))"),
        "loading the kernel connects to",
    ),
    ("loads with kernels", append(VARIANT / "__init__.py", "del rms_norm_gated"), "lists rms_norm_gated in __all__"),
    ("loads with kernels", append(MODULE, "import os\nos._exit(3)"), "ended with code 3"),
    ("loads with kernels", write(VARIANT / "__init__.py", "__all__ = []"), "registers no op when it is loaded"),
]


@pytest.mark.parametrize(("check", "breakage", "message"), BROKEN, ids=[f"{c}: {m}" for c, _, m in BROKEN])
def test_broken_copy_is_found(built: Path, check: str, breakage: Breakage, message: str):
    breakage(built)
    found = problems_of(check, built)
    assert any(message in problem for problem in found), found
    assert not [problem for problem in found if "\n" in problem]


def test_every_check_is_seen_to_fail():
    assert {check for check, _, _ in BROKEN} == set(CHECKS)


def test_registrations_through_the_prefix_are_accepted(built: Path):
    accepted = (
        "@torch.library.custom_op(add_op_namespace_prefix('f'), mutates_args=())\ndef f(x): pass\n"
        "torch.library.register_fake(f)\n"
        "def g(name):\n    full = add_op_namespace_prefix(name)\n    torch.library.define(full, '() -> ()')\n"
        "torch.library.Library(add_op_namespace_prefix('').split('::')[0], 'FRAGMENT')"
    )
    append(MODULE, REGISTRATION + accepted)(built)
    assert problems_of("op namespace", built) == []


def test_postponed_annotations_are_accepted_unless_an_op_evaluates_them(built: Path):
    text = "from __future__ import annotations\nimport torch\ndef f(x: int | None): pass\n"
    write(MODULE, text)(built)
    assert problems_of("Python 3.9", built) == []
    write(MODULE, text + "@torch.library.custom_op('a::b', mutates_args=())\ndef g(x: int | None): pass")(built)
    assert "evaluated" in problems_of("Python 3.9", built)[0]


def test_bytecode_that_git_ignores_is_accepted_in_a_source_tree(committed: Path):
    write(VARIANT / "__pycache__/layers.cpython-311.pyc", "")(committed)
    assert problems_of("no bytecode", committed) == []
    (committed / ".gitignore").unlink()
    assert "is compiled Python" in problems_of("no bytecode", committed)[0]


def test_bytecode_that_python_left_in_the_hub_cache_is_accepted(released: Path, tmp_path: Path):
    variant = tmp_path / VARIANT
    variant.mkdir(parents=True)
    (variant / "layers.py").symlink_to(released / VARIANT / "layers.py")
    (variant / "__pycache__").mkdir()
    (variant / "__pycache__/layers.cpython-311.pyc").write_bytes(b"")
    assert problems_of("no bytecode", tmp_path) == []
    (variant / "__pycache__/layers.cpython-312.pyc").symlink_to(released / VARIANT / "layers.py")
    (variant / "__pycache__/gone.cpython-311.pyc").write_bytes(b"")
    assert len(problems_of("no bytecode", tmp_path)) == 2


def test_download_is_checked_without_its_sources(released: Path, tmp_path: Path):
    shutil.copytree(released / "build/torch-universal", tmp_path / "snapshot/build/torch-universal")
    results = {result.name: result for result in run_checks(read_subject(tmp_path / "snapshot"))}
    assert [name for name, result in results.items() if result.problems] == []
    assert {name for name, result in results.items() if result.skipped} == {"build/ equals the sources", "card"}


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda variant: (variant / "layers.py").write_text("# other code"), "'layers.py'"),
        (lambda variant: (variant / "more.py").write_text(""), "'more.py'"),
        (lambda variant: (variant / "layers.py").unlink(), "'layers.py'"),
        (lambda variant: (variant / "metadata.json").unlink(), "cannot be verified without a readable metadata.json"),
    ],
    ids=["changed", "added", "removed", "unlisted"],
)
def test_tampered_download_is_noticed(released: Path, tmp_path: Path, run_python: RunPython, tamper, words):
    """Whatever differs from the digests, by the command that a user has."""
    variant = tmp_path / "snapshot" / VARIANT
    shutil.copytree(released / VARIANT, variant)
    tamper(variant)
    done = run_python("-m", "flashqla_hub", "check", tmp_path / "snapshot")
    assert done.returncode == 1 and words.strip("'") in done.stderr, done.stderr


def test_card_of_a_download_is_its_readme(released: Path, tmp_path: Path):
    shutil.copytree(released / "build/torch-universal", tmp_path / "build/torch-universal")
    (tmp_path / "README.md").write_text("no front matter")
    assert any("library_name" in problem for problem in problems_of("card", tmp_path))


def test_variant_for_another_machine_is_not_loaded(released: Path):
    subject = read_subject(released)
    foreign = Subject(subject.root, subject.project, {"torch-stable-abi29-cu126-aarch64-linux": {}})
    assert load_problems(foreign) == []
    assert {result.name: result.skipped for result in run_checks(foreign)}["loads with kernels"]


def test_folder_without_build_is_refused(tmp_path: Path):
    with pytest.raises(PackageError, match="holds no build/ directory"):
        read_subject(tmp_path)


def test_command_shows_a_table_and_fails_with_one_sentence_a_problem(built: Path, run_python: RunPython):
    append(MODULE, "import einops")(built)
    done = run_python("-m", "flashqla_hub", "check", built)
    assert done.returncode == 1
    assert all(name in done.stdout for name in CHECKS)
    sentences = [line for line in done.stderr.splitlines() if line.startswith("- ")]
    assert any("imports einops" in sentence for sentence in sentences)
    assert done.stderr.splitlines()[-1].startswith(f"error: {len(sentences)} problems in ")


def test_command_accepts_a_fresh_build(released: Path, capsys: pytest.CaptureFixture):
    check_command(released)
    rows = [re.split(r"\s*│\s*", line)[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows == [[name, "ok"] for name in CHECKS]


def test_build_command_makes_what_the_check_wants(sources: Path, run_python: RunPython):
    commit_all(sources)
    done = run_python("-m", "flashqla_hub", "build", sources, "--variant", VARIANT.name)
    assert done.returncode == 0 and f"build: {VARIANT.name};" in done.stdout, done.stderr
    made = read_tree(sources / VARIANT)
    assert {path.name for path in (sources / "build").iterdir()} == {"CARD.md", VARIANT.name}
    assert "torch-stable-abi29-cu126-aarch64-linux" in problems_of("build/ equals the sources", sources)[0]
    build(sources)
    assert problems_of("build/ equals the sources", sources) == []
    assert read_tree(sources / VARIANT) == made


def test_build_of_an_unknown_variant_is_refused(sources: Path, run_python: RunPython):
    done = run_python("-m", "flashqla_hub", "build", sources, "--variant", "torch-cpu")
    assert done.returncode == 1 and "there is no variant torch-cpu; there are torch-" in done.stderr


@pytest.mark.skipif(explain_missing_tools() is None, reason="the compilers are installed")
def test_build_without_the_compilers_names_them_and_writes_nothing(sources: Path, run_python: RunPython):
    done = run_python("-m", "flashqla_hub", "build", sources)
    assert done.returncode == 1 and "pip install -r requirements/build.txt" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (sources / "build").exists()
