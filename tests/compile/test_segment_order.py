"""The order of the backward's segments: the compiled source of its plan, run on this machine's CPU, a fiber each thread."""

import ctypes
import os
import random
import re
import shutil
import subprocess
from collections import namedtuple
from itertools import accumulate

import pytest

from flashqla_hub.compile.cache import Cache, default_folder
from flashqla_hub.compile.kernel_build import lower_kernel
from flashqla_hub.kernels._sm90 import CHUNK, CHUNK_WORDS, SEGMENT_WORDS, WARP, WARPGROUP

UNWRITTEN = -1234567
Record = namedtuple("Record", "first_token tokens first_slot chunks sequence index border")

# Threads of a block run one after the other, from the first or from the last, each to its next barrier or warp instruction.
DEVICE = f"""
#include <stdint.h>
#include <ucontext.h>
#include <sys/types.h>
#include <type_traits>
#define __global__
#define __launch_bounds__(...)
#define __shared__
#define __align__(bytes)
constexpr int THREADS = {WARPGROUP}, WARP = {WARP}, STACK = 1 << 16;
enum State {{ RUNS, AT_BARRIER, AT_WARP, ENDED }};
struct Index {{ int x; }} blockIdx, threadIdx;
ucontext_t scheduler, fibers[THREADS];
char stacks[THREADS][STACK];
State states[THREADS];
int handed_in[THREADS];
int ahead[1];
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {{ return b < a ? b : a; }}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {{ return a < b ? b : a; }}
void stop(State state) {{
  const int own = threadIdx.x;
  states[own] = state;
  swapcontext(&fibers[own], &scheduler);
}}
void __syncthreads() {{ stop(AT_BARRIER); }}
// A function of what all lanes of the warp hand in.
template <class Function> auto with_warp(int value, Function function) {{
  handed_in[threadIdx.x] = value;
  stop(AT_WARP);
  const auto found = function(handed_in + threadIdx.x / WARP * WARP);
  stop(AT_WARP);
  return found;
}}
int __shfl_sync(unsigned, int value, int lane, int) {{
  return with_warp(value, [lane](const int* values) {{ return values[lane]; }});
}}
unsigned __ballot_sync(unsigned, bool vote) {{
  return with_warp(vote, [](const int* values) {{
    unsigned votes = 0;
    for (int lane = 0; lane < WARP; lane++) votes |= unsigned(values[lane]) << lane;
    return votes;
  }});
}}
int __popc(int mask) {{ return __builtin_popcount(unsigned(mask)); }}
void AtomicAdd(int* sum, int value) {{ *sum += value; }}
"""

LAUNCH = """
#define ARGUMENTS chunks, cu_words, 0, 0, 0, 0, 0, 0, segments, by_length, chunk_slots, dense_length, 0, range_slots, ranges, \\
                  segment_chunks, segment_slots, sequences, tokens, 0, 0, words_per_entry
int *chunks, *segments, by_length, chunk_slots, dense_length, range_slots, ranges, segment_chunks, segment_slots, sequences,
    tokens, words_per_entry;
const int* cu_words;
void run_thread() {
  backward_plan_kernel(ARGUMENTS);
  stop(ENDED);
}
bool all_are(int first, int count, State state) {
  for (int i = first; i < first + count; i++)
    if (states[i] != state) return false;
  return true;
}
bool go_on(int first, int count, State state) {
  if (!all_are(first, count, state)) return false;
  for (int i = first; i < first + count; i++) states[i] = RUNS;
  return true;
}
// Whether all threads end; they do not if only some come to a barrier.
bool run_block(bool from_last) {
  for (int i = 0; i < THREADS; i++) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i];
    fibers[i].uc_stack.ss_size = STACK;
    fibers[i].uc_link = nullptr;
    makecontext(&fibers[i], run_thread, 0);
    states[i] = RUNS;
  }
  ahead[0] = -1000;
  for (bool moves = true; moves;) {
    moves = false;
    for (int turn = 0; turn < THREADS; turn++) {
      const int i = from_last ? THREADS - 1 - turn : turn;
      if (states[i] != RUNS) continue;
      moves = true;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i]);
    }
    for (int warp = 0; warp < THREADS; warp += WARP) moves |= go_on(warp, WARP, AT_WARP);
    moves |= go_on(0, THREADS, AT_BARRIER);
  }
  return all_are(0, THREADS, ENDED);
}
extern "C" int run(const int* offsets, int* chunk_records, int* segment_records, const int* sizes, int from_last) {
  cu_words = offsets, chunks = chunk_records, segments = segment_records;
  int* const arguments[] = {&by_length, &chunk_slots, &dense_length, &range_slots, &ranges, &segment_chunks, &segment_slots,
                            &sequences, &tokens, &words_per_entry};
  for (int* argument : arguments) *argument = *sizes++;
  for (blockIdx.x = 0; blockIdx.x < ranges * sequences; blockIdx.x++)
    if (!run_block(from_last)) return blockIdx.x + 1;
  return 0;
}
"""


