"""Gate sums, key norms and the chunk's solve of every value head of a key head, one chunk a block (SM90).

With K K^T of the chunk's (normalised) keys, L = tril(diag(beta) K K^T, -1), A = (I + L)^-1 and G the decay since the
chunk's start, the recurrence needs A[t, s] e^(G_t - G_s) beta_s. The gate is a similarity and leaves the inverse, so A is
free of it. What is written is scaled once more so that its product serves the state as it is (`recurrence.py`):

    factored chunk   operand[t, s] = norm_t A[t, s] beta_s 2^(G_end - G_s)              decay to the chunk's end
    other chunks     operand[t, s] = norm_t A[t, s] beta_s 2^(G_t + f_t - G_s)          f_t the fraction of G_end - G_t

Only decays from an earlier to a later token are formed. A row behind the sequence's end is a zero row of L with beta 0.

The bound of a chunk is log2 of a norm that the product of its transitions does not exceed (`_segments.py`): G_end, plus
room for keys a little longer than 1, or UNCERTAIN where beta |k|^2 may exceed 2.

Reads        k [T, H, 128] · g beta [T, HV] f32 · cu_seqlens as 32-bit words
Writes       operand [slots, HV, C, C] · decay [slots, HV, C] f32, G in log2 · key_norm [slots, H, C] f32, 1 / |k| or 1
             bound [slots, HV] f32, if there are segments · zeros to rows of o below cu_seqlens[0] and from cu_seqlens[N] on,
             and to `ready` of the segments

Blocks       slots * H: a chunk slot and key head each, if the slot has a chunk; then ZERO_BLOCKS: rows of o and flags in turn

Threads                           per block                per pair of value heads
warp 0 (part 0 of side 0)         loads the keys           half of the solve and of the operand of head 2 i
warp 1 (part 1 of side 0)         gates of head 0          the other half, then the gates of head 2 i + 2
warps 2, 3 (side 1)               gates of head 1          the same of head 2 i + 1

Barrier       set by        waited on by     arrivals
key_ready     warp 0        all              1
1 + side      named: the two warps of a side, between the steps of the solve
"""

import tilelang.language as T

from ._segments import find_sequence, offset
from ._sm90 import (
    CHUNK,
    FACTOR,
    HEAD_DIM,
    L2NORM_EPS,
    MISSING,
    SOLVE_BLOCK,
    STRONGEST_GATE,
    UNCERTAIN,
    VANISHING,
    WARP,
    WRITE_SLACK,
)
from ._solve import invert_block, join_blocks, join_row, skew
from ._tile import Group, arrive, fraction, is_factored, linear, wait

LOG2_E = 1.4426950408889634
GROWTH = CHUNK * WRITE_SLACK * LOG2_E  # of a chunk whose writes use the slack
ZERO_BLOCKS = 128  # about one an SM
WORDS_PER_HEAD = HEAD_DIM // 2  # two 16-bit values a word
SIDES = FACTOR.sides
SIDE = FACTOR.warps_per_side * WARP  # threads
EIGHT = 8  # 16-bit values of a 16-byte access
LINES = WARP // EIGHT  # rows of 128 bytes that a warp writes at once


class Tiles(Group):
    """Shared memory: the keys, K K^T as float16 and its diagonal blocks, one solve a side, gates of two rounds."""

    suffix = "_smem"

    def __init__(self, dtype):
        padded, gates = CHUNK + FACTOR.row_padding, (2, SIDES, CHUNK)
        self.k = T.alloc_shared((CHUNK, HEAD_DIM), dtype)
        self.kk = T.alloc_shared((CHUNK, padded), "float16")
        self.kk_columns = T.alloc_shared((CHUNK, SOLVE_BLOCK + FACTOR.block_padding), "float32")
        self.solve = [T.alloc_shared((CHUNK, padded), "float16") for _ in range(SIDES)]
        self.norm = T.alloc_shared((CHUNK,), "float32")
        self.squares = T.alloc_shared((CHUNK,), "float32")  # of the (normalised) keys
        self.beta = T.alloc_shared(gates, "float32")
        self.strength = T.alloc_shared(gates, "float16")  # beta as a factor of mma operands
        self.decay = T.alloc_shared(gates, "float32")
        self.row_decay = T.alloc_shared(gates, "float32")
        self.column_scale = T.alloc_shared(gates, "float32")
        self.factored = T.alloc_shared((2, SIDES), "int32")


