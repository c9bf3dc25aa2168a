"""Gate sums, key norms and the chunk's solve of every value head of a key head, one chunk a block (SM90).

With K K^T of the chunk's (normalised) keys, L = tril(diag(beta) K K^T, -1), A = (I + L)^-1 and G the decay since the
chunk's start, the recurrence needs A[t, s] e^(G_t - G_s) beta_s. The gate is a similarity and leaves the inverse, so A is
free of it. What is written is scaled once more so that its product serves the state as it is (`recurrence.py`):

    factored chunk   operand[t, s] = norm_t A[t, s] beta_s 2^(R - G_s)                  R = G_end, or G_end / 2 (`_tile.py`)
    other chunks     operand[t, s] = norm_t A[t, s] beta_s 2^(G_t + f_t - G_s)          f_t the fraction of G_end - G_t

Only decays from an earlier to a later token are formed. A row behind the sequence's end is a zero row of L with beta 0.

There are two other forms. The backward uses the operand of the *kept* one, too: A[t, s] beta_s = beta_t X[t, s], and X, of
`_error_solve.py`, gives errors. Its product with values is what is written, from which the backward has the errors back,
since a row of X does not know its beta; one closer to zero than WEAKEST_STRENGTH counts as that. In float16 writes might leave
the range, and the backward takes the form *of errors*, X[t, s] 2^(G_t - G_s).

The bound of a chunk is log2 of a norm that the product of its transitions does not exceed (`_segments.py`): G_end, plus
room for keys a little longer than 1, or UNCERTAIN where beta |k|^2 may exceed 2.

Reads        k [T, H, 128] · g beta [T, HV] f32 · cu_seqlens as 32-bit words
Writes       operand [slots, HV, C, C] without its upper right quarter · decay [slots, HV, C] f32, G in log2 ·
             key_norm [slots, H, C] f32, 1 / |k| or 1
             bound [slots, HV] f32, if there are segments, and of the kept form always · zeros to rows of o below cu_seqlens[0]
             and from cu_seqlens[N] on, and to `ready` of the segments

Blocks       slots * H: a chunk slot and key head each, if the slot has a chunk; then ZERO_BLOCKS: rows of o and flags in turn

Threads                           per block                per pair of value heads
warp 0 (part 0 of side 0)         loads the keys           head 2 i: X[:32, :32], X[32:48, :32]
warp 1 (part 1 of side 0)         gates of head 0          X[32:, 32:], X[48:, :32], and the gates of head 2 i + 2
warps 2, 3 (side 1)               gates of head 1          the same of head 2 i + 1
all                               K K^T

A solve lies where the keys were and becomes the operand there, so that six blocks fit in an SM: half of a block's life is
waiting for its offsets, keys and products, and only other blocks fill it (docs/design/2026-11-29-factor.md).

Barrier       set by        waited on by     arrivals
key_ready     warp 0        all              1
1 + side      named: the two warps of a side, before and after X[32:, :32]
"""

import tilelang.language as T

from . import _error_solve, _solve
from ._segments import find_sequence, offset
from ._sm90 import (
    CHUNK,
    FACTOR,
    HALF_CHUNK,
    HEAD_DIM,
    L2NORM_EPS,
    LEAF,
    LOWER_LEFT,
    LOWER_RIGHT,
    MISSING,
    SOLVE_BLOCK,
    STRONGEST_GATE,
    TRIANGLE_ROWS,
    UNCERTAIN,
    UPPER_LEFT,
    VANISHING,
    WARP,
    WEAKEST_STRENGTH,
    WRITE_SLACK,
)
from ._solve import HALF, load_left
from ._tile import Group, alloc_barriers, arrive, find_reference, fraction, linear, wait

LOG2_E = 1.4426950408889634
GROWTH = CHUNK * WRITE_SLACK * LOG2_E  # of a chunk whose writes use the slack
ZERO_BLOCKS = 128  # about one an SM
WORDS_PER_HEAD = HEAD_DIM // 2  # two 16-bit values a word
SIDES = FACTOR.sides
SIDE = FACTOR.warps_per_side * WARP  # threads
OPERAND, KEPT, ERRORS = "operand", "kept", "errors"  # forms
EIGHT = 8  # 16-bit values of a 16-byte access
LINES = WARP // EIGHT  # rows of 128 bytes that a warp writes at once
LANES_PER_ROW = HALF // EIGHT  # of a row of a quarter of the operand
ROWS_AT_ONCE = WARP // LANES_PER_ROW  # that a warp writes


