"""Source trees, a Hub in memory, and fresh processes that know no other Hub."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fresh_process import RunPython, run_in_fresh_process
from hub_server import Hub, serve
from source_tree import build, commit_all, copy_sources, stock

from flashqla_hub.package.project import Project, read_project


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source tree without build/."""
    return copy_sources(tmp_path / "sources")


@pytest.fixture
def project(sources: Path) -> Project:
    return read_project(sources)


@pytest.fixture
def built(sources: Path) -> Path:
    """A source tree with its build/."""
    return build(sources)


@pytest.fixture
def committed(built: Path) -> Path:
    """A source tree with its build/, in a clean git repository."""
    commit_all(built)
    return built


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree with its build/, shared by tests that only read it."""
    return build(copy_sources(tmp_path_factory.mktemp("released") / "sources"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty Hub that trusts nobody."""
    with serve() as server:
        yield server


@pytest.fixture
def stocked_hub(hub: Hub, released: Path) -> Hub:
    """A Hub that holds qwen/flashqla as `publish` leaves it, on any version of huggingface_hub."""
    stock(hub, released)
    return hub


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run Python in a fresh process with an empty Hub cache of this test's own."""
    return partial(run_in_fresh_process, tmp_path)
