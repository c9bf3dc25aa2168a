"""Short depthwise causal convolution with bias and SiLU, forward, for tokens in rows (SM90).

    z[t] = bias + sum_{j < reach[t]} weight[W - 1 - j] x[t - j]          y[t] = silu(z[t]) or z[t]
    and in the layer's form, for the heads of q and k                    y[t] <- y[t] / sqrt(|y[t]|^2 + 1e-6)

Reads        x [B, T, D] · weights [D W] · bias [D] · sequence [B T] int32, of each token · initial [B D (W - 1)]
Writes       y [B, T, D] · final [B D (W - 1)], the last W - 1 tokens of initial and x

Block        a tile, `turn` tokens of one row, of THREADS vectors of neighbouring channels; a thread has a vector

A thread issues all its loads, of its tokens and the W - 1 before them, and then waits for the first: a grid of many such
short blocks keeps more bytes in flight than rounds of loads do, and leaves little of its last wave empty. A token of a
negative sequence is seen by none and gives 0. A block may begin while the kernel before it on the stream ends
(programmatic launch), and waits before its first load.
"""

import tilelang.language as T

from ._convolution import (
    DEVICE_CODE,
    FLOATS,
    THREADS,
    Shape,
    add_taps,
    fast_gate,
    load_bias,
    load_history,
    load_vector,
    load_weights,
    mark_tile,
    place_history,
    scale_weights,
)
from ._sm90 import HEAD_DIM, L2NORM_EPS, WARP
from ._widen import widen

SHAPES = {  # by the taps, the mode and whether heads are normalised; marks of a tile's tokens take 2 of 32 bits each
    (4, "exact", False): Shape(size=2, turn=20, blocks_per_sm=7),
    (4, "exact", True): Shape(size=4, turn=16, blocks_per_sm=5),
    (4, "general", False): Shape(size=2, turn=16, blocks_per_sm=6),
    (4, "general", True): Shape(size=4, turn=16, blocks_per_sm=4),
    (8, "exact", False): Shape(size=2, turn=16, blocks_per_sm=5),
    (8, "general", False): Shape(size=2, turn=16, blocks_per_sm=4),
}


@T.macro
def write_final(size, raw, final, state_at, x, x_row_at, x_token, initial, tokens, width, has_initial):
    """The last W - 1 tokens, by the threads that own the end of a row."""
    for s in T.serial(width - 1):
        if tokens - (width - 1) + s >= 0:
            for e in T.vectorized(size):
                raw[e] = x[x_row_at + (tokens - (width - 1) + s) * T.cast(x_token, "int64"), e]
            for e in T.unroll(size):
                final[state_at + e * (width - 1) + s] = raw[e]
        else:
            for e in T.unroll(size):
                raw[e] = T.cast(0, final.dtype)
                if has_initial != 0:
                    raw[e] = initial[state_at + e * (width - 1) + tokens + s]
                final[state_at + e * (width - 1) + s] = raw[e]


@T.macro
def normalize(size, z):
    """z / sqrt(|z|^2 + eps) over the HEAD_DIM channels of a warp."""
    square = T.alloc_var("float32")
    square = 0.0
    for e in T.unroll(size):
        square += z[e] * z[e]
    for step in T.unroll(5):
        square += T.shfl_xor(square, 1 << step)
    square = T.rsqrt(square + L2NORM_EPS)
    for e in T.unroll(size):
        z[e] = z[e] * square


@T.macro
def write_token(size, out, z, is_none, silu, is_normed, y, y_at, is_owned):
    """y = silu(z) with z in units of ln 2, or z; then normalised if asked; 0 for a token of no sequence."""
    gate = T.alloc_var("float32")
    for e in T.unroll(size):
        gate = fast_gate(z[e])
        z[e] = z[e] * T.Select(silu != 0, gate, 1.0)
    if is_normed:
        normalize(size, z)
    if is_none:
        for e in T.unroll(size):
            z[e] = 0.0
    for e in T.vectorized(size):
        out[e] = T.cast(z[e], y.dtype)
    if is_owned:
        for e in T.vectorized(size):
            y[y_at, e] = out[e]


@T.macro
def convolve_tile(
    taps,
    size,
    turn,
    out,
    z,
    ring,
    raw,
    weight,
    bias,
    changes,
    nones,
    width,
    silu,
    y,
    y_at,
    vectors,
    owned,
    is_general,
    is_normed,
):
    """Writes the `owned` first outputs of a tile, from its tokens in `raw` and those before them in `ring`."""
    reach = T.alloc_var("int32")
    for i in T.unroll(turn):
        widen(size, ring, i % taps, raw, i)
        if is_general:
            reach = T.min(width, T.call_extern("int32", "count_since", changes, i + taps - 1))
        add_taps(taps, size, z, bias, weight, ring, i % taps, reach, is_general)
        is_none = is_general and (nones >> (i + taps - 1) & 1) != 0
        write_token(
            size, out, z, is_none, silu, is_normed, y, y_at + T.cast(i, "int64") * T.cast(vectors, "int64"), i < owned
        )


