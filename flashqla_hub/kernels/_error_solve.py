"""The chunk's triangular solve of the backward: X = (I + K B)^-1, with beta on the columns of a strictly lower K.

X gives the errors e = X y where `_solve.py` gives what is written, beta e; the steps are the same: sixteen-blocks by
substitution in float32, then X21 = -X22 K21 B1 X11 on tensor cores. No entry divides by beta, which may be zero.
"""

import tilelang.language as T

from ._sm90 import BACKWARD_FACTOR, CHUNK, SOLVE_BLOCK
from ._solve import VECTOR, load_left, load_right, multiply

HALF = CHUNK // 2


def skew(block):
    """Columns by which odd blocks are shifted, so that the two blocks that a warp reads lie in different banks."""
    return BACKWARD_FACTOR.block_padding * (block % 2)


@T.macro
def invert_block(columns, beta, buffer, side, tile, block, column):
    """Column `column` of a diagonal block of X, by one thread.

    `columns` holds the diagonal blocks of K in float32, transposed, so that a step reads what the known entry acts on.
    """
    entries, x = T.alloc_local((SOLVE_BLOCK,), "float32"), T.alloc_local((SOLVE_BLOCK,), "float32")
    strength, written = T.alloc_local((SOLVE_BLOCK,), "float32"), T.alloc_var("float32")
    top = block * SOLVE_BLOCK
    for i in T.vectorized(SOLVE_BLOCK):
        strength[i] = beta[buffer, side, top + i]
    for i in T.unroll(SOLVE_BLOCK):
        x[i] = 0.0
    for j in T.unroll(SOLVE_BLOCK):
        x[j] = T.Select(column == j, 1.0, 0.0) - x[j]
        written = strength[j] * x[j]
        for group in T.unroll((j + 1) // VECTOR, SOLVE_BLOCK // VECTOR):
            for e in T.vectorized(VECTOR):
                entries[group * VECTOR + e] = columns[top + j, group * VECTOR + skew(block) + e]
        for i in T.unroll(j + 1, SOLVE_BLOCK):
            x[i] += entries[i] * written
    for i in T.unroll(SOLVE_BLOCK):
        tile[top + i, top + column] = T.cast(x[i], "float16")


@T.macro
def store_negative(accumulator, tile, row, column, lane):
    """-accumulator to the 16 x 16 block of `tile` at (row, column)."""
    for pair in T.unroll(4):
        for e in T.vectorized(2):
            tile[row + lane // 4 + (pair % 2) * 8, column + (pair // 2) * 8 + (lane % 4) * 2 + e] = T.cast(
                -accumulator[pair * 2 + e], "float16"
            )


@T.macro
def as_scaled_left(accumulator, beta, buffer, side, column, lane, out):
    """An accumulator as an A operand, each column multiplied by its token's beta; `column` is its first token."""
    factors = T.alloc_local((4,), "float32")
    for half in T.unroll(2):
        for e in T.vectorized(2):
            factors[half * 2 + e] = beta[buffer, side, column + half * 8 + (lane % 4) * 2 + e]
    for e in T.unroll(8):
        out[e] = T.cast(accumulator[e] * factors[(e // 4) * 2 + e % 2], "float16")


@T.macro
def join_blocks(K, X, beta, buffer, side, at, lane):
    """X21 of the two 16-blocks from (at, at) on, by one warp."""
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    product, result = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")
    T.clear(product)
    T.clear(result)
    load_left(X, at + SOLVE_BLOCK, at + SOLVE_BLOCK, lane, left)
    load_right(K, at + SOLVE_BLOCK, at, lane, right)
    multiply(left, right, product)
    as_scaled_left(product, beta, buffer, side, at, lane, left)
    load_right(X, at, at, lane, right)
    multiply(left, right, result)
    store_negative(result, X, at + SOLVE_BLOCK, at, lane)


@T.macro
def join_row(K, X, beta, buffer, side, step, lane):
    """Rows 16 step to 16 step + 15 of X21 of the two 32-blocks, by one warp; X22 and X11 are lower triangular."""
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    low, high = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")
    row = HALF + step * SOLVE_BLOCK
    T.clear(low)
    T.clear(high)
    for k in T.serial(step + 1):
        load_left(X, row, HALF + k * SOLVE_BLOCK, lane, left)
        load_right(K, HALF + k * SOLVE_BLOCK, 0, lane, right)
        multiply(left, right, low)
        load_right(K, HALF + k * SOLVE_BLOCK, SOLVE_BLOCK, lane, right)
        multiply(left, right, high)
    as_scaled_left(low, beta, buffer, side, 0, lane, left)
    T.clear(low)
    load_right(X, 0, 0, lane, right)
    multiply(left, right, low)
    as_scaled_left(high, beta, buffer, side, SOLVE_BLOCK, lane, left)
    T.clear(high)
    load_right(X, SOLVE_BLOCK, 0, lane, right)
    multiply(left, right, low)
    load_right(X, SOLVE_BLOCK, SOLVE_BLOCK, lane, right)
    multiply(left, right, high)
    store_negative(low, X, row, 0, lane)
    store_negative(high, X, row, SOLVE_BLOCK, lane)
