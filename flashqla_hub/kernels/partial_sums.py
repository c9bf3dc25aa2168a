"""Sums of the parts that the blocks of another kernel have left, in a fixed order (SM90).

    out[c] = sum over p of parts[p, c]

Reads        parts [parts, columns] f32, of the kernel before it on the stream
Writes       out [columns], in the dtype of the spec or in float32

Threads      a warp of columns by ROWS rows of threads; each adds every ROWS-th part, then a warp adds the rows
"""

import tilelang.language as T

from ._sm90 import WARP

ROWS = 32


def build_partial_sums(dtype):
    """The prim_func with `narrow` of `dtype`; arguments in README.md."""
    count, columns = T.dynamic("count"), T.dynamic("columns")

    @T.prim_func
    def partial_sums(
        parts: T.Tensor((count, columns), "float32"),
        narrow: T.Tensor((columns,), dtype),
        wide: T.Tensor((columns,), "float32"),
        is_wide: T.int32,
    ):
        with T.Kernel(T.truncdiv(columns + WARP - 1, WARP), threads=ROWS * WARP) as block:
            thread = T.get_thread_binding()
            sums = T.alloc_shared((ROWS, WARP), "float32")
            total, column, row = T.alloc_var("float32"), block * WARP + thread % WARP, thread // WARP
            T.pdl_sync()
            total = 0.0
            if column < columns:
                for turn in T.serial(T.truncdiv(count - row + ROWS - 1, ROWS)):
                    total += parts[turn * ROWS + row, column]
            sums[row, thread % WARP] = total
            T.sync_threads()
            if row == 0:
                if column < columns:
                    total = 0.0
                    for part in T.unroll(ROWS):
                        total += sums[part, thread]
                    if is_wide != 0:
                        wide[column] = total
                    else:
                        narrow[column] = T.cast(total, dtype)

    return partial_sums
