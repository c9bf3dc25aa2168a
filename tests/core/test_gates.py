"""Laws of gates: log decays from 0 to -inf, activations inside the call, writing strengths."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .compare import EXACT, assert_close, assert_equal, assert_finite, relative_error, tolerance
from .inputs import Problem, forward, make_problem, signed, solve, truth, uniform

SMALL = {"dim_k": 16, "dim_v": 8}
DTYPES = pytest.mark.parametrize("dtype", EXACT, ids=lambda dtype: str(dtype).removeprefix("torch."))
INF = float("inf")


def assert_close_where_gates_vanish(kernel, problem: Problem, dtype: torch.dtype) -> None:
    """As `assert_close`; a gate gradient below 1e-12 counts as 0, since a saturated gate leaves no digits of it."""
    problem = problem.to(dtype)
    outcome, expected = solve(kernel, problem), truth(problem)
    assert_finite(outcome)
    if expected.dg.abs().max() <= 1e-12:
        assert outcome.dg.abs().max() <= 1e-12
        outcome = replace(outcome, dg=None)
    assert_close(outcome, expected, dtype)


@DTYPES
@pytest.mark.parametrize("gate", [0.0, -1e-3, -1.0, -30.0, -1000.0, -INF])
@pytest.mark.parametrize("bounds", [None, [0, 40, 40, 130]], ids=["dense", "packed"])
def test_one_gate_everywhere(kernel, dtype, gate, bounds):
    problem = make_problem(1, 130, 1, 2, seed=400, bounds=bounds, states=(407, 408), **SMALL)
    problem.g.fill_(gate)
    assert_close_where_gates_vanish(kernel, problem, dtype)


@DTYPES
def test_gates_of_all_strengths_in_one_chunk(kernel, dtype):
    problem = make_problem(2, 130, 2, 4, seed=410, states=(417, 418), **SMALL)
    strengths = torch.tensor([0.0, -1e-3, -1.0, -30.0, -1000.0, -INF], dtype=torch.float64)
    choice = (6 * uniform(tuple(problem.g.shape), 419)).long()
    assert_close_where_gates_vanish(kernel, replace(problem, g=strengths[choice]), dtype)


@DTYPES
def test_weak_gates_behind_a_strong_one_keep_their_digits(kernel, dtype):
    """A difference of cumulative sums would round -1e-3 away behind -1000."""
    problem = make_problem(1, 64, 1, 2, seed=420, **SMALL)
    problem.g.fill_(-1e-3)
    problem.g[:, 8] = -1000.0
    assert_close_where_gates_vanish(kernel, problem, dtype)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 64, 100])
def test_a_gate_of_minus_infinity_restarts_the_state(kernel, dtype, tokens):
    """-inf on a token is a bound in front of it, forward and backward."""
    problem = make_problem(1, 150, 2, 4, seed=430, **SMALL).to(dtype)
    gated = replace(problem, g=problem.g.clone())
    gated.g[:, tokens] = -INF
    gated_outcome = solve(kernel, gated)
    packed_outcome = solve(kernel, replace(problem, cu_seqlens=torch.tensor([0, tokens, 150])))
    for name in ("o", "dq", "dk", "dv", "dbeta"):
        assert relative_error(getattr(gated_outcome, name), getattr(packed_outcome, name)) <= EXACT[dtype], name
    assert torch.equal(gated_outcome.dg[:, tokens], torch.zeros(1, 4, dtype=dtype))
    assert relative_error(gated_outcome.final_state[0], packed_outcome.final_state[1]) <= EXACT[dtype]


def gate_layer(value_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias of a layer."""
    return (1.5 * signed((value_heads,), 441)).to(dtype), signed((value_heads,), 442).to(dtype)


@DTYPES
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("negative", [True, False], ids=["beta to 2", "beta to 1"])
def test_activations_inside_equal_activations_outside(kernel, dtype, with_bias, negative):
    problem = make_problem(2, 70, 1, 2, seed=440, states=(447, 448), **SMALL).to(dtype)
    A_log, dt_bias = (x.requires_grad_() for x in gate_layer(2, dtype))
    raw_g, raw_beta = ((4 * signed((2, 70, 2), seed)).to(dtype).requires_grad_() for seed in (443, 444))
    bias = dt_bias if with_bias else None
    parameters = [A_log, dt_bias, raw_g, raw_beta] if with_bias else [A_log, raw_g, raw_beta]

    def run(g, beta, **options):
        o, state = kernel.chunk_gated_delta_rule(
            problem.q,
            problem.k,
            problem.v,
            g,
            beta,
            initial_state=problem.initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **options,
        )
        return [o, state, *torch.autograd.grad([o, state], parameters, [problem.do, problem.dht])]

    inside = run(
        raw_g,
        raw_beta,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=negative,
    )
    gate = -A_log.double().exp() * F.softplus(raw_g.double() + (0 if bias is None else bias.double()))
    strength = (2 if negative else 1) * raw_beta.double().sigmoid()
    outside = run(gate.to(dtype), strength.to(dtype))
    for actual, expected in zip(inside, outside, strict=True):
        assert relative_error(actual.detach(), expected.detach()) <= tolerance("dg", dtype)


