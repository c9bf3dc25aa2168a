"""Laws of dense rows: batches, heads, segments, sizes, options."""

from dataclasses import replace

import pytest
import torch

from .compare import assert_close, assert_equal, assert_finite, relative_error
from .inputs import Outcome, Problem, forward, make_problem, solve, truth

SMALL = {"dim_k": 16, "dim_v": 8}


def per_row(problem: Problem, change) -> Problem:
    """Every tensor, states too, changed along its first dimension."""
    return problem.map(change)


def test_forward_and_backward_are_the_recurrence(kernel):
    problem = make_problem(2, 150, 2, 6, seed=100, states=(107, 108), **SMALL)
    assert_close(solve(kernel, problem), truth(problem))


def test_order_of_the_batch_does_not_matter(kernel):
    problem = make_problem(3, 70, 2, 4, seed=110, states=(117, 118), **SMALL)
    order = [2, 0, 1]
    first = solve(kernel, per_row(problem, lambda x: x[order]))
    second = solve(kernel, problem)
    assert_equal(first, Outcome(**{name: x[order] for name, x in second.items()}))


def test_a_row_does_not_depend_on_its_batch(kernel):
    problem = make_problem(4, 130, 2, 4, seed=120, states=(127, 128), **SMALL).to(torch.float32)
    whole = solve(kernel, problem)
    alone = solve(kernel, per_row(problem, lambda x: x[2:3]))
    assert_equal(alone, Outcome(**{name: x[2:3] for name, x in whole.items()}))


def test_nan_in_another_row_does_not_leak(kernel):
    problem = make_problem(2, 70, 1, 2, seed=130, states=(137, 138), **SMALL)
    spoiled = per_row(problem, lambda x: torch.cat([x[:1], torch.full_like(x[1:], float("nan"))]))
    clean, outcome = solve(kernel, problem), solve(kernel, spoiled)
    assert_equal(
        Outcome(**{name: x[:1] for name, x in outcome.items()}),
        Outcome(**{name: x[:1] for name, x in clean.items()}),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_sliced_heads_give_the_slices(kernel, dtype):
    """As under tensor parallelism, where each rank holds some heads: the same bits."""
    problem = make_problem(1, 100, 2, 4, seed=80).to(dtype)
    whole = solve(kernel, problem)
    for key_head in (0, 1):
        keys, values = slice(key_head, key_head + 1), slice(2 * key_head, 2 * key_head + 2)
        part = replace(
            problem,
            q=problem.q[:, :, keys],
            k=problem.k[:, :, keys],
            v=problem.v[:, :, values],
            g=problem.g[:, :, values],
            beta=problem.beta[:, :, values],
            do=problem.do[:, :, values],
        )
        outcome = solve(kernel, part)
        for name, x in outcome.items():
            full = getattr(whole, name)
            if name == "final_state":
                expected = full[:, values]
            else:
                expected = full[:, :, keys if name in ("dq", "dk") else values]
            assert torch.equal(x, expected), name


def test_shared_key_heads_equal_repeated_key_heads(kernel):
    problem = make_problem(1, 70, 2, 6, seed=140, **SMALL)
    repeated = replace(problem, q=problem.q.repeat_interleave(3, 2), k=problem.k.repeat_interleave(3, 2))
    shared, apart = solve(kernel, problem), solve(kernel, repeated)
    assert relative_error(shared.o, apart.o) <= 1e-12
    for name in ("dq", "dk"):
        summed = getattr(apart, name).unflatten(2, (2, 3)).sum(3)
        assert relative_error(getattr(shared, name), summed) <= 1e-12


@pytest.mark.parametrize("pieces", [[1] * 5, [64, 64, 22], [1, 63, 86], [140, 10], [0, 75, 0, 75]])
def test_segments_equal_the_whole_in_values_and_gradients(kernel, pieces):
    problem = make_problem(2, sum(pieces), 1, 2, seed=150, states=(157, 158), **SMALL)
    expected = truth(problem)
    problem = problem.map(lambda x: x.detach())
    leaves = [problem.q, problem.k, problem.v, problem.g, problem.beta, problem.initial_state]
    leaves = [x.requires_grad_() for x in leaves]
    *inputs, state = leaves
    outputs = []
    for part in zip(*(x.split(pieces, dim=1) for x in inputs), strict=True):
        o, state = kernel.chunk_gated_delta_rule(
            *part, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    grads = torch.autograd.grad([o, state], leaves, [problem.do, problem.dht])
    assert_close(Outcome(o.detach(), state.detach(), *grads), expected)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 130])
