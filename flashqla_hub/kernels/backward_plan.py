"""Plan of a backward: records of chunks and segments from sequence offsets, and zeros where no sequence is.

A backward may take its chunks in ranges of `range_slots` slots, one after the other. Each has segments of its own: offsets are
clipped at the first tokens of its slots, which its segments count from its first, and sequences that have nothing in it have no
segments there. A sequence that goes on beyond a border says so. Offsets that decrease mean nothing, but segments stay inside the
slots of their range even then.

Blocks of the scan start in the order of the segments' records, but where sequences are cut those of the reverse direction start
with the last record. With `by_length` sequences are whole, each has one record, and the longest come first: a long one that
started last would keep a few SMs busy when the others are idle.

Reads        cu_seqlens as 32-bit words
Writes       chunks [slots, 4] int32: first token, rows (0 = unused slot), sequence ·
             segments [ranges, segment_slots, 7] int32: first token, tokens, first slot and chunks of the sequence, which
             sequence, which segment of it (-1 = unused), and beyond which borders it goes on (BORDER_*) ·
             rows of dq dk dv dg dbeta below cu_seqlens[0] and from cu_seqlens[N] on · cursors [ranges, 2] int32 of `_ready.py`,
             zeros

Blocks       ranges * N: a sequence in a range each
             then ZERO_BLOCKS: rows that no sequence has, in turn; the first of them the cursors too
"""

import tilelang.language as T

from ._segments import find_sequence
from ._sm90 import (
    BORDER_BEFORE,
    BORDER_BEHIND,
    CHUNK,
    CHUNK_FIRST_TOKEN,
    CHUNK_ROWS,
    CHUNK_SEQUENCE,
    CHUNK_WORDS,
    CURSOR_WORDS,
    SEGMENT_BORDER,
    SEGMENT_CHUNKS,
    SEGMENT_FIRST_SLOT,
    SEGMENT_FIRST_TOKEN,
    SEGMENT_INDEX,
    SEGMENT_SEQUENCE,
    SEGMENT_TOKENS,
    SEGMENT_WORDS,
    WARP,
    WARPGROUP,
)

THREADS = WARPGROUP
ZERO_BLOCKS = 128  # about one an SM


@T.macro
def write_chunks(chunks, sequence, first, length, first_slot, lowest_slot, next_slot, thread):
    """Records of the slots from `lowest_slot` on; those that no chunk of the sequence fills get no rows."""
    for turn in T.serial(T.truncdiv(next_slot - lowest_slot + THREADS - 1, THREADS)):
        slot = lowest_slot + turn * THREADS + thread
        index = slot - first_slot
        if slot < next_slot:
            rows = T.max(0, T.min(CHUNK, length - index * CHUNK))
            chunks[slot, CHUNK_FIRST_TOKEN] = first + index * CHUNK
            chunks[slot, CHUNK_ROWS] = T.Select(index < 0, 0, rows)
            chunks[slot, CHUNK_SEQUENCE] = sequence
            chunks[slot, CHUNK_WORDS - 1] = 0


@T.macro
def write_segments(
    segments,
    index_of_range,
    sequence,
    first,
    length,
    first_slot,
    first_place,
    lowest_place,
    next_place,
    segment_chunks,
    is_here,
    border,
    thread,
):
    """Records of the segment slots from `lowest_place` on; those that no segment of the sequence fills get index -1."""
    index = T.alloc_var("int32")
    for turn in T.serial(T.truncdiv(next_place - lowest_place + THREADS - 1, THREADS)):
        place = lowest_place + turn * THREADS + thread
        if place < next_place:
            index = place - first_place
            if T.Or(is_here == 0, T.And(index > 0, index * segment_chunks * CHUNK >= length)):
                index = -1
            segments[index_of_range, place, SEGMENT_FIRST_TOKEN] = first
            segments[index_of_range, place, SEGMENT_TOKENS] = length
            segments[index_of_range, place, SEGMENT_FIRST_SLOT] = first_slot
            segments[index_of_range, place, SEGMENT_CHUNKS] = T.truncdiv(length + CHUNK - 1, CHUNK)
            segments[index_of_range, place, SEGMENT_SEQUENCE] = sequence
            segments[index_of_range, place, SEGMENT_INDEX] = T.max(index, -1)
            segments[index_of_range, place, SEGMENT_BORDER] = border


