"""A digest of everything that the compiled bytes are made from; needs no compiler.

The libraries' op namespace and the manifest carry it, so that anybody can tell without tools whether the committed
libraries belong to these sources. The tools' exact versions count through requirements/build.txt.
"""

from hashlib import sha256
from pathlib import Path

from .tools import REQUIREMENTS, ROOT

FOLDERS = {
    "flashqla_hub/kernels": ("*.py",),
    "flashqla_hub/compile": ("*.py",),
    "torch-ext/flashqla/csrc": ("*.h", "*.cpp"),
}


def input_files(root: Path = ROOT) -> list[Path]:
    """All input files in a fixed order."""
    found = [
        path for folder, patterns in FOLDERS.items() for pattern in patterns for path in (root / folder).rglob(pattern)
    ]
    return sorted([root / REQUIREMENTS.relative_to(ROOT), *found])


def inputs_digest(root: Path = ROOT) -> str:
    """sha256 over names and contents of the input files, as a hexadecimal string."""
    digest = sha256()
    for path in input_files(root):
        name, content = path.relative_to(root).as_posix().encode(), path.read_bytes()
        digest.update(b"%d:%b%d:%b" % (len(name), name, len(content), content))
    return digest.hexdigest()
