"""Gated delta rule, backward: gradients of q, k, g and beta, chunk by chunk; blocks share the chunks out (SM90).

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

Reads        q k [T, H, 128] · dout dv [T, HV, 128] · errors states dstates of `backward_scan.py` · row_scales norms of
             `backward_rows.py` · chunks [slots, 4]
Writes       dq dk [T, H, 128] · dg dbeta [T, HV] f32, every row of a sequence

Role       threads   registers   per head
pairs      1 x 128   152         M and N, their part of dg and dbeta
queries    1 x 128   160         rows of dq, their part of dg, <S, dS>
keys       1 x 128   160         rows of dk, their part of dg and dbeta
loader     1 x 32    40          q and k of two chunks, row scales of two heads, E, dV and dO
loader     1 x 32    40          S and dS
sum        1 x 32    40          dg and dbeta
idle       1 x 32    40

Barrier          set by                    waited on by              arrivals
tokens_ready     loader                    queries, keys, pairs      1 and the bytes
tokens_free      queries, keys, pairs      loader                    12
rows_ready       loader                    consumers, sum            1 and the bytes
rows_free        consumers, sum            loader                    13
errors_ready     loader                    keys, pairs               1 and the bytes
errors_free      keys, pairs               loader                    8
dv_ready         loader                    keys, pairs               1 and the bytes
dv_free          keys, pairs               loader                    8
dout_ready       loader                    queries, pairs            1 and the bytes
dout_free        queries, pairs            loader                    8
states_ready     loader                    queries, keys             1 and the bytes
states_free      queries, keys             loader                    8
dstates_ready    loader                    queries, keys             1 and the bytes
dstates_free     queries, keys             loader                    8
pairs_ready      pairs                     queries, keys             4
pairs_free       queries, keys             pairs                     8
parts_ready      queries, keys, pairs      sum                       12
parts_free       sum                       queries, keys, pairs      1
named 1, 2, 3    queries, keys, pairs      each its own              128, in a chunk that ends early
"""

import tilelang.language as T

from ._backward_gradient_roles import (
    find_work,
    key_head,
    load_head,
    load_states,
    load_tokens,
    look_ahead,
    pair_head,
    query_head,
    receive_tokens,
    start_rows,
    sum_head,
    write_gradient,
)
from ._backward_gradient_tiles import (
    BACKWARD_GRADIENTS_PROTOCOL,
    HALVES,
    KEYS,
    QUERIES,
    SLOTS,
    Barriers,
    GradientRegisters,
    PairRegisters,
    QueryRegisters,
    Tiles,
    column_fragment,
)
from ._sm90 import (
    BACKWARD_GRADIENTS,
    CHUNK,
    CHUNK_WORDS,
    HEAD_DIM,
    NORM_KEY,
    NORM_QUERY,
    NORM_VECTORS,
    ROW_VECTORS,
    VALUE_TILE,
    WARP,
    WARPGROUP,
)
from ._tile import arrive

PROTOCOL = BACKWARD_GRADIENTS_PROTOCOL
BLOCKS = BACKWARD_GRADIENTS.blocks
QUERY_ROLE, KEY_ROLE, MOVERS = WARPGROUP, 2 * WARPGROUP, 3 * WARPGROUP  # first threads of roles


