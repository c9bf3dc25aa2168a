"""What is said when a compiler is absent; these tests need none."""

from importlib import metadata

import pytest

from flashqla_hub.compile import tools
from flashqla_hub.compile.errors import ToolsMissing


@pytest.fixture
def installed(monkeypatch):
    """All pinned wheels at their versions, as far as their metadata says; change the dictionary to spoil it."""
    versions = dict(tools.pinned_versions())

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(tools.metadata, "version", version)
    return versions


def test_pins_are_exact_and_cover_every_tool():
    pins = tools.pinned_versions()
    assert pins["tilelang"] == "0.1.15"
    assert pins["nvidia-cuda-nvcc"] == "13.0.88"
    assert pins["nvidia-cuda-nvcc-cu12"] == "12.9.86"
    assert pins["ziglang"] == "0.17.1"


def test_a_missing_wheel_is_named_with_the_way_out(installed):
    del installed["ziglang"]
    assert tools.explain_missing_tools() == (
        "ziglang 0.17.1 is needed to compile the kernels and is not installed: pip install -r requirements/build.txt."
    )


def test_another_version_is_refused(installed):
    installed["tilelang"] = "0.1.16"
    assert tools.explain_missing_tools() == (
        "tilelang 0.1.16 is installed, but the kernels are compiled with 0.1.15: pip install -r requirements/build.txt."
    )


def test_a_missing_host_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolsMissing, match="no-such-compiler is not on PATH, and nvcc preprocesses with it"):
        tools._find_host_compiler()
