"""Gated delta rule, forward, of many short sequences: outputs and states of all value heads of a key head a block (SM90).

The algebra, and chunk by chunk the rounding, are those of `recurrence.py`, whose blocks have one value head, take turns of
three roles and pay some microseconds before their first chunk. Here three blocks share an SM, so that some compute while
others load, and nothing else overlaps: a block is one warpgroup, which does one step after the other.

Reads        q k [T, H, 128] · v [T, HV, 128] · operand decay key_norm of `factor.py` · cu_seqlens · initial state f32
Writes       o [T, HV, 128], every row of the sequence · final state f32

Blocks       sequences * H, but nothing of a sequence of more than LONG tokens, which `recurrence.py` takes. Value heads,
             halves of their values and chunks come one after the other
Registers    168: 64 value rows of the state stand transposed in 64 of them, in float32; a half of its keys at a time is
             rounded to the left operand of a product
Loads        all of a chunk on one barrier, `loaded`, ordered by one warp as soon as the chunk before is out of shared memory.
             Of a sequence with one chunk q and k stay for all heads, and everything else for both halves. The next state is
             ordered into the L2 cache

The rows of a chunk behind the sequence's end are cleared in k and v, whatever was loaded there; what they are in q only
reaches rows of the outputs that are not stored. A tile of outputs takes the place of the tile of values.

Where a chunk's decay is not factored (`factor.py`), N and not the keys takes the whole powers of two of the decay to the
chunk's end, which is as exact and needs no second place for keys.
"""

import tilelang.language as T

from ._recurrence_roles import BY_ROWS, EIGHT, OUT, READ
from ._segments import offset
from ._sm90 import CHUNK, HEAD_DIM, L2NORM_EPS, LONG, SHORT, VALUE_TILE, VANISHING, WARP
from ._tile import Group, find_reference, fraction, swizzled, transposed_fragment, wait

PLACES = 3  # of tiles of values: that of q, of k and their own
HALF_CHUNK = CHUNK // 2
WIDTH = VALUE_TILE  # columns of a tile of q, k or v
HALVES = HEAD_DIM // WIDTH
QUAD = 4  # 16-bit values of an 8-byte access: half a warp has half a row
SCALES = 6  # rows of row_scale: READ, OUT, and then
QUERY, SCORE, KEY, SPAN = range(2, SCALES)
REFERENCE, FACTORED = range(2)  # in the row SPAN: the reference, and 1 if the chunk is factored
LINE = 32  # floats of a line of the L2 cache
STATE = HEAD_DIM * HEAD_DIM
SEQUENCE, FIRST_HEAD, KEY_HEAD, GROUP, FIRST, LENGTH, CHUNKS = range(SHORT.words)

DEVICE_CODE = """
static __device__ __forceinline__ void prefetch_line(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
"""


class Tiles(Group):
    """Shared memory. `row_scale` as in `_recurrence_tiles.py`."""

    suffix = "_smem"

    def __init__(self, dtype, stages):
        self.q, self.k, self.v = ([T.alloc_shared((CHUNK, WIDTH), dtype) for _ in range(HALVES)] for _ in range(3))
        self.operand = T.alloc_shared((CHUNK, CHUNK), dtype)
        self.scores = T.alloc_shared((CHUNK, CHUNK), dtype)
        # Of a chunk that is served as half of one.
        self.small_operand = T.alloc_shared((stages, HALF_CHUNK, HALF_CHUNK), dtype)
        self.small_scores = T.alloc_shared((HALF_CHUNK, HALF_CHUNK), dtype)
        self.row_decay = T.alloc_shared((stages, CHUNK), "float32")
        self.row_norm = T.alloc_shared((CHUNK,), "float32")
        self.row_scale = T.alloc_shared((SCALES, CHUNK), "float32")
        self.record = T.alloc_shared((SHORT.words,), "int32")  # what is the same for all of a block; registers are short


