"""What each warp role of the recurrence kernel does; the page that binds them is `recurrence.py`."""

import tilelang.language as T

from ._recurrence_tiles import DECAYED_KEYS, SLOTS, STAGES, phase, phase_before
from ._sm90 import (
    CHUNK,
    END_FINAL,
    END_STATE,
    END_TRANSITION,
    HALF_CHUNK,
    HEAD_DIM,
    ITEM_CHUNKS,
    ITEM_FIRST_SLOT,
    ITEM_FIRST_TOKEN,
    ITEM_HEAD,
    ITEM_LAST_ROWS,
    ITEM_LINKS,
    ITEM_OWN,
    ITEM_SILENT,
    ITEM_START,
    L2NORM_EPS,
    RECURRENCE,
    START_IDENTITY,
    START_INITIAL,
    START_STATE,
    VALUE_TILE,
    VANISHING,
    WARP,
    WARPGROUP,
    WARPS_PER_GROUP,
)
from ._tile import arrive, find_reference, fraction, wait

BY_ROWS = T.GemmWarpPolicy.FullRow  # each state warpgroup takes 64 value rows
STATE_THREADS = RECURRENCE.state.warps * WARP
EIGHT = 8  # 16-bit values of a 16-byte access
READ, OUT = 0, 1  # rows of row_scale
TURN = 1  # named barriers 1 and 2 say whose turn the tensor cores are; the score warpgroup meets at 3
MEETING, STORED = 3, 4
LANES_PER_ROW = HEAD_DIM // EIGHT  # of a row of 16-bit values in 16-byte accesses
LINK_ACCESSES = 16  # of a thread at once: two tiles of a transition


@T.macro
def load_state(S, start, matrix, row, initial, states, value_stride, key_stride):
    """The state that the item starts from, transposed: zero, the initial one, the identity or that of segment `row`."""
    T.clear(S)
    if start == START_INITIAL:
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            S[a, c] = initial[matrix, a * value_stride + c * key_stride]
    if start == START_STATE:
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            S[a, c] = states[row, a * HEAD_DIM + c]
    if start == START_IDENTITY:
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            S[a, c] = T.Select(a == c, 1.0, 0.0)


@T.macro
def announce(thread, ready, row, part, sign):
    """Lets other blocks read what the state warpgroups have stored."""
    T.sync_threads(STORED, STATE_THREADS)
    if thread == 0:
        T.atomic_store(ready[row, part], sign, memory_order="release")


@T.macro
def store_state(
    thread,
    dtype,
    r,
    end,
    matrix,
    row,
    value_heads,
    sign,
    final,
    states,
    transitions,
    reach,
    ready,
    value_stride,
    key_stride,
):
    """The last state: of the sequence, of its segment, or of the segment's transition, in two parts of 16 bits."""
    before = row - value_heads  # where transitions lie
    if end == END_FINAL:
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            final[matrix, a * value_stride + c * key_stride] = r.S[a, c]
    if end == END_STATE:
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            states[row, a * HEAD_DIM + c] = r.S[a, c]
        announce(thread, ready, row, 0, sign)
    if end == END_TRANSITION:
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            transitions[before, a, c] = T.cast(r.S[a, c], dtype)
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            transitions[before, HEAD_DIM + a, c] = T.cast(
                r.S[a, c] - T.cast(T.cast(r.S[a, c], dtype), "float32"), dtype
            )
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            r.S[a, c] *= r.S[a, c]
        T.reduce_sum(r.S, r.squares, dim=1)
        for a in T.Parallel(HEAD_DIM):
            reach[before, a] = r.squares[a]
        announce(thread, ready, row, 1, sign)


@T.macro
def split_half(dtype, S, column, high, low):
    """64 columns of S as a sum of two 16-bit parts."""
    for a, c in T.Parallel(HEAD_DIM, CHUNK):
        high[a, c] = T.cast(S[a, column + c], dtype)
    for a, c in T.Parallel(HEAD_DIM, CHUNK):
        low[a, c] = T.cast(S[a, column + c] - T.cast(T.cast(S[a, column + c], dtype), "float32"), dtype)


