"""Gate activations of the layer, backward (SM90). With x = a + dt_bias:

    da = -dg exp(A_log) sigmoid(x)      dA_log = sum over tokens of dg g      ddt_bias = sum over tokens of da
    db = dbeta strength sigmoid(b) sigmoid(-b)

Reads        a b [T, HV] · A_log dt_bias [HV] of that dtype or f32 · dg dbeta [T, HV] f32
Writes       da db [T, HV] · parts [blocks, 2, HV] f32, a block's shares of dA_log and ddt_bias, for `partial_sums.py`

Threads      one a token and head, heads side by side; block b takes the groups b, b + blocks, ... of TURNS
             times as many tokens as fit side by side
"""

import tilelang.language as T

from ._gate_math import THREADS, head_blocks, heads_of, number, sigmoid, softplus, tokens_of

TURNS = 2
A_LOG, DT_BIAS = range(2)  # rows of `parts`


@T.macro
def write_parts(shares, parts, block, column, wide, thread):
    """The block's shares of dA_log and ddt_bias, its threads' tokens one after the other."""
    share = T.alloc_var("float32")
    T.sync_threads()
    if thread < wide:
        for row in T.unroll(2):
            share = 0.0
            for turn in T.serial(T.truncdiv(THREADS, wide)):
                share += shares[row, turn * wide + thread]
            parts[block, row, column * THREADS + thread] = share


def build_gates_backward(dtype):
    """The prim_func for a and b of `dtype`; arguments in README.md."""
    tokens, heads, blocks = T.dynamic("tokens"), T.dynamic("heads"), T.dynamic("blocks")
    a_t, a_h, b_t, b_h = (T.dynamic(name, "int64") for name in ("a_t", "a_h", "b_t", "b_h"))
    dg_t, dg_h, dbeta_t, dbeta_h = (T.dynamic(name, "int64") for name in ("dg_t", "dg_h", "dbeta_t", "dbeta_h"))

    @T.prim_func
    def gates_backward(
        a: T.StridedTensor((tokens, heads), (a_t, a_h), dtype),
        b: T.StridedTensor((tokens, heads), (b_t, b_h), dtype),
        A_log: T.Tensor((heads,), dtype),
        wide_A_log: T.Tensor((heads,), "float32"),
        dt_bias: T.Tensor((heads,), dtype),
        wide_dt_bias: T.Tensor((heads,), "float32"),
        dg: T.StridedTensor((tokens, heads), (dg_t, dg_h), "float32"),
        dbeta: T.StridedTensor((tokens, heads), (dbeta_t, dbeta_h), "float32"),
        da: T.Tensor((tokens, heads), dtype),
        db: T.Tensor((tokens, heads), dtype),
        parts: T.Tensor((blocks, 2, heads), "float32"),
        strength: T.float32,
        A_log_is_wide: T.int32,
        dt_bias_is_wide: T.int32,
        has_dt_bias: T.int32,
        makes_g: T.int32,
        makes_beta: T.int32,
    ):
        with T.Kernel(blocks, head_blocks(heads), threads=THREADS) as (block, column):
            thread = T.get_thread_binding()
            wide, together, head, first = (T.alloc_var("int32") for _ in range(4))  # each division once
            wide = heads_of(column, heads)
            together = tokens_of(heads)
            first = T.truncdiv(thread, wide)
            head = column * THREADS + thread - first * wide
            shares = T.alloc_shared((2, THREADS), "float32")
            raw_a, raw_b = T.alloc_local((TURNS,), dtype), T.alloc_local((TURNS,), dtype)
            grad_g, grad_beta = T.alloc_local((TURNS,), "float32"), T.alloc_local((TURNS,), "float32")
            rate, bias, token = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("int32")
            x, slope, dA_log, ddt_bias = (T.alloc_var("float32") for _ in range(4))
            rate, bias, dA_log, ddt_bias = 0.0, 0.0, 0.0, 0.0
            if makes_g != 0:
                rate = -T.exp(number(A_log, wide_A_log, A_log_is_wide, head))
                if has_dt_bias != 0:
                    bias = number(dt_bias, wide_dt_bias, dt_bias_is_wide, head)
            for group in T.serial(T.truncdiv(tokens + blocks * TURNS * together - 1, blocks * TURNS * together)):
                for turn in T.unroll(TURNS):
                    token = T.min(((group * blocks + block) * TURNS + turn) * together + first, tokens - 1)
                    if makes_g != 0:
                        raw_a[turn], grad_g[turn] = a[token, head], dg[token, head]
                    if makes_beta != 0:
                        raw_b[turn], grad_beta[turn] = b[token, head], dbeta[token, head]
                for turn in T.unroll(TURNS):
                    token = ((group * blocks + block) * TURNS + turn) * together + first
                    if first < together and token < tokens:
                        if makes_g != 0:
                            x = T.cast(raw_a[turn], "float32") + bias
                            slope = grad_g[turn] * rate
                            dA_log += slope * softplus(x)
                            slope *= sigmoid(x)
                            ddt_bias += slope
                            da[token, head] = T.cast(slope, dtype)
                        if makes_beta != 0:
                            x = T.cast(raw_b[turn], "float32")
                            slope = sigmoid(x) * sigmoid(-x)  # 1 - sigmoid(x) would lose its digits
                            db[token, head] = T.cast(grad_beta[turn] * strength * slope, dtype)
            shares[A_LOG, thread] = dA_log
            shares[DT_BIAS, thread] = ddt_bias
            write_parts(shares, parts, block, column, wide, thread)

    return gates_backward
