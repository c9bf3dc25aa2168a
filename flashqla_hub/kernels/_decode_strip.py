"""What a thread of the decode kernel does with its strip of a state: loads and stores, and the two passes of a token."""

import tilelang.language as T

from ._decode_tiles import GROUP
from ._prefetch import PREFETCH_CODE, call
from ._sm90 import BYTES, HEAD_DIM, L2NORM_EPS, WARP
from ._tile import Group

KK, QQ, KQ = range(3)  # products of a token's q and k
PRODUCTS = 3
LOG2_E = 1.4426950408889634

DEVICE_CODE = (
    """
static __device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

static __device__ __forceinline__ float inverse(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), and log(1 + e) = 2 artanh(e / (2 + e)), whose series ends here at 2^-26 of it.
// There is no branch in it, so it is done while the state is on its way.
static __device__ __forceinline__ float softplus(float x) {
  const float power = power_of_two(-1.4426950408889634f * fabsf(x));
  const float share = power * inverse(2.0f + power), square = share * share;
  float series = 1.0f / 15;
#pragma unroll
  for (int n = 13; n > 1; n -= 2) series = fmaf(series, square, 1.0f / n);
  return fmaf(2.0f * share * square, series, fmaf(2.0f, share, fmaxf(x, 0.0f)));
}

static __device__ __forceinline__ float sigmoid(float x) {
  return inverse(1.0f + power_of_two(-1.4426950408889634f * x));
}
"""
    + PREFETCH_CODE
    + """
static __device__ __forceinline__ void zero_column(void* first, int rows, long stride) {
  unsigned short* place = static_cast<unsigned short*>(first);
#pragma unroll 1
  for (int row = 0; row < rows; row++, place += stride) *place = 0;
}
"""
)


class Strip(Group):
    """Registers of a thread: its numbers of the state, its parts of a token, and what it reads from the state."""

    def __init__(self, layout, dtype):
        self.S = T.alloc_local((layout.numbers,), "float32")
        self.k_raw, self.q_raw = T.alloc_local((layout.keys,), dtype), T.alloc_local((layout.keys,), dtype)
        self.v_raw, self.o_raw = T.alloc_local((layout.values,), dtype), T.alloc_local((layout.values,), dtype)
        self.read_k = T.alloc_local((layout.groups * layout.values,), "float32")
        self.read_q = T.alloc_local((layout.groups * layout.values,), "float32")
        self.products = T.alloc_local((layout.groups * PRODUCTS,), "float32")


class Number(Group):
    """A number of 16 or 32 bits as loaded; converting it would wait for it."""

    def __init__(self, dtype):
        self.narrow, self.wide = T.alloc_local((1,), dtype), T.alloc_local((1,), "float32")


def value_of(number, is_wide):
    return T.Select(is_wide != 0, number.wide[0], T.cast(number.narrow[0], "float32"))


def exp(x):
    return T.exp2(LOG2_E * x)


@T.macro
def load_number(number, narrow, wide, takes_wide, *index):
    """One number from the one of two tensors that holds it."""
    if takes_wide:
        number.wide[0] = wide[index]
    else:
        number.narrow[0] = narrow[index]


@T.macro
def load_states(layout, t, states, slot, head, tile, warp, lane):
    """The thread's numbers of the state of one head."""
    part = T.alloc_local((layout.numbers,), states.dtype)
    for access in T.unroll(layout.accesses):
        for e in T.vectorized(layout.columns):
            part[access * layout.columns + e] = states[slot, head, layout.offset(access, tile, warp, lane) + e]
    for n in T.unroll(layout.numbers):
        t.S[n] = T.cast(part[n], "float32")


@T.macro
def store_states(layout, t, states, slot, head, tile, warp, lane):
    """The thread's numbers back to the state of one head, an access at once."""
    words = layout.columns * BYTES[states.dtype] // 4
    store = {2: T.stg64, 4: T.stg128}[words]
    part = T.alloc_local((layout.numbers,), states.dtype)
    for n in T.unroll(layout.numbers):
        part[n] = T.cast(t.S[n], states.dtype)
    for access in T.unroll(layout.accesses):
        store(
            states[slot, head, layout.offset(access, tile, warp, lane)],
            T.reinterpret(part[T.Ramp(access * layout.columns, 1, layout.columns)], f"uint32x{words}"),
        )


