"""Gated delta rule, backward: states and their gradients, half of a value head in one direction a block (SM90).

Per chunk, with its solve A of `factor.py`, the row scales read, write, query, take of `backward_rows.py` and scores P:

    forward     W = A (V - read K S)             S <- 2^(G_end) S + (write K)^T W
    reverse     P[t, s] = row_t (q_t . k_s) 2^(G_t - reference_s) column_s for s <= t, else 0
                dW = P^T dO + write K dS         dV = A^T dW
                dS <- 2^(G_end) dS + (query Q)^T dO - (take K)^T dV

W is what a token writes, and its error e, but for the scales of A's rows, which `backward_rows.py` has seen to.

S is stored before each chunk, dS behind it. Value columns do not mix, so a block takes 64 of them: 32 heads, two halves and
two directions fill the card; with fewer blocks sequences are cut into segments. What starts a segment, and which blocks of a
launch before this one make it, is told in `_backward_segments.py`; here it means that some first chunks may have no outputs,
that a state may start as the identity, without values, and that links may come before the chunks: S <- S M + S_j.

Blocks that write outputs begin beside those that make states (programmatic launch), once the last of those runs and has seen the
kernel before it end. Only a block that follows links waits for what they make; in each block the announcer waits for their
end when it is through, so that this launch ends behind the other. The GPU starts blocks in the order of their indices: segments
where a direction starts come first, or whole sequences in the order of their records, and of each the reverse, which is slower.

Instructions are what blocks of two kernels share badly (docs/design/2026-12-01-instructions.md). An SM keeps 32 KB of them,
and blocks of different kernels on the two SMs of a pair disturb one another by those that they fetch. So the two halves of a
value head are a cluster, which takes such a pair, and the bodies of loops stand once in the code (`rolled`): what a block runs
again and again is 25 KB in reverse and 15 forward.

In the same way blocks of the gradient kernel begin beside these. The announcer counts for them the chunks whose tiles its block
has in memory (`_ready.py`), several at a time: a storer that waited for each store and counted it would take longer than a chunk.
Blocks that make states announce nothing.

The state stands transposed in registers and is the left operand of its products. A warpgroup alone waits for most of its own
products, and shared memory is busy for most of a chunk in reverse, so both bound a block: what it does between its products,
and the bytes that move through shared memory. Scores come from the second warpgroup, a chunk or two ahead. dO goes from
shared memory to registers once, for both of its products, under the last product of the chunk before; and it is scaled behind the
solve, so that its product with the queries runs while the gradient of v is made an operand. The fences between stores and TMA are
those of the storers, behind the barrier that they wait for.

Reads        q k [T, H, 128] · v dout [T, HV, 128] · solve [slots, HV, 96, 32] · row_scales pair_scales bound of
             `backward_rows.py` · segments [segment_slots, 7] · initial state and gradient of the final state f32, or those at
             a border, [HV, V, K], of the sequence that goes on in another range of chunks
Writes       errors [slots, HV, 2, C, 64] · states dstates [slots, HV, 2, 64, 128], transposed · dv [T, HV, 128] ·
             gradient of the initial state f32, or of that at a border · arrivals queue [slots * H], cursors [2] of `_ready.py`
In between   segment_states f32, transitions in two 16-bit parts, plain and turned, with the squared norms of their rows,
             whether a segment forgets

Role          threads   registers   per chunk
state         1 x 128   240         S and W or e, or dS and dV, of 64 value columns; zeros behind the end
scores        1 x 128   184         in reverse P, of two chunks
loader        1 x 32    80          before the chunks: transitions of the links, in the places of k and q
                                    k, solve, row scales; forward also v, in reverse q, pair scales and do in v's place;
                                    three stages
storers       2 x 32    80          the state tile; errors or dv
announcer     1 x 32    80          counts chunks that are stored, a batch at a time

Barrier         set by          waited on by     arrivals
chunk_ready     loader          state, scores    1 and the bytes
chunk_free      state           loader           4; it has waited for the scores, whose role has read its tiles by then
scores_ready    scores          state            4
scores_free     state           scores           4
state_ready     state           state storer     4
state_free      state storer    state            1
values_ready    state           value storer     4
values_free     value storer    state            1
stored_ready    storers         announcer        2; the tiles of a batch of chunks, or of the last ones, are in memory
stored_free     announcer       storers          1
link_ready      loader          state            1 and the bytes
link_free       state           loader           4
named 1         state           state            128, in a chunk that ends early, and once zeros stand for values
"""

import tilelang.language as T

