"""What each warp role of the gradient kernel does; the page that binds them is `backward_gradients.py`.

Rows of a chunk are named a and columns c. A row fragment holds one number of each row.
"""

import tilelang.language as T

from ._backward_gradient_tiles import (
    BOTH_HALVES,
    HALVES,
    KEYS,
    PART_BETA,
    PART_DECAY,
    PART_KEY,
    PART_QUERY,
    PART_STATE,
    QUERIES,
    SLOTS,
    SOURCES,
    STRIP,
    STRIPS,
)
from ._backward_scan_tiles import phase, phase_before
from ._sm90 import (
    BACKWARD_GRADIENTS,
    CHUNK,
    CHUNK_FIRST_TOKEN,
    CHUNK_ROWS,
    HEAD_DIM,
    NORM_KEY,
    ROW_DECAY,
    ROW_STRENGTH,
    STRONGEST_GATE,
    VALUE_TILE,
    VANISHING,
    WARP,
    WARPGROUP,
)
from ._tile import arrive, wait

FLOAT32 = "float32"
EIGHT = 8  # 16-bit values of a 16-byte access
PAIR_THREADS = BACKWARD_GRADIENTS.pair_warps * WARP
MEETING = 1  # named barriers 1 and 2: a consumer each, in a chunk that ends early
ROUNDING = 0.5  # of a gate at the bound, whose sum with the others has been rounded


@T.macro
def clear_tail(dtype, t, slot, rows, consumer):
    """Zeros in the rows of q and k that belong to no token; each consumer writes them all and waits for itself only."""
    for source in T.serial(SOURCES):
        for a, c in T.Parallel(CHUNK, HEAD_DIM):
            if a >= rows:
                t.tokens[slot * SOURCES + source, a, c] = T.cast(0, dtype)
    T.fence_proxy_async()
    T.sync_threads(MEETING + consumer, WARPGROUP)


@T.macro
def receive_tokens(dtype, t, b, slot, works, rows, consumer):
    wait(b.tokens_ready, slot, phase(works, SLOTS))
    if rows < CHUNK:
        clear_tail(dtype, t, slot, rows, consumer)


def same_slot(works):
    """The slot of q and k, through a shuffle that the compiler cannot look through.

    It would compute all addresses of the tiles once, outside the loop over heads, and keep them in registers that are not there.
    """
    return T.shfl_sync(works % SLOTS, 0)


@T.macro
def receive_halves(b, heads):
    for half in BOTH_HALVES:
        wait(b.half_ready, half, phase(heads, 1))


@T.macro
def release_halves(thread, b):
    for half in BOTH_HALVES:
        arrive(b.half_free, half, thread)


def of_strip(tile, index, strip):
    """Rows of a staged tile for a strip of columns."""
    return tile[index, strip * STRIP : strip * STRIP + STRIP, :]


@T.macro
def multiply_pairs(r, left, first_left, right, first_right, tokens, rows, columns, strip):
    """r.pairs = left right^T over all value columns, and r.scores = rows columns^T, for a strip of columns."""
    T.wgmma_gemm(
        left[first_left, :, :], of_strip(right, first_right, strip), r.pairs, transpose_B=True, clear_accum=True
    )
    T.wgmma_gemm(left[first_left + 1, :, :], of_strip(right, first_right + 1, strip), r.pairs, transpose_B=True)
    T.wgmma_gemm(tokens[rows, :, :], of_strip(tokens, columns, strip), r.scores, transpose_B=True, clear_accum=True)
    T.wait_wgmma(0)
    T.sync_warp()  # shared memory is read after it: what is read earlier and held does not fit in registers


@T.macro
def add_pairs(r, tokens, columns, strip):
    """r.grad += r.left times the tokens of the strip's columns."""
    T.wgmma_gemm(r.left, of_strip(tokens, columns, strip), r.grad)
    T.wait_wgmma(0)


@T.macro
def multiply_state(r, left, first_left, states):
    """r.product = left S^T."""
    T.wgmma_gemm(left[first_left, :, :], states[0, :, :], r.product, clear_accum=True)
    T.wgmma_gemm(left[first_left + 1, :, :], states[1, :, :], r.product)
    T.wait_wgmma(0)
    T.sync_warp()


@T.macro
def row_dots(r, tokens, rows):
    """r.dot = rows of r.product times rows of the tokens; r.product is spent."""
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        r.product[a, c] *= T.cast(tokens[rows, a, c], FLOAT32)
    T.reduce_sum(r.product, r.dot, dim=1)


