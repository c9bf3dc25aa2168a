"""Which numbers of a state a thread of the decode kernel holds, as plain arithmetic, for both layouts and state dtypes.

A thread reads 16 bytes at a time; `run` lanes side by side read one run of a row, and the other lanes of the warp read other
rows. Where rows are keys ([K, V]), a warp has all keys of a few values, in runs of 32 bytes, a sector; where rows are values
([V, K]), it has whole rows, in runs of 128 bytes. Either way no two warps share a value, and they never wait for each other.

Number n of a thread belongs to its key `key(n)` and its value `value(n)`.
"""

from dataclasses import dataclass

from ._sm90 import BYTES, HEAD_DIM, WARP

ACCESS = 16  # bytes


@dataclass(frozen=True)
class DecodeLayout:
    """Places of a thread's numbers; positions are expressions of the thread's warp and lane and of the block's tile."""

    v_first: bool
    state_dtype: str
    warps: int = 4

    @property
    def columns(self) -> int:
        """Numbers of one access."""
        return ACCESS // BYTES[self.state_dtype]

    @property
    def blocks_per_sm(self) -> int:
        """Blocks whose registers an SM has room for."""
        return 6 if self.numbers == 32 else 4

    @property
    def run(self) -> int:
        """Lanes that read side by side."""
        return 8 if self.v_first else 2

    @property
    def keys(self) -> int:
        """Different keys among a thread's numbers; in pieces of `key_width` side by side."""
        return HEAD_DIM // self.run if self.v_first else HEAD_DIM * self.run // WARP

    @property
    def values(self) -> int:
        """Different values among a thread's numbers."""
        return 2 if self.v_first else self.columns

    @property
    def numbers(self) -> int:
        return self.keys * self.values

    @property
    def accesses(self) -> int:
        return self.numbers // self.columns

    @property
    def key_width(self) -> int:
        return self.columns if self.v_first else self.keys

    @property
    def values_of_warp(self) -> int:
        return self.values * (WARP // self.run if self.v_first else self.run)

    @property
    def tiles(self) -> int:
        """Blocks of a head."""
        return HEAD_DIM // (self.warps * self.values_of_warp)

    @property
    def steps(self) -> tuple[int, ...]:
        """Distances of the lanes that hold other keys of the same values."""
        return (1, 2, 4) if self.v_first else (2, 4, 8, 16)

    def key(self, n):
        """Which of the thread's keys number n belongs to."""
        return n % self.keys if self.v_first else n // self.columns

    def value(self, n):
        """Which of the thread's values number n belongs to."""
        return n // self.keys if self.v_first else n % self.columns

    def first_key(self, lane):
        return (lane % self.run) * self.columns if self.v_first else (lane // self.run) * self.keys

    def first_value(self, tile, warp, lane):
        place = lane // self.run if self.v_first else lane % self.run
        return (tile * self.warps + warp) * self.values_of_warp + place * self.values

    def piece(self, index):
        """Distance of a piece of keys from the first."""
        return index * self.run * self.columns

    def offset(self, access, tile, warp, lane):
        """Place of an access in the head's state of HEAD_DIM * HEAD_DIM numbers."""
        key, value = self.first_key(lane), self.first_value(tile, warp, lane)
        if self.v_first:
            pieces = self.keys // self.key_width
            return (value + access // pieces) * HEAD_DIM + key + self.piece(access % pieces)
        return (key + access) * HEAD_DIM + value

    def writes(self, lane):
        """Whether the lane writes outputs: one of those that hold the same values."""
        return lane % self.run == 0 if self.v_first else lane < self.run
