"""The chunk's triangular solve: X = (I + B K)^-1 for a strictly lower K and B = diag(beta), one value head at a time.

Eight-blocks on the diagonal are inverted by substitution in float32; then blocks of 8, of 16 and of 32 are joined with
[[X11, 0], [X21, X22]], X21 = -X22 B2 K21 X11, on tensor cores with float16 operands and float32 sums. K does not depend on
the value head. No power of K is formed: on correlated keys they reach 1e17 although no entry of X exceeds 4.

A head belongs to two warps. Part 0 makes X[:32, :32] and part 1 X[32:, 32:], alone; then each makes 16 rows of X[32:, :32],
which stay in registers. X is 64 columns of a tile, from column `first` on; above its 8-blocks on the diagonal it holds zeros.
"""

import tilelang.language as T

from ._sm90 import LEAF, SOLVE_BLOCK, WARP

HALF = 2 * SOLVE_BLOCK
VECTOR = 4  # floats of a 16-byte access


@T.macro
def invert_leaf(leaves, beta, buffer, side, X, first, part, lane):
    """A column of an 8-block of X by one thread; 32 threads make the four blocks of a part.

    `leaves` holds the 8-blocks of K in float32, transposed, so that a step reads what the known entry acts on. Column
    `first` of X is the head's first.
    """
    entries, x, strength = (T.alloc_local((LEAF,), "float32") for _ in range(3))
    leaf, column = part * (WARP // LEAF) + lane // LEAF, lane % LEAF
    for i in T.vectorized(LEAF):
        strength[i] = beta[buffer, side, leaf * LEAF + i]
    for i in T.unroll(LEAF):
        x[i] = 0.0
    for j in T.unroll(LEAF):
        x[j] = T.Select(column == j, 1.0, 0.0) - strength[j] * x[j]
        for group in T.unroll((j + 1) // VECTOR, LEAF // VECTOR):
            for e in T.vectorized(VECTOR):
                entries[group * VECTOR + e] = leaves[leaf, j * LEAF + group * VECTOR + e]
        for i in T.unroll(j + 1, LEAF):
            x[i] += entries[i] * x[j]
    for i in T.unroll(LEAF):
        X[leaf * LEAF + i, first + leaf * LEAF + column] = T.cast(x[i], "float16")


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
def load_scaled(tile, strength, buffer, side, row, column, token, lane, out):
    """The same at (row, column + token) with each column multiplied by its token's beta."""
    factors = T.alloc_local((4,), "float16")
    for half in T.unroll(2):
        for e in T.vectorized(2):
            factors[half * 2 + e] = strength[buffer, side, token + half * 8 + (lane % 4) * 2 + e]
    load_left(tile, row, column + token, lane, out)
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
def load_leaves(transposed, tile, row, column, block_column, lane, out):
    """Two 8-blocks of `tile`, at (row, column) and (row + 16, column + block_column), a register a lane each."""
    which = (lane // LEAF) % 2
    T.ptx_ldmatrix(
        T.bool(transposed),
        2,
        T.access_ptr(tile[row + which * SOLVE_BLOCK + lane % LEAF, column + which * block_column], "r", extent=8),
        T.access_ptr(out[0], "w", extent=4),
    )


@T.macro
def multiply_half(left, right, at, accumulator, into):
    """accumulator[into : into + 4] += left right[at : at + 4], 16 x 8 x 16."""
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
        at,
        accumulator.data,
        into,
        T.bool(False),
    )


@T.macro
def multiply(left, right, accumulator):
    """accumulator += left right, 16 x 16 x 16."""
    for half in T.unroll(2):
        multiply_half(left, right, half * 4, accumulator, half * 4)


@T.macro
def as_left(accumulator, out):
    """An accumulator's registers are those of an A operand, pair by pair."""
    for e in T.unroll(8):
        out[e] = T.cast(accumulator[e], "float16")


@T.macro
def load_leaf_operands(K, X, first, token, lane, lower, upper, below, left, right):
    """X22, X11 and K21 of the pairs of 8-blocks of `join_leaves`, and zeros for the operands of its mma.

    Only the lower rows of the mma's A and the upper rows of its B are used; the rest is zero.
    """
    load_leaves(False, X, token + LEAF, first + token + LEAF, SOLVE_BLOCK, lane, lower)
    load_leaves(True, X, token, first + token, SOLVE_BLOCK, lane, upper)
    load_leaves(True, K, token + LEAF, token, SOLVE_BLOCK, lane, below)
    for e in T.unroll(8):
        left[e] = T.cast(0, "float16")
        right[e] = T.cast(0, "float16")


@T.macro
def store_leaf(product, X, row, column, lane):
    """-product to the 8 x 8 block of X at (row, column)."""
    for e in T.vectorized(2):
        X[row + lane // 4, column + (lane % 4) * 2 + e] = T.cast(-product[6 + e], "float16")


@T.macro
def join_leaves(K, X, strength, buffer, side, first, token, lane):
    """X21 of two pairs of 8-blocks, those of the 16-blocks from `token` and from `token` + 16 on, by one warp."""
    lower, upper, below = (T.alloc_local((4,), "float16") for _ in range(3))
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    factors, product = T.alloc_local((2,), "float16"), T.alloc_local((8,), "float32")
    load_leaf_operands(K, X, first, token, lane, lower, upper, below, left, right)
    T.clear(product)
    for block in T.unroll(2):
        for e in T.vectorized(2):
            factors[e] = strength[buffer, side, token + block * SOLVE_BLOCK + LEAF + (lane % 4) * 2 + e]
        for e in T.unroll(2):
            left[2 + e] = lower[block * 2 + e] * factors[e]
            right[e] = below[block * 2 + e]
            right[4 + e] = upper[block * 2 + e]
        for e in T.unroll(4):
            product[e] = 0.0
            product[4 + e] = 0.0
        multiply_half(left, right, 0, product, 0)
        for e in T.unroll(2):
            left[2 + e] = T.cast(product[2 + e], "float16")
        multiply_half(left, right, 4, product, 4)
        store_leaf(product, X, token + block * SOLVE_BLOCK + LEAF, first + token + block * SOLVE_BLOCK, lane)


@T.macro
def join_blocks(K, X, strength, buffer, side, first, token, lane):
    """X21 of the two 16-blocks from `token` on, by one warp."""
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    product, result = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")
    T.clear(product)
    T.clear(result)
    load_scaled(X, strength, buffer, side, token + SOLVE_BLOCK, first, token + SOLVE_BLOCK, lane, left)
    load_right(K, token + SOLVE_BLOCK, token, lane, right)
    multiply(left, right, product)
    as_left(product, left)
    load_right(X, token, first + token, lane, right)
    multiply(left, right, result)
    for pair in T.unroll(4):
        for e in T.vectorized(2):
            X[
                token + SOLVE_BLOCK + lane // 4 + (pair % 2) * 8, first + token + (pair // 2) * 8 + (lane % 4) * 2 + e
            ] = T.cast(-result[pair * 2 + e], "float16")


@T.macro
def join_row(K, X, strength, buffer, side, first, step, low, high, lane):
    """low, high <- rows 16 step to 16 step + 15 of -X21 of the two 32-blocks, by one warp; X22 and X11 are triangular."""
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    T.clear(low)
    T.clear(high)
    for k in T.serial(step + 1):
        token = HALF + k * SOLVE_BLOCK
        load_scaled(X, strength, buffer, side, HALF + step * SOLVE_BLOCK, first, token, lane, left)
        load_right(K, token, 0, lane, right)
        multiply(left, right, low)
        load_right(K, token, SOLVE_BLOCK, lane, right)
        multiply(left, right, high)
    as_left(low, left)
    T.clear(low)
    load_right(X, 0, first, lane, right)
    multiply(left, right, low)
    as_left(high, left)
    T.clear(high)
    load_right(X, SOLVE_BLOCK, first, lane, right)
    multiply(left, right, low)
    load_right(X, SOLVE_BLOCK, first + SOLVE_BLOCK, lane, right)
    multiply(left, right, high)
