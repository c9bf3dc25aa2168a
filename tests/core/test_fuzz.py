"""Drawn calls: every one gives the numbers of the float64 recurrence, or is refused in one sentence.

HYPOTHESIS_PROFILE=explore draws other and more of them.
"""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from .inputs import GRADIENTS, TENSORS, Outcome, Problem, make_problem, truth, uniform
from .test_side_effects import VIEWS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Relative errors for drawn shapes. Small tensors meet rounding at its worst, so these are wider than in test_precision.
ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
GATES = (0.0, -1e-3, -1.0, -30.0, -1000.0, -float("inf"))


@dataclass(frozen=True)
class Call:
    """A problem and how it is handed over."""

    problem: Problem
    entry: str  # "chunk", "recurrent" or "by hand"
    chunk_size: int
    state_v_first: bool
    losses: tuple[str, ...]


@st.composite
def shapes(draw) -> dict:
    packed = draw(st.booleans())
    heads = draw(st.integers(1, 3))
    tokens = draw(st.one_of(st.integers(0, 20), st.integers(21, 140)))
    return {
        "batch": 1 if packed else draw(st.integers(0, 3)),
        "tokens": tokens,
        "heads": heads,
        "value_heads": heads * draw(st.integers(1, 3)),
        "dim_k": draw(st.integers(2, 12)),
        "dim_v": draw(st.integers(0, 9)),
        "bounds": [0, *sorted(draw(st.lists(st.integers(0, tokens), max_size=5)))] if packed else None,
        "seed": draw(st.integers(0, 10**6)),
        "states": (1, 2) if draw(st.booleans()) else None,
    }


@st.composite
def calls(draw) -> Call:
    problem = make_problem(**draw(shapes()), scale=draw(st.sampled_from([None, 1.0, -0.5])))
    if draw(st.booleans()):
        choice = (len(GATES) * uniform(tuple(problem.g.shape), draw(st.integers(0, 99)))).long()
        problem = replace(problem, g=torch.tensor(GATES, dtype=torch.float64)[choice])
    if draw(st.booleans()):  # keys as they are, of norm below 1
        problem = replace(problem, use_qk_l2norm=False, k=problem.k / problem.k.shape[3] ** 0.5)
    problem = replace(problem, beta=problem.beta * draw(st.sampled_from([1, 2])))
    problem = problem.to(draw(st.sampled_from(DTYPES)))
    for name in ("g", "beta", "initial_state"):
        if getattr(problem, name) is not None:
            problem = replace(problem, **{name: getattr(problem, name).to(draw(st.sampled_from(DTYPES)))})
    for name in (*TENSORS, "do"):
        view = draw(st.sampled_from([None, *VIEWS]))
        problem = replace(problem, **{name: VIEWS[view](getattr(problem, name))}) if view else problem
    losses = draw(st.sampled_from([("o",), ("final_state",), ("o", "final_state")]))
    if problem.dht is None:
        losses = ("o",)
    entry = draw(st.sampled_from(["chunk", "recurrent", "by hand"]))
    chunk_size = 64 if entry == "recurrent" else draw(st.sampled_from([16, 32, 64]))
    return Call(problem, entry, chunk_size, draw(st.booleans()), losses)


def run(kernel, call: Call) -> Outcome:
    """The outcome through the drawn entry, states in the layout [N, HV, K, V]."""
    problem = call.problem.map(lambda x: x.detach())
    state, dht = (
        None if x is None else x.mT if call.state_v_first else x for x in (problem.initial_state, problem.dht)
    )
    options = {
        "scale": problem.scale,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": problem.use_qk_l2norm,
        "state_v_first": call.state_v_first,
        "cu_seqlens": problem.cu_seqlens,
    }
    tensors = {name: getattr(problem, name) for name in TENSORS}
    grads = {"o": problem.do, "final_state": dht}
    if call.entry == "by hand":
        options["chunk_size"] = call.chunk_size
        result = kernel.chunk_gated_delta_rule_fwd(**tensors, initial_state=state, **options)
        given = [grads[name] if name in call.losses else None for name in ("o", "final_state")]
        del options["output_final_state"]
        outputs = result.o, result.final_state
        gradients = kernel.chunk_gated_delta_rule_bwd(
            **tensors, residuals=result.residuals, do=given[0], dht=given[1], initial_state=state, **options
        )
    else:
        leaves = [x.requires_grad_() for x in tensors.values()]
        if state is not None:
            leaves.append(state.requires_grad_())
        if call.entry == "chunk":
            options["chunk_size"] = call.chunk_size
            outputs = kernel.chunk_gated_delta_rule(**tensors, initial_state=state, **options)
        else:
            outputs = kernel.fused_recurrent_gated_delta_rule(**tensors, initial_state=state, **options)
        lossy = [dict(zip(grads, outputs, strict=True))[name] for name in call.losses]
        weights = [grads[name].to(x.dtype) for name, x in zip(call.losses, lossy, strict=True)]
        gradients = torch.autograd.grad(lossy, leaves, weights)
    named = dict(zip(GRADIENTS, gradients, strict=False))
    turned = {
        "final_state": outputs[1],
        "dh0": named.pop("dh0", None),
    }
    if call.state_v_first:
        turned = {name: None if x is None else x.mT for name, x in turned.items()}
    return Outcome(o=outputs[0].detach(), **named, **{k: None if x is None else x.detach() for k, x in turned.items()})


