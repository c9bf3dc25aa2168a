"""The build tools, for tests that compile something."""

import pytest

from flashqla_hub.compile.cache import Cache, default_folder
from flashqla_hub.compile.product import compile_kernels
from flashqla_hub.compile.tools import explain_missing_tools, find_tools


@pytest.fixture(scope="session")
def tools():
    missing = explain_missing_tools()
    if missing:
        pytest.skip(missing)
    return find_tools()


@pytest.fixture(scope="session")
def product(tools):
    """All kernels of the product, compiled and judged."""
    from flashqla_hub.kernels.spec import SPECS

    return compile_kernels(SPECS, tools, Cache(default_folder()))
