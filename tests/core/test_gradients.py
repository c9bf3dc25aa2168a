"""Laws of autograd: which gradients exist, for which losses, in which dtype, and what is kept or refused."""

import inspect
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashqla_hub.reference import gated_delta_rule

from .compare import assert_close, assert_equal, relative_error
from .inputs import GRADIENTS, TENSORS, Outcome, Problem, make_problem, solve, truth

SMALL = {"dim_k": 16, "dim_v": 8}
ARGUMENTS = (*TENSORS, "initial_state")


def leaves_of(problem: Problem, *names: str) -> tuple[Problem, list[torch.Tensor]]:
    """The problem with gradients asked for `names` alone."""
    problem = problem.map(lambda x: x.detach())
    return problem, [getattr(problem, name).requires_grad_() for name in names]


def call(kernel, problem: Problem, **options):
    return kernel.chunk_gated_delta_rule(
        *(getattr(problem, name) for name in TENSORS),
        initial_state=problem.initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=problem.cu_seqlens,
        **options,
    )


def stateful(seed: int, batch: int = 2, bounds: list[int] | None = None) -> Problem:
    return make_problem(batch, 70, 1, 2, seed=seed, bounds=bounds, states=(seed + 7, seed + 8), **SMALL)


def test_gradients_equal_finite_differences(kernel):
    """Of the kernel itself, so that no reference can hide an error; gates near 0 and strong ones."""
    problem = make_problem(1, 7, 1, 2, dim_k=3, dim_v=2, seed=500, states=(507, 508))
    problem.g[0, 3] = -20.0
    problem, leaves = leaves_of(problem, *ARGUMENTS)

    def outputs(q, k, v, g, beta, initial_state):
        given = replace(problem, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
        return call(kernel, given)

    assert torch.autograd.gradcheck(outputs, leaves, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("bounds", [None, [0, 30, 64]], ids=["dense", "packed"])
def test_gradients_equal_autograd_of_the_recurrence(kernel, bounds):
    problem, leaves = leaves_of(stateful(510, 2 if bounds is None else 1, bounds), *ARGUMENTS)
    outputs = gated_delta_rule(
        *(getattr(problem, name) for name in TENSORS),
        initial_state=problem.initial_state,
        cu_seqlens=problem.cu_seqlens,
        use_qk_l2norm=True,
    )
    grads = torch.autograd.grad(outputs, leaves, [problem.do, problem.dht])
    outcome = solve(kernel, problem)
    for name, expected in zip(GRADIENTS, grads, strict=True):
        assert relative_error(getattr(outcome, name), expected) <= 1e-9, name


@pytest.mark.parametrize("bounds", [None, [0, 30, 64]], ids=["dense", "packed"])
@pytest.mark.parametrize("part", ["o", "final_state"])
def test_a_loss_of_one_output_alone(kernel, bounds, part):
    problem = stateful(520, 2 if bounds is None else 1, bounds)
    silent = {"o": {"dht": None}, "final_state": {"do": torch.zeros_like(problem.do)}}[part]
    expected = truth(replace(problem, **silent))
    problem, leaves = leaves_of(problem, *ARGUMENTS)
    o, state = call(kernel, problem)
    output, grad = (o, problem.do) if part == "o" else (state, problem.dht)
    grads = torch.autograd.grad(output, leaves, grad)
    assert_close(Outcome(o.detach(), state.detach(), *grads), expected)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_gradient_alone_equals_that_of_all(kernel, name):
    problem = stateful(530)
    expected = dict(zip(ARGUMENTS, GRADIENTS, strict=True))[name]
    everything = getattr(solve(kernel, problem), expected)
    problem, leaves = leaves_of(problem, name)
    (alone,) = torch.autograd.grad(call(kernel, problem), leaves, [problem.do, problem.dht])
    assert torch.equal(alone, everything)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_gradients_have_the_dtype_of_their_inputs(kernel, dtype):
    problem = stateful(540).to(dtype)
    outcome = solve(kernel, problem)
    assert outcome.o.dtype == dtype
    assert outcome.final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(getattr(outcome, name).dtype == dtype for name in GRADIENTS)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_initial_state_of_any_dtype(kernel, dtype, state_dtype):
    """Its values are used as they are, the gradient comes in its dtype, the final state stays wide."""
    problem = stateful(550).to(dtype)
    given = replace(problem, initial_state=problem.initial_state.to(state_dtype))
    outcome = solve(kernel, given)
    assert outcome.dh0.dtype == state_dtype and outcome.final_state.dtype == torch.float32
    wide = solve(kernel, replace(given, initial_state=given.initial_state.float()))
    assert_equal(replace(outcome, dh0=None), wide)
    assert torch.equal(outcome.dh0, wide.dh0.to(state_dtype))


def test_expanded_gradients(kernel):
    """What .sum() sends back: one number with stride 0."""
    problem, leaves = leaves_of(stateful(560), *ARGUMENTS)
    o, state = call(kernel, problem)
    grads = torch.autograd.grad(o.sum() + state.sum(), leaves)
    ones = replace(problem, do=torch.ones_like(problem.do), dht=torch.ones_like(problem.dht))
    assert_close(Outcome(o.detach(), state.detach(), *grads), truth(ones))


def test_gradients_add_up_over_two_uses(kernel):
    problem, leaves = leaves_of(stateful(570), *ARGUMENTS)
    o, state = call(kernel, problem)
    once = torch.autograd.grad([o, state], leaves, [problem.do, problem.dht], retain_graph=True)
    again = torch.autograd.grad([o, state], leaves, [problem.do, problem.dht])
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


def test_second_derivatives_are_refused_in_one_sentence(kernel):
    problem, leaves = leaves_of(stateful(580), *ARGUMENTS)
    (dq, *_) = torch.autograd.grad(call(kernel, problem)[0].sum(), leaves, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match=r"has no second derivative; take it once, or differentiate a reference"):
        dq.sum().backward()


def test_number_of_gradients_is_the_number_of_inputs_of_the_op(kernel, part):
    """One more or one less in the tuple that autograd gets shifts or drops gradients."""
    arguments = list(inspect.signature(part("gated_delta_rule.ops").gated_delta_rule_fwd).parameters)
    schema = part("gated_delta_rule.ops").ops.gated_delta_rule_fwd.default._schema
    assert [argument.name for argument in schema.arguments] == arguments
    problem = stateful(590)
    *_, residuals = call_low_level(kernel, problem)
    saved = [*(getattr(problem, name) for name in ARGUMENTS), None, residuals]
    ctx = SimpleNamespace(saved_tensors=saved, options=(16**-0.5, True, 64, "auto"))
    grads = part("gated_delta_rule.autograd")._backward(ctx, problem.do, problem.dht, None)
    assert len(grads) == len(arguments)
    assert arguments[:6] == list(ARGUMENTS)
    expected = truth(problem)
    for grad, name in zip(grads, GRADIENTS, strict=False):
        assert relative_error(grad, getattr(expected, name)) <= 1e-9, name
    assert all(grad is None for grad in grads[6:])


def call_low_level(kernel, problem: Problem, **options):
    return kernel.chunk_gated_delta_rule_fwd(
        *(getattr(problem, name) for name in TENSORS),
        initial_state=problem.initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=problem.cu_seqlens,
        **options,
    )


@pytest.mark.parametrize("bounds", [None, [0, 30, 64]], ids=["dense", "packed"])
@pytest.mark.parametrize("state_v_first", [False, True], ids=["key first", "value first"])
@pytest.mark.parametrize(
    "left_out", [(), ("do",), ("dht",), ("initial_state",)], ids=lambda names: "-".join(names) or "all"
)
def test_forward_and_backward_by_hand_equal_autograd(kernel, bounds, state_v_first, left_out):
    problem = replace(stateful(600, 2 if bounds is None else 1, bounds), **dict.fromkeys(left_out))
    expected = truth(replace(problem, do=torch.zeros_like(problem.v)) if problem.do is None else problem)
    turn = {
        name: getattr(problem, name).mT
        if state_v_first and getattr(problem, name) is not None
        else getattr(problem, name)
        for name in ("initial_state", "dht")
    }
    options = {"state_v_first": state_v_first, "chunk_size": 32}
    result = call_low_level(kernel, replace(problem, initial_state=turn["initial_state"]), **options)
    grads = kernel.chunk_gated_delta_rule_bwd(
        *(getattr(problem, name) for name in TENSORS),
        result.residuals,
        problem.do,
        turn["dht"],
        initial_state=turn["initial_state"],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=problem.cu_seqlens,
        **options,
    )
    state, dh0 = result.final_state, grads.dh0
    assert (dh0 is None) == (problem.initial_state is None)
    if state_v_first:
        state, dh0 = state.mT, None if dh0 is None else dh0.mT
    assert_close(Outcome(result.o, state, *grads[:5], dh0), expected)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_by_hand_gradients_have_the_dtype_of_their_inputs(kernel, state_dtype):
    """Autograd would convert them itself."""
    problem = stateful(585).to(torch.bfloat16)
    inputs, state = [getattr(problem, name) for name in TENSORS], problem.initial_state.to(state_dtype)
    residuals = kernel.chunk_gated_delta_rule_fwd(*inputs, initial_state=state).residuals
    grads = kernel.chunk_gated_delta_rule_bwd(*inputs, residuals, problem.do, initial_state=state)
    assert [x.dtype for x in grads] == [torch.bfloat16] * 5 + [state_dtype]


def test_by_hand_nothing_is_recorded_by_autograd(kernel):
    problem, _ = leaves_of(stateful(605), *ARGUMENTS)
    result = call_low_level(kernel, problem)
    assert not any(x.requires_grad for x in result)


class Calls(TorchDispatchMode):
    """Records whether every call of the forward op saves for the backward."""

    def __init__(self):
        super().__init__()
        self.saves = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "gated_delta_rule_fwd" in str(func):
            names = [argument.name for argument in func._schema.arguments]
            self.saves.append(args[names.index("save_for_backward")])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_gradients(kernel, context):
    problem, leaves = leaves_of(stateful(610), *ARGUMENTS)
    with Calls() as calls, context():
        o, state = call(kernel, problem)
    assert o.grad_fn is None and state.grad_fn is None and not o.requires_grad
    assert calls.saves == [False]
    inputs = [weakref.ref(x) for x in leaves]
    del problem, leaves, calls
    assert not any(reference() is not None for reference in inputs)


def test_states_are_kept_only_if_a_gradient_can_be_asked_for(kernel):
    problem = stateful(620)
    with Calls() as calls:
        call(kernel, problem)
        call(kernel, leaves_of(problem, "beta")[0])
    assert calls.saves == [False, True]


def test_outputs_of_inference_mode_equal_others(kernel):
    problem = stateful(630)
    with torch.inference_mode():
        o, state = call(kernel, problem)
    expected = call(kernel, problem)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def test_several_gradients_at_once_are_those_one_by_one(kernel):
    """As vectorised Jacobians want them."""
    problem, leaves = leaves_of(stateful(590), *ARGUMENTS)
    o, state = call(kernel, problem)
    do, dstate = torch.randn(3, *o.shape, dtype=o.dtype), torch.randn(3, *state.shape, dtype=state.dtype)
    at_once = torch.autograd.grad((o, state), leaves, (do, dstate), retain_graph=True, is_grads_batched=True)
    for place, grads in enumerate(zip(do, dstate, strict=True)):
        expected = torch.autograd.grad((o, state), leaves, grads, retain_graph=True)
        for found, one in zip(at_once, expected, strict=True):
            assert torch.equal(found[place], one)