from ._backward_scan_roles import (
    PLAIN,
    TURNED,
    announce,
    carry_gradient,
    carry_state,
    follow_links,
    load_forward,
    load_links,
    load_reverse,
    load_state,
    make_scores,
    store_errors,
    store_gradient,
    store_segment,
    store_states,
    store_transition,
    store_value_gradients,
)
from ._backward_scan_tiles import (
    BACKWARD_SCAN_PROTOCOL,
    Barriers,
    ForwardRegisters,
    GradientRegisters,
    ScoreRegisters,
    Tiles,
)
from ._backward_segments import FORWARD, MAKE_GRADIENT, MAKERS, REVERSE, describe_outputs, describe_states
from ._sm90 import (
    BACKWARD_SCAN,
    CHUNK,
    CURSOR_WORDS,
    HALF_CHUNK,
    HEAD_DIM,
    ITEM_END,
    ITEM_HEAD,
    ITEM_LINKS,
    ITEM_OWN,
    ITEM_SEQUENCE,
    ITEM_START,
    ITEM_WORDS,
    PAIR_VECTORS,
    ROW_VECTORS,
    SEGMENT_WORDS,
    TRIANGLE_ROWS,
    VALUE_TILE,
    WARP,
    WARPGROUP,
)
from ._tile import swizzled, transposed_fragment

PROTOCOL = BACKWARD_SCAN_PROTOCOL
HALVES, DIRECTIONS = BACKWARD_SCAN.halves, BACKWARD_SCAN.directions
SCORE_ROLE, MOVERS = WARPGROUP, 2 * WARPGROUP  # first threads of roles
PARTS = 4  # of a stored transition


