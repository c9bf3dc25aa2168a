"""Drawn calls: every one gives the numbers of the float64 definition, or is refused in one sentence.

HYPOTHESIS_PROFILE=explore draws other and more of them, FLASHQLA_FUZZ_DRAWS as many as it says. `tests/sm90/test_fuzz.py`
draws for the compiled kernels.
"""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from .drawn_calls import (
    DTYPES,
    Call,
    Convolution,
    Norm,
    Ranges,
    calls,
    convolutions,
    convolve,
    expected_of,
    gradients,
    normalize,
    norms,
    run,
)
from .inputs import TENSORS, Problem, make_problem, signed, truth

# Relative errors for drawn shapes. Small tensors meet rounding at its worst, so these are wider than in test_precision.
ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}

CPU = Ranges(
    device="cpu",
    dims=st.tuples(st.integers(2, 12), st.integers(0, 9)),
    tokens=st.one_of(st.integers(0, 20), st.integers(21, 140)),
    heads=st.integers(1, 3),
    ratios=st.integers(1, 3),
    dtypes=DTYPES,
)
SLOW_IS_FINE = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def assert_near(name: str, actual: Tensor, expected: Tensor, allowed: float) -> None:
    """Within `allowed` of the norm, or of a thousandth of what numbers of size 1 would have."""
    assert actual.shape == expected.shape, name
    assert torch.isfinite(actual).all(), f"{name} is not finite"
    size = expected.norm().item() + 1e-3 * expected.numel() ** 0.5
    error = (actual.double() - expected).norm().item()
    assert error <= allowed * size, f"{name} is off by {error:.1e} of {size:.1e}"


@SLOW_IS_FINE
@given(call=calls(CPU))
@pytest.mark.slow
def test_every_drawn_call_is_the_recurrence(kernel, call: Call):
    outcome, expected = run(kernel, call), expected_of(call)
    dtype = call.problem.v.dtype
    for name, x in outcome.items():
        given = {"dg": call.problem.g, "dbeta": call.problem.beta, "dh0": call.problem.initial_state}.get(name)
        allowed = max(ALLOWED[dtype], 0 if given is None else ALLOWED[given.dtype])
        if call.parameters is not None:  # activated in float32, unless the gate input is float64
            allowed = max(allowed, *(ALLOWED[torch.float32] for x in call.parameters))
        assert_near(name, x, getattr(expected, name), allowed)


@SLOW_IS_FINE
@given(call=convolutions(CPU))
def test_every_drawn_convolution_is_its_definition(kernel, call: Convolution):
    check_convolution(kernel, call)


def check_convolution(kernel, call: Convolution) -> None:
    """Values, gradients, and the states that the next tokens need."""
    tensors = (call.x, call.weight, call.bias)
    options = {**call.how, "activation": call.activation, "initial_states": call.initial_states}
    actual = gradients(lambda *given: kernel.causal_conv1d_fn(*given, **options), tensors, call.dy)
    exact = [None if x is None else x.double() for x in tensors]
    expected = gradients(lambda *given: convolve(call, *given), exact, call.dy.double())
    allowed = max(ALLOWED[call.x.dtype], ALLOWED[call.weight.dtype])
    for name, x, exact_x in zip(("y", "dx", "dweight", "dbias"), actual, expected, strict=False):
        assert_near(name, x, exact_x, allowed)
    if call.sequence is None:
        _, states = kernel.causal_conv1d_fn(*tensors, **options, return_final_states=True)
        before = call.x.new_zeros(states.shape) if call.initial_states is None else call.initial_states
        assert torch.equal(states, torch.cat([before, call.x], dim=2)[:, :, call.x.shape[2] :])


@SLOW_IS_FINE
@given(call=convolutions(CPU), split=st.integers(0, 3))
def test_drawn_steps_of_the_convolution_continue_it(kernel, call: Convolution, split: int):
    check_steps(kernel, call, split)


