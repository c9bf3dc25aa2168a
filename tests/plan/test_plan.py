"""How calls are cut: pure functions of shapes, checked over all small ones."""

from itertools import product

import pytest
import torch

LENGTHS = (1, 4, 16, 32, 64)


@pytest.fixture
def plan(part):
    return part("gated_delta_rule.plan")


def test_short_calls_use_chunks_not_much_longer_than_themselves(plan):
    lengths = [plan.chunk_length(tokens, 64) for tokens in (0, 1, 2, 4, 5, 16, 17, 32, 33, 64, 65, 10**6)]
    assert lengths == [1, 1, 4, 4, 16, 16, 32, 32, 64, 64, 64, 64]


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_no_chunk_is_longer_than_asked_for(plan, chunk_size):
    for tokens in range(200):
        length = plan.chunk_length(tokens, chunk_size)
        assert length in LENGTHS and length <= chunk_size
        assert length == chunk_size or tokens <= length


def test_dense_rows_have_as_many_chunks_as_hold_their_tokens(plan):
    for tokens, length in product(range(200), LENGTHS):
        chunks = plan.num_chunks(tokens, None, length)
        assert (chunks - 1) * length < tokens <= chunks * length or tokens == chunks == 0


def test_the_bound_of_packed_rows_holds_for_every_packing(plan):
    """Without a look at the lengths: never too few chunks, and less than one per sequence too many."""
    for length in (1, 2, 3):
        for lengths in product(range(5), repeat=3):
            needed = sum(-(-n // length) for n in lengths)
            bound = plan.num_chunks(sum(lengths), 3, length)
            assert needed <= bound <= needed + 3


def test_the_bound_is_reached(plan):
    assert plan.num_chunks(3, 3, 64) == 3 == sum(-(-n // 64) for n in (1, 1, 1))
    assert plan.num_chunks(64 + 65, 2, 64) == 4
    assert plan.num_chunks(0, 5, 64) == 0 and plan.num_chunks(7, 0, 64) == 0


def test_slabs_cover_the_chunks_and_stay_near_their_size(plan):
    for lane_heads in (1, 2, 7, 64, 511, 512, 513, 10**5):
        per_slab = plan.slab_chunks(lane_heads)
        assert per_slab >= 1
        assert per_slab == 1 or (per_slab - 1) * lane_heads <= plan.SLAB_CHUNK_HEADS
        for chunks in (0, 1, per_slab - 1, per_slab, per_slab + 1, 3 * per_slab + 1):
            slabs = plan.num_slabs(chunks, lane_heads)
            assert (slabs - 1) * per_slab < chunks <= slabs * per_slab or slabs == chunks == 0


def all_packings(tokens: int, sequences: int):
    """Every cu_seqlens of `sequences` sequences within `tokens`."""
    for inner in product(range(tokens + 1), repeat=sequences):
        if list(inner) == sorted(inner):
            yield [0, *inner]


def test_every_packing_puts_each_token_into_one_chunk_of_its_sequence(part):
    """All packings of up to three sequences in a row of five tokens, with chunks of two."""
    chunks = part("gated_delta_rule.chunks")
    for sequences in range(4):
        for bounds in all_packings(5, sequences):
            packed = chunks.PackedChunks(torch.tensor(bounds), 5, 2)
            rows = packed.token.view(-1, 2).tolist()
            held = [token for row in rows for token in row if token < 5]
            assert held == list(range(bounds[-1]))  # in order, once each, and none behind the last bound
            for row in rows:
                owners = {sum(token >= bound for bound in bounds[1:]) for token in row if token < 5}
                assert len(owners) <= 1, f"{bounds}: a chunk holds tokens of two sequences"
            count = packed.count
            assert all(token == 5 for row in rows[count:] for token in row)


def test_the_chunks_of_a_sequence_name_where_it_starts_and_ends(part):
    chunks = part("gated_delta_rule.chunks")
    packed = chunks.PackedChunks(torch.tensor([0, 3, 3, 4, 9]), 10, 2)
    nobody = 4
    assert packed.count == 6
    assert packed.first.tolist()[:6] == [0, nobody, 2, 3, nobody, nobody]
    assert packed.last.tolist()[:6] == [nobody, 0, 2, nobody, nobody, 3]
    assert all(name == nobody for name in packed.first.tolist()[6:] + packed.last.tolist()[6:])


@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 9]], ids=["dense", "packed"])
def test_what_is_stored_is_what_was_loaded(part, bounds):
    """Loading and storing are inverse on tokens, and leave the others 0."""
    chunks = part("gated_delta_rule.chunks")
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    batch = 2 if bounds is None else 1
    cut = chunks.make_chunks(batch, 70, cu_seqlens, 16)
    x = torch.randn(batch, 70, 3, 5)
    out = cut.zeros_like(x)
    for start in range(0, cut.count, 2):
        stop = min(start + 2, cut.count)
        cut.store(out, cut.load(x, start, stop), start, stop)
    kept = 70 if bounds is None else bounds[-1]
    assert torch.equal(cut.result(out)[:, :kept], x[:, :kept])
    assert cut.result(out)[:, kept:].count_nonzero() == 0


def test_residuals_have_the_shape_that_tracing_expects(kernel, part):
    shape_of = part("gated_delta_rule.torch_path").residual_shape
    for batch, tokens, bounds in ((2, 0, None), (3, 70, None), (1, 300, [0, 5, 5, 299]), (1, 0, [0, 0])):
        q, v = torch.randn(batch, tokens, 1, 4), torch.randn(batch, tokens, 2, 3)
        gate = torch.zeros(batch, tokens, 2)
        cu_seqlens = None if bounds is None else torch.tensor(bounds)
        result = kernel.chunk_gated_delta_rule_fwd(q, q, v, gate, gate, cu_seqlens=cu_seqlens, chunk_size=16)
        assert list(result.residuals.shape) == shape_of(q, v, cu_seqlens, 16)


def test_a_backward_in_ranges_halves_the_chunks_of_large_calls_that_fill_an_h200(plan):
    def ranges(tokens, sequences, heads, name="auto"):
        return plan.range_slots(tokens, sequences, heads, name)

    assert ranges(32768, 1, 32) == 257 and ranges(8 * 4096, 8, 32) == 260 and ranges(32768, 1, 64) == 257
    assert ranges(32768, 1, 16) == ranges(8192, 1, 64) == ranges(8192, 8, 32) == 0, "states of up to 768 MB"
    assert ranges(32768, 1, 48) == ranges(32768, 1, 40) == 0, "rounds of blocks that are not full"
    assert ranges(32768, 1, 32, "off") == ranges(32768, 1, 32, "invariant") == 0
    assert ranges(64 * 600, 600, 32) == 0 < ranges(65 * 600, 600, 32), "many short sequences"
    assert ranges(0, 3, 64) == ranges(0, 0, 64) == 0


def test_two_ranges_hold_every_slot(plan):
    for tokens in range(25_000, 60_000, 4321):
        for sequences in (1, 2, 7):
            slots = tokens // 64 + sequences
            assert plan.range_slots(tokens, sequences, 128, "auto") in (slots // 2, (slots + 1) // 2)
