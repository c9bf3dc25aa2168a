"""Gated RMS norm, backward, of fewer than 2^20 rows (SM90): the equations of `norm_backward.py`.

Three rows a thread and four blocks on an SM, where that has two and seven: 524,288 rows take 170.6 us beside 176.3, while
1,572,864 take 501 beside 486, and 570 beside 500 behind matrix products (docs/design/2026-11-29-around-the-recurrence.md).

Reads        x g dy [tokens, heads, 128] · weight [128] of that dtype or f32
Writes       dx dg [tokens, heads, 128] · parts [blocks, 128] f32, a block's share of dweight, for `partial_sums.py`

Threads      half a warp a row, 16 bytes a thread, TURNS times 8 rows at a time; block b takes groups b, b + blocks, ...
"""

import tilelang.language as T

from ._rows import EIGHT, LANES, Weight, load_row, load_weight, sum_over_row
from ._sm90 import HEAD_DIM
from .norm_backward import ROWS_PER_TURN, THREADS, write_part

LOG2_E = 1.4426950408889634
TURNS = 3
ROWS = TURNS * ROWS_PER_TURN
BLOCKS_PER_SM = 4


@T.macro
def store_row(tensor, token, head, column, values, turn):
    """Eight numbers of a row of `tensor`, at once: left to itself the compiler stores them in pieces of four bytes."""
    T.stg128(tensor[token, head, column], T.reinterpret(values[turn, T.Ramp(0, 1, EIGHT)], "uint32x4"))


@T.macro
def inverse_root(values, turn, eps, out):
    """out[turn] = 1 / sqrt(mean(x^2) + eps) of the row that `values[turn]` is a part of."""
    out[turn] = 0.0
    for e in T.unroll(EIGHT):
        out[turn] += T.cast(values[turn, e], "float32") * T.cast(values[turn, e], "float32")
    sum_over_row(out, turn)
    out[turn] = T.rsqrt(out[turn] * (1.0 / HEAD_DIM) + eps)


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return T.fast_rcp(1.0 + T.exp2(-LOG2_E * x))


@T.macro
def differentiate_gate(dtype, normed, gates, grads, turn, w, is_wide, is_silu, dproduct, dg):
    """dg[turn], and the gradient dp of the product, of eight numbers of a row; `normed` is rounded.

    Without a branch on the width of the weight: with one, rows wait for each other (188 against 173 us for 524,288 rows).
    """
    product, narrow = T.alloc_local((EIGHT,), "float32"), T.alloc_local((EIGHT,), dtype)
    gate, opening, slope, grad = (T.alloc_var("float32") for _ in range(4))
    for e in T.unroll(EIGHT):
        product[e] = T.cast(normed[e], "float32") * w.wide[e]
    for e in T.vectorized(EIGHT):
        narrow[e] = T.cast(product[e], dtype)
    for e in T.unroll(EIGHT):
        product[e] = T.Select(is_wide != 0, product[e], T.cast(narrow[e], "float32"))
    for e in T.unroll(EIGHT):
        gate, grad = T.cast(gates[turn, e], "float32"), T.cast(grads[turn, e], "float32")
        opening = sigmoid(gate)
        slope = opening * (1.0 - opening)
        dg[turn, e] = T.cast(grad * product[e] * T.Select(is_silu != 0, opening + gate * slope, slope), dtype)
        dproduct[e] = grad * (opening * T.Select(is_silu != 0, gate, 1.0))


@T.macro
def differentiate_row(dtype, values, gates, grads, turn, w, inverse, is_wide, is_silu, total, dx, dg):
    """dx[turn] and dg[turn] of eight numbers of a row; its share of dweight is added to `total`."""
    normed, rounded = T.alloc_local((EIGHT,), "float32"), T.alloc_local((EIGHT,), dtype)
    dproduct, along = T.alloc_local((EIGHT,), "float32"), T.alloc_local((1,), "float32")
    for e in T.unroll(EIGHT):
        normed[e] = T.cast(values[turn, e], "float32") * inverse[turn]
    for e in T.vectorized(EIGHT):
        rounded[e] = T.cast(normed[e], dtype)
    differentiate_gate(dtype, rounded, gates, grads, turn, w, is_wide, is_silu, dproduct, dg)
    along[0] = 0.0
    for e in T.unroll(EIGHT):
        total[e] += dproduct[e] * T.cast(rounded[e], "float32")
        dproduct[e] *= w.wide[e]
        along[0] += dproduct[e] * normed[e]
    sum_over_row(along, 0)
    for e in T.unroll(EIGHT):
        dx[turn, e] = T.cast(inverse[turn] * (dproduct[e] - normed[e] * (along[0] * (1.0 / HEAD_DIM))), dtype)


