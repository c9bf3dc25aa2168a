"""How a call is cut into chunks and slabs: policy as pure functions of shapes."""

from functools import reduce
from typing import Optional

from torch import sym_max, sym_min

CHUNK_SIZES = (16, 32, 64)

# How the SM90 kernels cut long sequences into segments that run side by side: chunks of 64 tokens a segment, where 0 lets
# the library choose by lengths and head counts, and the last is longer than any sequence.
PLANS = {"auto": 0, "invariant": 64, "off": 2**25}

# The SM90 backward has a state before and the gradient of one behind each chunk of 64 tokens, 64 KB a value head in 16 bits.
# Where they would take more than this, it works on the chunks in two ranges, one after the other in the same memory. Measured
# with gradients behind the scans, that costs 1 to 2 % of the time, and 5 % and more in smaller calls
# (docs/design/2026-11-30-backward-ranges.md).
STATES_AT_ONCE = 768 * 2**20
STATES_OF_CHUNK = 2 * 128 * 128 * 2

# Chunk-heads that the PyTorch path works on at a time. One chunk-head of 64 tokens and K = V = 128 needs about 0.9 MB of
# float32 intermediates in the backward, so a slab stays below 0.5 GB and the working memory of a call does not grow with
# its length. Smaller slabs are a little faster, but keep more states for the backward of many heads.
SLAB_CHUNK_HEADS = 512


def num_borders(num_tokens: int, num_sequences: int, num_v_heads: int, plan: str) -> int:
    """Borders between ranges of chunks that an SM90 backward takes one after the other: 1, or 0 if it takes all at once.

    The forward has to keep the states at a border, which its kernel for many short sequences cannot; they are taken at once.
    So is everything if the plan says how sequences are cut. No branch depends on sizes, which a tracer may not know.
    """
    if plan != "auto":
        return 0
    slots = num_tokens // 64 + num_sequences
    states = slots * num_v_heads
    surplus = (1, states - STATES_AT_ONCE // STATES_OF_CHUNK, num_tokens - 64 * num_sequences, slots - 1)
    return max(min(surplus), 0) if type(states) is int else sym_max(reduce(sym_min, surplus), 0)


def range_slots(num_tokens: int, num_sequences: int, num_v_heads: int, plan: str) -> int:
    """Slots of chunks that an SM90 backward takes at once, or 0 for all.

    Slots are those of the kernels, num_tokens // 64 + num_sequences.
    """
    slots = num_tokens // 64 + num_sequences
    return (slots + 1) // 2 if num_borders(num_tokens, num_sequences, num_v_heads, plan) else 0


def chunk_length(num_tokens: int, chunk_size: int) -> int:
    """Rows of one chunk: short calls (decode, a few draft tokens) use chunks not much longer than themselves."""
    for length in (1, 4, *CHUNK_SIZES):
        if num_tokens <= length < chunk_size:
            return length
    return chunk_size


def num_chunks(num_tokens: int, num_sequences: Optional[int], length: int) -> int:
    """Chunks of a dense row (`num_sequences` None), or an upper bound for a packed row that needs no look at the lengths.

    A sequence of n > 0 tokens has floor((n - 1) / length) + 1 chunks, and the floors of the parts sum to no more than the
    floor of the whole: at most tokens // length + sequences. An empty row has none, so that no chunk has to read it.
    """
    if num_sequences is None:
        return (num_tokens + length - 1) // length
    return num_tokens // length + num_sequences if num_tokens else 0


def slab_chunks(num_lane_heads: int) -> int:
    """Chunks per lane that one slab holds, at least one."""
    return 1 + SLAB_CHUNK_HEADS // (num_lane_heads + 1)


def num_slabs(chunks: int, num_lane_heads: int) -> int:
    """Slabs that cover the chunks of a lane."""
    per_slab = slab_chunks(num_lane_heads)
    return (chunks + per_slab - 1) // per_slab
