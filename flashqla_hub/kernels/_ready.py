"""How the blocks that write a chunk's tiles tell those that read them, which run beside them, that all are there.

A chunk of a key head is *ready* once all tiles of its value heads are in memory. Each block of the scan counts its own; the one
that counts last puts the chunk at the end of a queue. Blocks of the gradient kernel take from its front, each the next chunk as
soon as it has loaded one. They wait only for blocks of the launch before, which have all begun by then, and no longer than those
run: afterwards nothing becomes ready, and slots without a chunk never do.

    arrivals    blocks whose tiles of a chunk and key head are there
    queue       1 + slot * H + key head of the chunks that are ready, in their order; 0 where none is yet
    cursors     places of the queue that were asked for, by each block one more than it gets, and that are filled

`backward_plan.py` clears the cursors, `backward_rows.py` the rest.
"""

import tilelang.language as T

from ._sm90 import (
    BLOCKS_OF_HEAD,
    CHUNK_FIRST_TOKEN,
    CHUNK_ROWS,
    CURSOR_FILLED,
    CURSOR_TAKEN,
    WARP,
    WORK_FIRST_TOKEN,
    WORK_KEY_HEAD,
    WORK_ROWS,
    WORK_SLOT,
)

NOTHING = -1

PROXY_CODE = """
// Copies that this thread starts see what it has seen of other blocks' writes.
static __device__ __forceinline__ void order_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
"""


@T.macro
def order_copies():
    """Between a wait for a chunk and the copies of its tiles, in the warp that starts them."""
    T.evaluate(T.call_extern("handle", "order_copies"))


@T.macro
def count_block(arrivals, queue, cursors, work, group):
    """Counts one more block whose tiles of a chunk this thread knows to be in memory; the last one makes the chunk ready."""
    before, place = T.alloc_var("int32"), T.alloc_var("int32")
    before = T.atomic_add(arrivals[work], 1, memory_order="acq_rel", return_prev=True)
    if before == group * BLOCKS_OF_HEAD - 1:
        place = T.atomic_add(cursors[CURSOR_FILLED], 1, memory_order="relaxed", return_prev=True)
        T.atomic_store(queue[place], work + 1, memory_order="release")


@T.macro
def take_work(work, at, has_ended, queue, cursors, chunks, places, key_heads, tokens, thread):
    """work[at, :] <- the next chunk of the queue, which the warp's first lane waits for; no rows if there is none.

    By a warp, without barriers. has_ended[0] is read before the queue: what is not there once the launch before has ended never
    will be.
    """
    place, entry, slot, over = (T.alloc_var("int32") for _ in range(4))
    if thread % WARP == 0:
        place = T.atomic_add(cursors[CURSOR_TAKEN], 1, memory_order="relaxed", return_prev=True)
        entry = T.Select(place < places, 0, NOTHING)
        while entry == 0:
            over = T.atomic_load(has_ended[0], memory_order="acquire")
            entry = T.atomic_load(queue[place], memory_order="acquire")
            if T.And(entry == 0, over != 0):
                entry = NOTHING
        work[at, WORK_ROWS] = 0
        if entry > 0:
            slot = T.truncdiv(entry - 1, key_heads)
            work[at, WORK_SLOT] = slot
            work[at, WORK_KEY_HEAD] = entry - 1 - slot * key_heads
            work[at, WORK_FIRST_TOKEN] = chunks[slot, CHUNK_FIRST_TOKEN]
            work[at, WORK_ROWS] = T.min(chunks[slot, CHUNK_ROWS], tokens - chunks[slot, CHUNK_FIRST_TOKEN])
