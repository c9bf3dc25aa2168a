"""Scales of a chunk's rows for the scans and gradients of the backward, and norms of its keys and queries (SM90).

G is the decay since the chunk's start in log2, |k| and |q| are 1 unless they are normalised, and b is beta, or WEAKEST_STRENGTH
where beta is closer to zero. The solve A of a chunk is, with X of `factor.py` and r the reference of a token,

    bfloat16     A[t, s] = b_t / |k_t| X[t, s] 2^(r_t - G_s)      what the forward has kept; r_t is R, or G_t + f_t
    float16      A[t, s] = X[t, s] 2^(G_t - G_s)                  errors as they are, since writes might leave the range

Its product W with values is an error e up to a scale of its row, whose inverse is `error`. What is written is beta e: the scales
that this needs are in those of what is done with W, and the gradient of beta is that of b times b, divided by it. A[t, t]
has been rounded, so all of them use it as it is, p times what it should be: where little else counts, e is v to the bit.

                 bfloat16                              float16
    decay        G                                     G
    strength     b                                     b
    since        2^(G - R), or UNFACTORED              UNFACTORED      with the next a pair's decay, norm and strength
    until        2^(R - G) b / |k|, or b / |k|         b / |k|
    error        2^(G - r) |k| / (b p)                 1
    read         2^G / |k|                             2^G / |k|
    write        2^(G_end - r) / p, 0 without beta     2^(G_end - G) / |k| beta
    query        scale 2^G / |q|                       scale 2^(G - lead) / |q|
    take         2^G / |k|                             2^(G - lead) / |k|
    reference    r                                     G               of pairs of tokens, as the next two:
    column       1 / p, 0 without beta                 beta / |k|      of the one that is read
    row          scale / |q|                           scale / |q|     of the one that reads

`lead` is G of the chunk's first token, without which the scans would leave the range of float16. A row behind the sequence's
end has beta 0 and the decay of the last token. This kernel and `factor.py` find r from the same float32 numbers.

Reads        q k [T, H, 128] if they are normalised, k too if bounds are wanted · g beta [T, HV] f32 · chunks [slots, 4]
Writes       row_scales [slots, HV, 9, C] f32 · pair_scales [slots, HV, 3, C] f32 · norms [slots, H, 2, C] f32 ·
             bound [slots, HV] f32, that of `_segments.py`, if wanted ·
             arrivals queue [slots * H] int32 of `_ready.py`, zeros

Blocks       slots * H, of four warps: half a warp a row of q or k, then a warp a value head of the key head in turns
"""

import tilelang.language as T

from ._rows import EIGHT, LANES, load_row, sum_over_row
from ._sm90 import (
    BACKWARD_ROWS,
    CHUNK,
    CHUNK_FIRST_TOKEN,
    CHUNK_ROWS,
    CHUNK_WORDS,
    HEAD_DIM,
    L2NORM_EPS,
    NORM_KEY,
    NORM_QUERY,
    NORM_VECTORS,
    PAIR_COLUMN,
    PAIR_REFERENCE,
    PAIR_ROW,
    PAIR_VECTORS,
    ROW_DECAY,
    ROW_ERROR,
    ROW_QUERY,
    ROW_READ,
    ROW_SINCE,
    ROW_STRENGTH,
    ROW_TAKE,
    ROW_UNTIL,
    ROW_VECTORS,
    ROW_WRITE,
    STRONGEST_GATE,
    UNCERTAIN,
    UNFACTORED,
    WARP,
    WEAKEST_STRENGTH,
    WRITE_SLACK,
)
from ._tile import Group, find_reference, fraction
from .factor import GROWTH, LOG2_E, load_gates, never_zero

FLOAT32 = "float32"
WARPS = BACKWARD_ROWS.threads // WARP
ROWS_AT_ONCE = BACKWARD_ROWS.threads // LANES
AHEAD = 4  # rows that a thread has on the way


class Tiles(Group):
    """Shared memory: norms of a chunk and, where a bound is wanted, |k^|^2."""

    suffix = "_smem"

    def __init__(self):
        self.norms = T.alloc_shared((NORM_VECTORS, CHUNK), FLOAT32)
        self.squares = T.alloc_shared((CHUNK,), FLOAT32)


