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

from .chunk_form import chunk_form

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
    """The chunk form with rounded operands on every sequence, differentiated by autograd."""
    exact = problem.map(lambda x: x.detach())
    leaves = {name: getattr(exact, name).requires_grad_() for name in TENSORS}
    if exact.initial_state is not None:
        leaves["initial_state"] = exact.initial_state.requires_grad_()
    scale = exact.k.shape[3] ** -0.5 if exact.scale is None else exact.scale
    outputs, states = [], []
    tokens = exact.v.shape[1]
    spans = [(b, 0, tokens) for b in range(exact.v.shape[0])]
    if exact.cu_seqlens is not None:
        spans = [(0, start, stop) for start, stop in pairwise(exact.cu_seqlens.tolist())]
    for n, (b, start, stop) in enumerate(spans):
        o, state = chunk_form(
            *(getattr(exact, name)[b, start:stop] for name in TENSORS),
            scale=scale,
            initial_state=None if exact.initial_state is None else exact.initial_state[n],
            l2norm=exact.use_qk_l2norm,
        )
        outputs.append(o)
        states.append(state)
    behind = [] if exact.cu_seqlens is None else [torch.zeros_like(exact.v[0, spans[-1][2] :])]
    o = torch.cat([*outputs, *behind]).view_as(exact.v)
    state = torch.stack(states)
    loss = (o.double() * exact.do.double()).sum()
    if exact.dht is not None:
        loss = loss + (state.double() * exact.dht.double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return Outcome(o.detach(), state.detach(), **dict(zip(GRADIENTS, grads, strict=False)))


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
