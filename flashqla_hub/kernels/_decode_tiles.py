"""Which numbers of a state a thread of the decode kernel holds, as plain arithmetic, for both layouts and state dtypes.

A thread reads 16 bytes at a time; `run` lanes side by side read one run of a row, and the other lanes of the warp read other
rows. Where rows are values ([V, K]), a warp has whole rows. Where rows are keys ([K, V]), the warps of a block share the keys
of float32 states, in runs of 128 bytes, and meet once a token; of bfloat16 states a warp has all keys of a few values, in runs
of 32 bytes, a sector (docs/design/2026-11-29-around-the-recurrence.md has the times of either).

`number(key, value)` is where a thread holds the state of its `key`-th key and `value`-th value.
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
        return 4 if self.numbers > 32 or self.key_warps > 1 else 6

    @property
    def key_warps(self) -> int:
        """Warps that share the keys of the same values."""
        return self.warps if not self.v_first and self.state_dtype == "float32" else 1

    @property
    def run(self) -> int:
        """Lanes that read side by side."""
        return 8 if self.v_first or self.key_warps > 1 else 2

    @property
    def keys(self) -> int:
        """Different keys among a thread's numbers; in pieces of `key_width` side by side."""
        return HEAD_DIM // self.run if self.v_first else HEAD_DIM * self.run // (WARP * self.key_warps)

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
    def values_of_block(self) -> int:
        return self.warps // self.key_warps * self.values_of_warp

    @property
    def tiles(self) -> int:
        """Blocks of a head."""
        return HEAD_DIM // self.values_of_block

    @property
    def steps(self) -> tuple[int, ...]:
        """Distances of the lanes that hold other keys of the same values."""
        if self.v_first:
            return (1, 2, 4)
        return tuple(step for step in (2, 4, 8, 16) if step >= self.run)

    def number(self, key, value):
        """The number that belongs to a thread's key and value."""
        return value * self.keys + key if self.v_first else key * self.columns + value

    def first_key(self, warp, lane):
        if self.v_first:
            return (lane % self.run) * self.columns
        return (warp % self.key_warps * (WARP // self.run) + lane // self.run) * self.keys

    def first_value(self, tile, warp, lane):
        place = lane // self.run if self.v_first else lane % self.run
        return tile * self.values_of_block + warp // self.key_warps * self.values_of_warp + place * self.values

    def piece(self, index):
        """Distance of a piece of keys from the first."""
        return index * self.run * self.columns

    def offset(self, access, tile, warp, lane):
        """Place of an access in the head's state of HEAD_DIM * HEAD_DIM numbers."""
        key, value = self.first_key(warp, lane), self.first_value(tile, warp, lane)
        if self.v_first:
            pieces = self.keys // self.key_width
            return (value + access // pieces) * HEAD_DIM + key + self.piece(access % pieces)
        return (key + access) * HEAD_DIM + value

    def writes(self, warp, lane):
        """Whether the thread writes outputs: one of those that hold the same values."""
        return lane % self.run == 0 if self.v_first else warp % self.key_warps * WARP + lane < self.run