class Registers(Group):
    suffix = "_frag"

    def __init__(self, dtype):
        self.S = [T.alloc_fragment((VALUE_TILE, WIDTH), "float32") for _ in range(HALVES)]
        self.S_in = [T.alloc_fragment((VALUE_TILE, WIDTH), dtype) for _ in range(3 * HALVES)]
        self.W = T.alloc_fragment((VALUE_TILE, CHUNK), "float32")
        self.Z = T.alloc_fragment((VALUE_TILE, CHUNK), dtype)
        self.N = T.alloc_fragment((VALUE_TILE, CHUNK), dtype)
        self.v = T.alloc_fragment((CHUNK, VALUE_TILE), dtype)
        self.o = T.alloc_fragment((CHUNK, VALUE_TILE), dtype)
        self.score = T.alloc_fragment((CHUNK, CHUNK), "float32")
        self.score_out = T.alloc_fragment((CHUNK, CHUNK), dtype)
        # Of a chunk that is served as half of one.
        self.small_S = [T.alloc_fragment((VALUE_TILE, WIDTH), dtype) for _ in range(HALVES)]
        self.small_W = T.alloc_fragment((VALUE_TILE, HALF_CHUNK), "float32")
        self.small_O = T.alloc_fragment((VALUE_TILE, HALF_CHUNK), "float32")
        self.small_Z = T.alloc_fragment((VALUE_TILE, HALF_CHUNK), dtype)
        self.small_N = T.alloc_fragment((VALUE_TILE, HALF_CHUNK), dtype)
        self.small_v = T.alloc_fragment((HALF_CHUNK, VALUE_TILE), dtype)
        self.small_score = T.alloc_fragment((CHUNK, HALF_CHUNK), "float32")
        self.small_score_out = T.alloc_fragment((CHUNK, HALF_CHUNK), dtype)


@T.macro
def load_rows(x, tiles, token, head, rows, loaded):
    """A chunk of q, k or v; of half a chunk's tokens, half of the tiles."""
    T.tma_copy(x[token : token + HALF_CHUNK, head, 0:WIDTH], tiles[0][0:HALF_CHUNK, :], barrier=loaded[0])
    T.tma_copy(x[token : token + HALF_CHUNK, head, WIDTH:HEAD_DIM], tiles[1][0:HALF_CHUNK, :], barrier=loaded[0])
    if rows > HALF_CHUNK:
        T.tma_copy(
            x[token + HALF_CHUNK : token + CHUNK, head, 0:WIDTH], tiles[0][HALF_CHUNK:CHUNK, :], barrier=loaded[0]
        )
        T.tma_copy(
            x[token + HALF_CHUNK : token + CHUNK, head, WIDTH:HEAD_DIM],
            tiles[1][HALF_CHUNK:CHUNK, :],
            barrier=loaded[0],
        )


@T.macro
def order_chunk(thread, t, q, k, v, operand, decay, key_norm, chunk, head, with_tokens, loaded):
    """Orders what a chunk of a head needs; q and k only if the chunk before did not leave them."""
    token, rows = t.record[FIRST] + chunk * CHUNK, t.record[LENGTH] - chunk * CHUNK
    slot, key_head = T.truncdiv(t.record[FIRST], CHUNK) + t.record[SEQUENCE] + chunk, t.record[KEY_HEAD]
    if thread < WARP:
        if with_tokens:
            load_rows(q, t.q, token, key_head, rows, loaded)
            load_rows(k, t.k, token, key_head, rows, loaded)
            T.tma_copy(key_norm[slot, key_head, :], t.row_norm, barrier=loaded[0])
        T.tma_copy(operand[slot, head, :, :], t.operand, barrier=loaded[0])
        T.tma_copy(decay[slot, head, :], t.row_decay[0, :], barrier=loaded[0])
        load_rows(v, t.v, token, head, rows, loaded)
        T.sync_warp()
        if thread == 0:
            T.barrier_arrive(loaded[0])


@T.macro
def order_tokens(thread, t, q, k, key_norm, loaded):
    """Orders q and k of a sequence of at most half a chunk."""
    slot, key_head = T.truncdiv(t.record[FIRST], CHUNK) + t.record[SEQUENCE], t.record[KEY_HEAD]
    if thread < WARP:
        load_rows(q, t.q, t.record[FIRST], key_head, HALF_CHUNK, loaded)
        load_rows(k, t.k, t.record[FIRST], key_head, HALF_CHUNK, loaded)
        T.tma_copy(key_norm[slot, key_head, :], t.row_norm, barrier=loaded[0])


@T.macro
def load_half(S, initial, matrix, value, key, state_v_first):
    if state_v_first != 0:
        for a, c in T.Parallel(VALUE_TILE, WIDTH):
            S[a, c] = initial[matrix, (value + a) * HEAD_DIM + key + c]
    else:
        for a, c in T.Parallel(VALUE_TILE, WIDTH):
            S[a, c] = initial[matrix, (key + c) * HEAD_DIM + value + a]


@T.macro
def load_state(S, initial, matrix, value, state_v_first):
    load_half(S[0], initial, matrix, value, 0, state_v_first)
    load_half(S[1], initial, matrix, value, WIDTH, state_v_first)


@T.macro
def store_half(S, final, matrix, value, key, state_v_first):
    if state_v_first != 0:
        for a, c in T.Parallel(VALUE_TILE, WIDTH):
            final[matrix, (value + a) * HEAD_DIM + key + c] = S[a, c]
    else:
        for a, c in T.Parallel(VALUE_TILE, WIDTH):
            final[matrix, (key + c) * HEAD_DIM + value + a] = S[a, c]


