"""What a block of the backward's scans does: its chunks, in which direction, and where their state comes from.

The rules are those of `_segments.py`, in both directions: states come from the segments before, their gradients from those
behind, and a transition serves both. A segment *forgets* in a direction if a window inside it, at its end in that direction,
is certified: the next segment replays the window, any other next segment links to it.

    forward     S = S_j + M_j S before             S_j: from zero, the first segment's from the initial state
    reverse     dS = dS_j + M_j^T dS behind        dS_j: from zero, the last segment's from the final gradient

Blocks that make S_j, M_j and dS_j run in a launch of their own, beforehand, and leave `forgets`.

A sequence that a border cuts starts there from the state, or the gradient, at the border, and leaves its gradient there.

Without links nobody makes states: where a segment's window is not certified, or longer than a quarter of a segment, the block
of the segment before it walks on, and its own block does nothing. A head that never forgets is walked by one block.
"""

import tilelang.language as T

from ._segments import NORMS_AT_ONCE, first_vote, votes
from ._sm90 import (
    BORDER_BEFORE,
    BORDER_BEHIND,
    CERTIFIED,
    CHUNK,
    END_BORDER,
    END_FINAL,
    END_NOTHING,
    END_STATE,
    END_TRANSITION,
    HEAD_DIM,
    ITEM_CHUNKS,
    ITEM_END,
    ITEM_FIRST_SLOT,
    ITEM_FIRST_TOKEN,
    ITEM_HEAD,
    ITEM_LAST_ROWS,
    ITEM_LINKS,
    ITEM_OWN,
    ITEM_SEQUENCE,
    ITEM_SILENT,
    ITEM_START,
    ITEM_WORDS,
    SEGMENT_BORDER,
    SEGMENT_CHUNKS,
    SEGMENT_FIRST_SLOT,
    SEGMENT_FIRST_TOKEN,
    SEGMENT_INDEX,
    SEGMENT_SEQUENCE,
    SEGMENT_TOKENS,
    START_BORDER,
    START_IDENTITY,
    START_INITIAL,
    START_STATE,
    START_ZERO,
    WARP,
)

FORWARD, REVERSE = 0, 1
MAKERS = 3  # blocks, twice, that make a segment's state, its transition and the gradient of its state
MAKE_STATE, MAKE_TRANSITION, MAKE_GRADIENT = range(MAKERS)
PARTS_OF_REPLAY = 4  # without links a replay is at most this part of a segment


def start_of(segment, direction, has_state):
    """Where a direction starts: at the border of the range, or at an end of the sequence, which may have a state."""
    border = T.Select(direction == FORWARD, BORDER_BEFORE, BORDER_BEHIND)
    of_sequence = T.Select(has_state != 0, START_INITIAL, START_ZERO)
    return T.Select(T.bitwise_and(segment[SEGMENT_BORDER], border) != 0, START_BORDER, of_sequence)


def end_of_gradient(segment, write_dinitial):
    """Where the gradient goes behind the first chunk: to the border of the range, or to that of the initial state."""
    of_sequence = T.Select(write_dinitial != 0, END_FINAL, END_NOTHING)
    return T.Select(T.bitwise_and(segment[SEGMENT_BORDER], BORDER_BEFORE) != 0, END_BORDER, of_sequence)


@T.macro
def measure_window(window, bound, head, first, sign, count, lane):
    """window[0] <- chunks of the window from slot `first` on, upwards or downwards; count + 1 if `count` chunks hold none."""
    total, change, carried = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
    place = T.alloc_var("int32")
    window[0] = count + 1
    total = 0.0
    for turn in T.serial(T.truncdiv(count + WARP - 1, WARP)):
        if window[0] > count:
            away = turn * WARP + lane
            change = 0.0
            if away < count:
                change = bound[first + sign * away, head]
            for step in T.unroll(5):
                carried = T.shfl_up(change, 1 << step)
                change += T.Select(lane >= (1 << step), carried, 0.0)
            place = first_vote(votes(T.Select(away < count, total + change, 0.0) <= CERTIFIED))
            window[0] = T.Select(place > 0, turn * WARP + place, window[0])
            total += T.shfl_sync(change, WARP - 1)


