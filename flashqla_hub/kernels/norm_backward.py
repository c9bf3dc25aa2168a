"""Gated RMS norm, backward (SM90). With r = 1 / sqrt(mean(x^2) + eps), n = r x, p = weight n and y = p act(g):

    dg = dy p act'(g)      dp = dy act(g)      dweight = sum over all rows of dp n
    dx = r (dp weight - n mean(dp weight n))

n and p in dg and dweight are rounded as in the forward (`norm.py`); gradients are float32 until they are written.

Reads        x g dy [tokens, heads, 128] · weight [128] of that dtype or f32
Writes       dx dg [rows, 128], rows = tokens heads · parts [blocks, 128] f32, a block's share of dweight, for `partial_sums.py`

Threads      half a warp a row, 16 bytes a thread, TURNS times 8 rows at a time; block b takes groups b, b + blocks, ...

Behind matrix products the clock is low, and then instructions bound this kernel as much as bytes do: no branch in the loop, and
the loop once for each width of the weight.
"""

import tilelang.language as T

from ._rows import (
    DEVICE_CODE,
    EIGHT,
    LANES,
    Weight,
    gate_factor,
    in_vectors,
    load_vector,
    load_weight,
    magic_of,
    norm_vector,
    quotient,
    shift_of,
    sigmoid,
    store_vector,
    sum_over_row,
)
from ._sm90 import HEAD_DIM, WARP
from ._widen import widen

THREADS = 4 * WARP
ROWS_PER_TURN = THREADS // LANES
TURNS = 2
ROWS = TURNS * ROWS_PER_TURN
BLOCKS_PER_SM = 7


@T.macro
def differentiate_vector(dtype, values, gates, grads, turn, w, eps, is_wide, silu, total, dx, dg):
    """Vector `turn` of `dx` and `dg`, eight numbers of a row; its share of dweight is added to `total`.

    is_wide: whether the weight is float32, known to the compiler. silu: 1, or 0 for the sigmoid.
    """
    normed, rounded, product, gate, grad = (T.alloc_local((EIGHT,), "float32") for _ in range(5))
    narrow, root, along = T.alloc_local((EIGHT,), dtype), T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
    opening, factor = T.alloc_var("float32"), T.alloc_var("float32")
    norm_vector(dtype, values, turn, eps, normed, narrow, rounded, root)
    for e in T.unroll(EIGHT):
        product[e] = rounded[e] * w.wide[e]
    if not is_wide:
        for e in T.vectorized(EIGHT):
            narrow[e] = T.cast(product[e], dtype)
        widen(EIGHT, product, 0, narrow, 0)
    widen(EIGHT, gate, 0, gates, turn)
    widen(EIGHT, grad, 0, grads, turn)
    along[0] = 0.0
    for e in T.unroll(EIGHT):
        opening = sigmoid(gate[e])
        factor = gate_factor(gate[e], silu)  # act(g) = factor sigmoid(g)
        product[e] = grad[e] * product[e] * (opening * (factor * (1.0 - opening) + silu))
        grad[e] = grad[e] * (opening * factor)
        total[e] += grad[e] * rounded[e]
        grad[e] = grad[e] * w.wide[e]
        along[0] += grad[e] * normed[e]
    for e in T.vectorized(EIGHT):
        dg[turn * EIGHT + e] = T.cast(product[e], dtype)
    sum_over_row(along, 0)
    along[0] = along[0] * (-1.0 / HEAD_DIM)
    for e in T.unroll(EIGHT):
        grad[e] = root[0] * (grad[e] + normed[e] * along[0])
    for e in T.vectorized(EIGHT):
        dx[turn * EIGHT + e] = T.cast(grad[e], dtype)


