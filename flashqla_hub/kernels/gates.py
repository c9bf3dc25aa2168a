"""Gate activations of the layer, forward (SM90).

    g = -exp(A_log) softplus(a + dt_bias)        beta = strength sigmoid(b)

Reads        a b [T, HV] · A_log dt_bias [HV] of that dtype or f32
Writes       g beta [T, HV] f32, either of them or both

Threads      one a token and head, heads side by side, for TURNS tokens, all loads before the first activation
"""

import tilelang.language as T

from ._gate_math import THREADS, head_blocks, heads_of, number, sigmoid, softplus, tokens_of

TURNS = 4


def build_gates(dtype):
    """The prim_func for a and b of `dtype`; arguments in README.md."""
    tokens, heads = T.dynamic("tokens"), T.dynamic("heads")
    a_t, a_h, b_t, b_h = (T.dynamic(name, "int64") for name in ("a_t", "a_h", "b_t", "b_h"))

    @T.prim_func
    def gates(
        a: T.StridedTensor((tokens, heads), (a_t, a_h), dtype),
        b: T.StridedTensor((tokens, heads), (b_t, b_h), dtype),
        A_log: T.Tensor((heads,), dtype),
        wide_A_log: T.Tensor((heads,), "float32"),
        dt_bias: T.Tensor((heads,), dtype),
        wide_dt_bias: T.Tensor((heads,), "float32"),
        g: T.Tensor((tokens, heads), "float32"),
        beta: T.Tensor((tokens, heads), "float32"),
        strength: T.float32,
        A_log_is_wide: T.int32,
        dt_bias_is_wide: T.int32,
        has_dt_bias: T.int32,
        makes_g: T.int32,
        makes_beta: T.int32,
    ):
        with T.Kernel(
            T.truncdiv(tokens + TURNS * tokens_of(heads) - 1, TURNS * tokens_of(heads)),
            head_blocks(heads),
            threads=THREADS,
        ) as (block, column):
            thread = T.get_thread_binding()
            wide, together, head, first = (T.alloc_var("int32") for _ in range(4))  # each division once
            wide = heads_of(column, heads)
            together = tokens_of(heads)
            first = T.truncdiv(thread, wide)
            head = column * THREADS + thread - first * wide
            rate, bias, token = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("int32")
            raw_a, raw_b = T.alloc_local((TURNS,), dtype), T.alloc_local((TURNS,), dtype)
            if first < together:
                first += block * TURNS * together
                for turn in T.unroll(TURNS):
                    token = T.min(first + turn * together, tokens - 1)
                    raw_a[turn] = a[token, head]
                    raw_b[turn] = b[token, head]
                rate, bias = 0.0, 0.0
                if makes_g != 0:
                    rate = -T.exp(number(A_log, wide_A_log, A_log_is_wide, head))
                    if has_dt_bias != 0:
                        bias = number(dt_bias, wide_dt_bias, dt_bias_is_wide, head)
                for turn in T.unroll(TURNS):
                    token = first + turn * together
                    if token < tokens:
                        if makes_g != 0:
                            g[token, head] = rate * softplus(T.cast(raw_a[turn], "float32") + bias)
                        if makes_beta != 0:
                            beta[token, head] = strength * sigmoid(T.cast(raw_b[turn], "float32"))

    return gates
