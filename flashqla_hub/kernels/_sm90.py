"""Sizes, warp roles, register budgets, barrier counts and shared memory of the SM90 kernels, as plain arithmetic.

Nothing here imports TileLang: tests compare these numbers with the limits of the chip, and the kernels take every count
from here, so that a role that gains a warp changes its barriers in one place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

WARP = 32
WARPGROUP = 4 * WARP
WARPS_PER_GROUP = WARPGROUP // WARP

CHUNK = 64  # tokens of a step
HEAD_DIM = 128  # K = V
VALUE_TILE = 64  # value rows of a state warpgroup: the M of a wgmma
SOLVE_BLOCK = 16  # edge of a block of the chunk's triangular system: the M and K of an mma.sync
LEAF = 8  # edge of a block that is solved by substitution
HALF_CHUNK = CHUNK // 2
TRIANGLE_ROWS = 3 * HALF_CHUNK
"""Rows of a lower triangular [CHUNK, CHUNK] tile without its upper right quarter: the lower right, the upper left and the
lower left quarter, one below the other."""

LOWER_RIGHT, UPPER_LEFT, LOWER_LEFT = 0, HALF_CHUNK, 2 * HALF_CHUNK  # their first rows

REGISTER_FILE = 64 * 1024  # 32-bit registers of an SM
REGISTER_STEP = 8  # setmaxnreg takes multiples of it
SHARED_MEMORY = 227 * 1024  # bytes that one block may have
SHARED_MEMORY_OF_SM = 228 * 1024
SHARED_MEMORY_OVERHEAD = 2 * 1024  # per block: the driver's part, and the barriers with their alignment

LONG = 16 * CHUNK  # tokens of a sequence beyond which the kernel for short sequences leaves it to the recurrence

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}

ITEM_WORDS = 12  # int32 words that say what a block of the recurrence does
ITEM_SEQUENCE, ITEM_HEAD, ITEM_FIRST_TOKEN, ITEM_FIRST_SLOT, ITEM_CHUNKS, ITEM_LAST_ROWS = range(6)
ITEM_SILENT, ITEM_START, ITEM_LINKS, ITEM_END, ITEM_OWN, ITEM_SIGN = range(
    6, ITEM_WORDS
)  # chunks without outputs, START_*, ...
CHUNK_WORDS = 4  # int32 words of a chunk record; the last is unused
CHUNK_FIRST_TOKEN, CHUNK_ROWS, CHUNK_SEQUENCE = range(3)
START_ZERO, START_INITIAL, START_IDENTITY, START_STATE, START_BORDER = range(5)  # START_STATE: of a segment, then links
END_NOTHING, END_FINAL, END_STATE, END_TRANSITION, END_BORDER = range(5)  # where the last state goes
MISSING, LINK, BASE = range(3)  # what `ready` says of a segment's state and transition

L2NORM_EPS = 1e-6  # inside the root

CERTIFIED = -24.0
"""log2 of a decay that forgets what was before it: half a unit in the last place of float32."""

UNCERTAIN = 1e30
"""Bound of a chunk whose writes may make the state grow; no sum with it is a decay."""

WRITE_SLACK = 2.0**-7
"""beta |k|^2 up to 2 + this counts as 2: keys normalised in bfloat16 miss norm 1 by as much."""

WEAKEST_STRENGTH = 2.0**-32
"""A writing strength closer to zero than this counts as this where an error is to be had back from what it writes."""

UNFACTORED = 3e38
"""Stands where a factor of a row would be in a chunk whose decays do not split; no such factor is beyond 2^FACTORED_RANGE."""

VANISHING = -1000.0
"""log2 of a decay that is zero in float32."""

STRONGEST_GATE = -150.0
"""log2 of the strongest decay of one token that is told apart from zero: 2^-150 rounds to zero in float32, so a stronger
gate acts the same. The bound keeps the sum of 64 gates exact to 2^-11, where one of -1e30 or -inf would swallow the rest."""

FACTORED_RANGE = {"bfloat16": 80.0, "float16": 8.0}
"""Largest |log2 decay| between a reference and any token of the chunk, and the chunk's start, for which decay[t, s] is
split into a factor of t and one of s (`_tile.find_reference`). The factors pass through operands of the given dtype: 2^80
leaves bfloat16 room for |q||k| up to 2^40 and for values of 2^-40 to 2^40; 2^8 is what float16 has to spare."""


_lanes_arriving = ContextVar("lanes_arriving", default=1)


@contextmanager
def every_lane_arrives() -> Iterator[None]:
    """Kernels built within have each lane of a warp arrive at an mbarrier, where otherwise one arrives for all.

    For tools that follow threads: racecheck does not take the warp barrier before that one lane's arrival for an order
    of the other lanes' accesses. Nothing else of the kernels changes.
    """
    token = _lanes_arriving.set(WARP)
    try:
        yield
    finally:
        _lanes_arriving.reset(token)


def lanes_arriving() -> int:
    """Arrivals of a warp at an mbarrier, by which the counts of `arrivals` below are multiplied."""
    return _lanes_arriving.get()


@dataclass(frozen=True)
class Role:
    """A warp role: its warps, and the registers of each of their threads."""

    warps: int
    registers: int


@dataclass(frozen=True)
class RecurrenceLayout:
    """Roles, barriers and tiles of the recurrence kernel (`recurrence.py`)."""

    stages: int = 3  # chunks of q, k, decay and key norms in flight; two cost 7 % (docs/design/2026-11-29-forward.md)
    slots: int = 2  # chunks of v, operand, scores and outputs in flight
    state: Role = Role(2 * WARPS_PER_GROUP, 176)
    scores: Role = Role(WARPS_PER_GROUP, 128)
    movers: Role = Role(WARPS_PER_GROUP, 32)  # two loaders and two storers, a warp each

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.state, self.scores, self.movers

    @property
    def threads(self) -> int:
        return sum(role.warps for role in self.roles) * WARP

    @property
    def registers(self) -> int:
        return sum(role.warps * WARP * role.registers for role in self.roles)

    @property
    def arrivals(self) -> dict[str, int]:
        """Arrivals that complete a phase: one for a loader, whose bytes count beside it, else one a warp."""
        state, half = self.state.warps, self.state.warps // 2
        return {
            "tokens_ready": 1,
            "tokens_free": state + self.scores.warps,
            "values_ready": 1,
            "values_free": state,
            "scores_ready": self.scores.warps,
            "scores_free": state,
            "output_ready": half,  # each half of the value rows is stored by a warp of its own
            "output_free": 2,
            "link_ready": self.scores.warps,
            "link_free": state,
            "keys_free": state,
        }

    @property
    def barrier_slots(self) -> dict[str, int]:
        """Barriers of each name: one a stage or slot, and for finished outputs one a half and slot."""
        names = dict.fromkeys(self.arrivals, self.slots)
        once = dict.fromkeys(("link_ready", "link_free", "keys_free"), 1)
        return names | once | {"tokens_ready": self.stages, "tokens_free": self.stages, "output_ready": 2 * self.slots}

    def shared_memory(self, dtype: str) -> int:
        """Bytes of all tiles, before alignment."""
        wide, square = CHUNK * HEAD_DIM * BYTES[dtype], CHUNK * CHUNK * BYTES[dtype]
        row = CHUNK * BYTES["float32"]
        staged = self.stages * (2 * wide + 2 * row)  # q, k, decay, key_norm
        decayed_keys = wide
        slotted = self.slots * (2 * wide + 2 * square + 2 * row + 2 * BYTES["float32"] + 2 * BYTES["int32"])
        scratch = (2 + self.scores.warps) * row + ITEM_WORDS * BYTES["int32"]
        return staged + decayed_keys + slotted + scratch


@dataclass(frozen=True)
class FactorLayout:
    """Threads and shared memory of the factor kernel (`factor.py`), of which an SM holds several blocks."""

    sides: int = 2  # value heads in flight
    warps_per_side: int = 2
    blocks_per_sm: int = 6
    row_padding: int = 8  # halves: rows of 144 bytes put the eight rows of a matrix load in different banks
    leaf_padding: int = 8  # floats: the four leaves that a warp reads lie in different banks

    @property
    def threads(self) -> int:
        return self.sides * self.warps_per_side * WARP

    def shared_memory(self, dtype: str) -> int:
        """Bytes of all tiles, before alignment."""
        keys = CHUNK * HEAD_DIM * BYTES[dtype]
        square = CHUNK * (CHUNK + self.row_padding) * BYTES["float16"]
        leaves = CHUNK // LEAF * (LEAF * LEAF + self.leaf_padding) * BYTES["float32"]
        gates = 2 * self.sides * (CHUNK * (4 * BYTES["float32"] + BYTES["float16"]) + BYTES["int32"])
        return keys + square + leaves + 2 * CHUNK * BYTES["float32"] + gates


@dataclass(frozen=True)
class ShortLayout:
    """Threads and shared memory of the kernel for short sequences (`short.py`)."""

    warps: int = WARPS_PER_GROUP
    blocks_per_sm: int = 3
    words: int = 5  # that say what a block does
    stages: int = 2  # value heads in flight of a sequence of at most half a chunk

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def shared_memory(self, dtype: str) -> int:
        """Bytes of all tiles, before alignment."""
        wide, square = CHUNK * HEAD_DIM * BYTES[dtype], CHUNK * CHUNK * BYTES[dtype]
        quarters = (self.stages + 1) * HALF_CHUNK * HALF_CHUNK * BYTES[dtype]  # operands and scores of half a chunk
        return 3 * wide + 2 * square + quarters + 6 * CHUNK * BYTES["float32"] + self.words * BYTES["int32"]


RECURRENCE = RecurrenceLayout()
FACTOR = FactorLayout()
SHORT = ShortLayout()


SEGMENT_WORDS = (
    7  # int32 words of a segment's record: four of its sequence, which sequence, which segment of it, its border
)
SEGMENT_FIRST_TOKEN, SEGMENT_TOKENS, SEGMENT_FIRST_SLOT, SEGMENT_CHUNKS, SEGMENT_SEQUENCE = range(5)
SEGMENT_INDEX, SEGMENT_BORDER = range(5, SEGMENT_WORDS)
BORDER_BEFORE, BORDER_BEHIND = 1, 2  # bits: the sequence goes on in the range of chunks before, or behind

ROW_VECTORS = 9  # float32 numbers of a token and value head that the backward kernels share
ROW_STRENGTH, ROW_UNTIL, ROW_DECAY, ROW_SINCE, ROW_READ, ROW_WRITE, ROW_QUERY, ROW_TAKE, ROW_ERROR = range(ROW_VECTORS)
GRADIENT_ROWS = ROW_SINCE + 1  # the first of them, which the gradient kernel reads
FIRST_SCAN_ROW = ROW_DECAY  # the first that the scans read
SCAN_ROWS = ROW_VECTORS - FIRST_SCAN_ROW
PAIR_VECTORS = 3  # of a token and value head, for the scores
PAIR_REFERENCE, PAIR_COLUMN, PAIR_ROW = range(PAIR_VECTORS)
NORM_VECTORS = 2  # of a token and key head
NORM_QUERY, NORM_KEY = range(NORM_VECTORS)

CURSOR_WORDS = 2  # int32 words of a queue of chunks (`_ready.py`)
CURSOR_TAKEN, CURSOR_FILLED = range(CURSOR_WORDS)
BLOCKS_OF_HEAD = 4  # that write a chunk of a value head: both halves in both directions
WORK_WORDS = 4  # int32 words that say which chunk a block of the gradient kernel works on
WORK_SLOT, WORK_KEY_HEAD, WORK_FIRST_TOKEN, WORK_ROWS = range(WORK_WORDS)


@dataclass(frozen=True)
class BackwardRowsLayout:
    """Threads and shared memory of the kernel that makes the scales of rows (`backward_rows.py`)."""

    threads: int = 4 * WARP

    def shared_memory(self, dtype: str) -> int:
        """Bytes of all tiles, before alignment."""
        return (NORM_VECTORS + 1) * CHUNK * BYTES["float32"]


@dataclass(frozen=True)
class BackwardScanLayout:
    """Roles, barriers and tiles of the two scans of the backward (`backward_scan.py`)."""

    stages: int = 3  # chunks in flight
    scores_in_flight: int = 2  # chunks whose scores are there
    announced_at_once: int = 16  # chunks that are announced together (docs/design/2026-12-01-instructions.md)
    announcements: int = 2  # in flight
    directions: int = 2  # states from first to last chunk, their gradients from last to first
    state: Role = Role(WARPS_PER_GROUP, 240)
    scores: Role = Role(WARPS_PER_GROUP, 184)
    movers: Role = Role(WARPS_PER_GROUP, 80)  # a loader, two storers and a warp that announces what they have stored

    @property
    def halves(self) -> int:
        return HEAD_DIM // VALUE_TILE

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.state, self.scores, self.movers

    @property
    def threads(self) -> int:
        return sum(role.warps for role in self.roles) * WARP

    @property
    def registers(self) -> int:
        return sum(role.warps * role.registers for role in self.roles) * WARP

    @property
    def arrivals(self) -> dict[str, int]:
        """Arrivals that complete a phase."""
        warps = self.state.warps
        return {
            "chunk_ready": 1,
            "chunk_free": warps,
            "scores_ready": self.scores.warps,
            "scores_free": warps,
            "state_ready": warps,
            "state_free": 1,
            "values_ready": warps,
            "values_free": 1,
            "stored_ready": 2,
            "stored_free": 1,
            "link_ready": 1,
            "link_free": warps,
        }

    @property
    def barrier_slots(self) -> dict[str, int]:
        slots = dict.fromkeys(self.arrivals, 1) | dict.fromkeys(("chunk_ready", "chunk_free"), self.stages)
        slots |= dict.fromkeys(("stored_ready", "stored_free"), self.announcements)
        return slots | dict.fromkeys(("scores_ready", "scores_free"), self.scores_in_flight)

    def shared_memory(self, dtype: str) -> int:
        """Bytes of all tiles, before alignment."""
        wide, square = CHUNK * HEAD_DIM * BYTES[dtype], CHUNK * CHUNK * BYTES[dtype]
        rows = (SCAN_ROWS + PAIR_VECTORS) * CHUNK * BYTES["float32"]
        staged = self.stages * (2 * wide + 2 * square + rows)  # q, k, v or do, solve
        return staged + wide + (self.scores_in_flight + 1) * square + ITEM_WORDS * BYTES["int32"]


@dataclass(frozen=True)
class BackwardGradientLayout:
    """Roles, barriers and tiles of the gradient kernel of the backward (`backward_gradients.py`)."""

    blocks: int = 132  # one an SM of the GPUs with most; each takes its next chunk from a queue
    slots: int = 2  # chunks of q and k, and heads of row scales, pairs and parts, in flight
    queries: Role = Role(WARPS_PER_GROUP, 160)
    keys: Role = Role(WARPS_PER_GROUP, 160)
    pairs: Role = Role(WARPS_PER_GROUP, 152)
    movers: Role = Role(WARPS_PER_GROUP, 40)  # two loaders, a warp that sums up and one that waits for the scan's end
    parts: int = 6
    column_groups: int = 32  # rows of partial sums over the rows of a 64 x 64 accumulator: one for each (warp, row % 8)
    column_padding: int = 8  # floats: eight rows of pairs of columns lie in different banks

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.queries, self.keys, self.pairs, self.movers

    @property
    def threads(self) -> int:
        return sum(role.warps for role in self.roles) * WARP

    @property
    def registers(self) -> int:
        return sum(role.warps * role.registers for role in self.roles) * WARP

    @property
    def arrivals(self) -> dict[str, int]:
        """Arrivals that complete a phase."""
        queries, keys, pairs = self.queries.warps, self.keys.warps, self.pairs.warps
        free = {
            "tokens": queries + keys + pairs + 2,  # two more read which chunk it is
            "rows": queries + keys + pairs + 1,
            "errors": keys + pairs,
            "dv": keys + pairs,
            "dout": queries + pairs,
            "dstates": queries + keys,
            "states": queries + keys,
        }
        loaded = {f"{name}_ready": 1 for name in free} | {f"{name}_free": count for name, count in free.items()}
        return loaded | {
            "work_ready": 1,
            "pairs_ready": pairs,
            "pairs_free": queries + keys,
            "parts_ready": queries + keys + pairs,
            "parts_free": 1,
        }

    @property
    def barrier_slots(self) -> dict[str, int]:
        once, slotted = dict.fromkeys(self.arrivals, 1), ("tokens", "rows", "pairs", "parts")
        several = {f"{name}_{event}": self.slots for name in slotted for event in ("ready", "free")}
        return once | several | {"work_ready": self.slots}

    def shared_memory(self, dtype: str) -> int:
        """Bytes of all tiles, before alignment."""
        wide, square = CHUNK * HEAD_DIM * BYTES[dtype], CHUNK * CHUNK * BYTES[dtype]
        row = CHUNK * BYTES["float32"]
        columns = self.column_groups * (CHUNK + self.column_padding) * BYTES["float32"]
        slotted = 2 * wide + (NORM_VECTORS + GRADIENT_ROWS + self.parts) * row + 2 * square
        head = 3 * wide + 2 * HEAD_DIM * HEAD_DIM * BYTES[dtype]  # errors, dv, do; the state and its gradient
        words = (self.slots * WORK_WORDS + 1) * BYTES["int32"]
        return self.slots * slotted + head + columns + words


BACKWARD_ROWS = BackwardRowsLayout()
BACKWARD_SCAN = BackwardScanLayout()
BACKWARD_GRADIENTS = BackwardGradientLayout()