@T.macro
def load_gates(gate, strength, g, beta, head, first, rows, lane):
    """g and beta of tokens 2 lane and 2 lane + 1; behind the end, of the last token."""
    for e in T.unroll(2):
        row = first + T.min(2 * lane + e, rows - 1)
        gate[e] = g[row, head]
        strength[e] = beta[row, head]


@T.macro
def sum_gates(dtype, t, buffer, side, gate, strength, decay, slot, head, rows, lane):
    """Decays of a chunk, in log2, and what follows from them; one warp, two tokens a lane."""
    total, carried, last = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
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
    last = T.shfl_sync(total, WARP - 1)
    for e in T.vectorized(2):
        t.decay[buffer, side, 2 * lane + e] = gate[e]
    for e in T.vectorized(2):
        decay[slot, head, 2 * lane + e] = gate[e]
    for e in T.vectorized(2):
        t.beta[buffer, side, 2 * lane + e] = strength[e]
    for e in T.vectorized(2):
        t.strength[buffer, side, 2 * lane + e] = T.cast(strength[e], "float16")
    for e in T.vectorized(2):
        t.row_decay[buffer, side, 2 * lane + e] = gate[e] + fraction(last - gate[e])
    for e in T.vectorized(2):
        t.column_scale[buffer, side, 2 * lane + e] = strength[e] * T.exp2(last - gate[e])
    factored = is_factored(dtype, last, gate[0], gate[1])
    if lane == 0:
        t.factored[buffer, side] = factored


