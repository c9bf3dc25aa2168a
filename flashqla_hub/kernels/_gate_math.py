"""Gate activations and the places of their threads, for the kernels that activate gates.

g = -exp(A_log) softplus(a + dt_bias)        beta = strength sigmoid(b)
"""

import tilelang.language as T

SOFTPLUS_LINEAR = 20.0  # from here on softplus(x) = x, as in PyTorch
THREADS = 256


def number(narrow, wide, is_wide, *index):
    """One number as float32, from the one of two tensors that holds it."""
    return T.if_then_else(is_wide != 0, wide[index], T.cast(narrow[index], "float32"))


def softplus(x):
    return T.Select(x > SOFTPLUS_LINEAR, x, T.log1p(T.exp(x)))


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return T.fast_rcp(1.0 + T.exp(-x))


def head_blocks(heads):
    """Blocks side by side that all heads take."""
    return T.truncdiv(heads + THREADS - 1, THREADS)


def heads_of(block, heads):
    """Heads of one of those blocks; its threads are that many times `tokens_of`."""
    return T.min(THREADS, heads - block * THREADS)


def tokens_of(heads):
    """Tokens that a block handles at a time."""
    return T.truncdiv(THREADS, T.min(THREADS, heads))
