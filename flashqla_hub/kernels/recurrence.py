"""Gated delta rule, forward: outputs and states of one value head of a part of a sequence a block (SM90).

Per chunk of C tokens, with the state S [K, V], G the decay since the chunk's start and A of `factor.py`:

    W = K S                    Z = V - 2^G W                N = A_g Z
    O = 2^G scale Q S + P N    S <- 2^(G_end) S + (2^(G_end - G) K)^T N

The state stands transposed in registers, 64 value rows in each of two warpgroups, and is the left operand of its products.
Where the decay within a chunk stays within FACTORED_RANGE of a reference R, N is formed with its decay to R (it is in the
operand), so that the keys serve as they are. R is G_end: then the scores carry 2^(-R), the three last products follow each
other, and one scale, 2^G scale, makes the outputs. Or it is half of G_end, where only that is in range: then the scores carry
2^(G - R) scale, since 2^(-G) itself may be beyond float32, and Q S is scaled before P N is added. The state decays to R before
its product, and stays there: the scales of what the next chunk reads of it, and its next decay, bring it on to the end, and
only the last chunk's is multiplied out. Other chunks, such as those with gates of -30 or -inf, keep N without that decay: the
score warpgroup multiplies the keys by whole powers of two (the fractions are in the operand) and gates the scores pair by
pair, so that only decays from an earlier to a later token are formed. L2 norms of q and k ride on the scales of rows.

A sequence may be cut into segments. What starts a segment's state, and which blocks make it, is told in `_segments.py`; here
it means that some first chunks may have no outputs, that a state may start as the identity (without values: the columns of
the segment's transition), and that links may come before the chunks: S <- transition S + state. The blocks that make states
come first in the grid and wait for no other, so that those behind may wait for them.

Reads        q k [T, H, 128] · v [T, HV, 128] · operand decay key_norm bound of `factor.py` · cu_seqlens · initial state f32
Writes       o [T, HV, 128], every row of the sequence · final state f32 · for training the states at borders,
             [borders, HV, V, K] f32, each by the block that has the outputs of the chunk before
In between   states [V, K] f32, transitions in two 16-bit parts with the squared norms of their rows, flags `ready`, of
             segments behind which their sequence goes on

Role          threads   registers   per chunk
state         2 x 128   176         W, Z, N, O and S of 64 value rows
scores        1 x 128   128         before the chunks: transitions of the links; zeros that nobody loads
                                    scores, scales, decayed keys; zeros behind the end; announces the chunk
token loader  1 x 32    32          q, k, decay, key norms, three stages
value loader  1 x 32    32          v, operand without its upper right quarter, two slots
storers       2 x 32    32          64 columns of o each

Barrier          set by            waited on by           arrivals
tokens_ready     token loader      scores                 1 and the bytes
tokens_free      state, scores     token loader           8 + 4
values_ready     value loader      scores                 1 and the bytes
values_free      state             value loader           8
scores_ready     scores            state                  4
scores_free      state             scores, value loader   8
output_ready     state (a half)    storer of that half    4
output_free      storers           scores                 2
link_ready       scores            state                  4
link_free        state             scores                 8
keys_free        state             token loader           8, once, behind the last link
named 1 and 2    the other half    a state warpgroup      256, in turn: K S, then the last products
named 3          scores            scores                 128, in a chunk that ends early
named 4          state             state                  256, before a segment's state or transition is announced

The state warpgroups wait once a chunk, for `scores_ready`: the score warpgroup waits for everything else beforehand.
"""

import tilelang.language as T

from ._recurrence_roles import (
    STATE_THREADS,
    bring_links,
    follow_links,
    form_scores,
    keep_state,
    load_state,
    load_tokens,
    load_values,
    store_outputs,
    store_state,
)
from ._recurrence_tiles import RECURRENCE_PROTOCOL, Barriers, ScoreRegisters, StateRegisters, Tiles
from ._segments import describe_item, describe_long
from ._sm90 import (
    CHUNK,
    HALF_CHUNK,
    HEAD_DIM,
    ITEM_CHUNKS,
    ITEM_END,
    ITEM_HEAD,
    ITEM_LINKS,
    ITEM_OWN,
    ITEM_SEQUENCE,
    ITEM_SIGN,
    ITEM_SILENT,
    ITEM_START,
    ITEM_WORDS,
    RECURRENCE,
    TRIANGLE_ROWS,
    WARP,
    WARPGROUP,
)
from ._tile import swizzled, transposed_fragment

PROTOCOL = RECURRENCE_PROTOCOL
MOVERS = STATE_THREADS + WARPGROUP  # first thread of the loaders and storers


