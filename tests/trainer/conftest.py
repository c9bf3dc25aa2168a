"""The kernel in the repository's build/, and transformers as it was after each test."""

from tests.transformers.conftest import _as_before, kernelize

__all__ = ["_as_before", "kernelize"]