def test_chunk_sizes_agree(kernel, tokens):
    problem = make_problem(2, tokens, 1, 2, seed=160, states=(167, 168), **SMALL)
    for chunk_size in (16, 32, 64):
        assert_close(solve(kernel, problem, chunk_size=chunk_size), truth(problem))


@pytest.mark.parametrize("tokens", [*range(1, 34), 47, 48, 49, 95, 96, 97])
def test_every_short_length(kernel, tokens):
    problem = make_problem(1, tokens, 1, 2, dim_k=8, dim_v=4, seed=170, states=(177, 178))
    assert_close(solve(kernel, problem), truth(problem))


def test_rows_longer_than_a_slab(kernel, part):
    """Long rows are worked on in slabs of chunks; values and gradients cross from one slab to the next."""
    plan = part("gated_delta_rule.plan")
    tokens = 16 * plan.slab_chunks(2 * 64) * 3 + 5
    problem = make_problem(2, tokens, 32, 64, dim_k=4, dim_v=4, seed=180, states=(187, 188))
    assert_close(solve(kernel, problem, chunk_size=16), truth(problem))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 2])
def test_scale_multiplies_the_outputs(kernel, scale):
    problem = make_problem(1, 70, 1, 2, seed=190, scale=scale, **SMALL)
    outcome = solve(kernel, problem)
    assert_close(outcome, truth(problem))
    default = forward(kernel, replace(problem, scale=None))
    assert relative_error(outcome.o, default.o * scale * 16**0.5) <= 1e-12


def test_default_scale_is_one_by_the_root_of_the_key_size(kernel):
    problem = make_problem(1, 20, 1, 1, seed=191, dim_k=9, dim_v=4)
    assert_equal(forward(kernel, problem), forward(kernel, replace(problem, scale=9**-0.5)))


def test_normalisation_in_the_kernel_equals_normalisation_outside(kernel):
    problem = make_problem(1, 70, 1, 2, seed=200, **SMALL)
    q, k = (x.detach().requires_grad_() for x in (problem.q, problem.k))
    normalised = [x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    o, _ = kernel.chunk_gated_delta_rule(*normalised, problem.v, problem.g, problem.beta)
    dq, dk = torch.autograd.grad(o, (q, k), problem.do)
    inside = solve(kernel, problem)
    assert relative_error(inside.o, o.detach()) <= 1e-12
    assert relative_error(inside.dq, dq) <= 1e-12 and relative_error(inside.dk, dk) <= 1e-12


def test_keys_and_queries_are_taken_as_given_by_default(kernel):
    problem = make_problem(1, 40, 1, 2, seed=201, use_qk_l2norm=False, **SMALL)
    problem = replace(problem, k=problem.k / 4)
    assert_close(solve(kernel, problem), truth(problem))


@pytest.mark.parametrize("bounds", [None, [0, 20, 70]])
def test_state_layout_value_by_key(kernel, bounds):
    """state_v_first transposes the states and their gradients, and changes nothing else."""
    batch = 2 if bounds is None else 1
    problem = make_problem(batch, 70, 1, 2, seed=210, bounds=bounds, states=(217, 218), **SMALL)
    turned = replace(problem, initial_state=problem.initial_state.mT.contiguous(), dht=problem.dht.mT.contiguous())
    plain, other = solve(kernel, problem), solve(kernel, turned, state_v_first=True)
    assert other.final_state.shape == (2, 2, 8, 16) and other.final_state.is_contiguous()
    back = replace(other, final_state=other.final_state.mT, dh0=other.dh0.mT)
    assert_equal(back, plain)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "value_heads", "dim_k", "dim_v"),
    [(2, 0, 1, 2, 8, 4), (0, 5, 1, 2, 8, 4), (0, 0, 1, 2, 8, 4), (2, 70, 2, 0, 8, 4), (2, 70, 1, 2, 8, 0)],
    ids=["no tokens", "no rows", "nothing", "no value heads", "empty values"],
)
def test_empty_inputs_give_empty_outputs(kernel, batch, tokens, heads, value_heads, dim_k, dim_v):
    problem = make_problem(batch, tokens, heads, value_heads, dim_k=dim_k, dim_v=dim_v, seed=220, states=(227, 228))
    outcome = solve(kernel, problem)
    assert outcome.o.shape == (batch, tokens, value_heads, dim_v)
    assert outcome.final_state.shape == (batch, value_heads, dim_k, dim_v)
    assert_equal(outcome, truth(problem))


