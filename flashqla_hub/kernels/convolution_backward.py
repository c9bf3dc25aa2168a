"""Gradients of the short depthwise causal convolution, for tokens in rows (SM90).

    dz[t] = dy[t] silu'(z[t]) or dy[t]                       z[t] as in `convolution.py`, computed again
    dx[u] = sum_{j: j < reach[u + j]} weight[W - 1 - j] dz[u + j]          and dfinal, where u is among the last W - 1
    dweight[W - 1 - j] = sum_{t: j < reach[t]} dz[t] x[t - j]             dbias = sum_t dz[t]

Reads        x dy [B, T, D] · weights [D W] · bias [D] · sequence [B T] int32 · initial dfinal [B D (W - 1)]
Writes       dx [B, T, D] · dinitial [B D (W - 1)] · partial [tiles, taps + 1, D] f32, sums of dweight and dbias over a tile

Thread       a vector of neighbouring channels over the `tokens_per_thread` tokens of a tile, and the W - 1 behind them, whose
             dz reach into it. Sums of dx live in a ring as the tokens do: that of token t - taps + 1 is complete after token t.

`convolution_gradients.py` adds the partial sums in the order of their tiles, so that equal input gives equal bits.
"""

import tilelang.language as T

from ._convolution import (
    FAST_SIGMOID,
    FLOATS,
    THREADS,
    Shape,
    add_taps,
    find_origin,
    load_bias,
    load_history,
    load_vector,
    load_weights,
    mark_tokens,
    place_history,
    sigmoid,
)

SHAPES = {
    4: Shape(size=4, turn=4, blocks_per_sm=3),
    8: Shape(size=2, turn=8, blocks_per_sm=3),
}


@T.macro
def differentiate(size, dz, z, dy, at, silu, is_dead):
    """dz = dy silu'(z), or dy; 0 for a token that gives no output."""
    gate = T.alloc_var("float32")
    for e in T.unroll(size):
        dz[e] = T.cast(dy[at * size + e], "float32")
    if silu != 0:
        for e in T.unroll(size):
            gate = sigmoid(z[e])
            dz[e] = dz[e] * (gate + z[e] * gate * (1.0 - gate))
    for e in T.unroll(size):
        dz[e] = T.Select(is_dead, 0.0, dz[e])


@T.macro
def spread(taps, size, dz, weight, ring, dring, dweight, dbias, place, reach, is_general, is_owned):
    """Adds what a token gives to the gradients of its taps, and, unless another tile does, to those of the weights."""
    share = T.alloc_var("float32")
    for e in T.unroll(size):
        dring[place * size + e] = weight[e] * dz[e]
        share = T.Select(is_owned, dz[e], 0.0)
        dbias[e] = dbias[e] + share
        dweight[e] = dweight[e] + share * ring[place * size + e]
    for j in T.unroll(1, taps):
        for e in T.unroll(size):
            if not is_general or j < reach:
                share = T.Select(is_owned, dz[e], 0.0)
                at = T.truncmod(place + taps - j, taps) * size + e
                dring[at] = dring[at] + weight[j * size + e] * dz[e]
                dweight[j * size + e] = dweight[j * size + e] + share * ring[at]


@T.macro
def add_dfinal(size, dring, place, dfinal, state_at, u, first_kept, width, has_dfinal):
    """Adds the gradient of a final state to that of the token that it keeps, the first of which is `first_kept`."""
    if has_dfinal != 0 and u >= first_kept and u < first_kept + width - 1 and u > -width:
        for e in T.unroll(size):
            dring[place * size + e] = dring[place * size + e] + T.cast(
                dfinal[state_at + e * (width - 1) + u - first_kept], "float32"
            )


@T.macro
def write_dinitial(size, out, dinitial, state_at, u, first, width, has_initial):
    """Writes the gradient of the initial state's token u < 0."""
    if has_initial != 0 and u < 0 and u > -width and first == 0:
        for e in T.unroll(size):
            dinitial[state_at + e * (width - 1) + u + width - 1] = out[e]