@T.macro
def read_rows(t, r, slot, rows, source, factor):
    """Rows that read the state and earlier tokens: queries with do, keys with dv; see `backward_gradients.py`.

    r.grad gains what they give, r.sum and r.factor r.dot are the two parts of its product with the rows themselves.
    """
    readers, keys = slot * SOURCES + source, slot * SOURCES + KEYS
    for a in T.Parallel(CHUNK):
        r.decay[a] = t.rows[0, ROW_DECAY, a]
    T.clear(r.sum)
    for strip in T.serial(STRIPS):
        multiply_pairs(r, t.grads, source * HALVES, t.errors, 0, t.tokens, readers, keys, strip)
        for a, c in T.Parallel(CHUNK, STRIP):
            column = strip * STRIP + c
            since = T.exp2(T.Select(a >= column, r.decay[a] - t.rows[0, ROW_DECAY, column], VANISHING))
            weight = since * (factor * t.rows[0, ROW_STRENGTH, column] * t.norms[slot, NORM_KEY, column])
            r.pairs[a, c] = T.Select((a >= column + source) & (a < rows), r.pairs[a, c] * weight, 0.0)
            r.left[a, c] = r.pairs[a, c]
            r.scores[a, c] = T.Select(a > column, r.scores[a, c] * r.pairs[a, c], 0.0)
        T.reduce_sum(r.scores, r.sum, dim=1, clear=False)
        add_pairs(r, t.tokens, keys, strip)
    for a in T.Parallel(CHUNK):
        r.factor[a] = factor * T.exp2(r.decay[a])
    multiply_state(r, t.grads, source * HALVES, t.states)
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        r.grad[a, c] += r.product[a, c] * r.factor[a]
    row_dots(r, t.tokens, readers)


@T.macro
def query_head(thread, t, b, r, works, heads, rows, scale):
    """Rows of dq of one head."""
    slot = same_slot(works)
    receive_halves(b, heads)
    read_rows(t, r, slot, rows, QUERIES, scale)
    release_halves(thread, b)
    wait(b.parts_free, heads % SLOTS, phase_before(heads, SLOTS))
    for a in T.Parallel(CHUNK):
        t.parts[heads % SLOTS, PART_QUERY, a] = r.norm[a] * (r.sum[a] + r.factor[a] * r.dot[a])
    arrive(b.parts_ready, heads % SLOTS, thread)


@T.macro
def rows_read(t, r, slot, rows, scale):
    """What later queries and, in a second turn, later keys read of a row; r.sum, and without its own query r.strict.

    A loop, although both turns are known: two programs side by side do not fit in registers.
    """
    T.clear(r.sum)
    T.clear(r.strict)
    for turn in T.serial(SOURCES * STRIPS):
        source, strip = turn // STRIPS, turn % STRIPS
        keys, readers = slot * SOURCES + KEYS, slot * SOURCES + source
        factor = T.Select(source == QUERIES, scale, -1.0)
        multiply_pairs(r, t.errors, 0, t.grads, source * HALVES, t.tokens, keys, readers, strip)
        for a, c in T.Parallel(CHUNK, STRIP):
            column = strip * STRIP + c
            since = T.exp2(T.Select(column >= a, t.rows[0, ROW_DECAY, column] - r.decay[a], VANISHING))
            weight = since * (factor * t.norms[slot, source, column])
            r.pairs[a, c] = T.Select((column >= a + source) & (column < rows), r.pairs[a, c] * weight, 0.0)
            r.left[a, c] = r.pairs[a, c] * r.strength[a]
            r.scores[a, c] *= r.pairs[a, c]
        T.reduce_sum(r.scores, r.sum, dim=1, clear=False)
        for a, c in T.Parallel(CHUNK, STRIP):
            r.scores[a, c] = T.Select(strip * STRIP + c > a, r.scores[a, c], 0.0)
        T.reduce_sum(r.scores, r.strict, dim=1, clear=False)
        add_pairs(r, t.tokens, readers, strip)


