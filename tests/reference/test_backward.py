"""The closed-form gradients of the reference, judged by autograd of the recurrence and by finite differences."""

import pytest
import torch

from flashqla_hub.reference import gated_delta_rule, gated_delta_rule_backward

from ..core.compare import assert_fingerprint, relative_error
from ..core.inputs import GRADIENTS, TENSORS, Problem, make_problem, truth, uniform


def recurrence(problem: Problem, tensors: list[torch.Tensor]):
    *inputs, state = tensors
    return gated_delta_rule(
        *inputs,
        scale=problem.scale,
        initial_state=state,
        cu_seqlens=problem.cu_seqlens,
        use_qk_l2norm=problem.use_qk_l2norm,
    )


def leaves_of(problem: Problem) -> list[torch.Tensor]:
    return [getattr(problem, name).detach().requires_grad_() for name in (*TENSORS, "initial_state")]


PROBLEMS = {
    "dense": {"batch": 2, "bounds": None},
    "packed": {"batch": 1, "bounds": [0, 4, 4, 11]},
    "keys as they are": {"batch": 2, "bounds": None, "use_qk_l2norm": False},
    "scaled": {"batch": 1, "bounds": None, "scale": -0.3},
}


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("gates", ["mild", "of all strengths"])
def test_gradients_equal_autograd(kind, gates):
    problem = make_problem(
        tokens=12, heads=2, value_heads=6, dim_k=5, dim_v=3, seed=1200, states=(7, 8), **PROBLEMS[kind]
    )
    if gates == "of all strengths":
        strengths = torch.tensor([0.0, -1.0, -30.0, -1000.0, -float("inf")], dtype=torch.float64)
        problem.g.copy_(strengths[(5 * uniform(tuple(problem.g.shape), 9)).long()])
    leaves = leaves_of(problem)
    expected = torch.autograd.grad(recurrence(problem, leaves), leaves, [problem.do, problem.dht])
    outcome = truth(problem)
    for name, exact in zip(GRADIENTS, expected, strict=True):
        assert relative_error(getattr(outcome, name), exact) <= 1e-12, name


@pytest.mark.parametrize("kind", PROBLEMS)
def test_gradients_equal_finite_differences(kind):
    problem = make_problem(
        tokens=6, heads=1, value_heads=2, dim_k=3, dim_v=2, seed=1210, states=(7, 8), **PROBLEMS[kind]
    )
    if problem.cu_seqlens is not None:
        problem.cu_seqlens.clamp_(max=6)

    def loss(tensors: list[torch.Tensor]) -> float:
        out, state = recurrence(problem, tensors)
        return ((out * problem.do).sum() + (state * problem.dht).sum()).item()

    tensors = [x.detach() for x in leaves_of(problem)]
    outcome, step = truth(problem), 1e-6
    for which, name in enumerate(GRADIENTS):
        for i in range(tensors[which].numel()):
            change = torch.zeros_like(tensors[which]).flatten()
            change[i] = step
            change = change.view_as(tensors[which])
            sides = [[*tensors[:which], tensors[which] + sign * change, *tensors[which + 1 :]] for sign in (1, -1)]
            difference = (loss(sides[0]) - loss(sides[1])) / (2 * step)
            assert getattr(outcome, name).flatten()[i].item() == pytest.approx(difference, rel=1e-6, abs=1e-7), (
                name,
                i,
            )


def test_a_gradient_of_the_final_state_that_is_left_out_is_zero():
    problem = make_problem(1, 6, 1, 2, dim_k=3, dim_v=2, seed=1220, states=(7, 8))
    inputs = [getattr(problem, name) for name in TENSORS]
    without = gated_delta_rule_backward(*inputs, problem.do, initial_state=problem.initial_state)
    zeros = gated_delta_rule_backward(
        *inputs, problem.do, dht=torch.zeros_like(problem.dht), initial_state=problem.initial_state
    )
    assert all(torch.equal(x, y) for x, y in zip(without, zeros, strict=True))


def test_numbers_of_another_implementation():
    """Written in NumPy, apart from this project."""
    outcome = truth(make_problem(2, 70, 2, 4, seed=70, states=(76, 77)))
    assert_fingerprint(outcome.dq, l2=3.3955242117, total=3.2198577210)
    assert_fingerprint(outcome.dk, l2=18.124815014, total=40.204072795)
    assert_fingerprint(outcome.dv, l2=17.306736241, total=-1.9141441612)
    assert_fingerprint(outcome.dg, l2=19.320012100, total=44.228437953)
    assert_fingerprint(outcome.dbeta, l2=17.217856120, total=26.738400589)
    assert_fingerprint(outcome.dh0, l2=2.8485104015, total=-1.4428428516)
