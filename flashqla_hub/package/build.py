"""`python -m flashqla_hub build`: write `build/` from the sources."""

from pathlib import Path
from typing import Annotated

import typer

from .assemble import assemble, write_tree
from .errors import told_in_one_sentence
from .project import read_project
from .variants import VARIANTS


def build_command(
    path: Annotated[Path, typer.Argument(help="Root of the kernel's source tree.")] = Path(),
    output: Annotated[Path | None, typer.Option(help="Folder to write, instead of build/ in the source tree.")] = None,
) -> None:
    """Assemble build/: every variant, its metadata and digests, and the card. The same sources give the same bytes."""
    with told_in_one_sentence():
        project = read_project(path)
        files = assemble(project)
        folder = output or project.build
        write_tree(files, folder)
    size = sum(map(len, files.values()))
    names = ", ".join(variant.name for variant in VARIANTS)
    typer.echo(f"{folder}: {names}; {len(files)} files, {size:,} bytes")