@T.macro
def take_groups(
    dtype,
    block,
    blocks,
    tokens,
    heads,
    column,
    thread,
    x,
    x_vectors,
    g,
    g_vectors,
    dy,
    dy_vectors,
    dx,
    dg,
    w,
    eps,
    is_wide,
    silu,
    total,
):
    """All groups of rows of a block."""
    values, gates, grads, out_x, out_g = (T.alloc_local((TURNS * EIGHT,), dtype) for _ in range(5))
    row, first, token, head = (T.alloc_var("int32") for _ in range(4))
    magic, shift = T.alloc_var("uint32"), T.alloc_var("int32")
    magic = magic_of(heads)
    shift = shift_of(heads)
    for group in T.serial(T.truncdiv(tokens * heads - block * ROWS + blocks * ROWS - 1, blocks * ROWS)):
        first = (group * blocks + block) * ROWS + thread // LANES
        for turn in T.unroll(TURNS):
            row = T.min(first + turn * ROWS_PER_TURN, tokens * heads - 1)
            token = quotient(row, magic, shift)
            head = row - token * heads
            load_vector(values, turn, x, column, token, head, *x_vectors)
            load_vector(gates, turn, g, column, token, head, *g_vectors)
            load_vector(grads, turn, dy, column, token, head, *dy_vectors)
        for turn in T.unroll(TURNS):
            row = first + turn * ROWS_PER_TURN
            if row >= tokens * heads:
                for e in T.unroll(EIGHT):
                    grads[turn * EIGHT + e] = T.cast(0, dtype)
            differentiate_vector(dtype, values, gates, grads, turn, w, eps, is_wide, silu, total, out_x, out_g)
            if row < tokens * heads:
                store_vector(out_x, turn, dx, row, column)
                store_vector(out_g, turn, dg, row, column)


@T.macro
def write_part(total, shares, parts, block, thread):
    """The block's share of dweight: its rows' totals, added in the order of the rows of a group."""
    for e in T.vectorized(EIGHT):
        shares[thread // LANES, (thread % LANES) * EIGHT + e] = total[e]
    T.sync_threads()
    share = T.alloc_var("float32")
    share = 0.0
    if thread < HEAD_DIM:
        for row in T.unroll(ROWS_PER_TURN):
            share += shares[row, thread]
        parts[block, thread] = share


def build_norm_backward(dtype):
    """The prim_func for x, g and dy of `dtype`; arguments in README.md."""
    tokens, heads, rows, blocks = T.dynamic("tokens"), T.dynamic("heads"), T.dynamic("rows"), T.dynamic("blocks")
    x_t, x_h, g_t, g_h, dy_t, dy_h = (T.dynamic(name, "int64") for name in ("x_t", "x_h", "g_t", "g_h", "dy_t", "dy_h"))
    shape = (tokens, heads, HEAD_DIM)

    @T.prim_func
    def norm_backward(
        x: T.StridedTensor(shape, (x_t, x_h, 1), dtype),
        g: T.StridedTensor(shape, (g_t, g_h, 1), dtype),
        dy: T.StridedTensor(shape, (dy_t, dy_h, 1), dtype),
        weight: T.Tensor((HEAD_DIM,), dtype),
        wide_weight: T.Tensor((HEAD_DIM,), "float32"),
        dx: T.Tensor((rows, HEAD_DIM), dtype),
        dg: T.Tensor((rows, HEAD_DIM), dtype),
        parts: T.Tensor((blocks, HEAD_DIM), "float32"),
        eps: T.float32,
        is_wide: T.int32,
        is_silu: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            T.import_source(DEVICE_CODE)
            T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            T.assume(x_t % EIGHT == 0)
            T.assume(x_h % EIGHT == 0)
            T.assume(g_t % EIGHT == 0)
            T.assume(g_h % EIGHT == 0)
            T.assume(dy_t % EIGHT == 0)
            T.assume(dy_h % EIGHT == 0)
            thread = T.get_thread_binding()
            column = (thread % LANES) * EIGHT
            shares = T.alloc_shared((ROWS_PER_TURN, HEAD_DIM), "float32")
            w, total = Weight(dtype), T.alloc_local((EIGHT,), "float32")
            silu = T.alloc_var("float32")
            load_weight(w, weight, wide_weight, is_wide, column)
            silu = T.cast(is_silu, "float32")
            for e in T.unroll(EIGHT):
                total[e] = 0.0
            rows_read = (x, in_vectors(x_t, x_h), g, in_vectors(g_t, g_h), dy, in_vectors(dy_t, dy_h))
            where = (block, blocks, tokens, heads, column, thread)
            if is_wide != 0:
                take_groups(dtype, *where, *rows_read, dx, dg, w, eps, True, silu, total)
            else:
                take_groups(dtype, *where, *rows_read, dx, dg, w, eps, False, silu, total)
            write_part(total, shares, parts, block, thread)

    return norm_backward
