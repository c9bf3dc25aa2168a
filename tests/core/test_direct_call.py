"""A call that nobody traces or differentiates goes to the compiled op itself; every other one through the op around it.

On the CPU, with a stand-in for the compiled op; what counts is who is called, and with which layout of the states.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashqla_hub.reference import gated_delta_rule

from .compare import relative_error
from .inputs import TENSORS, make_problem, truth

ROOMY = {"dim_k": 16, "dim_v": 16}


@pytest.fixture
def ways(part, monkeypatch) -> list[str]:
    """Serve every forward by a stand-in for the compiled op; the list says whether a call was "direct" or "wrapped"."""
    path, taken = part("gated_delta_rule.sm90_path"), []

    def stand_in(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, l2norm, state_v_first, output_final_state, segment_chunks
    ):
        taken.append("direct")
        if state_v_first and initial_state is not None:
            initial_state = initial_state.mT
        o, state = gated_delta_rule(
            *(x.detach().double() for x in (q, k, v, g, beta)),
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=l2norm,
        )
        state = (state.mT if state_v_first else state).float().contiguous()
        return o.to(v.dtype), state if output_final_state else state[:0]

    def wrapped(*arguments):
        result = forward(*arguments)
        taken[-1] = "wrapped"
        return result

    forward = path.forward
    monkeypatch.setattr(path, "forward", wrapped)
    monkeypatch.setattr(path, "ops", SimpleNamespace(sm90_gated_delta_rule_fwd=stand_in))
    capability = part("gated_delta_rule.capability")
    monkeypatch.setattr(capability, "explain_unsupported", lambda *tensors: None)
    monkeypatch.setattr(capability, "explain_unsupported_backward", lambda *tensors: "not now")
    return taken


def problem(seed: int = 1400, bounds=(0, 40, 90)):
    return make_problem(1, 100, 1, 2, seed=seed, bounds=list(bounds), states=(7, 8), **ROOMY).to(torch.float32)


def call(kernel, p, **options):
    tensors = [getattr(p, name) for name in TENSORS]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, **options}
    return kernel.chunk_gated_delta_rule(*tensors, initial_state=p.initial_state, cu_seqlens=p.cu_seqlens, **options)


def test_inference_is_direct_and_right(kernel, ways):
    p = problem()
    o, state = call(kernel, p)
    assert ways == ["direct"]
    assert relative_error(o, truth(p).o) <= 2e-5 and relative_error(state, truth(p).final_state) <= 2e-5


@pytest.mark.parametrize("plan", ["auto", "invariant", "off"])
def test_the_plan_reaches_the_compiled_op_on_both_ways(kernel, part, ways, monkeypatch, plan):
    path, taken = part("gated_delta_rule.sm90_path"), []
    stand_in = path.ops.sm90_gated_delta_rule_fwd

    def recording(*arguments):
        taken.append(arguments[-1])
        return stand_in(*arguments)

    monkeypatch.setattr(path, "ops", SimpleNamespace(sm90_gated_delta_rule_fwd=recording))
    p = problem()
    call(kernel, p, plan=plan)
    call(kernel, replace(p, q=p.q.clone().requires_grad_()), plan=plan)
    assert ways == ["direct", "wrapped"]
    assert taken == [{"auto": 0, "invariant": 64, "off": 2**25}[plan]] * 2


def test_a_parameter_is_a_plain_tensor(kernel, ways):
    p = problem()
    with torch.no_grad():
        call(kernel, replace(p, initial_state=torch.nn.Parameter(p.initial_state)))
    assert ways == ["direct"]


def test_states_with_v_first_are_handed_through(kernel, ways):
    p = problem()
    turned = replace(p, initial_state=p.initial_state.mT.contiguous())
    o, state = call(kernel, turned, state_v_first=True)
    expected_o, expected_state = call(kernel, p)
    assert ways == ["direct"] * 2
    assert torch.equal(o, expected_o) and torch.equal(state, expected_state.mT)


def test_a_state_that_nobody_wants_is_none(kernel, ways):
    p = problem()
    _, state = call(kernel, p, output_final_state=False)
    assert state is None and ways == ["direct"]


def refuse(*arguments):
    raise RuntimeError("the compiled op has its own words for it")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"g": torch.zeros(1, 100, 3)}, r"g has shape \[1, 100, 3\]; it must be \[B, T, HV\]"),
        ({"q": torch.zeros(())}, r"q has shape \[\]; it must have four dimensions"),
        ({"k": [1.0]}, "k is list; it must be a tensor"),
        ({"beta": torch.zeros(1, 100, 2, dtype=torch.int64)}, "beta has dtype torch.int64"),
    ],
)
def test_what_the_compiled_op_refuses_gets_its_sentence(kernel, part, ways, monkeypatch, change, sentence):
    monkeypatch.setattr(part("gated_delta_rule.sm90_path"), "ops", SimpleNamespace(sm90_gated_delta_rule_fwd=refuse))
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(kernel, replace(problem(), **change))


@pytest.mark.parametrize(
    "options", [{"scale": "0.1"}, {"scale": torch.ones(())}, {"chunk_size": 64.0}, {"plan": "best"}]
)
def test_wrong_options_do_not_reach_the_compiled_op(kernel, ways, options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        call(kernel, problem(), **options)
    assert ways == []


def test_an_error_that_no_rule_explains_is_raised(kernel, part, ways, monkeypatch):
    monkeypatch.setattr(part("gated_delta_rule.sm90_path"), "ops", SimpleNamespace(sm90_gated_delta_rule_fwd=refuse))
    with pytest.raises(RuntimeError, match="its own words"):
        call(kernel, problem())


GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
STRENGTH = {"use_beta_sigmoid_in_kernel": True}
DOUBLED = {**STRENGTH, "allow_neg_eigval": True}


@pytest.mark.parametrize(
    "options", [GATE, STRENGTH, DOUBLED, {**GATE, **STRENGTH}], ids=["gate", "strength", "doubled", "both"]
)
def test_activated_gates_are_direct_too(kernel, ways, options):
    p = problem()
    o, _ = call(kernel, p, **options)
    g = -torch.nn.functional.softplus(p.g) if "A_log" in options else p.g
    beta = (
        (2 if "allow_neg_eigval" in options else 1) * p.beta.sigmoid()
        if STRENGTH.items() <= options.items()
        else p.beta
    )
    expected, _ = call(kernel, replace(p, g=g, beta=beta))
    assert ways == ["direct"] * 2 and relative_error(o, expected) <= 1e-6


@pytest.mark.parametrize(
    "options", [{"A_log": torch.zeros(2)}, {"dt_bias": torch.zeros(2)}, {"allow_neg_eigval": True}]
)
def test_what_would_be_ignored_does_not_reach_the_compiled_op(kernel, ways, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        call(kernel, problem(), **options)
    assert ways == []


@pytest.mark.parametrize("trains", [False, True])
def test_bounds_that_the_compiled_op_refuses_get_their_sentence(kernel, part, ways, monkeypatch, trains):
    """On a GPU the op alone looks at the values of bounds before the call, if it is asked to."""
    monkeypatch.setattr(part("gated_delta_rule.sm90_path"), "ops", SimpleNamespace(sm90_gated_delta_rule_fwd=refuse))
    p = problem(bounds=(0, 60, 40))
    p.k.requires_grad_(trains)
    with pytest.raises(ValueError, match="cu_seqlens decreases from 60 to 40 at entry 2"):
        call(kernel, p)


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass, which may want to see every operation."""


