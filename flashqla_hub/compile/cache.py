"""A folder of earlier results, found by the digest of everything that they were made from.

It can make a second run quicker and cannot change a byte: an entry is written whole or not at all, carries the digest of
its own content, and counts as absent when that does not match.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Cache:
    """Maps (kind, ingredients) to bytes. `folder=None` keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get_or_make(self, kind: str, ingredients: Any, make: Callable[[], bytes]) -> bytes:
        """Returns the stored result for JSON-like `ingredients`, or makes and stores it."""
        if self.folder is None:
            return make()
        key = hashlib.sha256(json.dumps([kind, ingredients], sort_keys=True).encode()).hexdigest()
        path = self.folder / kind / key
        stored = _read(path)
        if stored is not None:
            return stored
        result = make()
        _write(path, result)
        return result


def default_folder() -> Path:
    """$XDG_CACHE_HOME/flashqla_hub/compile, or the same under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "flashqla_hub" / "compile"


def _read(path: Path) -> bytes | None:
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    return content if hashlib.sha256(content).hexdigest().encode() == digest else None


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    os.replace(temporary, path)
