"""Where a block finds its sequence, its part of it and the state it starts from, from sequence offsets alone.

Chunks, and segments of `step` tokens, live in slots: first_slot(n) = cu_seqlens[n] // step + n. The function increases with
n, so that the sequence of a slot is found by a search, and no list has to be made beforehand.

A segment after the first starts from a state that other blocks compute. What it needs of the past is bounded by the decay:

    |product of the transitions of some chunks|_2 <= 2^(sum of their bounds)
    bound of a chunk >= sum over its tokens of log2 e^g + log2 max(1, |1 - beta |k|^2|)

A *window* is the shortest run of whole chunks before a place with sum <= CERTIFIED: what was before it is forgotten.

    replayed segment    a window of at most `replay` chunks lies before it: it runs those chunks without outputs first
    linked segment      the others: state = state_j + transition_j (state_(j-1) + ...) over the segments before it, back to
                        the first one with a window inside (its state from zero is its state) or the sequence's first
"""

import tilelang.language as T

from ._sm90 import (
    CERTIFIED,
    CHUNK,
    END_FINAL,
    END_NOTHING,
    END_STATE,
    END_TRANSITION,
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
    START_IDENTITY,
    START_INITIAL,
    START_STATE,
    START_ZERO,
    WARP,
)

SEARCH_ROUNDS = 7  # 32^7 > 2^31 sequences


def offset(cu_words, index, words_per_entry, dense_length, tokens):
    """First token of a sequence, inside the tensors whatever the offsets are."""
    packed = T.max(0, T.min(cu_words[index * words_per_entry], tokens))
    return T.if_then_else(dense_length >= 0, index * dense_length, packed)


def votes(predicate):
    """Bits of the lanes of a warp for which it holds."""
    return T.cast(T.ballot(predicate), "int32")


def first_vote(mask):
    """Index of the lowest bit, from 1 on; 0 if there is none."""
    return T.call_extern("int32", "__ffs", mask)


@T.macro
def find_sequence(found, cu_words, words_per_entry, dense_length, sequences, tokens, slot, step, lane):
    """found[0] <- the last sequence whose first slot is not behind `slot`; a warp tries 32 at a time."""
    count, width, passed = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    found[0] = 0
    count = sequences
    for _ in T.serial(SEARCH_ROUNDS):
        if count > 1:
            width = T.truncdiv(count + WARP - 1, WARP)
            index = T.min(found[0] + lane * width, sequences - 1)
            start = offset(cu_words, index, words_per_entry, dense_length, tokens)
            here = T.Select(lane * width < count, T.truncdiv(start, step) + index, T.max_value("int32"))
            passed = T.max(T.call_extern("int32", "__popc", votes(here <= slot)) - 1, 0) * width
            found[0] += passed
            count = T.min(width, count - passed)


@T.macro
def measure_window(window, bound, head, end, count, lane):
    """window[0] <- chunks of the window that ends before slot `end`, or count + 1 if `count` chunks hold none."""
    total, change, carried = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
    place = T.alloc_var("int32")
    window[0] = count + 1
    total = 0.0
    for turn in T.serial(T.truncdiv(count + WARP - 1, WARP)):
        if window[0] > count:
            back = turn * WARP + lane
            change = 0.0
            if back < count:
                change = bound[end - 1 - back, head]
            for step in T.unroll(5):
                carried = T.shfl_up(change, 1 << step)
                change += T.Select(lane >= (1 << step), carried, 0.0)
            place = first_vote(votes(T.Select(back < count, total + change, 0.0) <= CERTIFIED))
            window[0] = T.Select(place > 0, turn * WARP + place, window[0])
            total += T.shfl_sync(change, WARP - 1)


@T.macro
def count_links(links, is_base, row, value_heads, index, lane):
    """links[0] <- segments between the own one, at `row` and the `index`-th of its sequence, and the base it starts from."""
    place = T.alloc_var("int32")
    links[0] = -1
    for turn in T.serial(T.truncdiv(index + WARP - 1, WARP)):
        if links[0] < 0:
            back = turn * WARP + lane
            place = 0
            if back < index:
                place = is_base[row - (back + 1) * value_heads]
            place = first_vote(votes(place != 0))
            links[0] = T.Select(place > 0, turn * WARP + place - 1, links[0])


