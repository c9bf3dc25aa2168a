"""Shared tiles, barriers and register tiles of the gradient kernel, and the protocol that binds them."""

import tilelang.language as T

from ._backward_scan_tiles import phase, phase_before
from ._sm90 import BACKWARD_GRADIENTS, CHUNK, HEAD_DIM, NORM_VECTORS, ROW_VECTORS, VALUE_TILE, WARPS_PER_GROUP
from ._tile import Group
from .protocol import Barriers as BarrierSlots
from .protocol import Protocol, arrive, done, read, wait, write
from .protocol import Tiles as TileSlots

HALVES = HEAD_DIM // VALUE_TILE  # of the value columns, and of the key columns
BOTH_HALVES = tuple(range(HALVES))  # for loops that are unrolled before the compiler sees them
STRIP = 32  # columns of a strip of pairs
STRIPS = CHUNK // STRIP
SOURCES = 2
QUERIES, KEYS = range(SOURCES)  # q with do, k with dv
SLOTS = 2  # chunks of q and k, and heads of parts, in flight
PARTS = 5
PART_QUERY, PART_KEY, PART_BETA, PART_STATE, PART_DECAY = range(PARTS)
HEADS_OF_A_TRIP = 2  # value heads of a key head, in the protocol


class Tiles(Group):
    """Shared memory: q and k in `tokens`, do and dv in `grads`, by source and slot or half of the value columns.

    `parts` holds a head's contributions to dg and dbeta.
    """

    suffix = "_smem"

    def __init__(self, dtype):
        self.tokens = T.alloc_shared((SLOTS * SOURCES, CHUNK, HEAD_DIM), dtype)
        self.norms = T.alloc_shared((SLOTS, NORM_VECTORS, CHUNK), "float32")
        self.grads = T.alloc_shared((SOURCES * HALVES, CHUNK, VALUE_TILE), dtype)
        self.errors = T.alloc_shared((HALVES, CHUNK, VALUE_TILE), dtype)
        self.states = T.alloc_shared((HALVES, VALUE_TILE, HEAD_DIM), dtype)
        self.dstates = T.alloc_shared((HALVES, VALUE_TILE, HEAD_DIM), dtype)
        self.rows = T.alloc_shared((HALVES, ROW_VECTORS, CHUNK), "float32")
        self.parts = T.alloc_shared((SLOTS, PARTS, CHUNK), "float32")
        self.pair = T.alloc_shared((SLOTS, BACKWARD_GRADIENTS.pair_warps), "float32")


class Barriers(Group):
    """mbarriers by event; arrivals and slots in `_sm90.py`."""

    def __init__(self):
        for name, arrivals in BACKWARD_GRADIENTS.arrivals.items():
            setattr(self, name, T.alloc_barrier([arrivals] * BACKWARD_GRADIENTS.barrier_slots[name]))


class QueryRegisters(Group):
    """Of the warpgroup that owns the rows of dq."""

    def __init__(self, dtype, suffix):
        object.__setattr__(self, "suffix", suffix)
        strip, wide, row = (CHUNK, STRIP), (CHUNK, HEAD_DIM), (CHUNK,)
        self.grad = T.alloc_fragment(wide, "float32")
        self.product = T.alloc_fragment(wide, "float32")
        # Pairs of tokens are formed in strips of columns: squares of them do not fit beside the gradient.
        self.pairs = T.alloc_fragment(strip, "float32")
        self.scores = T.alloc_fragment(strip, "float32")
        self.left = T.alloc_fragment(strip, dtype)
        self.decay = T.alloc_fragment(row, "float32")
        self.factor = T.alloc_fragment(row, "float32")
        self.norm = T.alloc_fragment(row, "float32")
        self.dot = T.alloc_fragment(row, "float32")
        self.sum = T.alloc_fragment(row, "float32")


class KeyRegisters(QueryRegisters):
    """Of the warpgroup that owns the rows of dk."""

    def __init__(self, dtype, suffix):
        super().__init__(dtype, suffix)
        row = (CHUNK,)
        self.strength = T.alloc_fragment(row, "float32")
        self.read = T.alloc_fragment(row, "float32")
        self.strict = T.alloc_fragment(row, "float32")


def _consumer(name):
    """A warpgroup of rows: both halves of every head, its part of dg and dbeta, then its rows of dq or dk."""
    warps = WARPS_PER_GROUP

    def role(trips):
        for i in range(trips):
            slot = i % SLOTS
            yield wait("tokens_ready", slot, phase(i, SLOTS))
            yield read("tokens", slot, i)
            for head in range(i * HEADS_OF_A_TRIP, (i + 1) * HEADS_OF_A_TRIP):
                for half in range(HALVES):
                    yield wait("half_ready", half, phase(head, 1))
                    yield read("half", half, head)
                for half in range(HALVES):
                    yield done("half", half, head)
                    yield arrive("half_free", half, warps)
                yield wait("parts_free", head % SLOTS, phase_before(head, SLOTS))
                yield write(f"parts_{name}", head % SLOTS, head)
                yield arrive("parts_ready", head % SLOTS, warps)
            yield done("tokens", slot, i)
            yield arrive("tokens_free", slot, warps)

    return role


def _pair_states(trips):
    warps = BACKWARD_GRADIENTS.pair_warps
    for head in range(trips * HEADS_OF_A_TRIP):
        for half in range(HALVES):
            yield wait("half_ready", half, phase(head, 1))
            yield read("half", half, head)
            yield done("half", half, head)
            yield arrive("half_free", half, warps)
        yield wait("parts_free", head % SLOTS, phase_before(head, SLOTS))
        yield write("parts_pair", head % SLOTS, head)
        yield arrive("parts_ready", head % SLOTS, warps)


def _sum_parts(trips):
    for head in range(trips * HEADS_OF_A_TRIP):
        slot = head % SLOTS
        yield wait("parts_ready", slot, phase(head, SLOTS))
        yield from (read(f"parts_{name}", slot, head) for name in PART_WRITERS)
        yield from (done(f"parts_{name}", slot, head) for name in PART_WRITERS)
        yield arrive("parts_free", slot, 1)


def _load(trips):
    for i in range(trips):
        slot = i % SLOTS
        yield wait("tokens_free", slot, phase_before(i, SLOTS))
        yield write("tokens", slot, i)
        yield arrive("tokens_ready", slot, 1)
        for head in range(i * HEADS_OF_A_TRIP, (i + 1) * HEADS_OF_A_TRIP):
            for half in range(HALVES):
                yield wait("half_free", half, phase_before(head, 1))
                yield write("half", half, head)
                yield arrive("half_ready", half, 1)


CONSUMERS = ("queries", "keys")
PART_WRITERS = (*CONSUMERS, "pair")

BACKWARD_GRADIENTS_PROTOCOL = Protocol(
    barriers={
        name: BarrierSlots(BACKWARD_GRADIENTS.barrier_slots[name], count)
        for name, count in BACKWARD_GRADIENTS.arrivals.items()
    },
    tiles={
        "tokens": TileSlots(SLOTS, CONSUMERS),
        "half": TileSlots(HALVES, (*CONSUMERS, "pair")),
        **{f"parts_{name}": TileSlots(SLOTS, ("sum",)) for name in PART_WRITERS},
    },
    roles={
        **{name: _consumer(name) for name in CONSUMERS},
        "pair": _pair_states,
        "sum": _sum_parts,
        "load": _load,
    },
)
