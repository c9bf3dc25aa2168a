"""The short depthwise causal convolution, forward, of channels in rows; its output lies in rows of channels (SM90).

    z[t] = bias + sum_{j < reach[t]} weight[W - 1 - j] x[t - j]          y[t] = silu(z[t]) or z[t]

Reads        x [B, D, T], tokens side by side · weights [D W] · bias [D] · sequence [B T] int32 · initial [B D (W - 1)]
Writes       y [B, T, D] · final [B D (W - 1)], the last W - 1 tokens of initial and x

Block        CHANNELS channels of TOKENS tokens of one row. Its warps load runs of 32 tokens of a channel each into shared
             memory, turned; then a thread has a vector of neighbouring channels over RUN tokens, as in `convolution.py`.

A row of the tile is an odd number of 32-bit words, so that the 32 tokens of a run go to different banks.
"""

import tilelang.language as T

from ._convolution import (
    DEVICE_CODE,
    FLOATS,
    THREADS,
    add_taps,
    find_origin,
    load_bias,
    load_weights,
    mark_tokens,
    scale_weights,
)
from ._sm90 import WARP
from ._widen import widen
from .convolution import write_token

CHANNELS, TOKENS = 64, 64
SIZE = 4  # channels of a thread
RUN = TOKENS * CHANNELS // SIZE // THREADS  # tokens of a thread
ROW = CHANNELS + 2
WARPS = THREADS // WARP
UNROLLED = 8  # channels whose loads a warp has in flight