@pytest.fixture(scope="module")
def source(tools):
    """The kernel without the headers that it includes."""
    from flashqla_hub.kernels.spec import SPECS

    [spec] = [spec for spec in SPECS if spec.name == "backward_plan"]
    lowered = lower_kernel(spec, tools, Cache(default_folder())).source
    return lowered[lowered.index('extern "C" __global__') :]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "g++"))  # there is one: `source` needs it too

    def compile_source(source):
        folder = tmp_path_factory.mktemp("order")
        (folder / "plan.cpp").write_text(DEVICE + source + LAUNCH, encoding="utf-8")
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(folder / "plan.so")]
        done = subprocess.run([*command, str(folder / "plan.cpp")], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return ctypes.CDLL(str(folder / "plan.so"))

    return compile_source


@pytest.fixture(scope="module")
def plan(source, compiled):
    return compiled(source)


def records(plan, offsets, *, by_length=1, ranges=1, words=1, dense=-1, unused=0, from_last=0):
    """For each range the records of its segments, where no sequence is cut: the sizes are those of `plan_ranges`."""
    sequences, tokens = len(offsets) - 1, max(offsets) + unused
    slots = tokens // CHUNK + sequences
    range_slots = -(-slots // ranges)
    ranges = -(-slots // range_slots)
    segment_chunks = tokens // CHUNK + 1 if ranges == 1 else range_slots + sequences
    entry = [word for offset in offsets for word in (offset, *(UNWRITTEN,) * (words - 1))]
    sizes = (by_length, slots, dense, range_slots, ranges, segment_chunks, sequences, sequences, tokens, words)
    segments = (ctypes.c_int32 * (ranges * sequences * SEGMENT_WORDS))(
        *[UNWRITTEN] * (ranges * sequences * SEGMENT_WORDS)
    )
    chunks = (ctypes.c_int32 * (slots * CHUNK_WORDS))()
    stuck = plan.run(
        (ctypes.c_int32 * len(entry))(*entry), chunks, segments, (ctypes.c_int32 * len(sizes))(*sizes), from_last
    )
    assert stuck == 0, f"block {stuck - 1} does not end: not all its threads come to a barrier"
    found = [Record(*segments[at : at + SEGMENT_WORDS]) for at in range(0, len(segments), SEGMENT_WORDS)]
    return [found[at : at + sequences] for at in range(0, len(found), sequences)]


def offsets_of(lengths, start=0):
    return list(accumulate(lengths, initial=start))


def drawn_lengths(count, seed):
    rng = random.Random(seed)
    return [rng.choice((0, 0, 1, 64, 65, rng.randrange(2000))) for _ in range(count)]


CASES = {
    "one": {"offsets": offsets_of([70])},
    "equal": {"offsets": offsets_of([100] * 9)},
    "dense": {"offsets": offsets_of([130] * 5), "dense": 130},
    "rising": {"offsets": offsets_of(range(0, 400, 13), start=5), "unused": 99},
    "empty": {"offsets": offsets_of([0, 0, 0]), "unused": 64},
    "int64": {"offsets": offsets_of(drawn_lengths(40, 0)), "words": 2},
    "threads": {"offsets": offsets_of(drawn_lengths(128, 1))},
    "more than threads": {"offsets": offsets_of(drawn_lengths(129, 2))},
    "most": {"offsets": offsets_of(drawn_lengths(1024, 3))},
    "two ranges": {"offsets": offsets_of(drawn_lengths(20, 4), start=70), "ranges": 2, "unused": 500},
    "five ranges": {"offsets": offsets_of(drawn_lengths(150, 5)), "ranges": 5},
    "dense ranges": {"offsets": offsets_of([700] * 4), "ranges": 3, "dense": 700},
}


@pytest.mark.parametrize("from_last", [0, 1], ids=["from-first", "from-last"])
@pytest.mark.parametrize("case", CASES)
def test_the_longest_come_first_and_nothing_else_changes(plan, case, from_last):
    options = CASES[case]
    in_turn = records(plan, **options, by_length=0)
    assert len(in_turn) == options.get("ranges", 1)
    for part in in_turn:
        assert [record.sequence for record in part] == list(range(len(options["offsets"]) - 1))
    by_length = records(plan, **options, from_last=from_last)
    assert by_length == [sorted(part, key=lambda record: -record.tokens) for part in in_turn]


@pytest.mark.parametrize("ranges", [1, 3])
def test_every_sequence_has_one_place_even_if_offsets_decrease(plan, ranges):
    for seed in range(20):
        rng = random.Random(seed)
        offsets = [rng.randrange(900) for _ in range(rng.randrange(2, 40))]
        for part in records(plan, offsets, ranges=ranges):
            assert sorted(record.sequence for record in part) == list(range(len(offsets) - 1))


def test_a_barrier_that_is_left_out_is_found(source, compiled):
    """Of the two, each in one of both orders of the threads."""
    barrier = re.compile(r"__syncthreads\(\);")
    assert len(barrier.findall(source)) == 2
    options = CASES["rising"]
    right = [
        sorted(part, key=lambda record: -record.tokens) for part in records(compiled(source), **options, by_length=0)
    ]
    for match in barrier.finditer(source):
        broken = compiled(source[: match.start()] + source[match.end() :])
        assert any(records(broken, **options, from_last=order) != right for order in (0, 1))