@T.macro
def write_vector(size, out, values, place, x, at, is_owned):
    """Rounds a vector of the ring, and writes it unless another tile does."""
    for e in T.unroll(size):
        out[e] = T.cast(values[place * size + e], x.dtype)
    if is_owned:
        for e in T.vectorized(size):
            x[at, e] = out[e]


def build_convolution_backward(dtype, taps, mode, shape=None):
    """The prim_func; arguments in README.md.

    mode: "exact" for the width `taps` and rows of one sequence each, "general" for widths up to it and any sequences,
    "states" for widths up to it and rows with states before and after.
    """
    is_general, has_states, shape = mode != "exact", mode == "states", shape or SHAPES[taps]
    size, turn, blocks = shape.size, shape.turn, shape.blocks_per_sm
    vectors, weight_count, entries = T.dynamic("vectors"), T.dynamic("weight_count"), T.dynamic("entries")
    bias_count, wide_bias_count = T.dynamic("bias_count"), T.dynamic("wide_bias_count")
    wide_weight_count = T.dynamic("wide_weight_count")
    x_vectors, dy_vectors, dx_vectors = T.dynamic("x_vectors"), T.dynamic("dy_vectors"), T.dynamic("dx_vectors")
    initial_count, dinitial_count, dfinal_count = (
        T.dynamic("initial_count"),
        T.dynamic("dinitial_count"),
        T.dynamic("dfinal_count"),
    )
    partial_tiles = T.dynamic("partial_tiles")

    @T.prim_func
    def convolution_backward(
        x: T.Tensor((x_vectors, size), dtype),
        dy: T.Tensor((dy_vectors, size), dtype),
        weights: T.Tensor((weight_count,), dtype),
        bias: T.Tensor((bias_count,), dtype),
        wide_weights: T.Tensor((wide_weight_count,), "float32"),
        wide_bias: T.Tensor((wide_bias_count,), "float32"),
        sequence: T.Tensor((entries,), "int32"),
        initial: T.Tensor((initial_count,), dtype),
        dfinal: T.Tensor((dfinal_count,), dtype),
        dx: T.Tensor((dx_vectors, size), dtype),
        dinitial: T.Tensor((dinitial_count,), dtype),
        partial: T.Tensor((partial_tiles, taps + 1, vectors, size), "float32"),
        batch: T.int32,
        tokens: T.int32,
        x_row: T.int64,
        x_token: T.int32,
        dy_row: T.int64,
        dy_token: T.int32,
        width: T.int32,
        tokens_per_thread: T.int32,
        is_wide: T.int32,
        has_bias: T.int32,
        is_packed: T.int32,
        has_initial: T.int32,
        has_dfinal: T.int32,
        silu: T.int32,
    ):
        with T.Kernel(T.ceildiv(partial_tiles * vectors, THREADS), threads=THREADS) as block:
            T.import_source(FAST_SIGMOID)
            T.annotate_min_blocks_per_sm(blocks)
            weight, bias_local = T.alloc_local((taps * size,), "float32"), T.alloc_local((size,), "float32")
            dweight, dbias = T.alloc_local((taps * size,), "float32"), T.alloc_local((size,), "float32")
            ring, dring = T.alloc_local((taps * size,), "float32"), T.alloc_local((taps * size,), "float32")
            z, dz = T.alloc_local((size,), "float32"), T.alloc_local((size,), "float32")
            wide, raw_weight = T.alloc_local((FLOATS,), "float32"), T.alloc_local((taps * size,), dtype)
            raw_history = T.alloc_local(((taps - 1) * size,), dtype)
            raw, raw_dy = T.alloc_local((turn * size,), dtype), T.alloc_local((turn * size,), dtype)
            out = T.alloc_local((size,), dtype)
            tile, vector, row, tiles, state_at, entry_at = (T.alloc_var("int32") for _ in range(6))
            first, stop, end, token, origin, previous, reach, marks, u = (T.alloc_var("int32") for _ in range(9))
            x_at, dy_at, dx_at = T.alloc_var("int64"), T.alloc_var("int64"), T.alloc_var("int64")
            tile = T.truncdiv(block * THREADS + T.get_thread_binding(), vectors)
            vector = T.truncmod(block * THREADS + T.get_thread_binding(), vectors)
            tiles = T.truncdiv(tokens + tokens_per_thread - 1, tokens_per_thread)
            row = T.truncdiv(tile, tiles)
            first = T.truncmod(tile, tiles) * tokens_per_thread
            if row < batch:
                stop = T.min(first + tokens_per_thread, tokens)
                end = T.min(stop + taps - 1, tokens)
                x_at = row * x_row + first * T.cast(x_token, "int64") + vector
                dy_at = row * dy_row + first * T.cast(dy_token, "int64") + vector
                dx_at = (row * T.cast(tokens, "int64") + first - (taps - 1)) * vectors + vector
                state_at = (row * vectors + vector) * size * (width - 1)
                entry_at = row * tokens
                load_history(taps, size, raw_history, x, x_at, x_token, first)
                for i in T.unroll(turn):
                    load_vector(size, raw, i, x, x_at)
                    load_vector(size, raw_dy, i, dy, dy_at)
                    if first + i + 1 < end:
                        x_at += x_token
                        dy_at += dy_token
                load_weights(taps, size, raw_weight, wide, weight, weights, wide_weights, is_wide, vector, width)
                load_bias(size, raw_weight, bias_local, bias, wide_bias, is_wide, vector, has_bias)
                place_history(taps, size, raw_history, ring, initial, state_at, first, width, has_initial)
                if is_general:
                    find_origin(taps, origin, previous, sequence, entry_at + first, first, is_packed)
                for i in T.unroll(taps * size):
                    dring[i] = 0.0
                    dweight[i] = 0.0
                for e in T.unroll(size):
                    dbias[e] = 0.0
                for part in T.unroll(T.truncdiv(stop - first + taps - 1 + turn - 1, turn), unroll_factor=1):
                    token = first + part * turn
                    marks = 0
                    if is_general and is_packed != 0:
                        mark_tokens(turn, marks, previous, sequence, entry_at + token, end - token)
                    for i in T.unroll(turn):
                        if is_general:
                            if (marks >> i & 1) != 0:
                                origin = token + i
                            reach = T.min(width, token + i - origin + 1)
                        for e in T.unroll(size):
                            ring[i % taps * size + e] = T.cast(raw[i * size + e], "float32")
                        load_vector(size, raw, i, x, x_at)
                        add_taps(taps, size, z, bias_local, weight, ring, i % taps, reach, is_general)
                        differentiate(
                            size, dz, z, raw_dy, i, silu, (marks >> (turn + i) & 1) != 0 or token + i >= tokens
                        )
                        load_vector(size, raw_dy, i, dy, dy_at)
                        if token + turn + i + 1 < end:
                            x_at += x_token
                            dy_at += dy_token
                        spread(
                            taps,
                            size,
                            dz,
                            weight,
                            ring,
                            dring,
                            dweight,
                            dbias,
                            i % taps,
                            reach,
                            is_general,
                            token + i < stop,
                        )
                        u = token + i - (taps - 1)
                        if has_states:
                            add_dfinal(
                                size, dring, (i + 1) % taps, dfinal, state_at, u, tokens - width + 1, width, has_dfinal
                            )
                        write_vector(size, out, dring, (i + 1) % taps, dx, dx_at, u >= first and u < stop)
                        if has_states:
                            write_dinitial(size, out, dinitial, state_at, u, first, width, has_initial)
                        dx_at += vectors
                for j in T.unroll(taps):
                    for e in T.vectorized(size):
                        partial[tile, j, vector, e] = dweight[j * size + e]
                for e in T.vectorized(size):
                    partial[tile, taps, vector, e] = dbias[e]

    return convolution_backward