@T.macro
def find_rank(ahead, offset, sequence, length, sequences, lower, upper, thread):
    """ahead[0] <- sequences with more tokens between the borders, and those before it with as many; by a whole block.

    offset(n) is the first token of sequence n.
    """
    count, first, tokens = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    if thread == 0:
        ahead[0] = 0
    T.sync_threads()
    count = 0
    for turn in T.serial(T.truncdiv(sequences + THREADS - 1, THREADS)):
        other = turn * THREADS + thread
        if other < sequences:
            first = offset(other)
            tokens = T.max(first, offset(other + 1))
            first = T.max(lower, T.min(first, upper))
            tokens = T.max(first, T.min(tokens, upper)) - first
            count += T.cast(T.Or(tokens > length, T.And(tokens == length, other < sequence)), "int32")
    T.atomic_add(ahead[0], count)
    T.sync_threads()


@T.macro
def find_border(found, cu_words, words_per_entry, dense_length, sequences, tokens, border, lane):
    """found[...] <- the sequence with slot `border`, its first token, its end, and the first token of that slot.

    Behind the sequence's last chunk that is its end, and before the first sequence's first chunk its first token.
    """
    end = T.alloc_var("int32")
    find_sequence(found, cu_words, words_per_entry, dense_length, sequences, tokens, border, CHUNK, 1, lane)
    end = T.max(found[1], found[2])
    found[2] = end
    found[3] = found[1] + CHUNK * (border - T.truncdiv(found[1], CHUNK) - found[0])
    found[3] = T.max(found[1], T.min(found[3], end))


