"""What each warp role of the backward's scans does; the page that binds them is `backward_scan.py`."""

import tilelang.language as T

from ._backward_scan_tiles import STAGES, phase, phase_before
from ._sm90 import (
    CHUNK,
    HEAD_DIM,
    ROW_DECAY,
    ROW_QUERY,
    ROW_READ,
    ROW_TAKE,
    ROW_WRITE,
    SPAN_CHUNKS,
    SPAN_FIRST_SLOT,
    SPAN_FIRST_TOKEN,
    SPAN_TOKENS,
    VALUE_TILE,
    WARPGROUP,
)
from ._tile import arrive, wait

MEETING = 1  # named barrier of the state warpgroup
FLOAT32 = "float32"


@T.macro
def load_state(S, matrix, half, source, value_stride, key_stride):
    for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
        S[a, c] = source[matrix, (half * VALUE_TILE + a) * value_stride + c * key_stride]


@T.macro
def store_state(S, matrix, half, target, factor, value_stride, key_stride):
    for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
        target[matrix, (half * VALUE_TILE + a) * value_stride + c * key_stride] = S[a, c] * factor


@T.macro
def load_transposed(tiles, stage, fragment):
    if stage == 0:
        T.copy(tiles[0], fragment)
    elif stage == 1:
        T.copy(tiles[1], fragment)
    else:
        T.copy(tiles[2], fragment)


@T.macro
def clear_tail(dtype, t, stage, rows):
    """Zeros in the rows of k and q that belong to no token of this sequence, whatever was loaded there."""
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        if a >= rows:
            t.k[stage, a, c] = T.cast(0, dtype)
            t.q[stage, a, c] = T.cast(0, dtype)
    T.fence_proxy_async()
    T.sync_threads(MEETING, WARPGROUP)


@T.macro
def publish_state(thread, t, b, r, trip):
    wait(b.state_free, 0, phase_before(trip, 1))
    T.copy(r.S_in, t.state)
    T.fence_proxy_async()
    arrive(b.state_ready, 0, thread)


@T.macro
def publish_values(thread, t, b, r, trip):
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        r.o[c, a] = r.W[a, c]
    wait(b.values_free, 0, phase_before(trip, 1))
    T.copy(r.o, t.out)
    T.fence_proxy_async()
    arrive(b.values_ready, 0, thread)


@T.macro
def carry_state(thread, dtype, t, b, r, span):
    """States before each chunk and the errors of its tokens, from the first chunk to the last."""
    rows, decay = T.alloc_var("int32"), T.alloc_var(FLOAT32)
    for i in T.serial(span[SPAN_CHUNKS]):
        stage = i % STAGES
        rows = T.min(CHUNK, span[SPAN_TOKENS] - i * CHUNK)
        T.copy(r.S, r.S_in)
        wait(b.chunk_ready, stage, phase(i, STAGES))
        if rows < CHUNK:
            clear_tail(dtype, t, stage, rows)
        T.wgmma_gemm(r.S_in, t.k[stage, :, :], r.W, transpose_B=True, clear_accum=True)
        publish_state(thread, t, b, r, i)
        load_transposed(t.values, stage, r.v)
        decay = T.exp2(t.rows[stage, ROW_DECAY, CHUNK - 1])
        T.wait_wgmma(0)
        for a, c in T.Parallel(VALUE_TILE, CHUNK):
            r.Z[a, c] = r.v[c, a] - r.W[a, c] * t.rows[stage, ROW_READ, c]
        if rows < CHUNK:
            for a, c in T.Parallel(VALUE_TILE, CHUNK):
                r.Z[a, c] = T.Select(c < rows, r.Z[a, c], T.cast(0, dtype))
        T.wgmma_gemm(r.Z, t.solve[stage, :, :], r.W, transpose_B=True, clear_accum=True)
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            r.S[a, c] *= decay
        T.wait_wgmma(0)
        for a, c in T.Parallel(VALUE_TILE, CHUNK):
            r.N[a, c] = r.W[a, c] * t.rows[stage, ROW_WRITE, c]
        T.wgmma_gemm(r.N, t.k[stage, :, :], r.S)
        publish_values(thread, t, b, r, i)
        T.wait_wgmma(0)
        arrive(b.chunk_free, stage, thread)


