"""What the backward's scans need of a chunk: its solve, its scores and scales of its rows, one chunk a block (SM90).

With the chunk's normalised keys and queries k^ = k / |k|, q^ = q / |q|, G the decay since the chunk's start in log2 and
D[t, s] = 2^(G_t - G_s) for s <= t, else 0:

    solve[t, s]  = X[t, s] D[t, s],  X = (I + tril(K^ K^^T, -1) diag(beta))^-1      errors E = solve (V - 2^G K^ S)
    scores[t, s] = scale (q^_t . k^_s) D[t, s] beta_s                               what token t reads of error s
    rows         decay G · strength beta · read 2^G / |k| · write beta 2^(G_end - G) / |k| · query scale 2^(G - lead) / |q|
                 · take 2^(G - lead) / |k|
    norms        1 / |k| and 1 / |q|, or 1

`lead` is G of the chunk's first token in float16, whose range the scan must not leave, and 0 in bfloat16. Only decays from an
earlier to a later token are formed. A row behind the sequence's end has beta 0 and the decay of the last token.

Reads        q k [T, H, 128] · g beta [T, HV] f32 · chunks [slots, 4]
Writes       solve scores [slots, HV, C, C] · rows [slots, HV, 6, C] f32 · norms [slots, H, 2, C] f32 ·
             bound [slots, HV] f32, that of `_segments.py`, if sequences are cut

Threads                           per block                per pair of value heads
warp 0 (part 0 of side 0)         loads keys, queries      head 2 i: X[:32, :32], X[32:48, :32], rows to 31 of both tiles
warp 1 (part 1 of side 0)         gates of head 0          X[32:, 32:], X[48:, :32], the other rows, gates of head 2 i + 2
warps 2, 3 (side 1)               gates of head 1          the same of head 2 i + 1
all                               K^ K^^T, Q^ K^^T

The products lie where the queries were and the solves where the keys were, so that five blocks fit in an SM: a block
waits for most of its life, and only other blocks fill it (docs/design/2026-11-29-factor.md).

Barrier       set by        waited on by     arrivals
token_ready   warp 0        all              1
1 + side      named: the two warps of a side, before and after X[32:, :32]
"""

import tilelang.language as T

from ._error_solve import invert_leaf, join_blocks, join_leaves, join_row
from ._sm90 import (
    BACKWARD_FACTOR,
    CHUNK,
    CHUNK_FIRST_TOKEN,
    CHUNK_ROWS,
    CHUNK_WORDS,
    HEAD_DIM,
    L2NORM_EPS,
    LEAF,
    NORM_KEY,
    NORM_QUERY,
    NORM_VECTORS,
    ROW_DECAY,
    ROW_QUERY,
    ROW_READ,
    ROW_STRENGTH,
    ROW_TAKE,
    ROW_VECTORS,
    ROW_WRITE,
    STRONGEST_GATE,
    VANISHING,
    WARP,
)
from ._solve import HALF
from ._tile import Group, alloc_barriers, arrive, wait
from .factor import EIGHT, LINES, LOG2_E, clear_above, load_gates, meet, place_of_leaf_entry, take_diagonal, write_bound

SIDES = BACKWARD_FACTOR.sides
SIDE = BACKWARD_FACTOR.warps_per_side * WARP  # threads
FLOAT32 = "float32"


