"""`python -m flashqla_hub publish`: bring the branches on the Hub to what `build/` holds.

Branch main shows the card as README.md; branch v<version> serves the variants and the benchmark. Each branch changes in one
commit, so nobody loads half a variant, and only files that differ from the branch travel, so a publication that was
interrupted is finished by running it again.
"""

import hashlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from .assemble import CARD
from .errors import PackageError, told_in_one_sentence
from .hub_errors import explained, status_of
from .project import Project, read_project
from .repository_rules import freshness_problems
from .subject import read_subject

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPO_TYPE = "kernel"
MINIMUM_HUB = "2.3"  # older ones reject the repository type "kernel" in create_commit
BENCHMARKS = "benchmarks/benchmark*.py"  # what `kernels benchmark` reads; results stay in the source tree


@dataclass(frozen=True)
class BranchPlan:
    """What one branch needs: `upload` {path: content}, `delete` and `unchanged` paths, and the commit compared against."""

    branch: str
    upload: Mapping[str, bytes]
    delete: tuple[str, ...]
    unchanged: tuple[str, ...]
    parent: str | None

    @property
    def is_done(self) -> bool:
        return not self.upload and not self.delete


def require_publishable(project: Project) -> str:
    """Refuse what must not be published; returns the commit of the source tree.

    Raises:
        PackageError: huggingface_hub is too old, git has uncommitted changes, or `build/` is not what the sources give.
    """
    installed = installed_version("huggingface_hub")
    if Version(installed) < Version(MINIMUM_HUB):
        raise PackageError(
            f"publishing a kernel needs huggingface_hub>={MINIMUM_HUB}, not {installed}; "
            f"run `pip install 'huggingface_hub>={MINIMUM_HUB}'`."
        )
    changed = _git(project.root, "status", "--porcelain").splitlines()
    if changed:
        raise PackageError(
            f"git has {len(changed)} uncommitted change{'s' * (len(changed) > 1)} ({changed[0].strip()}, ...); "
            "commit or stash them, so that what is published has a source."
        )
    stale = freshness_problems(read_subject(project.root))
    if stale:
        raise PackageError(stale[0])
    return _git(project.root, "rev-parse", "HEAD").strip()


def published_files(project: Project) -> dict[str, dict[str, bytes]]:
    """{branch: {path in the repository: content}}."""
    build = {path.relative_to(project.build).as_posix(): path for path in project.build.rglob("*") if path.is_file()}
    shipped = {
        f"build/{name}": path for name, path in build.items() if name != CARD and "__pycache__" not in path.parts
    }
    benchmarks = {path.relative_to(project.root).as_posix(): path for path in project.root.glob(BENCHMARKS)}
    return {
        project.branch: {name: path.read_bytes() for name, path in sorted({**shipped, **benchmarks}.items())},
        "main": {"README.md": (project.build / CARD).read_bytes()},
    }


def plan_branch(api: "HfApi", repo_id: str, branch: str, files: Mapping[str, bytes]) -> BranchPlan:
    """Compare `files` with the branch on the Hub; a missing repository or branch has no file yet."""
    remote, parent = _remote_files(api, repo_id, branch)
    owned = _owned_folders(files)
    upload = {path: content for path, content in files.items() if not _is_same(remote.get(path), content)}
    delete = [path for path in remote if path not in files and path.startswith(owned)]
    unchanged = [path for path in files if path not in upload]
    return BranchPlan(branch, upload, tuple(sorted(delete)), tuple(unchanged), parent)


def execute(api: "HfApi", repo_id: str, plans: list[BranchPlan], source_commit: str) -> None:
    """Make the changes: the repository, then the version's branch, then the card."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    pending = [plan for plan in plans if not plan.is_done]
    if not pending:
        return
    with explained(f"create {repo_id}", api.token):
        api.create_repo(repo_id, repo_type=REPO_TYPE, exist_ok=True)
    for plan in pending:
        with explained(f"publish branch {plan.branch} of {repo_id}", api.token):
            if plan.branch != "main":
                api.create_branch(repo_id, branch=plan.branch, repo_type=REPO_TYPE, exist_ok=True)
            additions = [CommitOperationAdd(path, content) for path, content in plan.upload.items()]
            deletions = [CommitOperationDelete(path) for path in plan.delete]
            api.create_commit(
                repo_id,
                [*additions, *deletions],
                commit_message=f"Publish {plan.branch}" if plan.branch != "main" else "Update the card",
                commit_description=f"Built from commit {source_commit}.",
                repo_type=REPO_TYPE,
                revision=plan.branch,
                parent_commit=plan.parent,
            )


def _owned_folders(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """The folders that belong to this publication alone: each of its variants, and the benchmarks.

    Variants that this build does not make are somebody's choice to keep or to remove, and stay.
    """
    parts = [path.split("/") for path in files]
    return tuple({"/".join(p[:2]) + "/" if p[0] == "build" else p[0] + "/" for p in parts if len(p) > 1})


def _remote_files(api: "HfApi", repo_id: str, branch: str) -> tuple[dict[str, object], str | None]:
    """({path: entry of the Hub's listing}, commit) of a branch; ({}, None) where there is none."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with explained(f"read branch {branch} of {repo_id}", api.token):
        try:
            parent = api.repo_info(repo_id, repo_type=REPO_TYPE, revision=branch).sha
            entries = list(api.list_repo_tree(repo_id, repo_type=REPO_TYPE, revision=parent, recursive=True))
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            if status_of(error) == 404:
                return {}, None
            raise
    return {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}, parent


def _is_same(remote: object | None, content: bytes) -> bool:
    """Whether the Hub holds `content`: by SHA-256 for a large file, by git's blob id for any other."""
    if remote is None:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == hashlib.sha256(content).hexdigest()
    return remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise PackageError(f"{root.resolve()} is not a git repository with a commit; publish from a clone.") from error
    return done.stdout


def publish(root: Path, repo_id: str | None, api: "HfApi", *, make_changes: bool) -> list[BranchPlan]:
    """Compare, and with `make_changes` also change, the branches on the Hub; returns what differed before."""
    project = read_project(root)
    commit = require_publishable(project)
    target = repo_id or project.repo_id
    plans = [plan_branch(api, target, branch, files) for branch, files in published_files(project).items()]
    if make_changes:
        execute(api, target, plans, commit)
    return plans


def publish_command(
    path: Annotated[Path, typer.Argument(help="Root of the kernel's source tree.")] = Path(),
    repo: Annotated[str | None, typer.Option(help="Kernel repository; the one of build.toml by default.")] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Make the changes instead of listing them.")] = False,
) -> None:
    """List what would go where on the Hub; with --execute, upload it. Unchanged files are not uploaded again."""
    with told_in_one_sentence():
        from huggingface_hub import HfApi

        plans = publish(path, repo, HfApi(), make_changes=execute)
        _print_plans(plans)
        done = all(plan.is_done for plan in plans)
        if done:
            typer.echo("The Hub already holds all of this.")
        elif execute:
            typer.echo("Published.")
        else:
            typer.echo("Dry run: nothing was changed. Pass --execute to publish.")


def _print_plans(plans: list[BranchPlan]) -> None:
    table = Table()
    for column in ("branch", "file", "change", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for plan in plans:
        for path, content in plan.upload.items():
            table.add_row(plan.branch, path, "upload", f"{len(content):,}")
        for path in plan.delete:
            table.add_row(plan.branch, path, "delete", "")
        if plan.unchanged:
            table.add_row(plan.branch, f"{len(plan.unchanged)} files", "unchanged", "")
    Console().print(table)
