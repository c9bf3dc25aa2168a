"""The command line: quick, lazy, and honest about what it offers."""

import importlib
import inspect
from pathlib import Path

import pytest
from fresh_process import RunPython

from flashqla_hub.__main__ import COMMANDS, build_app
from flashqla_hub.package import publish
from flashqla_hub.package.errors import PackageError
from flashqla_hub.package.project import read_project

HEAVY = ("torch", "kernels", "transformers", "huggingface_hub", "tilelang")


def test_overview_imports_nothing_heavy(run_python: RunPython):
    code = (
        "import sys\nfrom flashqla_hub.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert not end.code\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\nassert not loaded, loaded"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
    assert all(command.summary in done.stdout for command in COMMANDS.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_and_explains_itself(name: str):
    command = COMMANDS[name]
    function = getattr(importlib.import_module(command.module), command.function)
    assert inspect.getdoc(function)
    registered = {info.name: info.callback for info in build_app(name).registered_commands}
    assert registered.keys() == COMMANDS.keys() and registered[name] is function


def test_unknown_command_is_refused(run_python: RunPython):
    done = run_python("-m", "flashqla_hub", "publsh")
    assert done.returncode == 2 and "No such command 'publsh'" in done.stderr


def test_failing_command_shows_no_traceback(run_python: RunPython):
    done = run_python("-m", "flashqla_hub", "build", ".")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and "holds no build.toml" in done.stderr


def test_build_says_which_variants_it_removed(sources: Path, run_python: RunPython):
    (sources / "build" / "torch-cuda").mkdir(parents=True)
    (sources / "build" / "torch-cuda" / "metadata.json").write_text("{}")
    done = run_python("-m", "flashqla_hub", "build", str(sources), "--variant", "torch-universal")
    assert done.returncode == 0, done.stderr
    assert "removed, since --variant does not name them: torch-cuda\n" in done.stdout
    assert [entry.name for entry in sorted((sources / "build").iterdir())] == ["CARD.md", "torch-universal"]


def test_publishing_with_an_old_huggingface_hub_is_refused(committed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publish, "installed_version", lambda package: "2.2.0")
    with pytest.raises(PackageError, match=r"needs huggingface_hub>=2\.3, not 2\.2\.0"):
        publish.require_publishable(read_project(committed))
