"""The build tools, for tests that compile something."""

import pytest

from flashqla_hub.compile.tools import explain_missing_tools, find_tools


@pytest.fixture(scope="session")
def tools():
    missing = explain_missing_tools()
    if missing:
        pytest.skip(missing)
    return find_tools()
