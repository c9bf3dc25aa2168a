"""sm90_gated_delta_rule_fwd: which kernels it launches, in which order and with which values, and what it refuses."""

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_gpu import TensorMap, launches, op, place, torch_fake
from layouts import COPIED, LOADABLE, assert_map, strides_of_a_map

from flashqla_hub.bench.rows import ROW_SETS, Row

H, HV = 2, 4
BFLOAT16, FLOAT16, FLOAT32 = 9, 6, 7  # CU_TENSOR_MAP_DATA_TYPE_*
L2_PROMOTION_128B = 2
KEPT = "sm90_gated_delta_rule_fwd_kept"
SWIZZLE_NONE, SWIZZLE_64B, SWIZZLE_128B = 0, 2, 3


@dataclass(frozen=True)
class Call:
    """A call of the op, described so that the process with the fakes can make its tensors."""

    batch: int = 1
    tokens: int = 300
    offsets: tuple[int, ...] | None = None
    offset_dtype: str = "int64"
    dtype: str = "bfloat16"
    gate_dtype: str = "float32"
    initial: str | None = None
    use_l2norm: bool = False
    state_v_first: bool = False
    output_final_state: bool = True
    segment_chunks: int = 0
    op: str = "sm90_gated_delta_rule_fwd"
    range_slots: int = 0  # of the op that keeps what the backward can use


def make_arguments(call: Call) -> list[Any]:
    """q and k are slices of one projection [B, T, 2, H, 128]; v is contiguous."""
    dtype, shape = getattr(torch, call.dtype), (call.batch, call.tokens)
    projection = torch.zeros(*shape, 2, H, 128, dtype=dtype)
    sequences = call.batch if call.offsets is None else len(call.offsets) - 1
    state = (
        None if call.initial is None else torch.full((sequences, HV, 128, 128), 3.0, dtype=getattr(torch, call.initial))
    )
    return [
        projection[:, :, 0],
        projection[:, :, 1],
        torch.zeros(*shape, HV, 128, dtype=dtype),
        torch.zeros(*shape, HV, dtype=getattr(torch, call.gate_dtype)),
        torch.zeros(*shape, HV),
        state,
        None if call.offsets is None else torch.tensor(call.offsets, dtype=getattr(torch, call.offset_dtype)),
        0.25,
        call.use_l2norm,
        call.state_v_first,
        call.output_final_state,
        call.segment_chunks,
        *([call.range_slots] if call.op == KEPT else []),
    ]


def run(call: Call):
    """The recorded launches, the addresses of all tensors by name, and results' shapes and contents in brief."""
    arguments = make_arguments(call)
    results = op(call.op, *arguments)
    names = ("q", "k", "v", "g", "beta", "initial", "offsets")
    addresses = {name: tensor.data_ptr() for name, tensor in zip(names, arguments, strict=False) if tensor is not None}
    addresses |= {name: tensor.data_ptr() for name, tensor in zip(("o", "final", "operand"), results, strict=False)}
    described = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in results]
    return launches(), addresses, described


def run_for_states(call: Call):
    o, final = op("sm90_gated_delta_rule_fwd", *make_arguments(call))
    return len(launches()), o.abs().sum().item(), final.unique().tolist()


PACKED = Call(offsets=(0, 100, 100, 300), initial="float32", use_l2norm=True, state_v_first=True)
SLOTS = 300 // 64 + 3


def tile_map(address, dims, strides, box, dtype=BFLOAT16, swizzle=SWIZZLE_128B):
    ones = (1,) * len(dims)
    return TensorMap(address, dtype, dims, strides, box, ones, swizzle, 0, L2_PROMOTION_128B, 0)


# Sizes that the compiler leaves out of a kernel's arguments when no address depends on them.
DROPPABLE = {"chunk_slots", "links", "matrices", "row_words", "rows", "tokens", "words"}


def assert_arguments(launch, expected):
    """Each argument that the kernel takes has its expected value, and none but droppable sizes is missing."""
    assert launch.arguments == {name: expected[name] for name in launch.arguments}
    assert expected.keys() - launch.arguments.keys() <= DROPPABLE