@T.macro
def carry_gradient(thread, dtype, t, b, r, span, lead):
    """Gradients of the states behind each chunk and of v, from the last chunk to the first.

    In float16 r.S lacks the decay of the chunk's first token, which is left in `lead`: queries and keys would leave the range.
    """
    rows, index, decay = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var(FLOAT32)
    for i in T.serial(span[SPAN_CHUNKS]):
        stage = i % STAGES
        index = span[SPAN_CHUNKS] - 1 - i
        rows = T.min(CHUNK, span[SPAN_TOKENS] - index * CHUNK)
        if dtype == "float16":
            for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
                r.S[a, c] *= lead[0]
        T.copy(r.S, r.S_in)
        wait(b.chunk_ready, stage, phase(i, STAGES))
        if rows < CHUNK:
            clear_tail(dtype, t, stage, rows)
        decay = t.rows[stage, ROW_DECAY, CHUNK - 1]
        if dtype == "float16":
            decay = decay - t.rows[stage, ROW_DECAY, 0]
            lead[0] = T.exp2(t.rows[stage, ROW_DECAY, 0])
        decay = T.exp2(decay)
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            r.S[a, c] *= decay
        load_transposed(t.values, stage, r.v)
        for a, c in T.Parallel(VALUE_TILE, CHUNK):
            r.do[a, c] = r.v[c, a]
        if rows < CHUNK:
            for a, c in T.Parallel(VALUE_TILE, CHUNK):
                r.do[a, c] = T.Select(c < rows, r.do[a, c], T.cast(0, dtype))
        for a, c in T.Parallel(VALUE_TILE, CHUNK):
            r.query_do[a, c] = T.cast(r.do[a, c], FLOAT32) * t.rows[stage, ROW_QUERY, c]
        T.wgmma_gemm(r.S_in, t.k[stage, :, :], r.W, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(r.do, t.scores[stage, :, :], r.read, clear_accum=True)
        T.wgmma_gemm(r.query_do, t.q[stage, :, :], r.S)
        publish_state(thread, t, b, r, i)
        T.wait_wgmma(1)
        for a, c in T.Parallel(VALUE_TILE, CHUNK):
            r.Z[a, c] = r.read[a, c] + r.W[a, c] * t.rows[stage, ROW_WRITE, c]
        T.wgmma_gemm(r.Z, t.solve[stage, :, :], r.W, clear_accum=True)
        T.wait_wgmma(0)
        for a, c in T.Parallel(VALUE_TILE, CHUNK):
            r.N[a, c] = -r.W[a, c] * t.rows[stage, ROW_TAKE, c]
        T.wgmma_gemm(r.N, t.k[stage, :, :], r.S)
        publish_values(thread, t, b, r, i)
        T.wait_wgmma(0)
        arrive(b.chunk_free, stage, thread)


@T.macro
def load_tile(t, b, stage, source, token, head, column):
    """A tile to the buffer of a stage that is known when the kernel is compiled."""
    tile = t.values[stage]
    T.tma_copy(source[token : token + CHUNK, head, column : column + VALUE_TILE], tile, barrier=b.chunk_ready[stage])


@T.macro
def load_chunk(thread, t, b, stage, token, slot, head, key_head, column, k, values, solve, row_scales):
    """What both directions read of a chunk; the caller arrives."""
    T.tma_copy(k[token : token + CHUNK, key_head, :], t.k[stage, :, :], barrier=b.chunk_ready[stage])
    T.tma_copy(solve[slot, head, :, :], t.solve[stage, :, :], barrier=b.chunk_ready[stage])
    T.tma_copy(row_scales[slot, head, :, :], t.rows[stage, :, :], barrier=b.chunk_ready[stage])
    if stage == 0:
        load_tile(t, b, 0, values, token, head, column)
    elif stage == 1:
        load_tile(t, b, 1, values, token, head, column)
    else:
        load_tile(t, b, 2, values, token, head, column)


@T.macro
def load_forward(thread, t, b, span, head, key_head, column, k, v, solve, row_scales):
    for i in T.serial(span[SPAN_CHUNKS]):
        stage = i % STAGES
        token, slot = span[SPAN_FIRST_TOKEN] + i * CHUNK, span[SPAN_FIRST_SLOT] + i
        wait(b.chunk_free, stage, phase_before(i, STAGES))
        load_chunk(thread, t, b, stage, token, slot, head, key_head, column, k, v, solve, row_scales)
        arrive(b.chunk_ready, stage, thread)


@T.macro
def load_reverse(thread, t, b, span, head, key_head, column, q, k, dout, solve, scores, row_scales):
    for i in T.serial(span[SPAN_CHUNKS]):
        stage, index = i % STAGES, span[SPAN_CHUNKS] - 1 - i
        token, slot = span[SPAN_FIRST_TOKEN] + index * CHUNK, span[SPAN_FIRST_SLOT] + index
        wait(b.chunk_free, stage, phase_before(i, STAGES))
        load_chunk(thread, t, b, stage, token, slot, head, key_head, column, k, dout, solve, row_scales)
        T.tma_copy(q[token : token + CHUNK, key_head, :], t.q[stage, :, :], barrier=b.chunk_ready[stage])
        T.tma_copy(scores[slot, head, :, :], t.scores[stage, :, :], barrier=b.chunk_ready[stage])
        arrive(b.chunk_ready, stage, thread)


@T.macro
def store_states(thread, t, b, span, head, half, is_reverse, states):
    """The state tile of every chunk to its slot."""
    for i in T.serial(span[SPAN_CHUNKS]):
        slot = span[SPAN_FIRST_SLOT] + T.Select(is_reverse, span[SPAN_CHUNKS] - 1 - i, i)
        wait(b.state_ready, 0, phase(i, 1))
        T.tma_copy(t.state, states[slot, head, half, :, :])
        T.tma_store_wait(0)
        arrive(b.state_free, 0, thread)


@T.macro
def store_errors(thread, t, b, span, head, half, errors):
    for i in T.serial(span[SPAN_CHUNKS]):
        wait(b.values_ready, 0, phase(i, 1))
        T.tma_copy(t.out, errors[span[SPAN_FIRST_SLOT] + i, head, half, :, :])
        T.tma_store_wait(0)
        arrive(b.values_free, 0, thread)


@T.macro
def store_value_gradients(thread, lane, t, b, span, head, column, dv):
    """dv of every chunk; one that ends within the tile is stored row by row."""
    for i in T.serial(span[SPAN_CHUNKS]):
        index = span[SPAN_CHUNKS] - 1 - i
        token, rows = span[SPAN_FIRST_TOKEN] + index * CHUNK, span[SPAN_TOKENS] - index * CHUNK
        wait(b.values_ready, 0, phase(i, 1))
        if rows >= CHUNK:
            T.tma_copy(t.out, dv[token : token + CHUNK, head, column : column + VALUE_TILE])
            T.tma_store_wait(0)
        else:
            for a in T.serial(rows):
                for e in T.vectorized(2):
                    dv[token + a, head, column + 2 * lane + e] = t.out[a, 2 * lane + e]
        arrive(b.values_free, 0, thread)