def under_grad(kernel, p):
    p.k.requires_grad_()
    call(kernel, p)


def under_a_dispatch_mode(kernel, p):
    with Watcher():
        call(kernel, p)


def with_a_subclass(kernel, p):
    call(kernel, replace(p, v=p.v.as_subclass(Marked)))


def under_compile(kernel, p):
    torch._dynamo.reset()
    torch.compile(lambda: call(kernel, p), fullgraph=True, backend="eager")()
    torch._dynamo.reset()


def under_vmap(kernel, p):
    torch.vmap(lambda g: call(kernel, replace(p, g=g), output_final_state=False)[0])(torch.stack([p.g, p.g]))


def under_jit_trace(kernel, p):
    torch.jit.trace(lambda g: call(kernel, replace(p, g=g))[0], p.g, check_trace=False)


def under_forward_derivatives(kernel, p):
    with forward_ad.dual_level():
        call(kernel, p)


WATCHED = [
    under_grad,
    under_a_dispatch_mode,
    with_a_subclass,
    under_compile,
    under_vmap,
    under_jit_trace,
    under_forward_derivatives,
]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("caller", WATCHED)
def test_a_call_that_somebody_watches_goes_through_the_wrapping_op(kernel, ways, caller):
    caller(kernel, problem())
    assert ways and set(ways) == {"wrapped"}


def test_training_does_without_the_dispatch_of_the_op(kernel, part, ways, monkeypatch):
    p = problem()
    p.k.requires_grad_()
    with monkeypatch.context() as without_ops:
        without_ops.setattr(part("gated_delta_rule.ops"), "ops", SimpleNamespace())
        o, state = call(kernel, p)
        (dk,) = torch.autograd.grad((o, state), p.k, (p.do, p.dht))
    assert ways == ["wrapped"] and relative_error(dk, truth(p).dk) <= 1e-4


