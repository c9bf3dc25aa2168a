"""What each warp role of the backward's scans does; the page that binds them is `backward_scan.py`."""

import tilelang.language as T

from ._backward_scan_tiles import (
    ANNOUNCEMENTS,
    AT_ONCE,
    DECAY,
    ERROR,
    QUERY,
    READ,
    SCORES,
    SINCE,
    STAGES,
    TAKE,
    WRITE,
    phase,
    phase_before,
)
from ._ready import count_block
from ._sm90 import (
    CHUNK,
    END_BORDER,
    END_FINAL,
    END_STATE,
    END_TRANSITION,
    FIRST_SCAN_ROW,
    HALF_CHUNK,
    HEAD_DIM,
    ITEM_CHUNKS,
    ITEM_FIRST_SLOT,
    ITEM_FIRST_TOKEN,
    ITEM_LAST_ROWS,
    ITEM_LINKS,
    ITEM_OWN,
    ITEM_SILENT,
    ITEM_START,
    PAIR_COLUMN,
    PAIR_REFERENCE,
    PAIR_ROW,
    START_BORDER,
    START_IDENTITY,
    START_INITIAL,
    START_STATE,
    UNFACTORED,
    VALUE_TILE,
    VANISHING,
    WARP,
    WARPGROUP,
)
from ._tile import arrive, rolled, wait

MEETING = 1  # named barrier of the warpgroup that has the state
FLOAT32 = "float32"
PLAIN, TURNED = 0, 2  # parts of a stored transition: rows by the value it comes from, or by the one it goes to
HIGH, LOW = 0, 1  # each in two parts of 16 bits


def outputs_of(item):
    """Chunks with outputs."""
    return item[ITEM_CHUNKS] - item[ITEM_SILENT]


def batches_of(item):
    """Announcements of chunks with outputs."""
    return T.truncdiv(outputs_of(item) + AT_ONCE - 1, AT_ONCE)


@T.macro
def load_state(S, start, matrix, head, base, side, half, source, border, states, value_stride, key_stride):
    """The state that the item starts from, transposed: zero, a given one, the identity or that of segment `base`."""
    T.clear(S)
    if start == START_INITIAL:
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            S[a, c] = source[matrix, (half * VALUE_TILE + a) * value_stride + c * key_stride]
    if start == START_BORDER:
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            S[a, c] = border[head, (half * VALUE_TILE + a) * HEAD_DIM + c]
    if start == START_STATE:
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            S[a, c] = states[base, side, half, a * HEAD_DIM + c]
    if start == START_IDENTITY:
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            S[a, c] = T.Select(half * VALUE_TILE + a == c, 1.0, 0.0)


@T.macro
def store_segment(S, end, row, side, half, states, factor):
    if end == END_STATE:
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            states[row, side, half, a * HEAD_DIM + c] = S[a, c] * factor


