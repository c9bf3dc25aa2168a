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
    DEVICE_CODE,
    FLOATS,
    LN_2,
    LOG2_E,
    THREADS,
    Shape,
    add_taps,
    fast_gate,
    find_origin,
    keep_order,
    load_bias,
    load_history,
    load_vector,
    load_weights,
    mark_tokens,
    place_history,
    scale_weights,
)
from ._widen import widen

SHAPES = {  # by the taps and whether the mode is "exact"
    (4, True): Shape(size=4, turn=4, blocks_per_sm=4),
    (4, False): Shape(size=4, turn=4, blocks_per_sm=3),
    (8, True): Shape(size=2, turn=8, blocks_per_sm=3),
    (8, False): Shape(size=2, turn=8, blocks_per_sm=3),
}


@T.macro
def differentiate(size, dz, z, dy, at, silu):
    """dz = ln 2 dy silu'(z) with z in units of ln 2, or dy."""
    gate = T.alloc_var("float32")
    widen(size, dz, 0, dy, at)
    for e in T.unroll(size):
        gate = fast_gate(z[e])
        gate = gate + z[e] * gate * (LN_2 - gate)
        dz[e] = dz[e] * T.Select(silu != 0, gate, 1.0)


@T.macro
def spread(taps, size, dz, weight, ring, dring, dweight, dbias, place, reach, is_general, is_owned):
    """Adds what a token gives to the gradients of its taps, and, unless another tile does, to those of the weights."""
    for e in T.unroll(size):
        dring[place * size + e] = weight[e] * dz[e]
        if is_owned:
            dbias[e] = dbias[e] + dz[e]
            dweight[e] = dweight[e] + dz[e] * ring[place * size + e]
    for j in T.unroll(1, taps):
        for e in T.unroll(size):
            if not is_general or j < reach:
                at = T.truncmod(place + taps - j, taps) * size + e
                dring[at] = dring[at] + weight[j * size + e] * dz[e]
                if is_owned:
                    dweight[j * size + e] = dweight[j * size + e] + dz[e] * ring[at]


@T.macro
def silence(size, turn, raw_dy, token, tokens):
    """Zeros for dy of the round's tokens behind the last."""
    if token + turn > tokens:
        for i in T.unroll(turn):
            if token + i >= tokens:
                for e in T.unroll(size):
                    raw_dy[i * size + e] = T.cast(0, raw_dy.dtype)


@T.macro
def add_dfinal(size, dring, place, dfinal, state_at, u, first_kept, width, has_dfinal, silu):
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
    for e in T.vectorized(size):
        out[e] = T.cast(values[place * size + e], x.dtype)
    if is_owned:
        for e in T.vectorized(size):
            x[at, e] = out[e]


@T.macro
def take_token(
    taps,
    size,
    turn,
    i,
    z,
    dz,
    ring,
    dring,
    raw,
    raw_dy,
    weight,
    bias,
    dweight,
    dbias,
    marks,
    origin: T.Ref,
    token,
    width,
    silu,
    is_general,
    is_owned,
):
    """Token `token`, the i-th of its round, into the ring, and what its dz gives into the sums."""
    reach = T.alloc_var("int32")
    if is_general:
        if (marks >> i & 1) != 0:
            origin = token
        reach = T.min(width, token - origin + 1)
    widen(size, ring, i % taps, raw, i)
    add_taps(taps, size, z, bias, weight, ring, i % taps, reach, is_general)
    differentiate(size, dz, z, raw_dy, i, silu)
    if is_general and (marks >> (turn + i) & 1) != 0:
        for e in T.unroll(size):
            dz[e] = 0.0
    spread(taps, size, dz, weight, ring, dring, dweight, dbias, i % taps, reach, is_general, is_owned)


