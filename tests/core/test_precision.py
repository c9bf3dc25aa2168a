"""How exact the kernel is, by dtype. 16-bit inputs are judged by the recurrence on the rounded inputs."""

from dataclasses import replace

import pytest
import torch

from .compare import assert_close, assert_equal, relative_error
from .inputs import GRADIENTS, Problem, make_problem, signed, solve, truth, uniform
from .yardstick import yardstick

# Largest relative errors for 16-bit inputs, whatever the yardstick says.
CEILING = {"o": 6e-3, "final_state": 6e-3, "dg": 2e-2, **dict.fromkeys(("dq", "dk", "dv", "dbeta", "dh0"), 1e-2)}
SLACK = 1.2


def mild() -> Problem:
    return make_problem(1, 256, 2, 4, seed=700, states=(707, 708))


def strong_decay() -> Problem:
    """Gates as trained models have them, from none to -40 a token."""
    problem = mild()
    strength = torch.tensor([0.1, 2.0, 8.0, 15.5], dtype=torch.float64)
    return replace(problem, g=-strength * torch.nn.functional.softplus(6 * uniform((1, 256, 4), 709) - 3))


def no_decay() -> Problem:
    problem = mild()
    return replace(problem, g=torch.zeros_like(problem.g))


def overwriting() -> Problem:
    problem = mild()
    return replace(problem, beta=2 * problem.beta)


def similar_keys() -> Problem:
    """Keys around eight directions: the inverse of the chunk is large."""
    problem = mild()
    directions = signed((8, 128), 711)
    nearest = (8 * uniform((1, 256, 2), 712)).long()
    return replace(problem, k=0.7 * directions[nearest] + 0.3 * problem.k)


KINDS = {f.__name__: f for f in (mild, strong_decay, no_decay, overwriting, similar_keys)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_float32_and_float64_are_exact(kernel, kind, dtype):
    problem = KINDS[kind]().to(dtype)
    assert_close(solve(kernel, problem), truth(problem), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_inputs_stay_below_the_yardstick_and_the_ceiling(kernel, kind, dtype):
    problem = KINDS[kind]()
    rounded = replace(problem.to(dtype), g=problem.g.float(), initial_state=problem.initial_state.float())
    expected, outcome = truth(rounded), solve(kernel, rounded)
    measure = yardstick(rounded)
    for name in ("o", "final_state", *GRADIENTS):
        exact = getattr(expected, name)
        error, reached = relative_error(getattr(outcome, name), exact), relative_error(getattr(measure, name), exact)
        assert error <= SLACK * reached, f"{name} is off by {error:.1e}, the yardstick by {reached:.1e}"
        assert error <= CEILING[name], f"{name} is off by {error:.1e}"


def test_the_yardstick_is_neither_exact_nor_wrong():
    """The guard of the test above: rounding every operand costs digits, but only those."""
    problem = mild()
    expected, measure = truth(problem), yardstick(problem)
    for name in ("o", "final_state", *GRADIENTS):
        assert 5e-4 < relative_error(getattr(measure, name), getattr(expected, name)) < 1e-2, name


def test_a_rounded_state_is_the_state_that_it_is(kernel):
    """A bfloat16 state is widened, not the rest of the call narrowed."""
    problem = mild().to(torch.float32)
    rounded = problem.initial_state.bfloat16()
    outcome = solve(kernel, replace(problem, initial_state=rounded))
    assert_close(replace(outcome, dh0=None), truth(replace(problem, initial_state=rounded)), torch.float32)


def test_16_bit_results_are_rounded_once(kernel):
    """float32 of the rounded inputs, rounded at the end: not a bit less."""
    problem = mild().to(torch.bfloat16)
    wide = solve(kernel, problem.to(torch.float32))
    narrow = solve(kernel, problem)
    assert torch.equal(narrow.o, wide.o.bfloat16()) and torch.equal(narrow.final_state, wide.final_state)
    for name in GRADIENTS:
        assert torch.equal(getattr(narrow, name), getattr(wide, name).bfloat16()), name


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_bit(kernel, dtype, autocast_dtype):
    problem = make_problem(1, 130, 1, 2, seed=720, states=(727, 728)).to(dtype)
    options = {
        "use_gate_in_kernel": True,
        "A_log": signed((2,), 729).float(),
        "dt_bias": signed((2,), 730).float(),
        "use_beta_sigmoid_in_kernel": True,
    }
    plain = solve(kernel, problem, **options)
    with torch.autocast("cpu", dtype=autocast_dtype):
        assert_equal(solve(kernel, problem, **options), plain)
