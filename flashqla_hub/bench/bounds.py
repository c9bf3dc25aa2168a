"""What no implementation of a row can beat: its bytes at the measured copy rate, its products at the measured matrix rate.

Run as a module on a GPU it measures the two rates and prints them as one JSON line.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from .rows import Row

HEAD_DIM = 128  # K = V
CHUNK = 64
ROUNDS, CALLS = 10, 3
REST_SECONDS = 0.1  # before a short measurement, which is not to pay for the heat of what ran before it
ELEMENT_BYTES, GATE_BYTES, STATE_BYTES = 2, 4, 4  # q k v o in 16 bits; g beta, and states, in float32


@dataclass(frozen=True)
class Rates:
    """Of one device: terabytes a second read and written by a copy, and 10^12 bf16 operations a second of a product."""

    copy_tb_s: float
    matrix_tflop_s: float


def row_bytes(row: Row, op: str) -> int:
    """Bytes that an operation must move, each tensor once; "forward_backward" is the one and then the other, and of
    "training_forward" what it keeps for the backward is not counted.

    The forward reads q, k, v, g, beta and the initial states and writes o and the final states. The backward reads its
    inputs again with the gradients of its outputs, and writes the gradients of its inputs.
    """
    tokens, sequences = sum(row.lengths), len(row.lengths)
    key_rows, value_rows = (heads * HEAD_DIM * ELEMENT_BYTES for heads in (row.hk, row.hv))
    gate_rows, states = row.hv * GATE_BYTES, sequences * row.hv * HEAD_DIM**2 * STATE_BYTES
    forward = tokens * (2 * key_rows + 2 * value_rows + 2 * gate_rows) + 2 * states
    backward = tokens * (4 * key_rows + 3 * value_rows + 4 * gate_rows) + 3 * states
    return {"backward": backward, "forward_backward": forward + backward}.get(op, forward)


def row_flops(row: Row, op: str) -> int:
    """Operations of the chunk form at C = 64, without the inverse of the chunk matrix.

    Both directions need K K^T and Q K^T for a key head, C^2 K each. A value head needs K S, Q S and K^T N, C K V each, and
    A Z and P N, C^2 V each, forward; with the states at hand seven products C K V, eight C^2 V and two C^3 backward.
    """
    key_head = 2 * CHUNK**2 * HEAD_DIM
    forward = 3 * CHUNK * HEAD_DIM**2 + 2 * CHUNK**2 * HEAD_DIM
    backward = 7 * CHUNK * HEAD_DIM**2 + 8 * CHUNK**2 * HEAD_DIM + 2 * CHUNK**3
    of_op = {
        "backward": row.hk * key_head + row.hv * backward,
        "forward_backward": 2 * row.hk * key_head + row.hv * (forward + backward),
    }
    return 2 * sum(row.lengths) * of_op.get(op, row.hk * key_head + row.hv * forward) // CHUNK


def bound_ms(row: Row, op: str, rates: Rates) -> float:
    """The larger of the time to move the bytes and the time to do the products, in milliseconds."""
    moving = row_bytes(row, op) / (rates.copy_tb_s * 1e12)
    computing = row_flops(row, op) / (rates.matrix_tflop_s * 1e12)
    return 1e3 * max(moving, computing)


def measure_rates(copy_bytes: int = 4 << 30, size: int = 8192) -> Rates:
    """Rates of the current GPU at its best: a copy of `copy_bytes`, and bf16 products of random `size` x `size` matrices.

    A copy in a CUDA graph is left to the copy engines, which are slower than the kernel that copies in a stream; and products
    without a pause heat the GPU until it slows down. A bound takes neither for granted.
    """
    import torch

    source = torch.randint(256, (copy_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    copy_ms, matrix_ms = least_ms(lambda: target.copy_(source)), least_ms(lambda: a @ b)
    return Rates(2 * copy_bytes / copy_ms / 1e9, 2 * size**3 / matrix_ms / 1e9)


def least_ms(call: Callable[[], object]) -> float:
    """Milliseconds a call of the fastest of several short rounds, with a rest before each."""
    import torch

    call()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(stop) / CALLS)
    return min(rounds)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure_rates())) + "\n")
