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
             Of a sequence with one chunk q and k stay for all heads, and everything else for both halves

The rows of a chunk behind the sequence's end are cleared in k and v, whatever was loaded there; what they are in q only
reaches rows of the outputs that are not stored. A tile of outputs takes the place of the tile of values.

A sequence of at most half a chunk in a call without states has products of half the tokens, one Q K^T for all value heads,
which stays in registers, and the upper left quarter of the operand alone. Its value heads are loaded one ahead: values of
every other head take the place of the queries, which nobody needs behind Q K^T.

Where a chunk's decay is not factored (`factor.py`), N and not the keys takes the whole powers of two of the decay to the
chunk's end, which is as exact and needs no second place for keys.
"""

import tilelang.language as T

from ._recurrence_roles import BY_ROWS, EIGHT, OUT, READ
from ._segments import offset
from ._sm90 import (
    CHUNK,
    HALF_CHUNK,
    HEAD_DIM,
    L2NORM_EPS,
    LONG,
    SHORT,
    TRIANGLE_ROWS,
    UPPER_LEFT,
    VALUE_TILE,
    VANISHING,
    WARP,
)
from ._tile import Group, alloc_barriers, arrive, find_reference, fraction, swizzled, transposed_fragment, wait

PLACES = 3  # of tiles of values: that of q, of k and their own
WIDTH = VALUE_TILE  # columns of a tile of q, k or v
HALVES = HEAD_DIM // WIDTH
STAGES = SHORT.stages
QUARTERS = TRIANGLE_ROWS // HALF_CHUNK  # of an operand
QUAD = 4  # 16-bit values of an 8-byte access: half a warp has half a row
STATE = HEAD_DIM * HEAD_DIM
SEQUENCE, KEY_HEAD, FIRST, LENGTH, CHUNKS = range(SHORT.words)


class Tiles(Group):
    """Shared memory. `row_scale` as in `_recurrence_tiles.py`."""

    suffix = "_smem"

    def __init__(self, dtype):
        self.q, self.k, self.v = ([T.alloc_shared((CHUNK, WIDTH), dtype) for _ in range(HALVES)] for _ in range(3))
        # Columns 32 to 63 above columns 0 to 31, as in `_recurrence_tiles.py`: the first 32 rows are zeros, which stay.
        self.operand = T.alloc_shared((2 * CHUNK, HALF_CHUNK), dtype)
        self.scores = T.alloc_shared((CHUNK, CHUNK), dtype)
        self.small_operand = T.alloc_shared((STAGES, HALF_CHUNK, HALF_CHUNK), dtype)  # of at most half a chunk
        self.small_scores = T.alloc_shared((HALF_CHUNK, HALF_CHUNK), dtype)
        self.decay = T.alloc_shared((CHUNK,), "float32")
        self.key_norm = T.alloc_shared((CHUNK,), "float32")
        self.row_scale = T.alloc_shared((2, CHUNK), "float32")
        self.score_scale = T.alloc_shared((CHUNK,), "float32")
        self.key_scale = T.alloc_shared((CHUNK,), "float32")
        self.item = T.alloc_shared((SHORT.words,), "int32")  # what is the same for all of a block; registers are short


class Registers(Group):
    suffix = "_frag"

    def __init__(self, dtype):
        self.S = [T.alloc_fragment((VALUE_TILE, WIDTH), "float32") for _ in range(HALVES)]
        self.S_in = [T.alloc_fragment((VALUE_TILE, WIDTH), dtype) for _ in range(2 * HALVES)]
        self.W = T.alloc_fragment((VALUE_TILE, CHUNK), "float32")
        self.O = T.alloc_fragment((VALUE_TILE, CHUNK), "float32")
        self.Z = [T.alloc_fragment((VALUE_TILE, HALF_CHUNK), dtype) for _ in range(2)]
        self.N = T.alloc_fragment((VALUE_TILE, CHUNK), dtype)
        self.v = T.alloc_fragment((CHUNK, VALUE_TILE), dtype)
        self.o = T.alloc_fragment((CHUNK, VALUE_TILE), dtype)
        self.score = T.alloc_fragment((CHUNK, CHUNK), "float32")
        self.score_out = T.alloc_fragment((CHUNK, CHUNK), dtype)
        # Of at most half a chunk.
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
    token, rows = t.item[FIRST] + chunk * CHUNK, t.item[LENGTH] - chunk * CHUNK
    slot, key_head = T.truncdiv(t.item[FIRST], CHUNK) + t.item[SEQUENCE] + chunk, t.item[KEY_HEAD]
    if thread < WARP:
        if with_tokens:
            load_rows(q, t.q, token, key_head, rows, loaded)
            load_rows(k, t.k, token, key_head, rows, loaded)
            T.tma_copy(key_norm[slot, key_head, :], t.key_norm, barrier=loaded[0])
        for quarter in T.unroll(QUARTERS):
            T.tma_copy(
                operand[slot, head, quarter * HALF_CHUNK : (quarter + 1) * HALF_CHUNK, :],
                t.operand[(quarter + 1) * HALF_CHUNK : (quarter + 2) * HALF_CHUNK, :],
                barrier=loaded[0],
            )
        T.tma_copy(decay[slot, head, :], t.decay, barrier=loaded[0])
        load_rows(v, t.v, token, head, rows, loaded)
        arrive(loaded, 0, thread)


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
def pass_state(thread, initial, final, matrix, has_initial):
    """The final state of a sequence without tokens."""
    for turn in T.serial(STATE // (4 * SHORT.threads)):
        for e in T.vectorized(4):
            place = (turn * SHORT.threads + thread) * 4 + e
            final[matrix, place] = T.if_then_else(has_initial != 0, initial[matrix, place], 0.0)


@T.macro
def query_scale(thread, dtype, t, scale, use_l2norm, q_scale):
    """scale, or scale / |q|, of the row of a pair of threads, in the order of additions of `_recurrence_roles.py`."""
    row, part = thread // 2, thread % 2
    packed, squares = T.alloc_local((EIGHT,), dtype), T.alloc_local((4,), "float32")
    q_scale[0] = scale
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
        q_scale[0] = scale * T.rsqrt(squares[0] + T.shfl_xor(squares[0], 1))


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
def scale_rows(thread, dtype, t, q_scale, reference, factored):
    """The scales of rows from the decays of a value head; those of 16 rows by the warp that has their scores."""
    lane, row, part = thread % WARP, thread // 2, thread % 2
    own, last = T.alloc_var("float32"), T.alloc_var("float32")
    own = t.decay[row]
    last = t.decay[CHUNK - 1]
    find_reference(dtype, last, t.decay[lane], t.decay[lane + WARP], reference, factored)
    t.row_scale[part, row] = T.exp2(own) * T.Select(part == READ, t.key_norm[row], q_scale)
    if part == 0:
        t.score_scale[row] = q_scale * T.Select(factored[0] != 0, T.exp2(own - reference[0]), 1.0)
        t.key_scale[row] = T.exp2(T.floor(last - own))
    T.sync_warp()


@T.macro
def gate_scores(t, score, out, columns, reference, factored):
    """Scores with their mask, gates and scales."""
    last, growth = T.alloc_var("float32"), T.alloc_var("float32")
    last = t.decay[CHUNK - 1]
    if factored == 0:
        for a, c in T.Parallel(CHUNK, columns):
            earlier = t.decay[c] + fraction(last - t.decay[c])
            apart = T.Select(a >= c, t.decay[a] - earlier, VANISHING)
            out[a, c] = T.Select(a >= c, score[a, c] * t.score_scale[a], 0.0) * T.exp2(apart)
    elif reference == last:
        growth = T.exp2(-last)
        for a, c in T.Parallel(CHUNK, columns):
            out[a, c] = T.Select(a >= c, score[a, c] * growth, 0.0)
    else:
        for a, c in T.Parallel(CHUNK, columns):
            out[a, c] = T.Select(a >= c, score[a, c] * t.score_scale[a], 0.0)


@T.macro
def scale_outputs(t, O):
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        O[a, c] *= t.row_scale[OUT, c]


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
def subtract_read(t, r, first, Z):
    """Half of Z: V without what the state holds for the keys, from token `first` of the chunk on."""
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        Z[a, c] = r.v[first + c, a] - r.W[a, first + c] * t.row_scale[READ, first + c]


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
    subtract_read(t, r, 0, r.Z[0])
    subtract_read(t, r, HALF_CHUNK, r.Z[1])
    T.wgmma_gemm(r.Z[0], t.operand[CHUNK:, :], r.W, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wgmma_gemm(r.Z[1], t.operand[:CHUNK, :], r.W, transpose_B=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    T.copy(r.W, r.N)


@T.macro
def form_outputs(t, r, half, has_state, in_one_step):
    """O, from the state before the chunk and N."""
    if has_state:
        multiply_state(r.S, r.S_in, t.q, r.O, HALVES)
        if T.Not(in_one_step):
            scale_outputs(t, r.O)
    else:
        T.clear(r.O)
    T.wgmma_gemm(r.N, t.scores, r.O, transpose_B=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    if in_one_step:
        scale_outputs(t, r.O)
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        r.o[c, a] = r.O[a, c]


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
            r.N[a, c] = r.N[a, c] * T.cast(t.key_scale[c], dtype)
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
def order_tokens(thread, t, q, k, key_norm, loaded):
    """Orders q and k of a sequence of at most half a chunk."""
    slot, key_head = T.truncdiv(t.item[FIRST], CHUNK) + t.item[SEQUENCE], t.item[KEY_HEAD]
    if thread < WARP:
        load_rows(q, t.q, t.item[FIRST], key_head, HALF_CHUNK, loaded)
        load_rows(k, t.k, t.item[FIRST], key_head, HALF_CHUNK, loaded)
        T.tma_copy(key_norm[slot, key_head, :], t.key_norm, barrier=loaded[0])


@T.macro
def order_head(thread, t, v, operand, decay, head, stage, loaded):
    """Orders what a value head of such a sequence needs, its values to their own place or to that of the queries."""
    slot = T.truncdiv(t.item[FIRST], CHUNK) + t.item[SEQUENCE]
    if thread < WARP:
        T.tma_copy(
            operand[slot, head, UPPER_LEFT : UPPER_LEFT + HALF_CHUNK, :],
            t.small_operand[stage, :, :],
            barrier=loaded[0],
        )
        T.tma_copy(decay[slot, head, :], t.decay, barrier=loaded[0])
        if stage == 0:
            load_rows(v, t.v, t.item[FIRST], head, HALF_CHUNK, loaded)
        else:
            load_rows(v, t.q, t.item[FIRST], head, HALF_CHUNK, loaded)
        arrive(loaded, 0, thread)


@T.macro
def clear_small_rows(dtype, tiles, rows):
    for a, c in T.Parallel(HALF_CHUNK, WIDTH):
        if a >= rows:
            tiles[0][a, c] = T.cast(0, dtype)
    for a, c in T.Parallel(HALF_CHUNK, WIDTH):
        if a >= rows:
            tiles[1][a, c] = T.cast(0, dtype)


@T.macro
def multiply_small_queries(t, r):
    T.wgmma_gemm(t.q[0], t.k[0][0:HALF_CHUNK, :], r.small_score, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wgmma_gemm(t.q[1], t.k[1][0:HALF_CHUNK, :], r.small_score, transpose_B=True, policy=BY_ROWS)
    T.wait_wgmma(0)


@T.macro
def serve_half(t, r, tile, stage, in_one_step):
    """64 values of at most half a chunk: outputs to the place of the values."""
    T.copy(tile[0:HALF_CHUNK, :], r.small_v)
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.small_Z[a, c] = r.small_v[c, a]
    T.wgmma_gemm(r.small_Z, t.small_operand[stage, :, :], r.small_W, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    T.copy(r.small_W, r.small_N)
    T.wgmma_gemm(r.small_N, t.small_scores, r.small_O, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    if in_one_step:
        for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
            r.small_O[a, c] *= t.row_scale[OUT, c]
    T.clear(r.o)
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.o[c, a] = r.small_O[a, c]
    T.copy(r.o, tile)  # the lower half is of no use, but whole tiles are copied by stmatrix


@T.macro
def serve_head(thread, dtype, t, r, tiles, stage, in_one_step, o, head):
    serve_half(t, r, tiles[0], stage, in_one_step)
    serve_half(t, r, tiles[1], stage, in_one_step)
    T.sync_threads()
    store_rows(thread, dtype, tiles[0], o, t.item[FIRST], head, 0, t.item[LENGTH])
    store_rows(thread, dtype, tiles[1], o, t.item[FIRST], head, VALUE_TILE, t.item[LENGTH])


@T.macro
def serve_small(thread, dtype, t, r, heads, q, k, v, operand, decay, key_norm, o, scale, use_l2norm, loaded):
    """Outputs of a sequence of at most half a chunk, from zero, of `heads` value heads; none if it is another sequence."""
    reference, factored = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
    q_scale, last = T.alloc_local((1,), "float32"), T.alloc_var("float32")
    head, in_one_step = T.alloc_var("int32"), T.alloc_var("int32")
    if heads > 0:
        order_tokens(thread, t, q, k, key_norm, loaded)
        order_head(thread, t, v, operand, decay, t.item[KEY_HEAD] * heads, 0, loaded)
    for index in T.serial(heads):
        head = t.item[KEY_HEAD] * heads + index
        wait(loaded, 0, index % STAGES)
        if index == 0:
            query_scale(thread, dtype, t, scale, use_l2norm, q_scale)
            if t.item[LENGTH] < HALF_CHUNK:
                clear_small_rows(dtype, t.k, t.item[LENGTH])
                T.fence_proxy_async()
                T.sync_threads()
            multiply_small_queries(t, r)
        scale_rows(thread, dtype, t, q_scale[0], reference, factored)
        gate_scores(t, r.small_score, r.small_score_out, HALF_CHUNK, reference[0], factored[0])
        last = t.decay[CHUNK - 1]
        in_one_step = T.cast(T.And(factored[0] != 0, reference[0] == last), "int32")
        for a, c in T.Parallel(CHUNK, HALF_CHUNK):
            if a < HALF_CHUNK:
                t.small_scores[a, c] = r.small_score_out[a, c]
        if t.item[LENGTH] < HALF_CHUNK:
            if index % STAGES == 0:
                clear_small_rows(dtype, t.v, t.item[LENGTH])
            else:
                clear_small_rows(dtype, t.q, t.item[LENGTH])
        T.fence_proxy_async()
        T.sync_threads()
        if index + 1 < heads:  # the head before this one has left its place
            order_head(thread, t, v, operand, decay, head + 1, (index + 1) % STAGES, loaded)
        if index % STAGES == 0:
            serve_head(thread, dtype, t, r, t.v, 0, in_one_step != 0, o, head)
        else:
            serve_head(thread, dtype, t, r, t.q, 1, in_one_step != 0, o, head)


def build_short(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, words, matrices = T.dynamic("chunk_slots"), T.dynamic("words"), T.dynamic("matrices")
    q_t, q_h, k_t, k_h, v_t, v_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"))

    @T.prim_func
    def short(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        v: T.StridedTensor((tokens, value_heads, HEAD_DIM), (v_t, v_h, 1), dtype),
        operand: T.Tensor((chunk_slots, value_heads, TRIANGLE_ROWS, HALF_CHUNK), dtype),
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
            t, r = Tiles(dtype), Registers(dtype)
            loaded = alloc_barriers(1)
            T.annotate_layout(
                {part: transposed_fragment(VALUE_TILE) for part in (r.v, r.o)}
                | {r.small_v: transposed_fragment(VALUE_TILE, HALF_CHUNK)}
                | {tile: swizzled(tile) for tile in (*t.q, *t.k, *t.v)}
            )
            thread = T.get_thread_binding()
            head, half, token, rows, loads, matrix = (T.alloc_var("int32") for _ in range(6))
            first, length, next_chunk, goes_on, is_small = (T.alloc_var("int32") for _ in range(5))
            q_scale = T.alloc_local((1,), "float32")
            reference, factored = T.alloc_local((1,), "float32"), T.alloc_local((1,), "int32")
            group = T.truncdiv(value_heads, key_heads)
            T.pdl_trigger()
            T.pdl_sync()
            if thread == 0:
                t.item[SEQUENCE] = T.truncdiv(block, key_heads)
                t.item[KEY_HEAD] = T.truncmod(block, key_heads)
                first = offset(cu_words, T.truncdiv(block, key_heads), words_per_entry, dense_length, tokens)
                length = offset(cu_words, T.truncdiv(block, key_heads) + 1, words_per_entry, dense_length, tokens)
                length = T.max(0, length - first)
                t.item[FIRST] = first
                t.item[LENGTH] = length
                t.item[CHUNKS] = T.Select(length > LONG, 0, T.truncdiv(length + CHUNK - 1, CHUNK))
            for a, c in T.Parallel(HALF_CHUNK, HALF_CHUNK):
                t.operand[a, c] = T.cast(0, dtype)
            T.fence_proxy_async()
            T.sync_threads()
            loads = 0
            is_small = T.cast(
                T.And(
                    T.And(has_initial == 0, write_final == 0),
                    T.And(t.item[LENGTH] > 0, t.item[LENGTH] <= HALF_CHUNK),
                ),
                "int32",
            )
            heads = T.Select(is_small != 0, group, 0)
            serve_small(thread, dtype, t, r, heads, q, k, v, operand, decay, key_norm, o, scale, use_l2norm, loaded)
            if T.And(t.item[CHUNKS] > 0, is_small == 0):
                order_chunk(thread, t, q, k, v, operand, decay, key_norm, 0, t.item[KEY_HEAD] * group, True, loaded)
            elif T.And(write_final != 0, t.item[LENGTH] == 0):
                for index in T.serial(group):
                    matrix = t.item[SEQUENCE] * value_heads + t.item[KEY_HEAD] * group + index
                    pass_state(thread, initial, final, matrix, has_initial)
            for part in T.serial(T.Select(T.And(t.item[CHUNKS] > 0, is_small == 0), group * HALVES, 0)):
                half = part % HALVES
                matrix = t.item[SEQUENCE] * value_heads + t.item[KEY_HEAD] * group + part // HALVES
                T.clear(r.S[0])
                T.clear(r.S[1])
                if has_initial != 0:
                    load_state(r.S, initial, matrix, half * VALUE_TILE, state_v_first)
                for i in T.serial(t.item[CHUNKS]):
                    if T.Or(t.item[CHUNKS] > 1, half == 0):
                        wait(loaded, 0, loads % 2)
                        loads += 1
                        if T.Or(part == 0, t.item[CHUNKS] > 1):
                            query_scale(thread, dtype, t, scale, use_l2norm, q_scale)
                        multiply_queries(t, r)
                        scale_rows(thread, dtype, t, q_scale[0], reference, factored)
                        gate_scores(t, r.score, r.score_out, CHUNK, reference[0], factored[0])
                        T.copy(r.score_out, t.scores)
                        rows = t.item[LENGTH] - i * CHUNK
                        if rows < CHUNK:
                            clear_rows(dtype, t.v[0], rows)
                            clear_rows(dtype, t.v[1], rows)
                            if T.Or(part == 0, t.item[CHUNKS] > 1):
                                clear_rows(dtype, t.k[0], rows)
                                clear_rows(dtype, t.k[1], rows)
                        T.fence_proxy_async()
                        T.sync_threads()
                    else:
                        T.fence_proxy_async()
                    form_values(t, r, half, T.Or(i > 0, has_initial != 0))
                    form_outputs(
                        t,
                        r,
                        half,
                        T.Or(i > 0, has_initial != 0),
                        T.And(factored[0] != 0, reference[0] == t.decay[CHUNK - 1]),
                    )
                    goes_on = T.cast(T.Or(write_final != 0, i + 1 < t.item[CHUNKS]), "int32")
                    if goes_on != 0:
                        write_state(dtype, t, r, factored[0], reference[0], t.decay[CHUNK - 1])
                    place_outputs(t, r, half)
                    T.sync_threads()
                    rows = T.min(CHUNK, t.item[LENGTH] - i * CHUNK)
                    token = t.item[FIRST] + i * CHUNK
                    head = t.item[KEY_HEAD] * group + part // HALVES
                    if half == 0:
                        store_rows(thread, dtype, t.v[0], o, token, head, 0, rows)
                    else:
                        store_rows(thread, dtype, t.v[1], o, token, head, VALUE_TILE, rows)
                    next_chunk = T.Select(i + 1 < t.item[CHUNKS], i + 1, 0)
                    head += T.Select(T.And(half == 1, next_chunk == 0), 1, 0)
                    goes_on = T.cast(
                        T.And(T.Or(next_chunk > 0, part + 1 < group * HALVES), T.Or(t.item[CHUNKS] > 1, half == 1)),
                        "int32",
                    )
                    T.fence_proxy_async()
                    T.sync_threads()
                    if goes_on != 0:
                        order_chunk(
                            thread, t, q, k, v, operand, decay, key_norm, next_chunk, head, t.item[CHUNKS] > 1, loaded
                        )
                if write_final != 0:
                    matrix = t.item[SEQUENCE] * value_heads + t.item[KEY_HEAD] * group + part // HALVES
                    store_state(r.S, final, matrix, half * VALUE_TILE, state_v_first)

    return short
