"""Which numbers of a state a thread of the decode kernel holds, as plain arithmetic, for both layouts and state dtypes.

`run` lanes side by side read one run of a row, and the other lanes of the warp read other rows. Where rows are values
([V, K]), a warp has whole rows, and a block the rows of some values. Where rows are keys ([K, V]), all warps of a block share the
keys of its values and meet twice a token: a block has half of the values, or where there are few heads to do, a quarter
(docs/design/2026-11-29-around-the-recurrence.md has the times).

However a [K, V] head is cut, the sums over its keys are the same to the bit: GROUP keys one after the other, then two groups
side by side, and these pairs in their order.

`number(key, value)` is where a thread holds the state of its `key`-th key and `value`-th value.
"""

from dataclasses import dataclass

from ._sm90 import BYTES, HEAD_DIM, WARP

LINE = 128  # bytes of a line of the L2 cache
SMS = 132  # of an H200
GROUP = 8  # keys of [K, V] that are summed one after the other


@dataclass(frozen=True)
class DecodeLayout:
    """Places of a thread's numbers; positions are expressions of the thread's warp and lane and of the block's tile."""

    v_first: bool
    state_dtype: str
    warps: int
    run: int  # lanes that read side by side
    columns: int  # numbers of one access: neighbouring keys of [V, K], values of [K, V]
    values: int  # different values among a thread's numbers
    blocks_per_sm: int  # whose registers an SM has room for
    orders_ahead: bool  # whether blocks bring states of later ones into the L2 cache
    yields_late: bool = False  # whether the kernel behind begins once states are read, not once blocks have begun

    @property
    def key_warps(self) -> int:
        """Warps that share the keys of the same values."""
        return 1 if self.v_first else self.warps

    @property
    def keys(self) -> int:
        """Different keys among a thread's numbers; in pieces of `key_width` side by side."""
        return HEAD_DIM // self.run if self.v_first else HEAD_DIM * self.run // (WARP * self.warps)

    @property
    def groups(self) -> int:
        """Groups of keys that are summed apart."""
        return 1 if self.v_first else self.keys // GROUP

    @property
    def numbers(self) -> int:
        return self.keys * self.values

    @property
    def accesses(self) -> int:
        return self.numbers // self.columns

    @property
    def key_width(self) -> int:
        return self.columns if self.v_first else GROUP

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
        """Distances of the lanes that add what they have read: of all keys, or of the other group of a pair."""
        if not self.v_first:
            return (self.run,) if self.lanes_of_pair > 1 else ()
        return tuple(step for step in (1, 2, 4, 8, 16) if (step < self.run) == self.v_first)

    @property
    def lanes_of_pair(self) -> int:
        """Threads of [K, V] that share a pair of groups of keys."""
        return 2 * GROUP // self.keys

    @property
    def pairs(self) -> int:
        """Pairs of groups of [K, V], whose sums are added in shared memory."""
        return HEAD_DIM // (2 * GROUP)

    @property
    def heads_side_by_side(self) -> int:
        """Heads of all sequences whose blocks leave room on an H200 for as many of the kernel behind."""
        return SMS * self.blocks_per_sm // (2 * self.tiles)

    @property
    def lines(self) -> int:
        """Lines of the cache that the block's part of a state takes."""
        return HEAD_DIM * self.values_of_block * BYTES[self.state_dtype] // LINE

    def number(self, key, value):
        """The number that belongs to a thread's key and value."""
        return value * self.keys + key if self.v_first else key * self.columns + value

    def first_key(self, warp, lane):
        if self.v_first:
            return (lane % self.run) * self.columns
        return (warp * (WARP // self.run) + lane // self.run) * self.keys

    def first_value(self, tile, warp, lane):
        if self.v_first:
            return tile * self.values_of_block + warp * self.values_of_warp + lane // self.run * self.values
        return tile * self.values_of_block + lane % self.run * self.values

    def piece(self, index):
        """Distance of a piece of keys from the first."""
        return index * self.key_width * (self.run if self.v_first else 1)

    def offset(self, access, tile, warp, lane):
        """Place of an access in the head's state of HEAD_DIM * HEAD_DIM numbers."""
        key, value = self.first_key(warp, lane), self.first_value(tile, warp, lane)
        if self.v_first:
            pieces = self.keys // self.key_width
            return (value + access // pieces) * HEAD_DIM + key + self.piece(access % pieces)
        return (key + access) * HEAD_DIM + value

    def line(self, index, tile):
        """Place of a line of the block's part of a state."""
        step = LINE // BYTES[self.state_dtype]
        if self.v_first:
            return tile * self.values_of_block * HEAD_DIM + index * step
        lines = self.values_of_block // step
        return index // lines * HEAD_DIM + tile * self.values_of_block + index % lines * step

    def writes(self, warp, lane):
        """Whether the thread writes outputs: one of those that hold the same values."""
        return lane % self.run == 0 if self.v_first else warp * WARP + lane < self.run


KV, VK = False, True

DECODE_LAYOUTS = {
    "kv_f32": DecodeLayout(
        KV, "float32", warps=4, run=16, columns=4, values=4, blocks_per_sm=4, orders_ahead=False, yields_late=True
    ),
    "kv_f32_few": DecodeLayout(
        KV, "float32", warps=8, run=16, columns=2, values=2, blocks_per_sm=2, orders_ahead=False
    ),
    "kv_bf16": DecodeLayout(KV, "bfloat16", warps=8, run=16, columns=8, values=8, blocks_per_sm=2, orders_ahead=True),
    "vk_f32": DecodeLayout(VK, "float32", warps=4, run=8, columns=4, values=2, blocks_per_sm=6, orders_ahead=False),
    "vk_bf16": DecodeLayout(VK, "bfloat16", warps=4, run=8, columns=8, values=4, blocks_per_sm=3, orders_ahead=True),
}
"""Kernels by the end of their names; `few` is for so few heads that smaller parts of them, side by side, are sooner done."""