@T.macro
def store_state(S, final, matrix, value, state_v_first):
    store_half(S[0], final, matrix, value, 0, state_v_first)
    store_half(S[1], final, matrix, value, WIDTH, state_v_first)


@T.macro
def load_any_state(S, initial, matrix, value, state_v_first):
    """The same in fewer registers."""
    value_stride = T.Select(state_v_first != 0, HEAD_DIM, 1)
    key_stride = T.Select(state_v_first != 0, 1, HEAD_DIM)
    for a, c in T.Parallel(VALUE_TILE, WIDTH):
        S[0][a, c] = initial[matrix, (value + a) * value_stride + c * key_stride]
    for a, c in T.Parallel(VALUE_TILE, WIDTH):
        S[1][a, c] = initial[matrix, (value + a) * value_stride + (WIDTH + c) * key_stride]


@T.macro
def store_any_state(S, final, matrix, value, state_v_first):
    value_stride = T.Select(state_v_first != 0, HEAD_DIM, 1)
    key_stride = T.Select(state_v_first != 0, 1, HEAD_DIM)
    for a, c in T.Parallel(VALUE_TILE, WIDTH):
        final[matrix, (value + a) * value_stride + c * key_stride] = S[0][a, c]
    for a, c in T.Parallel(VALUE_TILE, WIDTH):
        final[matrix, (value + a) * value_stride + (WIDTH + c) * key_stride] = S[1][a, c]


