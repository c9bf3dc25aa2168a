"""build.toml: what the kernel is called, which version of its contract it serves, and which files it ships."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from .errors import PackageError
from .kernel_data import Build

FRAMEWORKS = ("torch", "torch-noarch")
REQUIRED = ("name", "version", "edition", "license", "upstream", "source")
EDITION = 5
DEFAULT_EXTENSIONS = ("py", "pyi")


@dataclass(frozen=True)
class Project:
    """A kernel's source tree: `build.toml`, `CARD.md`, `torch-ext/<name>` and `benchmarks`."""

    root: Path
    name: str
    version: int
    license: str
    upstream: str
    source: str
    repo_id: str
    extensions: tuple[str, ...]

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def sources(self) -> Path:
        return self.root / "torch-ext" / self.python_name

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def branch(self) -> str:
        """The Hub branch that serves this version of the contract."""
        return f"v{self.version}"


def is_project(root: Path) -> bool:
    """Whether `root` is a source tree, and not a downloaded kernel repository."""
    return (root / "build.toml").is_file() and (root / "torch-ext").is_dir()


def read_project(root: Path) -> Project:
    """Read `root`/build.toml, validated by `kernels` where it has a reader (0.17 and later).

    Raises:
        PackageError: the file is missing, `kernels` refuses it, or it leaves out what a build needs.
    """
    path = root / "build.toml"
    if not path.is_file():
        raise PackageError(f"{root} holds no build.toml; run this in the root of the kernel's source tree, or name it.")
    if Build is not None:
        try:
            Build.open(root)
        except ValueError as error:
            raise PackageError(f"kernels refuses {path}: {' '.join(str(error).split())}") from error
    try:
        config = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise PackageError(f"{path} is not valid TOML: {error}.") from error
    return _project(root, path, config)


def _project(root: Path, path: Path, config: dict) -> Project:
    general = config.get("general", {})
    repo_id = general.get("hub", {}).get("repo-id")
    missing = [f"general.{key}" for key in REQUIRED if key not in general]
    missing += [] if repo_id else ["general.hub.repo-id"]
    if missing:
        raise PackageError(f"{path} leaves out {', '.join(missing)}; a build needs every one of them.")
    if general["edition"] != EDITION:
        raise PackageError(f"{path} has edition {general['edition']}; this builder reads edition {EDITION}.")
    frameworks = [name for name in FRAMEWORKS if name in config]
    if len(frameworks) != 1:
        raise PackageError(f"{path} must have exactly one of [torch] and [torch-noarch], not {len(frameworks)}.")
    return Project(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        upstream=general["upstream"],
        source=general["source"],
        repo_id=repo_id,
        extensions=tuple(config[frameworks[0]].get("pyext", DEFAULT_EXTENSIONS)),
    )
