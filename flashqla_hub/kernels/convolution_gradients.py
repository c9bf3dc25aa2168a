"""Gradients of the convolution's weights and bias from the sums over tiles (SM90).

    dweight[W - 1 - j] = sum_tile partial[tile, j]                       dbias = sum_tile partial[tile, taps]

Reads        partial [tiles, taps + 1, D] f32
Writes       dweight [D W] · dbias [D]

Block        a warp's width of channels of one row of `partial`. Warp g adds the tiles g, g + GROUPS, ... in order, and the
             first warp adds the results of all in order.
"""

import tilelang.language as T

from ._sm90 import WARP

GROUPS = 16  # warps


def build_convolution_gradients(dtype):
    """The prim_func; arguments in README.md."""
    tiles, rows, channels = T.dynamic("tiles"), T.dynamic("rows"), T.dynamic("channels")
    weight_count, bias_count = T.dynamic("weight_count"), T.dynamic("bias_count")

    @T.prim_func
    def convolution_gradients(
        partial: T.Tensor((tiles, rows, channels), "float32"),
        dweight: T.Tensor((weight_count,), dtype),
        dbias: T.Tensor((bias_count,), dtype),
        width: T.int32,
        has_bias: T.int32,
    ):
        with T.Kernel(T.ceildiv(channels, WARP), width + has_bias, threads=GROUPS * WARP) as (part, index):
            sums = T.alloc_shared((GROUPS, WARP), "float32")
            total = T.alloc_var("float32")
            channel, row, lane, group = (T.alloc_var("int32") for _ in range(4))
            lane, group = T.truncmod(T.get_thread_binding(), WARP), T.truncdiv(T.get_thread_binding(), WARP)
            channel = part * WARP + lane
            row = T.Select(index < width, index, rows - 1)
            total = 0.0
            T.pdl_sync()
            if channel < channels:
                for turn in T.serial(T.truncdiv(tiles - group + GROUPS - 1, GROUPS)):
                    total += partial[group + turn * GROUPS, row, channel]
            sums[group, lane] = total
            T.sync_threads()
            if group == 0 and channel < channels:
                for other in T.unroll(1, GROUPS):
                    total += sums[other, lane]
                if index < width:
                    dweight[channel * width + width - 1 - index] = T.cast(total, dtype)
                else:
                    dbias[channel] = T.cast(total, dtype)

    return convolution_gradients
