"""Everything that the compiled bytes are made from, and its digest; needs no compiler.

The op namespace and the manifest carry the digest, so that anybody can tell without tools whether the committed libraries
belong to these sources. The tools' exact versions count through requirements/build.txt.
"""

from hashlib import sha256
from pathlib import Path

from .tools import REQUIREMENTS, ROOT

FOLDERS = {
    "flashqla_hub/kernels": ("*.py",),
    "flashqla_hub/compile": ("*.py",),
    "torch-ext/flashqla/csrc": ("*.h", "*.cpp"),
}


def input_files(root: Path = ROOT) -> dict[str, bytes]:
    """Path relative to the project -> content, in a fixed order."""
    patterns = [(root / folder, pattern) for folder, patterns in FOLDERS.items() for pattern in patterns]
    found = [path for folder, pattern in patterns for path in folder.rglob(pattern)]
    paths = sorted([root / REQUIREMENTS.relative_to(ROOT), *found])
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def inputs_digest(root: Path = ROOT) -> str:
    """sha256 over names and contents of the input files, as a hexadecimal string."""
    digest = sha256()
    for name, content in input_files(root).items():
        digest.update(b"%d:%b%d:%b" % (len(name), name.encode(), len(content), content))
    return digest.hexdigest()