def expected_of(call: Call) -> Outcome:
    silent = {
        "do": call.problem.do if "o" in call.losses else torch.zeros_like(call.problem.do),
        "dht": call.problem.dht if "final_state" in call.losses else None,
    }
    return truth(replace(call.problem, **silent))


def assert_near(name: str, actual: Tensor, expected: Tensor, allowed: float) -> None:
    """Within `allowed` of the norm, or of a thousandth of what numbers of size 1 would have."""
    assert actual.shape == expected.shape, name
    assert torch.isfinite(actual).all(), f"{name} is not finite"
    size = expected.norm().item() + 1e-3 * expected.numel() ** 0.5
    error = (actual.double() - expected).norm().item()
    assert error <= allowed * size, f"{name} is off by {error:.1e} of {size:.1e}"


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(call=calls())
@pytest.mark.slow
def test_every_drawn_call_is_the_recurrence(kernel, call):
    outcome, expected = run(kernel, call), expected_of(call)
    dtype = call.problem.v.dtype
    for name, x in outcome.items():
        given = {"dg": call.problem.g, "dbeta": call.problem.beta, "dh0": call.problem.initial_state}.get(name)
        allowed = max(ALLOWED[dtype], 0 if given is None else ALLOWED[given.dtype])
        assert_near(name, x, getattr(expected, name), allowed)


CORRUPTIONS = {
    "nothing": lambda x: None,
    "a number": lambda x: 1.0,
    "a list": lambda x: x.tolist(),
    "integers": lambda x: x.long(),
    "booleans": lambda x: x > 0,
    "complex numbers": lambda x: x.to(torch.complex64),
    "half precision": lambda x: x.half(),
    "elsewhere": lambda x: x.to("meta"),
    "one dimension less": lambda x: x[..., 0],
    "one dimension more": lambda x: x[None],
    "turned": lambda x: x.transpose(1, -1),
    "first dimensions swapped": lambda x: x.transpose(0, 1),
    "longer": lambda x: torch.cat([x, x], dim=1),
    "shorter": lambda x: x[:, 1:],
    "wider": lambda x: torch.cat([x, x], dim=-1),
    "two rows": lambda x: torch.cat([x, x]),
    "no rows": lambda x: x[:0],
    "a scalar": lambda x: x.sum(),
    "flat": lambda x: x.flatten(),
}
OPTIONS = {
    "cu_seqlens": [
        torch.tensor([0, 3, 9]),
        torch.tensor([0, 9, 3]),
        torch.tensor([1, 9]),
        torch.tensor([0, 10**9]),
        torch.tensor([-1, 5]),
        torch.tensor([[0, 9]]),
        torch.tensor(9),
        torch.tensor([0.0, 9.0]),
        [0, 9],
    ],
    "chunk_size": [0, -16, 1, 48, 10**9, None, "64"],
    "scale": ["x", [1.0], torch.ones(2)],
    "output_final_state": [None, 1, torch.tensor(True)],
    "state_v_first": [None, 0.0],
    "use_gate_in_kernel": [True],
    "A_log": [torch.zeros(1), 0.0],
    "allow_neg_eigval": [True],
    "cp_context": ["here"],
    "head_first": [True, None],
}


@st.composite
def corrupted(draw) -> dict:
    """Arguments of a good call with one to three of them spoiled."""
    size = draw(st.sampled_from([2, 3]))
    problem = make_problem(
        1, draw(st.sampled_from([2, 9])), size, 2 * size, dim_k=2, dim_v=draw(st.sampled_from([2, 4]))
    )
    arguments = {name: getattr(problem.to(torch.float32), name) for name in TENSORS}
    arguments["initial_state"] = torch.zeros(1, 2 * size, 2, problem.v.shape[3])
    names = [*arguments, *OPTIONS]
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        if name in OPTIONS:
            arguments[name] = draw(st.sampled_from(OPTIONS[name]))
        else:
            arguments[name] = CORRUPTIONS[draw(st.sampled_from(list(CORRUPTIONS)))](arguments[name])
    return arguments


def assert_sentence(message: str, arguments: dict) -> None:
    """Names an argument first, gives a rule and a way out, and is one sentence."""
    name = re.match(r"\w+", message).group()
    assert name in {*TENSORS, "initial_state", "A_log", *OPTIONS}, message
    assert message.endswith(".") and ". " not in message, message
    assert ";" in message, message
    assert name in arguments or name == "A_log", message


@given(arguments=corrupted())
def test_every_spoiled_call_is_refused_in_one_sentence_or_right(kernel, arguments):
    try:
        o, _ = kernel.chunk_gated_delta_rule(**arguments)
    except (ValueError, TypeError) as refusal:
        assert_sentence(str(refusal), arguments)
        return
    problem = Problem(
        **{name: arguments[name] for name in TENSORS},
        do=torch.zeros_like(arguments["v"]),
        initial_state=arguments["initial_state"],
        cu_seqlens=arguments.get("cu_seqlens"),
        use_qk_l2norm=False,
    )
    assert_near("o", o, truth(problem).o, 1e-3)