def test_kernels_in_order(product_process):
    found, _, _ = product_process.run(run, PACKED)
    assert [launch.kernel for launch in found] == ["factor_bf16_kernel", "recurrence_bf16_kernel"]
    assert [launch.grid for launch in found] == [(SLOTS * H + 128, 1, 1), (3 * HV, 1, 1)]
    assert [launch.programmatic for launch in found] == [0, 1]


def test_cut_sequences_have_blocks_that_make_states_before_those_that_make_outputs(product_process):
    [factor, recurrence], _, _ = product_process.run(run, replace(PACKED, segment_chunks=1))
    rows, slots = 299 // 64 * HV, 300 // 64 + 3
    assert recurrence.grid == (2 * rows + slots * HV, 1, 1)
    expected = {"rows": rows, "segment_chunks": 1, "replay": 1, "first_block": 0}
    assert {name: recurrence.arguments[name] for name in expected} == expected
    assert factor.arguments["segment_rows"] == rows, "flags to clear"
    assert factor.arguments["ready"] == recurrence.arguments["ready"]
    workspaces = [recurrence.arguments[name] for name in ("states", "transitions", "reach", "ready", "bound")]
    assert 0 not in workspaces and len(set(workspaces)) == 5


def test_what_the_backward_can_use_is_a_result_of_its_own(product_process):
    found, addresses, described = product_process.run(run, replace(PACKED, op=KEPT))
    assert [launch.kernel for launch in found] == ["factor_kept_bf16_kernel", "recurrence_bf16_kernel"]
    assert described[2] == ((SLOTS, HV, 96, 32), "torch.bfloat16")
    factor, recurrence = (launch.arguments for launch in found)
    assert factor["operand"] == recurrence["operand_desc"].address == addresses["operand"]
    [plain, _], others, _ = product_process.run(run, PACKED)
    assert plain.arguments.keys() == factor.keys() and "operand" not in others
    for name in ("segment_rows", "use_l2norm", "words_per_entry", "dense_length", "sequences"):
        assert factor[name] == plain.arguments[name]
    with pytest.raises(RuntimeError, match="q is not bfloat16, in which alone the SM90 backward uses the operand"):
        product_process.run(run, replace(PACKED, op=KEPT, dtype="float16"))


@pytest.mark.parametrize(("range_slots", "borders"), [(6, 1), (2, 3), (1, 6)])
def test_states_at_borders_are_behind_what_the_backward_can_use(product_process, range_slots, borders):
    found, addresses, described = product_process.run(run, replace(PACKED, op=KEPT, range_slots=range_slots))
    assert [launch.kernel for launch in found] == ["factor_kept_bf16_kernel", "recurrence_kept_bf16_kernel"]
    assert described[2] == ((SLOTS + 11 * borders, HV, 96, 32), "torch.bfloat16")
    factor, recurrence = (launch.arguments for launch in found)
    assert factor["operand"] == addresses["operand"]
    assert recurrence["operand_desc"].dims == (32, 96, HV, SLOTS)
    assert recurrence["kept"] == addresses["operand"] + SLOTS * HV * 96 * 32 * 2
    assert (recurrence["range_slots"], recurrence["chunk_slots"]) == (range_slots, SLOTS)
    [_, plain], _, _ = product_process.run(run, PACKED)
    assert recurrence.keys() - plain.arguments.keys() <= {"kept", "range_slots", "chunk_slots"}
    numbers = {name for name, value in plain.arguments.items() if isinstance(value, int | float) and value < 2**31}
    assert all(recurrence[name] == plain.arguments[name] for name in numbers)


def test_many_short_sequences_keep_states_by_the_kernel_for_long_ones(product_process):
    short = Call(tokens=64 * 400, batch=1, offsets=tuple(range(0, 64 * 400 + 1, 64)), op=KEPT)
    found, _, _ = product_process.run(run, short)
    assert found[1].kernel == "short_bf16_kernel"
    found, _, _ = product_process.run(run, replace(short, range_slots=7))
    assert [launch.kernel for launch in found[1:]] == ["recurrence_kept_bf16_kernel"]


def test_a_range_of_all_slots_has_no_border(product_process):
    found, _, described = product_process.run(run, replace(PACKED, op=KEPT, range_slots=SLOTS))
    assert found[1].kernel == "recurrence_bf16_kernel" and described[2][0][0] == SLOTS


