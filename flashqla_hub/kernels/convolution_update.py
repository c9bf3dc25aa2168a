"""The short depthwise causal convolution of a few new tokens, with the earlier ones in a state that it moves on (SM90).

    extended = state, x          y[t] = act(bias + sum_{j < W} weight[W - 1 - j] extended[S + t - j])          state = its last S

Reads        x [B, D, T] of any strides · weights [D, W] · bias [D] · rows [B] int32
Writes       y [B, D, T] of any strides · state [N, D, S] of any strides, in place

Thread       a channel of a row. Row b has the state rows[b], or b; a negative one is left alone, and y of that row is 0.
             A channel's state is read before it is written, from the oldest token on.
"""

import tilelang.language as T

from ._convolution import DEVICE_CODE, LOG2_E, fast_gate

THREADS = 128


@T.macro
def move_state(state, x, slot, row, channel, length, count):
    """state[s] = extended[s + count], in place."""
    for s in T.serial(length):
        if s + count < length:
            state[slot, channel, s] = state[slot, channel, s + count]
        else:
            state[slot, channel, s] = x[row, channel, s + count - length]


@T.macro
def load_channel(taps, weight, weights, wide_weights, is_wide, channel, width):
    """weight[j] multiplies the token j before; 0 for j >= width."""
    for j in T.unroll(taps):
        weight[j] = 0.0
        if j < width:
            if is_wide != 0:
                weight[j] = wide_weights[channel * width + width - 1 - j]
            else:
                weight[j] = T.cast(weights[channel * width + width - 1 - j], "float32")


def build_convolution_update(dtype, taps):
    """The prim_func for widths up to `taps`; arguments in README.md."""
    batch, channels, count = T.dynamic("batch"), T.dynamic("channels"), T.dynamic("count")
    slots, length = T.dynamic("slots"), T.dynamic("length")
    weight_count, bias_count, row_count = T.dynamic("weight_count"), T.dynamic("bias_count"), T.dynamic("row_count")
    wide_weight_count, wide_bias_count = T.dynamic("wide_weight_count"), T.dynamic("wide_bias_count")
    x_b, x_d, x_t = (T.dynamic(name, "int64") for name in ("x_b", "x_d", "x_t"))
    y_b, y_d, y_t = (T.dynamic(name, "int64") for name in ("y_b", "y_d", "y_t"))
    s_n, s_d, s_t = (T.dynamic(name, "int64") for name in ("s_n", "s_d", "s_t"))

    @T.prim_func
    def convolution_update(
        x: T.StridedTensor((batch, channels, count), (x_b, x_d, x_t), dtype),
        state: T.StridedTensor((slots, channels, length), (s_n, s_d, s_t), dtype),
        weights: T.Tensor((weight_count,), dtype),
        bias: T.Tensor((bias_count,), dtype),
        wide_weights: T.Tensor((wide_weight_count,), "float32"),
        wide_bias: T.Tensor((wide_bias_count,), "float32"),
        rows: T.Tensor((row_count,), "int32"),
        y: T.StridedTensor((batch, channels, count), (y_b, y_d, y_t), dtype),
        width: T.int32,
        is_wide: T.int32,
        has_bias: T.int32,
        has_rows: T.int32,
        silu: T.int32,
    ):
        with T.Kernel(T.ceildiv(channels, THREADS), batch, threads=THREADS) as (part, row):
            T.import_source(DEVICE_CODE)
            weight, ring = T.alloc_local((taps,), "float32"), T.alloc_local((taps,), "float32")
            channel, slot = T.alloc_var("int32"), T.alloc_var("int32")
            offset, z, gate = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
            channel = part * THREADS + T.get_thread_binding()
            slot = row
            if has_rows != 0:
                slot = rows[row]
            if channel < channels:
                if slot < 0 or slot >= slots:
                    for t in T.serial(count):
                        y[row, channel, t] = T.cast(0, dtype)
                else:
                    load_channel(taps, weight, weights, wide_weights, is_wide, channel, width)
                    offset = 0.0
                    if has_bias != 0:
                        if is_wide != 0:
                            offset = wide_bias[channel]
                        else:
                            offset = T.cast(bias[channel], "float32")
                    for j in T.unroll(taps):
                        ring[j] = 0.0
                        if j > 0 and j < width:
                            ring[j] = T.cast(state[slot, channel, length - j], "float32")
                    for t in T.serial(count):
                        ring[0] = T.cast(x[row, channel, t], "float32")
                        z = offset
                        for j in T.unroll(taps):
                            if j < width:
                                z = z + weight[j] * ring[j]
                        for j in T.unroll(taps - 1):
                            ring[taps - 1 - j] = ring[taps - 2 - j]
                        gate = fast_gate(z * LOG2_E) * LOG2_E
                        y[row, channel, t] = T.cast(z * T.Select(silu != 0, gate, 1.0), dtype)
                    move_state(state, x, slot, row, channel, length, count)

    return convolution_update
