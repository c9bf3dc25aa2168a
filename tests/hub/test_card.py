"""The card says what is true, and its example runs."""

import re
from pathlib import Path

import pytest
from fresh_process import RunPython
from hub_server import Hub
from source_tree import ROOT

import flashqla_hub
from flashqla_hub.package.project import read_project
from flashqla_hub.package.variants import VARIANTS

CARD = (ROOT / "CARD.md").read_text()
LIMITS = CARD.partition("## Limits")[2].partition("\n## ")[0]


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", CARD, re.DOTALL)


@pytest.mark.kernels_ci
def test_example_runs_against_the_hub(stocked_hub: Hub, run_python: RunPython):
    example = code_blocks()[0]
    checks = (
        "assert o.shape == v.shape and state.shape == (1, 4, 128, 128)\n"
        "assert v.grad is not None and bool(v.grad.abs().sum() > 0)\n"
    )
    done = run_python("-c", example + checks, hub=stocked_hub)
    assert done.returncode == 0, done.stderr
    assert any("/resolve/" in request for request in stocked_hub.requests)


def test_example_without_trust_would_be_refused(stocked_hub: Hub, run_python: RunPython):
    example = code_blocks()[0].replace(", trust_remote_code=True", "")
    done = run_python("-c", example, hub=stocked_hub)
    assert done.returncode == 1 and "not from a trusted publisher" in done.stderr


def test_example_names_the_published_repository_and_version():
    project = read_project(ROOT)
    assert f'get_kernel("{project.repo_id}", version={project.version}, trust_remote_code=True)' in code_blocks()[0]


def test_names_of_the_package_exist():
    names = set(re.findall(r"flashqla_hub\.([a-z_]+)", CARD))
    assert {"kernelize", "download"} <= names <= set(flashqla_hub.__all__)


def test_limits_name_every_build():
    """A build that is added makes the card's limits wrong: this fails until they are rewritten."""
    named = set(re.findall(r"`(torch-[a-z0-9_-]+)`", LIMITS))
    assert named == {variant.name for variant in VARIANTS}


def test_every_link_of_the_card_is_absolute():
    targets = re.findall(r"\]\(([^)]+)\)", CARD)
    assert targets and all(target.startswith("https://") for target in targets)


def test_card_is_published_as_it_is(released: Path):
    assert (released / "build/CARD.md").read_text() == CARD
