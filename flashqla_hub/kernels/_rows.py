"""Pieces of the row-wise kernels: rows of HEAD_DIM numbers, half a warp a row, 16 bytes a thread and access."""

import tilelang.language as T

from ._sm90 import HEAD_DIM, WARP
from ._widen import WIDEN_CODE, widen

EIGHT = 8  # 16-bit values of a 16-byte access
LANES = HEAD_DIM // EIGHT  # threads of a row
THREADS = 8 * WARP
ROWS_PER_TURN = THREADS // LANES  # rows that a block handles at a time


@T.macro
def load_row(tensor, token, head, column, out, turn):
    """Eight numbers of a row of `tensor` [tokens, heads, HEAD_DIM]."""
    for e in T.vectorized(EIGHT):
        out[turn, e] = tensor[token, head, column + e]


def in_vectors(*strides):
    """Strides, which are multiples of EIGHT, in vectors of as many elements."""
    return tuple(T.cast(stride // EIGHT, "int32") for stride in strides)


@T.macro
def load_vector(out, turn, tensor, column, token, head, token_vectors, head_vectors):
    """Vector `turn` of `out` = eight numbers of a row of `tensor` [tokens, heads, HEAD_DIM], whose strides are `in_vectors`.

    An address is a product of 32 bits for either stride, where one of 64 bits would take eight instructions. The kernel
    imports DEVICE_CODE, as for all below.
    """
    offset = T.call_extern("int64", "wide_product", token, token_vectors) + T.call_extern(
        "int64", "wide_product", head, head_vectors
    )
    T.evaluate(
        T.call_extern(
            "handle", "load_16_bytes", T.address_of(out[turn * EIGHT]), T.address_of(tensor[0, 0, column]), offset
        )
    )


@T.macro
def store_vector(values, turn, tensor, row, column):
    """Eight numbers of a row of `tensor` [rows, HEAD_DIM], at once: the compiler would store them in pieces of four bytes."""
    T.stg128(tensor[T.cast(row, "int64"), column], T.reinterpret(values[T.Ramp(turn * EIGHT, 1, EIGHT)], "uint32x4"))


def quotient(n, magic, shift):
    """floor(n / d) of n >= 0, by `magic_of(d)` and `shift_of(d)`, which are to be found once."""
    return T.call_extern("int32", "quotient", n, magic, shift)


def magic_of(d):
    return T.call_extern("uint32", "magic_of", d)


def shift_of(d):
    return T.call_extern("int32", "shift_of", d)


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
def norm_vector(dtype, values, turn, eps, normed, narrow, rounded, root):
    """normed = root x of vector `turn` of `values`, with root = 1 / sqrt(mean(x^2) + eps) of its row; rounded to dtype in
    `narrow`, and that as float32 in `rounded`."""
    widen(EIGHT, normed, 0, values, turn)
    root[0] = 0.0
    for e in T.unroll(EIGHT):
        root[0] += normed[e] * normed[e]
    sum_over_row(root, 0)
    root[0] = T.rsqrt(root[0] * (1.0 / HEAD_DIM) + eps)
    for e in T.unroll(EIGHT):
        normed[e] = normed[e] * root[0]
    for e in T.vectorized(EIGHT):
        narrow[e] = T.cast(normed[e], dtype)
    widen(EIGHT, rounded, 0, narrow, 0)


def sigmoid(x):
    """1 / (1 + e^-x) without care for subnormal numbers."""
    return T.call_extern("float32", "sigmoid", x)


def gate_factor(gate, silu):
    """act(gate) / sigmoid(gate): the gate where silu is 1, and 1 where it is 0, however great the gate is."""
    return T.call_extern("float32", "gate_factor", gate, silu)


GATE_FACTOR_CODE = """
// A product and a sum would make a NaN of an infinite gate; an expression that chooses makes the backward spill.
static __device__ __forceinline__ float gate_factor(float gate, float silu) {
  float result;
  asm("{.reg .pred p; setp.ne.f32 p, %2, 0f00000000; selp.f32 %0, %1, 0f3f800000, p;}"
      : "=f"(result) : "f"(gate), "f"(silu));
  return result;
}
"""

DEVICE_CODE = (
    WIDEN_CODE
    + """
// 16 bytes, so many vectors behind a place that stays the same.
static __device__ __forceinline__ void load_16_bytes(void* out, const void* place, long long vectors) {
  *static_cast<uint4*>(out) = __ldg(static_cast<const uint4*>(place) + vectors);
}

static __device__ __forceinline__ long long wide_product(int a, int b) { return static_cast<long long>(a) * b; }

// floor(n / d) of n >= 0 for d >= 1: the shift s is the least with 2^s >= d, and the magic number 2^(31 + s) / d, rounded up.
static __device__ __forceinline__ int quotient(int n, unsigned magic, int shift) {
  return static_cast<int>(__umulhi(2u * n, magic) >> shift);
}
static __device__ __forceinline__ int shift_of(int d) { return 32 - __clz(d - 1); }
static __device__ __forceinline__ unsigned magic_of(int d) {
  return static_cast<unsigned>(((1ull << (31 + shift_of(d))) + d - 1) / static_cast<unsigned>(d));
}
"""
    + GATE_FACTOR_CODE
    + """
static __device__ __forceinline__ float sigmoid(float x) {
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}
"""
)