def check_steps(kernel, call: Convolution, split: int) -> None:
    """The last tokens, given to `causal_conv1d_update` with what stands before them, give the end of the whole."""
    split = min(split, call.x.shape[2])
    cut = call.x.shape[2] - split
    width = call.weight.shape[1]
    if call.sequence is not None or split == 0:
        return
    before = call.x.new_zeros(*call.x.shape[:2], width - 1) if call.initial_states is None else call.initial_states
    state = torch.cat([before, call.x[:, :, :cut]], dim=2)[:, :, cut:].contiguous()
    whole = convolve(call, call.x.double(), *(None if x is None else x.double() for x in (call.weight, call.bias)))
    new = call.x[:, :, cut:]
    y = kernel.causal_conv1d_update(new, state, call.weight, call.bias, call.activation)
    assert_near("y", y, whole[:, :, cut:], max(ALLOWED[call.x.dtype], ALLOWED[call.weight.dtype]))
    assert torch.equal(state, torch.cat([before, call.x], dim=2)[:, :, call.x.shape[2] :])


@SLOW_IS_FINE
@given(call=norms(CPU))
def test_every_drawn_norm_is_its_definition(kernel, call: Norm):
    check_norm(kernel, call)


def check_norm(kernel, call: Norm) -> None:
    tensors = (call.x, call.g, call.weight, call.bias)
    actual = gradients(lambda *given: kernel.rms_norm_gated(*given, activation=call.activation), tensors, call.dy)
    exact = [None if x is None else x.double() for x in tensors]
    expected = gradients(lambda *given: normalize(call, *given), exact, call.dy.double())
    allowed = max(ALLOWED[call.x.dtype], ALLOWED[call.weight.dtype])
    for name, x, exact_x in zip(("y", "dx", "dg", "dweight", "dbias"), actual, expected, strict=False):
        assert_near(name, x, exact_x, allowed)


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
    assert message.endswith(".") and ". " not in message, message
    assert ";" in message or ":" in message, message
    assert name in arguments or name == "A_log", message


@SLOW_IS_FINE
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


FOR_VECTORS = [kind for kind in CORRUPTIONS if kind not in ("turned", "first dimensions swapped", "longer", "shorter")]
CONVOLUTION_OPTIONS = {
    "seq_idx": [torch.zeros(2, 9, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 9), [0] * 9],
    "cu_seqlens": OPTIONS["cu_seqlens"],
    "initial_states": [torch.zeros(2, 3, 1), torch.zeros(2, 4, 3), torch.zeros(3), 0.0],
    "final_states_out": [torch.zeros(2, 3, 2), torch.zeros(2, 3, 3, dtype=torch.int32), 1],
    "return_final_states": [True],
    "activation": ["gelu", 1, True, "SiLU"],
}
NORM_OPTIONS = {"activation": ["gelu", None, 1], "eps": [0.1]}


@st.composite
def corrupted_neighbours(draw) -> tuple[str, dict]:
    """The name of a function around the recurrence, and arguments of a good call with one to three of them spoiled."""
    name = draw(st.sampled_from(["causal_conv1d_fn", "causal_conv1d_update", "rms_norm_gated"]))
    rows, options = signed((2, 3, 9), 1).float(), CONVOLUTION_OPTIONS
    arguments = {"x": rows, "weight": signed((3, 4), 2).float(), "bias": signed((3,), 3).float()}
    if name == "causal_conv1d_update":
        arguments, options = {**arguments, "conv_state": torch.zeros(2, 3, 3)}, {"activation": options["activation"]}
    elif name == "rms_norm_gated":
        arguments, options = {"x": rows, "g": rows + 1, "weight": torch.ones(9), "bias": torch.zeros(9)}, NORM_OPTIONS
    for spoiled in draw(st.lists(st.sampled_from([*arguments, *options]), min_size=1, max_size=3, unique=True)):
        if spoiled in options:
            arguments[spoiled] = draw(st.sampled_from(options[spoiled]))
        else:
            kinds = CORRUPTIONS if arguments[spoiled].dim() > 1 else FOR_VECTORS
            arguments[spoiled] = CORRUPTIONS[draw(st.sampled_from(list(kinds)))](arguments[spoiled])
    return name, {
        key: x.clone() if isinstance(x, Tensor) and x.device.type == "cpu" else x for key, x in arguments.items()
    }


@SLOW_IS_FINE
@given(call=corrupted_neighbours())
def test_every_spoiled_call_of_a_neighbour_is_refused_in_one_sentence_or_gives_what_it_promises(kernel, call):
    name, arguments = call
    try:
        y = getattr(kernel, name)(**arguments)
    except (ValueError, TypeError) as refusal:
        assert_sentence(str(refusal), arguments)
        return
    y = y[0] if isinstance(y, tuple) else y
    assert y.shape == arguments["x"].shape and y.dtype == arguments["x"].dtype
