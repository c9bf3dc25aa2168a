"""Drawn calls on a GPU: the compiled kernels where they serve, the PyTorch path elsewhere, against float64.

`FLASHQLA_FUZZ_DRAWS=3000 HYPOTHESIS_PROFILE=explore pytest tests/sm90/test_fuzz.py` draws thousands.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.drawn_calls import Call, Convolution, Norm, Ranges, calls, convolutions, expected_of, norms, run
from tests.core.inputs import GRADIENTS, TENSORS, Outcome, Problem, solve
from tests.core.test_fuzz import ALLOWED, SLOW_IS_FINE, assert_near, check_convolution, check_norm, check_steps

from .chunk_form import chunk_form, chunk_form_gradients

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

DTYPES = (torch.bfloat16, torch.float16)
CEILINGS = {"o": 6e-3, "final_state": 6e-3, "dg": 2e-2}  # 1e-2 for the other gradients
FACTOR = 1.2  # times the error of the yardstick

SHORT = Ranges(
    device="cuda",
    dims=st.one_of(st.just((128, 128)), st.just((128, 128)), st.tuples(st.integers(2, 12), st.integers(0, 9))),
    tokens=st.one_of(st.integers(0, 20), st.integers(21, 140)),
    heads=st.integers(1, 3),
    ratios=st.sampled_from([1, 2, 3, 4, 8]),
    dtypes=(*DTYPES, *DTYPES, torch.float32),
)
# Long enough for sequences to be split within the card. The truth of these is the PyTorch path in float64, itself within 1e-8
# of the recurrence in tests/core/test_fuzz.py.
LONG = replace(SHORT, dims=st.just((128, 128)), tokens=st.integers(1000, 12000), dtypes=DTYPES)


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """The notice of the PyTorch path is expected here."""


def check(kernel, call: Call, expected: Outcome) -> None:
    outcome = run(kernel, call)
    problem, unsure = call.problem, None
    unsupported = kernel.explain_unsupported(*(getattr(problem, name) for name in TENSORS))
    for name, x in outcome.items():
        given = {"dg": problem.g, "dbeta": problem.beta, "dh0": problem.initial_state}.get(name)
        rounding = 0 if given is None or given.dtype not in DTYPES else ALLOWED[given.dtype] / 10
        if unsupported is not None:
            allowed = max(ALLOWED[problem.v.dtype], 10 * rounding)
        else:
            allowed = max(CEILINGS.get(name, 1e-2), rounding)
        try:
            assert_near(name, x, getattr(expected, name), allowed)
        except AssertionError:
            if unsupported is not None or not torch.isfinite(x).all():
                raise
            unsure = unsure or expected_of(call, yardstick)
            error = (getattr(unsure, name).double() - getattr(expected, name)).norm() / getattr(expected, name).norm()
            assert_near(name, x, getattr(expected, name), FACTOR * error.item())


def yardstick(problem: Problem) -> Outcome:
    """The chunk form with rounded operands on every sequence, and its backward."""
    scale = problem.k.shape[3] ** -0.5 if problem.scale is None else problem.scale
    tokens = problem.v.shape[1]
    spans = [(b, 0, tokens) for b in range(problem.v.shape[0])]
    if problem.cu_seqlens is not None:
        spans = [(0, start, stop) for start, stop in pairwise(problem.cu_seqlens.tolist())]
    zeros = torch.zeros(len(spans), problem.v.shape[2], problem.k.shape[3], problem.v.shape[3], device=problem.v.device)
    initial, dht = (zeros if x is None else x for x in (problem.initial_state, problem.dht))
    options = {"scale": scale, "l2norm": problem.use_qk_l2norm}
    rows, states = [], []
    for n, (b, start, stop) in enumerate(spans):
        part = [getattr(problem, name)[b, start:stop].detach() for name in (*TENSORS, "do")]
        o, state = chunk_form(*part[:-1], initial_state=initial[n], **options)
        *grads, dh0 = chunk_form_gradients(*part[:-1], initial[n], part[-1], dht[n], **options)
        rows.append((o, *grads))
        states.append((state, dh0))
    places = (getattr(problem, name) for name in ("v", *TENSORS))
    o, *grads = (joined(parts, place) for parts, place in zip(zip(*rows, strict=True), places, strict=True))
    state, dh0 = (torch.stack(parts) for parts in zip(*states, strict=True))
    return Outcome(o, state, **dict(zip(GRADIENTS, (*grads, dh0), strict=True)))


def joined(parts: list[Tensor], place: Tensor) -> Tensor:
    """Rows of all sequences in the shape of `place`, and zeros behind them."""
    together = torch.cat(parts)
    rows = together.new_zeros(place.flatten(0, 1).shape)
    rows[: len(together)] = together
    return rows.view(place.shape)


@SLOW_IS_FINE
@given(call=calls(SHORT))
def test_every_drawn_call_is_the_recurrence(kernel, call: Call):
    check(kernel, call, expected_of(call))


@SLOW_IS_FINE
@given(call=calls(LONG))
def test_every_drawn_long_call_is_that_of_float64(kernel, call: Call):
    check(kernel, call, expected_of(call, lambda problem: float64(kernel, problem)))


def float64(kernel, problem: Problem) -> Outcome:
    return solve(kernel, problem.to(torch.float64).map(Tensor.contiguous))


@SLOW_IS_FINE
@given(call=calls(SHORT))
def test_drawn_calls_repeat_their_bits(kernel, call: Call):
    first, again = run(kernel, call), run(kernel, call)
    for name, x in first.items():
        assert torch.equal(x, getattr(again, name)), name


@SLOW_IS_FINE
@given(call=convolutions(replace(SHORT, dtypes=(*DTYPES, torch.float32))), split=st.integers(0, 3))
def test_every_drawn_convolution_is_its_definition(kernel, call: Convolution, split: int):
    check_convolution(kernel, call)
    check_steps(kernel, call, split)


@SLOW_IS_FINE
@given(call=norms(replace(SHORT, dtypes=(*DTYPES, torch.float32))))
def test_every_drawn_norm_is_its_definition(kernel, call: Norm):
    check_norm(kernel, call)
