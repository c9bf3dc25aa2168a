"""Models served by the kernel in the repository's build/, and transformers as it was after each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

import flashqla_hub
from flashqla_hub import boundaries, mapping
from flashqla_hub.models import functions_of, imported_modeling_modules
from tests.transformers.families import INSTALLED, tiny_model

logging.disable_progress_bar()


@pytest.fixture(params=INSTALLED)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def plain(family: str) -> PreTrainedModel:
    """A tiny model of the family, as transformers runs it."""
    return tiny_model(family)


@pytest.fixture
def kernelize(kernel_folder: Path) -> Callable[[PreTrainedModel], PreTrainedModel]:
    """`flashqla_hub.kernelize` with the kernel under test."""
    return lambda model, **options: flashqla_hub.kernelize(model, source=kernel_folder, **options)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a test did to the functions of transformers, and let each test meet warnings for the first time."""
    monkeypatch.setattr(boundaries, "_warned", set())
    yield
    flashqla_hub.unregister()
    mapping._loaded.cache_clear()
    for name in imported_modeling_modules():
        for function in functions_of(name).values():
            vars(function).pop("forward", None)
    torch._dynamo.reset()
