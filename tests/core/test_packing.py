"""Laws of packed rows: sequences keep apart, tokens that belong to none change nothing, malformed bounds are refused."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from .compare import assert_close, assert_equal, assert_finite, relative_error
from .inputs import TENSORS, Outcome, Problem, forward, make_problem, signed, solve, truth

SMALL = {"dim_k": 16, "dim_v": 8}
BOUNDS = [0, 5, 5, 70, 71, 135]


def packed(seed: int = 300, *, tokens: int = 140, bounds: list[int] = BOUNDS, **options) -> Problem:
    """Short and long sequences, an empty one, and (by default) five tokens behind the last bound."""
    return make_problem(1, tokens, 2, 4, seed=seed, bounds=bounds, states=(seed + 7, seed + 8), **SMALL, **options)


def separately(kernel, problem: Problem) -> list[Outcome]:
    """Each sequence of a packed problem in a call of its own."""
    bounds = problem.cu_seqlens.tolist()
    cut = [problem.rows(start, stop) for start, stop in pairwise(bounds)]
    states = [
        replace(part, initial_state=problem.initial_state[n : n + 1], dht=problem.dht[n : n + 1])
        for n, part in enumerate(cut)
    ]
    return [solve(kernel, part) for part in states]


def test_packed_equals_separate(kernel):
    problem = packed(tokens=135)
    together, apart = solve(kernel, problem), separately(kernel, problem)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        expected = torch.cat([getattr(outcome, name) for outcome in apart], dim=1)
        assert relative_error(getattr(together, name), expected) <= 1e-12, name
    for name in ("final_state", "dh0"):
        expected = torch.cat([getattr(outcome, name) for outcome in apart])
        assert relative_error(getattr(together, name), expected) <= 1e-12, name


def test_packed_is_the_recurrence(kernel):
    problem = packed()
    assert_close(solve(kernel, problem), truth(problem))


def test_one_packed_sequence_equals_the_dense_row(kernel):
    problem = packed(tokens=130, bounds=[0, 130])
    assert_equal(solve(kernel, problem), solve(kernel, replace(problem, cu_seqlens=None)))


def test_order_of_sequences_does_not_matter(kernel):
    problem = packed(bounds=[0, 64, 70])
    swapped = problem.map(
        lambda x: torch.cat([x[:, 64:70], x[:, :64], x[:, 70:]], 1) if x.shape[1] == 140 else x.flip(0)
    )
    swapped = replace(swapped, cu_seqlens=torch.tensor([0, 6, 70]))
    first, second = solve(kernel, problem), solve(kernel, swapped)
    assert torch.equal(first.o[:, 64:70], second.o[:, :6])
    assert torch.equal(first.dk[:, :64], second.dk[:, 6:70])
    assert torch.equal(first.final_state, second.final_state.flip(0))
    assert torch.equal(first.dh0, second.dh0.flip(0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_may_be_int32_or_int64(kernel, dtype):
    problem = packed()
    assert_equal(solve(kernel, replace(problem, cu_seqlens=problem.cu_seqlens.to(dtype))), solve(kernel, problem))


def test_bounds_may_be_a_strided_view(kernel):
    problem = packed()
    strided = torch.stack([problem.cu_seqlens, problem.cu_seqlens + 1], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert_equal(solve(kernel, replace(problem, cu_seqlens=strided)), solve(kernel, problem))


def test_tokens_behind_the_last_bound_give_and_get_exact_zeros(kernel):
    outcome = solve(kernel, packed())
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        x = getattr(outcome, name)
        assert x[:, 135:].count_nonzero() == 0, name
        assert x[:, 134].count_nonzero() > 0 or name == "dq", name


@pytest.mark.parametrize("name", [*TENSORS, "do"])
def test_nan_behind_the_last_bound_does_not_leak(kernel, name):
    problem = packed()
    spoiled = getattr(problem, name).clone()
    spoiled[:, 135:] = float("nan")
    assert_equal(solve(kernel, replace(problem, **{name: spoiled})), solve(kernel, problem))


@pytest.mark.parametrize("name", [*TENSORS, "do"])
@pytest.mark.parametrize("sequence", [0, 2, 4])
def test_nan_in_a_neighbour_does_not_leak(kernel, name, sequence):
    problem = packed()
    start, stop = BOUNDS[sequence : sequence + 2]
    spoiled = getattr(problem, name).clone()
    spoiled[:, start:stop] = float("nan")
    clean, outcome = solve(kernel, problem), solve(kernel, replace(problem, **{name: spoiled}))
    others = torch.ones(140, dtype=torch.bool)
    others[start:stop] = False
    for x in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(getattr(outcome, x)[:, others], getattr(clean, x)[:, others]), x
    kept = [n for n in range(5) if n != sequence]
    for x in ("final_state", "dh0"):
        assert torch.equal(getattr(outcome, x)[kept], getattr(clean, x)[kept]), x


@pytest.mark.parametrize("name", ["initial_state", "dht"])
def test_nan_in_the_state_of_a_neighbour_does_not_leak(kernel, name):
    problem = packed()
    spoiled = getattr(problem, name).clone()
    spoiled[2] = float("nan")
    clean, outcome = solve(kernel, problem), solve(kernel, replace(problem, **{name: spoiled}))
    kept = [0, 1, 3, 4]
    assert torch.equal(outcome.o[:, :5], clean.o[:, :5]) and torch.equal(outcome.o[:, 70:], clean.o[:, 70:])
    assert torch.equal(outcome.dk[:, :5], clean.dk[:, :5]) and torch.equal(outcome.dk[:, 70:], clean.dk[:, 70:])
    assert torch.equal(outcome.final_state[kept], clean.final_state[kept])
    assert torch.equal(outcome.dh0[kept], clean.dh0[kept])


@pytest.mark.parametrize("tokens", [0, 7, 100])
def test_no_sequence_at_all(kernel, tokens):
    outcome = solve(kernel, packed(tokens=tokens, bounds=[0]))
    assert outcome.final_state.shape == (0, 4, 16, 8) and outcome.dh0.shape == (0, 4, 16, 8)
    assert outcome.o.shape == (1, tokens, 4, 8)
    assert all(x.count_nonzero() == 0 for _, x in outcome.items())


@pytest.mark.parametrize("tokens", [0, 7, 100])
def test_empty_sequences_only(kernel, tokens):
    problem = packed(tokens=tokens, bounds=[0, 0, 0])
    outcome = solve(kernel, problem)
    assert torch.equal(outcome.final_state, problem.initial_state)
    assert torch.equal(outcome.dh0, problem.dht)
    assert outcome.o.count_nonzero() == 0 and outcome.dv.count_nonzero() == 0


def test_many_sequences_of_one_token(kernel):
    problem = packed(tokens=70, bounds=list(range(71)))
    assert_close(solve(kernel, problem), truth(problem))


@pytest.fixture
def counted_from_above(part, monkeypatch):
    """Cut packed rows as on a GPU, where looking at the bounds would wait: the last chunks may hold no token."""
    chunks = part("gated_delta_rule.chunks")
    counts = []

    class CountedFromAbove(chunks.PackedChunks):
        def __init__(self, cu_seqlens, num_tokens, length):
            super().__init__(cu_seqlens, num_tokens, length)
            needed, self.count = self.count, self.token.numel() // length
            counts.append((needed, self.count))

    monkeypatch.setattr(chunks, "PackedChunks", CountedFromAbove)
    return counts


@pytest.mark.parametrize(
    ("tokens", "bounds", "spare"),
    [
        (140, BOUNDS, 2),
        (140, [0, 0, 0], 4),
        (140, [0, 64, 128], 2),
        (63, [0, 1, 2, 3], 0),
        (140, [0], 0),
        (0, [0, 0, 0], 0),
    ],
)
def test_spare_chunks_change_nothing(kernel, counted_from_above, tokens, bounds, spare):
    problem = packed(tokens=tokens, bounds=bounds)
    assert_close(solve(kernel, problem), truth(problem))
    needed, counted = counted_from_above[0]
    assert counted - needed == spare


def test_packed_sequences_longer_than_a_slab(kernel, part):
    """Long rows are worked on in slabs; the state crosses from one to the next, and restarts at bounds in any of them."""
    plan = part("gated_delta_rule.plan")
    tokens = 16 * plan.slab_chunks(64) * 3
    problem = make_problem(
        1,
        tokens,
        32,
        64,
        dim_k=4,
        dim_v=4,
        seed=330,
        bounds=[0, tokens // 2 + 5, tokens // 2 + 9, tokens - 3],
        states=(337, 338),
    )
    outcome = solve(kernel, problem, chunk_size=16)
    assert_finite(outcome)
    assert_close(outcome, truth(problem))


MALFORMED = {
    "starts at 3": ([3, 20], "cu_seqlens starts at 3; it must start at 0: prepend the first bound."),
    "decreases": (
        [0, 30, 20, 40],
        "cu_seqlens decreases from 30 to 20 at entry 2; it must hold cumulative lengths: "
        "pass lengths.cumsum(0) with a 0 in front.",
    ),
    "runs past the row": (
        [0, 20, 41],
        "cu_seqlens ends at 41 but the row has 40 tokens; its last entry must not exceed the row: "
        "pass the bounds of this row only.",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_bounds_are_refused(kernel, case):
    bounds, sentence = MALFORMED[case]
    problem = make_problem(1, 40, 1, 1, bounds=bounds, **SMALL)
    with pytest.raises(ValueError) as refusal:
        forward(kernel, problem)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_bounds_are_refused_by_hand(kernel, case):
    """Forward and backward are separate calls there, and either may be the first to see them."""
    bounds, sentence = MALFORMED[case]
    problem = make_problem(1, 40, 1, 1, bounds=[0, 20, 40][: len(bounds)], **SMALL)
    inputs = [getattr(problem, name) for name in TENSORS]
    residuals = kernel.chunk_gated_delta_rule_fwd(*inputs, cu_seqlens=problem.cu_seqlens).residuals
    malformed = torch.tensor(bounds)
    with pytest.raises(ValueError) as forward_refusal:
        kernel.chunk_gated_delta_rule_fwd(*inputs, cu_seqlens=malformed)
    with pytest.raises(ValueError) as backward_refusal:
        kernel.chunk_gated_delta_rule_bwd(*inputs, residuals, problem.do, cu_seqlens=malformed)
    assert str(forward_refusal.value) == str(backward_refusal.value) == sentence


def test_a_wrong_number_of_initial_states_is_refused(kernel):
    problem = replace(packed(), initial_state=signed((4, 4, 16, 8), 1))
    with pytest.raises(ValueError, match=r"initial_state has shape \[4, 4, 16, 8\]; it must be .* = \[5, 4, 16, 8\]"):
        forward(kernel, problem)


def test_bounds_on_another_device_are_refused(kernel):
    problem = replace(packed(), cu_seqlens=torch.tensor(BOUNDS, device="meta"))
    with pytest.raises(ValueError, match=r"cu_seqlens is on meta and q on cpu; .* pass cu_seqlens.to\(q.device\)"):
        forward(kernel, problem)


def test_a_batch_with_bounds_is_refused(kernel):
    problem = make_problem(2, 40, 1, 1, bounds=[0, 40], **SMALL)
    with pytest.raises(ValueError, match="q has batch size 2 with cu_seqlens; packed sequences lie in one row"):
        forward(kernel, problem)


class BoundsOnGpu:
    """Stands in for bounds on a GPU, where reading values waits for it."""

    device, is_cpu = torch.device("cuda"), False

    def tolist(self) -> list[int]:
        return [0, 9]


@pytest.mark.parametrize("wish", [None, "0", "1"])
def test_values_of_bounds_on_a_gpu_are_read_on_request_only(part, monkeypatch, wish):
    monkeypatch.delenv("FLASHQLA_CHECK_CU_SEQLENS", raising=False)
    if wish is not None:
        monkeypatch.setenv("FLASHQLA_CHECK_CU_SEQLENS", wish)
    check = part("checks").check_cu_seqlens_values
    if wish == "1":
        with pytest.raises(ValueError, match="cu_seqlens ends at 9 but the row has 8 tokens"):
            check(BoundsOnGpu(), 8)
    else:
        monkeypatch.setattr(BoundsOnGpu, "tolist", lambda self: pytest.fail("values were read"))
        check(BoundsOnGpu(), 8)