def test_training_hands_states_with_v_first_through(kernel, ways):
    p = problem()
    leaves = [p.k.clone().requires_grad_(), p.initial_state.mT.contiguous().requires_grad_()]
    o, state = call(kernel, replace(p, k=leaves[0], initial_state=leaves[1]), state_v_first=True)
    dk, dh0 = torch.autograd.grad((o, state), leaves, (p.do, p.dht.mT))
    expected = truth(p)
    assert ways == ["wrapped"]
    assert relative_error(o.detach(), expected.o) <= 2e-5
    assert relative_error(state.detach(), expected.final_state.mT) <= 2e-5
    assert relative_error(dk, expected.dk) <= 1e-4 and relative_error(dh0, expected.dh0.mT) <= 1e-4


def test_what_is_raised_around_a_training_call_is_left_alone(kernel, ways):
    """Checkpointing ends its second forward by an exception, as soon as the last tensor for the backward is saved."""
    p = problem()
    leaves = [getattr(p, name).clone().requires_grad_() for name in TENSORS]

    def layer(*tensors):
        return call(kernel, replace(p, **dict(zip(TENSORS, tensors, strict=True))))

    outcomes = [layer(*leaves), torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)]
    expected, found = (torch.autograd.grad(outcome, leaves, (p.do, p.dht)) for outcome in outcomes)
    assert ways == ["wrapped"] * 3
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_training_call_that_the_compiled_op_refuses_gets_its_sentence(kernel, part, ways, monkeypatch):
    monkeypatch.setattr(part("gated_delta_rule.sm90_path"), "ops", SimpleNamespace(sm90_gated_delta_rule_fwd=refuse))
    p = problem()
    p.k.requires_grad_()
    with pytest.raises(ValueError, match=r"g has shape \[1, 100, 3\]"):
        call(kernel, replace(p, g=torch.zeros(1, 100, 3)))
    with pytest.raises(RuntimeError, match="its own words") as found:
        call(kernel, p)
    assert found.type is RuntimeError


def test_a_graph_of_the_backward_has_the_op_that_refuses_its_derivative(kernel, ways):
    p = problem()
    p.k.requires_grad_()
    (dk,) = torch.autograd.grad(call(kernel, p)[0].sum(), p.k, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        dk.sum().backward()


def test_no_grad_makes_a_training_call_direct(kernel, ways):
    p = problem()
    p.k.requires_grad_()
    with torch.no_grad():
        call(kernel, p)
    assert ways == ["direct"]


@pytest.mark.parametrize("bounds", [None, (0, 40, 90)], ids=["dense", "packed"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_sound_inputs_pass_in_one_pass(part, bounds, state_v_first):
    """Otherwise each call would pay for the rules one by one."""
    p = make_problem(2 if bounds is None else 1, 9, 1, 2, bounds=bounds and [0, 4, 9], states=(7, 8), dim_k=3, dim_v=5)
    state = p.initial_state.mT if state_v_first else p.initial_state
    tensors = [getattr(p, name) for name in TENSORS]
    sound = part("gated_delta_rule.validation")._are_sound
    assert sound(*tensors, None, state, p.cu_seqlens, 64, state_v_first)
    assert not sound(*tensors, None, state, p.cu_seqlens, 64, not state_v_first)


@pytest.fixture
def entered(kernel, part, ways, monkeypatch):
    """entered(function, *arguments) lists the kernel's Python functions that it enters; the compiled op returns at once."""
    p, folder = problem(), str(Path(kernel.__file__).parent)

    def stand_in(*arguments):
        ways.append("direct")
        return p.v.clone(), p.initial_state.clone()

    monkeypatch.setattr(part("gated_delta_rule.sm90_path"), "ops", SimpleNamespace(sm90_gated_delta_rule_fwd=stand_in))

    def functions_of(function, *arguments) -> list[str]:
        codes = []
        sys.setprofile(lambda frame, event, _: codes.append(frame.f_code) if event == "call" else None)
        try:
            function(*arguments)
        finally:
            sys.setprofile(None)
        return [code.co_name for code in codes if code.co_filename.startswith(folder)]

    return functions_of


def test_an_inference_call_makes_few_python_calls(kernel, entered):
    """Host time without a clock; on a GPU come three more that ask whether its kernels serve."""
    functions = entered(call, kernel, problem())
    assert len(functions) <= 8, functions


def test_a_training_call_makes_few_python_calls(kernel, entered):
    p = problem()
    p.k.requires_grad_()
    functions = entered(call, kernel, p)
    assert len(functions) <= 16, functions
