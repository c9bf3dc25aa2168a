"""The queue of chunks between the backward's scans and its gradient kernel (`_ready.py`), in any order of steps; no GPU.

Blocks of both are generators that mirror `announce` with `count_block`, and `take_work`; they yield before each access of memory
that others see. That the sources read and write in that order is checked in `tests/compile`.
"""

import random
from dataclasses import dataclass, field
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from flashqla_hub.kernels._sm90 import (
    BACKWARD_SCAN,
    BLOCKS_OF_HEAD,
    CHUNK,
    CURSOR_FILLED,
    CURSOR_TAKEN,
    CURSOR_WORDS,
)

NOTHING = -1
PATIENCE = 100  # steps that all may make behind the last one of the scan, for each block and place


@dataclass
class Call:
    """What the kernels share, as `backward_plan.py` and `backward_rows.py` leave it, and what the test sees."""

    rows: list[int]  # of the chunk of each slot
    key_heads: int
    group: int
    at_once: int = BACKWARD_SCAN.announced_at_once
    stored: list[int] = field(init=False)
    taken: list[int] = field(default_factory=list)
    scanning: int = 0  # blocks of the scan that run

    def __post_init__(self):
        self.places = len(self.rows) * self.key_heads
        self.arrivals, self.queue, self.stored = ([0] * self.places for _ in range(3))
        self.cursors = [0] * CURSOR_WORDS

    @property
    def writers(self):
        """Blocks of the scan that have tiles of a chunk."""
        return self.group * BLOCKS_OF_HEAD

    @property
    def works(self):
        """Chunks and key heads that have rows."""
        return [work for work in range(self.places) if self.rows[work // self.key_heads]]

    def add(self, cursor):
        before = self.cursors[cursor]
        self.cursors[cursor] += 1
        return before


def scan_block(call, works):
    """Stores its tiles of all of these and announces a batch at once, a lane each; of those that lie in no slot none."""
    call.scanning += 1
    for first in range(0, len(works), call.at_once):
        batch = works[first : first + call.at_once]
        batch = [work for work in batch if 0 <= work < call.places]
        last, places = [], []
        for work in batch:
            yield
            call.stored[work] += 1
        for work in batch:
            yield
            if call.arrivals[work] == call.writers - 1:
                last.append(work)
            call.arrivals[work] += 1
        for _ in last:
            yield
            places.append(call.add(CURSOR_FILLED))
        for work, place in zip(last, places, strict=True):
            yield
            call.queue[place] = work + 1
    yield
    call.scanning -= 1


def gradient_block(call, looks_at_queue_first=False):
    """`looks_at_queue_first` is a mistake."""
    rows = 1
    while rows > 0:
        yield
        place = call.add(CURSOR_TAKEN)
        entry = 0 if place < call.places else NOTHING
        while entry == 0:
            yield
            if looks_at_queue_first:
                entry = call.queue[place]
                yield
                has_ended = call.scanning == 0
            else:
                has_ended = call.scanning == 0
                yield
                entry = call.queue[place]
            if entry == 0 and has_ended:
                entry = NOTHING
        rows = call.rows[(entry - 1) // call.key_heads] if entry > 0 else 0
        if rows > 0:
            assert call.stored[entry - 1] == call.writers, "a tile is not there yet"
            call.taken.append(entry - 1)


def scan(call, border):
    """Blocks of each value head, half and direction, of the chunks before and from the `border`-th on: two segments."""
    slots = [slot for slot, rows in enumerate(call.rows) if rows]
    for segment in (slots[:border], slots[border:]):
        for key_head in range(call.key_heads):
            works = [slot * call.key_heads + key_head for slot in segment]
            for index in range(call.writers):
                yield scan_block(call, works[::-1] if index % 2 else works)


def run(call, writers, blocks, seed, block=gradient_block):
    """Steps all, in an order in which some are slow, until they end."""
    rng = random.Random(seed)
    programs = [*writers, *(block(call) for _ in range(blocks))]
    running = {program: rng.choice((1, 1, 20)) for program in programs}
    for program in writers:
        next(program, None)  # all of the scan run before any block of the gradient kernel does
    left = PATIENCE * (blocks + call.places + 1)
    while running:
        [program] = rng.choices([*running], [*running.values()])
        try:
            next(program)
        except StopIteration:
            del running[program]
        left -= call.scanning == 0
        assert left > 0, "blocks wait for what never comes"


@st.composite
def calls(draw):
    """Few chunks, which the scan's batches hold all, or several smaller ones."""
    rows = draw(st.lists(st.sampled_from((0, 1, CHUNK)), min_size=1, max_size=9))
    at_once = draw(st.sampled_from((1, 2, 4, BACKWARD_SCAN.announced_at_once)))
    return Call(rows, draw(st.integers(1, 3)), draw(st.integers(1, 2)), at_once)


SEEDS = st.integers(0, 2**32)


@given(call=calls(), border=st.integers(0, 9), blocks=st.integers(1, 20), seed=SEEDS)
def test_every_chunk_is_taken_once_when_all_its_tiles_are_there(call, border, blocks, seed):
    run(call, list(scan(call, border)), blocks, seed)
    assert sorted(call.taken) == call.works
    assert call.cursors[CURSOR_FILLED] == len(call.works)
    assert call.cursors[CURSOR_TAKEN] == len(call.works) + blocks


def test_a_block_that_finds_nothing_stays_as_long_as_the_scan_and_no_longer():
    call = Call([0, 0, 0], key_heads=2, group=1)
    call.scanning = 1
    blocks = [gradient_block(call) for _ in range(call.places + 1)]
    for _ in range(PATIENCE):
        ended = [next(block, "ended") for block in blocks]
    assert ended == [None] * call.places + ["ended"], "the last one has no place in the queue"
    call.scanning = 0
    assert [len(list(block)) <= 2 for block in blocks] == [True] * len(blocks)
    assert call.taken == []


def test_a_queue_that_is_looked_at_before_the_end_of_the_scan_loses_chunks():
    """What `take_work` must not do: the last chunk may come, and the scan end, between both looks."""
    lost = 0
    for seed in range(300):
        call = Call([CHUNK], key_heads=1, group=1)
        run(call, list(scan(call, 1)), 1, seed, partial(gradient_block, looks_at_queue_first=True))
        lost += call.taken != call.works
    assert lost > 0


@given(call=calls(), blocks=st.integers(1, 20), seed=SEEDS)
def test_chunks_that_nobody_writes_are_not_waited_for_when_the_scans_have_ended(call, blocks, seed):
    """Offsets that decrease can leave records of chunks that no segment has, and segments with chunks in no slot."""
    written = call.works[::2]
    writers = [scan_block(call, [-1, *written, call.places]) for _ in range(call.writers)]
    run(call, writers, blocks, seed)
    assert sorted(call.taken) == written


def test_a_chunk_of_a_head_has_tiles_of_every_block():
    assert BLOCKS_OF_HEAD == BACKWARD_SCAN.directions * BACKWARD_SCAN.halves
