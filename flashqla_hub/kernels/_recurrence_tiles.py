"""Shared tiles, barriers and register tiles of the recurrence kernel, and the protocol that binds them."""

import tilelang.language as T

from ._sm90 import CHUNK, HALF_CHUNK, HEAD_DIM, ITEM_WORDS, RECURRENCE
from ._tile import Group, alloc_barriers
from .protocol import Barriers as BarrierSlots
from .protocol import Protocol, arrive, done, read, wait, write
from .protocol import Tiles as TileSlots

STAGES, SLOTS = RECURRENCE.stages, RECURRENCE.slots
DECAYED_KEYS = STAGES  # the place behind the stages of k
HALVES = ("low", "high")  # of the value rows


class Tiles(Group):
    """Shared memory. `row_scale` is the decay since the chunk's start times 1 / |k| (read) and scale / |q| (out)."""

    suffix = "_smem"

    def __init__(self, dtype, keeps_borders):
        self.q = T.alloc_shared((STAGES, CHUNK, HEAD_DIM), dtype)
        self.k = T.alloc_shared((STAGES + 1, CHUNK, HEAD_DIM), dtype)
        self.decay = T.alloc_shared((STAGES, CHUNK), "float32")
        self.key_norm = T.alloc_shared((STAGES, CHUNK), "float32")
        # A slot is a buffer of its own: a row offset into one buffer is lost when it is read with ldmatrix.trans.
        self.v = [T.alloc_shared((CHUNK, HEAD_DIM), dtype) for _ in range(SLOTS)]
        self.o = [T.alloc_shared((CHUNK, HEAD_DIM), dtype) for _ in range(SLOTS)]
        # Columns 32 to 63 above columns 0 to 31. The first 32 rows are the upper right quarter: zeros, which stay.
        self.operand = T.alloc_shared((SLOTS, 2 * CHUNK, HALF_CHUNK), dtype)
        self.scores = T.alloc_shared((SLOTS, CHUNK, CHUNK), dtype)
        self.row_scale = T.alloc_shared((SLOTS, 2, CHUNK), "float32")
        self.chunk_decay = T.alloc_shared((SLOTS,), "float32")  # to the reference, and from there to the chunk's end
        self.late_decay = T.alloc_shared((SLOTS,), "float32")
        self.in_one_step = T.alloc_shared((SLOTS,), "int32")  # whether the two products of the outputs share a scale
        self.write_stage = T.alloc_shared((SLOTS,), "int32")  # where the state product finds its keys
        if keeps_borders:
            self.border = T.alloc_shared((SLOTS,), "int32")  # which border is behind the chunk, or -1
        self.score_scale = T.alloc_shared((CHUNK,), "float32")
        self.key_scale = T.alloc_shared((CHUNK,), "float32")
        self.column_decay = T.alloc_shared((RECURRENCE.scores.warps, CHUNK), "float32")
        self.item = T.alloc_shared((ITEM_WORDS,), "int32")


class Barriers(Group):
    """mbarriers by event; arrivals and slots in `_sm90.py`."""

    def __init__(self):
        for name, arrivals in RECURRENCE.arrivals.items():
            setattr(self, name, alloc_barriers(arrivals, RECURRENCE.barrier_slots[name]))


class StateRegisters(Group):
    """Of the two state warpgroups, 64 value rows each; the state is transposed, [V, K]."""

    suffix = "_frag"

    def __init__(self, dtype):
        self.S = T.alloc_fragment((HEAD_DIM, HEAD_DIM), "float32")
        self.S_in = T.alloc_fragment((HEAD_DIM, HEAD_DIM), dtype)
        self.W = T.alloc_fragment((HEAD_DIM, CHUNK), "float32")
        self.Z = [T.alloc_fragment((HEAD_DIM, HALF_CHUNK), dtype) for _ in range(2)]
        self.N = T.alloc_fragment((HEAD_DIM, CHUNK), dtype)
        self.O = T.alloc_fragment((HEAD_DIM, CHUNK), "float32")
        self.v = T.alloc_fragment((CHUNK, HEAD_DIM), dtype)
        self.o = T.alloc_fragment((CHUNK, HEAD_DIM), dtype)
        self.squares = T.alloc_fragment((HEAD_DIM,), "float32")
        self.high = [T.alloc_fragment((HEAD_DIM, CHUNK), dtype) for _ in range(2)]
        self.low = [T.alloc_fragment((HEAD_DIM, CHUNK), dtype) for _ in range(2)]


class ScoreRegisters(Group):
    """Of the score warpgroup."""

    suffix = "_frag"

    def __init__(self, dtype):
        self.score = T.alloc_fragment((CHUNK, CHUNK), "float32")
        self.out = T.alloc_fragment((CHUNK, CHUNK), dtype)
        self.row_factor = T.alloc_fragment((CHUNK,), "float32")
        self.row_decay = T.alloc_fragment((CHUNK,), "float32")
        self.column_decay = T.alloc_fragment((CHUNK,), "float32")