def test_a_negative_range_is_refused(product_process):
    with pytest.raises(RuntimeError, match="range_slots is -1 and must be positive, or 0 for one range"):
        product_process.run(run, replace(PACKED, op=KEPT, range_slots=-1))


def test_whole_rounds_of_blocks_have_launches_of_their_own(product_process):
    """32 segments of 4 heads fill the card once, and so do the blocks that make the states of the linked ones."""
    [factor, states, outputs], _, _ = product_process.run(run, Call(tokens=64 * 1024, segment_chunks=32))
    rows, blocks = (1024 // 32 - 1) * HV, (1024 // 32 + 1) * HV
    assert [launch.grid[0] for launch in (states, outputs)] == [2 * rows, blocks]
    assert [launch.arguments["first_block"] for launch in (states, outputs)] == [0, 2 * rows]
    different = {"first_block", "blocks"}
    for name in states.arguments.keys() - different:
        assert states.arguments[name] == outputs.arguments[name]
    assert factor.arguments["ready"] == outputs.arguments["ready"]
    assert [launch.programmatic for launch in (factor, states, outputs)] == [0, 1, 1]


def test_scratch_arrays_share_one_allocation_and_do_not_overlap(product_process):
    [factor, recurrence, *_], _, _ = product_process.run(run, replace(PACKED, segment_chunks=2))
    rows = 299 // 128 * HV
    sizes = {
        factor.arguments["decay"]: SLOTS * HV * 64 * 4,
        factor.arguments["key_norm"]: SLOTS * H * 64 * 4,
        factor.arguments["bound"]: SLOTS * HV * 4,
        recurrence.arguments["states"]: rows * 128 * 128 * 4,
        recurrence.arguments["transitions"]: (rows - HV) * 256 * 128 * 2,
        recurrence.arguments["reach"]: (rows - HV) * 128 * 4,
        recurrence.arguments["ready"]: rows * 2 * 4,
    }
    addresses = sorted(sizes)
    assert list(sizes) == addresses and all(address % 256 == addresses[0] % 256 for address in addresses)
    for address, following in pairwise(addresses):
        assert address + sizes[address] <= following < address + sizes[address] + 256


def scratch_share(row: Row):
    """Bytes that a call of the bench's shape allocates beside its results, and those of its inputs and outputs."""
    tokens, sequences = sum(row.lengths), len(row.lengths)
    q, k = (torch.empty(1, tokens, row.hk, 128, dtype=torch.bfloat16) for _ in range(2))  # never touched: no memory
    v = torch.empty(1, tokens, row.hv, 128, dtype=torch.bfloat16)
    gates = [torch.empty(1, tokens, row.hv) for _ in range(2)]
    state = torch.empty(sequences, row.hv, 128, 128)
    offsets = torch.tensor([0, *row.lengths]).cumsum(0)
    inputs = (q, k, v, *gates, state)
    results = op("sm90_gated_delta_rule_fwd", *inputs, offsets, 0.25, False, False, True, 0)
    outputs = sum(x.nbytes for x in results)
    return torch_fake().fake_peak_bytes() - outputs, sum(x.nbytes for x in inputs) + outputs


@pytest.mark.parametrize("name", ROW_SETS["forward"])
def test_scratch_stays_below_a_quarter_of_inputs_and_outputs(product_process, name):
    """Or 32 MB; an allocator that rounds up to a MB of its own may add as much."""
    scratch, inputs_and_outputs = product_process.run(scratch_share, Row.parse(name))
    print(f"{name}: {scratch / 1e6:.1f} of {inputs_and_outputs / 1e6:.1f} MB, {scratch / inputs_and_outputs:.1%}")
    assert scratch <= max(0.25 * inputs_and_outputs, 32e6)


def test_segments_longer_than_every_sequence_need_no_states(product_process):
    for call, sequences in ((replace(PACKED, segment_chunks=5), 3), (Call(batch=2, segment_chunks=5), 2)):
        found, _, _ = product_process.run(run, call)
        assert (found[1].grid[0], found[1].arguments["rows"]) == (sequences * HV, 0)
        assert 64 * found[1].arguments["segment_chunks"] > call.batch * call.tokens
        assert found[0].arguments["segment_rows"] == 0, "no flags to clear"


def test_few_long_rows_are_cut_and_many_are_not(product_process):
    """One long sequence of 4 heads would leave 128 of 132 SMs idle; 264 sequence-heads fill the card twice."""
    few, _, _ = product_process.run(run, Call(tokens=64 * 256))
    assert few[-1].arguments["rows"] > 0 and few[-1].grid[0] > 64
    many, _, _ = product_process.run(run, Call(batch=66, tokens=64 * 4))
    assert many[1].arguments["rows"] == 0 and many[1].grid[0] == 66 * HV


def plan_of(call: Call):
    found, _, _ = run(call)
    return found[-1].grid, found[-1].arguments["segment_chunks"]


def test_a_plan_does_not_depend_on_the_call_before(product_process):
    calls = [Call(tokens=64 * 256), Call(tokens=64 * 400), replace(PACKED, segment_chunks=1), PACKED]
    plans = [product_process.run(plan_of, call) for call in calls]
    assert len(set(plans)) == 4
    assert [product_process.run(plan_of, call) for call in (*calls, *calls[::-1])] == plans + plans[::-1]


def test_results_have_the_documented_shapes(product_process):
    _, _, described = product_process.run(run, PACKED)
    assert described == [
        ((1, 300, HV, 128), "torch.bfloat16"),
        ((3, HV, 128, 128), "torch.float32"),
    ]
    _, _, described = product_process.run(run, replace(PACKED, output_final_state=False))
    assert described[1] == ((0, HV, 128, 128), "torch.float32")


def test_offsets_in_int64_are_read_as_words(product_process):
    found, addresses, _ = product_process.run(run, PACKED)
    for launch in found:
        assert launch.arguments["cu_words"] == addresses["offsets"]
        assert (launch.arguments["words_per_entry"], launch.arguments["dense_length"]) == (2, -1)


def test_offsets_in_int32_are_read_as_they_are(product_process):
    found, _, _ = product_process.run(run, replace(PACKED, offset_dtype="int32"))
    assert [launch.arguments["words_per_entry"] for launch in found] == [1, 1]


def test_a_dense_batch_needs_no_offsets(product_process):
    found, _, described = product_process.run(run, Call(batch=5, tokens=70))
    for launch in found:
        assert (launch.arguments["dense_length"], launch.arguments["sequences"]) == (70, 5)
        assert launch.arguments["cu_words"] != 0, "any valid address"
    assert found[0].grid[0] == (350 // 64 + 5) * H + 128
    assert described[0] == ((5, 70, HV, 128), "torch.bfloat16")


def test_factor_gets_keys_and_gates(product_process):
    [factor, _], addresses, _ = product_process.run(run, PACKED)
    expected = {
        "k_desc": tile_map(addresses["k"], (128, 300, H), (2 * H * 256, 256), (64, 64, 1)),
        "decay": factor.arguments["decay"],
        "key_norm": factor.arguments["key_norm"],
        "bound": factor.arguments["bound"],
        "ready": factor.arguments["ready"],
        "segment_rows": 0,
        "g": addresses["g"],
        "beta": addresses["beta"],
        "cu_words": addresses["offsets"],
        "o_words": addresses["o"],
        "operand": factor.arguments["operand"],
        "chunk_slots": SLOTS,
        "dense_length": -1,
        "key_heads": H,
        "row_words": HV * 64,
        "sequences": 3,
        "value_heads": HV,
        "tokens": 300,
        "use_l2norm": 1,
        "words": 8,
        "words_per_entry": 2,
    }
    assert_arguments(factor, expected)
    assert 0 not in (expected["decay"], expected["key_norm"], expected["bound"])


def test_recurrence_gets_everything(product_process):
    [factor, recurrence], addresses, _ = product_process.run(run, PACKED)
    decay, key_norm = factor.arguments["decay"], factor.arguments["key_norm"]
    row, projection_row = 256, 2 * H * 256  # bytes of a head and of a token in q and k's projection
    expected = {
        "q_desc": tile_map(addresses["q"], (128, 300, H), (projection_row, row), (64, 64, 1)),
        "k_desc": tile_map(addresses["k"], (128, 300, H), (projection_row, row), (64, 64, 1)),
        "v_desc": tile_map(addresses["v"], (128, 300, HV), (HV * row, row), (64, 64, 1)),
        "o_desc": tile_map(addresses["o"], (128, 300, HV), (HV * row, row), (64, 64, 1)),
        "operand_desc": tile_map(
            factor.arguments["operand"], (32, 96, HV, SLOTS), (64, 6144, HV * 6144), (32, 96, 1, 1), swizzle=SWIZZLE_64B
        ),
        "decay_desc": tile_map(decay, (64, HV, SLOTS), (256, HV * 256), (64, 1, 1), FLOAT32, SWIZZLE_NONE),
        "key_norm_desc": tile_map(key_norm, (64, H, SLOTS), (256, H * 256), (64, 1, 1), FLOAT32, SWIZZLE_NONE),
        "transitions": recurrence.arguments["transitions"],
        "states": recurrence.arguments["states"],
        "ready": recurrence.arguments["ready"],
        "reach": recurrence.arguments["reach"],
        "bound": factor.arguments["bound"],
        "cu_words": addresses["offsets"],
        "initial": addresses["initial"],
        "o": addresses["o"],
        "final": addresses["final"],
        "has_initial": 1,
        "chunk_slots": SLOTS,
        "dense_length": -1,
        "key_heads": H,
        "value_heads": HV,
        "scale": 0.25,
        "matrices": 3 * HV,
        "links": 0,
        "replay": 0,
        "rows": 0,
        "segment_chunks": 5,
        "sequences": 3,
        "state_v_first": 1,
        "first_block": 0,
        "blocks": 3 * HV,
        "tokens": 300,
        "use_l2norm": 1,
        "words": 8,
        "words_per_entry": 2,
        "write_final": 1,
    }
    assert_arguments(recurrence, expected)


@pytest.mark.parametrize("initial", ["bfloat16", "float16"])
def test_initial_states_of_another_dtype_are_copied_to_float32(product_process, initial):
    [*_, recurrence], addresses, _ = product_process.run(run, replace(PACKED, initial=initial))
    assert recurrence.arguments["has_initial"] == 1
    assert recurrence.arguments["initial"] not in (0, addresses["initial"])


def test_flags_do_not_stand_for_each_other(product_process):
    flags = ("use_l2norm", "has_initial", "write_final", "state_v_first")
    calls = {
        (0, 0, 0, 0): Call(offsets=PACKED.offsets, output_final_state=False),
        (1, 0, 0, 0): Call(offsets=PACKED.offsets, output_final_state=False, use_l2norm=True),
        (0, 1, 0, 0): Call(offsets=PACKED.offsets, output_final_state=False, initial="float32"),
        (0, 0, 1, 0): Call(offsets=PACKED.offsets),
        (0, 0, 0, 1): Call(offsets=PACKED.offsets, output_final_state=False, state_v_first=True),
    }
    for expected, call in calls.items():
        [*_, recurrence], _, _ = product_process.run(run, call)
        assert tuple(recurrence.arguments[flag] for flag in flags) == expected
        assert recurrence.arguments["initial"] != 0 and recurrence.arguments["final"] != 0


def test_float16_has_kernels_of_its_own(product_process):
    found, _, described = product_process.run(run, replace(PACKED, dtype="float16"))
    assert [launch.kernel for launch in found] == ["factor_fp16_kernel", "recurrence_fp16_kernel"]
    assert found[1].arguments["v_desc"].dtype == FLOAT16
    assert described[0][1] == "torch.float16"


def test_gates_of_another_dtype_are_copied(product_process):
    [factor, _], addresses, _ = product_process.run(run, replace(PACKED, gate_dtype="bfloat16"))
    assert factor.arguments["g"] != addresses["g"]
    assert factor.arguments["beta"] == addresses["beta"]


def test_an_unwanted_final_state_is_not_written(product_process):
    [*_, recurrence], _, _ = product_process.run(run, replace(PACKED, output_final_state=False))
    assert recurrence.arguments["write_final"] == 0
    assert recurrence.arguments["final"] != 0


@pytest.mark.parametrize(
    "call",
    [
        Call(tokens=0),
        Call(tokens=0, offsets=(0, 0, 0)),
        Call(batch=0),
        Call(batch=0, segment_chunks=1),
        Call(tokens=5, offsets=(0,)),
        Call(tokens=200, offsets=(0,), segment_chunks=1),
    ],
    ids=["no-tokens", "packed-no-tokens", "no-batch", "no-batch-cut", "no-sequences", "no-sequences-cut"],
)
@pytest.mark.parametrize("initial", [None, "float32", "bfloat16"])
def test_without_chunks_nothing_is_launched_and_states_stay(product_process, call, initial):
    launched, o, states = product_process.run(run_for_states, replace(call, initial=initial))
    has_states = call.batch > 0 and call.offsets != (0,)
    assert (launched, o) == (0, 0.0)
    assert states == ([] if not has_states else [0.0] if initial is None else [3.0])


MANY = 400  # sequences, whose 2 heads each give six blocks an SM and more
SHORT = Call(tokens=32 * MANY, offsets=tuple(range(0, 32 * MANY + 1, 32)), initial="float32")


def test_many_short_sequences_have_a_kernel_of_their_own(product_process):
    found, _, _ = product_process.run(run, SHORT)
    assert [launch.kernel for launch in found] == [
        "factor_bf16_kernel",
        "short_bf16_kernel",
        "recurrence_long_bf16_kernel",
    ]
    places = 13  # of the first multiple of 1024 in a sequence of more than 1024 tokens
    assert [launch.grid for launch in found[1:]] == [(MANY * H, 1, 1), (places * HV, 1, 1)]
    assert [launch.programmatic for launch in found] == [0, 1, 1]
    found, _, _ = product_process.run(run, replace(SHORT, dtype="float16"))
    assert [launch.kernel for launch in found][1:] == ["short_fp16_kernel", "recurrence_long_fp16_kernel"]


def test_the_kernel_for_short_sequences_gets_everything(product_process):
    [factor, short, long], addresses, _ = product_process.run(run, replace(SHORT, use_l2norm=True, state_v_first=True))
    tokens, slots = 32 * MANY, 32 * MANY // 64 + MANY
    decay, key_norm = factor.arguments["decay"], factor.arguments["key_norm"]
    row, projection_row = 256, 2 * H * 256  # bytes of a head and of a token in q and k's projection
    expected = {
        "q_desc": tile_map(addresses["q"], (128, tokens, H), (projection_row, row), (64, 32, 1)),
        "k_desc": tile_map(addresses["k"], (128, tokens, H), (projection_row, row), (64, 32, 1)),
        "v_desc": tile_map(addresses["v"], (128, tokens, HV), (HV * row, row), (64, 32, 1)),
        "operand_desc": tile_map(
            factor.arguments["operand"], (32, 96, HV, slots), (64, 6144, HV * 6144), (32, 32, 1, 1), swizzle=SWIZZLE_64B
        ),
        "decay_desc": tile_map(decay, (64, HV, slots), (256, HV * 256), (64, 1, 1), FLOAT32, SWIZZLE_NONE),
        "key_norm_desc": tile_map(key_norm, (64, H, slots), (256, H * 256), (64, 1, 1), FLOAT32, SWIZZLE_NONE),
        "cu_words": addresses["offsets"],
        "initial": addresses["initial"],
        "o": addresses["o"],
        "final": addresses["final"],
        "has_initial": 1,
        "write_final": 1,
        "chunk_slots": slots,
        "dense_length": -1,
        "key_heads": H,
        "value_heads": HV,
        "scale": 0.25,
        "matrices": MANY * HV,
        "sequences": MANY,
        "state_v_first": 1,
        "tokens": tokens,
        "use_l2norm": 1,
        "words": 2 * (MANY + 1),
        "words_per_entry": 2,
    }
    assert_arguments(short, expected)
    same = ("cu_words", "initial", "o", "final", "scale", "sequences", "has_initial", "write_final", "state_v_first")
    assert [long.arguments[name] for name in same] == [short.arguments[name] for name in same]
    assert long.arguments["first_block"] == 0


@pytest.mark.parametrize(
    ("call", "kernels"),
    [
        (Call(batch=MANY, tokens=64), ["factor_bf16_kernel", "short_bf16_kernel"]),
        (Call(batch=MANY, tokens=65), ["factor_bf16_kernel", "recurrence_bf16_kernel"]),
        (Call(batch=MANY - 10, tokens=64), ["factor_bf16_kernel", "recurrence_bf16_kernel"]),
        (replace(SHORT, segment_chunks=64), ["factor_bf16_kernel", "recurrence_bf16_kernel"]),
        (replace(SHORT, segment_chunks=2**25), ["factor_bf16_kernel", "recurrence_bf16_kernel"]),
    ],
    ids=["none-longer-than-a-chunk", "longer-than-a-chunk", "too-few", "invariant", "off"],
)
def test_which_calls_are_of_short_sequences(product_process, call, kernels):
    found, _, _ = product_process.run(run, call)
    assert sorted({launch.kernel for launch in found}) == sorted(kernels)


def test_many_heads_stay_on_the_first_grid_axis(product_process):
    call = Call(tokens=1, offsets=(0,) * 20_000 + (1,))
    found, _, _ = product_process.run(run, call)
    assert [launch.grid for launch in found] == [(20_000 * H + 128, 1, 1), (20_000 * H, 1, 1)]
    found, _, _ = product_process.run(run, replace(call, segment_chunks=1))
    assert [launch.grid for launch in found] == [(20_000 * H + 128, 1, 1), (20_000 * HV, 1, 1)]


def call_with(index, change):
    """A call whose argument `index` went through `change`, a function of this module."""
    arguments = make_arguments(PACKED)
    arguments[index] = globals()[change](arguments[index])
    op("sm90_gated_delta_rule_fwd", *arguments)


def as_double(tensor):
    return tensor.double()


def as_whole_numbers(tensor):
    return tensor.int()


def without_last_dim(tensor):
    return tensor[..., 0]


def with_half_the_dim(tensor):
    return tensor[..., :64]


def with_one_head_more(tensor):
    return torch.cat([tensor, tensor[:, :, :1]], dim=2)


def with_a_token_less(tensor):
    return tensor[:, 1:]


def elsewhere(tensor):
    return place(tensor, 1)


def with_a_batch_of_rows(tensor):
    return tensor[None]


def with_a_batch_of_two(tensor):
    return torch.cat([tensor, tensor])


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (0, "as_double", "q is neither bfloat16 nor float16, which the SM90 kernels take"),
        (1, "as_double", "k and q have different dtypes"),
        (2, "without_last_dim", "v has 3 dimensions and must have 4"),
        (2, "with_half_the_dim", "v has head dim 64 and the SM90 kernels take 128"),
        (2, "with_one_head_more", "v has 5 heads and q has 2; the value heads must be a positive multiple"),
        (1, "with_one_head_more", "k.shape[2] is 3 and q gives 2"),
        (2, "with_a_token_less", "v.shape[1] is 299 and q gives 300"),
        (3, "with_a_token_less", "g.shape[1] is 299 and v gives 300"),
        (5, "with_a_token_less", "initial_state.shape[1] is 3 and the SM90 forward takes 4"),
        (6, "as_double", "cu_seqlens must be int32 or int64"),
        (6, "with_a_batch_of_rows", "cu_seqlens must be one-dimensional with N + 1 entries"),
        (0, "without_last_dim", "q has 3 dimensions and must have 4"),
        (1, "with_half_the_dim", "k has head dim 64 and the SM90 kernels take 128"),
        (1, "with_a_token_less", "k.shape[1] is 299 and q gives 300"),
        (4, "with_a_token_less", "beta.shape[1] is 299 and v gives 300"),
        (3, "without_last_dim", "g has 2 dimensions and must have 3"),
        (3, "as_whole_numbers", "g must be bfloat16, float16, float32 or float64; pass g.float()"),
        (4, "as_whole_numbers", "beta must be bfloat16, float16, float32 or float64"),
        (5, "as_whole_numbers", "initial_state must be bfloat16, float16, float32 or float64"),
        (5, "without_last_dim", "initial_state has 3 dimensions and must have 4"),
        (1, "elsewhere", "k is on device 1 and q is on device 0; move it there."),
        (2, "elsewhere", "v is on device 1 and q is on device 0; move it there."),
        (3, "elsewhere", "g is on device 1 and q is on device 0; move it there."),
        (4, "elsewhere", "beta is on device 1 and q is on device 0; move it there."),
        (5, "elsewhere", "initial_state is on device 1 and q is on device 0; move it there."),
        (6, "elsewhere", "cu_seqlens is on device 1 and q is on device 0; move it there."),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_no_launch(product_process, index, change, words):
    with pytest.raises(RuntimeError) as error:
        product_process.run(call_with, index, change)
    assert words in str(error.value)
    assert product_process.run(launches) == []


def test_packing_takes_one_batch_row(product_process):
    with pytest.raises(RuntimeError, match="q has batch size 2 and cu_seqlens packs all sequences into one"):
        product_process.run(run, replace(PACKED, batch=2))


def map_of(name, layout):
    """The map of that argument in that layout, and the argument's address, shape and strides for a map."""
    x = {**LOADABLE, **COPIED}[layout](H if name in ("q", "k") else HV)
    arguments = make_arguments(Call(batch=x.shape[0], tokens=x.shape[1]))
    arguments[("q", "k", "v").index(name)] = x
    op("sm90_gated_delta_rule_fwd", *arguments)
    [launch] = [launch for launch in launches() if launch.kernel == "recurrence_bf16_kernel"]
    return launch.arguments[f"{name}_desc"], x.data_ptr(), tuple(x.shape), strides_of_a_map(x)


@pytest.mark.parametrize("name", ("q", "k", "v"))
@pytest.mark.parametrize("layout", [*LOADABLE, *COPIED])
def test_what_tiles_cannot_be_loaded_from_is_copied_and_nothing_else(product_process, name, layout):
    assert_map(layout, *product_process.run(map_of, name, layout))


def strided_bounds():
    bounds = torch.tensor([0, 7, 100, 7, 300, 7])[::2]
    arguments = make_arguments(Call(offsets=(0, 100, 300)))
    arguments[6] = bounds
    op("sm90_gated_delta_rule_fwd", *arguments)
    return launches()[0].arguments["cu_words"] != bounds.data_ptr()


def test_strided_bounds_are_copied(product_process):
    assert product_process.run(strided_bounds)


def call_with_checked_bounds(wish, call: Call):
    """The message of a call whose environment has that wish, or how many kernels it launched."""
    os.environ["FLASHQLA_CHECK_CU_SEQLENS"] = wish
    try:
        op("sm90_gated_delta_rule_fwd", *make_arguments(call))
        return len(launches())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        del os.environ["FLASHQLA_CHECK_CU_SEQLENS"]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("offsets", [(0, 100, 301), (0, 200, 100, 300), (1, 300), (0, -1, 300)])
def test_values_of_bounds_are_checked_on_request_only(product_process, offsets, dtype):
    call, sound = Call(offsets=offsets, offset_dtype=dtype), Call(offsets=(0, 100, 100, 290), offset_dtype=dtype)
    words = "cu_seqlens must start at 0, never decrease and end within the row of 300 tokens."
    assert words in product_process.run(call_with_checked_bounds, "1", call)
    launched = product_process.run(call_with_checked_bounds, "0", call)
    assert launched > 0 and product_process.run(call_with_checked_bounds, "1", sound) == launched


def fail_every_allocation_once(call: Call):
    """Messages of calls whose first, second, ... allocation fails until one succeeds, and what is left of them."""
    messages = []
    for allowed in range(20):
        torch_fake().fake_fail_allocation(allowed)
        try:
            op("sm90_gated_delta_rule_fwd", *make_arguments(call))
        except RuntimeError as error:
            messages.append(str(error).splitlines()[0])
        else:
            break
    torch_fake().fake_fail_allocation(-1)  # the process serves other tests
    return messages, torch_fake().fake_open_guards(), torch_fake().fake_live_allocations()


def test_lack_of_memory_at_any_point_is_named_and_leaves_nothing_behind(product_process):
    call = replace(PACKED, gate_dtype="bfloat16", initial="bfloat16", segment_chunks=1)
    messages, guards, live = product_process.run(fail_every_allocation_once, call)
    assert [message.split()[4] for message in messages] == [
        "o",
        "final_state",
        "workspace",
        "g",
        "initial_state",
    ]
    assert messages[1].startswith("PyTorch could not allocate final_state with 196608 elements of float32 on device 0")
    assert guards == 0
    assert live == 2, "the results of the last call, which succeeded"