class Tiles(Group):
    """Shared memory: keys and queries, leaves of K^ K^^T in float32, gates of two rounds.

    Once the products are there, the keys' place takes X as float16, that of side s in columns 64 s to 64 s + 63, and the
    queries' place K^ K^^T as float16, with the scores without gates behind it.
    """

    suffix = "_smem"

    def __init__(self, dtype):
        gates = (2, SIDES, CHUNK)
        self.k = T.alloc_shared((CHUNK, HEAD_DIM), dtype)
        self.q = T.alloc_shared((CHUNK, HEAD_DIM), dtype)
        self.leaves = T.alloc_shared((CHUNK // LEAF, LEAF * LEAF + BACKWARD_FACTOR.leaf_padding), FLOAT32)
        self.norms = T.alloc_shared((NORM_VECTORS, CHUNK), FLOAT32)
        self.squares = T.alloc_shared((CHUNK,), FLOAT32)  # |k^|^2
        self.beta = T.alloc_shared(gates, FLOAT32)
        self.decay = T.alloc_shared(gates, FLOAT32)


@T.macro
def sum_gates(t, buffer, side, gate, strength, rows, lane):
    """gate <- decays of a chunk in log2, two tokens a lane of one warp; they and the strengths to shared memory."""
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
    for e in T.vectorized(2):
        t.decay[buffer, side, 2 * lane + e] = gate[e]
    for e in T.vectorized(2):
        t.beta[buffer, side, 2 * lane + e] = strength[e]


@T.macro
def write_rows(dtype, t, gate, strength, rows_out, slot, head, scale, lane):
    """The scales of a chunk's rows, from what `sum_gates` left in registers."""
    last, lead = T.alloc_var(FLOAT32), T.alloc_var(FLOAT32)
    key, query = T.alloc_local((2,), FLOAT32), T.alloc_local((2,), FLOAT32)
    last = T.shfl_sync(gate[1], WARP - 1)
    lead = T.shfl_sync(gate[0], 0) if dtype == "float16" else 0.0
    for e in T.vectorized(2):
        key[e] = t.norms[NORM_KEY, 2 * lane + e]
    for e in T.vectorized(2):
        query[e] = t.norms[NORM_QUERY, 2 * lane + e]
    for e in T.vectorized(2):
        rows_out[slot, head, ROW_DECAY, 2 * lane + e] = gate[e]
    for e in T.vectorized(2):
        rows_out[slot, head, ROW_STRENGTH, 2 * lane + e] = strength[e]
    for e in T.vectorized(2):
        rows_out[slot, head, ROW_READ, 2 * lane + e] = T.exp2(gate[e]) * key[e]
    for e in T.vectorized(2):
        rows_out[slot, head, ROW_WRITE, 2 * lane + e] = T.exp2(last - gate[e]) * key[e] * strength[e]
    for e in T.vectorized(2):
        rows_out[slot, head, ROW_QUERY, 2 * lane + e] = T.exp2(gate[e] - lead) * query[e] * scale
    for e in T.vectorized(2):
        rows_out[slot, head, ROW_TAKE, 2 * lane + e] = T.exp2(gate[e] - lead) * key[e]


@T.macro
def query_norms(dtype, t, use_l2norm, rows, thread):
    """1 / |q|, or 1; a pair of lanes has a query, and each sums half of its squares. No token: as of zeros."""
    packed, squares = T.alloc_local((EIGHT,), dtype), T.alloc_local((1,), FLOAT32)
    row, part = thread // 2, thread % 2
    if use_l2norm != 0:
        squares[0] = 0.0
        for turn in T.serial(HEAD_DIM // 2 // EIGHT):
            group = turn ^ (part * 4)  # the two lanes of a pair read different banks
            for e in T.vectorized(EIGHT):
                packed[e] = t.q[row, part * (HEAD_DIM // 2) + group * EIGHT + e]
            for e in T.unroll(EIGHT):
                squares[0] += T.cast(packed[e], FLOAT32) * T.cast(packed[e], FLOAT32)
        squares[0] += T.shfl_xor(squares[0], 1)
        squares[0] = T.rsqrt(T.Select(row < rows, squares[0], 0.0) + L2NORM_EPS)
    else:
        squares[0] = 1.0
    if part == 0:
        t.norms[NORM_QUERY, row] = squares[0]


@T.macro
def keep_products(t, products, KK, QK, square, scale, use_l2norm, thread):
    """K^ K^^T and scale Q^ K^^T to shared memory as float16, the leaves of the first in float32."""
    T.clear(square)
    take_diagonal(KK, square)
    if use_l2norm != 0:
        for a, c in T.Parallel(CHUNK, LEAF):
            if a % LEAF == c:
                t.norms[NORM_KEY, a] = T.rsqrt(square[a, c] + L2NORM_EPS)
    else:
        if thread < CHUNK:
            t.norms[NORM_KEY, thread] = 1.0
    T.sync_threads()  # all norms are there, and the products have been made of the tiles
    if use_l2norm != 0:
        for a, c in T.Parallel(CHUNK, CHUNK):
            KK[a, c] *= t.norms[NORM_KEY, a] * t.norms[NORM_KEY, c]
        take_diagonal(KK, square)
    for a, c in T.Parallel(CHUNK, CHUNK):
        products[a, c] = T.cast(KK[a, c], "float16")
    for a, c in T.Parallel(CHUNK, LEAF):
        t.leaves[a // LEAF, (a % LEAF) * LEAF + c] = square[a, c]
        if a % LEAF == c:
            t.squares[a] = square[a, c]
    for a, c in T.Parallel(CHUNK, CHUNK):
        products[a, CHUNK + c] = T.cast(QK[a, c] * (t.norms[NORM_QUERY, a] * scale) * t.norms[NORM_KEY, c], "float16")


@T.macro
def write_tiles(dtype, t, buffer, side, X, products, solve, scores, slot, head, part, lane):
    """Half of the rows of the solve and of the scores, gated, in whole lines of 128 bytes."""
    column = (lane % EIGHT) * EIGHT
    top = part * HALF + lane // EIGHT
    strength, decays = T.alloc_local((EIGHT,), FLOAT32), T.alloc_local((EIGHT,), FLOAT32)
    entry, score = T.alloc_local((EIGHT,), "float16"), T.alloc_local((EIGHT,), "float16")
    solve_out, score_out = T.alloc_local((EIGHT,), FLOAT32), T.alloc_local((EIGHT,), FLOAT32)
    decay, since = T.alloc_var(FLOAT32), T.alloc_var(FLOAT32)
    for e in T.vectorized(EIGHT):
        strength[e] = t.beta[buffer, side, column + e]
    for e in T.vectorized(EIGHT):
        decays[e] = t.decay[buffer, side, column + e]
    for turn in T.serial(HALF // LINES):
        row = top + turn * LINES
        decay = t.decay[buffer, side, row]
        for e in T.vectorized(EIGHT):
            entry[e] = X[row, side * CHUNK + column + e]
        for e in T.vectorized(EIGHT):
            score[e] = products[row, CHUNK + column + e]
        for e in T.unroll(EIGHT):
            since = T.exp2(T.Select(row >= column + e, decay - decays[e], VANISHING))
            solve_out[e] = T.cast(entry[e], FLOAT32) * since
            score_out[e] = T.cast(score[e], FLOAT32) * (since * strength[e])
        for e in T.vectorized(EIGHT):
            solve[slot, head, row, column + e] = T.cast(solve_out[e], dtype)
        for e in T.vectorized(EIGHT):
            scores[slot, head, row, column + e] = T.cast(score_out[e], dtype)


@T.macro
def solve_heads(
    dtype, t, X, products, gate, strength, g, beta, solve, scores, rows_out, bound, has_cuts, slot, head, group, first, rows,
    scale, side, part, own,
):  # fmt: skip
    """Value heads head + side, head + side + SIDES, ... of the key head; gates are loaded a round ahead."""
    top, token, lane = side * CHUNK, part * HALF, T.alloc_var("int32")
    for turn in T.serial(T.truncdiv(group + SIDES - 1 - side, SIDES)):
        lane = T.shfl_sync(own, own)  # the compiler would compute all addresses once and keep them in registers
        buffer = turn % 2
        current = head + turn * SIDES + side
        loads_next = T.And(part == 1, turn * SIDES + side + SIDES < group)
        if loads_next:
            load_gates(gate, strength, g, beta, current + SIDES, first, rows, lane)
        invert_leaf(t.leaves, t.beta, buffer, side, X, top, part, lane)
        T.sync_warp()
        join_leaves(products, X, t.beta, buffer, side, top, token, lane)
        T.sync_warp()
        join_blocks(products, X, t.beta, buffer, side, top, token, lane)
        meet(side)
        join_row(products, X, t.beta, buffer, side, top, part, lane)
        if loads_next:
            sum_gates(t, 1 - buffer, side, gate, strength, rows, lane)
            write_rows(dtype, t, gate, strength, rows_out, slot, current + SIDES, scale, lane)
        meet(side)
        write_tiles(dtype, t, buffer, side, X, products, solve, scores, slot, current, part, lane)
        if part == 0:
            if has_cuts != 0:
                write_bound(t, buffer, side, bound, slot, current, lane)
        T.sync_warp()


def build_backward_factor(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots = T.dynamic("chunk_slots")
    q_t, q_h, k_t, k_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h"))

    @T.prim_func
    def backward_factor(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        g: T.Tensor((tokens, value_heads), FLOAT32),
        beta: T.Tensor((tokens, value_heads), FLOAT32),
        chunks: T.Tensor((chunk_slots, CHUNK_WORDS), "int32"),
        solve: T.Tensor((chunk_slots, value_heads, CHUNK, CHUNK), dtype),
        scores: T.Tensor((chunk_slots, value_heads, CHUNK, CHUNK), dtype),
        row_scales: T.Tensor((chunk_slots, value_heads, ROW_VECTORS, CHUNK), FLOAT32),
        norms: T.Tensor((chunk_slots, key_heads, NORM_VECTORS, CHUNK), FLOAT32),
        bound: T.Tensor((chunk_slots, value_heads), FLOAT32),
        scale: T.float32,
        use_l2norm: T.int32,
        has_cuts: T.int32,
    ):
        with T.Kernel(chunk_slots * key_heads, threads=BACKWARD_FACTOR.threads) as block:
            T.annotate_min_blocks_per_sm(BACKWARD_FACTOR.blocks_per_sm)
            t = Tiles(dtype)
            X, products = (T.view(tile, (CHUNK, HEAD_DIM), "float16") for tile in (t.k, t.q))
            KK, QK = T.alloc_fragment((CHUNK, CHUNK), FLOAT32), T.alloc_fragment((CHUNK, CHUNK), FLOAT32)
            square = T.alloc_fragment((CHUNK, LEAF), FLOAT32)
            T.annotate_layout({square: T.Fragment((CHUNK, LEAF), forward_fn=place_of_leaf_entry)})
            gate, strength = T.alloc_local((2,), FLOAT32), T.alloc_local((2,), FLOAT32)
            token_ready = alloc_barriers(1)
            thread = T.get_thread_binding()
            lane, part, side = thread % WARP, (thread // WARP) % 2, thread // SIDE
            slot, key_head, head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            group, first, rows = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            slot, key_head = T.truncdiv(block, key_heads), T.truncmod(block, key_heads)
            group = T.truncdiv(value_heads, key_heads)
            first, rows = chunks[slot, CHUNK_FIRST_TOKEN], chunks[slot, CHUNK_ROWS]
            head = key_head * group
            if rows > 0:
                if thread < WARP:
                    T.tma_copy(k[first : first + CHUNK, key_head, :], t.k, barrier=token_ready[0])
                    T.tma_copy(q[first : first + CHUNK, key_head, :], t.q, barrier=token_ready[0])
                    arrive(token_ready, 0, thread)
                has_first = T.And(part == 1, side < group)
                if has_first:
                    load_gates(gate, strength, g, beta, head + side, first, rows, lane)
                wait(token_ready, 0, 0)
                query_norms(dtype, t, use_l2norm, rows, thread)
                T.wgmma_gemm(t.k, t.k, KK, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(t.q, t.k, QK, transpose_B=True, clear_accum=True)
                if has_first:
                    sum_gates(t, 0, side, gate, strength, rows, lane)
                T.wait_wgmma(0)
                if rows < CHUNK:
                    for a, c in T.Parallel(CHUNK, CHUNK):
                        KK[a, c] = T.Select(T.max(a, c) < rows, KK[a, c], 0.0)
                    for a, c in T.Parallel(CHUNK, CHUNK):
                        QK[a, c] = T.Select(T.max(a, c) < rows, QK[a, c], 0.0)
                keep_products(t, products, KK, QK, square, scale, use_l2norm, thread)
                clear_above(dtype, t, side, part, lane)
                T.sync_threads()
                for vector in T.unroll(NORM_VECTORS):
                    if thread < CHUNK:
                        norms[slot, key_head, vector, thread] = t.norms[vector, thread]
                if has_first:
                    write_rows(dtype, t, gate, strength, row_scales, slot, head + side, scale, lane)
                solve_heads(
                    dtype, t, X, products, gate, strength, g, beta, solve, scores, row_scales, bound, has_cuts, slot, head,
                    group, first, rows, scale, side, part, lane,
                )  # fmt: skip

    return backward_factor