def build_convolution(dtype, taps, mode, norms_heads=False, shape=None):
    """The prim_func; arguments in README.md.

    mode: "exact" for the width `taps` and rows of one sequence each, "general" for widths up to it and any sequences.
    norms_heads: whether the first `normed_vectors` vectors are normalised, HEAD_DIM channels at a time: those of a warp.
    """
    is_general, shape = mode == "general", shape or SHAPES[taps, mode, norms_heads]
    assert not norms_heads or shape.size * WARP == HEAD_DIM
    size, turn, blocks = shape.size, shape.turn, shape.blocks_per_sm
    weight_count, entries = T.dynamic("weight_count"), T.dynamic("entries")
    bias_count, wide_bias_count = T.dynamic("bias_count"), T.dynamic("wide_bias_count")
    wide_weight_count = T.dynamic("wide_weight_count")
    x_vectors, y_vectors = T.dynamic("x_vectors"), T.dynamic("y_vectors")
    initial_count, final_count = T.dynamic("initial_count"), T.dynamic("final_count")

    @T.prim_func
    def convolution(
        x: T.Tensor((x_vectors, size), dtype),
        weights: T.Tensor((weight_count,), dtype),
        bias: T.Tensor((bias_count,), dtype),
        wide_weights: T.Tensor((wide_weight_count,), "float32"),
        wide_bias: T.Tensor((wide_bias_count,), "float32"),
        sequence: T.Tensor((entries,), "int32"),
        initial: T.Tensor((initial_count,), dtype),
        y: T.Tensor((y_vectors, size), dtype),
        final: T.Tensor((final_count,), dtype),
        batch: T.int32,
        tokens: T.int32,
        vectors: T.int32,
        x_row: T.int64,
        x_token: T.int32,
        width: T.int32,
        depth: T.int32,
        is_wide: T.int32,
        has_bias: T.int32,
        is_packed: T.int32,
        has_initial: T.int32,
        writes_final: T.int32,
        silu: T.int32,
        normed_vectors: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(vectors, THREADS),
            depth,
            T.ceildiv(batch * T.ceildiv(tokens, turn), depth),
            threads=THREADS,
        ) as (group, part, layer):
            T.import_source(DEVICE_CODE)
            T.annotate_min_blocks_per_sm(blocks)
            weight, bias_local = T.alloc_local((taps * size,), "float32"), T.alloc_local((size,), "float32")
            ring, z = T.alloc_local((taps * size,), "float32"), T.alloc_local((size,), "float32")
            wide, raw_weight = T.alloc_local((FLOATS,), "float32"), T.alloc_local((taps * size,), dtype)
            raw_history, raw = T.alloc_local(((taps - 1) * size,), dtype), T.alloc_local((turn * size,), dtype)
            out = T.alloc_local((size,), dtype)
            tile, vector, row, tiles, state_at = (T.alloc_var("int32") for _ in range(5))
            first, stop, changes, nones = (T.alloc_var("int32") for _ in range(4))
            x_at, y_at = T.alloc_var("int64"), T.alloc_var("int64")
            tile = layer * depth + part
            vector = group * THREADS + T.get_thread_binding()
            tiles = T.truncdiv(tokens + turn - 1, turn)
            row = T.truncdiv(tile, tiles)
            first = T.truncmod(tile, tiles) * turn
            T.pdl_sync()
            changes = 0
            nones = 0
            if is_general and is_packed != 0 and row < batch:
                mark_tile(taps, changes, nones, sequence, row * tokens, first, tokens, T.get_thread_binding() % WARP)
            if row < batch and vector < vectors:
                stop = T.min(first + turn, tokens)
                x_at = row * x_row + first * T.cast(x_token, "int64") + vector
                y_at = (row * T.cast(tokens, "int64") + first) * vectors + vector
                state_at = (row * vectors + vector) * size * (width - 1)
                load_history(taps, size, raw_history, x, x_at, x_token, first)
                for i in T.unroll(turn):
                    load_vector(size, raw, i, x, x_at)
                    if first + i + 1 < stop:
                        x_at += x_token
                load_weights(
                    taps, size, raw_weight, wide, weight, weights, wide_weights, is_wide, vector, width, not is_general
                )
                load_bias(size, raw_weight, bias_local, bias, wide_bias, is_wide, vector, has_bias)
                scale_weights(taps, size, weight, bias_local, silu)
                place_history(taps, size, raw_history, ring, initial, state_at, first, width, has_initial)
                is_plain = not is_general or (
                    width == taps and (changes >> 1 & ((1 << (turn + taps - 2)) - 1)) == 0 and nones == 0
                )
                is_normed = norms_heads and vector < normed_vectors
                whole = (
                    taps,
                    size,
                    turn,
                    out,
                    z,
                    ring,
                    raw,
                    weight,
                    bias_local,
                    changes,
                    nones,
                    width,
                    silu,
                    y,
                    y_at,
                    vectors,
                )
                if is_plain:
                    convolve_tile(*whole, stop - first, False, is_normed)
                else:
                    convolve_tile(*whole, stop - first, True, is_normed)
                if writes_final != 0 and stop == tokens:
                    write_final(
                        size,
                        raw,
                        final,
                        state_at,
                        x,
                        row * x_row + vector,
                        x_token,
                        initial,
                        tokens,
                        width,
                        has_initial,
                    )

    return convolution
