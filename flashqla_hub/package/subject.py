"""What `check` looks at: a source tree with its `build/`, or a kernel repository downloaded from the Hub."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import python39
from .assemble import read_tree
from .errors import PackageError
from .project import Project, is_project, read_project


@dataclass(frozen=True)
class Subject:
    """A kernel repository, read once.

    Attributes:
        root: The folder that holds `build/`.
        project: The source tree, None for a download.
        variants: {directory of build/: {path inside it: content}}.
    """

    root: Path
    project: Project | None
    variants: dict[str, dict[str, bytes]]

    @property
    def build(self) -> Path:
        return self.root / "build"

    @cached_property
    def parsed(self) -> dict[str, tuple[dict[str, ast.Module], list[str]]]:
        """{variant: (syntax trees, what Python 3.9 cannot parse)}, one entry for variants with the same Python."""
        seen, parsed = [], {}
        for name, files in self.variants.items():
            python = {path: content for path, content in files.items() if path.endswith(".py")}
            if python not in seen:
                seen.append(python)
                parsed[name] = python39.parse(python)
        return parsed


def read_subject(root: Path) -> Subject:
    """Read what lies at `root`.

    Raises:
        PackageError: there is no `build/`, or build.toml cannot be read.
    """
    project = read_project(root) if is_project(root) else None
    build = root / "build"
    if not build.is_dir():
        advice = "run `python -m flashqla_hub build`" if project else "name the root of a kernel repository"
        raise PackageError(f"{root} holds no build/ directory to check; {advice}.")
    variants = {entry.name: read_tree(entry) for entry in sorted(build.iterdir()) if entry.is_dir()}
    return Subject(root=root, project=project, variants=variants)
