"""Gated delta rule, backward: gradients of q, k, g and beta, chunk by chunk as chunks become ready (SM90).

Per value head of a key head, with S before the chunk, dS behind it, errors E, D[t, s] = 2^(G_t - G_s) for s <= t and b the beta
of a token, of the column where it stands behind D, or WEAKEST_STRENGTH where beta is closer to zero:

    pairs      M = scale (dO E^T) D b      N = -tril((dV E^T) D b, -1)
    queries    dq^ += scale 2^G (dO S^T) + M K^
    keys       dk^ += -2^G (dV S^T) + b 2^(G_end - G) (E dS^T) + M^T Q^ + (N + N^T) K^

b dbeta and the gradient of G are sums over rows and columns of these terms times the row of q^ or k^ itself, in float32: of
M Q^ K^^T + N K^ K^^T, element by element and before M and N are rounded. The gradient of a gate is the sum of those
of G from its token on, in which a pair of tokens behind it cancels: both of its sums are of the same float32 number. The value
heads of a key head are summed in registers, in their order. Norms of q and k scale rows and columns of M and N and the rows of
the other terms, so that q and k are multiplied as they are; they take their part of the gradient at the end.

A tile of a head is loaded anew as soon as its readers are through with it, while they still work on what they formed: bytes are
what takes longest, and should never stop coming.

Blocks begin beside the scan that writes errors, states and dv (programmatic launch), once the last of its blocks runs, and take
chunk after chunk of a key head from the queue of `_ready.py`, which the scan fills. A warp of each block waits for the end of the
scan: a block that finds no chunk in the queue after that is through, and this launch ends after the scan. Which block takes a
chunk, and when, changes no bit.

Reads        q k [T, H, 128] · dout dv [T, HV, 128] · errors states dstates of `backward_scan.py` · row_scales norms of
             `backward_rows.py` · chunks [slots, 4] · queue [slots * H], cursors [2] of `_ready.py`, of which it moves the first
Writes       dq dk [T, H, 128] · dg dbeta [T, HV] f32, every row of a sequence

Role       threads   registers   per head
pairs      1 x 128   152         M and N, their part of dg and dbeta
queries    1 x 128   160         rows of dq, their part of dg, <S, dS>
keys       1 x 128   160         rows of dk, their part of dg and dbeta
loader     1 x 32    40          takes chunks; q and k of two of them, row scales of two heads, E, dV and dO
states     1 x 32    40          loads S and dS
sum        1 x 32    40          dg and dbeta
watch      1 x 32    40          says when the scan has ended

Barrier          set by                    waited on by              arrivals
work_ready       loader                    consumers, states, sum    1; the record of the chunk in this slot, or that none is left
tokens_ready     loader                    queries, keys, pairs      1 and the bytes
tokens_free      consumers, states, sum    loader                    14; they are through with the record too
rows_ready       loader                    consumers, sum            1 and the bytes
rows_free        consumers, sum            loader                    13
errors_ready     loader                    keys, pairs               1 and the bytes
errors_free      keys, pairs               loader                    8
dv_ready         loader                    keys, pairs               1 and the bytes
dv_free          keys, pairs               loader                    8
dout_ready       loader                    queries, pairs            1 and the bytes
dout_free        queries, pairs            loader                    8
states_ready     states                    queries, keys             1 and the bytes
states_free      queries, keys             states                    8
dstates_ready    states                    queries, keys             1 and the bytes
dstates_free     queries, keys             states                    8
pairs_ready      pairs                     queries, keys             4
pairs_free       queries, keys             pairs                     8
parts_ready      queries, keys, pairs      sum                       12
parts_free       sum                       queries, keys, pairs      1
named 1, 2, 3    queries, keys, pairs      each its own              128, in a chunk that ends early
"""

import tilelang.language as T

from ._backward_gradient_roles import (
    form_gradients,
    form_pairs,
    key_head,
    query_head,
    sum_heads,
    supply_states,
    supply_tokens,
)
from ._backward_gradient_tiles import (
    BACKWARD_GRADIENTS_PROTOCOL,
    HALVES,
    KEYS,
    QUERIES,
    Barriers,
    GradientRegisters,
    PairRegisters,
    QueryRegisters,
    Tiles,
    column_fragment,
)
from ._ready import PROXY_CODE
from ._sm90 import (
    BACKWARD_GRADIENTS,
    CHUNK,
    CHUNK_WORDS,
    CURSOR_WORDS,
    HEAD_DIM,
    NORM_KEY,
    NORM_QUERY,
    NORM_VECTORS,
    ROW_VECTORS,
    VALUE_TILE,
    WARP,
    WARPGROUP,
)

