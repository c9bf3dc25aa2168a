"""Pieces of the row-wise kernels: rows of HEAD_DIM numbers, half a warp a row, 16 bytes a thread and access."""

import tilelang.language as T

from ._sm90 import HEAD_DIM, WARP

LOG2_E = 1.4426950408889634
EIGHT = 8  # 16-bit values of a 16-byte access
LANES = HEAD_DIM // EIGHT  # threads of a row
THREADS = 8 * WARP
ROWS_PER_TURN = THREADS // LANES  # rows that a block handles at a time


@T.macro
def load_row(tensor, token, head, column, out, turn):
    """Eight numbers of a row of `tensor` [tokens, heads, HEAD_DIM]."""
    for e in T.vectorized(EIGHT):
        out[turn, e] = tensor[token, head, column + e]


@T.macro
def store_row(tensor, token, head, column, values, turn):
    """Eight numbers of a row of `tensor`, at once: left to itself the compiler stores them in pieces of four bytes."""
    T.stg128(tensor[token, head, column], T.reinterpret(values[turn, T.Ramp(0, 1, EIGHT)], "uint32x4"))


class Weight:
    """Eight numbers of a parameter, in the one of two widths that it has."""

    def __init__(self, dtype):
        self.narrow, self.wide = T.alloc_local((EIGHT,), dtype), T.alloc_local((EIGHT,), "float32")


@T.macro
def load_weight(w, narrow, wide, is_wide, column):
    """Eight numbers of a parameter [HEAD_DIM], from the one of two tensors that holds it; `w.wide` has them either way."""
    if is_wide != 0:
        for e in T.vectorized(EIGHT):
            w.wide[e] = wide[column + e]
    else:
        for e in T.vectorized(EIGHT):
            w.narrow[e] = narrow[column + e]
        for e in T.unroll(EIGHT):
            w.wide[e] = T.cast(w.narrow[e], "float32")


@T.macro
def sum_over_row(values, index):
    """Adds `values[index]` over the threads of a row; every one of them gets the sum."""
    for step in T.unroll(LANES.bit_length() - 1):
        values[index] += T.shfl_xor(values[index], LANES >> (step + 1))


@T.macro
def inverse_root(values, turn, eps, out):
    """out[turn] = 1 / sqrt(mean(x^2) + eps) of the row that `values[turn]` is a part of."""
    out[turn] = 0.0
    for e in T.unroll(EIGHT):
        out[turn] += T.cast(values[turn, e], "float32") * T.cast(values[turn, e], "float32")
    sum_over_row(out, turn)
    out[turn] = T.rsqrt(out[turn] * (1.0 / HEAD_DIM) + eps)


@T.macro
def multiply_weight(dtype, normed, w, is_wide, product):
    """product = normed * weight in float32, rounded to `dtype`, as normed is, unless the weight is float32.

    A product in `dtype` is the exact one rounded, and two of them are one instruction.
    """
    narrow = T.alloc_local((EIGHT,), dtype)
    if is_wide != 0:
        for e in T.unroll(EIGHT):
            product[e] = T.cast(normed[e], "float32") * w.wide[e]
    else:
        for e in T.vectorized(EIGHT):
            narrow[e] = normed[e] * w.narrow[e]
        for e in T.unroll(EIGHT):
            product[e] = T.cast(narrow[e], "float32")


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return T.fast_rcp(1.0 + T.exp2(-LOG2_E * x))
