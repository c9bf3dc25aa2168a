"""Plan of a backward: chunk records and spans from sequence offsets, and zeros where no sequence is.

Reads        cu_seqlens as 32-bit words
Writes       chunks [slots, 4] int32: first token, rows (0 = unused slot), sequence ·
             spans [N, 4] int32: first token, tokens, first slot, chunks ·
             rows of dq dk dv dg dbeta below cu_seqlens[0] and from cu_seqlens[N] on

Blocks       N: a sequence each
             then ZERO_BLOCKS: rows that no sequence has, in turn
"""

import tilelang.language as T

from ._sm90 import (
    CHUNK,
    CHUNK_FIRST_TOKEN,
    CHUNK_ROWS,
    CHUNK_SEQUENCE,
    CHUNK_WORDS,
    SPAN_CHUNKS,
    SPAN_FIRST_SLOT,
    SPAN_FIRST_TOKEN,
    SPAN_TOKENS,
    SPAN_WORDS,
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
def zero_rows(words, first, end, part, thread):
    """Rows first + part, first + part + ZERO_BLOCKS, ... below `end`; the width stays a size of its own tensor."""
    for turn in T.serial(T.truncdiv(end - first - part + ZERO_BLOCKS - 1, ZERO_BLOCKS)):
        for step in T.serial(T.truncdiv(words.shape[1] + THREADS - 1, THREADS)):
            if step * THREADS + thread < words.shape[1]:
                words[first + part + turn * ZERO_BLOCKS, step * THREADS + thread] = 0


def build_backward_plan():
    """The prim_func; arguments in README.md."""
    words, chunk_slots, sequence_count = T.dynamic("words"), T.dynamic("chunk_slots"), T.dynamic("sequence_count")
    tokens, key_words, value_words = T.dynamic("tokens"), T.dynamic("key_words"), T.dynamic("value_words")
    value_heads = T.dynamic("value_heads")

    def offset(cu_words, index, words_per_entry, dense_length):
        """First token of a sequence, inside the tensors whatever the offsets are."""
        packed = T.max(0, T.min(cu_words[index * words_per_entry], tokens))
        return T.if_then_else(dense_length >= 0, index * dense_length, packed)

    @T.prim_func
    def backward_plan(
        cu_words: T.Tensor((words,), "int32"),
        chunks: T.Tensor((chunk_slots, CHUNK_WORDS), "int32"),
        spans: T.Tensor((sequence_count, SPAN_WORDS), "int32"),
        dq_words: T.Tensor((tokens, key_words), "int32"),
        dk_words: T.Tensor((tokens, key_words), "int32"),
        dv_words: T.Tensor((tokens, value_words), "int32"),
        dg_words: T.Tensor((tokens, value_heads), "int32"),
        dbeta_words: T.Tensor((tokens, value_heads), "int32"),
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
                if thread == 0:
                    spans[block, SPAN_FIRST_TOKEN] = first
                    spans[block, SPAN_TOKENS] = length
                    spans[block, SPAN_FIRST_SLOT] = first_slot
                    spans[block, SPAN_CHUNKS] = T.truncdiv(length + CHUNK - 1, CHUNK)
            else:
                part = block - sequences
                for side in T.serial(2):
                    first = T.if_then_else(side == 0, 0, offset(cu_words, sequences, words_per_entry, dense_length))
                    end = T.if_then_else(side == 0, offset(cu_words, 0, words_per_entry, dense_length), tokens)
                    zero_rows(dq_words, first, end, part, thread)
                    zero_rows(dk_words, first, end, part, thread)
                    zero_rows(dv_words, first, end, part, thread)
                    zero_rows(dg_words, first, end, part, thread)
                    zero_rows(dbeta_words, first, end, part, thread)

    return backward_plan
