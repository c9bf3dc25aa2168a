"""Gated delta rule, backward: states and their gradients, half of a value head in one direction a block (SM90).

Per chunk, with the solve X D and the scores P of `backward_factor.py` and row scales read, write, query, take from there:

    forward     E = X D (V - read K S)           S <- 2^(G_end) S + (write K)^T E
    reverse     dN = P^T dO + write K dS         dV = (X D)^T dN
                dS <- 2^(G_end) dS + (query Q)^T dO - (take K)^T dV

S is stored before each chunk, dS behind it. Value columns do not mix, so a block takes 64 of them: 32 heads, two halves and
two directions fill the card. The state stands transposed in registers and is the left operand of its products.

Reads        q k [T, H, 128] · v dout [T, HV, 128] · solve scores row_scales of `backward_factor.py` · spans [N, 4] ·
             initial state and gradient of the final state f32
Writes       errors [slots, HV, 2, C, 64] · states dstates [slots, HV, 2, 64, 128], transposed · dv [T, HV, 128] ·
             gradient of the initial state f32

Role          threads   registers   per chunk
state         1 x 128   255         S and E, or dS and dV, of 64 value columns; zeros behind the end
loader        1 x 32    255         k, v, solve, row scales; in reverse also q, scores and do instead of v; three stages
storers       2 x 32    255         the state tile; errors or dv

Barrier         set by         waited on by     arrivals
chunk_ready     loader         state            1 and the bytes
chunk_free      state          loader           4
state_ready     state          state storer     4
state_free      state storer   state            1
values_ready    state          value storer     4
values_free     value storer   state            1
named 1         state          state            128, in a chunk that ends early
"""

import tilelang.language as T

from ._backward_scan_roles import (
    carry_gradient,
    carry_state,
    load_forward,
    load_reverse,
    load_state,
    store_errors,
    store_state,
    store_states,
    store_value_gradients,
)
from ._backward_scan_tiles import BACKWARD_SCAN_PROTOCOL, Barriers, GradientRegisters, StateRegisters, Tiles
from ._sm90 import BACKWARD_SCAN, CHUNK, HEAD_DIM, ROW_VECTORS, SPAN_WORDS, VALUE_TILE, WARP, WARPGROUP
from ._tile import swizzled, transposed_fragment

PROTOCOL = BACKWARD_SCAN_PROTOCOL
HALVES, DIRECTIONS = BACKWARD_SCAN.halves, BACKWARD_SCAN.directions


def build_backward_scan(dtype):
    """The prim_func for q, k, v of `dtype`; arguments in README.md."""
    tokens, key_heads, value_heads = T.dynamic("tokens"), T.dynamic("key_heads"), T.dynamic("value_heads")
    chunk_slots, sequence_count, matrices = T.dynamic("chunk_slots"), T.dynamic("sequence_count"), T.dynamic("matrices")
    q_t, q_h, k_t, k_h, v_t, v_h, do_t, do_h = (
        T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h", "do_t", "do_h")
    )

    @T.prim_func
    def backward_scan(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        v: T.StridedTensor((tokens, value_heads, HEAD_DIM), (v_t, v_h, 1), dtype),
        dout: T.StridedTensor((tokens, value_heads, HEAD_DIM), (do_t, do_h, 1), dtype),
        solve: T.Tensor((chunk_slots, value_heads, CHUNK, CHUNK), dtype),
        scores: T.Tensor((chunk_slots, value_heads, CHUNK, CHUNK), dtype),
        row_scales: T.Tensor((chunk_slots, value_heads, ROW_VECTORS, CHUNK), "float32"),
        spans: T.Tensor((sequence_count, SPAN_WORDS), "int32"),
        initial: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        dfinal: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        errors: T.Tensor((chunk_slots, value_heads, HALVES, CHUNK, VALUE_TILE), dtype),
        states: T.Tensor((chunk_slots, value_heads, HALVES, VALUE_TILE, HEAD_DIM), dtype),
        dstates: T.Tensor((chunk_slots, value_heads, HALVES, VALUE_TILE, HEAD_DIM), dtype),
        dv: T.Tensor((tokens, value_heads, HEAD_DIM), dtype),
        dinitial: T.Tensor((matrices, HEAD_DIM * HEAD_DIM), "float32"),
        has_initial: T.int32,
        has_dfinal: T.int32,
        write_dinitial: T.int32,
        state_v_first: T.int32,
    ):
        with T.Kernel(sequence_count * value_heads * HALVES * DIRECTIONS, threads=BACKWARD_SCAN.threads) as block:
            t, b = Tiles(dtype), Barriers()
            ahead, back = StateRegisters(dtype, "_ahead"), GradientRegisters(dtype, "_back")
            T.annotate_layout(
                {part: transposed_fragment(VALUE_TILE) for part in (ahead.v, ahead.o, back.v, back.o)}
                | {tile: swizzled(tile) for tile in (*t.values, t.out)}
            )
            thread = T.get_thread_binding()
            span, lead = T.alloc_local((SPAN_WORDS,), "int32"), T.alloc_local((1,), "float32")
            matrix, head, key_head = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            direction, half = block % DIRECTIONS, block // DIRECTIONS % HALVES
            matrix = T.truncdiv(block, DIRECTIONS * HALVES)
            head = T.truncmod(matrix, value_heads)
            key_head = T.truncdiv(head, T.truncdiv(value_heads, key_heads))
            for word in T.unroll(SPAN_WORDS):
                span[word] = spans[T.truncdiv(matrix, value_heads), word]
            column = half * VALUE_TILE
            if thread < WARPGROUP:
                value_stride = T.Select(state_v_first != 0, HEAD_DIM, 1)
                key_stride = T.Select(state_v_first != 0, 1, HEAD_DIM)
                if direction == 0:
                    T.clear(ahead.S)
                    if has_initial != 0:
                        load_state(ahead.S, matrix, half, initial, value_stride, key_stride)
                    carry_state(thread, dtype, t, b, ahead, span)
                else:
                    lead[0] = 1.0
                    T.clear(back.S)
                    if has_dfinal != 0:
                        load_state(back.S, matrix, half, dfinal, value_stride, key_stride)
                    carry_gradient(thread, dtype, t, b, back, span, lead)
                    if write_dinitial != 0:
                        store_state(back.S, matrix, half, dinitial, lead[0], value_stride, key_stride)
            elif thread < WARPGROUP + WARP:
                if direction == 0:
                    load_forward(thread, t, b, span, head, key_head, column, k, v, solve, row_scales)
                else:
                    load_reverse(thread, t, b, span, head, key_head, column, q, k, dout, solve, scores, row_scales)
            elif thread < WARPGROUP + 2 * WARP:
                if direction == 0:
                    store_states(thread, t, b, span, head, half, False, states)
                else:
                    store_states(thread, t, b, span, head, half, True, dstates)
            elif thread < WARPGROUP + 3 * WARP:
                if direction == 0:
                    store_errors(thread, t, b, span, head, half, errors)
                else:
                    store_value_gradients(thread, thread % WARP, t, b, span, head, column, dv)

    return backward_scan
