"""The order in which the gradient kernel's source reads what other blocks write: that of the model in `tests/kernels`.

A lowering that moved one of these accesses would leave results right nearly always.
"""

import pytest

from flashqla_hub.compile.cache import Cache, default_folder
from flashqla_hub.compile.kernel_build import lower_kernel

LOOP = "while (1) {"
HAS_ENDED = "AtomicLoad((&(((int*)has_ended_smem)[0])), 2)"  # 2: acquire
ENTRY = "AtomicLoad((&(queue[place])), 2)"
WORK_IS_KNOWN = "work_ready["  # an arrival of who took it from the queue, a wait of everybody else


@pytest.fixture(scope="module")
def loops(tools):
    """The source from each head of a loop without a count to the next one."""
    from flashqla_hub.kernels.spec import SPECS

    [spec] = [spec for spec in SPECS if spec.name == "backward_gradients_bf16"]
    return lower_kernel(spec, tools, Cache(default_folder())).source.split(LOOP)[1:]


def test_the_end_of_the_scan_is_read_before_the_queue(loops):
    [loop] = [loop for loop in loops if "AtomicLoad" in loop]
    assert loop.count("AtomicLoad") == 2
    assert loop.index(HAS_ENDED) < loop.index(ENTRY)


def test_copies_are_ordered_behind_the_wait_for_their_chunk(loops):
    loaders = [loop for loop in loops if "tma_load" in loop]
    assert len(loaders) == 2, "of tokens and of states"
    for loop in loaders:
        assert loop.index(WORK_IS_KNOWN) < loop.index("order_copies();") < loop.index("tl::tma_load")
    assert sum("order_copies();" in loop for loop in loops) == len(loaders)