@T.macro
def find_norms(dtype, t, vector, x, first, rows, head, use_l2norm, thread):
    """1 / |x| of the chunk's rows, or 1; |x^|^2 to t.squares, which the keys come to last."""
    packed, sums = T.alloc_local((AHEAD, EIGHT), dtype), T.alloc_local((AHEAD,), FLOAT32)
    norm = T.alloc_var(FLOAT32)
    lane = thread % LANES
    for turn in T.serial(CHUNK // ROWS_AT_ONCE // AHEAD):
        for i in T.unroll(AHEAD):
            row = (turn * AHEAD + i) * ROWS_AT_ONCE + thread // LANES
            load_row(x, first + T.min(row, rows - 1), head, lane * EIGHT, packed, i)
        for i in T.unroll(AHEAD):
            row = (turn * AHEAD + i) * ROWS_AT_ONCE + thread // LANES
            sums[i] = 0.0
            for e in T.unroll(EIGHT):
                sums[i] += T.cast(packed[i, e], FLOAT32) * T.cast(packed[i, e], FLOAT32)
            sum_over_row(sums, i)
            sums[i] = T.Select(row < rows, sums[i], 0.0)
            norm = T.Select(use_l2norm != 0, T.rsqrt(sums[i] + L2NORM_EPS), 1.0)
            if lane == 0:
                t.norms[vector, row] = norm
                t.squares[row] = sums[i] * norm * norm


@T.macro
def sum_gates(gate, strength, rows, lane):
    """gate <- decays of a chunk in log2, two tokens a lane of one warp, as in `factor.py`."""
    total, carried = T.alloc_var(FLOAT32), T.alloc_var(FLOAT32)
    for e in T.unroll(2):
        gate[e] = T.Select(2 * lane + e < rows, gate[e] * LOG2_E, 0.0)
        gate[e] = T.Select(gate[e] < STRONGEST_GATE, STRONGEST_GATE, gate[e])
        strength[e] = T.Select(2 * lane + e < rows, strength[e], 0.0)
    total = gate[0] + gate[1]
    for step in T.unroll(5):
        carried = T.shfl_up(total, 1 << step)
        total += T.Select(lane >= (1 << step), carried, 0.0)
    gate[0] = total - gate[1]
    gate[1] = total


@T.macro
def write_bound(t, strength, last, bound, slot, head, lane):
    """bound of the chunk for one value head, as in `factor.py`."""
    share = T.alloc_local((2,), FLOAT32)
    for e in T.unroll(2):
        share[e] = strength[e] * t.squares[2 * lane + e]
    contracts = T.all_sync(T.And(share[0] <= 2.0, share[1] <= 2.0))
    nearly = T.all_sync(T.And(share[0] <= 2.0 + WRITE_SLACK, share[1] <= 2.0 + WRITE_SLACK))
    if lane == 0:
        room = T.Select(contracts != 0, 0.0, T.Select(nearly != 0, GROWTH, UNCERTAIN))
        bound[slot, head] = last + room


@T.macro
def store_pair(out, slot, head, vector, values, lane):
    for e in T.vectorized(2):
        out[slot, head, vector, 2 * lane + e] = values[e]


@T.macro
def write_rows(dtype, t, gate, strength, row_scales, pair_scales, slot, head, scale, lane):
    """All scales of a chunk and value head, by a warp."""
    last, lead = T.alloc_var(FLOAT32), T.alloc_var(FLOAT32)
    reference, factored = T.alloc_local((1,), FLOAT32), T.alloc_local((1,), "int32")
    key, query, own, column, out = (T.alloc_local((2,), FLOAT32) for _ in range(5))
    last = T.shfl_sync(gate[1], WARP - 1)
    lead = T.shfl_sync(gate[0], 0) if dtype == "float16" else 0.0
    for e in T.vectorized(2):
        key[e] = t.norms[NORM_KEY, 2 * lane + e]
    for e in T.vectorized(2):
        query[e] = t.norms[NORM_QUERY, 2 * lane + e] * scale
    store_pair(row_scales, slot, head, ROW_DECAY, gate, lane)
    for e in T.unroll(2):
        out[e] = never_zero(strength[e])
    store_pair(row_scales, slot, head, ROW_STRENGTH, out, lane)
    reference[0] = last
    factored[0] = 0
    if dtype == "bfloat16":
        find_reference(dtype, last, gate[0], gate[1], reference, factored)
    for e in T.unroll(2):
        own[e] = T.Select(factored[0] != 0, T.exp2(reference[0] - gate[e]), 1.0) * (out[e] * key[e])
    store_pair(row_scales, slot, head, ROW_UNTIL, own, lane)
    for e in T.unroll(2):
        own[e] = T.Select(factored[0] != 0, T.exp2(gate[e] - reference[0]), UNFACTORED)
    store_pair(row_scales, slot, head, ROW_SINCE, own, lane)
    if dtype == "float16":
        for e in T.unroll(2):
            own[e] = gate[e]
            column[e] = strength[e] * key[e]
            out[e] = 1.0
    else:
        for e in T.unroll(2):
            own[e] = T.Select(factored[0] != 0, reference[0], gate[e] + fraction(last - gate[e]))
            column[e] = T.exp2(own[e] - gate[e]) * (key[e] * out[e])  # on the solve's diagonal, before it was rounded
            out[e] = 1.0 / T.cast(T.cast(column[e], dtype), FLOAT32)
            column[e] = T.Select(T.abs(strength[e]) < WEAKEST_STRENGTH, 0.0, column[e] * out[e])
    store_pair(row_scales, slot, head, ROW_ERROR, out, lane)
    store_pair(pair_scales, slot, head, PAIR_COLUMN, column, lane)
    for e in T.unroll(2):
        out[e] = T.exp2(last - own[e]) * column[e]
    store_pair(row_scales, slot, head, ROW_WRITE, out, lane)
    store_pair(pair_scales, slot, head, PAIR_ROW, query, lane)
    store_pair(pair_scales, slot, head, PAIR_REFERENCE, own, lane)
    for e in T.unroll(2):
        out[e] = T.exp2(gate[e]) * key[e]
    store_pair(row_scales, slot, head, ROW_READ, out, lane)
    for e in T.unroll(2):
        out[e] = T.exp2(gate[e] - lead) * key[e]
    store_pair(row_scales, slot, head, ROW_TAKE, out, lane)
    for e in T.unroll(2):
        out[e] = T.exp2(gate[e] - lead) * query[e]
    store_pair(row_scales, slot, head, ROW_QUERY, out, lane)


def build_backward_rows(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, places = T.dynamic("chunk_slots"), T.dynamic("places")
    q_t, q_h, k_t, k_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h"))

    @T.prim_func
    def backward_rows(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        g: T.Tensor((tokens, value_heads), FLOAT32),
        beta: T.Tensor((tokens, value_heads), FLOAT32),
        chunks: T.Tensor((chunk_slots, CHUNK_WORDS), "int32"),
        row_scales: T.Tensor((chunk_slots, value_heads, ROW_VECTORS, CHUNK), FLOAT32),
        pair_scales: T.Tensor((chunk_slots, value_heads, PAIR_VECTORS, CHUNK), FLOAT32),
        norms: T.Tensor((chunk_slots, key_heads, NORM_VECTORS, CHUNK), FLOAT32),
        bound: T.Tensor((chunk_slots, value_heads), FLOAT32),
        arrivals: T.Tensor((places,), "int32"),
        queue: T.Tensor((places,), "int32"),
        scale: T.float32,
        use_l2norm: T.int32,
        writes_bound: T.int32,
    ):
        with T.Kernel(chunk_slots * key_heads, threads=BACKWARD_ROWS.threads) as block:
            T.assume(q_t % EIGHT == 0)
            T.assume(q_h % EIGHT == 0)
            T.assume(k_t % EIGHT == 0)
            T.assume(k_h % EIGHT == 0)
            t = Tiles()
            gate, strength = T.alloc_local((2,), FLOAT32), T.alloc_local((2,), FLOAT32)
            thread = T.get_thread_binding()
            lane, warp = thread % WARP, thread // WARP
            slot, key_head, head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            group, first, rows = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            slot, key_head = T.truncdiv(block, key_heads), T.truncmod(block, key_heads)
            group = T.truncdiv(value_heads, key_heads)
            first, rows = chunks[slot, CHUNK_FIRST_TOKEN], chunks[slot, CHUNK_ROWS]
            if thread == 0:
                arrivals[block] = 0
                queue[block] = 0
            if rows > 0:
                if use_l2norm != 0:
                    find_norms(dtype, t, NORM_QUERY, q, first, rows, key_head, use_l2norm, thread)
                else:
                    if thread < CHUNK:
                        t.norms[NORM_QUERY, thread] = 1.0
                        t.norms[NORM_KEY, thread] = 1.0
                T.sync_threads()  # the sums of queries may not overtake those of keys
                if T.Or(use_l2norm != 0, writes_bound != 0):
                    find_norms(dtype, t, NORM_KEY, k, first, rows, key_head, use_l2norm, thread)
                T.sync_threads()
                for vector in T.unroll(NORM_VECTORS):
                    if thread < CHUNK:
                        norms[slot, key_head, vector, thread] = t.norms[vector, thread]
                for turn in T.serial(T.truncdiv(group - warp + WARPS - 1, WARPS)):
                    head = key_head * group + turn * WARPS + warp
                    load_gates(gate, strength, g, beta, head, first, rows, lane)
                    sum_gates(gate, strength, rows, lane)
                    if writes_bound != 0:
                        write_bound(t, strength, T.shfl_sync(gate[1], WARP - 1), bound, slot, head, lane)
                    write_rows(dtype, t, gate, strength, row_scales, pair_scales, slot, head, scale, lane)

    return backward_rows