def build_backward_gradients(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots = T.dynamic("chunk_slots")
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
        dq: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        dk: T.Tensor((tokens, key_heads, HEAD_DIM), dtype),
        dg: T.Tensor((tokens, value_heads), "float32"),
        dbeta: T.Tensor((tokens, value_heads), "float32"),
        scale: T.float32,
        use_l2norm: T.int32,
        is_beside: T.int32,
    ):
        with T.Kernel(BLOCKS, threads=BACKWARD_GRADIENTS.threads) as block:
            t, b = Tiles(dtype), Barriers()
            of_queries, of_keys = QueryRegisters("_queries"), GradientRegisters("_keys")
            of_pairs = PairRegisters("_pairs")
            T.annotate_layout({of_pairs.columns: column_fragment()})
            thread = T.get_thread_binding()
            if is_beside == 0:
                T.pdl_sync()
            if thread < QUERY_ROLE:
                T.set_max_nreg(BACKWARD_GRADIENTS.pairs.registers, 1)
                place = T.alloc_local((4,), "int32")
                works, heads, work = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                works, heads, work = 0, 0, 0
                for turn in T.serial(T.truncdiv(chunk_slots * key_heads + BLOCKS - 1, BLOCKS)):
                    find_work(work, place, chunks, chunk_slots * key_heads, key_heads, BLOCKS, turn, block)
                    if place[3] > 0:
                        slot = works % SLOTS
                        receive_tokens(dtype, thread, t, b, slot, works, place[3], 2)
                        for _ in T.serial(T.truncdiv(value_heads, key_heads)):
                            pair_head(thread, t, b, of_pairs, works, heads, place[3], scale)
                            heads += 1
                        arrive(b.tokens_free, slot, thread)
                        works += 1
            elif thread < KEY_ROLE:
                T.set_max_nreg(BACKWARD_GRADIENTS.queries.registers, 1)
                first, rows, head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                ahead = T.alloc_local((2,), "int32")
                works, heads, work = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                works, heads, work = 0, 0, 0
                look_ahead(work, ahead, chunks, chunk_slots * key_heads, key_heads, BLOCKS, -1, block)
                for turn in T.serial(T.truncdiv(chunk_slots * key_heads + BLOCKS - 1, BLOCKS)):
                    first = ahead[0]
                    rows = ahead[1]
                    look_ahead(work, ahead, chunks, chunk_slots * key_heads, key_heads, BLOCKS, turn, block)
                    if rows > 0:
                        slot = works % SLOTS
                        receive_tokens(dtype, thread, t, b, slot, works, rows, 0)
                        start_rows(t, of_queries, slot, NORM_QUERY)
                        for _ in T.serial(T.truncdiv(value_heads, key_heads)):
                            query_head(thread, t, b, of_queries, works, heads, scale)
                            heads += 1
                        head = T.truncmod(turn * BLOCKS + block, key_heads)
                        write_gradient(dtype, t, of_queries, slot, QUERIES, dq, first, rows, head, use_l2norm)
                        arrive(b.tokens_free, slot, thread)
                        works += 1
            elif thread < MOVERS:
                T.set_max_nreg(BACKWARD_GRADIENTS.keys.registers, 1)
                first, rows, head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                ahead = T.alloc_local((2,), "int32")
                works, heads, work = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                works, heads, work = 0, 0, 0
                look_ahead(work, ahead, chunks, chunk_slots * key_heads, key_heads, BLOCKS, -1, block)
                for turn in T.serial(T.truncdiv(chunk_slots * key_heads + BLOCKS - 1, BLOCKS)):
                    first = ahead[0]
                    rows = ahead[1]
                    look_ahead(work, ahead, chunks, chunk_slots * key_heads, key_heads, BLOCKS, turn, block)
                    if rows > 0:
                        slot = works % SLOTS
                        receive_tokens(dtype, thread, t, b, slot, works, rows, 1)
                        start_rows(t, of_keys, slot, NORM_KEY)
                        for _ in T.serial(T.truncdiv(value_heads, key_heads)):
                            key_head(thread, t, b, of_keys, works, heads)
                            heads += 1
                        head = T.truncmod(turn * BLOCKS + block, key_heads)
                        write_gradient(dtype, t, of_keys, slot, KEYS, dk, first, rows, head, use_l2norm)
                        arrive(b.tokens_free, slot, thread)
                        works += 1
            else:
                T.set_max_nreg(BACKWARD_GRADIENTS.movers.registers, 0)
                place = T.alloc_local((4,), "int32")
                works, heads, work = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                works, heads, work = 0, 0, 0
                for turn in T.serial(T.truncdiv(chunk_slots * key_heads + BLOCKS - 1, BLOCKS)):
                    find_work(work, place, chunks, chunk_slots * key_heads, key_heads, BLOCKS, turn, block)
                    if place[3] > 0:
                        if thread < MOVERS + WARP:
                            load_tokens(thread, t, b, place, works, q, k, norms)
                        for member in T.serial(T.truncdiv(value_heads, key_heads)):
                            head = place[1] * T.truncdiv(value_heads, key_heads) + member
                            if thread < MOVERS + WARP:
                                load_head(thread, t, b, place[0], head, place[2], heads, dout, dv, errors, row_scales)
                            elif thread < MOVERS + 2 * WARP:
                                load_states(thread, t, b, place[0], head, heads, states, dstates)
                            elif thread < MOVERS + 3 * WARP:
                                sum_head(thread, t, b, heads, place[2], place[3], head, dg, dbeta)
                            heads += 1
                        works += 1
            if T.And(is_beside != 0, block == BLOCKS - 1):  # nothing may follow before that kernel has ended
                T.pdl_sync()

    return backward_gradients
