"""Gated delta rule, backward: gradients of q, k, g and beta, chunk by chunk; blocks share the chunks out (SM90).

Per value head of a key head, with S before the chunk, dS behind it, errors E, D[t, s] = 2^(G_t - G_s) for s <= t and rows b of
beta:

    queries    dq^ += scale 2^G (dO S^T) + M K^                         M = (dO E^T) D scale b
    keys       dk^ += -2^G (dV S^T) + M K^                              M = -tril((dV E^T) D b, -1)
                    + b (2^(G_end - G) (E dS^T) + M Q^ + N K^)          M = (E dO^T) D^T scale, N = -triu((E dV^T) D^T, 1)

dbeta and the gradient of G are sums over rows of these terms times the row of q^ or k^ itself, in float32: of M times Q^ K^^T
and the like before M is rounded. The gradient of a gate is the sum of those of G from its token on, in which a pair of tokens
behind it cancels: both of its sums come from float32. The value heads of a key head are summed in registers, in their order.
Norms of q and k scale rows and columns, and take their part of the gradient at the end.

Reads        q k [T, H, 128] · dout dv [T, HV, 128] · errors states dstates of `backward_scan.py` · row_scales norms of
             `backward_factor.py` · chunks [slots, 4]
Writes       dq dk [T, H, 128] · dg dbeta [T, HV] f32, every row of a sequence

Role       threads   registers   per head
queries    1 x 128   224         rows of dq, their part of dg
keys       1 x 128   224         rows of dk, their part of dg, dbeta
loader     1 x 32    56          q and k of two chunks, the two halves of the value columns of a head
pair       2 x 32    56          <S, dS>
sum        1 x 32    56          dg and dbeta

Barrier        set by               waited on by            arrivals
tokens_ready   loader               queries, keys           1 and the bytes
tokens_free    queries, keys        loader                  8
half_ready     loader               queries, keys, pair     1 and the bytes
half_free      queries, keys, pair  loader                  10
parts_ready    queries, keys, pair  sum                     10
parts_free     sum                  queries, keys, pair     1
named 1, 2     a consumer each      the same                128, in a chunk that ends early
"""

import tilelang.language as T

from ._backward_gradient_roles import (
    find_work,
    key_head,
    load_half,
    load_tokens,
    pair_head,
    query_head,
    receive_tokens,
    start_rows,
    sum_head,
    write_gradient,
)
from ._backward_gradient_tiles import (
    BACKWARD_GRADIENTS_PROTOCOL,
    BOTH_HALVES,
    HALVES,
    KEYS,
    QUERIES,
    SLOTS,
    Barriers,
    KeyRegisters,
    QueryRegisters,
    Tiles,
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
MOVERS = BACKWARD_GRADIENTS.consumers * WARPGROUP  # first thread of the loader


def registers_of(dtype):
    """Registers of a thread that makes queries' gradients, keys' gradients, or moves; their sum is that of the launch."""
    consumer, mover = BACKWARD_GRADIENTS.consumer.registers, BACKWARD_GRADIENTS.movers.registers
    return (consumer - 16, consumer + 16, mover) if dtype == "float16" else (consumer, consumer, mover)


def build_backward_gradients(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots = T.dynamic("chunk_slots")
    q_t, q_h, k_t, k_h, do_t, do_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "do_t", "do_h"))

    QUERY_REGISTERS, KEY_REGISTERS, MOVER_REGISTERS = registers_of(dtype)

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
    ):
        with T.Kernel(BLOCKS, threads=BACKWARD_GRADIENTS.threads) as block:
            t, b = Tiles(dtype), Barriers()
            of_queries, of_keys = QueryRegisters(dtype, "_queries"), KeyRegisters(dtype, "_keys")
            thread = T.get_thread_binding()
            place = T.alloc_local((4,), "int32")
            works, heads, work = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            works, heads, work = 0, 0, 0
            if thread < WARPGROUP:
                T.set_max_nreg(QUERY_REGISTERS, 1)
                for turn in T.serial(T.truncdiv(chunk_slots * key_heads + BLOCKS - 1, BLOCKS)):
                    find_work(work, place, chunks, chunk_slots * key_heads, key_heads, BLOCKS, turn, block)
                    if place[3] > 0:
                        slot = works % SLOTS
                        receive_tokens(dtype, t, b, slot, works, place[3], QUERIES)
                        start_rows(t, of_queries, slot, NORM_QUERY)
                        for _ in T.serial(T.truncdiv(value_heads, key_heads)):
                            query_head(thread, t, b, of_queries, works, heads, place[3], scale)
                            heads += 1
                        write_gradient(
                            dtype, t, of_queries, slot, QUERIES, dq, place[2], place[3], place[1], use_l2norm
                        )
                        arrive(b.tokens_free, slot, thread)
                        works += 1
            elif thread < MOVERS:
                T.set_max_nreg(KEY_REGISTERS, 1)
                for turn in T.serial(T.truncdiv(chunk_slots * key_heads + BLOCKS - 1, BLOCKS)):
                    find_work(work, place, chunks, chunk_slots * key_heads, key_heads, BLOCKS, turn, block)
                    if place[3] > 0:
                        slot = works % SLOTS
                        receive_tokens(dtype, t, b, slot, works, place[3], KEYS)
                        start_rows(t, of_keys, slot, NORM_KEY)
                        for _ in T.serial(T.truncdiv(value_heads, key_heads)):
                            key_head(thread, t, b, of_keys, works, heads, place[3], scale)
                            heads += 1
                        write_gradient(dtype, t, of_keys, slot, KEYS, dk, place[2], place[3], place[1], use_l2norm)
                        arrive(b.tokens_free, slot, thread)
                        works += 1
            else:
                T.set_max_nreg(MOVER_REGISTERS, 0)
                for turn in T.serial(T.truncdiv(chunk_slots * key_heads + BLOCKS - 1, BLOCKS)):
                    find_work(work, place, chunks, chunk_slots * key_heads, key_heads, BLOCKS, turn, block)
                    if place[3] > 0:
                        if thread < MOVERS + WARP:
                            load_tokens(thread, t, b, place, works, q, k, norms)
                        for member in T.serial(T.truncdiv(value_heads, key_heads)):
                            head = place[1] * T.truncdiv(value_heads, key_heads) + member
                            if thread < MOVERS + WARP:
                                for half in BOTH_HALVES:
                                    load_half(
                                        thread, t, b, place[0], head, place[2], half, heads, dout, dv, errors, states,
                                        dstates, row_scales,
                                    )  # fmt: skip
                            elif thread < MOVERS + 3 * WARP:
                                pair_head(thread, dtype, t, b, heads, thread - MOVERS - WARP)
                            else:
                                sum_head(thread, t, b, heads, thread % WARP, place[2], place[3], head, dg, dbeta)
                            heads += 1
                        works += 1

    return backward_gradients