@T.macro
def count_links(links, forgets, reach, row, stride, side, most, lane):
    """links[0] <- transitions between the own segment, at `row`, and the one that it starts from, `stride` rows apart each.

    That one forgets, or is the last of `most` segments on that side, or nearer: where the product of the Frobenius norms of
    the transitions forgets what came before.
    """
    limit, place, turns = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    total, squares = T.alloc_var("float32"), T.alloc_local((NORMS_AT_ONCE,), "float32")
    limit = most - 1
    turns = T.truncdiv(most - 1 + WARP - 1, WARP)
    for turn in T.serial(turns):
        if limit == most - 1:
            away, place = turn * WARP + lane, 0
            if away < most - 1:
                place = forgets[row + (away + 1) * stride, side]
            place = first_vote(votes(place != 0))
            limit = T.Select(place > 0, turn * WARP + place - 1, limit)
    links[0] = limit
    total = 0.0
    turns = T.truncdiv(limit + NORMS_AT_ONCE - 1, NORMS_AT_ONCE)
    for turn in T.serial(turns):
        if links[0] == limit:
            for e in T.unroll(NORMS_AT_ONCE):
                squares[e] = 0.0
                if turn * NORMS_AT_ONCE + e < limit:
                    for part in T.unroll(HEAD_DIM // WARP):
                        squares[e] += reach[row + (turn * NORMS_AT_ONCE + e + 1) * stride, part * WARP + lane]
            for e in T.unroll(NORMS_AT_ONCE):
                for step in T.unroll(5):
                    squares[e] += T.shfl_xor(squares[e], 1 << step)
                total += 0.5 * T.log2(squares[e])
                if T.And(links[0] == limit, T.And(total <= CERTIFIED, turn * NORMS_AT_ONCE + e < limit)):
                    links[0] = turn * NORMS_AT_ONCE + e


@T.macro
def place_item(item, segment, low, high, head, row):
    """item[...] <- chunks low to high of the sequence, from zero, all with outputs."""
    for word in T.unroll(ITEM_WORDS):
        item[word] = 0
    item[ITEM_SEQUENCE] = segment[SEGMENT_SEQUENCE]
    item[ITEM_HEAD] = head
    item[ITEM_OWN] = row
    item[ITEM_FIRST_TOKEN] = segment[SEGMENT_FIRST_TOKEN] + low * CHUNK
    item[ITEM_FIRST_SLOT] = segment[SEGMENT_FIRST_SLOT] + low
    item[ITEM_CHUNKS] = high - low
    item[ITEM_LAST_ROWS] = T.min(CHUNK, segment[SEGMENT_TOKENS] - (high - 1) * CHUNK)


@T.macro
def walk_on(item, found, segment, edge, head, direction, write_dinitial, segment_chunks, longest, bound, lane):
    """item[...] <- more chunks: those of the segments behind `edge`, the own segment's end, up to the first that is replayed."""
    chunks, count, first, further, end = (T.alloc_var("int32") for _ in range(5))
    chunks, end = segment[SEGMENT_CHUNKS], edge
    further = 1
    for _ in T.serial(T.truncdiv(chunks, segment_chunks)):
        if T.And(further != 0, T.And(end > 0, end < chunks)):
            if direction == FORWARD:
                count = T.min(end, longest)
                first = segment[SEGMENT_FIRST_SLOT] + end - 1
            else:
                count = T.min(chunks - end, longest)
                first = segment[SEGMENT_FIRST_SLOT] + end
            measure_window(found, bound, head, first, T.Select(direction == FORWARD, -1, 1), count, lane)
            if found[0] <= count:
                further = 0
            elif direction == FORWARD:
                count = T.min(segment_chunks, chunks - end)
                item[ITEM_CHUNKS] += count
                end += count
            else:
                item[ITEM_CHUNKS] += segment_chunks
                item[ITEM_FIRST_TOKEN] -= segment_chunks * CHUNK
                item[ITEM_FIRST_SLOT] -= segment_chunks
                end -= segment_chunks
    if direction == FORWARD:
        item[ITEM_LAST_ROWS] = T.min(CHUNK, segment[SEGMENT_TOKENS] - (end - 1) * CHUNK)
    else:
        item[ITEM_END] = T.Select(end == 0, end_of_gradient(segment, write_dinitial), END_NOTHING)


@T.macro
def describe_outputs(
    item,
    segment,
    row,
    head,
    direction,
    has_start,
    write_dinitial,
    segment_chunks,
    has_links,
    value_heads,
    bound,
    forgets,
    reach,
    lane,
):
    """What a block that writes outputs does, by one warp: item[...] <- the words of ITEM_*.

    has_start: whether there is a state where the direction starts.
    """
    found = T.alloc_local((1,), "int32")
    low, high, chunks, count, first, stride = (T.alloc_var("int32") for _ in range(6))
    longest, edge = T.alloc_var("int32"), T.alloc_var("int32")
    chunks = segment[SEGMENT_CHUNKS]
    low = segment[SEGMENT_INDEX] * segment_chunks
    high = T.min(low + segment_chunks, chunks)
    longest = T.Select(has_links != 0, segment_chunks, T.max(1, T.truncdiv(segment_chunks, PARTS_OF_REPLAY)))
    edge = T.Select(direction == FORWARD, high, low)
    place_item(item, segment, low, high, head, row)
    if segment[SEGMENT_INDEX] < 0:
        item[ITEM_CHUNKS] = 0
    else:
        if direction == FORWARD:
            count = T.min(low, longest)
            first = segment[SEGMENT_FIRST_SLOT] + low - 1
            stride = -value_heads
        else:
            count = T.min(chunks - high, longest)
            first = segment[SEGMENT_FIRST_SLOT] + high
            stride = value_heads
            item[ITEM_END] = T.Select(low == 0, end_of_gradient(segment, write_dinitial), END_NOTHING)
        if count == 0:
            item[ITEM_START] = start_of(segment, direction, has_start)
        else:
            measure_window(found, bound, head, first, T.Select(direction == FORWARD, -1, 1), count, lane)
            if found[0] <= count:
                if direction == FORWARD:
                    low -= found[0]
                else:
                    high += found[0]
                first = item[ITEM_END]
                place_item(item, segment, low, high, head, row)
                item[ITEM_END] = first
                item[ITEM_SILENT] = found[0]
            elif has_links == 0:
                item[ITEM_CHUNKS] = 0
                item[ITEM_END] = END_NOTHING
            else:
                count = T.truncdiv(chunks + segment_chunks - 1, segment_chunks) - 1 - segment[SEGMENT_INDEX]
                count = T.Select(direction == FORWARD, segment[SEGMENT_INDEX], count)
                first = direction
                count_links(found, forgets, reach, row, stride, first, count, lane)
                item[ITEM_START] = START_STATE
                item[ITEM_LINKS] = found[0]
        if T.And(has_links == 0, item[ITEM_CHUNKS] > 0):
            walk_on(
                item, found, segment, edge, head, direction, write_dinitial, segment_chunks, longest, bound, lane
            )  # fmt: skip


@T.macro
def describe_states(
    item, segment, row, head, part, half, has_initial, has_dfinal, segment_chunks, bound, forgets, lane
):
    """What a block that makes states does, by one warp; no chunks if no other segment asks for it."""
    found = T.alloc_local((1,), "int32")
    low, high, chunks, index, count = (T.alloc_var("int32") for _ in range(5))
    keeps, next_keeps, gradient_keeps, next_gradient_keeps, needed = (T.alloc_var("int32") for _ in range(5))
    index, chunks = segment[SEGMENT_INDEX], segment[SEGMENT_CHUNKS]
    low = index * segment_chunks
    high = T.min(low + segment_chunks, chunks)
    place_item(item, segment, low, high, head, row)
    keeps, next_keeps, gradient_keeps, next_gradient_keeps = 0, 0, 0, 0
    if T.And(index >= 0, high < chunks):
        if part != MAKE_GRADIENT:
            count = segment_chunks
            measure_window(found, bound, head, segment[SEGMENT_FIRST_SLOT] + high - 1, -1, count, lane)
            keeps = T.cast(found[0] > count, "int32")
            if T.And(part == MAKE_STATE, high + segment_chunks < chunks):
                measure_window(
                    found, bound, head, segment[SEGMENT_FIRST_SLOT] + high + segment_chunks - 1, -1, count, lane
                )
                next_keeps = T.cast(found[0] > count, "int32")
    if index > 0:
        if part != MAKE_STATE:
            count = high - low
            measure_window(found, bound, head, segment[SEGMENT_FIRST_SLOT] + low, 1, count, lane)
            gradient_keeps = T.cast(found[0] > count, "int32")
            if T.And(part == MAKE_GRADIENT, index > 1):
                count = segment_chunks
                measure_window(found, bound, head, segment[SEGMENT_FIRST_SLOT] + low - segment_chunks, 1, count, lane)
                next_gradient_keeps = T.cast(found[0] > count, "int32")
    if part == MAKE_STATE:
        needed = keeps + next_keeps
        item[ITEM_START] = T.Select(index == 0, start_of(segment, FORWARD, has_initial), START_ZERO)
        item[ITEM_END] = END_STATE
    elif part == MAKE_TRANSITION:
        needed = T.Select(T.And(index > 0, high < chunks), keeps + gradient_keeps, 0)
        item[ITEM_START] = START_IDENTITY
        item[ITEM_END] = END_TRANSITION
    else:
        needed = gradient_keeps + next_gradient_keeps
        item[ITEM_START] = T.Select(high == chunks, start_of(segment, REVERSE, has_dfinal), START_ZERO)
        item[ITEM_END] = END_STATE
    if T.And(lane == 0, half == 0):
        if T.And(part == MAKE_STATE, T.And(index >= 0, high < chunks)):
            forgets[row, FORWARD] = 1 - keeps
        if T.And(part == MAKE_GRADIENT, index > 0):
            forgets[row, REVERSE] = 1 - gradient_keeps
    item[ITEM_SILENT] = item[ITEM_CHUNKS]
    if needed == 0:
        item[ITEM_CHUNKS] = 0
        item[ITEM_SILENT] = 0
        item[ITEM_END] = END_NOTHING
