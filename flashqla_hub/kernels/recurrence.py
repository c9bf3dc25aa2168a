"""Gated delta rule, forward: outputs and states of one value head of a part of a sequence at a time (SM90).

Per chunk of C tokens, with the state S [K, V], G the decay since the chunk's start and A of `factor.py`:

    W = K S                    Z = V - 2^G W                N = A_g Z
    O = 2^G scale Q S + P N    S <- 2^(G_end) S + (2^(G_end - G) K)^T N

The state stands transposed in registers, 64 value rows in each of two warpgroups, and is the left operand of its products.
Where the decay within a chunk stays within FACTORED_RANGE of a reference R, N is formed with its decay to R (it is in the
operand), so that the keys serve as they are, and the scores carry 2^(-R): the three last products follow each other and one
scale, 2^G scale, makes the outputs. R is G_end, or half of it where only that is in range; then the state decays to R before
its product and on to the end behind it. Other chunks, such as those with gates of -30 or -inf, keep N without that decay:
the score warpgroup multiplies the keys by whole powers of two (the fractions are in the operand) and gates the scores pair
by pair, so that only decays from an earlier to a later token are formed. L2 norms of q and k ride on the scales of rows.

A block takes one item after the other, a value head of a part of a sequence each, and every role goes on to the next item on
its own: the loads and scores of an item run while the states of the item before are still at work. Items are handed out in
their order (`taken`), or each block starts with that of its own number where no item waits for others.

A sequence may be cut into segments. What starts a segment's state, and which items make it, is told in `_segments.py`; here
it means that some first chunks may have no outputs, that a state may start as the identity (without values: the columns of
the segment's transition), and that links may come before the chunks: S <- transition S + state. The items that make states
come first and wait for no other, so that those behind may wait for them.

Reads        q k [T, H, 128] · v [T, HV, 128] · operand decay key_norm bound of `factor.py` · cu_seqlens · initial state f32
Writes       o [T, HV, 128], every row of the sequence · final state f32 · `taken`
In between   states [V, K] f32, transitions in two 16-bit parts with the squared norms of their rows, flags `ready`

Role          threads   registers   per item and chunk
state         2 x 128   176         W, Z, N, O and S of 64 value rows
scores        1 x 128   112         before the chunks: transitions of the links
                                    scores, scales, decayed keys; zeros behind the end; announces the chunk
token loader  1 x 32    48          takes an item and says what it is; q, k, decay, key norms, three stages
value loader  1 x 32    48          v, operand, two slots
storers       2 x 32    48          64 columns of o each

Barrier          set by            waited on by           arrivals
item_ready       token loader      all others             1
item_free        all others        token loader           8 + 4 + 3
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
keys_free        state             token loader           8, behind the last link of an item
named 1 and 2    the other half    a state warpgroup      256, in turn: K S, then the last products
named 3          scores            scores                 128, in a chunk that ends early
named 4          state             state                  256, before a segment's state or transition is announced

The state warpgroups wait once a chunk, for `scores_ready`: the score warpgroup waits for everything else beforehand.
"""

import tilelang.language as T

from ._recurrence_roles import STATE_THREADS, form_scores, keep_states, load_tokens, load_values, store_outputs
from ._recurrence_tiles import RECURRENCE_PROTOCOL, Barriers, ScoreRegisters, StateRegisters, Tiles
from ._sm90 import CHUNK, HEAD_DIM, QUEUES, RECURRENCE, WARP, WARPGROUP
from ._tile import swizzled, transposed_fragment

PROTOCOL = RECURRENCE_PROTOCOL
MOVERS = STATE_THREADS + WARPGROUP  # first thread of the loaders and storers


def build_recurrence(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, words = T.dynamic("chunk_slots"), T.dynamic("words")
    matrices, rows = T.dynamic("matrices"), T.dynamic("rows")
    q_t, q_h, k_t, k_h, v_t, v_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"))

    @T.prim_func
    def recurrence(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        v: T.StridedTensor((tokens, value_heads, HEAD_DIM), (v_t, v_h, 1), dtype),
        operand: T.Tensor((chunk_slots, value_heads, CHUNK, CHUNK), dtype),
        decay: T.Tensor((chunk_slots, value_heads, CHUNK), "float32"),
        key_norm: T.Tensor((chunk_slots, key_heads, CHUNK), "float32"),
        bound: T.Tensor((chunk_slots, value_heads), "float32"),
        cu_words: T.Tensor((words,), "int32"),
        initial: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        states: T.Tensor((rows, HEAD_DIM * HEAD_DIM), "float32"),
        transitions: T.Tensor((rows, 2 * HEAD_DIM, HEAD_DIM), dtype),
        ready: T.Tensor((rows, 2), "int32"),
        reach: T.Tensor((rows, HEAD_DIM), "float32"),
        taken: T.Tensor((QUEUES,), "int32"),
        o: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        final: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        scale: T.float32,
        use_l2norm: T.int32,
        has_initial: T.int32,
        write_final: T.int32,
        state_v_first: T.int32,
        words_per_entry: T.int32,
        dense_length: T.int32,
        sequences: T.int32,
        segment_slots: T.int32,
        segment_chunks: T.int32,
        replay: T.int32,
        has_cuts: T.int32,
        first_item: T.int32,
        items: T.int32,
        given: T.int32,
        queue: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=RECURRENCE.threads) as block:
            t, b = Tiles(dtype), Barriers()
            state, scores = StateRegisters(dtype), ScoreRegisters(dtype)
            T.annotate_layout(
                {part: transposed_fragment() for part in (state.v, state.o)}
                | {tile: swizzled(tile) for tile in (*t.v, *t.o)}
            )
            thread = T.get_thread_binding()
            T.pdl_trigger()
            T.pdl_sync()
            T.fence_proxy_async()
            T.sync_threads()
            if thread < STATE_THREADS:
                T.set_max_nreg(RECURRENCE.state.registers, 1)
                keep_states(
                    thread,
                    dtype,
                    t,
                    b,
                    state,
                    value_heads,
                    initial,
                    states,
                    final,
                    transitions,
                    reach,
                    ready,
                    T.Select(state_v_first != 0, HEAD_DIM, 1),
                    T.Select(state_v_first != 0, 1, HEAD_DIM),
                )
            elif thread < MOVERS:
                T.set_max_nreg(RECURRENCE.scores.registers, 0)
                form_scores(thread, dtype, t, b, scores, value_heads, transitions, scale, use_l2norm)
            else:
                T.set_max_nreg(RECURRENCE.movers.registers, 0)
                if thread < MOVERS + WARP:
                    load_tokens(
                        thread,
                        t,
                        b,
                        q,
                        k,
                        decay,
                        key_norm,
                        taken,
                        queue,
                        block,
                        given,
                        first_item,
                        items,
                        has_initial,
                        write_final,
                        cu_words,
                        words_per_entry,
                        dense_length,
                        sequences,
                        tokens,
                        value_heads,
                        T.truncdiv(value_heads, key_heads),
                        segment_slots,
                        segment_chunks,
                        replay,
                        has_cuts,
                        bound,
                        ready,
                        reach,
                    )
                elif thread < MOVERS + 2 * WARP:
                    load_values(thread, t, b, tokens, v, operand)
                elif thread < MOVERS + 3 * WARP:
                    store_outputs(0, thread, t, b, o)
                else:
                    store_outputs(1, thread, t, b, o)

    return recurrence
