"""How far two outcomes may be apart. The measure is the relative error of a whole tensor in the Frobenius norm."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .inputs import Outcome

# Relative errors of the PyTorch path against the float64 recurrence.
EXACT = {torch.float64: 1e-9, torch.float32: 2e-5}
FLOAT32_GATE_GRADIENT = 1e-4


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; 0 for two zeros, inf for anything that is not finite."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    difference = (actual.double() - expected.double()).norm().item()
    size = expected.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and torch.isfinite(actual).all() else float("inf")


def tolerance(name: str, dtype: torch.dtype) -> float:
    """What the PyTorch path may be off in `name`, computing in `dtype`."""
    return FLOAT32_GATE_GRADIENT if (name, dtype) == ("dg", torch.float32) else EXACT[dtype]


def assert_close(actual: Outcome, expected: Outcome, dtype: torch.dtype = torch.float64) -> None:
    """Every tensor of `actual` is that of `expected` within the tolerance of `dtype`."""
    for name, x in actual.items():
        error, allowed = relative_error(x, getattr(expected, name)), tolerance(name, dtype)
        assert error <= allowed, f"{name} is off by {error:.2e}, {allowed:.0e} is allowed"


def assert_equal(actual: Outcome, expected: Outcome) -> None:
    """The same bits, and nothing that is not a number."""
    for name, x in actual.items():
        assert torch.equal(x, getattr(expected, name)), f"{name} differs in its bits"


def assert_finite(outcome: Outcome) -> None:
    for name, x in outcome.items():
        assert torch.isfinite(x).all(), f"{name} is not finite"


def assert_fingerprint(
    x: Tensor, *, l2: float | None = None, total: float | None = None, relative: float = 1e-9
) -> None:
    """The Frobenius norm, and the sum within `relative` of the sum of magnitudes."""
    x = x.double()
    if l2 is not None:
        assert abs(x.norm().item() - l2) <= relative * l2, f"norm {x.norm().item():.11g} instead of {l2:.11g}"
    if total is not None:
        allowed = relative * x.abs().sum().item()
        assert abs(x.sum().item() - total) <= allowed, f"sum {x.sum().item():.11g} instead of {total:.11g}"


def assert_refuses(function: Callable, arguments: dict, error: type, sentence: str) -> None:
    """Exactly this error, in exactly one sentence."""
    with pytest.raises((ValueError, TypeError)) as refusal:
        function(**arguments)
    assert refusal.type is error and str(refusal.value) == sentence
    assert sentence.endswith(".") and ". " not in sentence