def phase(trip, slots):
    """Parity of the phase that the `trip`-th use of a barrier with so many slots completes."""
    return trip // slots % 2


def phase_before(trip, slots):
    """Parity of the phase before it: a wait for a slot that is still fresh passes."""
    return (trip // slots + 1) % 2


def _links(trips):
    """Links that the simulation follows before so many chunks; a block may have any number."""
    return trips // 2


def _state(half):
    """Events of one state warpgroup; half of the arrivals of a barrier that both complete."""
    name, arrivals = HALVES[half], RECURRENCE.state.warps // 2

    def role(trips):
        for i in range(_links(trips)):
            yield wait("link_ready", 0, i % 2)
            yield read("link", 0, i)
            yield done("link", 0, i)
            yield arrive("link_free", 0, arrivals)
        if _links(trips):
            yield arrive("keys_free", 0, arrivals)
        for i in range(trips):
            stage, slot = i % STAGES, i % SLOTS
            yield wait("scores_ready", slot, phase(i, SLOTS))
            yield from (read(tile, stage, i) for tile in ("q", "k"))
            yield from (read(tile, slot, i) for tile in (f"v_{name}", "operand", "scores"))
            yield done(f"v_{name}", slot, i)
            yield arrive("values_free", slot, arrivals)
            yield from (done(tile, slot, i) for tile in ("operand", "scores"))
            yield arrive("scores_free", slot, arrivals)
            yield from (done(tile, stage, i) for tile in ("q", "k"))
            yield arrive("tokens_free", stage, arrivals)
            yield write(f"o_{name}", slot, i)
            yield arrive("output_ready", half * SLOTS + slot, arrivals)

    return role


def _scores(trips):
    warps = RECURRENCE.scores.warps
    for i in range(_links(trips)):
        yield wait("link_free", 0, (i + 1) % 2)
        yield write("link", 0, i)
        yield arrive("link_ready", 0, warps)
    for i in range(trips):
        stage, slot = i % STAGES, i % SLOTS
        yield wait("tokens_ready", stage, phase(i, STAGES))
        yield from (read(tile, stage, i) for tile in ("q", "k"))
        yield wait("scores_free", slot, phase_before(i, SLOTS))
        yield write("scores", slot, i)
        yield wait("values_ready", slot, phase(i, SLOTS))
        if i > 0:  # only a chunk whose decay is not factored waits here, before it writes the decayed keys
            yield wait("scores_free", 1 - slot, phase(i - 1, SLOTS))
        yield from (done(tile, stage, i) for tile in ("q", "k"))
        yield arrive("tokens_free", stage, warps)
        yield wait("output_free", slot, phase_before(i, SLOTS))
        yield arrive("scores_ready", slot, warps)


def _load_tokens(trips):
    links = _links(trips)
    if links:
        yield wait("keys_free", 0, 0)
        yield write("link", 0, links)  # the keys go where the transitions were
    for i in range(trips):
        stage = i % STAGES
        yield wait("tokens_free", stage, phase_before(i, STAGES))
        yield from (write(tile, stage, i) for tile in ("q", "k"))
        yield arrive("tokens_ready", stage, 1)


def _load_values(trips):
    for i in range(trips):
        slot = i % SLOTS
        yield wait("values_free", slot, phase_before(i, SLOTS))
        yield from (write(f"v_{name}", slot, i) for name in HALVES)
        yield wait("scores_free", slot, phase_before(i, SLOTS))
        yield write("operand", slot, i)
        yield arrive("values_ready", slot, 1)


def _store(half):
    name = HALVES[half]

    def role(trips):
        for i in range(trips):
            slot = i % SLOTS
            yield wait("output_ready", half * SLOTS + slot, phase(i, SLOTS))
            yield read(f"o_{name}", slot, i)
            yield done(f"o_{name}", slot, i)
            yield arrive("output_free", slot, 1)

    return role


RECURRENCE_PROTOCOL = Protocol(
    barriers={name: BarrierSlots(RECURRENCE.barrier_slots[name], count) for name, count in RECURRENCE.arrivals.items()},
    tiles={
        "link": TileSlots(1, HALVES),  # a transition, in the places of the keys
        "q": TileSlots(STAGES, ("low", "high", "scores")),
        "k": TileSlots(STAGES, ("low", "high", "scores")),
        "v_low": TileSlots(SLOTS, ("low",)),
        "v_high": TileSlots(SLOTS, ("high",)),
        "operand": TileSlots(SLOTS, HALVES),
        "scores": TileSlots(SLOTS, HALVES),
        "o_low": TileSlots(SLOTS, ("store_low",)),
        "o_high": TileSlots(SLOTS, ("store_high",)),
    },
    roles={
        "low": _state(0),
        "high": _state(1),
        "scores": _scores,
        "load_tokens": _load_tokens,
        "load_values": _load_values,
        "store_low": _store(0),
        "store_high": _store(1),
    },
)
