"""Shared tiles, barriers and register tiles of the gradient kernel, and the protocol that binds them."""

import tilelang.language as T

from ._backward_scan_tiles import phase, phase_before
from ._sm90 import BACKWARD_GRADIENTS, CHUNK, GRADIENT_ROWS, HEAD_DIM, NORM_VECTORS, VALUE_TILE, WARP, WORK_WORDS
from ._tile import Group, alloc_barriers
from .protocol import Barriers as BarrierSlots
from .protocol import Protocol, arrive, done, read, wait, write
from .protocol import Tiles as TileSlots

HALVES = HEAD_DIM // VALUE_TILE  # of the value columns
BOTH_HALVES = tuple(range(HALVES))  # for loops that are unrolled before the compiler sees them
SOURCES = 2
QUERIES, KEYS = range(SOURCES)  # of rows that read: queries with do, keys with dv
ERRORS, DOUT, DV = range(1 + SOURCES)  # of `values`
DSTATES, STATES = range(2)  # of `squares`
SLOTS = BACKWARD_GRADIENTS.slots
PART_PAIRS, PART_OWN, PART_QUERY, PART_STATE, PART_READ, PART_TRACE = range(BACKWARD_GRADIENTS.parts)
COLUMN_GROUPS = BACKWARD_GRADIENTS.column_groups
HEADS_OF_A_TRIP = 2  # value heads of a key head, in the protocol


class Tiles(Group):
    """Shared memory: q and k in `tokens` by slot and source; tiles of a head by halves of the value columns.

    `pairs` holds what queries, and keys, read of a token. `parts` and `columns` hold a head's contributions to dg and dbeta, the
    latter sums over a few rows each. `work` says which chunk is in a slot of `tokens`; `has_ended` says
    that no more tiles will come.
    """

    suffix = "_smem"

    def __init__(self, dtype):
        self.tokens = T.alloc_shared((SLOTS * SOURCES, CHUNK, HEAD_DIM), dtype)
        self.norms = T.alloc_shared((SLOTS, NORM_VECTORS, CHUNK), "float32")
        self.rows = T.alloc_shared((SLOTS, GRADIENT_ROWS, CHUNK), "float32")
        self.values = T.alloc_shared(((1 + SOURCES) * HALVES, CHUNK, VALUE_TILE), dtype)
        self.squares = T.alloc_shared((2 * HALVES, VALUE_TILE, HEAD_DIM), dtype)
        self.pairs = T.alloc_shared((SLOTS * SOURCES, CHUNK, CHUNK), dtype)
        self.parts = T.alloc_shared((SLOTS, BACKWARD_GRADIENTS.parts, CHUNK), "float32")
        padded = CHUNK + BACKWARD_GRADIENTS.column_padding
        self.columns = T.alloc_shared((COLUMN_GROUPS, padded), "float32")
        self.work = T.alloc_shared((SLOTS, WORK_WORDS), "int32")
        self.has_ended = T.alloc_shared((1,), "int32")


class Barriers(Group):
    """mbarriers by event; arrivals and slots in `_sm90.py`."""

    def __init__(self):
        for name, arrivals in BACKWARD_GRADIENTS.arrivals.items():
            setattr(self, name, alloc_barriers(arrivals, BACKWARD_GRADIENTS.barrier_slots[name]))


class GradientRegisters(Group):
    """Of a warpgroup that owns the rows of dq or dk."""

    def __init__(self, suffix):
        object.__setattr__(self, "suffix", suffix)
        wide, row = (CHUNK, HEAD_DIM), (CHUNK,)
        self.grad = T.alloc_fragment(wide, "float32")
        self.product = T.alloc_fragment(wide, "float32")
        self.norm = T.alloc_fragment(row, "float32")
        self.factor = T.alloc_fragment(row, "float32")
        self.dot = T.alloc_fragment(row, "float32")


