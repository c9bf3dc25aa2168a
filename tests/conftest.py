"""The kernel under test, loaded the way a user loads it, and the profiles of the property tests."""

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).parents[1]

# A folder that holds one build variant (metadata.json beside __init__.py): the same tests then run on that one.
VARIANT_VARIABLE = "FLASHQLA_TEST_VARIANT"

# The tensors of the tests are small, and two OpenMP threads that spin for one core are up to 20 times slower than one.
torch.set_num_threads(1)

# The repeatable draws of all property tests take less than a minute of one core; exploring ones are new in every run.
DRAWS = int(os.environ.get("FLASHQLA_FUZZ_DRAWS", 20_000))
settings.register_profile("repeatable", max_examples=300, derandomize=True, deadline=None, database=None)
settings.register_profile("explore", max_examples=DRAWS, deadline=None, print_blob=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session")
def kernel_folder() -> Path:
    """A folder that `kernels.get_local_kernel` accepts: the repository, whose build/ must be that of its sources.

    That goes for the variants that are there; `python -m flashqla_hub check` also wants them all.
    """
    if VARIANT_VARIABLE in os.environ:
        return Path(os.environ[VARIANT_VARIABLE]).resolve()
    from flashqla_hub.package.errors import PackageError
    from flashqla_hub.package.repository_rules import freshness_problems
    from flashqla_hub.package.subject import read_subject
    from flashqla_hub.package.variants import VARIANTS

    try:
        subject = read_subject(ROOT)
        problems = freshness_problems(subject, [variant for variant in VARIANTS if variant.name in subject.variants])
    except PackageError as error:
        problems = [str(error)]
    if problems:
        pytest.fail(problems[0], pytrace=False)
    return ROOT


@pytest.fixture(scope="session")
def kernel(kernel_folder: Path) -> ModuleType:
    """The kernel's public module."""
    from kernels import get_local_kernel

    return get_local_kernel(kernel_folder)


@pytest.fixture(scope="session")
def part(kernel: ModuleType):
    """part("gated_delta_rule.plan") is that module of the loaded kernel."""
    return lambda name: importlib.import_module(f"{kernel.__name__}.{name}")


@pytest.fixture(autouse=True)
def _repeatable_random_numbers(request: pytest.FixtureRequest) -> None:
    """Seed torch by the name of the test, so that a test draws the same numbers alone and in a whole run."""
    torch.manual_seed(sum(request.node.nodeid.encode()))
