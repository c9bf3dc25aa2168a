"""Cases that users of other implementations met, as numbers.

The literal norms and sums come from a separate NumPy implementation of the recurrence and its adjoint, so neither the
kernel nor `flashqla_hub.reference` can agree with itself alone. docs/field_cases.md names the cases.
"""

import math
from dataclasses import replace

import pytest
import torch

from .compare import EXACT, assert_close, assert_fingerprint, assert_finite, relative_error
from .inputs import Problem, forward, make_problem, solve, truth, uniform

pytestmark = pytest.mark.kernels_ci

DTYPES = pytest.mark.parametrize("dtype", EXACT, ids=lambda dtype: str(dtype).removeprefix("torch."))


def check(kernel, problem: Problem, dtype: torch.dtype, **fingerprints: dict) -> None:
    """The outcome has these fingerprints, and is the truth in every tensor."""
    outcome = solve(kernel, problem.to(dtype))
    for name, expected in fingerprints.items():
        assert_fingerprint(getattr(outcome, name), **expected, relative=EXACT[dtype])
    assert_close(outcome, truth(problem), dtype)


@DTYPES
def test_packed_rows_do_not_share_state(kernel, dtype):
    check(
        kernel,
        make_problem(1, 150, 2, 4, seed=10, bounds=[0, 37, 100, 150]),
        dtype,
        o={"l2": 1.3441306608, "total": -0.61662862059},
        final_state={"l2": 26.108791103},
        dq={"l2": 1.3208431656},
        dk={"l2": 1.3213026148},
        dv={"l2": 1.3451269944},
        dg={"total": -1.7297624712},
        dbeta={"total": -0.083286174696},
    )


def test_a_row_without_bounds_is_one_sequence(kernel):
    """The guard of the test above: boundaries that are dropped on the way change these numbers."""
    problem = make_problem(1, 150, 2, 4, seed=10)
    packed = forward(kernel, replace(problem, cu_seqlens=torch.tensor([0, 37, 100, 150])))
    whole = forward(kernel, problem)
    assert_fingerprint(whole.o, l2=1.3732425096)
    differs = ((packed.o - whole.o).abs().amax((0, 2, 3)) > 1e-9).nonzero()
    assert differs[0].item() == 37


@DTYPES
def test_empty_sequences_pass_their_state_through(kernel, dtype):
    bounds = [0, 0, 40, 40, 104, 104]
    problem = make_problem(1, 104, 2, 4, seed=60, bounds=bounds, states=(66, 67))
    check(
        kernel,
        problem,
        dtype,
        o={"l2": 3.2658108608},
        final_state={"l2": 257.20597588},
        dk={"l2": 21.894505344},
        dg={"total": -13.479336862},
        dh0={"l2": 256.42092318},
    )
    outcome = solve(kernel, problem.to(dtype))
    for empty in (0, 2, 4):
        assert torch.equal(outcome.final_state[empty], problem.initial_state[empty].to(dtype))
        assert torch.equal(outcome.dh0[empty], problem.dht[empty].to(dtype))


def test_empty_sequences_without_initial_state_end_in_zeros(kernel):
    final_state = forward(kernel, make_problem(1, 104, 2, 4, seed=60, bounds=[0, 0, 40, 40, 104, 104])).final_state
    assert all(final_state[empty].count_nonzero() == 0 for empty in (0, 2, 4))
    assert all(final_state[full].count_nonzero() > 0 for full in (1, 3))


@DTYPES
def test_zero_keys_of_padding_get_zero_gradients(kernel, dtype):
    problem = make_problem(1, 20, 1, 2, seed=30)
    for x in (problem.q, problem.k, problem.v):
        x[:, :7] = 0
    check(kernel, problem, dtype, dk={"l2": 0.25838981889}, dg={"total": 0.70670279539})
    outcome = solve(kernel, problem.to(dtype))
    for grad in (outcome.dq, outcome.dk, outcome.dv):
        assert grad[:, :7].count_nonzero() == 0