class QueryRegisters(GradientRegisters):
    """Of the warpgroup that owns the rows of dq."""

    def __init__(self, suffix):
        super().__init__(suffix)
        self.trace = T.alloc_fragment((VALUE_TILE, VALUE_TILE), "float32")
        self.gap = T.alloc_fragment((CHUNK,), "int32")


class PairRegisters(Group):
    """Of the warpgroup that forms the pairs of tokens of a chunk."""

    def __init__(self, suffix):
        object.__setattr__(self, "suffix", suffix)
        square, row = (CHUNK, CHUNK), (CHUNK,)
        self.product = T.alloc_fragment(square, "float32")
        self.scores = T.alloc_fragment(square, "float32")
        self.pairs = T.alloc_fragment(square, "float32")
        self.weights = T.alloc_fragment(square, "float32")
        self.columns = T.alloc_fragment((COLUMN_GROUPS, CHUNK), "float32")
        self.factor = T.alloc_fragment(row, "float32")
        self.decay = T.alloc_fragment(row, "float32")
        self.gap = T.alloc_fragment(row, "int32")
        self.sum = T.alloc_fragment(row, "float32")


def column_fragment():
    """Registers of sums over the two rows of a square accumulator that a thread has of each column."""

    def place(group, column):
        thread = group // 8 * WARP + group % 8 * 4 + column % 8 // 2
        return thread, column // 8 * 2 + column % 2

    return T.Fragment((COLUMN_GROUPS, CHUNK), forward_fn=place)


READERS = {
    "rows": ("queries", "keys", "pairs", "sum"),
    "errors": ("keys", "pairs"),
    "dv": ("keys", "pairs"),
    "dout": ("queries", "pairs"),
    "dstates": ("queries", "keys"),
    "states": ("queries", "keys"),
}
"""Who reads the tiles of a head; the first four are loaded by one warp, the others by another, in this order."""

STATE_TILES = ("dstates", "states")
CONSUMERS = ("queries", "keys", "pairs")
WARPS = {name: getattr(BACKWARD_GRADIENTS, name).warps for name in CONSUMERS} | {"sum": 1, "load_states": 1}


def _slots(name):
    return BACKWARD_GRADIENTS.barrier_slots[f"{name}_ready"]


def _take(name, trip):
    slots = _slots(name)
    yield wait(f"{name}_ready", trip % slots, phase(trip, slots))
    yield read(name, trip % slots, trip)


def _leave(role, name, trip):
    slot = trip % _slots(name)
    yield done(name, slot, trip)
    yield arrive(f"{name}_free", slot, WARPS[role])


def _heads(trip):
    return range(trip * HEADS_OF_A_TRIP, (trip + 1) * HEADS_OF_A_TRIP)


def _with_chunks(role, program):
    """The role that runs `program` for each chunk whose record it finds, up to the record that says that there is no more."""

    def run(trips):
        for i in range(trips + 1):
            slot = i % SLOTS
            yield wait("work_ready", slot, phase(i, SLOTS))
            yield read("work", slot, i)
            if i < trips:
                yield from program(i)
            yield done("work", slot, i)
            if i < trips:
                yield arrive("tokens_free", slot, WARPS[role])

    return run


def _queries(trip):
    yield from _take("tokens", trip)
    for head in _heads(trip):
        for name in ("rows", "dstates", "states"):
            yield from _take(name, head)
        yield from _leave("queries", "rows", head)
        yield from _leave("queries", "dstates", head)
        yield wait("parts_free", head % SLOTS, phase_before(head, SLOTS))
        yield write("parts_queries", head % SLOTS, head)
        yield from _take("dout", head)
        for name in ("dout", "states"):
            yield from _leave("queries", name, head)
        yield arrive("parts_ready", head % SLOTS, WARPS["queries"])
        yield from _take("pairs", head)
        yield from _leave("queries", "pairs", head)
    yield done("tokens", trip % SLOTS, trip)


