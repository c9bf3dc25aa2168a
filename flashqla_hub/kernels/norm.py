"""Gated RMS norm, forward (SM90).

    y = weight * round(x / sqrt(mean(x^2) + eps)) * act(g)        act(g) = g sigmoid(g) or sigmoid(g)

The normalised values are rounded to the dtype of x, and so are their products with a weight of that dtype; everything else
is float32. A float32 weight leaves the products as they are.

Reads        x g [tokens, heads, 128] · weight [128] of that dtype or f32
Writes       y [tokens, heads, 128], every element

Threads      half a warp a row, 16 bytes a thread; a block takes TURNS times 16 rows, all loads before the first sum
"""

import tilelang.language as T

from ._rows import (
    EIGHT,
    LANES,
    ROWS_PER_TURN,
    THREADS,
    Weight,
    inverse_root,
    load_row,
    load_weight,
    multiply_weight,
    sigmoid,
    store_row,
)
from ._sm90 import HEAD_DIM

TURNS = 4
ROWS = TURNS * ROWS_PER_TURN
BLOCKS_PER_SM = 3


@T.macro
def gate_row(dtype, values, gates, turn, w, inverse, is_wide, is_silu, out):
    """out[turn] = y of eight numbers of a row."""
    gate, normed = T.alloc_var("float32"), T.alloc_local((EIGHT,), dtype)
    product = T.alloc_local((EIGHT,), "float32")
    for e in T.vectorized(EIGHT):
        normed[e] = T.cast(T.cast(values[turn, e], "float32") * inverse[turn], dtype)
    multiply_weight(dtype, normed, w, is_wide, product)
    for e in T.unroll(EIGHT):
        gate = T.cast(gates[turn, e], "float32")
        out[turn, e] = T.cast(product[e] * (sigmoid(gate) * T.Select(is_silu != 0, gate, 1.0)), dtype)


def build_norm(dtype):
    """The prim_func for x and g of `dtype`; arguments in README.md."""
    tokens, heads = T.dynamic("tokens"), T.dynamic("heads")
    x_t, x_h, g_t, g_h, y_t, y_h = (T.dynamic(name, "int64") for name in ("x_t", "x_h", "g_t", "g_h", "y_t", "y_h"))

    @T.prim_func
    def norm(
        x: T.StridedTensor((tokens, heads, HEAD_DIM), (x_t, x_h, 1), dtype),
        g: T.StridedTensor((tokens, heads, HEAD_DIM), (g_t, g_h, 1), dtype),
        weight: T.Tensor((HEAD_DIM,), dtype),
        wide_weight: T.Tensor((HEAD_DIM,), "float32"),
        y: T.StridedTensor((tokens, heads, HEAD_DIM), (y_t, y_h, 1), dtype),
        eps: T.float32,
        is_wide: T.int32,
        is_silu: T.int32,
    ):
        with T.Kernel(T.truncdiv(tokens * heads + ROWS - 1, ROWS), threads=THREADS) as block:
            T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            T.assume(x_t % EIGHT == 0)
            T.assume(x_h % EIGHT == 0)
            T.assume(g_t % EIGHT == 0)
            T.assume(g_h % EIGHT == 0)
            T.assume(y_t % EIGHT == 0)
            T.assume(y_h % EIGHT == 0)
            thread = T.get_thread_binding()
            column = (thread % LANES) * EIGHT
            first = block * ROWS + thread // LANES
            values, gates = T.alloc_local((TURNS, EIGHT), dtype), T.alloc_local((TURNS, EIGHT), dtype)
            w, inverse = Weight(dtype), T.alloc_local((TURNS,), "float32")
            token, head = T.alloc_local((TURNS,), "int32"), T.alloc_local((TURNS,), "int32")
            out, row = T.alloc_local((TURNS, EIGHT), dtype), T.alloc_var("int32")
            for turn in T.unroll(TURNS):
                row = T.min(first + turn * ROWS_PER_TURN, tokens * heads - 1)
                token[turn] = T.if_then_else(
                    heads == 1, row, T.truncdiv(row, heads)
                )  # often there is nothing to divide
                head[turn] = row - token[turn] * heads
                load_row(x, token[turn], head[turn], column, values, turn)
                load_row(g, token[turn], head[turn], column, gates, turn)
            load_weight(w, weight, wide_weight, is_wide, column)
            for turn in T.unroll(TURNS):
                inverse_root(values, turn, eps, inverse)
                gate_row(dtype, values, gates, turn, w, inverse, is_wide, is_silu, out)
                if first + turn * ROWS_PER_TURN < tokens * heads:
                    store_row(y, token[turn], head[turn], column, out, turn)

    return norm
