"""The one exception of this package, and how a command shows it."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


class PackageError(RuntimeError):
    """A kernel repository cannot be built, checked, published, downloaded or loaded; the message is one sentence."""


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """End the command with exit code 1 and the sentence of a PackageError, without a traceback."""
    try:
        yield
    except PackageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
