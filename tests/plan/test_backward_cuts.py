"""How the backward's scans are cut: `plan_backward_segments`, compiled for this machine's CPU; neither GPU nor PyTorch."""

import ctypes
import os
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "torch-ext" / "flashqla" / "csrc" / "ops" / "segment_plan.cpp"
CHUNK, SMS = 64, 132
MOST_WALKED, MOST_LINKED = 4, 32  # parts of a sequence
PACKED = 32768  # tokens of calls whose host does not know the lengths

BRIDGE = """
#include "segment_plan.h"
extern "C" void plan(const int64_t* question, int64_t* found) {
  const auto plan = flashqla::plan_backward_segments(question[0], question[1], question[2], question[3], question[4],
                                                     question[5]);
  const int64_t fields[] = {plan.chunks, plan.slots, plan.replay, plan.has_cuts, plan.links};
  for (int i = 0; i < 5; i++) found[i] = fields[i];
}
"""

Plan = namedtuple("Plan", "chunks slots replay has_cuts links")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan(heads, chunks): that of a sequence of so many chunks on an H200, or of several.

    tokens: of all sequences, if they are not all that long; a packed call's longest may have them all.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("plan")
    (folder / "bridge.cpp").write_text(BRIDGE, encoding="utf-8")
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{SOURCE.parent}", "-o", str(folder / "plan.so")]
    done = subprocess.run(
        [*command, str(SOURCE), str(folder / "bridge.cpp")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    library = ctypes.CDLL(str(folder / "plan.so"))

    def ask(heads, chunks, sequences=1, segment_chunks=0, tokens=None):
        longest = chunks * CHUNK
        tokens = longest * sequences if tokens is None else tokens
        question = (ctypes.c_int64 * 6)(segment_chunks, tokens, longest, sequences, heads, SMS)
        found = (ctypes.c_int64 * len(Plan._fields))()
        library.plan(question, found)
        return Plan(*found)

    return ask


def parts(plan, chunks):
    return -(-chunks // plan.chunks)


@pytest.mark.parametrize("heads", [32, 48, 64])
@pytest.mark.parametrize("chunks", [256, 512])
def test_sequences_with_blocks_for_all_sms_are_not_cut(plan, heads, chunks):
    found = plan(heads, chunks)
    assert not found.has_cuts and not found.links
    assert (found.chunks, found.slots) == (chunks + 1, 1)


def test_with_blocks_for_half_of_the_sms_they_walk_on(plan):
    """The SMs that have nothing to scan form gradients, and no links or states are made."""
    found = plan(16, 512)
    assert found.has_cuts and not found.links
    assert parts(found, 512) == 2


@pytest.mark.parametrize("heads", [2, 4])
def test_with_few_heads_segments_link(plan, heads):
    found = plan(heads, 512)
    assert found.has_cuts and found.links
    assert MOST_WALKED < parts(found, 512) <= MOST_LINKED
    assert heads != 4 or parts(found, 512) == 10


@pytest.mark.parametrize(
    ("heads", "sequences", "chunks"),
    [(16, 4, None), (24, 2, 128), (1, 34, None)],
    ids=["almost-two-rounds", "a-round-and-a-half", "hardly-above-one"],
)
def test_packed_calls_are_cut_by_their_mean_length(plan, heads, sequences, chunks):
    """One sequence may have all tokens, but as many each is what is expected; ids: blocks for each SM."""
    found = plan(heads, PACKED // CHUNK, sequences, tokens=PACKED)
    assert (found.has_cuts, found.links) == (chunks is not None, False)
    assert found.chunks == (chunks or PACKED // CHUNK + 1)


@pytest.mark.parametrize(
    "empty", [{"sequences": 0, "tokens": PACKED}, {"tokens": 0}, {"chunks": 0, "tokens": PACKED}], ids=str
)
def test_what_is_empty_is_not_cut(plan, empty):
    """No sequences, no tokens, or a longest sequence without any."""
    found = plan(**{"heads": 4, "chunks": 512} | empty)
    assert not found.has_cuts and not found.links


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("chunks", [1, 5, 11, 12, 64, 200, 512, 1024])
def test_who_walks_on_has_few_segments_and_all_have_places(plan, heads, chunks):
    for sequences in (1, 2, 5):
        found = plan(heads, chunks, sequences)
        assert found.has_cuts == (found.chunks <= chunks) and (found.has_cuts or not found.links)
        assert parts(found, chunks) <= (MOST_LINKED if found.links else MOST_WALKED)
        assert found.slots >= sequences * parts(found, chunks)
        assert found.replay == (found.chunks if found.has_cuts else 0)


def test_a_length_that_the_caller_says_is_taken_with_links(plan):
    found = plan(32, 512, segment_chunks=7)
    assert (found.chunks, found.has_cuts, found.links) == (7, True, True)
    assert not plan(32, 512, segment_chunks=512).has_cuts
