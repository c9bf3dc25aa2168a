"""Which numbers of a state the threads of the decode kernel hold; no compiler and no GPU."""

from collections import Counter
from itertools import product

import pytest

from flashqla_hub.kernels._decode_tiles import DECODE_LAYOUTS, GROUP, LINE, SMS
from flashqla_hub.kernels._sm90 import BYTES, HEAD_DIM, REGISTER_FILE, WARP

each_layout = pytest.mark.parametrize("layout", DECODE_LAYOUTS.values(), ids=DECODE_LAYOUTS)


def threads(layout):
    return [(tile, warp, lane) for tile in range(layout.tiles) for warp in range(layout.warps) for lane in range(WARP)]


def keys_of(layout, warp, lane):
    """The keys of a thread, in the order of its registers."""
    pieces = range(layout.keys // layout.key_width)
    return [layout.first_key(warp, lane) + layout.piece(i) + e for i in pieces for e in range(layout.key_width)]


def place_in(layout):
    return lambda pair: layout.number(*pair)


@each_layout
def test_every_number_of_a_state_has_one_thread(layout):
    offsets = Counter(
        layout.offset(access, *thread) + e
        for thread in threads(layout)
        for access in range(layout.accesses)
        for e in range(layout.columns)
    )
    assert offsets == Counter(range(HEAD_DIM * HEAD_DIM))


@each_layout
def test_numbers_belong_to_the_keys_and_values_that_are_loaded(layout):
    for tile, warp, lane in threads(layout):
        keys, first_value = keys_of(layout, warp, lane), layout.first_value(tile, warp, lane)
        assert len(keys) == layout.keys
        for number, (i, j) in enumerate(
            sorted(product(range(layout.keys), range(layout.values)), key=place_in(layout))
        ):
            access, e = divmod(number, layout.columns)
            row, column = divmod(layout.offset(access, tile, warp, lane) + e, HEAD_DIM)
            key, value = (column, row) if layout.v_first else (row, column)
            assert (key, value) == (keys[i], first_value + j)


@each_layout
def test_accesses_are_aligned_and_lanes_side_by_side_read_whole_sectors(layout):
    size = BYTES[layout.state_dtype]
    width = layout.columns * size
    assert width in (8, 16)
    for tile, warp, lane in threads(layout):
        for access in range(layout.accesses):
            start = layout.offset(access, tile, warp, lane) * size
            assert start % width == 0
            if lane % layout.run:
                assert start - layout.offset(access, tile, warp, lane - 1) * size == width
    assert layout.run * width % 32 == 0


@each_layout
def test_the_threads_that_exchange_sums_hold_all_keys_of_the_same_values(layout):
    lanes = {0}
    for step in layout.steps:
        lanes |= {lane ^ step for lane in lanes}
    starts = [0] if layout.v_first else range(0, layout.warps * WARP, layout.run * layout.lanes_of_pair)
    threads_of = [divmod(start + lane, WARP) for start in starts for lane in lanes]
    assert len({layout.first_value(0, *thread) for thread in threads_of}) == 1
    assert sorted(key for thread in threads_of for key in keys_of(layout, *thread)) == list(range(HEAD_DIM))


@each_layout
def test_every_output_is_written_once(layout):
    written = [
        layout.first_value(*thread) + e
        for thread in threads(layout)
        if layout.writes(*thread[1:])
        for e in range(layout.values)
    ]
    assert sorted(written) == list(range(HEAD_DIM))


@each_layout
def test_blocks_leave_room_for_the_numbers_and_half_as_many_registers_again(layout):
    registers = REGISTER_FILE // (layout.blocks_per_sm * layout.warps * WARP)
    assert registers >= layout.numbers * 3 // 2 + 32


@each_layout
def test_blocks_of_few_heads_leave_room_for_those_of_the_kernel_behind(layout):
    slots, blocks = SMS * layout.blocks_per_sm, layout.tiles * layout.heads_side_by_side
    assert 2 * blocks <= slots < 2 * (blocks + layout.tiles)


@each_layout
def test_the_lines_of_a_block_are_those_that_its_threads_read(layout):
    size = BYTES[layout.state_dtype]
    for tile in range(layout.tiles):
        read = {
            layout.offset(access, tile, warp, lane) * size // LINE
            for warp in range(layout.warps)
            for lane in range(WARP)
            for access in range(layout.accesses)
        }
        assert sorted(layout.line(index, tile) * size / LINE for index in range(layout.lines)) == sorted(read)


def test_sums_over_keys_have_one_order_however_a_head_is_cut():
    """Eight keys in a row, then two groups of them side by side, then these pairs."""
    for layout in DECODE_LAYOUTS.values():
        if layout.v_first:
            continue
        lanes_of_pair = [0, *layout.steps]
        starts = range(0, layout.warps * WARP, layout.run * layout.lanes_of_pair)
        assert len(starts) == layout.pairs
        for pair, start in enumerate(starts):
            keys = [keys_of(layout, *divmod(start + lane, WARP)) for lane in lanes_of_pair]
            groups = [some[i : i + GROUP] for some in keys for i in range(0, len(some), GROUP)]
            first = 2 * GROUP * pair
            assert groups == [[*range(first, first + GROUP)], [*range(first + GROUP, first + 2 * GROUP)]]
