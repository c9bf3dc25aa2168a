"""Gated delta rule, token by token: a few tokens of many sequences, as in generation, in one launch (SM90).

Per token and value head, with the state S [K, V], g the log decay, and k and q normalised if asked:

    d = beta (v - e^g S^T k)      S <- e^g S + k d^T      o = scale (e^g S^T q + (k . q) d)

A state is read once, stays in registers for all tokens of its sequence, and is written once. Both products with it are
taken before it changes, so that a token costs one exchange between the threads
that share its values.

Reads        q k [T, H, 128] · v [T, HV, 128] · g beta [T, HV] raw or activated · A_log dt_bias [HV] · states [slots, HV, ..]
Writes       o [T, HV, 128], zeros where no sequence is or its slot is none · states, in place or elsewhere

Blocks       tiles of the value heads by sequences
Threads      a strip of the state each, in accesses of 16 bytes (`_decode_tiles.py`). What is loaded first: the state, then the
             token, then its gates and the head's parameters, and only then is anything waited for. A block may begin
             while the kernel before it on the stream ends (programmatic launch), and lets the next one begin
"""

import tilelang.language as T

from ._decode_tiles import DecodeLayout
from ._gate_math import sigmoid, softplus
from ._sm90 import HEAD_DIM, L2NORM_EPS, WARP
from ._tile import Group

ROW_ALIGNMENT = 8  # elements: strides are whole units of 16 bytes
SEQUENCES = 32768  # on the second axis of the grid, which CUDA bounds at 65535
KK, QQ, KQ = range(3)  # products of a token's q and k
PRODUCTS = 3


class Strip(Group):
    """Registers of a thread: its numbers of the state, its parts of a token, and what it reads from the state."""

    def __init__(self, layout, dtype):
        self.S = T.alloc_local((layout.numbers,), "float32")
        self.k_raw, self.q_raw = T.alloc_local((layout.keys,), dtype), T.alloc_local((layout.keys,), dtype)
        self.v_raw, self.o_raw = T.alloc_local((layout.values,), dtype), T.alloc_local((layout.values,), dtype)
        self.read_k = T.alloc_local((layout.values,), "float32")
        self.read_q = T.alloc_local((layout.values,), "float32")
        self.products = T.alloc_local((PRODUCTS,), "float32")


class Number(Group):
    """A number of 16 or 32 bits as loaded; converting it would wait for it."""

    def __init__(self, dtype):
        self.narrow, self.wide = T.alloc_local((1,), dtype), T.alloc_local((1,), "float32")