@T.macro
def key_head(thread, t, b, r, works, heads, rows, scale):
    """Rows of dk of one head: keys read the state and earlier keys, and are read by all that comes later."""
    slot = same_slot(works)
    receive_halves(b, heads)
    for a in T.Parallel(CHUNK):
        r.strength[a] = t.rows[0, ROW_STRENGTH, a]
    read_rows(t, r, slot, rows, KEYS, -1.0)
    for a in T.Parallel(CHUNK):
        r.read[a] = r.norm[a] * (r.sum[a] + r.factor[a] * r.dot[a])
    rows_read(t, r, slot, rows, scale)
    for a in T.Parallel(CHUNK):
        r.factor[a] = T.exp2(t.rows[0, ROW_DECAY, CHUNK - 1] - r.decay[a])
    multiply_state(r, t.errors, 0, t.dstates)
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        r.grad[a, c] += r.product[a, c] * (r.factor[a] * r.strength[a])
    row_dots(r, t.tokens, slot * SOURCES + KEYS)
    release_halves(thread, b)
    wait(b.parts_free, heads % SLOTS, phase_before(heads, SLOTS))
    for a in T.Parallel(CHUNK):
        t.parts[heads % SLOTS, PART_BETA, a] = r.norm[a] * (r.sum[a] + r.factor[a] * r.dot[a])
    for a in T.Parallel(CHUNK):
        t.parts[heads % SLOTS, PART_KEY, a] = r.read[a] - r.norm[a] * r.strength[a] * r.strict[a]
    for a in T.Parallel(CHUNK):
        t.parts[heads % SLOTS, PART_STATE, a] = r.norm[a] * r.strength[a] * r.factor[a] * r.dot[a]
    for a in T.Parallel(CHUNK):
        t.parts[heads % SLOTS, PART_DECAY, a] = r.decay[a]
    arrive(b.parts_ready, heads % SLOTS, thread)


@T.macro
def write_gradient(dtype, t, r, slot, source, out, first, rows, head, use_l2norm):
    """Rows of a gradient, without the part along the rows themselves if they are normalised."""
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        r.product[a, c] = r.grad[a, c]
    row_dots(r, t.tokens, slot * SOURCES + source)
    for a in T.Parallel(CHUNK):
        r.dot[a] = T.Select(use_l2norm != 0, r.dot[a] * r.norm[a] * r.norm[a], 0.0)
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        if a < rows:
            along = r.dot[a] * T.cast(t.tokens[slot * SOURCES + source, a, c], FLOAT32)
            out[first + a, head, c] = T.cast(r.norm[a] * (r.grad[a, c] - along), dtype)


@T.macro
def start_rows(t, r, slot, norm):
    T.clear(r.grad)
    for a in T.Parallel(CHUNK):
        r.norm[a] = t.norms[slot, norm, a]


@T.macro
def find_work(work, place, chunks, count, key_heads, blocks, turn, block):
    """place = slot, key head, first token, rows of the turn's chunk; no rows if there is none."""
    work = turn * blocks + block
    for word in T.unroll(4):
        place[word] = 0
    if work < count:
        place[0] = T.truncdiv(work, key_heads)
        place[1] = T.truncmod(work, key_heads)
        place[2] = chunks[place[0], CHUNK_FIRST_TOKEN]
        place[3] = chunks[place[0], CHUNK_ROWS]


def of_half(tensor, token, head, half):
    """A tile of token rows and half of their value columns."""
    return tensor[token : token + CHUNK, head, half * VALUE_TILE : half * VALUE_TILE + VALUE_TILE]


@T.macro
def load_half(thread, t, b, slot, head, token, half, heads, dout, dv, errors, states, dstates, row_scales):
    wait(b.half_free, half, phase_before(heads, 1))
    T.tma_copy(of_half(dout, token, head, half), t.grads[half, :, :], barrier=b.half_ready[half])
    T.tma_copy(of_half(dv, token, head, half), t.grads[HALVES + half, :, :], barrier=b.half_ready[half])
    T.tma_copy(errors[slot, head, half, :, :], t.errors[half, :, :], barrier=b.half_ready[half])
    T.tma_copy(states[slot, head, half, :, :], t.states[half, :, :], barrier=b.half_ready[half])
    T.tma_copy(dstates[slot, head, half, :, :], t.dstates[half, :, :], barrier=b.half_ready[half])
    T.tma_copy(row_scales[slot, head, :, :], t.rows[half, :, :], barrier=b.half_ready[half])
    arrive(b.half_ready, half, thread)


