"""Where a block finds its sequence, its part of it and the state it starts from, from sequence offsets alone.

Chunks, and segments of `step` tokens, live in slots: first_slot(n) = cu_seqlens[n] // step + n. The function increases with
n, so that the sequence of a slot is found by a search, and no list has to be made beforehand.

A segment after the first starts from a state that other blocks compute. What it needs of the past is bounded by the decay:

    |product of the transitions of some chunks|_2 <= 2^(sum of their bounds)
    bound of a chunk >= sum over its tokens of log2 e^g + log2 max(1, |1 - beta |k|^2|)

A *window* is the shortest run of whole chunks before a place with sum <= CERTIFIED: what was before it is forgotten.

    replayed segment    a window of at most `replay` chunks lies before it: it runs those chunks without outputs first
    linked segment      the others: state = state_j + transition_j (state_(j-1) + ...) over the segments before it, back to
                        the first one with a window inside (its state from zero is its state) or the sequence's first;
                        a chain of transitions whose norms forget what is before them ends it sooner
"""

import tilelang.language as T

from ._sm90 import (
    BASE,
    CERTIFIED,
    CHUNK,
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
    ITEM_SIGN,
    ITEM_SILENT,
    ITEM_START,
    ITEM_WORDS,
    LINK,
    LONG,
    MISSING,
    START_IDENTITY,
    START_INITIAL,
    START_STATE,
    START_ZERO,
    WARP,
)

NORMS_AT_ONCE = 4  # loads in flight


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
def find_sequence(
    place, cu_words, words_per_entry, dense_length, sequences, tokens, slot, step, lane, has_place_of_its_own=1
):
    """place <- the last sequence whose first slot is not behind `slot`, its first token and its end.

    A warp tries 32 at a time; in the last round those are neighbours, and what was loaded for the test is the answer.
    """
    count, width, passed = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    place[0] = 0
    count = sequences
    while count > 0:
        width = T.truncdiv(count + WARP - 1, WARP)
        index = T.min(place[0] + lane * width, sequences - 1)
        start = offset(cu_words, index, words_per_entry, dense_length, tokens)
        end = offset(cu_words, index + 1, words_per_entry, dense_length, tokens)
        here = T.Select(
            lane * width < count, T.truncdiv(start, step) + index * has_place_of_its_own, T.max_value("int32")
        )
        passed = T.max(T.call_extern("int32", "__popc", votes(here <= slot)) - 1, 0)
        place[1] = T.shfl_sync(start, passed)
        place[2] = T.shfl_sync(end, passed)
        place[0] += passed * width
        count = T.Select(width == 1, 0, T.min(width, count - passed * width))


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
def await_base(limit, ready, row, value_heads, index, lane):
    """limit[0] <- segments between the own one, at `row` and the `index`-th of its sequence, and its base.

    Waits until the base and all between are made: by blocks before this one, which wait for nobody.
    """
    turn, state, transition = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    base, unready = T.alloc_var("int32"), T.alloc_var("int32")
    limit[0] = -1
    turn = 0
    while limit[0] < 0:
        back = turn * WARP + lane
        state = MISSING
        transition = MISSING
        if back < index:
            state = T.atomic_load(ready[row - (back + 1) * value_heads, 0], memory_order="acquire")
            transition = T.atomic_load(ready[row - (back + 1) * value_heads, 1], memory_order="acquire")
        base = first_vote(votes(state == BASE))
        unready = first_vote(votes(T.And(state != BASE, T.Or(state == MISSING, transition == MISSING))))
        if T.And(base > 0, T.Or(unready == 0, unready > base)):
            limit[0] = turn * WARP + base - 1
        elif unready == 0:
            turn += 1


@T.macro
def count_links(links, ready, reach, row, value_heads, index, lane):
    """links[0] <- segments between the own one and the one it starts from, which are made.

    That is the base, or closer where the product of the Frobenius norms of the transitions forgets what came before.
    """
    limit = T.alloc_local((1,), "int32")
    total, squares = T.alloc_var("float32"), T.alloc_local((NORMS_AT_ONCE,), "float32")
    await_base(limit, ready, row, value_heads, index, lane)
    links[0] = limit[0]
    total = 0.0
    for turn in T.serial(T.truncdiv(limit[0] + NORMS_AT_ONCE - 1, NORMS_AT_ONCE)):
        if links[0] == limit[0]:
            for e in T.unroll(NORMS_AT_ONCE):
                squares[e] = 0.0
                if turn * NORMS_AT_ONCE + e < limit[0]:
                    for part in T.unroll(HEAD_DIM // WARP):
                        squares[e] += reach[row - (turn * NORMS_AT_ONCE + e + 1) * value_heads, part * WARP + lane]
            for e in T.unroll(NORMS_AT_ONCE):
                for step in T.unroll(5):
                    squares[e] += T.shfl_xor(squares[e], 1 << step)
                total += 0.5 * T.log2(squares[e])
                if T.And(links[0] == limit[0], T.And(total <= CERTIFIED, turn * NORMS_AT_ONCE + e < limit[0])):
                    links[0] = turn * NORMS_AT_ONCE + e


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
    makes_states,
    bound,
    ready,
    reach,
    lane,
):
    """What a block does, by one warp: item[...] <- the words of ITEM_*; no chunks and END_NOTHING if nothing.

    Of the blocks that make states, part 0 makes the state of a segment from zero (or the initial state) and part 1 its
    transition, if any later segment links to them.
    """
    found = T.alloc_local((3,), "int32")
    first, length, index, chunks, row = (T.alloc_var("int32") for _ in range(5))
    window, needed, closed, limit = (T.alloc_var("int32") for _ in range(4))  # a macro renames what it is given bare
    step = segment_chunks * CHUNK
    find_sequence(found, cu_words, words_per_entry, dense_length, sequences, tokens, slot, step, lane)
    first = found[1]
    length = T.max(0, found[2] - first)
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
    if makes_states == 0:
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
                    count_links(found, ready, reach, row, value_heads, index, lane)
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
                item[ITEM_SIGN] = T.Select(T.And(part == 0, closed != 0), BASE, LINK)
                if part != 0:
                    item[ITEM_START] = START_IDENTITY


@T.macro
def describe_long(
    item, place, head, has_initial, write_final, cu_words, words_per_entry, dense_length, sequences, tokens, lane
):
    """The same of a whole sequence of more than LONG tokens, by the first multiple of LONG that lies in it; of no other."""
    found = T.alloc_local((3,), "int32")
    token, length, chunks = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    token = place * LONG
    find_sequence(found, cu_words, words_per_entry, dense_length, sequences, tokens, token, 1, lane, 0)
    length = found[2] - found[1]
    chunks = T.truncdiv(length + CHUNK - 1, CHUNK)
    for word in T.unroll(ITEM_WORDS):
        item[word] = 0
    item[ITEM_SEQUENCE] = found[0]
    item[ITEM_HEAD] = head
    item[ITEM_FIRST_TOKEN] = found[1]
    item[ITEM_FIRST_SLOT] = T.truncdiv(found[1], CHUNK) + found[0]
    item[ITEM_LAST_ROWS] = length - (chunks - 1) * CHUNK
    if T.And(length > LONG, T.And(found[1] <= token, found[1] + LONG > token)):
        item[ITEM_CHUNKS] = chunks
        item[ITEM_START] = T.Select(has_initial != 0, START_INITIAL, START_ZERO)
        item[ITEM_END] = T.Select(write_final != 0, END_FINAL, END_NOTHING)
