"""Plan of a forward: chunk records and work items from sequence offsets, and zeros where no sequence is.

    first_slot(n) = cu_seqlens[n] // C + n

Reads        cu_seqlens as 32-bit words
Writes       chunks [slots, 4] int32 · items [N HV, 8] int32 · rows of o below cu_seqlens[0] and from cu_seqlens[N] on

Blocks       N: a sequence each, its chunks and items
             then ZERO_BLOCKS: rows of o that no sequence has, in turn

No two chunks share a slot, since a sequence of L tokens from token a on has at most (a + L) // C - a // C + 1 chunks. The
work item is what the recurrence kernel runs: a value head of a sequence, or of a part of one.
"""

import tilelang.language as T

from ._sm90 import (
    CHUNK,
    CHUNK_FIRST_TOKEN,
    CHUNK_ROWS,
    CHUNK_SEQUENCE,
    CHUNK_WORDS,
    HEAD_DIM,
    ITEM_CHUNKS,
    ITEM_FIRST_SLOT,
    ITEM_FIRST_TOKEN,
    ITEM_HEAD,
    ITEM_LAST_ROWS,
    ITEM_SEQUENCE,
    ITEM_WORDS,
    WARPGROUP,
)

THREADS = WARPGROUP
ZERO_BLOCKS = 128  # about one an SM
WORDS_PER_HEAD = HEAD_DIM // 2  # two 16-bit values a word


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
def write_items(items, heads, sequence, first, length, first_slot, thread):
    """Work items of a sequence, a value head each, in head order: heads that share keys run side by side."""
    count = T.truncdiv(length + CHUNK - 1, CHUNK)
    for turn in T.serial(T.truncdiv(heads + THREADS - 1, THREADS)):
        head = turn * THREADS + thread
        if head < heads:
            for word in T.unroll(ITEM_WORDS):
                items[sequence * heads + head, word] = 0
            items[sequence * heads + head, ITEM_SEQUENCE] = sequence
            items[sequence * heads + head, ITEM_HEAD] = head
            items[sequence * heads + head, ITEM_FIRST_TOKEN] = first
            items[sequence * heads + head, ITEM_FIRST_SLOT] = first_slot
            items[sequence * heads + head, ITEM_CHUNKS] = count
            items[sequence * heads + head, ITEM_LAST_ROWS] = length - (count - 1) * CHUNK


@T.macro
def zero_rows(o_words, first, end, row_words, part, thread):
    """Rows first + part, first + part + ZERO_BLOCKS, ... below `end`."""
    for turn in T.serial(T.truncdiv(end - first - part + ZERO_BLOCKS - 1, ZERO_BLOCKS)):
        for step in T.serial(T.truncdiv(row_words + THREADS - 1, THREADS)):
            if step * THREADS + thread < row_words:
                o_words[first + part + turn * ZERO_BLOCKS, step * THREADS + thread] = 0


def build_plan():
    """The prim_func; arguments in README.md."""
    words, chunk_slots, item_count = T.dynamic("words"), T.dynamic("chunk_slots"), T.dynamic("item_count")
    tokens, row_words = T.dynamic("tokens"), T.dynamic("row_words")

    def offset(cu_words, index, words_per_entry, dense_length):
        """First token of a sequence, inside the tensors whatever the offsets are."""
        packed = T.max(0, T.min(cu_words[index * words_per_entry], tokens))
        return T.if_then_else(dense_length >= 0, index * dense_length, packed)

    @T.prim_func
    def plan(
        cu_words: T.Tensor((words,), "int32"),
        chunks: T.Tensor((chunk_slots, CHUNK_WORDS), "int32"),
        items: T.Tensor((item_count, ITEM_WORDS), "int32"),
        o_words: T.Tensor((tokens, row_words), "int32"),
        words_per_entry: T.int32,
        dense_length: T.int32,
        sequences: T.int32,
    ):
        with T.Kernel(sequences + ZERO_BLOCKS, threads=THREADS) as block:
            thread = T.get_thread_binding()
            first, length, end = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            first_slot, lowest_slot, next_slot = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
            if block < sequences:
                first = offset(cu_words, block, words_per_entry, dense_length)
                length = T.max(0, offset(cu_words, block + 1, words_per_entry, dense_length) - first)
                first_slot = T.truncdiv(first, CHUNK) + block
                lowest_slot = T.Select(block == 0, 0, first_slot)
                next_slot = T.truncdiv(first + length, CHUNK) + block + 1
                if block == sequences - 1:
                    next_slot = chunk_slots
                write_chunks(chunks, block, first, length, first_slot, lowest_slot, next_slot, thread)
                write_items(items, T.truncdiv(row_words, WORDS_PER_HEAD), block, first, length, first_slot, thread)
            else:
                part = block - sequences
                first = offset(cu_words, 0, words_per_entry, dense_length)
                zero_rows(o_words, 0, first, row_words, part, thread)
                first = offset(cu_words, sequences, words_per_entry, dense_length)
                end = tokens
                zero_rows(o_words, first, end, row_words, part, thread)

    return plan
