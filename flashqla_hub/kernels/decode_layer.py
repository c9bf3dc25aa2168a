"""A decoded token of the GatedDeltaNet layer, everything between its projections, in one launch (SM90).

    q, k, v = act(convolution(x))         q <- q / |q|,  k <- k / |k|         g = -exp(A_log) softplus(a + dt_bias)
    d = sigmoid(b) (v - e^g S^T k)        S <- e^g S + k d^T                  o = scale S^T q
    y = weight * round(o / sqrt(mean(o^2) + eps)) * act(z)

Each step rounds as the kernel of its own does (convolution_update.py, decode.py, norm.py), and adds in its order: the bits are
theirs. States are float32 [K, V].

Reads        x [N, C], the queries, keys and values of a token · a b [N, HV] · z [N, HV 128] · the layer's parameters
Writes       y [N, HV, 128] · history [N, C, 4], the convolution's last inputs, and states [N, HV, ..], both in place

Blocks       parts of the value heads by sequences, as in decode.py. Those of a key head and its value heads are a cluster
Threads      first a channel each, or a few: the convolution of q and k, which every block of the cluster repeats, and of the
             block's values; then a strip of the state each, and what lies between is in shared memory. The loads of both come
             before anything waits. The norm is the work of the first warp: its lanes have the outputs
Cluster      two barriers, between whose halves there is work. Behind the first everybody has read the history of q and k,
             which a block or two move on then, and has begun, so that shared memory can be written from outside. Behind the
             second every block has the sums of squares of its whole head
Ahead        as in decode.py: the first blocks order states, history and parameters into the L2 cache before they wait for
             the kernel before
Registers    as in decode.py
"""

import tilelang.language as T

from ._convolution import FAST_GATE_CODE, LOG2_E, fast_gate
from ._decode_strip import (
    DEVICE_CODE,
    PRODUCTS,
    Strip,
    call,
    exp,
    load_states,
    prefetch_states,
    read_state,
    store_states,
    sum_over_warps,
    write_state,
)
from ._rows import EIGHT, GATE_FACTOR_CODE, LANES, gate_factor, sigmoid
from ._sm90 import BYTES, HEAD_DIM, WARP
from ._tile import Group

TAPS = 4  # width of the convolution, and tokens of its history
SHARED_CHANNELS = 2 * HEAD_DIM  # of q and k, which all blocks of a cluster convolve
CHANNELS_OF_LINE = 16  # whose histories, or weights, lie in a line of the L2 cache

PARAMETER_CODE = """
static __device__ __forceinline__ float bfloat16_entry(int word, bool is_wide, int index) {
  const int narrow = index % 2 == 0 ? word << 16 : word & 0xffff0000;
  return __int_as_float(is_wide ? word : narrow);
}

static __device__ __forceinline__ float float16_entry(int word, bool is_wide, int index) {
  float narrow;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}"
      : "=f"(narrow) : "r"(index % 2 == 0 ? word : word >> 16));
  return is_wide ? __int_as_float(word) : narrow;
}
"""

CLUSTER_CODE = """
// Orders no memory: what it stands for are loads whose values have been used.
static __device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

static __device__ __forceinline__ unsigned shared_address(const void* place) {
  return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

// A barrier that other blocks may send to once they have met this one.
static __device__ __forceinline__ void make_barrier(void* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The barrier opens when so many bytes have come.
static __device__ __forceinline__ void expect_bytes(void* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Stores to the place in a block of the cluster that `place` is in one's own, and tells its barrier.
static __device__ __forceinline__ void send(void* place, float value, void* barrier, int block) {
  asm volatile("{.reg .b32 there, barrier; mapa.shared::cluster.u32 there, %0, %3; mapa.shared::cluster.u32 barrier, %2, %3;"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [barrier];}"
               :: "r"(shared_address(place)), "f"(value), "r"(shared_address(barrier)), "r"(block) : "memory");
}

static __device__ __forceinline__ void wait_for_bytes(void* barrier) {
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; @!done bra again;}"
               :: "r"(shared_address(barrier)) : "memory");
}
"""


class Channels(Group):
    """What a thread loads of `count` channels of the convolution."""

    def __init__(self, count, dtype):
        self.newest, self.offset = T.alloc_local((count,), dtype), T.alloc_local((count,), dtype)
        self.past, self.factor = T.alloc_local((count * TAPS,), dtype), T.alloc_local((count * TAPS,), dtype)