@T.macro
def store_transition(dtype, r, end, row, half, transitions, reach):
    """Half of the rows of a transition, plain and turned, in two parts of 16 bits, and their squared norms."""
    if end == END_TRANSITION:
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            transitions[row, PLAIN + HIGH, half, a, c] = T.cast(r.S[a, c], dtype)
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            transitions[row, TURNED + HIGH, c // VALUE_TILE, c % VALUE_TILE, half * VALUE_TILE + a] = T.cast(
                r.S[a, c], dtype
            )
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            r.low_S[a, c] = T.cast(r.S[a, c] - T.cast(T.cast(r.S[a, c], dtype), FLOAT32), dtype)
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            transitions[row, PLAIN + LOW, half, a, c] = r.low_S[a, c]
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            transitions[row, TURNED + LOW, c // VALUE_TILE, c % VALUE_TILE, half * VALUE_TILE + a] = r.low_S[a, c]
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            r.S[a, c] *= r.S[a, c]
        T.reduce_sum(r.S, r.squares, dim=1)
        for a in T.Parallel(VALUE_TILE):
            reach[row, half * VALUE_TILE + a] = r.squares[a]


@T.macro
def store_gradient(S, end, matrix, head, half, target, border, factor, value_stride, key_stride):
    if end == END_FINAL:
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            target[matrix, (half * VALUE_TILE + a) * value_stride + c * key_stride] = S[a, c] * factor
    if end == END_BORDER:
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            border[head, (half * VALUE_TILE + a) * HEAD_DIM + c] = S[a, c] * factor


@T.macro
def split_half(dtype, S, column, high, low):
    """64 columns of S as a sum of two 16-bit parts."""
    for a, c in T.Parallel(VALUE_TILE, VALUE_TILE):
        high[a, c] = T.cast(S[a, column + c], dtype)
    for a, c in T.Parallel(VALUE_TILE, VALUE_TILE):
        low[a, c] = T.cast(S[a, column + c] - T.cast(T.cast(S[a, column + c], dtype), FLOAT32), dtype)


@T.macro
def multiply_half(S, high, low, t, part):
    """S += (high + low) (M_high + M_low) without the product of the low parts."""
    T.wgmma_gemm(high, t.k[part, :, :], S)
    T.wgmma_gemm(high, t.q[part, :, :], S)
    T.wgmma_gemm(low, t.k[part, :, :], S)


@T.macro
def follow_links(thread, dtype, t, b, r, links, base, sign, value_heads, side, half, states):
    """S <- S M_j + S_j over the segments before the own one (reverse: behind it), both factors in two parts.

    The transition's high part lies in the places of the keys, its low part in those of the queries.
    """
    for i in rolled(links):
        split_half(dtype, r.S, 0, r.high[0], r.low[0])
        split_half(dtype, r.S, VALUE_TILE, r.high[1], r.low[1])
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            r.S[a, c] = states[base - (i + 1) * sign * value_heads, side, half, a * HEAD_DIM + c]
        wait(b.link_ready, 0, i % 2)
        multiply_half(r.S, r.high[0], r.low[0], t, 0)
        multiply_half(r.S, r.high[1], r.low[1], t, 1)
        T.wait_wgmma(0)
        arrive(b.link_free, 0, thread)


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
    arrive(b.state_ready, 0, thread)


@T.macro
def publish_errors(thread, t, b, r, stage, trip):
    """The errors of a chunk, which r.W is but for a scale of each."""
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        r.o[c, a] = r.W[a, c] * t.rows[stage, ERROR, c]
    wait(b.values_free, 0, phase_before(trip, 1))
    T.copy(r.o, t.out)
    arrive(b.values_ready, 0, thread)


@T.macro
def publish_values(thread, t, b, r, trip):
    """The gradients of a chunk's values."""
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.o[c, a] = r.dv[0][a, c]
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.o[HALF_CHUNK + c, a] = r.dv[1][a, c]
    wait(b.values_free, 0, phase_before(trip, 1))
    T.copy(r.o, t.out)
    arrive(b.values_ready, 0, thread)


@T.macro
def take_values(t, b, r, i, chunks):
    """v or dO of chunk i, in registers before it is its turn; behind the last chunk those of the last once more."""
    chunk = T.min(i, chunks - 1)
    wait(b.chunk_ready, chunk % STAGES, phase(chunk, STAGES))
    load_transposed(t.values, chunk % STAGES, r.v)


@T.macro
def subtract_read(t, r, stage, first, Z):
    """Half of Z: V without what the state holds for the keys, from token `first` of the chunk on."""
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        Z[a, c] = r.v[first + c, a] - r.W[a, first + c] * t.rows[stage, READ, first + c]


@T.macro
def clear_behind(dtype, Z, rows):
    """Zeros for values of no token, of which `rows` are left in this half."""
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        Z[a, c] = T.Select(c < rows, Z[a, c], T.cast(0, dtype))


@T.macro
def clear_quarters(dtype, t):
    """Zeros in the upper right quarter of every solve, which nobody loads."""
    for stage, a, c in T.Parallel(STAGES, HALF_CHUNK, HALF_CHUNK):
        t.solve[stage, a, c] = T.cast(0, dtype)
    T.fence_proxy_async()
    T.sync_threads(MEETING, WARPGROUP)


@T.macro
def advance_state(thread, dtype, t, b, r, item, i, has_outputs):
    """S past chunk i; with outputs also S before it and its errors, and the chunk may end early."""
    rows, decay = T.alloc_var("int32"), T.alloc_var(FLOAT32)
    stage = i % STAGES
    T.copy(r.S, r.S_in)
    if has_outputs:
        rows = T.Select(i == item[ITEM_CHUNKS] - 1, item[ITEM_LAST_ROWS], CHUNK)
        if rows < CHUNK:
            clear_tail(dtype, t, stage, rows)
    T.wgmma_gemm(r.S_in, t.k[stage, :, :], r.W, transpose_B=True, clear_accum=True)
    decay = T.exp2(t.rows[stage, DECAY, CHUNK - 1])
    if has_outputs:
        publish_state(thread, t, b, r, i - item[ITEM_SILENT])
    T.wait_wgmma(0)
    subtract_read(t, r, stage, 0, r.Z[0])
    subtract_read(t, r, stage, HALF_CHUNK, r.Z[1])
    if has_outputs:
        if rows < CHUNK:
            clear_behind(dtype, r.Z[0], rows)
            clear_behind(dtype, r.Z[1], rows - HALF_CHUNK)
    T.wgmma_gemm(r.Z[0], t.solve[stage, CHUNK:, :], r.W, transpose_B=True, clear_accum=True)
    T.wgmma_gemm(r.Z[1], t.solve[stage, :CHUNK, :], r.W, transpose_B=True)
    for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
        r.S[a, c] *= decay
    T.wait_wgmma(0)
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        r.N[a, c] = r.W[a, c] * t.rows[stage, WRITE, c]
    T.wgmma_gemm(r.N, t.k[stage, :, :], r.S)
    if has_outputs:
        publish_errors(thread, t, b, r, stage, i - item[ITEM_SILENT])
    take_values(t, b, r, i + 1, item[ITEM_CHUNKS])
    T.wait_wgmma(0)
    arrive(b.chunk_free, stage, thread)


@T.macro
def carry_state(thread, dtype, t, b, r, item):
    """States before each chunk and the errors of its tokens, from the first chunk to the last."""
    clear_quarters(dtype, t)
    if item[ITEM_START] == START_IDENTITY:  # a transition has no values, and the loader brings none
        for a, c in T.Parallel(CHUNK, VALUE_TILE):
            t.values[0][a, c] = T.cast(0, dtype)
            t.values[1][a, c] = T.cast(0, dtype)
            t.values[2][a, c] = T.cast(0, dtype)
        T.sync_threads(MEETING, WARPGROUP)
    if item[ITEM_CHUNKS] > 0:
        take_values(t, b, r, 0, item[ITEM_CHUNKS])
    for i in rolled(item[ITEM_SILENT]):
        advance_state(thread, dtype, t, b, r, item, i, False)
    for more in rolled(outputs_of(item)):
        advance_state(thread, dtype, t, b, r, item, item[ITEM_SILENT] + more, True)


@T.macro
def clear_gradients(dtype, t, rows):
    """Zeros for dO of no token in the first chunk that a reverse block walks, which may hold any number."""
    for a, c in T.Parallel(CHUNK, VALUE_TILE):
        if a >= rows:
            t.values[0][a, c] = T.cast(0, dtype)


@T.macro
def advance_gradient(thread, dtype, t, b, r, item, i, lead, has_outputs):
    """dS past the i-th chunk from the end; with outputs also dS behind it and its dv."""
    decay = T.alloc_var(FLOAT32)
    stage, place = i % STAGES, i % SCORES
    if dtype == "float16":
        for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
            r.S[a, c] *= lead[0]
    T.copy(r.S, r.S_in)
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        r.D[a, c] = r.v[c, a]
    T.wgmma_gemm(r.S_in, t.k[stage, :, :], r.W, transpose_B=True, clear_accum=True)
    wait(b.scores_ready, place, phase(i, SCORES))
    T.wgmma_gemm(r.D, t.scores[place, :, :], r.read, clear_accum=True)
    if has_outputs:
        publish_state(thread, t, b, r, i - item[ITEM_SILENT])
    for c in T.Parallel(CHUNK):
        r.scale[c] = t.rows[stage, WRITE, c]
    decay = t.rows[stage, DECAY, CHUNK - 1]
    if dtype == "float16":
        decay = decay - t.rows[stage, DECAY, 0]
        lead[0] = T.exp2(t.rows[stage, DECAY, 0])
    decay = T.exp2(decay)
    T.wait_wgmma(0)
    arrive(b.scores_free, place, thread)
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        r.Z[a, c] = r.read[a, c] + r.W[a, c] * r.scale[c]
    T.wgmma_gemm(r.Z, t.solve[stage, CHUNK:, :], r.dv[0], clear_accum=True)
    T.wgmma_gemm(r.Z, t.solve[stage, :CHUNK, :], r.dv[1], clear_accum=True)
    for a, c in T.Parallel(VALUE_TILE, CHUNK):
        r.N[a, c] = T.cast(r.D[a, c], FLOAT32) * t.rows[stage, QUERY, c]
    for a, c in T.Parallel(VALUE_TILE, HEAD_DIM):
        r.S[a, c] *= decay
    T.wgmma_gemm(r.N, t.q[stage, :, :], r.S)
    for c in T.Parallel(HALF_CHUNK):
        r.take[0][c] = -t.rows[stage, TAKE, c]
    for c in T.Parallel(HALF_CHUNK):
        r.take[1][c] = -t.rows[stage, TAKE, HALF_CHUNK + c]
    T.wait_wgmma(1)
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.Z[a, c] = r.dv[0][a, c] * r.take[0][c]
    for a, c in T.Parallel(VALUE_TILE, HALF_CHUNK):
        r.Z[a, HALF_CHUNK + c] = r.dv[1][a, c] * r.take[1][c]
    T.wgmma_gemm(r.Z, t.k[stage, :, :], r.S)
    if has_outputs:
        publish_values(thread, t, b, r, i - item[ITEM_SILENT])
    take_values(t, b, r, i + 1, item[ITEM_CHUNKS])
    T.wait_wgmma(0)
    arrive(b.chunk_free, stage, thread)


@T.macro
def carry_gradient(thread, dtype, t, b, r, item, lead):
    """Gradients of the states behind each chunk and of v, from the last chunk to the first.

    In float16 r.S lacks the decay of the chunk's first token, which is left in `lead`: queries and keys would leave the range.
    """
    clear_quarters(dtype, t)
    if item[ITEM_CHUNKS] > 0:
        if item[ITEM_LAST_ROWS] < CHUNK:
            wait(b.chunk_ready, 0, 0)
            clear_gradients(dtype, t, item[ITEM_LAST_ROWS])
            clear_tail(dtype, t, 0, item[ITEM_LAST_ROWS])
        take_values(t, b, r, 0, item[ITEM_CHUNKS])
    for i in rolled(item[ITEM_SILENT]):
        advance_gradient(thread, dtype, t, b, r, item, i, lead, False)
    for more in rolled(outputs_of(item)):
        advance_gradient(thread, dtype, t, b, r, item, item[ITEM_SILENT] + more, lead, True)


@T.macro
def weigh_scores(t, r, stage):
    """r.scores: what queries read of writes, with decays and norms; nothing of later tokens."""
    for a in T.Parallel(CHUNK):
        r.row[a] = t.pair_rows[stage, PAIR_ROW, a]
    if t.rows[stage, SINCE, 0] != UNFACTORED:
        for a in T.Parallel(CHUNK):
            r.row[a] *= t.rows[stage, SINCE, a]
        T.wait_wgmma(0)
        for a, c in T.Parallel(CHUNK, CHUNK):
            r.scores[a, c] *= T.Select(a >= c, r.row[a] * t.pair_rows[stage, PAIR_COLUMN, c], 0.0)
    else:
        for a in T.Parallel(CHUNK):
            r.decay[a] = t.rows[stage, DECAY, a]
        T.wait_wgmma(0)
        for a, c in T.Parallel(CHUNK, CHUNK):
            since = T.exp2(T.Select(a >= c, r.decay[a] - t.pair_rows[stage, PAIR_REFERENCE, c], VANISHING))
            r.scores[a, c] *= r.row[a] * (since * t.pair_rows[stage, PAIR_COLUMN, c])


@T.macro
def make_scores(thread, dtype, t, b, r, item):
    """P of each chunk, one or two ahead of the warpgroup that needs it."""
    rows = T.alloc_var("int32")
    for i in rolled(item[ITEM_CHUNKS]):
        stage, place = i % STAGES, i % SCORES
        rows = T.Select(i == 0, item[ITEM_LAST_ROWS], CHUNK)
        wait(b.chunk_ready, stage, phase(i, STAGES))
        T.wgmma_gemm(t.q[stage, :, :], t.k[stage, :, :], r.scores, transpose_B=True, clear_accum=True)
        weigh_scores(t, r, stage)
        if rows < CHUNK:
            # The other role is clearing these rows of k and q, and any number may be there.
            for a, c in T.Parallel(CHUNK, CHUNK):
                r.scores[a, c] = T.Select(T.max(a, c) < rows, r.scores[a, c], 0.0)
        wait(b.scores_free, place, phase_before(i, SCORES))
        for a, c in T.Parallel(CHUNK, CHUNK):
            t.scores[place, a, c] = T.cast(r.scores[a, c], dtype)
        T.fence_proxy_async()
        arrive(b.scores_ready, place, thread)


@T.macro
def load_tile(t, b, stage, source, token, head, column):
    """A tile to the buffer of a stage that is known when the kernel is compiled."""
    tile = t.values[stage]
    T.tma_copy(source[token : token + CHUNK, head, column : column + VALUE_TILE], tile, barrier=b.chunk_ready[stage])


@T.macro
def load_chunk(thread, t, b, stage, token, slot, head, key_head, k, solve, row_scales):
    """What both directions read of a chunk; the caller arrives."""
    T.tma_copy(k[token : token + CHUNK, key_head, :], t.k[stage, :, :], barrier=b.chunk_ready[stage])
    T.tma_copy(solve[slot, head, :, :], t.solve[stage, HALF_CHUNK:, :], barrier=b.chunk_ready[stage])
    T.tma_copy(row_scales[slot, head, FIRST_SCAN_ROW:, :], t.rows[stage, :, :], barrier=b.chunk_ready[stage])


@T.macro
def load_links(thread, t, b, item, sign, value_heads, turned, transitions):
    """Transitions of the links, from the farthest on, to the places of keys and queries."""
    for i in rolled(item[ITEM_LINKS]):
        row = item[ITEM_OWN] + (item[ITEM_LINKS] - i) * sign * value_heads
        wait(b.link_free, 0, phase_before(i, 1))
        T.tma_copy(transitions[row, turned + HIGH, 0, :, :], t.k[0, :, :], barrier=b.link_ready[0])
        T.tma_copy(transitions[row, turned + HIGH, 1, :, :], t.k[1, :, :], barrier=b.link_ready[0])
        T.tma_copy(transitions[row, turned + LOW, 0, :, :], t.q[0, :, :], barrier=b.link_ready[0])
        T.tma_copy(transitions[row, turned + LOW, 1, :, :], t.q[1, :, :], barrier=b.link_ready[0])
        arrive(b.link_ready, 0, thread)
    if item[ITEM_LINKS] > 0:
        wait(b.link_free, 0, phase(item[ITEM_LINKS] - 1, 1))


@T.macro
def load_forward(thread, t, b, item, head, key_head, column, k, v, solve, row_scales):
    for i in rolled(item[ITEM_CHUNKS]):
        stage = i % STAGES
        token, slot = item[ITEM_FIRST_TOKEN] + i * CHUNK, item[ITEM_FIRST_SLOT] + i
        wait(b.chunk_free, stage, phase_before(i, STAGES))
        load_chunk(thread, t, b, stage, token, slot, head, key_head, k, solve, row_scales)
        if item[ITEM_START] != START_IDENTITY:
            if stage == 0:
                load_tile(t, b, 0, v, token, head, column)
            elif stage == 1:
                load_tile(t, b, 1, v, token, head, column)
            else:
                load_tile(t, b, 2, v, token, head, column)
        arrive(b.chunk_ready, stage, thread)


@T.macro
def load_reverse(thread, t, b, item, head, key_head, column, q, k, dout, solve, row_scales, pair_scales):
    for i in rolled(item[ITEM_CHUNKS]):
        stage, index = i % STAGES, item[ITEM_CHUNKS] - 1 - i
        token, slot = item[ITEM_FIRST_TOKEN] + index * CHUNK, item[ITEM_FIRST_SLOT] + index
        wait(b.chunk_free, stage, phase_before(i, STAGES))
        load_chunk(thread, t, b, stage, token, slot, head, key_head, k, solve, row_scales)
        if stage == 0:
            load_tile(t, b, 0, dout, token, head, column)
        elif stage == 1:
            load_tile(t, b, 1, dout, token, head, column)
        else:
            load_tile(t, b, 2, dout, token, head, column)
        T.tma_copy(q[token : token + CHUNK, key_head, :], t.q[stage, :, :], barrier=b.chunk_ready[stage])
        T.tma_copy(pair_scales[slot, head, :, :], t.pair_rows[stage, :, :], barrier=b.chunk_ready[stage])
        arrive(b.chunk_ready, stage, thread)


@T.macro
def tell(thread, b, batch):
    """Says that this storer has the tiles of batch `batch` in memory, once there is room for another announcement."""
    wait(b.stored_free, batch % ANNOUNCEMENTS, phase_before(batch, ANNOUNCEMENTS))
    arrive(b.stored_ready, batch % ANNOUNCEMENTS, thread)


@T.macro
def report(thread, b, i):
    """Behind the store of the i-th chunk: those before it are in memory, and are told of when they make a batch."""
    T.tma_store_wait(1, read=False)
    if T.And(i > 0, i % AT_ONCE == 0):
        tell(thread, b, T.truncdiv(i, AT_ONCE) - 1)


@T.macro
def report_rest(thread, b, item):
    """Behind the last chunk: all are in memory, and the last batch is told of."""
    T.tma_store_wait(0, read=False)
    if outputs_of(item) > 0:
        tell(thread, b, batches_of(item) - 1)


@T.macro
def announce(thread, b, item, is_reverse, arrivals, queue, cursors, chunk_slots, key_head, key_heads, group):
    """Counts the chunks that both storers have in memory, a lane each; of offsets that decrease some may lie in no slot."""
    for batch in rolled(batches_of(item)):
        lane = thread % WARP
        i = batch * AT_ONCE + lane
        wait(b.stored_ready, batch % ANNOUNCEMENTS, phase(batch, ANNOUNCEMENTS))
        slot = item[ITEM_FIRST_SLOT] + T.Select(is_reverse, outputs_of(item) - 1 - i, item[ITEM_SILENT] + i)
        if T.And(T.And(lane < AT_ONCE, i < outputs_of(item)), T.And(slot >= 0, slot < chunk_slots)):
            count_block(arrivals, queue, cursors, slot * key_heads + key_head, group)
        arrive(b.stored_free, batch % ANNOUNCEMENTS, thread)


@T.macro
def store_states(thread, t, b, item, head, half, is_reverse, states):
    """The state of every chunk with outputs to its slot."""
    for i in rolled(outputs_of(item)):
        slot = item[ITEM_FIRST_SLOT] + T.Select(is_reverse, outputs_of(item) - 1 - i, item[ITEM_SILENT] + i)
        wait(b.state_ready, 0, phase(i, 1))
        T.fence_proxy_async()  # here, where it holds up nobody who computes: it orders what the wait has seen
        T.tma_copy(t.state, states[slot, head, half, :, :])
        T.tma_store_wait(0)
        arrive(b.state_free, 0, thread)
        report(thread, b, i)
    report_rest(thread, b, item)


@T.macro
def store_errors(thread, t, b, item, head, half, errors):
    for i in rolled(outputs_of(item)):
        slot = item[ITEM_FIRST_SLOT] + item[ITEM_SILENT] + i
        wait(b.values_ready, 0, phase(i, 1))
        T.fence_proxy_async()  # here, where it holds up nobody who computes: it orders what the wait has seen
        T.tma_copy(t.out, errors[slot, head, half, :, :])
        T.tma_store_wait(0)
        arrive(b.values_free, 0, thread)
        report(thread, b, i)
    report_rest(thread, b, item)


@T.macro
def store_value_gradients(thread, lane, t, b, item, head, column, dv):
    """dv of every chunk with outputs; one that ends within the tile is stored row by row."""
    for i in rolled(outputs_of(item)):
        index = outputs_of(item) - 1 - i
        token = item[ITEM_FIRST_TOKEN] + index * CHUNK
        rows = T.Select(T.And(i == 0, item[ITEM_SILENT] == 0), item[ITEM_LAST_ROWS], CHUNK)
        wait(b.values_ready, 0, phase(i, 1))
        T.fence_proxy_async()  # here, where it holds up nobody who computes: it orders what the wait has seen
        if rows >= CHUNK:
            T.tma_copy(t.out, dv[token : token + CHUNK, head, column : column + VALUE_TILE])
            T.tma_store_wait(0)
        else:
            for a in rolled(rows):
                for e in T.vectorized(2):
                    dv[token + a, head, column + 2 * lane + e] = t.out[a, 2 * lane + e]
        arrive(b.values_free, 0, thread)
        report(thread, b, i)
    report_rest(thread, b, item)