@T.macro
def prefetch_state(thread, initial, matrix):
    """Orders a state into the L2 cache."""
    for part in T.unroll(STATE // LINE // SHORT.threads):
        T.call_extern("handle", "prefetch_line", T.address_of(initial[matrix, (part * SHORT.threads + thread) * LINE]))


@T.macro
def pass_state(thread, initial, final, matrix, has_initial):
    """The final state of a sequence without tokens."""
    for turn in T.serial(STATE // (4 * SHORT.threads)):
        for e in T.vectorized(4):
            place = (turn * SHORT.threads + thread) * 4 + e
            final[matrix, place] = T.if_then_else(has_initial != 0, initial[matrix, place], 0.0)


@T.macro
def find_query_scale(thread, dtype, t, scale, use_l2norm):
    """scale, or scale / |q|, of the row of a pair of threads, kept for them, in the order of additions of `_recurrence_roles.py`."""
    row, part = thread // 2, thread % 2
    packed, squares = T.alloc_local((EIGHT,), dtype), T.alloc_local((4,), "float32")
    if use_l2norm != 0:
        for e in T.unroll(4):
            squares[e] = L2NORM_EPS / 8
        for turn in T.serial(2):
            for step in T.unroll(4):
                group = (turn * 4 + step) ^ (part * 4)
                if part == 0:
                    for e in T.vectorized(EIGHT):
                        packed[e] = t.q[0][row, group * EIGHT + e]
                else:
                    for e in T.vectorized(EIGHT):
                        packed[e] = t.q[1][row, group * EIGHT + e]
                for e in T.unroll(EIGHT):
                    squares[e % 4] += T.cast(packed[e], "float32") * T.cast(packed[e], "float32")
        squares[0] = (squares[0] + squares[1]) + (squares[2] + squares[3])
        t.row_scale[QUERY, row] = scale * T.rsqrt(squares[0] + T.shfl_xor(squares[0], 1))
    else:
        t.row_scale[QUERY, row] = scale
    T.sync_warp()


@T.macro
def clear_rows(dtype, tile, rows):
    for a, c in T.Parallel(CHUNK, WIDTH):
        if a >= rows:
            tile[a, c] = T.cast(0, dtype)


@T.macro
def multiply_queries(t, r):
    """Q K^T, complete afterwards."""
    T.wgmma_gemm(t.q[0], t.k[0], r.score, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wgmma_gemm(t.q[1], t.k[1], r.score, transpose_B=True, policy=BY_ROWS)
    T.wait_wgmma(0)


@T.macro
def scale_rows(thread, dtype, t, stage, reference, factored):
    """The scales of rows from the decays of a value head; those of 16 rows by the warp that has their scores."""
    lane, row, part = thread % WARP, thread // 2, thread % 2
    own, last = T.alloc_var("float32"), T.alloc_var("float32")
    own = t.row_decay[stage, row]
    last = t.row_decay[stage, CHUNK - 1]
    find_reference(dtype, last, t.row_decay[stage, lane], t.row_decay[stage, lane + WARP], reference, factored)
    t.row_scale[part, row] = T.exp2(own) * T.Select(part == READ, t.row_norm[row], t.row_scale[QUERY, row])
    if part == 0:
        t.row_scale[SCORE, row] = t.row_scale[QUERY, row] * T.Select(factored[0] != 0, T.exp2(own - reference[0]), 1.0)
        t.row_scale[KEY, row] = T.exp2(T.floor(last - own))
    if thread == 0:
        t.row_scale[SPAN, REFERENCE] = reference[0]
        t.row_scale[SPAN, FACTORED] = T.cast(factored[0], "float32")
    T.sync_warp()


@T.macro
def gate_scores(t, score, out, columns, stage, reference, factored):
    """Scores with their mask, gates and scales."""
    last, growth = T.alloc_var("float32"), T.alloc_var("float32")
    last = t.row_decay[stage, CHUNK - 1]
    if factored == 0:
        for a, c in T.Parallel(CHUNK, columns):
            earlier = t.row_decay[stage, c] + fraction(last - t.row_decay[stage, c])
            apart = T.Select(a >= c, t.row_decay[stage, a] - earlier, VANISHING)
            out[a, c] = T.Select(a >= c, score[a, c] * t.row_scale[SCORE, a], 0.0) * T.exp2(apart)
    elif reference == last:
        growth = T.exp2(-last)
        for a, c in T.Parallel(CHUNK, columns):
            out[a, c] = T.Select(a >= c, score[a, c] * growth, 0.0)
    else:
        for a, c in T.Parallel(CHUNK, columns):
            out[a, c] = T.Select(a >= c, score[a, c] * t.row_scale[SCORE, a], 0.0)


@T.macro
def scale_outputs(t, O, token):
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        O[a, c] *= t.row_scale[OUT, token + c]


@T.macro
def multiply_state(S, S_in, tiles, product, place):
    """product <- S times the rows of a chunk, half of the keys at a time: S_in needs fewer registers."""
    T.copy(S[0], S_in[place])
    T.wgmma_gemm(S_in[place], tiles[0], product, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    T.copy(S[1], S_in[place + 1])
    T.wgmma_gemm(S_in[place + 1], tiles[1], product, transpose_B=True, policy=BY_ROWS)
    T.wait_wgmma(0)


@T.macro
def form_values(t, r, half, has_state):
    """N, from the values and what the state says of the keys."""
    T.clear(r.W)
    if has_state:
        multiply_state(r.S, r.S_in, t.k, r.W, 0)
    if half == 0:
        T.copy(t.v[0], r.v)
    else:
        T.copy(t.v[1], r.v)
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        r.Z[a, c] = r.v[c, a] - r.W[a, c] * t.row_scale[READ, c]
    T.wgmma_gemm(r.Z, t.operand, r.W, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    T.copy(r.W, r.N)


@T.macro
def form_half_outputs(t, r, place, token, has_state, in_one_step):
    """O of half of a chunk's tokens, from the state before the chunk and N."""
    T.clear(r.small_O)
    if has_state:
        T.copy(r.S[0], r.S_in[place])
        T.wgmma_gemm(
            r.S_in[place], t.q[0][token : token + HALF_CHUNK, :], r.small_O, transpose_B=True, policy=BY_ROWS
        )
        T.wait_wgmma(0)
        T.copy(r.S[1], r.S_in[place + 1])
        T.wgmma_gemm(
            r.S_in[place + 1], t.q[1][token : token + HALF_CHUNK, :], r.small_O, transpose_B=True, policy=BY_ROWS
        )
        T.wait_wgmma(0)
    if T.Not(in_one_step):
        scale_outputs(t, r.small_O, token)
    T.wgmma_gemm(r.N, t.scores[token : token + HALF_CHUNK, :], r.small_O, transpose_B=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    if in_one_step:
        scale_outputs(t, r.small_O, token)
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.o[token + c, a] = r.small_O[a, c]


@T.macro
def place_outputs(t, r, half):
    """Each warp writes where it has read its values."""
    if half == 0:
        T.copy(r.o, t.v[0])
    else:
        T.copy(r.o, t.v[1])


@T.macro
def scale_state(S, factor):
    for a, c in T.Parallel(VALUE_TILE, WIDTH):
        S[0][a, c] *= factor
    for a, c in T.Parallel(VALUE_TILE, WIDTH):
        S[1][a, c] *= factor


@T.macro
def write_state(dtype, t, r, factored, reference, last):
    """S <- decay S + N K, by way of the reference."""
    scale_state(r.S, T.exp2(reference))
    if factored == 0:
        for a, c in T.Parallel(VALUE_TILE, CHUNK):
            r.N[a, c] = r.N[a, c] * T.cast(t.row_scale[KEY, c], dtype)
    T.wgmma_gemm(r.N, t.k[0], r.S[0], policy=BY_ROWS)
    T.wgmma_gemm(r.N, t.k[1], r.S[1], policy=BY_ROWS)
    T.wait_wgmma(0)
    if reference != last:
        scale_state(r.S, T.exp2(last - reference))


@T.macro
def store_rows(thread, dtype, tile, o, token, head, value, rows):
    """64 values a row by half a warp."""
    line = T.alloc_local((QUAD,), dtype)
    at_once = SHORT.threads * QUAD // VALUE_TILE
    column = thread % (VALUE_TILE // QUAD) * QUAD
    for turn in T.serial(T.truncdiv(rows + at_once - 1, at_once)):
        row = turn * at_once + thread // (VALUE_TILE // QUAD)
        if row < rows:
            for e in T.vectorized(QUAD):
                line[e] = tile[row, column + e]
            for e in T.vectorized(QUAD):
                o[token + row, head, value + column + e] = line[e]


@T.macro
def order_head(stages, thread, t, v, corners, decay, index, loaded):
    """Orders what a value head needs of at most half a chunk, to one of two places."""
    slot = T.truncdiv(t.record[FIRST], CHUNK) + t.record[SEQUENCE]
    head, first, stage = t.record[FIRST_HEAD] + index, t.record[FIRST], index % stages
    if thread < WARP:
        T.tma_copy(
            corners[slot, head, 0:HALF_CHUNK, 0:HALF_CHUNK], t.small_operand[stage, :, :], barrier=loaded[0]
        )
        T.tma_copy(decay[slot, head, :], t.row_decay[stage, :], barrier=loaded[0])
        if stages == 1 or stage == 0:
            T.tma_copy(v[first : first + HALF_CHUNK, head, 0:WIDTH], t.v[0][0:HALF_CHUNK, :], barrier=loaded[0])
            T.tma_copy(v[first : first + HALF_CHUNK, head, WIDTH:HEAD_DIM], t.v[1][0:HALF_CHUNK, :], barrier=loaded[0])
        else:
            T.tma_copy(v[first : first + HALF_CHUNK, head, 0:WIDTH], t.operand[0:HALF_CHUNK, :], barrier=loaded[0])
            T.tma_copy(
                v[first : first + HALF_CHUNK, head, WIDTH:HEAD_DIM], t.scores[0:HALF_CHUNK, :], barrier=loaded[0]
            )
        T.sync_warp()
        if thread == 0:
            T.barrier_arrive(loaded[0])


@T.macro
def clear_small_rows(dtype, tile, rows):
    for a, c in T.Parallel(HALF_CHUNK, WIDTH):
        if a >= rows:
            tile[a, c] = T.cast(0, dtype)


@T.macro
def take_small_values(stages, t, r, stage, half):
    if T.And(stage == 0, half == 0):
        T.copy(t.v[0][0:HALF_CHUNK, :], r.small_v)
    elif stage == 0:
        T.copy(t.v[1][0:HALF_CHUNK, :], r.small_v)
    elif stages > 1:
        if half == 0:
            T.copy(t.operand[0:HALF_CHUNK, :], r.small_v)
        else:
            T.copy(t.scores[0:HALF_CHUNK, :], r.small_v)


@T.macro
def give_small_outputs(stages, t, r, stage, half):
    """Each warp writes where it has read its values; the lower half of the tile is of no use, but no copy is as fast."""
    T.clear(r.o)
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.o[c, a] = r.small_O[a, c]
    if T.And(stage == 0, half == 0):
        T.copy(r.o, t.v[0])
    elif stage == 0:
        T.copy(r.o, t.v[1])
    elif stages > 1:
        if half == 0:
            T.copy(r.o, t.operand)
        else:
            T.copy(r.o, t.scores)


@T.macro
def serve_half(stages, dtype, t, r, stage, half, reference, factored, has_initial, write_final):
    """64 values of at most half a chunk: outputs to the place of the values, and the state behind them in r.S."""
    last = t.row_decay[stage, CHUNK - 1]
    in_one_step = T.And(factored != 0, reference == t.row_decay[stage, CHUNK - 1])
    T.clear(r.small_W)
    T.clear(r.small_O)
    if has_initial != 0:
        T.copy(r.S[0], r.small_S[0])
        T.wgmma_gemm(r.small_S[0], t.k[0][0:HALF_CHUNK, :], r.small_W, transpose_B=True, policy=BY_ROWS)
        T.wgmma_gemm(r.small_S[0], t.q[0][0:HALF_CHUNK, :], r.small_O, transpose_B=True, policy=BY_ROWS)
        T.wait_wgmma(0)
        T.copy(r.S[1], r.small_S[1])
        T.wgmma_gemm(r.small_S[1], t.k[1][0:HALF_CHUNK, :], r.small_W, transpose_B=True, policy=BY_ROWS)
        T.wgmma_gemm(r.small_S[1], t.q[1][0:HALF_CHUNK, :], r.small_O, transpose_B=True, policy=BY_ROWS)
        T.wait_wgmma(0)
    take_small_values(stages, t, r, stage, half)
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.small_Z[a, c] = r.small_v[c, a] - r.small_W[a, c] * t.row_scale[READ, c]
    T.wgmma_gemm(
        r.small_Z, t.small_operand[stage, :, :], r.small_W, transpose_B=True, clear_accum=True, policy=BY_ROWS
    )
    T.wait_wgmma(0)
    T.copy(r.small_W, r.small_N)
    if T.Not(in_one_step):
        scale_outputs(t, r.small_O, 0)
    T.wgmma_gemm(r.small_N, t.small_scores, r.small_O, transpose_B=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    if in_one_step:
        scale_outputs(t, r.small_O, 0)
    if write_final != 0:
        scale_state(r.S, T.exp2(reference))
        if factored == 0:
            for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
                r.small_N[a, c] = r.small_N[a, c] * T.cast(t.row_scale[KEY, c], dtype)
        T.wgmma_gemm(r.small_N, t.k[0][0:HALF_CHUNK, :], r.S[0], policy=BY_ROWS)
        T.wgmma_gemm(r.small_N, t.k[1][0:HALF_CHUNK, :], r.S[1], policy=BY_ROWS)
        T.wait_wgmma(0)
        if reference != last:
            scale_state(r.S, T.exp2(last - reference))
    give_small_outputs(stages, t, r, stage, half)


@T.macro
def multiply_small_queries(t, r):
    """Q K^T of half a chunk, complete afterwards."""
    T.wgmma_gemm(t.q[0], t.k[0][0:HALF_CHUNK, :], r.small_score, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wgmma_gemm(t.q[1], t.k[1][0:HALF_CHUNK, :], r.small_score, transpose_B=True, policy=BY_ROWS)
    T.wait_wgmma(0)


@T.macro
def serve_small(
    with_states,
    stages,
    thread,
    dtype,
    t,
    r,
    v,
    corners,
    decay,
    initial,
    o,
    final,
    scale,
    use_l2norm,
    has_initial,
    write_final,
    state_v_first,
    value_heads,
    loaded,
):
    """A sequence of at most half a chunk: products of half the tokens, scores once for all heads, and loads a head ahead."""
    reference, factored = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
    matrix, half = T.alloc_var("int32"), T.alloc_var("int32")
    wait(loaded, 0, 0)
    find_query_scale(thread, dtype, t, scale, use_l2norm)
    if t.record[LENGTH] < HALF_CHUNK:
        clear_small_rows(dtype, t.k[0], t.record[LENGTH])
        clear_small_rows(dtype, t.k[1], t.record[LENGTH])
    T.fence_proxy_async()
    T.sync_threads()
    T.fence_proxy_async()
    if not with_states:
        multiply_small_queries(t, r)
    for part in T.serial(t.record[GROUP] * HALVES):
        half = part % HALVES
        stage = part // HALVES % stages
        if with_states:
            matrix = t.record[SEQUENCE] * value_heads + t.record[FIRST_HEAD] + part // HALVES
            T.clear(r.S[0])
            T.clear(r.S[1])
            if has_initial != 0:
                load_state(r.S, initial, matrix, half * VALUE_TILE, state_v_first)
                if part == 0:
                    prefetch_state(thread, initial, matrix)
                if T.And(half == 0, part + HALVES < t.record[GROUP] * HALVES):
                    prefetch_state(thread, initial, matrix + 1)
        if half == 0:
            if stages > 1:
                if part + HALVES < t.record[GROUP] * HALVES:
                    order_head(stages, thread, t, v, corners, decay, part // HALVES + 1, loaded)
            if part > 0:
                wait(loaded, 0, part // HALVES % 2)
            if with_states:  # registers are short
                multiply_small_queries(t, r)
            scale_rows(thread, dtype, t, stage, reference, factored)
            gate_scores(t, r.small_score, r.small_score_out, HALF_CHUNK, stage, reference[0], factored[0])
            for a, c in T.Parallel(CHUNK, HALF_CHUNK):
                if a < HALF_CHUNK:
                    t.small_scores[a, c] = r.small_score_out[a, c]
            if t.record[LENGTH] < HALF_CHUNK:
                if stage == 0:
                    clear_small_rows(dtype, t.v[0], t.record[LENGTH])
                    clear_small_rows(dtype, t.v[1], t.record[LENGTH])
                elif stages > 1:
                    clear_small_rows(dtype, t.operand, t.record[LENGTH])
                    clear_small_rows(dtype, t.scores, t.record[LENGTH])
            T.fence_proxy_async()
            T.sync_threads()
        else:
            T.fence_proxy_async()
        serve_half(stages, dtype, t, r, stage, half, t.row_scale[SPAN, REFERENCE], t.row_scale[SPAN, FACTORED], has_initial, write_final)
        if with_states:
            if write_final != 0:
                matrix = t.record[SEQUENCE] * value_heads + t.record[FIRST_HEAD] + part // HALVES
                store_state(r.S, final, matrix, half * VALUE_TILE, state_v_first)
        if half == 1:
            T.fence_proxy_async()
            T.sync_threads()
            if stage == 0:
                store_small(thread, dtype, t, t.v[0], t.v[1], o, part // HALVES)
            elif stages > 1:
                store_small(thread, dtype, t, t.operand, t.scores, o, part // HALVES)
            T.sync_threads()
            if stages == 1:
                if part + 1 < t.record[GROUP] * HALVES:
                    order_head(stages, thread, t, v, corners, decay, part // HALVES + 1, loaded)


@T.macro
def store_small(thread, dtype, t, low, high, o, index):
    head = t.record[FIRST_HEAD] + index
    store_rows(thread, dtype, low, o, t.record[FIRST], head, 0, t.record[LENGTH])
    store_rows(thread, dtype, high, o, t.record[FIRST], head, WIDTH, t.record[LENGTH])


def build_short(dtype, with_states):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    stages = 1 if with_states else 2  # heads in flight of a chunk that is served as half of one
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, words, matrices = T.dynamic("chunk_slots"), T.dynamic("words"), T.dynamic("matrices")
    q_t, q_h, k_t, k_h, v_t, v_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"))

    @T.prim_func
    def short(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        v: T.StridedTensor((tokens, value_heads, HEAD_DIM), (v_t, v_h, 1), dtype),
        operand: T.Tensor((chunk_slots, value_heads, CHUNK, CHUNK), dtype),
        corners: T.Tensor((chunk_slots, value_heads, CHUNK, CHUNK), dtype),
        decay: T.Tensor((chunk_slots, value_heads, CHUNK), "float32"),
        key_norm: T.Tensor((chunk_slots, key_heads, CHUNK), "float32"),
        cu_words: T.Tensor((words,), "int32"),
        initial: T.Tensor((matrices, STATE), "float32"),
        o: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        final: T.Tensor((matrices, STATE), "float32"),
        scale: T.float32,
        use_l2norm: T.int32,
        has_initial: T.int32,
        write_final: T.int32,
        state_v_first: T.int32,
        words_per_entry: T.int32,
        dense_length: T.int32,
        sequences: T.int32,
    ):
        with T.Kernel(sequences * key_heads, threads=SHORT.threads) as block:
            T.annotate_min_blocks_per_sm(SHORT.blocks_per_sm)
            T.import_source(DEVICE_CODE)
            t, r = Tiles(dtype, stages), Registers(dtype)
            loaded = T.alloc_barrier([1])
            T.annotate_layout(
                {part: transposed_fragment(VALUE_TILE) for part in (r.v, r.o)}
                | {part: transposed_fragment(VALUE_TILE, HALF_CHUNK) for part in (r.small_v,)}
                | {tile: swizzled(tile) for tile in (*t.q, *t.k, *t.v, t.operand, t.scores)}
            )
            thread = T.get_thread_binding()
            head, half, token, rows, matrix = (T.alloc_var("int32") for _ in range(5))
            first, length, next_chunk, goes_on, is_small, has_state = (T.alloc_var("int32") for _ in range(6))
            reference, factored = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
            starts_from, ends_in = (has_initial, write_final) if with_states else (T.int32(0), T.int32(0))
            T.pdl_trigger()
            T.pdl_sync()
            if thread == 0:
                t.record[SEQUENCE] = T.truncdiv(block, key_heads)
                t.record[KEY_HEAD] = T.truncmod(block, key_heads)
                t.record[GROUP] = T.truncdiv(value_heads, key_heads)
                t.record[FIRST_HEAD] = T.truncmod(block, key_heads) * T.truncdiv(value_heads, key_heads)
                first = offset(cu_words, T.truncdiv(block, key_heads), words_per_entry, dense_length, tokens)
                length = offset(cu_words, T.truncdiv(block, key_heads) + 1, words_per_entry, dense_length, tokens)
                length = T.max(0, length - first)
                t.record[FIRST] = first
                t.record[LENGTH] = length
                t.record[CHUNKS] = T.Select(length > LONG, 0, T.truncdiv(length + CHUNK - 1, CHUNK))
            T.sync_threads()
            T.fence_proxy_async()
            is_small = T.cast(T.And(t.record[LENGTH] > 0, t.record[LENGTH] <= HALF_CHUNK), "int32")
            if t.record[CHUNKS] > 0:
                if is_small != 0:
                    order_tokens(thread, t, q, k, key_norm, loaded)
                    order_head(stages, thread, t, v, corners, decay, 0, loaded)
                else:
                    order_chunk(
                        thread, t, q, k, v, operand, decay, key_norm, 0, t.record[FIRST_HEAD], True, loaded
                    )
            if with_states:
                if T.And(write_final != 0, t.record[LENGTH] == 0):
                    for index in T.serial(t.record[GROUP]):
                        matrix = t.record[SEQUENCE] * value_heads + t.record[FIRST_HEAD] + index
                        pass_state(thread, initial, final, matrix, has_initial)
            if is_small != 0:
                serve_small(
                    with_states,
                    stages,
                    thread,
                    dtype,
                    t,
                    r,
                    v,
                    corners,
                    decay,
                    initial,
                    o,
                    final,
                    scale,
                    use_l2norm,
                    starts_from,
                    ends_in,
                    state_v_first,
                    value_heads,
                    loaded,
                )
            for part in T.serial(T.Select(T.And(t.record[CHUNKS] > 0, is_small == 0), t.record[GROUP] * HALVES, 0)):
                for i in T.serial(t.record[CHUNKS]):
                    if T.Or(t.record[CHUNKS] > 1, part % HALVES == 0):
                        wait(loaded, 0, T.Select(t.record[CHUNKS] > 1, part * t.record[CHUNKS] + i, part // HALVES) % 2)
                        if T.Or(part == 0, t.record[CHUNKS] > 1):
                            find_query_scale(thread, dtype, t, scale, use_l2norm)
                        multiply_queries(t, r)
                        scale_rows(thread, dtype, t, 0, reference, factored)
                        gate_scores(t, r.score, r.score_out, CHUNK, 0, reference[0], factored[0])
                        T.copy(r.score_out, t.scores)
                        rows = t.record[LENGTH] - i * CHUNK
                        if rows < CHUNK:
                            clear_rows(dtype, t.v[0], rows)
                            clear_rows(dtype, t.v[1], rows)
                            if T.Or(part == 0, t.record[CHUNKS] > 1):
                                clear_rows(dtype, t.k[0], rows)
                                clear_rows(dtype, t.k[1], rows)
                        T.fence_proxy_async()
                        T.sync_threads()
                    else:
                        T.fence_proxy_async()
                    if i == 0:  # not before the scores, which need registers too
                        T.clear(r.S[0])
                        T.clear(r.S[1])
                        if with_states:
                            if has_initial != 0:
                                matrix = t.record[SEQUENCE] * value_heads + t.record[FIRST_HEAD] + part // HALVES
                                load_any_state(r.S, initial, matrix, part % HALVES * VALUE_TILE, state_v_first)
                    form_values(t, r, part % HALVES, T.Or(i > 0, starts_from != 0))
                    has_state = T.cast(T.Or(i > 0, starts_from != 0), "int32")
                    in_one_step = T.And(t.row_scale[SPAN, FACTORED] != 0, t.row_scale[SPAN, REFERENCE] == t.row_decay[0, CHUNK - 1])
                    form_half_outputs(t, r, HALVES, 0, has_state != 0, in_one_step)
                    form_half_outputs(t, r, 2 * HALVES, HALF_CHUNK, has_state != 0, in_one_step)
                    goes_on = T.cast(T.Or(ends_in != 0, i + 1 < t.record[CHUNKS]), "int32")
                    if goes_on != 0:
                        write_state(dtype, t, r, t.row_scale[SPAN, FACTORED], t.row_scale[SPAN, REFERENCE], t.row_decay[0, CHUNK - 1])
                    place_outputs(t, r, part % HALVES)
                    T.sync_threads()
                    rows = T.min(CHUNK, t.record[LENGTH] - i * CHUNK)
                    token = t.record[FIRST] + i * CHUNK
                    head = t.record[FIRST_HEAD] + part // HALVES
                    if part % HALVES == 0:
                        store_rows(thread, dtype, t.v[0], o, token, head, 0, rows)
                    else:
                        store_rows(thread, dtype, t.v[1], o, token, head, VALUE_TILE, rows)
                    next_chunk = T.Select(i + 1 < t.record[CHUNKS], i + 1, 0)
                    head = t.record[FIRST_HEAD] + T.Select(next_chunk > 0, part, part + 1) // HALVES
                    goes_on = T.cast(
                        T.And(T.Or(next_chunk > 0, part + 1 < t.record[GROUP] * HALVES), T.Or(t.record[CHUNKS] > 1, part % HALVES == 1)),
                        "int32",
                    )
                    T.fence_proxy_async()
                    T.sync_threads()
                    if goes_on != 0:
                        order_chunk(
                            thread, t, q, k, v, operand, decay, key_norm, next_chunk, head, t.record[CHUNKS] > 1, loaded
                        )
                if with_states:
                    if write_final != 0:
                        matrix = t.record[SEQUENCE] * value_heads + t.record[FIRST_HEAD] + part // HALVES
                        store_any_state(r.S, final, matrix, part % HALVES * VALUE_TILE, state_v_first)

    return short