@T.macro
def load_channel(c, i, x, history, weights, bias, sequence, channel):
    """Number i of a thread's channels: the new token, those before it, and the parameters."""
    for e in T.vectorized(TAPS):
        c.past[i * TAPS + e] = history[sequence, channel, e]
    for e in T.vectorized(TAPS):
        c.factor[i * TAPS + e] = weights[channel, e]
    c.newest[i] = x[sequence, channel]
    c.offset[i] = bias[channel]


@T.macro
def convolve(c, i, adds_bias, applies_silu, out, place):
    """out[place] = the convolution of a thread's channel, rounded."""
    total = T.alloc_var("float32")
    total = T.Select(adds_bias, T.cast(c.offset[i], "float32"), 0.0)
    total = total + T.cast(c.factor[i * TAPS + TAPS - 1], "float32") * T.cast(c.newest[i], "float32")
    for j in T.unroll(1, TAPS):
        total = total + T.cast(c.factor[i * TAPS + TAPS - 1 - j], "float32") * T.cast(
            c.past[i * TAPS + TAPS - j], "float32"
        )
    gate = fast_gate(total * LOG2_E) * LOG2_E
    out[place] = T.cast(total * T.Select(applies_silu, gate, 1.0), out.dtype)


@T.macro
def move_on(c, i, moved):
    """The history of a thread's channel behind the new token."""
    for j in T.unroll(TAPS - 1):
        moved[j] = c.past[i * TAPS + j + 1]
    moved[TAPS - 1] = c.newest[i]


