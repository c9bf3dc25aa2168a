"""What the kernels of the short convolution share: sizes, weights in registers, and the taps of a token.

    z[t] = bias + sum_{j < reach[t]} weight[W - 1 - j] x[t - j]          y[t] = silu(z[t]) or z[t]

`reach[t]` is the width W, less where the sequence of token t began fewer than W - 1 tokens before. A thread owns a vector of
neighbouring channels. It keeps `taps` weights and tokens a channel in registers, as float32: token t lies in place t % taps
of its ring, so that an unrolled round of tokens moves nothing.

Tensors with channels are seen as vectors [.., size] of neighbouring channels, so that every access is one of 8 or 16 bytes.
Where x may be a part of a wider tensor, `x_row` and `x_token` say how many vectors lie between its rows and tokens.
"""

from dataclasses import dataclass

import tilelang.language as T

from ._widen import WIDEN_CODE

LOG2_E = 1.4426950408889634
FLOATS = 4  # float32 values of a 16-byte access

THREADS = 128


@dataclass(frozen=True)
class Shape:
    """How a kernel cuts its work, and what register budget goes with it."""

    size: int  # neighbouring channels of a thread, its vector
    turn: int  # tokens of an unrolled round, and loads of each tensor in flight; a multiple of the taps
    blocks_per_sm: int


