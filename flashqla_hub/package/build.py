"""`python -m flashqla_hub build`: write `build/` from the sources."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .assemble import assemble, write_tree
from .errors import PackageError, told_in_one_sentence
from .project import read_project
from .variants import VARIANTS, Variant


def build_command(
    path: Annotated[Path, typer.Argument(help="Root of the kernel's source tree.")] = Path(),
    output: Annotated[Path | None, typer.Option(help="Folder to write, instead of build/ in the source tree.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Only this variant; repeatable.")] = None,
) -> None:
    """Assemble build/: every variant, its metadata and digests, and the card. The same sources give the same bytes.

    Variants with a library need the compilers of requirements/build.txt; `--variant torch-universal` needs none. The folder
    holds nothing else afterwards: with `--variant`, variants that are not named are removed from it.
    """
    with told_in_one_sentence():
        project = read_project(path)
        variants = _choose(variant)
        files = assemble(project, variants)
        folder = output or project.build
        there = {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()
        write_tree(files, folder)
    size = sum(map(len, files.values()))
    names = ", ".join(variant.name for variant in variants)
    typer.echo(f"{folder}: {names}; {len(files)} files, {size:,} bytes")
    removed = there - {variant.name for variant in variants}
    if removed:
        typer.echo(f"removed, since --variant does not name them: {', '.join(sorted(removed))}")


def _choose(names: Sequence[str] | None) -> tuple[Variant, ...]:
    """The variants of those names, all of them for None.

    Raises:
        PackageError: there is no such variant.
    """
    if not names:
        return VARIANTS
    known = [variant.name for variant in VARIANTS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PackageError(f"there is no variant {', '.join(unknown)}; there are {', '.join(known)}.")
    return tuple(variant for variant in VARIANTS if variant.name in names)
