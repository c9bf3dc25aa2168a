"""Shared tiles, barriers and register tiles of the backward's scans, and the protocol that binds them."""

import tilelang.language as T

from ._sm90 import (
    BACKWARD_SCAN,
    CHUNK,
    HALF_CHUNK,
    HEAD_DIM,
    ITEM_WORDS,
    PAIR_VECTORS,
    SCAN_ROWS,
    VALUE_TILE,
)
from ._tile import Group, alloc_barriers
from .protocol import Barriers as BarrierSlots
from .protocol import Protocol, arrive, done, read, wait, write
from .protocol import Tiles as TileSlots

STAGES, SCORES = BACKWARD_SCAN.stages, BACKWARD_SCAN.scores_in_flight
AT_ONCE, ANNOUNCEMENTS = BACKWARD_SCAN.announced_at_once, BACKWARD_SCAN.announcements
DECAY, SINCE, READ, WRITE, QUERY, TAKE, ERROR = range(SCAN_ROWS)
"""Places of the row scales that the scans read, in the order of ROW_*."""


class Tiles(Group):
    """Shared memory of either direction; `values` hold v or dO, `out` the errors or dv. Only the reverse has `q` and `scores`."""

    suffix = "_smem"

    def __init__(self, dtype):
        self.k = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
        self.q = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
        # A stage is a buffer of its own: a row offset into one buffer is lost when it is read with ldmatrix.trans.
        self.values = [T.alloc_shared((CHUNK, VALUE_TILE), dtype) for _ in range(STAGES)]
        # Columns 32 to 63 above columns 0 to 31. The first 32 rows are the upper right quarter: zeros, which stay.
        self.solve = T.alloc_shared((STAGES, 2 * CHUNK, HALF_CHUNK), dtype)
        self.scores = T.alloc_shared((SCORES, CHUNK, CHUNK), dtype)
        self.rows = T.alloc_shared((STAGES, SCAN_ROWS, CHUNK), "float32")
        self.pair_rows = T.alloc_shared((STAGES, PAIR_VECTORS, CHUNK), "float32")
        self.state = T.alloc_shared((VALUE_TILE, HEAD_DIM), dtype)
        self.out = T.alloc_shared((CHUNK, VALUE_TILE), dtype)
        self.item = T.alloc_shared((ITEM_WORDS,), "int32")


class Barriers(Group):
    """mbarriers by event; arrivals and slots in `_sm90.py`."""

    def __init__(self):
        for name, arrivals in BACKWARD_SCAN.arrivals.items():
            setattr(self, name, alloc_barriers(arrivals, BACKWARD_SCAN.barrier_slots[name]))


class StateRegisters(Group):
    """Of the warpgroup that carries the state S (or its gradient), transposed: 64 value rows of [V, K]."""

    def __init__(self, dtype, suffix):
        object.__setattr__(self, "suffix", suffix)
        self.S = T.alloc_fragment((VALUE_TILE, HEAD_DIM), "float32")
        self.S_in = T.alloc_fragment((VALUE_TILE, HEAD_DIM), dtype)
        self.W = T.alloc_fragment((VALUE_TILE, CHUNK), "float32")
        self.N = T.alloc_fragment((VALUE_TILE, CHUNK), dtype)
        self.o = T.alloc_fragment((CHUNK, VALUE_TILE), dtype)
        self.v = T.alloc_fragment((CHUNK, VALUE_TILE), dtype)  # or dO
        self.high = [T.alloc_fragment((VALUE_TILE, VALUE_TILE), dtype) for _ in range(2)]
        self.low = [T.alloc_fragment((VALUE_TILE, VALUE_TILE), dtype) for _ in range(2)]


class ForwardRegisters(StateRegisters):
    """The same of the forward direction, which also makes transitions."""

    def __init__(self, dtype):
        super().__init__(dtype, "_ahead")
        self.Z = [T.alloc_fragment((VALUE_TILE, HALF_CHUNK), dtype) for _ in range(2)]
        self.low_S = T.alloc_fragment((VALUE_TILE, HEAD_DIM), dtype)
        self.squares = T.alloc_fragment((VALUE_TILE,), "float32")


class GradientRegisters(StateRegisters):
    """The same of the reverse direction."""

    def __init__(self, dtype):
        super().__init__(dtype, "_back")
        self.Z = T.alloc_fragment((VALUE_TILE, CHUNK), dtype)
        self.dv = [T.alloc_fragment((VALUE_TILE, HALF_CHUNK), "float32") for _ in range(2)]
        self.read = T.alloc_fragment((VALUE_TILE, CHUNK), "float32")
        self.D = T.alloc_fragment((VALUE_TILE, CHUNK), dtype)
        self.scale = T.alloc_fragment((CHUNK,), "float32")
        self.take = [T.alloc_fragment((HALF_CHUNK,), "float32") for _ in range(2)]


class ScoreRegisters(Group):
    """Of the warpgroup that makes scores, for the reverse direction."""

    suffix = "_scores"

    def __init__(self):
        self.scores = T.alloc_fragment((CHUNK, CHUNK), "float32")
        self.decay = T.alloc_fragment((CHUNK,), "float32")
        self.row = T.alloc_fragment((CHUNK,), "float32")