class Tiles(Group):
    """Shared memory: the keys, K K^T as float16 and its leaves in float32, gates of two rounds.

    Once K K^T is there, the keys' place takes X as float16 and then the operand, those of side s in columns 64 s to 64 s + 63.
    """

    suffix = "_smem"

    def __init__(self, dtype):
        padding, gates = FACTOR.row_padding, (2, SIDES, CHUNK)
        self.k = T.alloc_shared((CHUNK, HEAD_DIM), dtype)
        self.kk = T.alloc_shared((CHUNK, CHUNK + padding), "float16")
        self.leaves = T.alloc_shared((CHUNK // LEAF, LEAF * LEAF + FACTOR.leaf_padding), "float32")
        self.norm = T.alloc_shared((CHUNK,), "float32")
        self.squares = T.alloc_shared((CHUNK,), "float32")  # of the (normalised) keys
        self.beta = T.alloc_shared(gates, "float32")
        self.strength = T.alloc_shared(gates, "float16")  # beta as a factor of mma operands
        self.decay = T.alloc_shared(gates, "float32")
        self.row_decay = T.alloc_shared(gates, "float32")
        self.column_scale = T.alloc_shared(gates, "float32")
        self.factored = T.alloc_shared((2, SIDES), "int32")


@T.macro
def find_chunk(place, cu_words, words_per_entry, dense_length, sequences, tokens, slot, lane):
    """place[0], place[1] <- first token and rows (none: <= 0) of a slot's chunk, by a warp."""
    found, index = T.alloc_local((3,), "int32"), T.alloc_var("int32")
    find_sequence(found, cu_words, words_per_entry, dense_length, sequences, tokens, slot, CHUNK, 1, lane)
    index = slot - T.truncdiv(found[1], CHUNK) - found[0]
    place[0] = found[1] + index * CHUNK
    place[1] = T.Select(index < 0, 0, T.min(CHUNK, found[2] - place[0]))


@T.macro
def load_gates(gate, strength, g, beta, head, first, rows, lane):
    """g and beta of tokens 2 lane and 2 lane + 1; behind the end, of the last token."""
    row = T.alloc_var("int32")
    for e in T.unroll(2):
        row = first + T.min(2 * lane + e, rows - 1)
        gate[e] = g[row, head]
        strength[e] = beta[row, head]


@T.macro
def sum_gates(dtype, form, t, buffer, side, gate, strength, decay, slot, head, rows, lane):
    """Decays of a chunk, in log2, and what follows from them; one warp, two tokens a lane."""
    total, carried, last = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
    reference, factored = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
    for e in T.unroll(2):
        gate[e] = T.Select(2 * lane + e < rows, gate[e] * LOG2_E, 0.0)
        gate[e] = T.Select(gate[e] < STRONGEST_GATE, STRONGEST_GATE, gate[e])
        own = never_zero(strength[e]) if form == KEPT else strength[e]
        strength[e] = T.Select(2 * lane + e < rows, own, 0.0)
    total = gate[0] + gate[1]
    for step in T.unroll(5):
        carried = T.shfl_up(total, 1 << step)
        total += T.Select(lane >= (1 << step), carried, 0.0)
    gate[0] = total - gate[1]
    gate[1] = total
    last = T.shfl_sync(total, WARP - 1)
    find_reference(dtype, last, gate[0], gate[1], reference, factored)
    for e in T.vectorized(2):
        t.decay[buffer, side, 2 * lane + e] = gate[e]
    for e in T.vectorized(2):
        decay[slot, head, 2 * lane + e] = gate[e]
    for e in T.vectorized(2):
        t.beta[buffer, side, 2 * lane + e] = strength[e]
    if form == ERRORS:
        factored[0] = 0
    for e in T.vectorized(2):
        t.strength[buffer, side, 2 * lane + e] = T.cast(strength[e], "float16")
    for e in T.vectorized(2):
        t.row_decay[buffer, side, 2 * lane + e] = gate[e] + (0.0 if form == ERRORS else fraction(last - gate[e]))
    for e in T.vectorized(2):
        own = strength[e] if form == OPERAND else 1.0
        t.column_scale[buffer, side, 2 * lane + e] = own * T.exp2(reference[0] - gate[e])
    if lane == 0:
        t.factored[buffer, side] = factored[0]


def never_zero(strength):
    """A writing strength, or WEAKEST_STRENGTH if it is closer to zero."""
    return T.Select(T.abs(strength) < WEAKEST_STRENGTH, WEAKEST_STRENGTH, strength)


def place_of_leaf_entry(row, column):
    """Thread and register of the leaves' entries: those of a wgmma accumulator's diagonal."""
    return (row // SOLVE_BLOCK) * WARP + (row % LEAF) * 4 + column // 2, (row // LEAF % 2) * 2 + column % 2


@T.macro
def take_diagonal(KK, square):
    """square <- the 8-blocks of K K^T on the diagonal; selected rather than indexed, which would put KK into memory."""
    for block in T.unroll(CHUNK // SOLVE_BLOCK):
        for a, c in T.Parallel(CHUNK, LEAF):
            entry = KK[a, block * SOLVE_BLOCK + (a // LEAF % 2) * LEAF + c]
            square[a, c] = T.Select(a // SOLVE_BLOCK == block, entry, square[a, c])


@T.macro
def multiply_keys(t, KK, square, use_l2norm, thread):
    """K K^T on and below its diagonal to shared memory: normalised if asked, as float16, and its leaves in float32.

    A warp holds the 16 rows of a block row; conditions on a // SOLVE_BLOCK are the same for all its lanes.
    """
    T.clear(square)
    take_diagonal(KK, square)
    if use_l2norm != 0:
        for a, c in T.Parallel(CHUNK, LEAF):
            if a % LEAF == c:
                t.norm[a] = T.rsqrt(square[a, c] + L2NORM_EPS)
        T.sync_threads()
        for a, c in T.Parallel(CHUNK, CHUNK):
            KK[a, c] *= t.norm[a] * t.norm[c]
        take_diagonal(KK, square)
    else:
        if thread < CHUNK:
            t.norm[thread] = 1.0
    for a, c in T.Parallel(CHUNK, CHUNK):
        t.kk[a, c] = T.cast(KK[a, c], "float16")
    for a, c in T.Parallel(CHUNK, LEAF):
        t.leaves[a // LEAF, (a % LEAF) * LEAF + c] = square[a, c]
        if a % LEAF == c:
            t.squares[a] = square[a, c]


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
def scale_factored(dtype, t, buffer, side, values, sign, scales, row, column, lane):
    """sign * values, the 16 x 16 block of X at (row, column) in an mma's registers, scaled, to its place in the operand."""
    scale = T.alloc_local((2,), "float32")
    for half in T.unroll(2):
        at = column + half * 8 + (lane % 4) * 2
        for e in T.vectorized(2):
            scale[e] = t.column_scale[buffer, side, at + e]
        for lower in T.unroll(2):
            for e in T.vectorized(2):
                t.k[row + lane // 4 + lower * 8, side * CHUNK + at + e] = T.cast(
                    sign * values[half * 4 + lower * 2 + e] * scale[e] * scales[lower], dtype
                )


@T.macro
def scale_pairwise(dtype, form, t, buffer, side, values, sign, scales, row, column, lane):
    """The same of a chunk that is not factored."""
    scale, decays = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    since = T.alloc_var("float32")
    for half in T.unroll(2):
        at = column + half * 8 + (lane % 4) * 2
        for e in T.vectorized(2):
            decays[e] = t.decay[buffer, side, at + e]
        for lower in T.unroll(2):
            own = row + lane // 4 + lower * 8
            for e in T.unroll(2):
                since = T.Select(own >= at + e, t.row_decay[buffer, side, own] - decays[e], VANISHING)
                own_strength = t.beta[buffer, side, at + e] if form == OPERAND else 1.0
                scale[e] = own_strength * T.exp2(since) * scales[lower]
            for e in T.vectorized(2):
                t.k[own, side * CHUNK + at + e] = T.cast(sign * values[half * 4 + lower * 2 + e] * scale[e], dtype)


@T.macro
def load_block(X, row, column, values, lane):
    """A 16 x 16 block of X, in an mma's registers; its place may be written afterwards."""
    entries = T.alloc_local((8,), "float16")
    load_left(X, row, column, lane, entries)
    T.sync_warp()
    for e in T.unroll(8):
        values[e] = T.cast(entries[e], "float32")


@T.macro
def load_scales(form, t, buffer, side, row, scales, lane):
    """What multiplies the two rows of a block that a lane holds: 1 / |k|, times beta if it is kept, or 1 for errors."""
    for lower in T.unroll(2):
        own = row + lane // 4 + lower * 8
        scales[lower] = 1.0 if form == ERRORS else t.norm[own]
        if form == KEPT:
            scales[lower] *= t.beta[buffer, side, own]


@T.macro
def scale_own_blocks(dtype, form, t, X, buffer, side, part, lane):
    """Rows 32 part to 32 part + 31 of X, of their own three blocks, in place."""
    values, scales = T.alloc_local((8,), "float32"), T.alloc_local((2,), "float32")
    first, token, middle = side * CHUNK, part * HALF, part * HALF + SOLVE_BLOCK
    load_scales(form, t, buffer, side, token, scales, lane)
    load_block(X, token, first + token, values, lane)
    if t.factored[buffer, side] != 0:
        scale_factored(dtype, t, buffer, side, values, 1.0, scales, token, token, lane)
        load_scales(form, t, buffer, side, middle, scales, lane)
        load_block(X, middle, first + token, values, lane)
        scale_factored(dtype, t, buffer, side, values, 1.0, scales, middle, token, lane)
        load_block(X, middle, first + middle, values, lane)
        scale_factored(dtype, t, buffer, side, values, 1.0, scales, middle, middle, lane)
    else:
        scale_pairwise(dtype, form, t, buffer, side, values, 1.0, scales, token, token, lane)
        load_scales(form, t, buffer, side, middle, scales, lane)
        load_block(X, middle, first + token, values, lane)
        scale_pairwise(dtype, form, t, buffer, side, values, 1.0, scales, middle, token, lane)
        load_block(X, middle, first + middle, values, lane)
        scale_pairwise(dtype, form, t, buffer, side, values, 1.0, scales, middle, middle, lane)


@T.macro
def scale_row(dtype, form, t, buffer, side, low, high, row, lane):
    """16 rows of X[32:, :32], from `row` on; `low` and `high` are their negatives."""
    scales = T.alloc_local((2,), "float32")
    load_scales(form, t, buffer, side, row, scales, lane)
    if t.factored[buffer, side] != 0:
        scale_factored(dtype, t, buffer, side, low, -1.0, scales, row, 0, lane)
        scale_factored(dtype, t, buffer, side, high, -1.0, scales, row, SOLVE_BLOCK, lane)
    else:
        scale_pairwise(dtype, form, t, buffer, side, low, -1.0, scales, row, 0, lane)
        scale_pairwise(dtype, form, t, buffer, side, high, -1.0, scales, row, SOLVE_BLOCK, lane)


@T.macro
def clear_above(dtype, t, side, part, lane):
    """Zeros above the 8-blocks on the diagonal, where no round writes, to the rows of a part."""
    column = (lane % EIGHT) * EIGHT
    for turn in T.unroll(HALF // LINES):
        row = part * HALF + turn * LINES + lane // EIGHT
        if column > row:
            for e in T.vectorized(EIGHT):
                t.k[row, side * CHUNK + column + e] = T.cast(0, dtype)


@T.macro
def store_operand(dtype, t, side, operand, slot, head, row, column, to, rows, lane):
    """Rows of a quarter of the operand, from (row, column) of the tile to row `to`; a warp writes 512 bytes in a row."""
    line = T.alloc_local((EIGHT,), dtype)
    own, at = lane // LANES_PER_ROW, (lane % LANES_PER_ROW) * EIGHT
    for turn in T.unroll(rows // ROWS_AT_ONCE):
        for e in T.vectorized(EIGHT):
            line[e] = t.k[row + turn * ROWS_AT_ONCE + own, side * CHUNK + column + at + e]
        for e in T.vectorized(EIGHT):
            operand[slot, head, to + turn * ROWS_AT_ONCE + own, at + e] = line[e]


@T.macro
def meet(side):
    """Waits for the other warp of a side. Numbers that are known: one in a register reserves all 16 of a block's, of 64."""
    if side == 0:
        T.sync_threads(1, SIDE)
    else:
        T.sync_threads(2, SIDE)


@T.macro
def solve_heads(
    dtype, form, t, X, g, beta, operand, decay, bound, segment_rows, slot, head, group, first, rows, side, part,
    own,
):  # fmt: skip
    """Value heads head + side, head + side + SIDES, ... of the key head; gates are loaded a round ahead."""
    gate, strength = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    low, high = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")
    top, token, quarter = side * CHUNK, part * HALF, T.Select(part == 0, UPPER_LEFT, LOWER_RIGHT)
    solve = _solve if form == OPERAND else _error_solve
    factors = t.beta if form == ERRORS else t.strength  # float16 may not round the strengths of its errors once more
    for turn in T.serial(T.truncdiv(group + SIDES - 1 - side, SIDES)):
        if form == OPERAND:
            lane = own
        else:
            lane = T.shfl_sync(own, own)  # the compiler would keep more addresses in registers than it can
        buffer = turn % 2
        current = turn * SIDES + side
        has_next = current + SIDES < group
        if part == 1:
            if has_next:
                load_gates(gate, strength, g, beta, head + current + SIDES, first, rows, lane)
        solve.invert_leaf(t.leaves, t.beta, buffer, side, X, top, part, lane)
        T.sync_warp()
        solve.join_leaves(t.kk, X, factors, buffer, side, top, token, lane)
        T.sync_warp()
        solve.join_blocks(t.kk, X, factors, buffer, side, top, token, lane)
        meet(side)
        solve.join_row(t.kk, X, factors, buffer, side, top, part, low, high, lane)
        scale_row(dtype, form, t, buffer, side, low, high, HALF + part * SOLVE_BLOCK, lane)
        if part == 1:
            if has_next:
                sum_gates(
                    dtype, form, t, 1 - buffer, side, gate, strength, decay, slot, head + current + SIDES,
                    rows, lane,
                )  # fmt: skip
        meet(side)
        row = part * SOLVE_BLOCK
        store_operand(dtype, t, side, operand, slot, head + current, HALF + row, 0, LOWER_LEFT + row, SOLVE_BLOCK, lane)
        scale_own_blocks(dtype, form, t, X, buffer, side, part, lane)
        T.sync_warp()
        store_operand(dtype, t, side, operand, slot, head + current, token, token, quarter, HALF, lane)
        if T.And(part == 0, True if form == KEPT else segment_rows > 0):
            write_bound(t, buffer, side, bound, slot, head + current, lane)
        T.sync_warp()


def build_factor(dtype, form=OPERAND):
    """The prim_func for q, k, v of `dtype` in one of the three forms; arguments in README.md."""
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
        operand: T.Tensor((chunk_slots, value_heads, TRIANGLE_ROWS, HALF_CHUNK), dtype),
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
            T.annotate_min_blocks_per_sm(4 if form == ERRORS else FACTOR.blocks_per_sm)
            t = Tiles(dtype)
            T.annotate_layout({tile: linear(tile) for tile in [t.kk]})
            X = T.view(t.k, (CHUNK, HEAD_DIM), "float16")
            KK = T.alloc_fragment((CHUNK, CHUNK), "float32")
            square = T.alloc_fragment((CHUNK, LEAF), "float32")
            T.annotate_layout({square: T.Fragment((CHUNK, LEAF), forward_fn=place_of_leaf_entry)})
            gate, strength = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
            key_ready = alloc_barriers(1)
            T.pdl_trigger()
            thread = T.get_thread_binding()
            lane, part, side = thread % WARP, (thread // WARP) % 2, thread // SIDE
            slot, key_head, head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            group, first, rows = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            place, end = T.alloc_local((2,), "int32"), T.alloc_var("int32")
            slot, key_head = T.truncdiv(block, key_heads), T.truncmod(block, key_heads)
            group = T.truncdiv(value_heads, key_heads)
            head = key_head * group
            if slot < chunk_slots:
                find_chunk(place, cu_words, words_per_entry, dense_length, sequences, tokens, slot, lane)
                first, rows = place[0], place[1]
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
                wait(key_ready, 0, 0)
                T.wgmma_gemm(t.k, t.k, KK, transpose_B=True, clear_accum=True)
                if part == 1:
                    if side < group:
                        sum_gates(dtype, form, t, 0, side, gate, strength, decay, slot, head + side, rows, lane)
                T.wait_wgmma(0)
                if rows < CHUNK:
                    for a, c in T.Parallel(CHUNK, CHUNK):
                        KK[a, c] = T.Select(T.max(a, c) < rows, KK[a, c], 0.0)
                multiply_keys(t, KK, square, use_l2norm, thread)
                T.sync_threads()
                clear_above(dtype, t, side, part, lane)
                if thread < CHUNK:
                    key_norm[slot, key_head, thread] = t.norm[thread]
                solve_heads(
                    dtype,
                    form,
                    t,
                    X,
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
                    side,
                    part,
                    lane,
                )

    return factor