def test_no_tokens_pass_the_state_through(kernel):
    problem = make_problem(2, 0, 1, 2, seed=230, states=(237, 238), **SMALL)
    outcome = solve(kernel, problem)
    assert torch.equal(outcome.final_state, problem.initial_state)
    assert torch.equal(outcome.dh0, problem.dht)


def test_no_tokens_without_state_end_in_zeros(kernel):
    outcome = forward(kernel, make_problem(2, 0, 1, 2, seed=230, **SMALL))
    assert outcome.final_state.shape == (2, 2, 16, 8) and outcome.final_state.count_nonzero() == 0


def test_no_initial_state_is_a_state_of_zeros(kernel):
    problem = make_problem(2, 70, 1, 2, seed=240, **SMALL)
    zeros = replace(problem, initial_state=torch.zeros(2, 2, 16, 8, dtype=torch.float64))
    assert_equal(forward(kernel, problem), forward(kernel, zeros))


def test_final_state_is_none_unless_asked_for(kernel):
    p = make_problem(1, 5, 1, 1, seed=250, **SMALL)
    assert kernel.chunk_gated_delta_rule(p.q, p.k, p.v, p.g, p.beta)[1] is None
    assert kernel.fused_recurrent_gated_delta_rule(p.q, p.k, p.v, g=p.g, beta=p.beta)[1] is None
    assert kernel.chunk_gated_delta_rule_fwd(p.q, p.k, p.v, p.g, p.beta).final_state is None


KEY_AND_VALUE_SIZES = [(32, 32), (64, 64), (96, 96), (192, 192), (256, 256), (128, 64), (64, 256), (1, 3), (3, 5)]


@pytest.mark.parametrize("sizes", KEY_AND_VALUE_SIZES, ids=lambda sizes: f"K{sizes[0]}-V{sizes[1]}")
def test_every_head_size_is_served(kernel, sizes):
    dim_k, dim_v = sizes
    normalise = dim_k > 1  # a normalised number is 1 or -1, and its gradient nothing but rounding
    problem = make_problem(1, 70, 1, 2, dim_k=dim_k, dim_v=dim_v, seed=260, states=(267, 268), use_qk_l2norm=normalise)
    assert_close(solve(kernel, problem), truth(problem))
    single = problem.to(torch.float32)
    assert_close(solve(kernel, single), truth(single), torch.float32)


def test_repeating_a_call_repeats_its_bits(kernel):
    problem = make_problem(2, 200, 2, 4, seed=270, states=(277, 278), **SMALL).to(torch.float32)
    first = solve(kernel, problem)
    assert_finite(first)
    for _ in range(3):
        assert_equal(solve(kernel, problem), first)