PROTOCOL = BACKWARD_GRADIENTS_PROTOCOL
BLOCKS = BACKWARD_GRADIENTS.blocks
QUERY_ROLE, KEY_ROLE, MOVERS = WARPGROUP, 2 * WARPGROUP, 3 * WARPGROUP  # first threads of roles
STATE_LOADER, SUM, WATCH = MOVERS + WARP, MOVERS + 2 * WARP, MOVERS + 3 * WARP


def build_backward_gradients(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, places = T.dynamic("chunk_slots"), T.dynamic("places")
    q_t, q_h, k_t, k_h, do_t, do_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "do_t", "do_h"))

    @T.prim_func
    def backward_gradients(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        dout: T.StridedTensor((tokens, value_heads, HEAD_DIM), (do_t, do_h, 1), dtype),
        dv: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        errors: T.Tensor((chunk_slots, value_heads, HALVES, CHUNK, VALUE_TILE), dtype),
        states: T.Tensor((chunk_slots, value_heads, HALVES, VALUE_TILE, HEAD_DIM), dtype),
        dstates: T.Tensor((chunk_slots, value_heads, HALVES, VALUE_TILE, HEAD_DIM), dtype),
        row_scales: T.Tensor((chunk_slots, value_heads, ROW_VECTORS, CHUNK), "float32"),
        norms: T.Tensor((chunk_slots, key_heads, NORM_VECTORS, CHUNK), "float32"),
        chunks: T.Tensor((chunk_slots, CHUNK_WORDS), "int32"),
        queue: T.Tensor((places,), "int32"),
        cursors: T.Tensor((CURSOR_WORDS,), "int32"),
        dq: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        dk: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        dg: T.Tensor((tokens, value_heads), "float32"),
        dbeta: T.Tensor((tokens, value_heads), "float32"),
        scale: T.float32,
        use_l2norm: T.int32,
    ):
        with T.Kernel(BLOCKS, threads=BACKWARD_GRADIENTS.threads):
            T.import_source(PROXY_CODE)
            t, b = Tiles(dtype), Barriers()
            of_queries, of_keys = QueryRegisters("_queries"), GradientRegisters("_keys")
            of_pairs = PairRegisters("_pairs")
            T.annotate_layout({of_pairs.columns: column_fragment()})
            thread = T.get_thread_binding()
            group = T.truncdiv(value_heads, key_heads)
            if thread == 0:
                t.has_ended[0] = 0
            T.sync_threads()
            if thread < QUERY_ROLE:
                T.set_max_nreg(BACKWARD_GRADIENTS.pairs.registers, 1)
                form_pairs(dtype, thread, t, b, of_pairs, group, scale)
            elif thread < KEY_ROLE:
                T.set_max_nreg(BACKWARD_GRADIENTS.queries.registers, 1)
                form_gradients(
                    dtype, thread, t, b, of_queries, group, 0, NORM_QUERY,
                    lambda works, heads: query_head(thread, t, b, of_queries, works, heads, scale),
                    QUERIES, dq, use_l2norm,
                )  # fmt: skip
            elif thread < MOVERS:
                T.set_max_nreg(BACKWARD_GRADIENTS.keys.registers, 1)
                form_gradients(
                    dtype, thread, t, b, of_keys, group, 1, NORM_KEY,
                    lambda works, heads: key_head(thread, t, b, of_keys, works, heads),
                    KEYS, dk, use_l2norm,
                )  # fmt: skip
            else:
                T.set_max_nreg(BACKWARD_GRADIENTS.movers.registers, 0)
                if thread < STATE_LOADER:
                    supply_tokens(
                        thread, t, b, queue, cursors, chunks, places, key_heads, group, tokens, q, k, norms, dout, dv,
                        errors, row_scales,
                    )  # fmt: skip
                elif thread < SUM:
                    supply_states(thread, t, b, group, states, dstates)
                elif thread < WATCH:
                    sum_heads(thread, t, b, group, dg, dbeta)
                else:
                    T.pdl_sync()
                    if thread == WATCH:
                        T.atomic_store(t.has_ended[0], 1, memory_order="release")

    return backward_gradients
