"""The project's own kernel sources, copied where a test may build, break and commit them."""

import shutil
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
        return f"the library {unique} of {variant.name}".encode()
    return (ROOT / "build" / variant.name / library_name(unique)).read_bytes()


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
