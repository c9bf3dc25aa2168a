"""The chunk's triangular solve for errors: X = (I + K B)^-1, with beta on the columns of a strictly lower K.

X gives the errors e = X y where `_solve.py` gives what is written, beta e; the steps are the same: eight-blocks by
substitution in float32, then blocks of 8, 16 and 32 joined by X21 = -X22 K21 B1 X11 on tensor cores. No entry divides by
beta, which may be zero, and a row is as precise however small its beta is. The tiles, and who makes which part of them, are
those of `_solve.py`; `strength`, with which products are scaled, is beta in float16 or float32.
"""

import tilelang.language as T

from ._sm90 import LEAF, SOLVE_BLOCK, WARP
from ._solve import HALF, VECTOR, load_leaf_operands, load_left, load_right, multiply, multiply_half, store_leaf


@T.macro
def invert_leaf(leaves, beta, buffer, side, X, first, part, lane):
    """A column of an 8-block of X by one thread; 32 threads make the four blocks of a part. Arguments as in `_solve.py`."""
    entries, x, strength = (T.alloc_local((LEAF,), "float32") for _ in range(3))
    written = T.alloc_var("float32")
    leaf, column = part * (WARP // LEAF) + lane // LEAF, lane % LEAF
    for i in T.vectorized(LEAF):
        strength[i] = beta[buffer, side, leaf * LEAF + i]
    for i in T.unroll(LEAF):
        x[i] = 0.0
    for j in T.unroll(LEAF):
        x[j] = T.Select(column == j, 1.0, 0.0) - x[j]
        written = strength[j] * x[j]
        for group in T.unroll((j + 1) // VECTOR, LEAF // VECTOR):
            for e in T.vectorized(VECTOR):
                entries[group * VECTOR + e] = leaves[leaf, j * LEAF + group * VECTOR + e]
        for i in T.unroll(j + 1, LEAF):
            x[i] += entries[i] * written
    for i in T.unroll(LEAF):
        X[leaf * LEAF + i, first + leaf * LEAF + column] = T.cast(x[i], "float16")


def scaled(value, factor):
    """A float32 number times a strength, as float16; with float16 strengths two products are one instruction."""
    if factor.dtype == "float16":
        return T.cast(value, "float16") * factor
    return T.cast(value * factor, "float16")


@T.macro
def join_leaves(K, X, strength, buffer, side, first, token, lane):
    """X21 of two pairs of 8-blocks, those of the 16-blocks from `token` and from `token` + 16 on, by one warp."""
    lower, upper, below = (T.alloc_local((4,), "float16") for _ in range(3))
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    factors, product = T.alloc_local((2,), strength.dtype), T.alloc_local((8,), "float32")
    load_leaf_operands(K, X, first, token, lane, lower, upper, below, left, right)
    for block in T.unroll(2):
        at = token + block * SOLVE_BLOCK
        for e in T.vectorized(2):
            factors[e] = strength[buffer, side, at + (lane % 4) * 2 + e]
        for e in T.unroll(2):
            left[2 + e] = lower[block * 2 + e]
            right[e] = below[block * 2 + e]
            right[4 + e] = upper[block * 2 + e]
        T.clear(product)
        multiply_half(left, right, 0, product, 0)
        for e in T.unroll(2):
            left[2 + e] = scaled(product[2 + e], factors[e])
        multiply_half(left, right, 4, product, 4)
        store_leaf(product, X, at + LEAF, first + at, lane)


@T.macro
def as_scaled_left(accumulator, strength, buffer, side, token, lane, out):
    """An accumulator as an A operand, each column multiplied by its token's beta; `token` is that of the first."""
    factors = T.alloc_local((4,), strength.dtype)
    for half in T.unroll(2):
        for e in T.vectorized(2):
            factors[half * 2 + e] = strength[buffer, side, token + half * 8 + (lane % 4) * 2 + e]
    for e in T.unroll(8):
        out[e] = scaled(accumulator[e], factors[(e // 4) * 2 + e % 2])


@T.macro
def join_blocks(K, X, strength, buffer, side, first, token, lane):
    """X21 of the two 16-blocks from `token` on, by one warp."""
    left, right = T.alloc_local((8,), "float16"), T.alloc_local((8,), "float16")
    product, result = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")
    T.clear(product)
    T.clear(result)
    load_left(X, token + SOLVE_BLOCK, first + token + SOLVE_BLOCK, lane, left)
    load_right(K, token + SOLVE_BLOCK, token, lane, right)
    multiply(left, right, product)
    as_scaled_left(product, strength, buffer, side, token, lane, left)
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
    row = HALF + step * SOLVE_BLOCK
    T.clear(low)
    T.clear(high)
    for k in T.serial(step + 1):
        token = HALF + k * SOLVE_BLOCK
        load_left(X, row, first + token, lane, left)
        load_right(K, token, 0, lane, right)
        multiply(left, right, low)
        load_right(K, token, SOLVE_BLOCK, lane, right)
        multiply(left, right, high)
    as_scaled_left(low, strength, buffer, side, 0, lane, left)
    T.clear(low)
    load_right(X, 0, first, lane, right)
    multiply(left, right, low)
    as_scaled_left(high, strength, buffer, side, SOLVE_BLOCK, lane, left)
    T.clear(high)
    load_right(X, SOLVE_BLOCK, first, lane, right)
    multiply(left, right, low)
    load_right(X, SOLVE_BLOCK, first + SOLVE_BLOCK, lane, right)
    multiply(left, right, high)