def phase(trip, slots):
    """Parity of the phase that the `trip`-th use of a barrier with so many slots completes."""
    return trip // slots % 2


def phase_before(trip, slots):
    """Parity of the phase before it: a wait for a slot that is still fresh passes."""
    return (trip // slots + 1) % 2


def _links(trips):
    """Links that the simulation follows before so many chunks; a block may have any number."""
    return trips // 2


def _carry(trips):
    """The reverse direction; the other uses the same tiles and barriers in the same order, but no scores."""
    warps = BACKWARD_SCAN.state.warps
    for i in range(_links(trips)):
        yield wait("link_ready", 0, phase(i, 1))
        yield read("link", 0, i)
        yield done("link", 0, i)
        yield arrive("link_free", 0, warps)
    if trips:
        yield wait("chunk_ready", 0, phase(0, STAGES))
        yield read("chunk", 0, 0)
    for i in range(trips):
        stage, place, coming = i % STAGES, i % SCORES, min(i + 1, trips - 1)
        yield wait("scores_ready", place, phase(i, SCORES))
        yield read("scores", place, i)
        yield wait("state_free", 0, phase_before(i, 1))
        yield write("state", 0, i)
        yield arrive("state_ready", 0, warps)
        yield done("scores", place, i)
        yield arrive("scores_free", place, warps)
        yield wait("values_free", 0, phase_before(i, 1))
        yield write("out", 0, i)
        yield arrive("values_ready", 0, warps)
        yield wait("chunk_ready", coming % STAGES, phase(coming, STAGES))
        if coming > i:
            yield read("chunk", coming % STAGES, coming)
        yield done("chunk", stage, i)
        yield arrive("chunk_free", stage, warps)


def _make_scores(trips):
    """Who reads the scores of a chunk lets its tiles go, after this role has read them."""
    for i in range(trips):
        stage, place = i % STAGES, i % SCORES
        yield wait("chunk_ready", stage, phase(i, STAGES))
        yield read("chunk", stage, i)
        yield done("chunk", stage, i)
        yield wait("scores_free", place, phase_before(i, SCORES))
        yield write("scores", place, i)
        yield arrive("scores_ready", place, BACKWARD_SCAN.scores.warps)


def _load(trips):
    links = _links(trips)
    for i in range(links):
        yield wait("link_free", 0, phase_before(i, 1))
        yield write("link", 0, i)
        yield arrive("link_ready", 0, 1)
    if links:
        yield wait("link_free", 0, phase(links - 1, 1))
        yield write("link", 0, links)  # the chunks go where the transitions were
    for i in range(trips):
        stage = i % STAGES
        yield wait("chunk_free", stage, phase_before(i, STAGES))
        yield write("chunk", stage, i)
        yield arrive("chunk_ready", stage, 1)


def _tell(event, batch):
    slot = batch % ANNOUNCEMENTS
    yield wait("stored_free", slot, phase_before(batch, ANNOUNCEMENTS))
    yield write(f"stored_{event}", slot, batch)
    yield arrive("stored_ready", slot, 1)


def _store(tile, event):
    def role(trips):
        for i in range(trips):
            yield wait(f"{event}_ready", 0, phase(i, 1))
            yield read(tile, 0, i)
            yield done(tile, 0, i)
            yield arrive(f"{event}_free", 0, 1)
            if i > 0 and i % AT_ONCE == 0:
                yield from _tell(event, i // AT_ONCE - 1)
        if trips:
            yield from _tell(event, (trips - 1) // AT_ONCE)

    return role


def _announce(trips):
    for batch in range((trips + AT_ONCE - 1) // AT_ONCE):
        slot = batch % ANNOUNCEMENTS
        yield wait("stored_ready", slot, phase(batch, ANNOUNCEMENTS))
        for event in ("state", "values"):
            yield read(f"stored_{event}", slot, batch)
            yield done(f"stored_{event}", slot, batch)
        yield arrive("stored_free", slot, 1)


BACKWARD_SCAN_PROTOCOL = Protocol(
    barriers={
        name: BarrierSlots(BACKWARD_SCAN.barrier_slots[name], count) for name, count in BACKWARD_SCAN.arrivals.items()
    },
    tiles={
        "link": TileSlots(1, ("carry",)),  # a transition, in the places of keys and queries
        "chunk": TileSlots(STAGES, ("carry", "make_scores")),
        "scores": TileSlots(SCORES, ("carry",)),
        "state": TileSlots(1, ("store_state",)),
        "out": TileSlots(1, ("store_values",)),
        "stored_state": TileSlots(
            ANNOUNCEMENTS, ("announce",)
        ),  # not in memory: stand for "the tiles of this batch are stored"
        "stored_values": TileSlots(ANNOUNCEMENTS, ("announce",)),
    },
    roles={
        "carry": _carry,
        "make_scores": _make_scores,
        "load": _load,
        "store_state": _store("state", "state"),
        "store_values": _store("out", "values"),
        "announce": _announce,
    },
)