@T.macro
def load_tile(taps, tile, x, initial, row, first, channel, channels, tokens, width, has_initial, thread):
    """tile[r, c] = token first - (taps - 1) + r of channel + c; before token 0 the initial state, or zeros."""
    token = T.alloc_var("int32")
    value = T.alloc_local((UNROLLED,), x.dtype)
    for part in T.unroll((TOKENS + taps - 1 + WARP - 1) // WARP):
        token = first - (taps - 1) + part * WARP + thread % WARP
        for step in T.serial(CHANNELS // WARPS // UNROLLED):
            for c in T.unroll(UNROLLED):
                own = channel + (step * UNROLLED + c) * WARPS + thread // WARP
                value[c] = T.cast(0, x.dtype)
                if own < channels and token < tokens:
                    if token >= 0:
                        value[c] = x[row, own, token]
                    else:
                        if has_initial != 0 and token > -width:
                            value[c] = initial[(row * channels + own) * (width - 1) + width - 1 + token]
            if part * WARP + thread % WARP < TOKENS + taps - 1:
                for c in T.unroll(UNROLLED):
                    tile[part * WARP + thread % WARP, (step * UNROLLED + c) * WARPS + thread // WARP] = value[c]


@T.macro
def write_last(final, x, initial, row, channel, channels, tokens, width, has_initial):
    """The last W - 1 tokens of a vector of channels."""
    for e in T.unroll(SIZE):
        at = (row * channels + channel + e) * (width - 1)
        for s in T.serial(width - 1):
            if tokens - (width - 1) + s >= 0:
                final[at + s] = x[row, channel + e, tokens - (width - 1) + s]
            else:
                final[at + s] = T.cast(0, final.dtype)
                if has_initial != 0:
                    final[at + s] = initial[at + tokens + s]


def build_convolution_turned(dtype, taps):
    """The prim_func for widths up to `taps`; arguments in README.md."""
    batch, channels, tokens = T.dynamic("batch"), T.dynamic("channels"), T.dynamic("tokens")
    x_b, x_d = T.dynamic("x_b", "int64"), T.dynamic("x_d", "int64")
    weight_count, bias_count, entries = T.dynamic("weight_count"), T.dynamic("bias_count"), T.dynamic("entries")
    wide_weight_count, wide_bias_count = T.dynamic("wide_weight_count"), T.dynamic("wide_bias_count")
    initial_count, final_count, y_vectors = T.dynamic("initial_count"), T.dynamic("final_count"), T.dynamic("y_vectors")

    @T.prim_func
    def convolution_turned(
        x: T.StridedTensor((batch, channels, tokens), (x_b, x_d, 1), dtype),
        weights: T.Tensor((weight_count,), dtype),
        bias: T.Tensor((bias_count,), dtype),
        wide_weights: T.Tensor((wide_weight_count,), "float32"),
        wide_bias: T.Tensor((wide_bias_count,), "float32"),
        sequence: T.Tensor((entries,), "int32"),
        initial: T.Tensor((initial_count,), dtype),
        y: T.Tensor((y_vectors, SIZE), dtype),
        final: T.Tensor((final_count,), dtype),
        width: T.int32,
        is_wide: T.int32,
        has_bias: T.int32,
        is_packed: T.int32,
        has_initial: T.int32,
        writes_final: T.int32,
        silu: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens, TOKENS), T.ceildiv(channels, CHANNELS), batch, threads=THREADS) as (
            part,
            group,
            row,
        ):
            T.import_source(DEVICE_CODE)
            tile = T.alloc_shared((TOKENS + taps - 1, ROW), dtype)
            weight, bias_local = T.alloc_local((taps * SIZE,), "float32"), T.alloc_local((SIZE,), "float32")
            ring, z = T.alloc_local((taps * SIZE,), "float32"), T.alloc_local((SIZE,), "float32")
            wide, raw_weight = T.alloc_local((FLOATS,), "float32"), T.alloc_local((taps * SIZE,), dtype)
            raw, out = T.alloc_local((SIZE,), dtype), T.alloc_local((SIZE,), dtype)
            thread, vector, first, at = (T.alloc_var("int32") for _ in range(4))
            origin, previous, reach, marks = (T.alloc_var("int32") for _ in range(4))
            y_at = T.alloc_var("int64")
            thread = T.get_thread_binding()
            load_tile(
                taps,
                tile,
                x,
                initial,
                row,
                part * TOKENS,
                group * CHANNELS,
                channels,
                tokens,
                width,
                has_initial,
                thread,
            )
            T.sync_threads()
            vector = T.truncmod(thread, CHANNELS // SIZE)
            at = T.truncdiv(thread, CHANNELS // SIZE) * RUN
            first = part * TOKENS + at
            if group * CHANNELS + vector * SIZE < channels and first < tokens:
                vector = group * (CHANNELS // SIZE) + vector
                y_at = (row * T.cast(tokens, "int64") + first) * T.truncdiv(channels, SIZE) + vector
                load_weights(taps, SIZE, raw_weight, wide, weight, weights, wide_weights, is_wide, vector, width)
                load_bias(SIZE, raw_weight, bias_local, bias, wide_bias, is_wide, vector, has_bias)
                scale_weights(taps, SIZE, weight, bias_local, silu)
                find_origin(taps, origin, previous, sequence, row * tokens + first, first, is_packed)
                marks = 0
                if is_packed != 0:
                    mark_tokens(RUN, marks, previous, sequence, row * tokens + first, tokens - first)
                for j in T.unroll(1, taps):
                    for e in T.unroll(SIZE):
                        raw[e] = tile[at + taps - 1 - j, T.truncmod(vector, CHANNELS // SIZE) * SIZE + e]
                    widen(SIZE, ring, taps - j, raw, 0)
                for i in T.unroll(RUN):
                    for e in T.unroll(SIZE):
                        raw[e] = tile[at + taps - 1 + i, T.truncmod(vector, CHANNELS // SIZE) * SIZE + e]
                    widen(SIZE, ring, i % taps, raw, 0)
                    if (marks >> i & 1) != 0:
                        origin = first + i
                    reach = T.min(width, first + i - origin + 1)
                    add_taps(taps, SIZE, z, bias_local, weight, ring, i % taps, reach, True)
                    write_token(
                        SIZE,
                        out,
                        z,
                        (marks >> (RUN + i) & 1) != 0,
                        silu,
                        False,
                        y,
                        y_at,
                        first + i < tokens,
                    )
                    y_at += T.truncdiv(channels, SIZE)
                if writes_final != 0 and first + RUN >= tokens:
                    write_last(final, x, initial, row, vector * SIZE, channels, tokens, width, has_initial)

    return convolution_turned