@T.macro
def clear_cursors(cursors, ranges, thread):
    """Of the queues of `_ready.py`."""
    for turn in T.serial(T.truncdiv(ranges * CURSOR_WORDS + THREADS - 1, THREADS)):
        word = turn * THREADS + thread
        if word < ranges * CURSOR_WORDS:
            cursors[word // CURSOR_WORDS, word % CURSOR_WORDS] = 0


@T.macro
def zero_rows(words, first, end, part, thread):
    """Rows first + part, first + part + ZERO_BLOCKS, ... below `end`; the width stays a size of its own tensor."""
    for turn in T.serial(T.truncdiv(end - first - part + ZERO_BLOCKS - 1, ZERO_BLOCKS)):
        for step in T.serial(T.truncdiv(words.shape[1] + THREADS - 1, THREADS)):
            if step * THREADS + thread < words.shape[1]:
                words[first + part + turn * ZERO_BLOCKS, step * THREADS + thread] = 0


def build_backward_plan():
    """The prim_func; arguments in README.md."""
    words, chunk_slots, segment_slots = T.dynamic("words"), T.dynamic("chunk_slots"), T.dynamic("segment_slots")
    tokens, key_words, value_words = T.dynamic("tokens"), T.dynamic("key_words"), T.dynamic("value_words")
    value_heads, ranges = T.dynamic("value_heads"), T.dynamic("ranges")

    def offset(cu_words, index, words_per_entry, dense_length):
        """First token of a sequence, inside the tensors whatever the offsets are."""
        packed = T.max(0, T.min(cu_words[index * words_per_entry], tokens))
        return T.if_then_else(dense_length >= 0, index * dense_length, packed)

    @T.prim_func
    def backward_plan(
        cu_words: T.Tensor((words,), "int32"),
        chunks: T.Tensor((chunk_slots, CHUNK_WORDS), "int32"),
        segments: T.Tensor((ranges, segment_slots, SEGMENT_WORDS), "int32"),
        dq_words: T.Tensor((tokens, key_words), "int32"),
        dk_words: T.Tensor((tokens, key_words), "int32"),
        dv_words: T.Tensor((tokens, value_words), "int32"),
        dg_words: T.Tensor((tokens, value_heads), "int32"),
        dbeta_words: T.Tensor((tokens, value_heads), "int32"),
        cursors: T.Tensor((ranges, CURSOR_WORDS), "int32"),
        words_per_entry: T.int32,
        dense_length: T.int32,
        sequences: T.int32,
        segment_chunks: T.int32,
        range_slots: T.int32,
        by_length: T.int32,
    ):
        with T.Kernel(ranges * sequences + ZERO_BLOCKS, threads=THREADS) as block:
            thread = T.get_thread_binding()
            first, length, end = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            own_slot, lowest_slot, next_slot = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            first_place, lowest_place, next_place = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            is_here, beyond = T.alloc_var("int32"), T.alloc_var("int32")
            border, lower, upper = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            found = T.alloc_local((4,), "int32")
            ahead = T.alloc_shared((1,), "int32")
            if block < ranges * sequences:
                part, sequence = T.truncdiv(block, sequences), T.truncmod(block, sequences)
                from_slot = part * range_slots
                until_slot = T.min(from_slot + range_slots, chunk_slots)
                first = offset(cu_words, sequence, words_per_entry, dense_length)
                end = T.max(first, offset(cu_words, sequence + 1, words_per_entry, dense_length))
                is_here, beyond, lower, upper = 1, 0, 0, tokens
                if from_slot > 0:
                    border = from_slot
                    find_border(
                        found, cu_words, words_per_entry, dense_length, sequences, tokens, border, thread % WARP
                    )  # fmt: skip
                    lower = found[3]
                    is_here = T.cast(T.Or(end > lower, first >= lower), "int32")
                    is_here = T.Select(sequence < found[0], 0, is_here)
                    beyond = T.Select(first < lower, BORDER_BEFORE, 0)
                if until_slot < chunk_slots:
                    border = until_slot
                    find_border(
                        found, cu_words, words_per_entry, dense_length, sequences, tokens, border, thread % WARP
                    )  # fmt: skip
                    upper = found[3]
                    is_here = T.Select(
                        T.Or(sequence > found[0], T.And(sequence == found[0], first >= upper)), 0, is_here
                    )
                    beyond += T.Select(end > upper, BORDER_BEHIND, 0)
                first = T.max(lower, T.min(first, upper))
                end = T.max(first, T.min(end, upper))
                length = end - first
                own_slot = T.truncdiv(first, CHUNK) + sequence
                lowest_slot = T.Select(sequence == 0, from_slot, T.max(from_slot, own_slot))
                next_slot = T.min(T.truncdiv(end, CHUNK) + sequence + 1, until_slot)
                if sequence == sequences - 1:
                    next_slot = until_slot
                write_chunks(chunks, sequence, first, length, own_slot, lowest_slot, next_slot, thread)
                step = segment_chunks * CHUNK
                base = CHUNK * T.max(0, from_slot - sequences + 1)  # no chunk of the range has an earlier token
                first_place = T.truncdiv(T.max(0, first - base), step) + sequence
                lowest_place = T.Select(sequence == 0, 0, first_place)
                next_place = T.min(T.truncdiv(T.max(0, end - base), step) + sequence + 1, segment_slots)
                if sequence == sequences - 1:
                    next_place = segment_slots
                if by_length != 0:
                    find_rank(
                        ahead, lambda n: offset(cu_words, n, words_per_entry, dense_length), sequence, length,
                        sequences, lower, upper, thread,
                    )  # fmt: skip
                    first_place = ahead[0]
                    lowest_place = first_place
                    next_place = first_place + 1
                # Offsets that decrease would lead out of the range, and out of its segments.
                own_slot = T.max(own_slot, from_slot)
                length = T.min(length, CHUNK * T.max(0, until_slot - own_slot))
                places = T.min(T.truncdiv(length + step - 1, step), T.max(0, segment_slots - first_place))
                length = T.min(length, places * step)
                own_slot -= from_slot
                write_segments(
                    segments, part, sequence, first, length, own_slot, first_place, lowest_place, next_place,
                    segment_chunks, is_here, beyond, thread,
                )  # fmt: skip
            else:
                turn = block - ranges * sequences
                if turn == 0:
                    clear_cursors(cursors, ranges, thread)
                for side in T.serial(2):
                    first = T.if_then_else(side == 0, 0, offset(cu_words, sequences, words_per_entry, dense_length))
                    end = T.if_then_else(side == 0, offset(cu_words, 0, words_per_entry, dense_length), tokens)
                    zero_rows(dq_words, first, end, turn, thread)
                    zero_rows(dk_words, first, end, turn, thread)
                    zero_rows(dv_words, first, end, turn, thread)
                    zero_rows(dg_words, first, end, turn, thread)
                    zero_rows(dbeta_words, first, end, turn, thread)

    return backward_plan