@T.macro
def describe_item(
    item,
    slot,
    head,
    part,
    has_initial,
    write_final,
    cu_words,
    words_per_entry,
    dense_length,
    sequences,
    tokens,
    value_heads,
    segment_chunks,
    replay,
    states_pass,
    bound,
    is_base,
    lane,
):
    """What a block does, by one warp: item[...] <- the words of ITEM_*; no chunks and END_NOTHING if nothing.

    In the states pass, part 0 makes the state of a segment from zero (or the initial state) and part 1 its transition, if
    any later segment links to them.
    """
    found = T.alloc_local((1,), "int32")
    first, length, index, chunks, row = (T.alloc_var("int32") for _ in range(5))
    window, needed, closed, limit = (T.alloc_var("int32") for _ in range(4))  # a macro renames what it is given bare
    step = segment_chunks * CHUNK
    find_sequence(found, cu_words, words_per_entry, dense_length, sequences, tokens, slot, step, lane)
    first = offset(cu_words, found[0], words_per_entry, dense_length, tokens)
    length = T.max(0, offset(cu_words, found[0] + 1, words_per_entry, dense_length, tokens) - first)
    index = slot - T.truncdiv(first, step) - found[0]
    chunks = T.truncdiv(length + CHUNK - 1, CHUNK)
    row = slot * value_heads + head
    for word in T.unroll(ITEM_WORDS):
        item[word] = 0
    item[ITEM_SEQUENCE] = found[0]
    item[ITEM_HEAD] = head
    item[ITEM_FIRST_TOKEN] = first + index * step
    item[ITEM_FIRST_SLOT] = T.truncdiv(first, CHUNK) + found[0] + index * segment_chunks
    item[ITEM_LAST_ROWS] = T.Select((index + 1) * segment_chunks < chunks, CHUNK, length - (chunks - 1) * CHUNK)
    item[ITEM_START] = T.Select(index == 0, T.Select(has_initial != 0, START_INITIAL, START_ZERO), START_ZERO)
    item[ITEM_OWN] = row
    if states_pass == 0:
        if T.And(index >= 0, T.Or(index == 0, index * segment_chunks < chunks)):
            item[ITEM_CHUNKS] = T.min(segment_chunks, chunks - index * segment_chunks)
            if (index + 1) * segment_chunks >= chunks:
                item[ITEM_END] = T.Select(write_final != 0, END_FINAL, END_NOTHING)
            if index > 0:
                limit = replay
                measure_window(found, bound, head, item[ITEM_FIRST_SLOT], limit, lane)
                if found[0] <= replay:
                    item[ITEM_FIRST_TOKEN] -= found[0] * CHUNK
                    item[ITEM_FIRST_SLOT] -= found[0]
                    item[ITEM_CHUNKS] += found[0]
                    item[ITEM_SILENT] = found[0]
                else:
                    count_links(found, is_base, row, value_heads, index, lane)
                    item[ITEM_START] = START_STATE
                    item[ITEM_LINKS] = found[0]
    else:
        if T.And(index >= 0, (index + 1) * segment_chunks < chunks):
            limit = segment_chunks
            measure_window(found, bound, head, item[ITEM_FIRST_SLOT] + limit, limit, lane)
            window = found[0]
            needed = T.cast(window > replay, "int32")
            closed = T.cast(T.Or(index == 0, window <= segment_chunks), "int32")
            if T.And(needed == 0, (index + 2) * segment_chunks < chunks):
                measure_window(found, bound, head, item[ITEM_FIRST_SLOT] + 2 * limit, limit, lane)
                needed = T.cast(found[0] > segment_chunks, "int32")
            if T.And(needed != 0, T.Or(part == 0, closed == 0)):
                item[ITEM_CHUNKS] = segment_chunks
                item[ITEM_SILENT] = segment_chunks
                item[ITEM_END] = T.Select(part == 0, END_STATE, END_TRANSITION)
                if part != 0:
                    item[ITEM_START] = START_IDENTITY
                else:
                    if lane == 0:
                        is_base[row] = closed
