"""What each warp role of the gradient kernel does; the page that binds them is `backward_gradients.py`.

Rows of a chunk are named a and columns c. A row fragment holds one number of each row.
"""

import tilelang.language as T

from ._backward_gradient_tiles import (
    BOTH_HALVES,
    COLUMN_GROUPS,
    DOUT,
    DSTATES,
    DV,
    ERRORS,
    HALVES,
    KEYS,
    PART_OWN,
    PART_PAIRS,
    PART_QUERY,
    PART_READ,
    PART_STATE,
    PART_TRACE,
    QUERIES,
    SLOTS,
    SOURCES,
    STATES,
)
from ._backward_scan_tiles import phase, phase_before
from ._ready import order_copies, take_work
from ._sm90 import (
    CHUNK,
    GRADIENT_ROWS,
    HEAD_DIM,
    ROW_DECAY,
    ROW_SINCE,
    ROW_STRENGTH,
    ROW_UNTIL,
    STRONGEST_GATE,
    UNFACTORED,
    VALUE_TILE,
    VANISHING,
    WARP,
    WARPGROUP,
    WORK_FIRST_TOKEN,
    WORK_KEY_HEAD,
    WORK_ROWS,
    WORK_SLOT,
)
from ._tile import arrive, wait

FLOAT32 = "float32"
EIGHT = 8  # 16-bit values of a 16-byte access
QUAD = 4  # threads that share a row of an accumulator
MEETING = 1  # named barriers 1 to 3: a consumer each, in a chunk that ends early
ROUNDING = 0.5  # of a gate at the bound, whose sum with the others has been rounded