@T.macro
def multiply_keys(t, KK, use_l2norm, thread):
    """K K^T to shared memory: normalised if asked, as float16, and its diagonal blocks transposed in float32."""
    if thread < CHUNK:
        t.norm[thread] = 1.0
    if use_l2norm != 0:
        T.sync_threads()
        for a, c in T.Parallel(CHUNK, CHUNK):
            if a // SOLVE_BLOCK == c // SOLVE_BLOCK:
                if a == c:
                    t.norm[a] = T.rsqrt(KK[a, c] + L2NORM_EPS)
        T.sync_threads()
        for a, c in T.Parallel(CHUNK, CHUNK):
            KK[a, c] *= t.norm[a] * t.norm[c]
    for a, c in T.Parallel(CHUNK, CHUNK):
        t.kk[a, c] = T.cast(KK[a, c], "float16")
    for a, c in T.Parallel(CHUNK, CHUNK):
        if a // SOLVE_BLOCK == c // SOLVE_BLOCK:
            t.kk_columns[c, a % SOLVE_BLOCK + skew(c // SOLVE_BLOCK)] = KK[a, c]
            if a == c:
                t.squares[a] = KK[a, c]


@T.macro
def write_bound(t, buffer, side, bound, slot, head, lane):
    """bound of the chunk for one value head; |k|^2 is on the diagonal of K K^T."""
    strength = T.alloc_local((2,), "float32")
    for e in T.unroll(2):
        row = e * WARP + lane
        strength[e] = t.beta[buffer, side, row] * t.squares[row]
    contracts = T.all_sync(T.And(strength[0] <= 2.0, strength[1] <= 2.0))
    nearly = T.all_sync(T.And(strength[0] <= 2.0 + WRITE_SLACK, strength[1] <= 2.0 + WRITE_SLACK))
    if lane == 0:
        room = T.Select(contracts != 0, 0.0, T.Select(nearly != 0, GROWTH, UNCERTAIN))
        bound[slot, head] = t.decay[buffer, side, CHUNK - 1] + room


@T.macro
def zero_rows(o_words, first, end, row_words, part, thread):
    """Rows first + part, first + part + ZERO_BLOCKS, ... below `end`."""
    for turn in T.serial(T.truncdiv(end - first - part + ZERO_BLOCKS - 1, ZERO_BLOCKS)):
        for step in T.serial(T.truncdiv(row_words + FACTOR.threads - 1, FACTOR.threads)):
            if step * FACTOR.threads + thread < row_words:
                o_words[first + part + turn * ZERO_BLOCKS, step * FACTOR.threads + thread] = 0


@T.macro
def clear_flags(ready, segment_rows, part, thread):
    """Flags of the recurrence's blocks, which say what is there: nothing yet."""
    flags, step = 2 * segment_rows, ZERO_BLOCKS * FACTOR.threads
    for turn in T.serial(T.truncdiv(flags + step - 1, step)):
        flag = turn * step + part * FACTOR.threads + thread
        if flag < flags:
            ready[T.truncdiv(flag, 2), T.truncmod(flag, 2)] = MISSING


@T.macro
def write_row(dtype, t, tile, scale, operand, slot, head, row, column):
    """Eight entries of a row of the operand."""
    entry, out = T.alloc_local((EIGHT,), "float16"), T.alloc_local((EIGHT,), dtype)
    row_norm = T.alloc_var("float32")
    row_norm = t.norm[row]
    for e in T.vectorized(EIGHT):
        entry[e] = tile[row, column + e]
    for e in T.unroll(EIGHT):
        out[e] = T.cast(T.cast(entry[e], "float32") * scale[e] * row_norm, dtype)
    for e in T.vectorized(EIGHT):
        operand[slot, head, row, column + e] = out[e]


@T.macro
def write_operand(dtype, t, buffer, side, tile, operand, slot, head, part, lane):
    """Half of the operand's rows, in whole lines of 128 bytes: shorter segments made the L1 the bottleneck."""
    column = (lane % EIGHT) * EIGHT
    top = part * (CHUNK // 2) + lane // EIGHT
    scale, strength = T.alloc_local((EIGHT,), "float32"), T.alloc_local((EIGHT,), "float32")
    decays = T.alloc_local((EIGHT,), "float32")
    if t.factored[buffer, side] != 0:
        for e in T.vectorized(EIGHT):
            scale[e] = t.column_scale[buffer, side, column + e]
        for turn in T.unroll(CHUNK // 2 // LINES):
            write_row(dtype, t, tile, scale, operand, slot, head, top + turn * LINES, column)
    else:
        for e in T.vectorized(EIGHT):
            strength[e] = t.beta[buffer, side, column + e]
        for e in T.vectorized(EIGHT):
            decays[e] = t.decay[buffer, side, column + e]
        for turn in T.serial(CHUNK // 2 // LINES):
            row = top + turn * LINES
            for e in T.unroll(EIGHT):
                since = T.Select(row >= column + e, t.row_decay[buffer, side, row] - decays[e], VANISHING)
                scale[e] = strength[e] * T.exp2(since)
            write_row(dtype, t, tile, scale, operand, slot, head, row, column)


@T.macro
def solve_head(dtype, t, buffer, side, tile, operand, bound, segment_rows, slot, head, part, lane):
    """The solve of one value head by the two warps of a side, and the operand from it."""
    invert_block(t.kk_columns, t.beta, buffer, side, tile, 2 * part + lane // SOLVE_BLOCK, lane % SOLVE_BLOCK)
    T.sync_threads(1 + side, SIDE)
    join_blocks(t.kk, tile, t.strength, buffer, side, 2 * part * SOLVE_BLOCK, lane)
    T.sync_threads(1 + side, SIDE)
    join_row(t.kk, tile, t.strength, buffer, side, part, lane)
    T.sync_threads(1 + side, SIDE)
    write_operand(dtype, t, buffer, side, tile, operand, slot, head, part, lane)
    if part == 0:
        if segment_rows > 0:
            write_bound(t, buffer, side, bound, slot, head, lane)


@T.macro
def solve_heads(
    dtype, t, side, tile, g, beta, operand, decay, bound, segment_rows, slot, head, group, first, rows, part, lane
):
    """Value heads head + side, head + side + SIDES, ... of the key head; gates are loaded a round ahead."""
    gate, strength = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    for turn in T.serial(T.truncdiv(group + SIDES - 1 - side, SIDES)):
        buffer = turn % 2
        current = turn * SIDES + side
        has_next = current + SIDES < group
        if part == 1:
            if has_next:
                load_gates(gate, strength, g, beta, head + current + SIDES, first, rows, lane)
        solve_head(dtype, t, buffer, side, tile, operand, bound, segment_rows, slot, head + current, part, lane)
        if part == 1:
            if has_next:
                sum_gates(dtype, t, 1 - buffer, side, gate, strength, decay, slot, head + current + SIDES, rows, lane)
        T.sync_threads(1 + side, SIDE)


def build_factor(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, words, row_words = T.dynamic("chunk_slots"), T.dynamic("words"), T.dynamic("row_words")
    segment_rows = T.dynamic("segment_rows")
    k_t, k_h = T.dynamic("k_t", "int64"), T.dynamic("k_h", "int64")

    @T.prim_func
    def factor(
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        g: T.Tensor((tokens, value_heads), "float32"),
        beta: T.Tensor((tokens, value_heads), "float32"),
        cu_words: T.Tensor((words,), "int32"),
        operand: T.Tensor((chunk_slots, value_heads, CHUNK, CHUNK), dtype),
        decay: T.Tensor((chunk_slots, value_heads, CHUNK), "float32"),
        key_norm: T.Tensor((chunk_slots, key_heads, CHUNK), "float32"),
        bound: T.Tensor((chunk_slots, value_heads), "float32"),
        ready: T.Tensor((segment_rows, 2), "int32"),
        o_words: T.Tensor((tokens, row_words), "int32"),
        use_l2norm: T.int32,
        words_per_entry: T.int32,
        dense_length: T.int32,
        sequences: T.int32,
    ):
        with T.Kernel(chunk_slots * key_heads + ZERO_BLOCKS, threads=FACTOR.threads) as block:
            T.annotate_min_blocks_per_sm(FACTOR.blocks_per_sm)
            t = Tiles(dtype)
            T.annotate_layout({tile: linear(tile) for tile in [t.kk, *t.solve]})
            KK = T.alloc_fragment((CHUNK, CHUNK), "float32")
            gate, strength = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
            key_ready = T.alloc_barrier([1])
            T.pdl_trigger()
            thread = T.get_thread_binding()
            lane, part, side = thread % WARP, (thread // WARP) % 2, thread // SIDE
            slot, key_head, head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            group, first, rows = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            found, end, index = T.alloc_local((3,), "int32"), T.alloc_var("int32"), T.alloc_var("int32")
            slot, key_head = T.truncdiv(block, key_heads), T.truncmod(block, key_heads)
            group = T.truncdiv(value_heads, key_heads)
            head = key_head * group
            if slot < chunk_slots:
                find_sequence(found, cu_words, words_per_entry, dense_length, sequences, tokens, slot, CHUNK, lane)
                first, end = found[1], found[2]
                index = slot - T.truncdiv(first, CHUNK) - found[0]
                first += index * CHUNK
                rows = T.Select(index < 0, 0, T.min(CHUNK, end - first))
            else:
                rows = 0
                end = offset(cu_words, 0, words_per_entry, dense_length, tokens)
                zero_rows(o_words, 0, end, row_words, block - chunk_slots * key_heads, thread)
                first = offset(cu_words, sequences, words_per_entry, dense_length, tokens)
                end = tokens
                zero_rows(o_words, first, end, row_words, block - chunk_slots * key_heads, thread)
                clear_flags(ready, segment_rows, block - chunk_slots * key_heads, thread)
            if rows > 0:
                if thread < WARP:
                    T.tma_copy(k[first : first + CHUNK, key_head, :], t.k, barrier=key_ready[0])
                    arrive(key_ready, 0, thread)
                if part == 1:
                    if side < group:
                        load_gates(gate, strength, g, beta, head + side, first, rows, lane)
                for a, c in T.Parallel(CHUNK, CHUNK):
                    t.solve[0][a, c] = T.cast(0, "float16")
                    t.solve[1][a, c] = T.cast(0, "float16")
                wait(key_ready, 0, 0)
                if rows < CHUNK:
                    for a, c in T.Parallel(CHUNK, HEAD_DIM):
                        if a >= rows:
                            t.k[a, c] = T.cast(0, dtype)
                    T.fence_proxy_async()
                    T.sync_threads()
                T.wgmma_gemm(t.k, t.k, KK, transpose_B=True, clear_accum=True)
                if part == 1:
                    if side < group:
                        sum_gates(dtype, t, 0, side, gate, strength, decay, slot, head + side, rows, lane)
                T.wait_wgmma(0)
                multiply_keys(t, KK, use_l2norm, thread)
                T.sync_threads()
                if thread < CHUNK:
                    key_norm[slot, key_head, thread] = t.norm[thread]
                if side == 0:
                    solve_heads(
                        dtype,
                        t,
                        0,
                        t.solve[0],
                        g,
                        beta,
                        operand,
                        decay,
                        bound,
                        segment_rows,
                        slot,
                        head,
                        group,
                        first,
                        rows,
                        part,
                        lane,
                    )
                else:
                    solve_heads(
                        dtype,
                        t,
                        1,
                        t.solve[1],
                        g,
                        beta,
                        operand,
                        decay,
                        bound,
                        segment_rows,
                        slot,
                        head,
                        group,
                        first,
                        rows,
                        part,
                        lane,
                    )

    return factor