@T.macro
def multiply_half(S, high, low, k, part):
    """S += (high + low) (K_high + K_low) without the product of the low parts."""
    T.wgmma_gemm(high, k[part, :, :], S, policy=BY_ROWS)
    T.wgmma_gemm(high, k[2 + part, :, :], S, policy=BY_ROWS)
    T.wgmma_gemm(low, k[part, :, :], S, policy=BY_ROWS)


@T.macro
def follow_links(thread, dtype, t, b, r, links, row, value_heads, states):
    """S <- transition_j S + state_j over the segments before the own one, both factors in two parts: exact to 2^-16.

    The transition's parts lie in the places of the keys: rows 0 and 64 of the high part, then of the low part.
    """
    for i in T.serial(links):
        split_half(dtype, r.S, 0, r.high[0], r.low[0])
        split_half(dtype, r.S, CHUNK, r.high[1], r.low[1])
        for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
            r.S[a, c] = states[row + (i + 1) * value_heads, a * HEAD_DIM + c]
        wait(b.link_ready, 0, i % 2)
        multiply_half(r.S, r.high[0], r.low[0], t.k, 0)
        multiply_half(r.S, r.high[1], r.low[1], t.k, 1)
        T.wait_wgmma(0)
        arrive(b.link_free, 0, thread)
    if links > 0:
        arrive(b.keys_free, 0, thread)


@T.macro
def take_turn(half):
    """Waits for the other state warpgroup to have issued its products; ping-pong saved 6 to 8 % of the cycles."""
    T.sync_threads(TURN + half, STATE_THREADS)


@T.macro
def give_turn(half):
    T.named_barrier_arrive(TURN + 1 - half, STATE_THREADS)


@T.macro
def scale_outputs(t, r, slot):
    for a, c in T.Parallel(HEAD_DIM, CHUNK):
        r.O[a, c] *= t.row_scale[slot, OUT, c]


@T.macro
def subtract_read(t, r, slot, first, Z):
    """Half of Z: V without what the state holds for the keys, from token `first` of the chunk on."""
    for a, c in T.Parallel(HEAD_DIM, HALF_CHUNK):
        Z[a, c] = r.v[first + c, a] - r.W[a, first + c] * t.row_scale[slot, READ, first + c]


