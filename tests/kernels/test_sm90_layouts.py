"""The arithmetic of the SM90 kernels against the limits of the chip; no compiler and no GPU."""

import dataclasses
from itertools import accumulate, product

import pytest

from flashqla_hub.kernels import _sm90 as sm90
from flashqla_hub.kernels.spec import DTYPES, SPECS

LENGTHS = ((0, 0, 1, 0), (63, 1, 64, 65, 0), (128,), (1,) * 130, (5, 0, 0, 700, 64, 64, 63))


def fits(layout):
    """Whether a recurrence layout's registers are those of one SM and legal budgets."""
    legal = all(role.registers % sm90.REGISTER_STEP == 0 for role in layout.roles)
    return legal and layout.registers <= sm90.REGISTER_FILE


def test_recurrence_roles_fill_the_register_file():
    assert fits(sm90.RECURRENCE)
    assert sm90.RECURRENCE.registers == sm90.REGISTER_FILE


def test_a_role_with_eight_registers_more_does_not_fit():
    state = dataclasses.replace(sm90.RECURRENCE.state, registers=sm90.RECURRENCE.state.registers + 8)
    assert not fits(dataclasses.replace(sm90.RECURRENCE, state=state))


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_recurrence_tiles_fit_in_a_block(dtype):
    tiles = sm90.RECURRENCE.shared_memory(dtype) + sm90.SHARED_MEMORY_OVERHEAD
    assert tiles <= sm90.SHARED_MEMORY
    one_stage_more = dataclasses.replace(sm90.RECURRENCE, stages=sm90.RECURRENCE.stages + 1)
    assert one_stage_more.shared_memory(dtype) > sm90.SHARED_MEMORY


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_factor_blocks_fit_in_an_sm(dtype):
    block = sm90.FACTOR.shared_memory(dtype) + sm90.SHARED_MEMORY_OVERHEAD
    assert sm90.FACTOR.blocks_per_sm * block <= sm90.SHARED_MEMORY_OF_SM
    assert (sm90.FACTOR.blocks_per_sm + 1) * block > sm90.SHARED_MEMORY_OF_SM


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_blocks_of_short_sequences_fit_in_an_sm(dtype):
    block = sm90.SHORT.shared_memory(dtype) + sm90.SHARED_MEMORY_OVERHEAD
    assert sm90.SHORT.blocks_per_sm * block <= sm90.SHARED_MEMORY_OF_SM
    assert (sm90.SHORT.blocks_per_sm + 1) * block > sm90.SHARED_MEMORY_OF_SM


def test_every_barrier_completes_with_whole_warps():
    state, scores = sm90.RECURRENCE.state.warps, sm90.RECURRENCE.scores.warps
    assert sm90.RECURRENCE.arrivals["tokens_free"] == state + scores
    assert 2 * sm90.RECURRENCE.arrivals["output_ready"] == state
    assert sm90.RECURRENCE.arrivals.keys() == sm90.RECURRENCE.barrier_slots.keys()


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_backward_tiles_fit(dtype):
    overhead = sm90.SHARED_MEMORY_OVERHEAD
    assert sm90.BACKWARD_SCAN.shared_memory(dtype) + overhead <= sm90.SHARED_MEMORY
    assert sm90.BACKWARD_GRADIENTS.shared_memory(dtype) + overhead <= sm90.SHARED_MEMORY
    one_stage_more = dataclasses.replace(sm90.BACKWARD_SCAN, stages=sm90.BACKWARD_SCAN.stages + 1)
    assert one_stage_more.shared_memory(dtype) > sm90.SHARED_MEMORY


def test_backward_roles_fit_in_the_register_file():
    """The roles deal out what a block is launched with, the same for each thread; with less to give, one would wait for ever."""
    for layout in (sm90.BACKWARD_SCAN, sm90.BACKWARD_GRADIENTS):
        of_launch = sm90.REGISTER_FILE // layout.threads // sm90.REGISTER_STEP * sm90.REGISTER_STEP
        assert layout.registers <= of_launch * layout.threads
        assert all(role.registers % sm90.REGISTER_STEP == 0 for role in layout.roles)


def test_every_barrier_of_the_backward_completes_with_whole_warps():
    scan, gradients = sm90.BACKWARD_SCAN, sm90.BACKWARD_GRADIENTS
    for layout in (scan, gradients):
        assert layout.arrivals.keys() == layout.barrier_slots.keys()
    assert scan.arrivals["chunk_free"] == scan.state.warps
    assert scan.arrivals["scores_ready"] == scan.scores.warps and scan.arrivals["scores_free"] == scan.state.warps
    assert scan.arrivals["stored_ready"] == scan.arrivals["state_free"] + scan.arrivals["values_free"], "both storers"
    consumers = gradients.queries.warps + gradients.keys.warps + gradients.pairs.warps
    assert gradients.arrivals["parts_ready"] == consumers
    assert gradients.arrivals["tokens_free"] == consumers + 2, (
        "the warps that load states and sum up read which chunk it is"
    )
    assert gradients.arrivals["rows_free"] == consumers + gradients.arrivals["parts_free"], (
        "the warp that sums up reads too"
    )
    assert gradients.arrivals["pairs_free"] == gradients.queries.warps + gradients.keys.warps


def test_strongest_gate_vanishes_and_keeps_the_sum_of_a_chunk():
    assert 2.0**sm90.STRONGEST_GATE < 2.0**-149 / 1.5, "rounds to zero in float32"
    ulp = 2.0 ** (13 - 23)  # of float32 numbers from 8192 on
    assert sm90.CHUNK * -sm90.STRONGEST_GATE < 2**14
    assert ulp / 2 == 2.0**-11


def test_spec_names_are_unique_and_promise_instructions():
    names = [spec.name for spec in SPECS]
    assert len(set(names)) == len(names)
    assert all(spec.minimum_instructions for spec in SPECS)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_no_two_chunks_share_a_slot(lengths):
    """README.md of the kernels: first_slot(n) = cu_seqlens[n] // C + n in T // C + N slots."""
    taken, first = [], 0
    for n, length in enumerate(lengths):
        chunks = -(-length // sm90.CHUNK)
        taken += range(first // sm90.CHUNK + n, first // sm90.CHUNK + n + chunks)
        first += length
    assert len(set(taken)) == len(taken)
    assert all(slot < first // sm90.CHUNK + len(lengths) for slot in taken)


@pytest.mark.parametrize("step", [1, 2, 3, 64])
def test_states_that_others_start_from_have_places_of_their_own(step):
    """first_place(n) = cu_seqlens[n] // step in (T - 1) // step places; the last sequence that begins there has it."""
    for lengths in (*LENGTHS, *product(range(6), repeat=4)):
        check_places(lengths, step)


def check_places(lengths, step):
    bounds = [0, *accumulate(lengths)]
    owners = {}
    for n, length in enumerate(lengths):
        for index in range(-(-length // step) - 1):
            place = bounds[n] // step + index
            assert place not in owners and place < (bounds[-1] - 1) // step
            owners[place] = n
            assert n == max(m for m in range(len(lengths)) if bounds[m] // step <= place)
    without_first = [place - 1 for place, n in owners.items() if place > bounds[n] // step]
    assert len(set(without_first)) == len(without_first) and min(without_first, default=0) >= 0
