"""Products of a few tokens with up to four weight matrices in one launch: the projections of a decoded token (SM90).

    y_i[t] = W_i x[t]

Every weight is read once, at the speed of memory; tensor cores have nothing to do here. Sums are float32, in a fixed order.

Reads        x [tokens, width] · w0 w1 w2 w3 [rows_i, width], as vectors of EIGHT
Writes       y0 y1 y2 y3 [tokens, rows_i]

Blocks       those of w0, then those of w1, ...; none for a matrix without rows. A block has ROWS rows
Warps        every fourth step of `turns` times 256 columns each, a lane a vector of every 256; all loads of a step in flight
"""

import tilelang.language as T

from ._rows import EIGHT
from ._sm90 import WARP

MATRICES = 4
WARPS = 4
ROWS = 4  # of a block
TURNS = {1: 2, 4: 1}  # by tokens: what more of them would hold in registers costs blocks of the SM
BLOCKS_PER_SM = 5


def blocks_of(rows):
    """Blocks that a matrix of so many rows takes."""
    return T.truncdiv(rows + ROWS - 1, ROWS)


@T.macro
def multiply(dtype, count, shares, x, w, y, block):
    """Rows of y = W x for one block of a matrix and at most `count` tokens; rows and tokens behind the last stand for it.

    Sizes are asked of the tensors: as arguments they would take one name for all matrices.
    """
    turns = TURNS[count]
    first, vector, lane, warp = (T.alloc_var("int32") for _ in range(4))
    sums, total = T.alloc_local((ROWS * count,), "float32"), T.alloc_var("float32")
    raw, raw_x = T.alloc_local((turns * ROWS, EIGHT), dtype), T.alloc_local((turns * count, EIGHT), dtype)
    lane = T.truncmod(T.get_thread_binding(), WARP)
    warp = T.truncdiv(T.get_thread_binding(), WARP)
    first = block * ROWS
    for i in T.unroll(ROWS * count):
        sums[i] = 0.0
    for round_ in T.serial(T.truncdiv(x.shape[1] + WARPS * turns * WARP - 1, WARPS * turns * WARP)):
        vector = (round_ * WARPS + warp) * turns * WARP + lane
        if vector < x.shape[1]:
            for turn in T.unroll(turns):
                for r in T.unroll(ROWS):
                    for e in T.vectorized(EIGHT):
                        raw[turn * ROWS + r, e] = w[T.min(first + r, w.shape[0] - 1), vector + turn * WARP, e]
            for turn in T.unroll(turns):
                for t in T.unroll(count):
                    for e in T.vectorized(EIGHT):
                        raw_x[turn * count + t, e] = x[T.min(t, x.shape[0] - 1), vector + turn * WARP, e]
            for turn in T.unroll(turns):
                for r in T.unroll(ROWS):
                    for t in T.unroll(count):
                        for e in T.unroll(EIGHT):
                            sums[r * count + t] += T.cast(raw[turn * ROWS + r, e], "float32") * T.cast(
                                raw_x[turn * count + t, e], "float32"
                            )
    for i in T.unroll(ROWS * count):
        for bit in T.unroll(5):
            sums[i] += T.shfl_xor(sums[i], 16 >> bit)
    if lane == 0:
        for i in T.unroll(ROWS * count):
            shares[warp, i] = sums[i]
    T.sync_threads()
    if warp == 0 and lane < ROWS * count:
        total = 0.0
        for part in T.unroll(WARPS):
            total += shares[part, lane]
        if first + T.truncdiv(lane, count) < w.shape[0] and T.truncmod(lane, count) < x.shape[0]:
            y[T.truncmod(lane, count), first + T.truncdiv(lane, count)] = T.cast(total, dtype)


def build_token_products(dtype, count):
    """The prim_func for at most `count` tokens; arguments in README.md."""
    tokens, vectors = T.dynamic("tokens"), T.dynamic("vectors")
    rows_0, rows_1, rows_2, rows_3 = (T.dynamic(f"rows_{i}") for i in range(MATRICES))

    @T.prim_func
    def token_products(
        x: T.Tensor((tokens, vectors, EIGHT), dtype),
        w0: T.Tensor((rows_0, vectors, EIGHT), dtype),
        w1: T.Tensor((rows_1, vectors, EIGHT), dtype),
        w2: T.Tensor((rows_2, vectors, EIGHT), dtype),
        w3: T.Tensor((rows_3, vectors, EIGHT), dtype),
        y0: T.Tensor((tokens, rows_0), dtype),
        y1: T.Tensor((tokens, rows_1), dtype),
        y2: T.Tensor((tokens, rows_2), dtype),
        y3: T.Tensor((tokens, rows_3), dtype),
    ):
        with T.Kernel(
            blocks_of(rows_0) + blocks_of(rows_1) + blocks_of(rows_2) + blocks_of(rows_3), threads=WARPS * WARP
        ) as block:
            T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            shares = T.alloc_shared((WARPS, ROWS * count), "float32")
            start = T.alloc_local((MATRICES,), "int32")
            start[1] = blocks_of(rows_0)
            start[2] = start[1] + blocks_of(rows_1)
            start[3] = start[2] + blocks_of(rows_2)
            if block < start[1]:
                multiply(dtype, count, shares, x, w0, y0, block)
            elif block < start[2]:
                multiply(dtype, count, shares, x, w1, y1, block - start[1])
            elif block < start[3]:
                multiply(dtype, count, shares, x, w2, y2, block - start[2])
            else:
                multiply(dtype, count, shares, x, w3, y3, block - start[3])

    return token_products