@T.macro
def load_token(layout, t, q, k, v, token, key_head, head, tile, warp, lane):
    """The thread's parts of a token's q, k and v, as they are."""
    for piece in T.unroll(layout.keys // layout.key_width):
        for e in T.vectorized(layout.key_width):
            t.k_raw[piece * layout.key_width + e] = k[
                token, key_head, layout.first_key(warp, lane) + layout.piece(piece) + e
            ]
        for e in T.vectorized(layout.key_width):
            t.q_raw[piece * layout.key_width + e] = q[
                token, key_head, layout.first_key(warp, lane) + layout.piece(piece) + e
            ]
    for e in T.vectorized(layout.values):
        t.v_raw[e] = v[token, head, layout.first_value(tile, warp, lane) + e]


@T.macro
def prefetch_states(layout, states, slot, head, tile, thread):
    """Brings the block's part of a state into the L2 cache."""
    for turn in T.unroll((layout.lines + layout.warps * WARP - 1) // (layout.warps * WARP)):
        if turn * layout.warps * WARP + thread < layout.lines:
            call("prefetch_line", states[slot, head, layout.line(turn * layout.warps * WARP + thread, tile)])


@T.macro
def prefetch_token(q, k, v, token, key_head, head, thread):
    """Brings a token's rows of q, k and v into the L2 cache: two lines each, one a thread."""
    if thread < 2:
        call("prefetch_line", q[token, key_head, thread * (HEAD_DIM // 2)])
        call("prefetch_line", k[token, key_head, thread * (HEAD_DIM // 2)])
        call("prefetch_line", v[token, head, thread * (HEAD_DIM // 2)])


@T.macro
def read_state(layout, t):
    """read_k = S^T k, read_q = S^T q and the products of q and k, summed over the keys of the warp."""
    for group in T.unroll(layout.groups):
        for e in T.unroll(layout.values):
            t.read_k[group * layout.values + e] = 0.0
            t.read_q[group * layout.values + e] = 0.0
        for e in T.unroll(PRODUCTS):
            t.products[group * PRODUCTS + e] = 0.0
    key, query = T.alloc_var("float32"), T.alloc_var("float32")
    for e in T.unroll(layout.keys):
        key = T.cast(t.k_raw[e], "float32")
        query = T.cast(t.q_raw[e], "float32")
        group = e // GROUP if layout.groups > 1 else 0
        t.products[group * PRODUCTS + KK] += key * key
        t.products[group * PRODUCTS + QQ] += query * query
        t.products[group * PRODUCTS + KQ] += key * query
        for value in T.unroll(layout.values):
            t.read_k[group * layout.values + value] += t.S[layout.number(e, value)] * key
            t.read_q[group * layout.values + value] += t.S[layout.number(e, value)] * query
    for group in T.unroll(1, layout.groups):
        for e in T.unroll(layout.values):
            t.read_k[e] += t.read_k[group * layout.values + e]
            t.read_q[e] += t.read_q[group * layout.values + e]
        for e in T.unroll(PRODUCTS):
            t.products[e] += t.products[group * PRODUCTS + e]
    if len(layout.steps) > 0:
        for step in T.unroll(len(layout.steps)):
            for e in T.unroll(layout.values):
                t.read_k[e] += T.shfl_xor(t.read_k[e], layout.steps[0] << step)
                t.read_q[e] += T.shfl_xor(t.read_q[e], layout.steps[0] << step)
            for e in T.unroll(PRODUCTS):
                t.products[e] += T.shfl_xor(t.products[e], layout.steps[0] << step)


@T.macro
def sum_over_warps(layout, t, parts, thread, warp, lane):
    """Adds what pairs of groups give, in their order: a thread adds one number of all pairs, then everybody takes the sums."""
    width, threads, lanes = layout.values_of_block, layout.warps * WARP, layout.run * layout.lanes_of_pair
    count = 2 * width + PRODUCTS
    total, pair = T.alloc_var("float32"), T.alloc_var("int32")
    pair = thread // lanes
    if lane % lanes < layout.run:
        for e in T.vectorized(layout.values):
            parts[pair, layout.first_value(0, warp, lane) + e] = t.read_k[e]
        for e in T.vectorized(layout.values):
            parts[pair, width + layout.first_value(0, warp, lane) + e] = t.read_q[e]
    if lane % lanes == 0:
        for e in T.unroll(PRODUCTS):
            parts[pair, 2 * width + e] = t.products[e]
    T.sync_threads()
    for turn in T.unroll((count + threads - 1) // threads):
        if turn * threads + thread < count:
            total = parts[0, turn * threads + thread]
            for other in T.unroll(1, layout.pairs):
                total += parts[other, turn * threads + thread]
            parts[layout.pairs, turn * threads + thread] = total
    T.sync_threads()
    for e in T.vectorized(layout.values):
        t.read_k[e] = parts[layout.pairs, layout.first_value(0, warp, lane) + e]
    for e in T.vectorized(layout.values):
        t.read_q[e] = parts[layout.pairs, width + layout.first_value(0, warp, lane) + e]
    for e in T.unroll(PRODUCTS):
        t.products[e] = parts[layout.pairs, 2 * width + e]


@T.macro
def write_state(layout, t, decay, beta, scale, use_l2norm):
    """The delta rule on the thread's numbers; leaves the token's outputs in `o_raw`."""
    k_norm, q_norm = T.alloc_var("float32"), T.alloc_var("float32")
    k_norm, q_norm = 1.0, 1.0
    if use_l2norm != 0:
        k_norm = T.rsqrt(t.products[KK] + L2NORM_EPS)
        q_norm = T.rsqrt(t.products[QQ] + L2NORM_EPS)
    for e in T.unroll(layout.values):
        t.read_k[e] = beta * (T.cast(t.v_raw[e], "float32") - decay * k_norm * t.read_k[e])
        t.read_q[e] = decay * t.read_q[e] + k_norm * t.products[KQ] * t.read_k[e]
        t.o_raw[e] = T.cast(scale * q_norm * t.read_q[e], t.o_raw.dtype)
        t.read_k[e] *= k_norm
    for e in T.unroll(layout.keys):
        for value in T.unroll(layout.values):
            n = layout.number(e, value)
            t.S[n] = decay * t.S[n] + T.cast(t.k_raw[e], "float32") * t.read_k[value]


@T.macro
def zero_rows(layout, o, begin, end, head, heads, tile, thread):
    """Rows [begin, end) of o in the block's tile."""
    width = layout.values_of_block
    if thread < width and begin < end:
        call("zero_column", o[begin, head, tile * width + thread], end - begin, heads * HEAD_DIM)