def test_activations_are_the_same_in_the_recurrent_function(kernel):
    problem = make_problem(2, 3, 1, 2, seed=450, **SMALL)
    A_log, dt_bias = gate_layer(2, torch.float32)
    options = {
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "output_final_state": True,
    }
    chunked = kernel.chunk_gated_delta_rule(problem.q, problem.k, problem.v, problem.g, problem.beta, **options)
    recurrent = kernel.fused_recurrent_gated_delta_rule(
        problem.q, problem.k, problem.v, g=problem.g, beta=problem.beta, **options
    )
    assert all(torch.equal(x, y) for x, y in zip(chunked, recurrent, strict=True))


@pytest.mark.parametrize("parameter_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_gates_are_computed_in_float32_whatever_the_parameters(kernel, part, parameter_dtype):
    """A layer cast to bfloat16 keeps its gate exact, and parameters get gradients in their own dtype."""
    problem = make_problem(1, 70, 1, 2, seed=460, **SMALL).to(torch.bfloat16)
    A_log, dt_bias = (x.requires_grad_() for x in gate_layer(2, parameter_dtype))
    raw = signed((1, 70, 2), 463).to(torch.bfloat16)
    assert part("gated_delta_rule.gates").log_decay(raw, A_log, dt_bias).dtype == torch.float32
    o, _ = kernel.chunk_gated_delta_rule(
        problem.q,
        problem.k,
        problem.v,
        raw,
        problem.beta,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    o.sum().backward()
    assert (A_log.dtype, A_log.grad.dtype, dt_bias.grad.dtype) == (parameter_dtype,) * 3

    gate = -A_log.detach().double().exp() * F.softplus(raw.double() + dt_bias.detach().double())
    outside, _ = kernel.chunk_gated_delta_rule(problem.q, problem.k, problem.v, gate.float(), problem.beta)
    assert relative_error(o.detach(), outside) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_raw_gates_in_16_bit_are_activated_in_float32(part, dtype):
    """The same bits as from the widened values, with and without a bias."""
    gates = part("gated_delta_rule.gates")
    raw = (4 * signed((1, 70, 2), 465)).to(dtype)
    A_log, dt_bias = (x.to(dtype) for x in gate_layer(2, dtype))
    for bias in (None, dt_bias):
        wide = gates.log_decay(raw.float(), A_log.float(), None if bias is None else bias.float())
        assert torch.equal(gates.log_decay(raw, A_log, bias), wide)
    for negative in (False, True):
        assert torch.equal(gates.writing_strength(raw, negative), gates.writing_strength(raw.float(), negative))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_a_head_that_never_forgets(kernel, dtype):
    """A_log = -inf, as when a tiny decay was rounded to 0: the head has gate 0 and a dead, finite gradient."""
    problem = make_problem(1, 130, 2, 4, seed=31).to(dtype)
    A_log = torch.tensor([0.5, -INF, 0.5, 0.5], dtype=dtype, requires_grad=True)
    dt_bias = torch.zeros(4, dtype=dtype, requires_grad=True)
    o, _ = kernel.chunk_gated_delta_rule(
        problem.q,
        problem.k,
        problem.v,
        signed((1, 130, 4), 471).to(dtype),
        problem.beta,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    (o * problem.do).sum().backward()
    ungated = forward(kernel, replace(problem, g=torch.zeros_like(problem.g)))
    assert torch.equal(o[:, :, 1], ungated.o[:, :, 1])
    assert A_log.grad[1] == 0 and dt_bias.grad[1] == 0
    assert torch.isfinite(A_log.grad).all() and A_log.grad[0] != 0


def test_gates_left_out_of_the_recurrent_function_are_zero_and_one(kernel):
    problem = make_problem(2, 5, 1, 2, seed=480, states=(487, 488), **SMALL)
    o, state = kernel.fused_recurrent_gated_delta_rule(
        problem.q,
        problem.k,
        problem.v,
        initial_state=problem.initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    plain = replace(problem, g=torch.zeros_like(problem.g), beta=torch.ones_like(problem.beta))
    expected = truth(plain)
    assert relative_error(o, expected.o) <= 1e-12 and relative_error(state, expected.final_state) <= 1e-12


def test_no_writing_strength_writes_nothing(kernel):
    problem = make_problem(1, 70, 1, 2, seed=490, states=(497, 498), **SMALL)
    problem.beta.zero_()
    outcome = solve(kernel, problem)
    kept = problem.initial_state * problem.g.sum(1).exp()[..., None, None]
    assert relative_error(outcome.final_state, kept) <= 1e-12
    assert_close(outcome, truth(problem))


def test_gates_may_have_another_floating_dtype_than_the_keys(kernel):
    problem = make_problem(1, 70, 1, 2, seed=495, **SMALL).to(torch.bfloat16)
    wide = replace(problem, g=problem.g.float(), beta=problem.beta.double())
    outcome = solve(kernel, wide)
    assert (outcome.dg.dtype, outcome.dbeta.dtype) == (torch.float32, torch.float64)
    narrow = solve(kernel, problem)
    assert_equal(replace(outcome, dg=None, dbeta=None), narrow)