@T.macro
def write_state(half, thread, t, b, r, i):
    """W, Z and N of a chunk; leaves the state product in flight, in this warpgroup's turn."""
    stage, slot = i % STAGES, i % SLOTS
    T.copy(r.S, r.S_in)
    wait(b.scores_ready, slot, phase(i, SLOTS))
    take_turn(half)
    T.wgmma_gemm(r.S_in, t.k[stage, :, :], r.W, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    give_turn(half)
    if slot == 0:
        T.copy(t.v[0], r.v)
    else:
        T.copy(t.v[1], r.v)
    T.wait_wgmma(0)
    subtract_read(t, r, slot, 0, r.Z[0])
    subtract_read(t, r, slot, HALF_CHUNK, r.Z[1])
    arrive(b.values_free, slot, thread)
    T.wgmma_gemm(r.Z[0], t.operand[slot, CHUNK:, :], r.W, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wgmma_gemm(r.Z[1], t.operand[slot, :CHUNK, :], r.W, transpose_B=True, policy=BY_ROWS)
    for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
        r.S[a, c] *= t.chunk_decay[slot]
    T.wait_wgmma(0)
    T.copy(r.W, r.N)
    take_turn(half)
    T.wgmma_gemm(r.N, t.k[t.write_stage[slot], :, :], r.S, policy=BY_ROWS)


@T.macro
def finish_state(dtype, t, r, chunks):
    """The decay from the last chunk's reference to its end; those before it are in the scales of the chunk behind."""
    if dtype == "bfloat16" and chunks > 0:
        if t.late_decay[(chunks - 1) % SLOTS] != 1.0:
            for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
                r.S[a, c] *= t.late_decay[(chunks - 1) % SLOTS]


@T.macro
def read_state(half, t, r, i):
    """O of a chunk, from the state before it and N; state and outputs are complete afterwards."""
    stage, slot = i % STAGES, i % SLOTS
    T.wgmma_gemm(r.S_in, t.q[stage, :, :], r.O, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    if t.in_one_step[slot] != 0:  # the scores carry the inverse of the outputs' scale
        T.wgmma_gemm(r.N, t.scores[slot, :, :], r.O, transpose_B=True, policy=BY_ROWS)
        give_turn(half)
        T.wait_wgmma(0)
        scale_outputs(t, r, slot)
    else:
        give_turn(half)
        T.wait_wgmma(0)
        scale_outputs(t, r, slot)
        T.wgmma_gemm(r.N, t.scores[slot, :, :], r.O, transpose_B=True, policy=BY_ROWS)
        T.wait_wgmma(0)


@T.macro
def keep_border(t, r, slot, kept):
    """The state behind a chunk, with the decay to its end, which the scales of the next chunk would bring."""
    for a, c in T.Parallel(HEAD_DIM, HEAD_DIM):
        kept[t.border[slot], t.item[ITEM_HEAD], a * HEAD_DIM + c] = r.S[a, c] * t.late_decay[slot]


@T.macro
def keep_state(thread, dtype, t, b, r, chunks, silent, keeps_borders, kept):
    """State and outputs of 64 value rows, the state in registers from the first chunk to the last, and stored at borders."""
    half = thread // WARPGROUP
    if half == 1:
        give_turn(half)
    for i in T.serial(silent):
        write_state(half, thread, t, b, r, i)
        give_turn(half)
        T.wait_wgmma(0)
        arrive(b.scores_free, i % SLOTS, thread)
        arrive(b.tokens_free, i % STAGES, thread)
        arrive(b.output_ready, half * SLOTS + i % SLOTS, thread)
    for more in T.serial(chunks - silent):
        i = silent + more
        slot = i % SLOTS
        write_state(half, thread, t, b, r, i)
        read_state(half, t, r, i)
        if keeps_borders:
            if t.border[slot] >= 0:
                keep_border(t, r, slot, kept)
        arrive(b.scores_free, slot, thread)
        arrive(b.tokens_free, i % STAGES, thread)
        for a, c in T.Parallel(HEAD_DIM, CHUNK):
            r.o[c, a] = r.O[a, c]
        if slot == 0:
            T.copy(r.o, t.o[0])
        else:
            T.copy(r.o, t.o[1])
        T.fence_proxy_async()
        arrive(b.output_ready, half * SLOTS + slot, thread)
    if keeps_borders:  # asked again, since the answer would be kept through all chunks
        if T.shfl_xor(thread, 0) < WARPGROUP:
            take_turn(0)
    elif half == 0:
        take_turn(half)
    finish_state(dtype, t, r, chunks)


@T.macro
def query_scale(dtype, t, stage, row, part, scale, use_l2norm, q_scale):
    """scale, or scale / |q|; a pair of lanes has a query, and each sums half of its squares."""
    packed, squares = T.alloc_local((EIGHT,), dtype), T.alloc_local((4,), "float32")
    q_scale[0] = scale
    if use_l2norm != 0:
        for e in T.unroll(4):
            squares[e] = L2NORM_EPS / 8
        for turn in T.serial(2):
            for step in T.unroll(4):
                group = (turn * 4 + step) ^ (part * 4)  # the two lanes of a pair read different banks
                for e in T.vectorized(EIGHT):
                    packed[e] = t.q[stage, row, part * (HEAD_DIM // 2) + group * EIGHT + e]
                for e in T.unroll(EIGHT):
                    squares[e % 4] += T.cast(packed[e], "float32") * T.cast(packed[e], "float32")
        squares[0] = (squares[0] + squares[1]) + (squares[2] + squares[3])
        q_scale[0] = scale * T.rsqrt(squares[0] + T.shfl_xor(squares[0], 1))


@T.macro
def gate_scores(t, r, stage, warp, lane, last):
    """Scores with scale / |q| and the decay from each earlier token; see `factor.py` for the fraction."""
    for e in T.unroll(CHUNK // WARP):
        column = e * WARP + lane
        t.column_decay[warp, column] = t.decay[stage, column] + fraction(last - t.decay[stage, column])
    T.sync_warp()
    for a in T.Parallel(CHUNK):
        r.row_factor[a] = t.score_scale[a]
    for a in T.Parallel(CHUNK):
        r.row_decay[a] = t.decay[stage, a]
    for c in T.Parallel(CHUNK):
        r.column_decay[c] = t.column_decay[warp, c]
    for a, c in T.Parallel(CHUNK, CHUNK):
        since = T.Select(a >= c, r.row_decay[a] - r.column_decay[c], VANISHING)
        r.out[a, c] = T.Select(a >= c, r.score[a, c] * r.row_factor[a], 0.0) * T.exp2(since)


@T.macro
def decay_keys(dtype, t, stage, warp, lane):
    """Keys times the whole powers of two of their decay to the chunk's end, which is exact; a warp has 16 rows."""
    for pair in T.unroll(EIGHT):
        row = warp * (CHUNK // WARPS_PER_GROUP) + 2 * pair + lane // 16
        for e in T.vectorized(EIGHT):
            column = (lane % 16) * EIGHT + e
            t.k[DECAYED_KEYS, row, column] = t.k[stage, row, column] * T.cast(t.key_scale[row], dtype)


@T.macro
def clear_tail(dtype, t, stage, slot, rows):
    """Zeros in the rows of k and v that belong to no token of this sequence, whatever was loaded there."""
    for a, c in T.Parallel(CHUNK, HEAD_DIM):
        if a >= rows:
            t.k[stage, a, c] = T.cast(0, dtype)
    if slot == 0:
        for a, c in T.Parallel(CHUNK, HEAD_DIM):
            if a >= rows:
                t.v[0][a, c] = T.cast(0, dtype)
    else:
        for a, c in T.Parallel(CHUNK, HEAD_DIM):
            if a >= rows:
                t.v[1][a, c] = T.cast(0, dtype)
    T.sync_threads(MEETING, WARPGROUP)


@T.macro
def find_border_behind(t, slot, behind, range_slots, chunk_slots):
    """t.border <- which of the borders between ranges of the backward is before the chunk in slot `behind`, or -1."""
    is_border = T.And(T.truncmod(behind, range_slots) == 0, behind < chunk_slots)
    t.border[slot] = T.Select(is_border, T.truncdiv(behind, range_slots) - 1, -1)


@T.macro
def prepare_chunk(
    thread, dtype, t, b, r, item, i, scale, use_l2norm, has_outputs, due, keeps_borders, range_slots, chunk_slots
):
    """The scales of a chunk and, if it has outputs, Q K^T with its mask and gates; then says that all of it is there.

    due[0] is the decay that the state still lacks from the chunk before: behind a reference before a chunk's end it stays
    where it is, and what reads it, and its next decay, are scaled instead.
    """
    lane, warp = thread % WARP, (thread - STATE_THREADS) // WARP
    row, part = (thread - STATE_THREADS) // 2, thread % 2
    q_scale, reference = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
    factored, in_one_step = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
    decay, last, since = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
    stage, slot = i % STAGES, i % SLOTS
    wait(b.tokens_ready, stage, phase(i, STAGES))
    q_scale[0] = 0.0
    if has_outputs:
        T.wgmma_gemm(t.q[stage, :, :], t.k[stage, :, :], r.score, transpose_B=True, clear_accum=True)
        query_scale(dtype, t, stage, row, part, scale, use_l2norm, q_scale)
    decay = t.decay[stage, row]
    last = t.decay[stage, CHUNK - 1]
    find_reference(dtype, last, t.decay[stage, lane], t.decay[stage, lane + WARP], reference, factored)
    since = T.exp2(decay) * due[0]
    in_one_step[0] = T.cast(T.And(T.And(factored[0] != 0, reference[0] == last), due[0] == 1.0), "int32")
    wait(b.scores_free, slot, phase_before(i, SLOTS))
    t.row_scale[slot, part, row] = since * T.Select(part == READ, t.key_norm[stage, row], q_scale[0])
    if part == 0:
        t.score_scale[row] = q_scale[0] * T.Select(factored[0] != 0, T.exp2(decay - reference[0]), 1.0)
        t.key_scale[row] = T.exp2(T.floor(last - decay))
    if row == CHUNK - 1:
        if part == 0:
            t.chunk_decay[slot] = T.exp2(reference[0]) * due[0]
            t.late_decay[slot] = T.exp2(last - reference[0])
            t.write_stage[slot] = T.Select(factored[0] != 0, stage, DECAYED_KEYS)
            t.in_one_step[slot] = in_one_step[0]
            if keeps_borders:
                find_border_behind(t, slot, item[ITEM_FIRST_SLOT] + i + 1, range_slots, chunk_slots)
    if dtype == "bfloat16":  # float16 has no reference but the end
        due[0] = T.exp2(last - reference[0])
    T.sync_warp()
    if has_outputs:
        T.wait_wgmma(0)
        if factored[0] == 0:
            gate_scores(t, r, stage, warp, lane, last)
        elif in_one_step[0] != 0:
            growth = T.exp2(-last)
            for a, c in T.Parallel(CHUNK, CHUNK):
                r.out[a, c] = T.Select(a >= c, r.score[a, c] * growth, 0.0)
        else:
            for a in T.Parallel(CHUNK):
                r.row_factor[a] = t.score_scale[a]
            for a, c in T.Parallel(CHUNK, CHUNK):
                r.out[a, c] = T.Select(a >= c, r.score[a, c] * r.row_factor[a], 0.0)
        T.copy(r.out, t.scores[slot, :, :])
    wait(b.values_ready, slot, phase(i, SLOTS))
    if has_outputs:
        if i == item[ITEM_CHUNKS] - 1:
            if item[ITEM_LAST_ROWS] < CHUNK:
                clear_tail(dtype, t, stage, slot, item[ITEM_LAST_ROWS])
    if factored[0] == 0:
        if i > 0:  # one place for decayed keys: the chunk before must be through with it
            wait(b.scores_free, 1 - slot, phase(i - 1, SLOTS))
        decay_keys(dtype, t, stage, warp, lane)
    T.fence_proxy_async()
    arrive(b.tokens_free, stage, thread)
    wait(b.output_free, slot, phase_before(i, SLOTS))
    arrive(b.scores_ready, slot, thread)


@T.macro
def bring_links(thread, dtype, t, b, item, value_heads, transitions):
    """Transitions of the links to the places of the keys, both parts; not by TMA, which other blocks' stores do not order."""
    row = (thread - STATE_THREADS) // LANES_PER_ROW
    column = (thread - STATE_THREADS) % LANES_PER_ROW * EIGHT
    packed = T.alloc_local((LINK_ACCESSES, EIGHT), dtype)
    for i in T.serial(item[ITEM_LINKS]):
        segment = item[ITEM_OWN] - (item[ITEM_LINKS] - i + 1) * value_heads
        wait(b.link_free, 0, (i + 1) % 2)
        for part in T.serial(2 * HEAD_DIM // (LINK_ACCESSES * EIGHT)):
            for turn in T.unroll(LINK_ACCESSES):
                for e in T.vectorized(EIGHT):
                    packed[turn, e] = transitions[segment, (part * LINK_ACCESSES + turn) * EIGHT + row, column + e]
            for turn in T.unroll(LINK_ACCESSES):
                for e in T.vectorized(EIGHT):
                    t.k[part * (LINK_ACCESSES // EIGHT) + turn // EIGHT, turn % EIGHT * EIGHT + row, column + e] = (
                        packed[turn, e]
                    )
        T.fence_proxy_async()
        arrive(b.link_ready, 0, thread)


@T.macro
def form_scores(thread, dtype, t, b, r, item, scale, use_l2norm, keeps_borders, range_slots, chunk_slots):
    """Replayed chunks have no outputs and are whole; the others have both a mask and perhaps an end.

    Before them it makes the zeros that nobody loads: values of a transition, and the upper right quarter of the operand.
    """
    if item[ITEM_START] == START_IDENTITY:
        for a, c in T.Parallel(CHUNK, HEAD_DIM):
            t.v[0][a, c] = T.cast(0, dtype)
            t.v[1][a, c] = T.cast(0, dtype)
    for slot, a, c in T.Parallel(SLOTS, HALF_CHUNK, HALF_CHUNK):
        t.operand[slot, a, c] = T.cast(0, dtype)
    T.fence_proxy_async()
    due = T.alloc_local((1,), "float32")
    due[0] = 1.0
    for i in T.serial(item[ITEM_SILENT]):
        prepare_chunk(
            thread, dtype, t, b, r, item, i, scale, use_l2norm, False, due, keeps_borders, range_slots, chunk_slots
        )  # fmt: skip
    for more in T.serial(item[ITEM_CHUNKS] - item[ITEM_SILENT]):
        prepare_chunk(
            thread, dtype, t, b, r, item, item[ITEM_SILENT] + more, scale, use_l2norm, True, due, keeps_borders,
            range_slots, chunk_slots,
        )  # fmt: skip


@T.macro
def load_tokens(thread, t, b, item, key_head, q, k, decay, key_norm):
    """The chunks, once the transitions of the links have left the places of the keys."""
    if item[ITEM_LINKS] > 0:
        wait(b.keys_free, 0, 0)
    for i in T.serial(item[ITEM_CHUNKS]):
        stage = i % STAGES
        token, chunk = item[ITEM_FIRST_TOKEN] + i * CHUNK, item[ITEM_FIRST_SLOT] + i
        wait(b.tokens_free, stage, phase_before(i, STAGES))
        T.tma_copy(k[token : token + CHUNK, key_head, :], t.k[stage, :, :], barrier=b.tokens_ready[stage])
        if i >= item[ITEM_SILENT]:
            T.tma_copy(q[token : token + CHUNK, key_head, :], t.q[stage, :, :], barrier=b.tokens_ready[stage])
        T.tma_copy(decay[chunk, item[ITEM_HEAD], :], t.decay[stage, :], barrier=b.tokens_ready[stage])
        T.tma_copy(key_norm[chunk, key_head, :], t.key_norm[stage, :], barrier=b.tokens_ready[stage])
        arrive(b.tokens_ready, stage, thread)


@T.macro
def load_values(thread, t, b, item, v, operand):
    for i in T.serial(item[ITEM_CHUNKS]):
        slot = i % SLOTS
        token, chunk, head = item[ITEM_FIRST_TOKEN] + i * CHUNK, item[ITEM_FIRST_SLOT] + i, item[ITEM_HEAD]
        wait(b.values_free, slot, phase_before(i, SLOTS))
        if item[ITEM_START] != START_IDENTITY:
            if slot == 0:
                T.tma_copy(v[token : token + CHUNK, head, :], t.v[0], barrier=b.values_ready[0])
            else:
                T.tma_copy(v[token : token + CHUNK, head, :], t.v[1], barrier=b.values_ready[1])
        wait(b.scores_free, slot, phase_before(i, SLOTS))
        T.tma_copy(operand[chunk, head, :, :], t.operand[slot, HALF_CHUNK:, :], barrier=b.values_ready[slot])
        arrive(b.values_ready, slot, thread)


@T.macro
def store_tile(lane, tile, o, token, head, column, rows):
    """64 columns of an output tile; a chunk that ends within the tile is stored row by row."""
    if rows == CHUNK:
        T.tma_copy(tile[:, column : column + VALUE_TILE], o[token : token + CHUNK, head, column : column + VALUE_TILE])
        T.tma_store_wait(0)
    else:
        for a in T.serial(rows):
            for e in T.vectorized(2):
                o[token + a, head, column + 2 * lane + e] = tile[a, column + 2 * lane + e]


@T.macro
def store_outputs(half, thread, t, b, item, o):
    for i in T.serial(item[ITEM_CHUNKS]):
        slot = i % SLOTS
        rows = T.if_then_else(i == item[ITEM_CHUNKS] - 1, item[ITEM_LAST_ROWS], CHUNK)
        token = item[ITEM_FIRST_TOKEN] + i * CHUNK
        wait(b.output_ready, half * SLOTS + slot, phase(i, SLOTS))
        if i >= item[ITEM_SILENT]:
            if slot == 0:
                store_tile(thread % WARP, t.o[0], o, token, item[ITEM_HEAD], half * VALUE_TILE, rows)
            else:
                store_tile(thread % WARP, t.o[1], o, token, item[ITEM_HEAD], half * VALUE_TILE, rows)
        arrive(b.output_free, slot, thread)
