"""Products of a few tokens with up to four weight matrices in one launch: the projections of a decoded token (SM90).

    y_i[t] = W_i x[t]

Every weight is read once, at the speed of memory; tensor cores have nothing to do here. Sums are float32, in a fixed order.

Reads        x [tokens, width] · w0 w1 w2 w3 [rows_i, width], as vectors of EIGHT
Writes       y0 y1 y2 y3 [tokens, rows_i]

Blocks       those of w0, then those of w1, ...; none for a matrix without rows
Warps        ROWS rows of a matrix each; a lane has a vector of every 256 columns, and loads those of `turns` times 256 at once.
             Of few rows, which would leave SMs idle, the warps of a block share the columns of ROWS rows (`shares`), a quarter
             each in turns, and add what they have in shared memory
Ahead        Of several tokens, a block may begin before the kernel before it on the stream has ended (programmatic launch), and
             orders the first `ahead` lines of its rows of w0 into the L2 cache before it waits for that end. The kernel behind
             may begin once all blocks have begun. Of one token that lost
"""

import tilelang.language as T

from ._prefetch import PREFETCH_CODE, call
from ._rows import EIGHT
from ._sm90 import WARP

MATRICES = 4
WARPS = 4
ROWS = 4  # of a warp
TURNS = {1: 2, 4: 1}  # by tokens: what more of them would hold in registers costs blocks of the SM
BLOCKS_PER_SM = 5
LINE_VECTORS = 8  # of a line of the L2 cache


def rows_of_block(shares):
    return ROWS if shares else WARPS * ROWS


def blocks_of(rows, shares):
    """Blocks that a matrix of so many rows takes."""
    return T.truncdiv(rows + rows_of_block(shares) - 1, rows_of_block(shares))


@T.macro
def multiply(dtype, count, shares, x, w, y, block, parts):
    """Rows of y = W x for one block of a matrix and at most `count` tokens; rows and tokens behind the last stand for it.

    Sizes are asked of the tensors: as arguments they would take one name for all matrices.
    """
    turns = TURNS[count]
    first, vector, lane, warp, start = (T.alloc_var("int32") for _ in range(5))
    sums = T.alloc_local((count * ROWS,), "float32")
    raw, raw_x = T.alloc_local((turns * ROWS, EIGHT), dtype), T.alloc_local((turns * count, EIGHT), dtype)
    lane = T.truncmod(T.get_thread_binding(), WARP)
    warp = T.truncdiv(T.get_thread_binding(), WARP)
    stride = WARPS if shares else 1  # steps of `turns` vectors a lane between those of a warp
    first, start = block * rows_of_block(shares), warp
    if not shares:
        first, start = first + warp * ROWS, 0
    for i in T.unroll(count * ROWS):
        sums[i] = 0.0
    for step in T.serial(T.truncdiv(T.truncdiv(x.shape[1], turns * WARP) - start + stride - 1, stride)):
        vector = (step * stride + start) * turns * WARP + lane
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
    for i in T.unroll(count * ROWS):
        for bit in T.unroll(5):
            sums[i] += T.shfl_xor(sums[i], 16 >> bit)
    if shares:
        if lane == 0:
            for i in T.unroll(count * ROWS):
                parts[warp, i] = sums[i]
        T.sync_threads()
        if warp == 0 and lane < count * ROWS:
            sums[0] = parts[0, lane]
            for other in T.unroll(1, WARPS):
                sums[0] += parts[other, lane]
            if first + lane // count < w.shape[0] and lane % count < x.shape[0]:
                y[lane % count, first + lane // count] = T.cast(sums[0], dtype)
    elif lane == 0:
        for r in T.unroll(ROWS):
            for t in T.unroll(count):
                if first + r < w.shape[0] and t < x.shape[0]:
                    y[t, first + r] = T.cast(sums[r * count + t], dtype)


@T.macro
def prefetch_rows(shares, w, block, ahead):
    """Orders the first lines of the block's rows into the L2 cache, a row a warp."""
    row, lane = T.alloc_var("int32"), T.alloc_var("int32")
    lane = T.truncmod(T.get_thread_binding(), WARP)
    for turn in T.unroll(rows_of_block(shares) // WARPS):
        row = block * rows_of_block(shares) + turn * WARPS + T.truncdiv(T.get_thread_binding(), WARP)
        if row < w.shape[0]:
            for step in T.serial(T.truncdiv(ahead + WARP - 1, WARP)):
                if step * WARP + lane < ahead:
                    call("prefetch_line", w[row, (step * WARP + lane) * LINE_VECTORS, 0])


def build_token_products(dtype, count, shares):
    """The prim_func for at most `count` tokens; arguments in README.md."""
    begins_early = count > 1
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
        ahead: T.int32,
    ):
        with T.Kernel(
            blocks_of(rows_0, shares)
            + blocks_of(rows_1, shares)
            + blocks_of(rows_2, shares)
            + blocks_of(rows_3, shares),
            threads=WARPS * WARP,
        ) as block:
            T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            T.import_source(PREFETCH_CODE)
            parts = T.alloc_shared((WARPS, count * ROWS), "float32") if shares else None
            start = T.alloc_local((MATRICES,), "int32")
            start[1] = blocks_of(rows_0, shares)
            start[2] = start[1] + blocks_of(rows_1, shares)
            start[3] = start[2] + blocks_of(rows_2, shares)
            if begins_early:
                T.pdl_trigger()
                if block < start[1]:
                    prefetch_rows(shares, w0, block, ahead)
                T.pdl_sync()
            if block < start[1]:
                multiply(dtype, count, shares, x, w0, y0, block, parts)
            elif block < start[2]:
                multiply(dtype, count, shares, x, w1, y1, block - start[1], parts)
            elif block < start[3]:
                multiply(dtype, count, shares, x, w2, y2, block - start[2], parts)
            else:
                multiply(dtype, count, shares, x, w3, y3, block - start[3], parts)

    return token_products