def word_of(parameter, is_wide, index):
    """The word of a parameter, float32 or two numbers of 16 bits a word, that has an entry: one load whichever it is."""
    return parameter[T.Select(is_wide, index, index // 2)]


def value_of(dtype, word, is_wide, index):
    """The entry in its word."""
    return T.call_extern("float32", f"{dtype}_entry", word, is_wide, index)


@T.macro
def send_squares(layout, t, squares, arrived, lane, tile, first_block):
    """The sums of squares of every EIGHT outputs, one after the other as in norm.py, to all blocks of the head.

    The lanes of EIGHT outputs pass their sum on. Half a warp has the block's outputs, the other half has them again.
    """
    lanes = EIGHT // layout.values
    total, before, number = (T.alloc_var("float32") for _ in range(3))
    total = 0.0
    for turn in T.unroll(lanes):
        before = 0.0
        if turn > 0:
            before = T.shfl_up(total, 1)
        for e in T.unroll(layout.values):
            number = T.cast(t.o_raw[e], "float32")
            before = before + number * number
        total = T.Select(lane % lanes == turn, before, total)
    if lane < layout.run and lane % lanes == lanes - 1:
        for block in T.unroll(layout.tiles):
            call(
                "send",
                squares[tile * (layout.values_of_block // EIGHT) + lane // lanes],
                total,
                T.address_of(arrived[0]),
                first_block + block,
            )


@T.macro
def norm(layout, t, squares, factors, gates, eps, rounds, lane, out):
    """out = the lane's outputs through the gated norm; `squares` has those of the head. rounds: the products with the weight."""
    root, product = T.alloc_var("float32"), T.alloc_var("float32")
    root = squares[lane % LANES]
    for step in T.unroll(LANES.bit_length() - 1):
        root = root + T.shfl_xor(root, LANES >> (step + 1))
    root = T.rsqrt(root * (1.0 / HEAD_DIM) + eps)
    for e in T.unroll(layout.values):
        product = T.cast(T.cast(T.cast(t.o_raw[e], "float32") * root, out.dtype), "float32")
        product = product * factors[layout.first_value(0, 0, lane) + e]
        if rounds:
            product = T.cast(T.cast(product, out.dtype), "float32")
        out[e] = T.cast(product * gates[layout.first_value(0, 0, lane) + e], out.dtype)


def shared_channel(index, first_key, keys):
    """Channel of a head's q, which begins at `first_key`, or behind it of its k, `keys` channels later."""
    return first_key + index % HEAD_DIM + index // HEAD_DIM * keys


def build_decode_layer(dtype, layout):
    """The prim_func for 16-bit inputs of `dtype`; arguments in README.md."""
    threads, width = layout.warps * WARP, layout.values_of_block
    pieces = SHARED_CHANNELS // threads  # of the channels of q and k, one a thread
    sequences, channels, heads, values = (T.dynamic(name) for name in ("sequences", "channels", "heads", "values"))
    rate_words, bias_words, weight_words = (T.dynamic(name) for name in ("rate_words", "bias_words", "weight_words"))
    x_n, z_n, a_n, b_n = (T.dynamic(name, "int64") for name in ("x_n", "z_n", "a_n", "b_n"))

    @T.prim_func
    def decode_layer(
        x: T.StridedTensor((sequences, channels), (x_n, 1), dtype),
        history: T.Tensor((sequences, channels, TAPS), dtype),
        weights: T.Tensor((channels, TAPS), dtype),
        bias: T.Tensor((channels,), dtype),
        a: T.StridedTensor((sequences, heads), (a_n, 1), dtype),
        b: T.StridedTensor((sequences, heads), (b_n, 1), dtype),
        A_log: T.Tensor((rate_words,), "int32"),
        dt_bias: T.Tensor((bias_words,), "int32"),
        states: T.Tensor((sequences, heads, HEAD_DIM * HEAD_DIM), "float32"),
        z: T.StridedTensor((sequences, values), (z_n, 1), dtype),
        weight: T.Tensor((weight_words,), "int32"),
        y: T.Tensor((sequences, heads, HEAD_DIM), dtype),
        scale: T.float32,
        eps: T.float32,
        ahead: T.int32,
        heads_per_key: T.int32,
        cluster: T.int32,
        has_bias: T.int32,
        convolution_silu: T.int32,
        A_log_is_wide: T.int32,
        dt_bias_is_wide: T.int32,
        weight_is_wide: T.int32,
        is_silu: T.int32,
    ):
        with T.Kernel(heads * layout.tiles, sequences, threads=threads) as (block, sequence):
            T.annotate_min_blocks_per_sm(layout.blocks_per_sm)
            T.import_source(DEVICE_CODE + FAST_GATE_CODE + GATE_FACTOR_CODE + PARAMETER_CODE + CLUSTER_CODE)
            thread = T.get_thread_binding()
            warp, lane = thread // WARP, thread % WARP
            parts = T.alloc_shared((layout.pairs + 1, 2 * width + PRODUCTS + 1), "float32")
            mixed = T.alloc_shared((SHARED_CHANNELS + width,), dtype)  # q, k and the block's values
            kept = T.alloc_shared((threads * TAPS,), dtype)  # a thread's history, until it may be written
            gates, factors = T.alloc_shared((width,), "float32"), T.alloc_shared((width,), "float32")
            squares, arrived = T.alloc_shared((LANES,), "float32"), T.alloc_shared((1,), "int64")
            t, shared, own = Strip(layout, dtype), Channels(pieces, dtype), Channels(1, dtype)
            moved, out = T.alloc_local((TAPS,), dtype), T.alloc_local((layout.values,), dtype)
            tile, head, key_head, part, value = (T.alloc_var("int32") for _ in range(5))
            first_key, keys, first_value = (T.alloc_var("int32") for _ in range(3))
            rate_word, bias_word, weight_word = (T.alloc_var("int32") for _ in range(3))
            decay_raw, strength_raw, gate_raw = (T.alloc_local((1,), dtype) for _ in range(3))
            decay, strength, gate, silu = (T.alloc_var("float32") for _ in range(4))
            if layout.yields_late:
                if heads * sequences <= layout.heads_side_by_side:
                    T.pdl_trigger()
            else:
                T.pdl_trigger()
            tile, head = block % layout.tiles, block // layout.tiles
            key_head = T.truncdiv(head, heads_per_key)
            part, value = block - key_head * cluster, tile * width + thread % width
            first_key, keys = key_head * HEAD_DIM, T.truncdiv(channels - heads * HEAD_DIM, 2)
            first_value = 2 * keys + head * HEAD_DIM
            if sequence < ahead:
                prefetch_states(layout, states, sequence, head, tile, thread)
                if thread < SHARED_CHANNELS // CHANNELS_OF_LINE:
                    channel = shared_channel(thread * CHANNELS_OF_LINE, first_key, keys)
                    call("prefetch_line", history[sequence, channel, 0])
                    call("prefetch_line", weights[channel, 0])
                elif thread < (SHARED_CHANNELS + width) // CHANNELS_OF_LINE:
                    channel = first_value + tile * width + thread * CHANNELS_OF_LINE - SHARED_CHANNELS
                    call("prefetch_line", history[sequence, channel, 0])
                    call("prefetch_line", weights[channel, 0])
                elif thread == WARP:
                    call("prefetch_line", A_log[T.Select(A_log_is_wide != 0, head, head // 2)])
                    call("prefetch_line", dt_bias[T.Select(dt_bias_is_wide != 0, head, head // 2)])
                    call("prefetch_line", weight[T.Select(weight_is_wide != 0, value, value // 2)])
            T.pdl_sync()
            # All loads, without a branch between them: before one, the compiler would wait for what it may convert.
            for piece in T.unroll(pieces):
                channel = shared_channel(piece * threads + thread, first_key, keys)
                load_channel(shared, piece, x, history, weights, bias, sequence, channel)
            load_channel(own, 0, x, history, weights, bias, sequence, first_value + value)
            gate_raw[0] = z[sequence, head * HEAD_DIM + value]
            weight_word = word_of(weight, weight_is_wide != 0, value)
            rate_word, bias_word = (
                word_of(A_log, A_log_is_wide != 0, head),
                word_of(dt_bias, dt_bias_is_wide != 0, head),
            )
            decay_raw[0], strength_raw[0] = a[sequence, head], b[sequence, head]
            load_states(layout, t, states, sequence, head, tile, warp, lane)
            for piece in T.unroll(pieces):
                convolve(shared, piece, has_bias != 0, convolution_silu != 0, mixed, piece * threads + thread)
            move_on(shared, 0, moved)
            if pieces > 1:
                if part == 1:
                    move_on(shared, pieces - 1, moved)
            for e in T.vectorized(TAPS):
                kept[thread * TAPS + e] = moved[e]
            if thread < width:
                convolve(own, 0, has_bias != 0, convolution_silu != 0, mixed, SHARED_CHANNELS + thread)
                move_on(own, 0, moved)
                T.stg64(history[sequence, first_value + value, 0], T.reinterpret(moved[T.Ramp(0, 1, TAPS)], "uint32x2"))
                gate, silu = T.cast(gate_raw[0], "float32"), T.cast(is_silu, "float32")
                gates[thread] = sigmoid(gate) * gate_factor(gate, silu)
                factors[thread] = value_of(dtype, weight_word, weight_is_wide != 0, value)
            if thread == 0:
                call("make_barrier", arrived[0])
            T.sync_threads()
            if thread == 0:
                call("expect_bytes", arrived[0], LANES * BYTES["float32"])
            T.evaluate(T.call_extern("handle", "arrive_at_cluster"))
            for e in T.unroll(layout.keys // EIGHT):
                for i in T.vectorized(EIGHT):
                    t.q_raw[e * EIGHT + i] = mixed[layout.first_key(warp, lane) + e * EIGHT + i]
                for i in T.vectorized(EIGHT):
                    t.k_raw[e * EIGHT + i] = mixed[HEAD_DIM + layout.first_key(warp, lane) + e * EIGHT + i]
            for e in T.vectorized(layout.values):
                t.v_raw[e] = mixed[SHARED_CHANNELS + layout.first_value(0, warp, lane) + e]
            decay = T.cast(decay_raw[0], "float32") + value_of(dtype, bias_word, dt_bias_is_wide != 0, head)
            decay = -exp(value_of(dtype, rate_word, A_log_is_wide != 0, head)) * T.call_extern(
                "float32", "softplus", decay
            )
            strength = sigmoid(T.cast(strength_raw[0], "float32"))
            read_state(layout, t)
            if layout.yields_late:
                T.pdl_trigger()
            sum_over_warps(layout, t, parts, thread, warp, lane)
            write_state(layout, t, exp(decay), strength, scale, 1)
            T.evaluate(T.call_extern("handle", "wait_for_cluster"))
            if warp == 0:
                send_squares(layout, t, squares, arrived, lane, tile, part - tile)
            store_states(layout, t, states, sequence, head, tile, warp, lane)
            if part < pieces:
                for e in T.vectorized(TAPS):
                    moved[e] = kept[thread * TAPS + e]
                T.stg64(
                    history[sequence, shared_channel(part * threads + thread, first_key, keys), 0],
                    T.reinterpret(moved[T.Ramp(0, 1, TAPS)], "uint32x2"),
                )
            if warp == 0:
                call("wait_for_bytes", arrived[0])
                norm(layout, t, squares, factors, gates, eps, weight_is_wide == 0, lane, out)
                if layout.writes(warp, lane):
                    for e in T.vectorized(layout.values):
                        y[sequence, head, layout.first_value(tile, warp, lane) + e] = out[e]

    return decode_layer