@T.macro
def load_tokens(thread, t, b, place, works, q, k, norms):
    slot, token, head = works % SLOTS, place[2], place[1]
    wait(b.tokens_free, slot, phase_before(works, SLOTS))
    T.tma_copy(
        q[token : token + CHUNK, head, :], t.tokens[slot * SOURCES + QUERIES, :, :], barrier=b.tokens_ready[slot]
    )
    T.tma_copy(k[token : token + CHUNK, head, :], t.tokens[slot * SOURCES + KEYS, :, :], barrier=b.tokens_ready[slot])
    T.tma_copy(norms[place[0], head, :, :], t.norms[slot, :, :], barrier=b.tokens_ready[slot])
    arrive(b.tokens_ready, slot, thread)


@T.macro
def pair_half(dtype, t, half, lane, sums):
    """sums += <S, dS> of this thread's share of 64 value rows."""
    one, other = T.alloc_local((EIGHT,), dtype), T.alloc_local((EIGHT,), dtype)
    for turn in T.serial(VALUE_TILE * HEAD_DIM // EIGHT // PAIR_THREADS):
        row, column = (turn * PAIR_THREADS + lane) // (HEAD_DIM // EIGHT), lane % (HEAD_DIM // EIGHT) * EIGHT
        for e in T.vectorized(EIGHT):
            one[e] = t.states[half, row, column + e]
        for e in T.vectorized(EIGHT):
            other[e] = t.dstates[half, row, column + e]
        for e in T.unroll(EIGHT):
            sums[e % 2] += T.cast(one[e], FLOAT32) * T.cast(other[e], FLOAT32)


@T.macro
def pair_head(thread, dtype, t, b, heads, lane):
    """gamma_end <S, dS> of one head; two warps, a partial sum each."""
    sums, decay = T.alloc_local((2,), FLOAT32), T.alloc_var(FLOAT32)
    for e in T.unroll(2):
        sums[e] = 0.0
    decay = 0.0
    for half in BOTH_HALVES:
        wait(b.half_ready, half, phase(heads, 1))
        pair_half(dtype, t, half, lane, sums)
        decay = T.exp2(t.rows[half, ROW_DECAY, CHUNK - 1])
        arrive(b.half_free, half, thread)
    sums[0] += sums[1]
    for step in T.unroll(5):
        sums[0] += T.shfl_xor(sums[0], 1 << step)
    wait(b.parts_free, heads % SLOTS, phase_before(heads, SLOTS))
    if lane % WARP == 0:
        t.pair[heads % SLOTS, lane // WARP] = sums[0] * decay
    arrive(b.parts_ready, heads % SLOTS, thread)


@T.macro
def sum_head(thread, t, b, heads, lane, first, rows, head, dg, dbeta):
    """dg and dbeta of one head from its parts: a gate acts on everything behind it, so its gradient is a sum from there on."""
    slot = heads % SLOTS
    state, beta, decay = (T.alloc_local((2,), FLOAT32) for _ in range(3))
    total, carried, gate = T.alloc_local((2,), FLOAT32), T.alloc_var(FLOAT32), T.alloc_var(FLOAT32)
    wait(b.parts_ready, slot, phase(heads, SLOTS))
    for e in T.unroll(2):
        row = 2 * lane + e
        beta[e] = t.parts[slot, PART_BETA, row]
        state[e] = T.Select(row < rows - 1, t.parts[slot, PART_STATE, row], 0.0)
        total[e] = t.parts[slot, PART_QUERY, row] + t.parts[slot, PART_KEY, row]
        total[e] = T.Select(row < rows, total[e] - state[e], 0.0)
        decay[e] = t.parts[slot, PART_DECAY, row]
    carried = state[0] + state[1]
    for step in T.unroll(5):
        carried += T.shfl_xor(carried, 1 << step)
    carried += t.pair[slot, 0] + t.pair[slot, 1]
    for e in T.unroll(2):
        total[e] += T.Select(2 * lane + e == rows - 1, carried, 0.0)
    arrive(b.parts_free, slot, thread)
    total[0] += total[1]
    for step in T.unroll(5):
        carried = T.shfl_down(total[0], 1 << step)
        total[0] += T.Select(lane + (1 << step) < WARP, carried, 0.0)
    carried = T.shfl_down(total[0], 1)
    total[1] += T.Select(lane + 1 < WARP, carried, 0.0)
    carried = T.shfl_up(decay[1], 1)
    for e in T.unroll(2):
        if 2 * lane + e < rows:
            gate = decay[e] - T.if_then_else(e == 1, decay[0], T.Select(lane > 0, carried, 0.0))
            dg[first + 2 * lane + e, head] = T.Select(gate < STRONGEST_GATE + ROUNDING, 0.0, total[e])
            dbeta[first + 2 * lane + e, head] = beta[e]