def value_of(number, is_wide):
    return T.Select(is_wide != 0, number.wide[0], T.cast(number.narrow[0], "float32"))


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
    """The thread's numbers back to the state of one head."""
    part = T.alloc_local((layout.numbers,), states.dtype)
    for n in T.unroll(layout.numbers):
        part[n] = T.cast(t.S[n], states.dtype)
    for access in T.unroll(layout.accesses):
        T.stg128(
            states[slot, head, layout.offset(access, tile, warp, lane)],
            T.reinterpret(part[T.Ramp(access * layout.columns, 1, layout.columns)], "uint32x4"),
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
def read_state(layout, t):
    """read_k = S^T k, read_q = S^T q and the products of q and k, summed over the keys of the warp."""
    for e in T.unroll(layout.values):
        t.read_k[e] = 0.0
        t.read_q[e] = 0.0
    for e in T.unroll(PRODUCTS):
        t.products[e] = 0.0
    key, query = T.alloc_var("float32"), T.alloc_var("float32")
    for e in T.unroll(layout.keys):
        key = T.cast(t.k_raw[e], "float32")
        query = T.cast(t.q_raw[e], "float32")
        t.products[KK] += key * key
        t.products[QQ] += query * query
        t.products[KQ] += key * query
        for value in T.unroll(layout.values):
            t.read_k[value] += t.S[layout.number(e, value)] * key
            t.read_q[value] += t.S[layout.number(e, value)] * query
    for step in T.unroll(len(layout.steps)):
        for e in T.unroll(layout.values):
            t.read_k[e] += T.shfl_xor(t.read_k[e], layout.steps[0] << step)
            t.read_q[e] += T.shfl_xor(t.read_q[e], layout.steps[0] << step)
        for e in T.unroll(PRODUCTS):
            t.products[e] += T.shfl_xor(t.products[e], layout.steps[0] << step)


@T.macro
def sum_over_warps(layout, t, read, products, buffer, warp, lane):
    """Adds what the warps have read, in their order; `buffer` alternates, so that one barrier a token is enough."""
    if lane < layout.run:
        for e in T.vectorized(layout.columns):
            read[buffer, warp, 0, lane * layout.columns + e] = t.read_k[e]
        for e in T.vectorized(layout.columns):
            read[buffer, warp, 1, lane * layout.columns + e] = t.read_q[e]
    if lane == 0:
        for e in T.unroll(PRODUCTS):
            products[buffer, warp, e] = t.products[e]
    T.sync_threads()
    for e in T.unroll(layout.columns):
        t.read_k[e] = read[buffer, 0, 0, (lane % layout.run) * layout.columns + e]
        t.read_q[e] = read[buffer, 0, 1, (lane % layout.run) * layout.columns + e]
    for e in T.unroll(PRODUCTS):
        t.products[e] = products[buffer, 0, e]
    for part in T.unroll(1, layout.warps):
        for e in T.unroll(layout.columns):
            t.read_k[e] += read[buffer, part, 0, (lane % layout.run) * layout.columns + e]
            t.read_q[e] += read[buffer, part, 1, (lane % layout.run) * layout.columns + e]
        for e in T.unroll(PRODUCTS):
            t.products[e] += products[buffer, part, e]


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
def zero_rows(layout, o, begin, end, head, tile, thread):
    """Rows [begin, end) of o in the block's tile."""
    width = layout.values_of_block
    if thread < width:
        for row in T.serial(T.max(0, end - begin)):
            o[begin + row, head, tile * width + thread] = T.cast(0, o.dtype)


def build_decode(dtype, v_first, state_dtype):
    """The prim_func for q, k, v of `dtype` and states of `state_dtype`; arguments in README.md."""
    layout = DecodeLayout(v_first, state_dtype)
    tokens, key_heads, heads, slots = (T.dynamic(name) for name in ("tokens", "key_heads", "heads", "slots"))
    words, index_words = T.dynamic("words"), T.dynamic("index_words")
    q_t, q_h, k_t, k_h, v_t, v_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"))
    g_t, beta_t = T.dynamic("g_t", "int64"), T.dynamic("beta_t", "int64")

    def offset(cu_words, index, words_per_entry, dense_length):
        """First token of a sequence, inside the tensors whatever the offsets are."""
        packed = T.max(0, T.min(cu_words[index * words_per_entry], tokens))
        return T.if_then_else(dense_length >= 0, index * dense_length, packed)

    @T.prim_func
    def decode(
        q: T.StridedTensor((tokens, key_heads, HEAD_DIM), (q_t, q_h, 1), dtype),
        k: T.StridedTensor((tokens, key_heads, HEAD_DIM), (k_t, k_h, 1), dtype),
        v: T.StridedTensor((tokens, heads, HEAD_DIM), (v_t, v_h, 1), dtype),
        g: T.StridedTensor((tokens, heads), (g_t, 1), dtype),
        wide_g: T.StridedTensor((tokens, heads), (g_t, 1), "float32"),
        beta: T.StridedTensor((tokens, heads), (beta_t, 1), dtype),
        wide_beta: T.StridedTensor((tokens, heads), (beta_t, 1), "float32"),
        A_log: T.Tensor((heads,), dtype),
        wide_A_log: T.Tensor((heads,), "float32"),
        dt_bias: T.Tensor((heads,), dtype),
        wide_dt_bias: T.Tensor((heads,), "float32"),
        cu_words: T.Tensor((words,), "int32"),
        indices: T.Tensor((index_words,), "int32"),
        states: T.Tensor((slots, heads, HEAD_DIM * HEAD_DIM), state_dtype),
        new_states: T.Tensor((slots, heads, HEAD_DIM * HEAD_DIM), state_dtype),
        o: T.Tensor((tokens, heads, HEAD_DIM), dtype),
        scale: T.float32,
        strength: T.float32,
        sequences: T.int32,
        dense_length: T.int32,
        words_per_entry: T.int32,
        words_per_index: T.int32,
        g_is_wide: T.int32,
        beta_is_wide: T.int32,
        A_log_is_wide: T.int32,
        dt_bias_is_wide: T.int32,
        use_l2norm: T.int32,
        use_gate: T.int32,
        use_sigmoid: T.int32,
        has_dt_bias: T.int32,
        has_initial: T.int32,
        write_final: T.int32,
    ):
        with T.Kernel(
            heads * layout.tiles,
            T.min(sequences, SEQUENCES),
            T.truncdiv(sequences + SEQUENCES - 1, SEQUENCES),
            threads=layout.warps * WARP,
        ) as (block, row, sheet):
            T.annotate_min_blocks_per_sm(layout.blocks_per_sm)
            T.assume(q_t % ROW_ALIGNMENT == 0)
            T.assume(q_h % ROW_ALIGNMENT == 0)
            T.assume(k_t % ROW_ALIGNMENT == 0)
            T.assume(k_h % ROW_ALIGNMENT == 0)
            T.assume(v_t % ROW_ALIGNMENT == 0)
            T.assume(v_h % ROW_ALIGNMENT == 0)
            thread = T.get_thread_binding()
            warp, lane = thread // WARP, thread % WARP
            read = T.alloc_shared((2, layout.warps, 2, layout.values_of_warp), "float32")
            products = T.alloc_shared((2, layout.warps, PRODUCTS), "float32")
            t = Strip(layout, dtype)
            gate_raw, beta_raw, rate_raw, bias_raw = Number(dtype), Number(dtype), Number(dtype), Number(dtype)
            tile, head, sequence, key_head = (T.alloc_var("int32") for _ in range(4))
            first, length, slot, token = (T.alloc_var("int32") for _ in range(4))
            gate, opening = T.alloc_var("float32"), T.alloc_var("float32")
            tile, head = block % layout.tiles, block // layout.tiles
            sequence = sheet * SEQUENCES + row
            T.pdl_trigger()
            T.pdl_sync()
            if sequence < sequences:
                slot = T.if_then_else(words_per_index != 0, indices[sequence * words_per_index], sequence)
                first = offset(cu_words, sequence, words_per_entry, dense_length)
                length = T.max(0, offset(cu_words, sequence + 1, words_per_entry, dense_length) - first)
                if slot < 0 or slot >= slots:
                    zero_rows(layout, o, first, first + length, head, tile, thread)
                else:
                    if has_initial != 0:
                        load_states(layout, t, states, slot, head, tile, warp, lane)
                    else:
                        for n in T.unroll(layout.numbers):
                            t.S[n] = 0.0
                    key_head = T.truncdiv(head, T.truncdiv(heads, key_heads))
                    if use_gate != 0:
                        if A_log_is_wide != 0:
                            rate_raw.wide[0] = wide_A_log[head]
                        else:
                            rate_raw.narrow[0] = A_log[head]
                        if has_dt_bias != 0:
                            if dt_bias_is_wide != 0:
                                bias_raw.wide[0] = wide_dt_bias[head]
                            else:
                                bias_raw.narrow[0] = dt_bias[head]
                    for step in T.serial(length):
                        token = first + step
                        load_token(layout, t, q, k, v, token, key_head, head, tile, warp, lane)
                        if g_is_wide != 0:
                            gate_raw.wide[0] = wide_g[token, head]
                        else:
                            gate_raw.narrow[0] = g[token, head]
                        if beta_is_wide != 0:
                            beta_raw.wide[0] = wide_beta[token, head]
                        else:
                            beta_raw.narrow[0] = beta[token, head]
                        gate, opening = value_of(gate_raw, g_is_wide), value_of(beta_raw, beta_is_wide)
                        if use_gate != 0:
                            if has_dt_bias != 0:
                                gate += value_of(bias_raw, dt_bias_is_wide)
                            gate = -T.exp(value_of(rate_raw, A_log_is_wide)) * softplus(gate)
                        if use_sigmoid != 0:
                            opening = strength * sigmoid(opening)
                        read_state(layout, t)
                        if layout.key_warps > 1:
                            sum_over_warps(layout, t, read, products, step % 2, warp, lane)
                        write_state(layout, t, T.exp(gate), opening, scale, use_l2norm)
                        if layout.writes(warp, lane):
                            for e in T.vectorized(layout.values):
                                o[token, head, layout.first_value(tile, warp, lane) + e] = t.o_raw[e]
                    if write_final != 0:
                        store_states(layout, t, new_states, slot, head, tile, warp, lane)
                if sequence == 0:
                    zero_rows(layout, o, 0, first, head, tile, thread)
                if sequence == sequences - 1:
                    token = tokens
                    zero_rows(layout, o, first + length, token, head, tile, thread)

    return decode
