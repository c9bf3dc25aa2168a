"""The chunk's triangular solve: X = (I + B K)^-1 for a strictly lower K and B = diag(beta), one value head at a time.

Sixteen-blocks on the diagonal are inverted by substitution in float32; then blocks of 16 and of 32 are joined with
[[X11, 0], [X21, X22]], X21 = -X22 B2 K21 X11, on tensor cores with float16 operands and float32 sums. K does not depend on
the value head. No power of K is formed: on correlated keys they reach 1e17 although no entry of X exceeds 4.

A head belongs to two warps (`part` 0 and 1) that meet at a named barrier between the steps.
"""

import tilelang.language as T

from ._sm90 import CHUNK, FACTOR, SOLVE_BLOCK

HALF = CHUNK // 2
VECTOR = 4  # floats of a 16-byte access


def skew(block):
    """Columns by which odd blocks are shifted, so that the two blocks that a warp reads lie in different banks."""
    return FACTOR.block_padding * (block % 2)


@T.macro
def invert_block(columns, beta, buffer, side, tile, block, column):
    """Column `column` of a diagonal block of X, by one thread.

    `columns` holds the diagonal blocks of K in float32, transposed, so that a step reads what the known entry acts on.
    """
    entries, x = T.alloc_local((SOLVE_BLOCK,), "float32"), T.alloc_local((SOLVE_BLOCK,), "float32")
    strength = T.alloc_local((SOLVE_BLOCK,), "float32")
    top = block * SOLVE_BLOCK
    for i in T.vectorized(SOLVE_BLOCK):
        strength[i] = beta[buffer, side, top + i]
    for i in T.unroll(SOLVE_BLOCK):
        x[i] = 0.0
    for j in T.unroll(SOLVE_BLOCK):
        x[j] = T.Select(column == j, 1.0, 0.0) - strength[j] * x[j]
        for group in T.unroll((j + 1) // VECTOR, SOLVE_BLOCK // VECTOR):
            for e in T.vectorized(VECTOR):
                entries[group * VECTOR + e] = columns[top + j, group * VECTOR + skew(block) + e]
        for i in T.unroll(j + 1, SOLVE_BLOCK):
            x[i] += entries[i] * x[j]
    for i in T.unroll(SOLVE_BLOCK):
        tile[top + i, top + column] = T.cast(x[i], "float16")


@T.macro
def load_left(tile, row, column, lane, out):
    """A operand of mma.m16n8k16: the 16 x 16 block of `tile` at (row, column)."""
    T.ptx_ldmatrix(
        T.bool(False),
        4,
        T.access_ptr(tile[row + lane % 16, column + (lane // 16) * 8], "r", extent=8),
        T.access_ptr(out[0], "w", extent=8),
    )


@T.macro
def load_scaled(tile, strength, buffer, side, row, column, lane, out):
    """The same with each column multiplied by its token's beta."""
    factors = T.alloc_local((4,), "float16")
    for half in T.unroll(2):
        for e in T.vectorized(2):
            factors[half * 2 + e] = strength[buffer, side, column + half * 8 + (lane % 4) * 2 + e]
    load_left(tile, row, column, lane, out)
    for e in T.unroll(8):
        out[e] *= factors[(e // 4) * 2 + e % 2]


@T.macro
def load_right(tile, row, column, lane, out):
    """B operands of two mma.m16n8k16: columns 0-7 and 8-15 of the 16 x 16 block of `tile` at (row, column)."""
    T.ptx_ldmatrix(
        T.bool(True),
        4,
        T.access_ptr(tile[row + lane % 16, column + (lane // 16) * 8], "r", extent=8),
        T.access_ptr(out[0], "w", extent=8),
    )


@T.macro
def multiply(left, right, accumulator):
    """accumulator += left right, 16 x 16 x 16."""
    for half in T.unroll(2):
        T.ptx_mma(
            "float32",
            "m16n8k16",
            "row",
            "col",
            "fp16",
            "fp16",
            "fp32",
            left.data,
            0,
            right.data,
            half * 4,
            accumulator.data,
            half * 4,
            T.bool(False),
        )


@T.macro
def as_left(accumulator, out):
    """An accumulator's registers are those of an A operand, pair by pair."""
    for e in T.unroll(8):
        out[e] = T.cast(accumulator[e], "float16")


@T.macro
def store_negative(accumulator, tile, row, column, lane):
    """-accumulator to the 16 x 16 block of `tile` at (row, column)."""
    for pair in T.unroll(4):
        for e in T.vectorized(2):
            tile[row + lane // 4 + (pair % 2) * 8, column + (pair // 2) * 8 + (lane % 4) * 2 + e] = T.cast(
                -accumulator[pair * 2 + e], "float16"
            )


@T.macro
def join_blocks(K, X, strength, buffer, side, at, lane):
    """X21 of the two 16-blocks from (at, at) on, by one warp."""
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    product, result = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")
    T.clear(product)
    T.clear(result)
    load_scaled(X, strength, buffer, side, at + SOLVE_BLOCK, at + SOLVE_BLOCK, lane, left)
    load_right(K, at + SOLVE_BLOCK, at, lane, right)
    multiply(left, right, product)
    as_left(product, left)
    load_right(X, at, at, lane, right)
    multiply(left, right, result)
    store_negative(result, X, at + SOLVE_BLOCK, at, lane)


@T.macro
def join_row(K, X, strength, buffer, side, step, lane):
    """Rows 16 step to 16 step + 15 of X21 of the two 32-blocks, by one warp; X22 and X11 are lower triangular."""
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    low, high = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")
    row = HALF + step * SOLVE_BLOCK
    T.clear(low)
    T.clear(high)
    for k in T.serial(step + 1):
        load_scaled(X, strength, buffer, side, row, HALF + k * SOLVE_BLOCK, lane, left)
        load_right(K, HALF + k * SOLVE_BLOCK, 0, lane, right)
        multiply(left, right, low)
        load_right(K, HALF + k * SOLVE_BLOCK, SOLVE_BLOCK, lane, right)
        multiply(left, right, high)
    as_left(low, left)
    T.clear(low)
    load_right(X, 0, 0, lane, right)
    multiply(left, right, low)
    as_left(high, left)
    T.clear(high)
    load_right(X, SOLVE_BLOCK, 0, lane, right)
    multiply(left, right, low)
    load_right(X, SOLVE_BLOCK, SOLVE_BLOCK, lane, right)
    multiply(left, right, high)
    store_negative(low, X, row, 0, lane)
    store_negative(high, X, row, SOLVE_BLOCK, lane)