def build_backward_scan(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, segment_slots, matrices = T.dynamic("chunk_slots"), T.dynamic("segment_slots"), T.dynamic("matrices")
    rows, places = T.dynamic("rows"), T.dynamic("places")
    q_t, q_h, k_t, k_h, v_t, v_h, do_t, do_h = (
        T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h", "do_t", "do_h")
    )

    @T.prim_func
    def backward_scan(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        v: T.StridedTensor((tokens, value_heads, HEAD_DIM), (v_t, v_h, 1), dtype),
        dout: T.StridedTensor((tokens, value_heads, HEAD_DIM), (do_t, do_h, 1), dtype),
        solve: T.Tensor((chunk_slots, value_heads, TRIANGLE_ROWS, HALF_CHUNK), dtype),
        row_scales: T.Tensor((chunk_slots, value_heads, ROW_VECTORS, CHUNK), "float32"),
        pair_scales: T.Tensor((chunk_slots, value_heads, PAIR_VECTORS, CHUNK), "float32"),
        bound: T.Tensor((chunk_slots, value_heads), "float32"),
        segments: T.Tensor((segment_slots, SEGMENT_WORDS), "int32"),
        initial: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        dfinal: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        segment_states: T.Tensor((rows, DIRECTIONS, HALVES, VALUE_TILE * HEAD_DIM), "float32"),
        transitions: T.Tensor((rows, PARTS, HALVES, VALUE_TILE, HEAD_DIM), dtype),
        reach: T.Tensor((rows, HEAD_DIM), "float32"),
        forgets: T.Tensor((rows, DIRECTIONS), "int32"),
        errors: T.Tensor((chunk_slots, value_heads, HALVES, CHUNK, VALUE_TILE), dtype),
        states: T.Tensor((chunk_slots, value_heads, HALVES, VALUE_TILE, HEAD_DIM), dtype),
        dstates: T.Tensor((chunk_slots, value_heads, HALVES, VALUE_TILE, HEAD_DIM), dtype),
        dv: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        dinitial: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        border_state: T.Tensor((value_heads, HEAD_DIM * HEAD_DIM), "float32"),
        gradient_behind: T.Tensor((value_heads, HEAD_DIM * HEAD_DIM), "float32"),
        gradient_before: T.Tensor((value_heads, HEAD_DIM * HEAD_DIM), "float32"),
        arrivals: T.Tensor((places,), "int32"),
        queue: T.Tensor((places,), "int32"),
        cursors: T.Tensor((CURSOR_WORDS,), "int32"),
        has_initial: T.int32,
        has_dfinal: T.int32,
        write_dinitial: T.int32,
        state_v_first: T.int32,
        segment_chunks: T.int32,
        makes_states: T.int32,
        has_links: T.int32,
        has_cuts: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=BACKWARD_SCAN.threads) as block:
            t, b = Tiles(dtype), Barriers()
            ahead, back, scores = ForwardRegisters(dtype), GradientRegisters(dtype), ScoreRegisters()
            T.annotate_layout(
                {part: transposed_fragment(VALUE_TILE) for part in (ahead.v, ahead.o, back.v, back.o)}
                | {tile: swizzled(tile) for tile in (*t.values, t.out)}
            )
            thread = T.get_thread_binding()
            item, lead = T.alloc_local((ITEM_WORDS,), "int32"), T.alloc_local((1,), "float32")
            segment = T.alloc_local((SEGMENT_WORDS,), "int32")
            part, direction = T.alloc_var("int32"), T.alloc_var("int32")
            slot, head, key_head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            parts = T.Select(makes_states != 0, MAKERS, DIRECTIONS)
            half, place = T.truncmod(block, HALVES), T.truncdiv(block, HALVES)
            head, turn = T.truncmod(place, value_heads), T.truncdiv(place, value_heads)
            slot, part = T.truncdiv(turn, parts), parts - 1 - T.truncmod(turn, parts)  # what takes longest starts first
            direction = part
            if makes_states != 0:
                direction = T.Select(part == MAKE_GRADIENT, REVERSE, FORWARD)
            elif T.And(direction == REVERSE, has_cuts != 0):  # who may walk on through all segments starts first
                slot = segment_slots - 1 - slot
            group = T.truncdiv(value_heads, key_heads)
            key_head = T.truncdiv(head, group)
            if T.Or(makes_states != 0, has_links == 0):
                T.pdl_sync()
            T.pdl_trigger()
            if thread < WARP:
                for word in T.unroll(SEGMENT_WORDS):
                    segment[word] = segments[slot, word]
                row = slot * value_heads + head
                if makes_states != 0:
                    describe_states(
                        item, segment, row, head, part, half, has_initial, has_dfinal, segment_chunks, bound, forgets,
                        thread,
                    )  # fmt: skip
                else:
                    has_start = T.Select(direction == FORWARD, has_initial, has_dfinal)
                    describe_outputs(
                        item, segment, row, head, direction, has_start, write_dinitial, segment_chunks, has_links,
                        value_heads, bound, forgets, reach, thread,
                    )  # fmt: skip
                if thread == 0:
                    for word in T.unroll(ITEM_WORDS):
                        t.item[word] = item[word]
            T.fence_proxy_async()
            T.sync_threads()
            for word in T.unroll(ITEM_WORDS):
                item[word] = t.item[word]
            column = half * VALUE_TILE
            if thread < SCORE_ROLE:
                T.set_max_nreg(BACKWARD_SCAN.state.registers, 1)
                value_stride = T.Select(state_v_first != 0, HEAD_DIM, 1)
                key_stride = T.Select(state_v_first != 0, 1, HEAD_DIM)
                matrix = t.item[ITEM_SEQUENCE] * value_heads + t.item[ITEM_HEAD]
                own = t.item[ITEM_OWN]
                if direction == FORWARD:
                    base = own - (t.item[ITEM_LINKS] + 1) * value_heads
                    load_state(
                        ahead.S, t.item[ITEM_START], matrix, t.item[ITEM_HEAD], base, FORWARD, half, initial,
                        border_state, segment_states, value_stride, key_stride,
                    )  # fmt: skip
                    follow_links(
                        thread, dtype, t, b, ahead, t.item[ITEM_LINKS], base, -1, value_heads, FORWARD,
                        half, segment_states,
                    )  # fmt: skip
                    carry_state(thread, dtype, t, b, ahead, item)
                    store_segment(ahead.S, t.item[ITEM_END], own, FORWARD, half, segment_states, 1.0)
                    store_transition(dtype, ahead, t.item[ITEM_END], own, half, transitions, reach)
                else:
                    lead[0] = 1.0
                    base = own + (t.item[ITEM_LINKS] + 1) * value_heads
                    load_state(
                        back.S, t.item[ITEM_START], matrix, t.item[ITEM_HEAD], base, REVERSE, half, dfinal,
                        gradient_behind, segment_states, value_stride, key_stride,
                    )  # fmt: skip
                    follow_links(
                        thread, dtype, t, b, back, t.item[ITEM_LINKS], base, 1, value_heads, REVERSE,
                        half, segment_states,
                    )  # fmt: skip
                    carry_gradient(thread, dtype, t, b, back, item, lead)
                    store_segment(back.S, t.item[ITEM_END], own, REVERSE, half, segment_states, lead[0])
                    store_gradient(
                        back.S, t.item[ITEM_END], matrix, t.item[ITEM_HEAD], half, dinitial, gradient_before, lead[0],
                        value_stride, key_stride,
                    )  # fmt: skip
            elif thread < MOVERS:
                T.set_max_nreg(BACKWARD_SCAN.scores.registers, 1)
                if direction == REVERSE:
                    make_scores(thread, dtype, t, b, scores, item)
            else:
                T.set_max_nreg(BACKWARD_SCAN.movers.registers, 0)
                if thread < MOVERS + WARP:
                    if direction == FORWARD:
                        load_links(thread, t, b, item, -1, value_heads, PLAIN, transitions)
                        load_forward(thread, t, b, item, head, key_head, column, k, v, solve, row_scales)
                    else:
                        load_links(thread, t, b, item, 1, value_heads, TURNED, transitions)
                        load_reverse(
                            thread, t, b, item, head, key_head, column, q, k, dout, solve, row_scales, pair_scales
                        )
                elif thread < MOVERS + 2 * WARP:
                    if direction == FORWARD:
                        store_states(thread, t, b, item, head, half, False, states)
                    else:
                        store_states(thread, t, b, item, head, half, True, dstates)
                elif thread < MOVERS + 3 * WARP:
                    if direction == FORWARD:
                        store_errors(thread, t, b, item, head, half, errors)
                    else:
                        store_value_gradients(thread, thread % WARP, t, b, item, head, column, dv)
                else:
                    announce(
                        thread, b, item, direction == REVERSE, arrivals, queue, cursors, chunk_slots, key_head,
                        key_heads, group,
                    )  # fmt: skip
                    T.pdl_sync()

    return backward_scan
