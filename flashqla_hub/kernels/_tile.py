"""TileLang pieces that several kernels share."""

import tilelang
import tilelang.language as T
from tvm.script.ir_builder import IRBuilder

from ._sm90 import CHUNK, FACTORED_RANGE, HEAD_DIM, WARP, lanes_arriving

swizzled = tilelang.layout.make_swizzled_layout
linear = tilelang.layout.make_linear_layout


def rolled(count):
    """Turns of a loop whose body stands once in the code, of which an SM keeps 32 KB; else it may stand there four times."""
    return T.unroll(count, unroll_factor=1)


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


def alloc_barriers(warps, slots=1):
    """mbarriers of which each completes a phase after `arrive` of so many warps."""
    return T.alloc_barrier([warps * lanes_arriving()] * slots)


@T.macro
def arrive(barriers, slot, thread):
    """One arrival a warp, after everything that its lanes did before; one a lane within `every_lane_arrives`."""
    T.sync_warp()
    if lanes_arriving() == WARP:
        T.barrier_arrive(barriers[slot])
    elif thread % WARP == 0:
        T.barrier_arrive(barriers[slot])


@T.macro
def wait(barriers, slot, parity):
    """Waits for a phase; the warp barrier keeps the compiler from moving plain shared loads in front of it."""
    T.barrier_wait(barriers[slot], parity)
    T.sync_warp()


def fraction(x):
    """x - floor(x), in [0, 1)."""
    return x - T.floor(x)


@T.macro
def find_reference(dtype, last, one, other, reference, factored):
    """factored[0] <- whether a chunk's decay splits into a factor of the row and one of the column, at reference[0].

    The reference is a decay R within FACTORED_RANGE of every token's and of 0: that of the chunk's last token, or half of
    it. A warp votes; each lane brings two of the chunk's 64 decays, `last` is the decay of its last token. The factor and
    the recurrence kernel must agree, and do: both compare the same float32 numbers.
    """
    reference[0] = last
    factored[0] = T.all_sync(_reach(last, one, other) <= FACTORED_RANGE[dtype])
    if dtype == "bfloat16":  # float16 has no room for N with more than its decay
        if factored[0] == 0:
            factored[0] = T.all_sync(_reach(0.5 * last, one, other) <= FACTORED_RANGE[dtype])
            reference[0] = T.Select(factored[0] != 0, 0.5 * last, last)


def _reach(reference, one, other):
    return T.max(T.abs(reference), T.max(T.abs(reference - one), T.abs(reference - other)))


def transposed_fragment(values=HEAD_DIM, tokens=CHUNK):
    """Registers of a [tokens, values] tile laid out as the transpose of a wgmma accumulator [values, tokens].

    Thread 32 w + 4 r + p holds value rows 16 w + r (+ 8) and, of every eight tokens, 2 p and 2 p + 1: a token pair is one
    register, so that ldmatrix and stmatrix with .trans move the tile between registers and row-major shared memory.
    """

    def place(token, value):
        thread = (value // 16) * WARP + (value % 8) * 4 + (token % 8) // 2
        return thread, (token // 8) * 4 + ((value % 16) // 8) * 2 + token % 2

    return T.Fragment((tokens, values), forward_fn=place)