def build_recurrence(dtype, form="outputs"):
    """The prim_func for q, k, v of `dtype`; arguments in README.md.

    Args:
        form: "long" is for what `short.py` leaves, the sequences of more than LONG tokens, in one piece each; "kept" also
            stores the states between ranges of chunks that the backward takes one after the other. The others do not look at
            `kept` and `range_slots`.
    """
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, words = T.dynamic("chunk_slots"), T.dynamic("words")
    matrices, rows, links = T.dynamic("matrices"), T.dynamic("rows"), T.dynamic("links")
    borders, keeps_borders = T.dynamic("borders"), form == "kept"
    q_t, q_h, k_t, k_h, v_t, v_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"))

    @T.prim_func
    def recurrence(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        v: T.StridedTensor((tokens, value_heads, HEAD_DIM), (v_t, v_h, 1), dtype),
        operand: T.Tensor((chunk_slots, value_heads, TRIANGLE_ROWS, HALF_CHUNK), dtype),
        decay: T.Tensor((chunk_slots, value_heads, CHUNK), "float32"),
        key_norm: T.Tensor((chunk_slots, key_heads, CHUNK), "float32"),
        bound: T.Tensor((chunk_slots, value_heads), "float32"),
        cu_words: T.Tensor((words,), "int32"),
        initial: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        states: T.Tensor((rows, HEAD_DIM * HEAD_DIM), "float32"),
        transitions: T.Tensor((links, 2 * HEAD_DIM, HEAD_DIM), dtype),
        ready: T.Tensor((rows, 2), "int32"),
        reach: T.Tensor((links, HEAD_DIM), "float32"),
        o: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        final: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        kept: T.Tensor((borders, value_heads, HEAD_DIM * HEAD_DIM), "float32"),
        scale: T.float32,
        use_l2norm: T.int32,
        has_initial: T.int32,
        write_final: T.int32,
        state_v_first: T.int32,
        words_per_entry: T.int32,
        dense_length: T.int32,
        sequences: T.int32,
        segment_chunks: T.int32,
        replay: T.int32,
        range_slots: T.int32,
        first_block: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=RECURRENCE.threads) as launched:
            t, b = Tiles(dtype, keeps_borders), Barriers()
            state, scores = StateRegisters(dtype), ScoreRegisters(dtype)
            T.annotate_layout(
                {part: transposed_fragment() for part in (state.v, state.o)}
                | {tile: swizzled(tile) for tile in (*t.v, *t.o)}
            )
            thread = T.get_thread_binding()
            item, key_head = T.alloc_local((ITEM_WORDS,), "int32"), T.alloc_var("int32")
            block = first_block + launched
            T.pdl_trigger()
            T.pdl_sync()
            if thread < WARP:
                makers = 2 * rows
                makes_states = T.cast(block < makers, "int32")
                place = T.truncdiv(T.Select(makes_states != 0, block, block - makers), value_heads)
                if form == "long":
                    describe_long(
                        item,
                        place,
                        T.truncmod(block, value_heads),
                        has_initial,
                        write_final,
                        cu_words,
                        words_per_entry,
                        dense_length,
                        sequences,
                        tokens,
                        thread,
                    )
                else:
                    describe_item(
                        item,
                        T.Select(makes_states != 0, T.truncdiv(place, 2), place),
                        T.truncmod(block, value_heads),
                        T.truncmod(place, 2),
                        has_initial,
                        write_final,
                        cu_words,
                        words_per_entry,
                        dense_length,
                        sequences,
                        tokens,
                        value_heads,
                        segment_chunks,
                        replay,
                        makes_states,
                        bound,
                        ready,
                        reach,
                        thread,
                    )
                if thread == 0:
                    for word in T.unroll(ITEM_WORDS):
                        t.item[word] = item[word]
            T.fence_proxy_async()
            T.sync_threads()
            for word in T.unroll(ITEM_WORDS):
                item[word] = t.item[word]
            key_head = T.truncdiv(item[ITEM_HEAD], T.truncdiv(value_heads, key_heads))
            if thread < STATE_THREADS:
                T.set_max_nreg(RECURRENCE.state.registers, 1)
                value_stride = T.Select(state_v_first != 0, HEAD_DIM, 1)
                key_stride = T.Select(state_v_first != 0, 1, HEAD_DIM)
                matrix = t.item[ITEM_SEQUENCE] * value_heads + t.item[ITEM_HEAD]
                base = t.item[ITEM_OWN] - (t.item[ITEM_LINKS] + 1) * value_heads
                load_state(state.S, t.item[ITEM_START], matrix, base, initial, states, value_stride, key_stride)
                follow_links(thread, dtype, t, b, state, t.item[ITEM_LINKS], base, value_heads, states)
                keep_state(thread, dtype, t, b, state, item[ITEM_CHUNKS], item[ITEM_SILENT], keeps_borders, kept)
                store_state(
                    thread,
                    dtype,
                    state,
                    t.item[ITEM_END],
                    matrix,
                    t.item[ITEM_OWN],
                    value_heads,
                    t.item[ITEM_SIGN],
                    final,
                    states,
                    transitions,
                    reach,
                    ready,
                    value_stride,
                    key_stride,
                )
            elif thread < MOVERS:
                T.set_max_nreg(RECURRENCE.scores.registers, 0)
                bring_links(thread, dtype, t, b, item, value_heads, transitions)
                form_scores(
                    thread, dtype, t, b, scores, item, scale, use_l2norm, keeps_borders, range_slots, chunk_slots
                )  # fmt: skip
            else:
                T.set_max_nreg(RECURRENCE.movers.registers, 0)
                if thread < MOVERS + WARP:
                    load_tokens(thread, t, b, t.item, key_head, q, k, decay, key_norm)
                elif thread < MOVERS + 2 * WARP:
                    load_values(thread, t, b, t.item, v, operand)
                elif thread < MOVERS + 3 * WARP:
                    store_outputs(0, thread, t, b, t.item, o)
                else:
                    store_outputs(1, thread, t, b, t.item, o)

    return recurrence