@T.macro
def clear_tail(dtype, thread, t, slot, rows, consumer):
    """Zeros in the rows of q and k that belong to no token; each consumer writes them all and waits for itself only."""
    place = T.shfl_xor(thread % WARPGROUP, 0)
    for source in T.serial(SOURCES):
        for turn in T.serial(CHUNK * HEAD_DIM // EIGHT // WARPGROUP):
            row = (turn * WARPGROUP + place) // (HEAD_DIM // EIGHT)
            if row >= rows:
                for e in T.vectorized(EIGHT):
                    t.tokens[slot * SOURCES + source, row, place % (HEAD_DIM // EIGHT) * EIGHT + e] = T.cast(0, dtype)
    T.fence_proxy_async()
    T.sync_threads(MEETING + consumer, WARPGROUP)


@T.macro
def receive_tokens(dtype, thread, t, b, slot, works, rows, consumer):
    wait(b.tokens_ready, slot, phase(works, SLOTS))
    if rows < CHUNK:
        clear_tail(dtype, thread, t, slot, rows, consumer)


def same_slot(works):
    """The slot of q and k, through a shuffle that the compiler cannot look through.

    It would compute all addresses of the tiles once, outside the loop over heads, and keep them in registers that are not there.
    """
    return T.shfl_sync(works % SLOTS, 0)


@T.macro
def multiply_state(t, r, left, square):
    """r.product = left S^T, the halves of the value columns one after the other."""
    T.clear(r.product)  # costs nothing, and ends the life of what was there
    T.wgmma_gemm(t.values[left * HALVES, :, :], t.squares[square * HALVES, :, :], r.product, clear_accum=True)
    T.wgmma_gemm(t.values[left * HALVES + 1, :, :], t.squares[square * HALVES + 1, :, :], r.product)
    T.wait_wgmma(0)


@T.macro
def add_state(t, r, slot, source):
    """r.grad += r.factor r.product, and r.dot: rows of the product times rows of the tokens; it is spent."""
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        r.grad[a, c] += r.product[a, c] * r.factor[a]
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        r.product[a, c] *= T.cast(t.tokens[slot * SOURCES + source, a, c], FLOAT32)
    T.reduce_sum(r.product, r.dot, dim=1)


def column_of_quad(c):
    """Column of an accumulator's element in the first of the threads that share its row; theirs are 2, 4 and 6 behind."""
    return c // 8 * 8 + c % 2


def distance(thread, a):
    """Row minus the thread's first column: an element is on the diagonal where this is its `column_of_quad`.

    Through a shuffle, so that the compiler forms it where it is used and keeps no register for it, or for each element.
    """
    place = T.shfl_xor(thread % WARPGROUP, 0)
    return a // 8 % 2 * 8 + place // WARP * 16 + place % WARP // QUAD - place % QUAD * 2


@T.macro
def trace_states(thread, t, r, staged):
    """Parts of <S, dS>: the diagonal of S^T dS, one half of the value columns after the other."""
    T.clear(r.trace)
    for half in BOTH_HALVES:
        T.wgmma_gemm(
            t.squares[STATES * HALVES + half, :, :], t.squares[DSTATES * HALVES + half, :, :], r.trace,
            transpose_B=True, clear_accum=half == 0,
        )  # fmt: skip
    T.wait_wgmma(0)
    for a in T.Parallel(CHUNK):
        r.gap[a] = distance(thread, a)
    for a, c in T.Parallel(VALUE_TILE, VALUE_TILE):
        if r.gap[a] == column_of_quad(c):
            t.parts[staged, PART_TRACE, a] = r.trace[a, c]


@T.macro
def query_head(thread, t, b, r, works, heads, scale):
    """Rows of dq of one head, and <S, dS>."""
    slot, staged = same_slot(works), heads % SLOTS
    wait(b.rows_ready, staged, phase(heads, SLOTS))
    for a in T.Parallel(CHUNK):
        r.factor[a] = r.norm[a] * scale * T.exp2(t.rows[staged, ROW_DECAY, a])
    arrive(b.rows_free, staged, thread)
    wait(b.parts_free, staged, phase_before(heads, SLOTS))
    wait(b.dstates_ready, 0, phase(heads, 1))
    wait(b.states_ready, 0, phase(heads, 1))
    trace_states(thread, t, r, staged)
    arrive(b.dstates_free, 0, thread)
    wait(b.dout_ready, 0, phase(heads, 1))
    multiply_state(t, r, DOUT, STATES)
    arrive(b.dout_free, 0, thread)
    arrive(b.states_free, 0, thread)
    add_state(t, r, slot, QUERIES)
    for a in T.Parallel(CHUNK):
        t.parts[staged, PART_QUERY, a] = r.factor[a] * r.dot[a]
    arrive(b.parts_ready, staged, thread)
    wait(b.pairs_ready, staged, phase(heads, SLOTS))
    T.wgmma_gemm(t.pairs[staged * SOURCES + QUERIES, :, :], t.tokens[slot * SOURCES + KEYS, :, :], r.grad)
    T.wait_wgmma(0)
    arrive(b.pairs_free, staged, thread)


@T.macro
def receive_keys(b, turn, heads):
    if turn == 0:
        wait(b.errors_ready, 0, phase(heads, 1))
        wait(b.dstates_ready, 0, phase(heads, 1))
    else:
        wait(b.dv_ready, 0, phase(heads, 1))
        wait(b.states_ready, 0, phase(heads, 1))


@T.macro
def release_keys(thread, b, turn):
    if turn == 0:
        arrive(b.errors_free, 0, thread)
        arrive(b.dstates_free, 0, thread)
    else:
        arrive(b.dv_free, 0, thread)
        arrive(b.states_free, 0, thread)


@T.macro
def key_head(thread, t, b, r, works, heads):
    """Rows of dk of one head: keys write to the state, read it and earlier keys, and are read by all that comes later.

    A loop over writing and reading, although both turns are known: the compiler would put off sums of the first into the second.
    """
    slot, staged = same_slot(works), heads % SLOTS
    wait(b.rows_ready, staged, phase(heads, SLOTS))
    wait(b.parts_free, staged, phase_before(heads, SLOTS))
    for turn in T.serial(2):
        receive_keys(b, turn, heads)
        multiply_state(t, r, 2 * turn, turn)
        release_keys(thread, b, turn)
        for a in T.Parallel(CHUNK):
            decay = t.rows[staged, ROW_DECAY, a]
            r.factor[a] = T.exp2(T.Select(turn == 0, t.rows[staged, ROW_DECAY, CHUNK - 1] - decay, decay))
            r.factor[a] *= r.norm[a] * T.Select(turn == 0, t.rows[staged, ROW_STRENGTH, a], -1.0)
        add_state(t, r, slot, KEYS)
        for a in T.Parallel(CHUNK):
            t.parts[staged, PART_STATE + turn, a] = r.factor[a] * r.dot[a]
    arrive(b.rows_free, staged, thread)
    arrive(b.parts_ready, staged, thread)
    wait(b.pairs_ready, staged, phase(heads, SLOTS))
    by_query, by_key = staged * SOURCES + QUERIES, staged * SOURCES + KEYS
    T.wgmma_gemm(t.pairs[by_query, :, :], t.tokens[slot * SOURCES + QUERIES, :, :], r.grad, transpose_A=True)
    T.wgmma_gemm(t.pairs[by_key, :, :], t.tokens[slot * SOURCES + KEYS, :, :], r.grad, transpose_A=True)
    T.wgmma_gemm(t.pairs[by_key, :, :], t.tokens[slot * SOURCES + KEYS, :, :], r.grad)
    T.wait_wgmma(0)
    arrive(b.pairs_free, staged, thread)


@T.macro
def multiply_pairs(t, r, slot, source):
    """Products of all pairs of tokens: do or dv times errors, and q or k times k."""
    rows, keys = slot * SOURCES + source, slot * SOURCES + KEYS
    for half in BOTH_HALVES:
        T.wgmma_gemm(
            t.values[(DOUT + source) * HALVES + half, :, :], t.values[ERRORS * HALVES + half, :, :], r.product,
            transpose_B=True, clear_accum=half == 0,
        )  # fmt: skip
    T.wgmma_gemm(t.tokens[rows, :, :], t.tokens[keys, :, :], r.scores, transpose_B=True, clear_accum=True)
    T.wait_wgmma(0)


@T.macro
def weigh(thread, t, r, staged):
    """r.weights: decay from a token, the column, to the same or a later one, the row, times norm and strength of the column."""
    for a in T.Parallel(CHUNK):
        r.gap[a] = distance(thread, a)
    if t.rows[staged, ROW_SINCE, 0] != UNFACTORED:
        for a in T.Parallel(CHUNK):
            r.decay[a] = t.rows[staged, ROW_SINCE, a]
        for a, c in T.Parallel(CHUNK, CHUNK):
            is_read = r.gap[a] >= column_of_quad(c)
            r.weights[a, c] = T.Select(is_read, r.decay[a] * t.rows[staged, ROW_UNTIL, c], 0.0)
    else:
        for a in T.Parallel(CHUNK):
            r.decay[a] = t.rows[staged, ROW_DECAY, a]
        for a, c in T.Parallel(CHUNK, CHUNK):
            is_read = r.gap[a] >= column_of_quad(c)
            since = T.exp2(T.Select(is_read, r.decay[a] - t.rows[staged, ROW_DECAY, c], VANISHING))
            r.weights[a, c] = since * t.rows[staged, ROW_UNTIL, c]


@T.macro
def weigh_pairs(t, r, slot, staged, rows, source, scale):
    """t.pairs: what queries or keys, the rows, read of the columns, with all scales of row and column.

    r.pairs gains what a pair of tokens adds to the gradient of beta of the column, times beta.
    """
    for a in T.Parallel(CHUNK):
        r.factor[a] = T.Select(source == QUERIES, scale, -1.0) * t.norms[slot, source, a]
    for a, c in T.Parallel(CHUNK, CHUNK):
        r.product[a, c] *= r.weights[a, c] * r.factor[a]
    if source == KEYS:
        for a, c in T.Parallel(CHUNK, CHUNK):
            r.product[a, c] = T.Select(r.gap[a] == column_of_quad(c), 0.0, r.product[a, c])
    if rows < CHUNK:
        for a, c in T.Parallel(CHUNK, CHUNK):
            r.product[a, c] = T.Select(a < rows, r.product[a, c], 0.0)
    for a, c in T.Parallel(CHUNK, CHUNK):
        r.pairs[a, c] += r.scores[a, c] * r.product[a, c]
    for a, c in T.Parallel(CHUNK, CHUNK):
        t.pairs[staged * SOURCES + source, a, c] = r.product[a, c]


@T.macro
def sum_pairs(thread, t, r, staged):
    """Sums over rows and columns of r.pairs, which is spent; a token and itself apart, since no gate is between them."""
    for a, c in T.Parallel(CHUNK, CHUNK):
        if r.gap[a] == column_of_quad(c):
            t.parts[staged, PART_OWN, a] = r.pairs[a, c]
            r.pairs[a, c] = 0.0
    for group, c in T.Parallel(COLUMN_GROUPS, CHUNK):
        r.columns[group, c] = r.pairs[group // 8 * 16 + group % 8, c]
    for group, c in T.Parallel(COLUMN_GROUPS, CHUNK):
        r.columns[group, c] += r.pairs[group // 8 * 16 + group % 8 + 8, c]
    for group, c in T.Parallel(COLUMN_GROUPS, CHUNK):
        t.columns[group, c] = r.columns[group, c]
    T.reduce_sum(r.pairs, r.sum, dim=1)
    for a in T.Parallel(CHUNK):
        t.parts[staged, PART_PAIRS, a] = r.sum[a]


@T.macro
def pair_head(thread, t, b, r, works, heads, rows, scale):
    """Pairs of tokens of one head, for the warpgroups that own gradients, and their part of dg and dbeta.

    Keys read strictly earlier tokens, queries their own too.
    """
    slot, staged = same_slot(works), heads % SLOTS
    wait(b.rows_ready, staged, phase(heads, SLOTS))
    weigh(thread, t, r, staged)
    wait(b.errors_ready, 0, phase(heads, 1))
    T.clear(r.pairs)
    for turn in T.serial(SOURCES):
        source = KEYS - turn
        if turn == 0:
            wait(b.dv_ready, 0, phase(heads, 1))
        else:
            wait(b.dout_ready, 0, phase(heads, 1))
        multiply_pairs(t, r, slot, source)
        if turn == 0:
            arrive(b.dv_free, 0, thread)
            wait(b.pairs_free, staged, phase_before(heads, SLOTS))
        else:
            arrive(b.dout_free, 0, thread)
            arrive(b.errors_free, 0, thread)
        weigh_pairs(t, r, slot, staged, rows, source, scale)
    T.fence_proxy_async()
    arrive(b.pairs_ready, staged, thread)
    wait(b.parts_free, staged, phase_before(heads, SLOTS))
    wait(b.parts_free, (heads + 1) % SLOTS, phase_before(heads + 1, SLOTS))  # sums over columns have one place
    sum_pairs(thread, t, r, staged)
    arrive(b.rows_free, staged, thread)
    arrive(b.parts_ready, staged, thread)


@T.macro
def write_gradient(dtype, t, r, slot, source, out, use_l2norm):
    """Rows of a gradient, without the part along the rows themselves if they are normalised."""
    first, head, rows = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    first = t.work[slot, WORK_FIRST_TOKEN]
    head = t.work[slot, WORK_KEY_HEAD]
    rows = t.work[slot, WORK_ROWS]
    if use_l2norm != 0:
        for a, c in T.Parallel(CHUNK, HEAD_DIM):
            r.product[a, c] = r.grad[a, c] * T.cast(t.tokens[slot * SOURCES + source, a, c], FLOAT32)
        T.reduce_sum(r.product, r.dot, dim=1)
        for a in T.Parallel(CHUNK):
            r.dot[a] *= r.norm[a] * r.norm[a]
        T.sync_warp()
        for a, c in T.Parallel(CHUNK, HEAD_DIM):
            r.grad[a, c] -= r.dot[a] * T.cast(t.tokens[slot * SOURCES + source, a, c], FLOAT32)
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        if a < rows:
            out[first + a, head, c] = T.cast(r.grad[a, c], dtype)


@T.macro
def start_rows(t, r, slot, norm):
    T.clear(r.grad)
    for a in T.Parallel(CHUNK):
        r.norm[a] = t.norms[slot, norm, a]


@T.macro
def look_up(t, b, works):
    """Waits until it is known which chunk comes next."""
    wait(b.work_ready, works % SLOTS, phase(works, SLOTS))


@T.macro
def find_work(thread, t, b, works, queue, cursors, chunks, places, key_heads, tokens):
    """t.work <- the chunk that is next in the queue, for all roles, once a slot for its tokens is free."""
    wait(b.tokens_free, works % SLOTS, phase_before(works, SLOTS))
    take_work(t.work, works % SLOTS, t.has_ended, queue, cursors, chunks, places, key_heads, tokens, thread)
    arrive(b.work_ready, works % SLOTS, thread)


@T.macro
def load_tokens(thread, t, b, works, q, k, norms):
    """After `find_work`, which has waited for the slot."""
    slot = works % SLOTS
    token, head = t.work[slot, WORK_FIRST_TOKEN], t.work[slot, WORK_KEY_HEAD]
    T.tma_copy(
        q[token : token + CHUNK, head, :], t.tokens[slot * SOURCES + QUERIES, :, :], barrier=b.tokens_ready[slot]
    )
    T.tma_copy(k[token : token + CHUNK, head, :], t.tokens[slot * SOURCES + KEYS, :, :], barrier=b.tokens_ready[slot])
    T.tma_copy(norms[t.work[slot, WORK_SLOT], head, :, :], t.norms[slot, :, :], barrier=b.tokens_ready[slot])
    arrive(b.tokens_ready, slot, thread)


@T.macro
def load_head(thread, t, b, slot, head, token, heads, dout, dv, errors, row_scales):
    """Tiles of a head but states, in the order in which they are wanted."""
    staged = heads % SLOTS
    wait(b.rows_free, staged, phase_before(heads, SLOTS))
    T.tma_copy(row_scales[slot, head, :GRADIENT_ROWS, :], t.rows[staged, :, :], barrier=b.rows_ready[staged])
    arrive(b.rows_ready, staged, thread)
    wait(b.errors_free, 0, phase_before(heads, 1))
    for half in BOTH_HALVES:
        T.tma_copy(errors[slot, head, half, :, :], t.values[ERRORS * HALVES + half, :, :], barrier=b.errors_ready[0])
    arrive(b.errors_ready, 0, thread)
    wait(b.dv_free, 0, phase_before(heads, 1))
    for half in BOTH_HALVES:
        column = half * VALUE_TILE
        T.tma_copy(
            dv[token : token + CHUNK, head, column : column + VALUE_TILE],
            t.values[DV * HALVES + half, :, :],
            barrier=b.dv_ready[0],
        )
    arrive(b.dv_ready, 0, thread)
    wait(b.dout_free, 0, phase_before(heads, 1))
    for half in BOTH_HALVES:
        column = half * VALUE_TILE
        T.tma_copy(
            dout[token : token + CHUNK, head, column : column + VALUE_TILE],
            t.values[DOUT * HALVES + half, :, :],
            barrier=b.dout_ready[0],
        )
    arrive(b.dout_ready, 0, thread)


@T.macro
def load_states(thread, t, b, slot, head, heads, states, dstates):
    wait(b.dstates_free, 0, phase_before(heads, 1))
    for half in BOTH_HALVES:
        T.tma_copy(
            dstates[slot, head, half, :, :], t.squares[DSTATES * HALVES + half, :, :], barrier=b.dstates_ready[0]
        )
    arrive(b.dstates_ready, 0, thread)
    wait(b.states_free, 0, phase_before(heads, 1))
    for half in BOTH_HALVES:
        T.tma_copy(states[slot, head, half, :, :], t.squares[STATES * HALVES + half, :, :], barrier=b.states_ready[0])
    arrive(b.states_ready, 0, thread)


@T.macro
def sum_head(thread, t, b, heads, first, rows, head, dg, dbeta):
    """dg and dbeta of one head from its parts: a gate acts on all that is behind it, so its gradient is a sum from there."""
    slot, lane = heads % SLOTS, T.shfl_xor(thread % WARP, 0)  # of the lane itself the compiler would keep many sums
    beta, total = T.alloc_local((2,), FLOAT32), T.alloc_local((2,), FLOAT32)
    carried, state, gate = (T.alloc_var(FLOAT32) for _ in range(3))
    wait(b.rows_ready, slot, phase(heads, SLOTS))
    wait(b.parts_ready, slot, phase(heads, SLOTS))
    for e in T.unroll(2):
        beta[e] = 0.0
    for group in T.serial(COLUMN_GROUPS):
        for e in T.vectorized(2):
            beta[e] += t.columns[group, 2 * lane + e]
    carried = 0.0
    for e in T.unroll(2):
        row = 2 * lane + e
        total[e] = t.parts[slot, PART_PAIRS, row] - beta[e]
        total[e] += t.parts[slot, PART_QUERY, row] + t.parts[slot, PART_READ, row]
        state = t.parts[slot, PART_STATE, row]
        beta[e] += t.parts[slot, PART_OWN, row] + state
        if row < rows:
            dbeta[first + row, head] = beta[e] / t.rows[slot, ROW_STRENGTH, row]
        state = T.Select(row < rows - 1, state, 0.0)
        total[e] = T.Select(row < rows, total[e] - state, 0.0)
        carried += state + T.exp2(t.rows[slot, ROW_DECAY, CHUNK - 1]) * t.parts[slot, PART_TRACE, row]
    arrive(b.parts_free, slot, thread)
    for step in T.unroll(5):
        carried += T.shfl_xor(carried, 1 << step)
    for e in T.unroll(2):
        total[e] += T.Select(2 * lane + e == rows - 1, carried, 0.0)
    total[0] += total[1]
    for step in T.unroll(5):
        carried = T.shfl_down(total[0], 1 << step)
        total[0] += T.Select(lane + (1 << step) < WARP, carried, 0.0)
    carried = T.shfl_down(total[0], 1)
    total[1] += T.Select(lane + 1 < WARP, carried, 0.0)
    for e in T.unroll(2):
        row = 2 * lane + e
        gate = t.rows[slot, ROW_DECAY, row] - T.if_then_else(row > 0, t.rows[slot, ROW_DECAY, row - 1], 0.0)
        if row < rows:
            dg[first + row, head] = T.Select(gate < STRONGEST_GATE + ROUNDING, 0.0, total[e])
    arrive(b.rows_free, slot, thread)


def value_head(t, slot, group, member):
    """A value head of the chunk in a slot."""
    return t.work[slot, WORK_KEY_HEAD] * group + member


@T.macro
def supply_tokens(
    thread, t, b, queue, cursors, chunks, places, key_heads, group, tokens, q, k, norms, dout, dv, errors, row_scales
):
    """Takes chunk after chunk from the queue and loads all tiles of each but its states."""
    works, heads, rows = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    works, heads, rows = 0, 0, 1
    while rows > 0:
        find_work(thread, t, b, works, queue, cursors, chunks, places, key_heads, tokens)
        slot = works % SLOTS
        rows = t.work[slot, WORK_ROWS]
        if rows > 0:
            order_copies()
            load_tokens(thread, t, b, works, q, k, norms)
            for member in T.serial(group):
                load_head(
                    thread, t, b, t.work[slot, WORK_SLOT], value_head(t, slot, group, member),
                    t.work[slot, WORK_FIRST_TOKEN], heads, dout, dv, errors, row_scales,
                )  # fmt: skip
                heads += 1
            works += 1


@T.macro
def each_chunk(thread, t, b, group, start, head, end):
    """What a role other than the loader's does with each chunk that is taken.

    start(slot, works, rows) and end(slot) are of the chunk in a slot, head(slot, works, heads, rows, member) of one of its value
    heads.
    """
    works, heads, rows = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    works, heads, rows = 0, 0, 1
    while rows > 0:
        slot = works % SLOTS
        look_up(t, b, works)
        rows = t.work[slot, WORK_ROWS]
        if rows > 0:
            start(slot, works, rows)
            for member in T.serial(group):
                head(slot, works, heads, rows, member)
                heads += 1
            end(slot)
            arrive(b.tokens_free, slot, thread)
            works += 1


def nothing(*_):
    """Of a chunk for which a role has nothing to do there."""


def supply_states(thread, t, b, group, states, dstates):
    """Loads the states of the chunks that are taken."""

    def load(slot, works, heads, rows, member):
        load_states(thread, t, b, t.work[slot, WORK_SLOT], value_head(t, slot, group, member), heads, states, dstates)

    each_chunk(thread, t, b, group, lambda *_: order_copies(), load, nothing)


def sum_heads(thread, t, b, group, dg, dbeta):
    """dg and dbeta of the chunks that are taken."""

    def add(slot, works, heads, rows, member):
        sum_head(
            thread, t, b, heads, t.work[slot, WORK_FIRST_TOKEN], rows, value_head(t, slot, group, member), dg, dbeta
        )

    each_chunk(thread, t, b, group, nothing, add, nothing)


def form_pairs(dtype, thread, t, b, r, group, scale):
    """Pairs of tokens of the chunks that are taken."""

    def receive(slot, works, rows):
        receive_tokens(dtype, thread, t, b, slot, works, rows, 2)

    def form(slot, works, heads, rows, member):
        pair_head(thread, t, b, r, works, heads, rows, scale)

    each_chunk(thread, t, b, group, receive, form, nothing)


def form_gradients(dtype, thread, t, b, r, group, consumer, norm, head, source, out, use_l2norm):
    """Rows of dq or dk of the chunks that are taken; head(works, heads) adds those of a value head."""

    def receive(slot, works, rows):
        receive_tokens(dtype, thread, t, b, slot, works, rows, consumer)
        start_rows(t, r, slot, norm)

    def add(slot, works, heads, rows, member):
        head(works, heads)

    each_chunk(
        thread, t, b, group, receive, add, lambda slot: write_gradient(dtype, t, r, slot, source, out, use_l2norm)
    )