def _keys(trip):
    yield from _take("tokens", trip)
    for head in _heads(trip):
        slot = head % SLOTS
        yield from _take("rows", head)
        yield wait("parts_free", slot, phase_before(head, SLOTS))
        for name in ("errors", "dstates"):
            yield from _take(name, head)
        for name in ("errors", "dstates"):
            yield from _leave("keys", name, head)
        yield write("parts_keys", slot, head)
        for name in ("dv", "states"):
            yield from _take(name, head)
        for name in ("dv", "states", "rows"):
            yield from _leave("keys", name, head)
        yield arrive("parts_ready", slot, WARPS["keys"])
        yield from _take("pairs", head)
        yield from _leave("keys", "pairs", head)
    yield done("tokens", trip % SLOTS, trip)


def _pairs(trip):
    yield from _take("tokens", trip)
    for head in _heads(trip):
        slot = head % SLOTS
        for name in ("rows", "errors", "dv"):
            yield from _take(name, head)
        yield from _leave("pairs", "dv", head)
        yield wait("pairs_free", slot, phase_before(head, SLOTS))
        yield write("pairs", slot, head)
        yield from _take("dout", head)
        for name in ("dout", "errors"):
            yield from _leave("pairs", name, head)
        yield arrive("pairs_ready", slot, WARPS["pairs"])
        yield wait("parts_free", slot, phase_before(head, SLOTS))
        yield write("parts_pairs", slot, head)
        yield wait("parts_free", (head + 1) % SLOTS, phase_before(head + 1, SLOTS))
        yield write("columns", 0, head)
        yield from _leave("pairs", "rows", head)
        yield arrive("parts_ready", slot, WARPS["pairs"])
    yield done("tokens", trip % SLOTS, trip)


def _sum_parts(trip):
    for head in _heads(trip):
        slot = head % SLOTS
        yield from _take("rows", head)
        yield wait("parts_ready", slot, phase(head, SLOTS))
        yield from (read(f"parts_{name}", slot, head) for name in CONSUMERS)
        yield read("columns", 0, head)
        yield from (done(f"parts_{name}", slot, head) for name in CONSUMERS)
        yield done("columns", 0, head)
        yield arrive("parts_free", slot, 1)
        yield from _leave("sum", "rows", head)


def _fill(name, trip):
    slots = _slots(name)
    yield wait(f"{name}_free", trip % slots, phase_before(trip, slots))
    yield write(name, trip % slots, trip)
    yield arrive(f"{name}_ready", trip % slots, 1)


def _load(trips):
    """Behind the last chunk a record without rows."""
    for i in range(trips + 1):
        slot = i % SLOTS
        yield wait("tokens_free", slot, phase_before(i, SLOTS))
        yield write("work", slot, i)
        yield arrive("work_ready", slot, 1)
        if i < trips:
            yield write("tokens", slot, i)
            yield arrive("tokens_ready", slot, 1)
            for head in _heads(i):
                for name in READERS:
                    if name not in STATE_TILES:
                        yield from _fill(name, head)


def _load_states(trip):
    for head in _heads(trip):
        for name in STATE_TILES:
            yield from _fill(name, head)


BACKWARD_GRADIENTS_PROTOCOL = Protocol(
    barriers={
        name: BarrierSlots(BACKWARD_GRADIENTS.barrier_slots[name], count)
        for name, count in BACKWARD_GRADIENTS.arrivals.items()
    },
    tiles={
        "work": TileSlots(SLOTS, tuple(WARPS)),  # the record of a chunk
        "tokens": TileSlots(SLOTS, CONSUMERS),
        **{name: TileSlots(_slots(name), readers) for name, readers in READERS.items()},
        "pairs": TileSlots(SLOTS, ("queries", "keys")),
        **{f"parts_{name}": TileSlots(SLOTS, ("sum",)) for name in CONSUMERS},
        "columns": TileSlots(1, ("sum",)),
    },
    roles={
        "queries": _with_chunks("queries", _queries),
        "keys": _with_chunks("keys", _keys),
        "pairs": _with_chunks("pairs", _pairs),
        "sum": _with_chunks("sum", _sum_parts),
        "load": _load,
        "load_states": _with_chunks("load_states", _load_states),
    },
)