def build_convolution_backward(dtype, taps, mode, shape=None):
    """The prim_func; arguments in README.md.

    mode: "exact" for the width `taps` and rows of one sequence each, "general" for widths up to it and any sequences,
    "states" for widths up to it and rows with states before and after.
    """
    is_general, has_states, shape = mode != "exact", mode == "states", shape or SHAPES[taps, mode == "exact"]
    size, turn, blocks = shape.size, shape.turn, shape.blocks_per_sm
    weight_count, entries, partial_vectors = (
        T.dynamic("weight_count"),
        T.dynamic("entries"),
        T.dynamic("partial_vectors"),
    )
    bias_count, wide_bias_count = T.dynamic("bias_count"), T.dynamic("wide_bias_count")
    wide_weight_count = T.dynamic("wide_weight_count")
    x_vectors, dy_vectors, dx_vectors = T.dynamic("x_vectors"), T.dynamic("dy_vectors"), T.dynamic("dx_vectors")
    initial_count, dinitial_count, dfinal_count = (
        T.dynamic("initial_count"),
        T.dynamic("dinitial_count"),
        T.dynamic("dfinal_count"),
    )

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
        partial: T.Tensor((partial_vectors, size), "float32"),
        batch: T.int32,
        tokens: T.int32,
        vectors: T.int32,
        row_vectors: T.int32,
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
        with T.Kernel(
            T.ceildiv(batch * T.ceildiv(tokens, tokens_per_thread) * vectors, THREADS), threads=THREADS
        ) as block:
            T.import_source(DEVICE_CODE)
            T.annotate_min_blocks_per_sm(blocks)
            weight, bias_local = T.alloc_local((taps * size,), "float32"), T.alloc_local((size,), "float32")
            dweight, dbias = T.alloc_local((taps * size,), "float32"), T.alloc_local((size,), "float32")
            ring, dring = T.alloc_local((taps * size,), "float32"), T.alloc_local((taps * size,), "float32")
            z, dz = T.alloc_local((size,), "float32"), T.alloc_local((size,), "float32")
            wide, raw_weight = T.alloc_local((FLOATS,), "float32"), T.alloc_local((taps * size,), dtype)
            raw_history = T.alloc_local(((taps - 1) * size,), dtype)
            raw, raw_dy = T.alloc_local((turn * size,), dtype), T.alloc_local((turn * size,), dtype)
            coming, coming_dy = T.alloc_local((turn * size,), dtype), T.alloc_local((turn * size,), dtype)
            out = T.alloc_local((size,), dtype)
            tile, vector, row, tiles, state_at, entry_at = (T.alloc_var("int32") for _ in range(6))
            first, stop, end, token, origin, previous, marks, u = (T.alloc_var("int32") for _ in range(8))
            scale = T.alloc_var("float32")
            x_at, dy_at, dx_at, partial_at = (T.alloc_var("int64") for _ in range(4))
            tile = T.truncdiv(block * THREADS + T.get_thread_binding(), vectors)
            vector = T.truncmod(block * THREADS + T.get_thread_binding(), vectors)
            tiles = T.truncdiv(tokens + tokens_per_thread - 1, tokens_per_thread)
            row = T.truncdiv(tile, tiles)
            first = T.truncmod(tile, tiles) * tokens_per_thread
            T.pdl_sync()
            if row < batch:
                stop = T.min(first + tokens_per_thread, tokens)
                end = T.min(stop + taps - 1, tokens)
                x_at = row * x_row + first * T.cast(x_token, "int64") + vector
                dy_at = row * dy_row + first * T.cast(dy_token, "int64") + vector
                dx_at = (row * T.cast(tokens, "int64") + first - (taps - 1)) * row_vectors + vector
                state_at = (row * row_vectors + vector) * size * (width - 1)
                entry_at = row * tokens
                load_history(taps, size, raw_history, x, x_at, x_token, first)
                for i in T.unroll(turn):
                    load_vector(size, raw, i, x, x_at)
                    load_vector(size, raw_dy, i, dy, dy_at)
                    if first + i + 1 < end:
                        x_at += x_token
                        dy_at += dy_token
                load_weights(
                    taps, size, raw_weight, wide, weight, weights, wide_weights, is_wide, vector, width, not is_general
                )
                load_bias(size, raw_weight, bias_local, bias, wide_bias, is_wide, vector, has_bias)
                place_history(taps, size, raw_history, ring, initial, state_at, first, width, has_initial)
                if is_general:
                    find_origin(taps, origin, previous, sequence, entry_at + first, first, is_packed)
                scale_weights(taps, size, weight, bias_local, silu)
                for i in T.unroll(taps * size):
                    dring[i] = 0.0
                    dweight[i] = 0.0
                for e in T.unroll(size):
                    dbias[e] = 0.0
                held = (z, dz, ring, dring, raw, raw_dy, weight, bias_local, dweight, dbias, marks, origin)
                kept = (tokens - width + 1, width, has_dfinal)
                for part in T.unroll(T.truncdiv(stop - first + turn - 1, turn), unroll_factor=1):
                    token = first + part * turn
                    for i in T.unroll(turn):
                        load_vector(size, coming, i, x, x_at)
                        load_vector(size, coming_dy, i, dy, dy_at)
                        if token + turn + i + 1 < end:
                            x_at += x_token
                            dy_at += dy_token
                    keep_order()
                    marks = 0
                    if is_general and is_packed != 0:
                        mark_tokens(turn, marks, previous, sequence, entry_at + token, end - token)
                    silence(size, turn, raw_dy, token, tokens)
                    is_plain = not is_general or (width == taps and marks == 0 and token - origin >= taps - 1)
                    for i in T.unroll(turn):
                        if is_plain:
                            take_token(taps, size, turn, i, *held, token + i, width, silu, False, True)
                        else:
                            take_token(taps, size, turn, i, *held, token + i, width, silu, True, True)
                        u = token + i - (taps - 1)
                        if has_states:
                            add_dfinal(size, dring, (i + 1) % taps, dfinal, state_at, u, *kept, silu)
                        write_vector(size, out, dring, (i + 1) % taps, dx, dx_at, u >= first and u < stop)
                        if has_states:
                            write_dinitial(size, out, dinitial, state_at, u, first, width, has_initial)
                        dx_at += row_vectors
                    for i in T.unroll(turn * size):
                        raw[i] = coming[i]
                        raw_dy[i] = coming_dy[i]
                # The tokens behind the tile, whose dz reach into it.
                token = first + T.truncdiv(stop - first + turn - 1, turn) * turn
                marks = 0
                if is_general and is_packed != 0:
                    mark_tokens(turn, marks, previous, sequence, entry_at + token, end - token)
                silence(size, turn, raw_dy, token, tokens)
                for i in T.unroll(taps - 1):
                    take_token(taps, size, turn, i, *held, token + i, width, silu, is_general, False)
                    u = token + i - (taps - 1)
                    if has_states:
                        add_dfinal(size, dring, (i + 1) % taps, dfinal, state_at, u, *kept, silu)
                    write_vector(size, out, dring, (i + 1) % taps, dx, dx_at, u >= first and u < stop)
                    if has_states:
                        write_dinitial(size, out, dinitial, state_at, u, first, width, has_initial)
                    dx_at += row_vectors
                scale = T.Select(silu != 0, LOG2_E, 1.0)
                for i in T.unroll(taps * size):
                    dweight[i] = dweight[i] * scale
                for e in T.unroll(size):
                    dbias[e] = dbias[e] * scale
                partial_at = T.cast(tile, "int64") * (taps + 1) * row_vectors + vector
                for j in T.unroll(taps):
                    for e in T.vectorized(size):
                        partial[partial_at + j * row_vectors, e] = dweight[j * size + e]
                for e in T.vectorized(size):
                    partial[partial_at + taps * row_vectors, e] = dbias[e]

    return convolution_backward
