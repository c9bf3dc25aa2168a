"""Gated delta rule, token by token: a few tokens of many sequences, as in generation, in one launch (SM90).

Per token and value head, with the state S [K, V], g the log decay, and k and q normalised if asked:

    d = beta (v - e^g S^T k)      S <- e^g S + k d^T      o = scale (e^g S^T q + (k . q) d)

A state is read once, stays in registers for all tokens of its sequence, and is written once. Both products with it are
taken before it changes, so that a token costs one exchange between the threads that share its values.

Reads        q k [T, H, 128] · v [T, HV, 128] · g beta [T, HV] raw or activated · A_log dt_bias [HV] · states [slots, HV, ..]
Writes       o [T, HV, 128], zeros where no sequence is or its slot is none · states, in place or elsewhere

Blocks       parts of the value heads by sequences, 2 to 6 an SM
Threads      a strip of the state each, in accesses of 16 or 8 bytes (`_decode_tiles.py`, `_decode_strip.py`). All loads come
             before anything waits for one. Of [K, V] states the warps of a block share the keys: they exchange sums in shared
             memory, with two block barriers a token; of [V, K] states a warp has all keys, and there is no barrier
Ahead        A block may begin before the kernel before it on the stream has ended (programmatic launch): once all blocks of
             that one have begun, and of float32 states [K, V] once they have read their states, unless both kernels have room
             side by side. The first blocks order their states and their token's rows into the L2 cache before they wait for that
             end. Of bfloat16 states a block also orders that of its head `ahead` sequences later; of float32 states that costs
             (263 became 342 us, batch 256)
Registers    80 to 168 a thread, by the launch bounds of the layout
"""

import tilelang.language as T

from ._decode_strip import (
    DEVICE_CODE,
    PRODUCTS,
    Number,
    Strip,
    exp,
    load_number,
    load_states,
    load_token,
    prefetch_states,
    prefetch_token,
    read_state,
    store_states,
    sum_over_warps,
    value_of,
    write_state,
    zero_rows,
)
from ._sm90 import HEAD_DIM, WARP

ROW_ALIGNMENT = 8  # elements: strides are whole units of 16 bytes
SEQUENCES = 32768  # on the second axis of the grid, which CUDA bounds at 65535


def build_decode(dtype, layout):
    """The prim_func for q, k, v of `dtype` and states of `state_dtype`; arguments in README.md."""
    state_dtype = layout.state_dtype
    tokens, key_heads, heads, slots = (T.dynamic(name) for name in ("tokens", "key_heads", "heads", "slots"))
    words, index_words = T.dynamic("words"), T.dynamic("index_words")
    q_t, q_h, k_t, k_h, v_t, v_h = (T.dynamic(name, "int64") for name in ("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"))
    g_t, beta_t = T.dynamic("g_t", "int64"), T.dynamic("beta_t", "int64")

    def offset(cu_words, index, words_per_entry, dense_length):
        """First token of a sequence, inside the tensors whatever the offsets are."""
        packed = T.max(0, T.min(cu_words[index * words_per_entry], tokens))
        return T.if_then_else(dense_length >= 0, index * dense_length, packed)

    def slot_of(indices, sequence, words_per_index):
        return T.if_then_else(words_per_index != 0, indices[sequence * words_per_index], sequence)

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
        ahead: T.int32,
        heads_per_key: T.int32,
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
            T.import_source(DEVICE_CODE)
            if layout.key_warps > 1:
                parts = T.alloc_shared((layout.pairs + 1, 2 * layout.values_of_block + PRODUCTS + 1), "float32")
            t = Strip(layout, dtype)
            gate_raw, beta_raw, rate_raw, bias_raw = Number(dtype), Number(dtype), Number(dtype), Number(dtype)
            tile, head, sequence, key_head = (T.alloc_var("int32") for _ in range(4))
            first, length, slot, later, token = (T.alloc_var("int32") for _ in range(5))
            gate, opening, raw, activated = (T.alloc_var("float32") for _ in range(4))
            if layout.yields_late:
                if heads * sequences <= layout.heads_side_by_side:
                    T.pdl_trigger()
            else:
                T.pdl_trigger()
            tile, head = block % layout.tiles, block // layout.tiles
            sequence = sheet * SEQUENCES + row
            key_head = T.truncdiv(head, heads_per_key)
            # Before the wait nothing is read but into the L2 cache, which sees what the kernel before writes, sooner or later.
            if sequence < T.min(ahead, sequences) and words_per_index == 0:
                if has_initial != 0 and sequence < slots:
                    prefetch_states(layout, states, sequence, head, tile, thread)
                if dense_length > 0:
                    prefetch_token(q, k, v, sequence * dense_length, key_head, head, thread)
            T.pdl_sync()
            if sequence < sequences:
                slot = slot_of(indices, sequence, words_per_index)
                if layout.orders_ahead:
                    later = slot_of(indices, T.min(sequence + ahead, sequences - 1), words_per_index)
                first = offset(cu_words, sequence, words_per_entry, dense_length)
                length = T.max(0, offset(cu_words, sequence + 1, words_per_entry, dense_length) - first)
                if slot < 0 or slot >= slots:
                    zero_rows(layout, o, first, first + length, head, heads, tile, thread)
                else:
                    if has_initial != 0:
                        load_states(layout, t, states, slot, head, tile, warp, lane)
                    else:
                        for n in T.unroll(layout.numbers):
                            t.S[n] = 0.0
                    if use_gate != 0:
                        load_number(rate_raw, A_log, wide_A_log, A_log_is_wide != 0, head)
                    if has_dt_bias != 0:
                        load_number(bias_raw, dt_bias, wide_dt_bias, dt_bias_is_wide != 0, head)
                    if layout.orders_ahead:
                        if has_initial != 0 and sequence + ahead < sequences and later >= 0 and later < slots:
                            prefetch_states(layout, states, later, head, tile, thread)
                    for step in T.serial(length):
                        token = first + step
                        load_token(layout, t, q, k, v, token, key_head, head, tile, warp, lane)
                        load_number(gate_raw, g, wide_g, g_is_wide != 0, token, head)
                        load_number(beta_raw, beta, wide_beta, beta_is_wide != 0, token, head)
                        gate, opening = value_of(gate_raw, g_is_wide), value_of(beta_raw, beta_is_wide)
                        raw = gate + T.Select(has_dt_bias != 0, value_of(bias_raw, dt_bias_is_wide), 0.0)
                        activated = -exp(value_of(rate_raw, A_log_is_wide)) * T.call_extern("float32", "softplus", raw)
                        gate = T.Select(use_gate != 0, activated, gate)
                        activated = strength * T.call_extern("float32", "sigmoid", opening)
                        opening = T.Select(use_sigmoid != 0, activated, opening)
                        read_state(layout, t)
                        if layout.yields_late:
                            T.pdl_trigger()
                        if layout.key_warps > 1:
                            sum_over_warps(layout, t, parts, thread, warp, lane)
                        write_state(layout, t, exp(gate), opening, scale, use_l2norm)
                        if layout.writes(warp, lane):
                            for e in T.vectorized(layout.values):
                                o[token, head, layout.first_value(tile, warp, lane) + e] = t.o_raw[e]
                    if write_final != 0:
                        store_states(layout, t, new_states, slot, head, tile, warp, lane)
                if sequence == 0:
                    zero_rows(layout, o, 0, first, head, heads, tile, thread)
                if sequence == sequences - 1:
                    token = tokens
                    zero_rows(layout, o, first + length, token, head, heads, tile, thread)

    return decode
