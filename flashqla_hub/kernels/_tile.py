"""TileLang pieces that several kernels share."""

import tilelang
import tilelang.language as T
from tvm.script.ir_builder import IRBuilder

from ._sm90 import CHUNK, FACTORED_RANGE, HEAD_DIM, WARP

swizzled = tilelang.layout.make_swizzled_layout
linear = tilelang.layout.make_linear_layout


class Group:
    """Buffers as attributes of one object, each named after its attribute in the generated source.

    `suffix` keeps a tile apart from a tensor of the same name: of equal names the compiler renames one or the other, as
    chance has it, and the source would not be the same every time.
    """

    suffix = ""

    def __setattr__(self, name, value):
        _name(name, value, self.suffix)
        object.__setattr__(self, name, value)


def _name(name, value, suffix):
    if isinstance(value, list):
        for index, part in enumerate(value):
            _name(f"{name}_{index}", part, suffix)
    else:
        IRBuilder.name(name + suffix, value)


@T.macro
def arrive(barriers, slot, thread):
    """One arrival a warp, after everything that its lanes did before."""
    T.sync_warp()
    if thread % WARP == 0:
        T.barrier_arrive(barriers[slot])


@T.macro
def wait(barriers, slot, parity):
    """Waits for a phase; the warp barrier keeps the compiler from moving plain shared loads in front of it."""
    T.barrier_wait(barriers[slot], parity)
    T.sync_warp()


def fraction(x):
    """x - floor(x), in [0, 1)."""
    return x - T.floor(x)


def is_factored(dtype, last, one, other):
    """Whether a chunk's decay splits into a factor of the row and one of the column (FACTORED_RANGE).

    A warp votes; each lane brings two of the chunk's 64 decays, `last` is the decay of its last token. The factor and the
    recurrence kernel must agree, and do: both compare the same float32 numbers.
    """
    reach = T.max(T.abs(last), T.max(T.abs(last - one), T.abs(last - other)))
    return T.all_sync(reach <= FACTORED_RANGE[dtype])


def transposed_fragment(values=HEAD_DIM):
    """Registers of a [CHUNK, values] tile laid out as the transpose of a wgmma accumulator [values, CHUNK].

    Thread 32 w + 4 r + p holds value rows 16 w + r (+ 8) and, of every eight tokens, 2 p and 2 p + 1: a token pair is one
    register, so that ldmatrix and stmatrix with .trans move the tile between registers and row-major shared memory.
    """

    def place(token, value):
        thread = (value // 16) * WARP + (value % 8) * 4 + (token % 8) // 2
        return thread, (token // 8) * 4 + ((value % 16) // 8) * 2 + token % 2

    return T.Fragment((CHUNK, values), forward_fn=place)
