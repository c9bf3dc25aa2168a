"""The project's own kernel sources, copied where a test may build, break and commit them."""

import shutil
import struct
import subprocess
from pathlib import Path

import torch
from hub_server import File, Hub, Repository

from flashqla_hub.package.assemble import assemble, library_name, write_tree
from flashqla_hub.package.project import read_project
from flashqla_hub.package.publish import published_files
from flashqla_hub.package.variants import Variant

ROOT = Path(__file__).parents[2]
PARTS = ("build.toml", "CARD.md", ".gitignore", "torch-ext", "benchmarks")


def copy_sources(destination: Path) -> Path:
    """Copy what a build reads, without bytecode and results."""
    destination.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, destination / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(ROOT / part, destination / part)
    return destination


def stand_in_library(variant: Variant, unique: str) -> bytes:
    """What takes the place of a compiled library, which these tests have no compilers for.

    `kernels` loads a library on a PyTorch with CUDA alone; there it must be the committed one.
    """
    if torch.version.cuda is None:
        return smallest_library() + f"the library {unique} of {variant.name}".encode()
    return (ROOT / "build" / variant.name / library_name(unique)).read_bytes()


def smallest_library(*imports: str) -> bytes:
    """A 64-bit ELF file with a dynamic section and these undefined symbols, and nothing else."""
    names = "".join(f"\0{name}" for name in imports).encode() + b"\0"
    offsets = [names.index(f"\0{name}\0".encode()) + 1 for name in imports]
    symbols = bytes(24) + b"".join(struct.pack("<IBBHQQ", offset, 16, 0, 0, 0, 0) for offset in offsets)
    dynamic = struct.pack("<qQ", 0, 0)
    contents = [(0, b"", 0), (6, dynamic, 3), (11, symbols, 3), (3, names, 0)]  # SHT_DYNAMIC, SHT_DYNSYM, SHT_STRTAB
    header, place, table, body = 64, 64, b"", b""
    for kind, content, link in contents:
        table += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, place, len(content), link, 0, 1, 0)
        body, place = body + content, place + len(content)
    start = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, place, 0, header, 0, 0, 64, 4, 3)
    )
    return start + body + table


def build(root: Path) -> Path:
    """Assemble `root`/build, every variant of it."""
    project = read_project(root)
    write_tree(assemble(project, library=stand_in_library), project.build)
    return root


def commit_all(root: Path, message: str = "Change") -> None:
    """Commit everything in `root`, which becomes a git repository if it is none."""
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", message]):
        subprocess.run(["git", "-C", str(root), *command], check=True, timeout=30)


def stock(hub: Hub, root: Path) -> None:
    """Put what `root` would publish as qwen/flashqla straight into the server, without huggingface_hub."""
    repository = hub.repositories["qwen/flashqla"] = Repository()
    for branch, files in published_files(read_project(root)).items():
        repository.commit(branch, {path: File(content) for path, content in files.items()})
