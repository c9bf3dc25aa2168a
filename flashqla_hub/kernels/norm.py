"""Gated RMS norm, forward (SM90).

    y = weight * round(x / sqrt(mean(x^2) + eps)) * act(g)        act(g) = g sigmoid(g) or sigmoid(g)

The normalised values are rounded to the dtype of x, and so are their products with a weight of that dtype; everything else
is float32. A float32 weight leaves the products as they are.

Reads        x g [tokens, heads, 128] · weight [128] of that dtype or f32
Writes       y [rows, 128], rows = tokens heads, every element

Threads      half a warp a row, 16 bytes a thread; a block takes TURNS times 16 rows, all loads before the first sum
"""

import tilelang.language as T

from ._rows import (
    DEVICE_CODE,
    EIGHT,
    LANES,
    ROWS_PER_TURN,
    THREADS,
    Weight,
    gate_factor,
    in_vectors,
    load_vector,
    load_weight,
    norm_vector,
    sigmoid,
    store_vector,
)
from ._sm90 import HEAD_DIM
from ._widen import widen

TURNS = 4
ROWS = TURNS * ROWS_PER_TURN
BLOCKS_PER_SM = 3


@T.macro
def gate_vector(dtype, values, gates, turn, w, eps, is_wide, silu, out):
    """Vector `turn` of `out` = y of eight numbers of a row.

    is_wide: whether the weight is float32, known to the compiler. silu: 1, or 0 for the sigmoid.
    A product in `dtype` is the exact one rounded, and two of them are one instruction.
    """
    normed, product, gate = (T.alloc_local((EIGHT,), "float32") for _ in range(3))
    narrow, root = T.alloc_local((EIGHT,), dtype), T.alloc_local((1,), "float32")
    norm_vector(dtype, values, turn, eps, normed, narrow, product, root)
    if is_wide:
        for e in T.unroll(EIGHT):
            product[e] = product[e] * w.wide[e]
    else:
        for e in T.vectorized(EIGHT):
            narrow[e] = narrow[e] * w.narrow[e]
        widen(EIGHT, product, 0, narrow, 0)
    widen(EIGHT, gate, 0, gates, turn)
    for e in T.unroll(EIGHT):
        product[e] = product[e] * (sigmoid(gate[e]) * gate_factor(gate[e], silu))
    for e in T.vectorized(EIGHT):
        out[turn * EIGHT + e] = T.cast(product[e], dtype)


def build_norm(dtype):
    """The prim_func for x and g of `dtype`; arguments in README.md."""
    tokens, heads, rows = T.dynamic("tokens"), T.dynamic("heads"), T.dynamic("rows")
    x_t, x_h, g_t, g_h = (T.dynamic(name, "int64") for name in ("x_t", "x_h", "g_t", "g_h"))

    @T.prim_func
    def norm(
        x: T.StridedTensor((tokens, heads, HEAD_DIM), (x_t, x_h, 1), dtype),
        g: T.StridedTensor((tokens, heads, HEAD_DIM), (g_t, g_h, 1), dtype),
        weight: T.Tensor((HEAD_DIM,), dtype),
        wide_weight: T.Tensor((HEAD_DIM,), "float32"),
        y: T.Tensor((rows, HEAD_DIM), dtype),
        eps: T.float32,
        is_wide: T.int32,
        is_silu: T.int32,
    ):
        with T.Kernel(T.truncdiv(tokens * heads + ROWS - 1, ROWS), threads=THREADS) as block:
            T.import_source(DEVICE_CODE)
            T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            T.assume(x_t % EIGHT == 0)
            T.assume(x_h % EIGHT == 0)
            T.assume(g_t % EIGHT == 0)
            T.assume(g_h % EIGHT == 0)
            thread = T.get_thread_binding()
            column = (thread % LANES) * EIGHT
            first = block * ROWS + thread // LANES
            values, gates, out = (T.alloc_local((TURNS * EIGHT,), dtype) for _ in range(3))
            w, row, token, head = Weight(dtype), *(T.alloc_var("int32") for _ in range(3))
            silu = T.alloc_var("float32")
            for turn in T.unroll(TURNS):
                row = T.min(first + turn * ROWS_PER_TURN, tokens * heads - 1)
                # Often there is nothing to divide.
                token = T.if_then_else(heads == 1, row, T.truncdiv(row, heads))
                head = row - token * heads
                load_vector(values, turn, x, column, token, head, *in_vectors(x_t, x_h))
                load_vector(gates, turn, g, column, token, head, *in_vectors(g_t, g_h))
            load_weight(w, weight, wide_weight, is_wide, column)
            silu = T.cast(is_silu, "float32")
            if is_wide != 0:
                for turn in T.unroll(TURNS):
                    gate_vector(dtype, values, gates, turn, w, eps, True, silu, out)
            else:
                for turn in T.unroll(TURNS):
                    gate_vector(dtype, values, gates, turn, w, eps, False, silu, out)
            for turn in T.unroll(TURNS):
                row = first + turn * ROWS_PER_TURN
                if row < tokens * heads:
                    store_vector(out, turn, y, row, column)

    return norm