def build_norm_backward_few(dtype):
    """The prim_func for x, g and dy of `dtype`; arguments in README.md."""
    tokens, heads, blocks = T.dynamic("tokens"), T.dynamic("heads"), T.dynamic("blocks")
    x_t, x_h, g_t, g_h, dy_t, dy_h = (T.dynamic(name, "int64") for name in ("x_t", "x_h", "g_t", "g_h", "dy_t", "dy_h"))
    dx_t, dx_h, dg_t, dg_h = (T.dynamic(name, "int64") for name in ("dx_t", "dx_h", "dg_t", "dg_h"))
    shape = (tokens, heads, HEAD_DIM)

    @T.prim_func
    def norm_backward_few(
        x: T.StridedTensor(shape, (x_t, x_h, 1), dtype),
        g: T.StridedTensor(shape, (g_t, g_h, 1), dtype),
        dy: T.StridedTensor(shape, (dy_t, dy_h, 1), dtype),
        weight: T.Tensor((HEAD_DIM,), dtype),
        wide_weight: T.Tensor((HEAD_DIM,), "float32"),
        dx: T.StridedTensor(shape, (dx_t, dx_h, 1), dtype),
        dg: T.StridedTensor(shape, (dg_t, dg_h, 1), dtype),
        parts: T.Tensor((blocks, HEAD_DIM), "float32"),
        eps: T.float32,
        is_wide: T.int32,
        is_silu: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            T.assume(x_t % EIGHT == 0)
            T.assume(x_h % EIGHT == 0)
            T.assume(g_t % EIGHT == 0)
            T.assume(g_h % EIGHT == 0)
            T.assume(dy_t % EIGHT == 0)
            T.assume(dy_h % EIGHT == 0)
            T.assume(dx_t % EIGHT == 0)
            T.assume(dx_h % EIGHT == 0)
            T.assume(dg_t % EIGHT == 0)
            T.assume(dg_h % EIGHT == 0)
            thread = T.get_thread_binding()
            column = (thread % LANES) * EIGHT
            shares = T.alloc_shared((ROWS_PER_TURN, HEAD_DIM), "float32")
            values, gates, grads, out_x, out_g = (T.alloc_local((TURNS, EIGHT), dtype) for _ in range(5))
            w, inverse = Weight(dtype), T.alloc_local((TURNS,), "float32")
            total = T.alloc_local((EIGHT,), "float32")
            row, first, token, head = (T.alloc_var("int32") for _ in range(4))
            load_weight(w, weight, wide_weight, is_wide, column)
            for e in T.unroll(EIGHT):
                total[e] = 0.0
            for group in T.serial(T.truncdiv(tokens * heads - block * ROWS + blocks * ROWS - 1, blocks * ROWS)):
                first = (group * blocks + block) * ROWS + thread // LANES
                for turn in T.unroll(TURNS):
                    row = T.min(first + turn * ROWS_PER_TURN, tokens * heads - 1)
                    token, head = T.truncdiv(row, heads), T.truncmod(row, heads)
                    load_row(x, token, head, column, values, turn)
                    load_row(g, token, head, column, gates, turn)
                    load_row(dy, token, head, column, grads, turn)
                for turn in T.unroll(TURNS):
                    row = first + turn * ROWS_PER_TURN
                    if row >= tokens * heads:
                        for e in T.unroll(EIGHT):
                            grads[turn, e] = T.cast(0, dtype)
                    inverse_root(values, turn, eps, inverse)
                    differentiate_row(
                        dtype,
                        values,
                        gates,
                        grads,
                        turn,
                        w,
                        inverse,
                        is_wide,
                        is_silu,
                        total,
                        out_x,
                        out_g,
                    )
                    if row < tokens * heads:
                        token, head = T.truncdiv(row, heads), T.truncmod(row, heads)
                        store_row(dx, token, head, column, out_x, turn)
                        store_row(dg, token, head, column, out_g, turn)
            write_part(total, shares, parts, block, thread)

    return norm_backward_few