@DTYPES
def test_one_zero_key_has_a_large_but_right_gradient(kernel, dtype):
    problem = make_problem(1, 20, 1, 2, seed=30)
    problem.k[:, 10] = 0
    check(kernel, problem, dtype)
    dk = solve(kernel, problem.to(dtype)).dk
    assert_fingerprint(dk[:, 10], l2=752.1922155073842, relative=EXACT[dtype])
    assert_fingerprint(dk[:, 9], l2=0.03712921335260349, relative=EXACT[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_zero_keys_stay_finite_in_16_bit(kernel, dtype):
    problem = make_problem(1, 20, 1, 2, seed=30)
    problem.k[:, 10] = 0
    assert_finite(solve(kernel, problem.to(dtype)))


@DTYPES
def test_gate_of_zero_is_the_ungated_rule(kernel, dtype):
    problem = make_problem(1, 200, 2, 4, seed=31)
    problem.g.zero_()
    check(
        kernel,
        problem,
        dtype,
        o={"l2": 6.8438930829},
        final_state={"l2": 80.373208063},
        dq={"l2": 6.8202764670},
        dk={"l2": 7.6206441416},
        dg={"total": 172.28345688},
        dbeta={"total": -2.5766678115},
    )


@DTYPES
def test_half_of_the_gates_zero(kernel, dtype):
    problem = make_problem(1, 200, 2, 4, seed=31)
    problem.g[uniform(tuple(problem.g.shape), 37) < 0.5] = 0
    check(kernel, problem, dtype)


@DTYPES
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("gate", [-30.0, -1000.0])
def test_strong_gates_leave_each_token_alone(kernel, dtype, gate):
    problem = make_problem(1, 130, 2, 4, seed=32)
    problem.g.fill_(gate)
    with torch.autograd.detect_anomaly(check_nan=True):
        outcome = solve(kernel, problem.to(dtype))
    assert_finite(outcome)
    assert_fingerprint(outcome.o, l2=0.66688854686, relative=EXACT[dtype])
    assert_fingerprint(outcome.final_state, l2=7.7992322356, relative=EXACT[dtype])
    assert_fingerprint(outcome.dk, l2=0.64132610208, relative=EXACT[dtype])
    assert_fingerprint(outcome.dbeta, total=0.075420810365, relative=EXACT[dtype])
    assert outcome.dg.abs().max() <= (0 if gate == -1000.0 else 1e-12)


@DTYPES
def test_gradients_of_gate_parameters_under_strong_decay(kernel, dtype):
    """Decay as trained Qwen models have it: log decays from -44 to -0.14."""
    problem = make_problem(1, 256, 1, 2, seed=40).to(dtype)
    A_log = torch.tensor([2.0, 15.5], dtype=torch.float64).log().to(dtype).requires_grad_()
    dt_bias = torch.tensor([0.3, -0.2], dtype=dtype, requires_grad=True)
    raw = (6 * uniform((1, 256, 2), 48) - 3).to(dtype).requires_grad_()
    o, _ = kernel.chunk_gated_delta_rule(
        problem.q,
        problem.k,
        problem.v,
        raw,
        problem.beta,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    (o * problem.do).sum().backward()
    relative = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]
    assert A_log.grad.tolist() == pytest.approx([-0.05967763719845742, -0.020786267587797447], rel=relative)
    assert dt_bias.grad.tolist() == pytest.approx([-0.04959525834268834, -0.019717511678361478], rel=relative)

    exact = torch.tensor([[0.3, -0.2]], dtype=torch.float64) + raw.detach().double()
    gate = -torch.tensor([2.0, 15.5], dtype=torch.float64) * torch.nn.functional.softplus(exact)
    assert gate.min().item() == pytest.approx(-44.14764797) and gate.max().item() == pytest.approx(-0.1359702821)
    check(
        kernel,
        replace(problem, g=gate),
        dtype,
        dg={"l2": 0.11138691998, "total": 0.075854706059},
        dbeta={"l2": 0.64342098312},
    )


TAILS = {  # tokens: norms of o, final state, dk; sum of dg
    1: (0.0077772444211, 4.6313224814, 0.0049216108815, 0.0),
    2: (0.079095296325, 7.9743027065, 0.051486495102, 0.023196695920),
    17: (0.42913700648, 15.857914399, 0.41629046560, 0.20530242195),
    63: (0.84444962928, 12.381911721, 0.86928980623, 1.2516697720),
    64: (0.85116700820, 13.418135894, 0.87324751223, 1.2835587373),
    65: (0.85536058533, 14.019725353, 0.87868348746, 1.3276925149),
    127: (1.2289515050, 15.297938750, 1.2212286342, -2.7325308205),
    128: (1.2341764608, 16.384798755, 1.2275509457, -2.4844357428),
    129: (1.2394539259, 15.229524237, 1.2317216897, -3.0701134822),
}


@DTYPES
@pytest.mark.parametrize("tokens", TAILS)
def test_lengths_around_the_chunk(kernel, dtype, tokens):
    o, final_state, dk, dg = TAILS[tokens]
    check(
        kernel,
        make_problem(1, tokens, 2, 4, seed=50),
        dtype,
        o={"l2": o},
        final_state={"l2": final_state},
        dk={"l2": dk},
        dg={"total": dg},
    )


@DTYPES
def test_keys_without_normalisation_while_the_recurrence_is_finite(kernel, dtype):
    problem = make_problem(1, 16, 1, 1, seed=41, use_qk_l2norm=False)
    outcome = forward(kernel, problem.to(dtype))
    assert outcome.o.abs().max().item() == pytest.approx(18.960487528, rel=EXACT[dtype])
    assert outcome.final_state.abs().max().item() == pytest.approx(43.401239920, rel=EXACT[dtype])
    assert_fingerprint(outcome.o, l2=94.815077381, relative=EXACT[dtype])
    check(kernel, problem, dtype)


@DTYPES
def test_beta_up_to_two_is_taken_as_given(kernel, dtype):
    problem = make_problem(1, 90, 2, 2, seed=95)
    problem.beta.mul_(2)
    assert problem.beta.max() > 1.7
    check(
        kernel,
        problem,
        dtype,
        o={"l2": 1.4670523880},
        final_state={"l2": 15.576628036},
        dbeta={"total": 0.55590885579},
        dg={"total": -0.020099662052},
    )


@DTYPES
def test_beta_of_one_overwrites(kernel, dtype):
    problem = make_problem(1, 90, 2, 2, seed=95)
    problem.beta.fill_(1)
    check(
        kernel,
        problem,
        dtype,
        o={"l2": 1.3659918325},
        final_state={"l2": 17.919348723},
        dbeta={"total": 0.58446110793},
    )


GROUPS = {  # value heads per key head: norms of o, dq, dk
    1: (0.78161441426, 0.76746843481, 0.76409277740),
    2: (1.1116128947, 1.0820857268, 1.0798827193),
    3: (1.3703358106, 1.4122068303, 1.4397320689),
    4: (1.5996838068, 1.6274606334, 1.6407646643),
    8: (2.2862801609, 2.2917467003, 2.3293798488),
}


@DTYPES
@pytest.mark.parametrize("ratio", GROUPS)
def test_consecutive_value_heads_share_a_key_head(kernel, dtype, ratio):
    o, dq, dk = GROUPS[ratio]
    check(
        kernel,
        make_problem(1, 100, 2, 2 * ratio, seed=80),
        dtype,
        o={"l2": o},
        dq={"l2": dq},
        dk={"l2": dk},
    )


@DTYPES
def test_log_decay_comes_before_the_error_and_states_are_key_by_value(kernel, dtype):
    outcome = forward(kernel, make_problem(1, 10, 1, 1, seed=90).to(dtype))
    relative = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    assert outcome.final_state[0, 0, 3, 5].item() == pytest.approx(-0.03321478330, rel=relative)
    assert outcome.final_state[0, 0, 5, 3].item() == pytest.approx(-0.03200137749, rel=relative)
    assert outcome.o[0, 9, 0, :3].tolist() == pytest.approx([-0.00036775, -0.00190151, 0.00656454], abs=1e-8)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100])
