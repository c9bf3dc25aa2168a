"""What no implementation of a row can beat: its bytes at the measured copy rate, its products at the measured matrix rate.

Run as a module on a GPU it measures the two rates and prints them as one JSON line.
"""

import json
import sys
from dataclasses import asdict, dataclass

from .rows import Row

HEAD_DIM = 128  # K = V
CHUNK = 64
ELEMENT_BYTES, GATE_BYTES, STATE_BYTES = 2, 4, 4  # q k v o in 16 bits; g beta, and states, in float32


@dataclass(frozen=True)
class Rates:
    """Of one device: terabytes a second read and written by a copy, and 10^12 bf16 operations a second of a product."""

    copy_tb_s: float
    matrix_tflop_s: float


def forward_bytes(row: Row) -> int:
    """Bytes that the forward must move: q, k, v, g, beta and the initial states in, o and the final states out, once."""
    tokens, sequences = sum(row.lengths), len(row.lengths)
    a_token = 2 * (row.hk + row.hv) * HEAD_DIM * ELEMENT_BYTES + 2 * row.hv * GATE_BYTES
    return tokens * a_token + 2 * sequences * row.hv * HEAD_DIM**2 * STATE_BYTES


def forward_flops(row: Row) -> int:
    """Operations of the chunk form at C = 64, without the inverse.

    A key head needs K K^T and Q K^T, C^2 K each; a value head K S, Q S and K^T N, C K V each, and A Z and P N, C^2 V each.
    """
    key_head = 2 * CHUNK**2 * HEAD_DIM
    value_head = 3 * CHUNK * HEAD_DIM**2 + 2 * CHUNK**2 * HEAD_DIM
    return 2 * sum(row.lengths) * (row.hk * key_head + row.hv * value_head) // CHUNK


def forward_bound_ms(row: Row, rates: Rates) -> float:
    """The larger of the time to move the bytes and the time to do the products, in milliseconds."""
    moving = forward_bytes(row) / (rates.copy_tb_s * 1e12)
    computing = forward_flops(row) / (rates.matrix_tflop_s * 1e12)
    return 1e3 * max(moving, computing)


def measure_rates(copy_bytes: int = 4 << 30, size: int = 8192) -> Rates:
    """Rates of the current GPU: a copy of `copy_bytes`, and bf16 products of random `size` x `size` matrices."""
    import torch

    from .protocol import graph_ms

    source = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = graph_ms([lambda: target.copy_(source)])
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    matrix_ms = graph_ms([lambda: a @ b])
    return Rates(2 * copy_bytes / copy_ms / 1e9, 2 * size**3 / matrix_ms / 1e9)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure_rates())) + "\n")