@T.macro
def load_weights(taps, size, raw, wide, weight, weights, wide_weights, is_wide, vector, width, is_exact=False):
    """weight[j * size + e] multiplies the token j before, in channel e of the vector; 0 for j >= width.

    Of [D, W] weights, in the dtype of x or, if `is_wide`, in float32. is_exact: the width is known to be `taps`.
    """
    if is_exact or width == taps:
        if is_wide != 0:
            for part in T.unroll(taps * size // FLOATS):
                for e in T.vectorized(FLOATS):
                    wide[e] = wide_weights[(vector * (taps * size // FLOATS) + part) * FLOATS + e]
                for e in T.unroll(FLOATS):
                    weight[(taps - 1 - (part * FLOATS + e) % taps) * size + (part * FLOATS + e) // taps] = wide[e]
        else:
            for part in T.unroll(taps):
                for e in T.vectorized(size):
                    raw[part * size + e] = weights[(vector * taps + part) * size + e]
            for j in T.unroll(taps):
                for e in T.unroll(size):
                    weight[j * size + e] = T.cast(raw[e * taps + taps - 1 - j], "float32")
    else:
        for j in T.unroll(taps):
            for e in T.unroll(size):
                weight[j * size + e] = 0.0
                if j < width:
                    if is_wide != 0:
                        weight[j * size + e] = wide_weights[(vector * size + e) * width + width - 1 - j]
                    else:
                        weight[j * size + e] = T.cast(weights[(vector * size + e) * width + width - 1 - j], "float32")


@T.macro
def load_bias(size, raw, value, bias, wide_bias, is_wide, vector, has_bias):
    """The bias of the vector's channels, or zeros."""
    for e in T.unroll(size):
        value[e] = 0.0
    if has_bias != 0:
        if is_wide != 0:
            for e in T.unroll(size):
                value[e] = wide_bias[vector * size + e]
        else:
            for e in T.vectorized(size):
                raw[e] = bias[vector * size + e]
            for e in T.unroll(size):
                value[e] = T.cast(raw[e], "float32")


@T.macro
def load_history(taps, size, raw, x, x_at, x_token, first):
    """Issues the loads of the tokens before `first`, unless it is 0; x_at: where the vector of token `first` lies in x."""
    if first > 0:
        for j in T.unroll(1, taps):
            for e in T.vectorized(size):
                raw[(j - 1) * size + e] = x[x_at - j * T.cast(x_token, "int64"), e]


@T.macro
def place_history(taps, size, raw, ring, initial, state_at, first, width, has_initial):
    """The tokens before `first` to their places of the ring; before token 0 the initial state, or zeros.

    state_at: where the state of the vector's first channel begins.
    """
    for j in T.unroll(1, taps):
        for e in T.unroll(size):
            ring[(taps - j) * size + e] = T.Select(first > 0, T.cast(raw[(j - 1) * size + e], "float32"), 0.0)
    if has_initial != 0 and first == 0:
        for j in T.unroll(1, taps):
            if j < width:
                for e in T.unroll(size):
                    ring[(taps - j) * size + e] = T.cast(initial[state_at + e * (width - 1) + width - 1 - j], "float32")


@T.macro
def scale_weights(taps, size, weight, bias, silu):
    """Before SiLU, z is wanted in units of ln 2: LOG2_E times as large."""
    if silu != 0:
        for i in T.unroll(taps * size):
            weight[i] = weight[i] * LOG2_E
        for e in T.unroll(size):
            bias[e] = bias[e] * LOG2_E


@T.macro
def load_vector(size, raw, place, x, at):
    """Issues the load of one token's vector."""
    for e in T.vectorized(size):
        raw[place * size + e] = x[at, e]


@T.macro
def keep_order():
    """Keeps the compiler from moving the loads of a round on to where they are used, a round later."""
    T.sync_warp()


@T.macro
def find_origin(taps, origin: T.Ref, previous: T.Ref, sequence, entry_at, first, is_packed):
    """origin = the first token that token `first` sees, `taps` before it at most; previous = the sequence of first - 1.

    entry_at: where token `first` lies in `sequence`.
    """
    origin = first - taps
    previous = 0
    if is_packed != 0:
        origin = first
        if first > 0:
            previous = sequence[entry_at - 1]  # noqa: F841 (a store through the reference)
            for j in T.unroll(1, taps):
                if origin == first - j + 1 and sequence[entry_at - j] == sequence[entry_at]:
                    origin = first - j


@T.macro
def mark_tokens(turn, marks: T.Ref, previous: T.Ref, sequence, entry_at, count):
    """Bit i: token i of the `turn` tokens from entry_at on begins a sequence. Bit turn + i: it belongs to none."""
    current = T.alloc_var("int32")
    for i in T.unroll(turn):
        if i < count:
            current = sequence[entry_at + i]
            marks = marks | (T.cast(current != previous, "int32") << i) | (T.cast(current < 0, "int32") << (turn + i))
            previous = current


@T.macro
def mark_tile(taps, changes: T.Ref, nones: T.Ref, sequence, row_at, first, tokens, lane):
    """Bit i of `changes`: token first - (taps - 1) + i begins a sequence; of `nones`: it belongs to none. For all lanes."""
    token, current, previous = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    token = first - (taps - 1) + lane
    current = 0
    previous = 0
    if token >= 0 and token < tokens:
        current = sequence[row_at + token]
        previous = current + 1
        if token > 0:
            previous = sequence[row_at + token - 1]
    changes = T.call_extern("int32", "lanes_with", current != previous)  # noqa: F841 (a store through the reference)
    nones = T.call_extern("int32", "lanes_with", current < 0)  # noqa: F841


@T.macro
def add_taps(taps, size, z, bias, weight, ring, place, reach, is_general):
    """z = bias + the weighted tokens of the ring, of which the newest lies at `place`; `reach` of them, or all."""
    for e in T.unroll(size):
        z[e] = bias[e] + weight[e] * ring[place * size + e]
    for j in T.unroll(1, taps):
        for e in T.unroll(size):
            if not is_general or j < reach:
                z[e] = z[e] + weight[j * size + e] * ring[T.truncmod(place + taps - j, taps) * size + e]


LN_2 = 0.6931471805599453

FAST_GATE_CODE = """
// ln 2 / (1 + 2^-x), to a few units in the last place. exp2f() and a division would spend six instructions on subnormal
// numbers, which make no difference beside 1.
static __device__ __forceinline__ float fast_gate(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(fmaf(power, LOG2_E, LOG2_E)));
  return result;
}
"""

DEVICE_CODE = (
    WIDEN_CODE
    + FAST_GATE_CODE
    + """
// Which lanes of the warp say so.
static __device__ __forceinline__ int lanes_with(bool is_so) { return __ballot_sync(0xffffffffu, is_so); }

// Tokens from the last change at or before `place` on: a bit of `changes` says that a sequence begins there. 33 without one.
static __device__ __forceinline__ int count_since(int changes, int place) { return __clz(changes << (31 - place)) + 1; }
"""
)


def fast_gate(x):
    """sigmoid(z) / LOG2_E for x = LOG2_E z, so that x fast_gate(x) = silu(z); the kernel imports DEVICE_CODE."""
    return T.call_extern("float32", "fast_gate", x)