def test_two_segments_equal_one_shot(kernel, cut):
    problem = make_problem(1, 130, 2, 4, seed=20)
    whole = forward(kernel, problem)
    assert_fingerprint(whole.o, l2=1.2637787262, total=0.39789654286)
    assert_fingerprint(whole.final_state, l2=12.033510570)
    first = forward(kernel, problem.rows(None, cut))
    second = forward(kernel, replace(problem.rows(cut, None), initial_state=first.final_state))
    assert relative_error(torch.cat([first.o, second.o], dim=1), whole.o) <= 1e-12
    assert relative_error(second.final_state, whole.final_state) <= 1e-12
    forgetful = forward(kernel, problem.rows(cut, None)).o
    assert 0.008 < (forgetful - whole.o[:, cut:]).abs().max() < 0.021  # what a dropped state looks like


LAST_TOKENS = {6: (0.090432396788, 12.623386199), 66: (0.084248297242, 12.718503250)}


@DTYPES
@pytest.mark.parametrize("tokens", LAST_TOKENS)
def test_prefill_and_one_decode_step_equal_the_full_forward(kernel, dtype, tokens):
    problem = make_problem(1, tokens, 2, 4, seed=25).to(dtype)
    o, final_state = LAST_TOKENS[tokens]
    whole = forward(kernel, problem)
    prefill = forward(kernel, problem.rows(None, -1))
    last = problem.rows(-1, None)
    decoded, state = kernel.fused_recurrent_gated_delta_rule(
        last.q,
        last.k,
        last.v,
        g=last.g,
        beta=last.beta,
        initial_state=prefill.final_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for x in (whole.o[:, -1], decoded[:, -1]):
        assert_fingerprint(x, l2=o, relative=EXACT[dtype])
    for x in (whole.final_state, state):
        assert_fingerprint(x, l2=final_state, relative=EXACT[dtype])
    assert relative_error(decoded[:, -1], whole.o[:, -1]) <= EXACT[dtype]


@DTYPES
def test_initial_state_and_gradient_of_the_final_state(kernel, dtype):
    problem = make_problem(2, 70, 2, 4, seed=70, states=(76, 77))
    check(
        kernel,
        problem,
        dtype,
        o={"l2": 3.1361919159},
        final_state={"l2": 17.805325216},
        dh0={"l2": 2.8485104015, "total": -1.4428428516},
        dg={"total": 44.228437953},
        dk={"total": 40.204072795},
    )
    without = forward(kernel, replace(problem, initial_state=None).to(dtype))
    assert_fingerprint(without.o, l2=1.3065110667, relative=EXACT[dtype])
    assert_fingerprint(without.final_state, l2=17.805329443, relative=EXACT[dtype])


def test_decay_parameters_rounded_to_16_bit_move_the_gate_by_the_rounding_alone(part):
    """log 11.3 in bfloat16 is 2.421875: over 4096 tokens the log decay is -2307.47 instead of -2314.24."""
    log_decay = part("gated_delta_rule.gates").log_decay
    raw = torch.full((1, 4096, 1), math.log(math.expm1(0.05)))  # softplus gives 0.05
    exact = torch.tensor([math.log(11.3)])
    assert log_decay(raw, exact, None).double().sum().item() == pytest.approx(-2314.24, rel=1e-5)
    assert log_decay(raw, exact.bfloat16(), None).double().sum().item() == pytest.approx(-2307.474449, rel=1e-5)


def test_inputs_are_those_of_the_expected_values():
    """So that a changed generator is not taken for a changed kernel."""
    assert (uniform((3,), 0) * 2**32).tolist() == [0, 1162214419, 384728518]
    assert uniform((2,), 7).tolist() == pytest.approx([0.45022123, 0.76349421], abs=1e-8)
