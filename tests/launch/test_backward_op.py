"""sm90_gated_delta_rule_bwd: which kernels it launches, in which order and with which values, and what it refuses."""

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_gpu import TensorMap, launches, op, place, torch_fake
from layouts import COPIED, LOADABLE, assert_map, strides_of_a_map

H, HV = 2, 4
CURSOR_WORDS = 2
BFLOAT16, FLOAT32 = 9, 7  # CU_TENSOR_MAP_DATA_TYPE_*
L2_PROMOTION_128B = 2
SWIZZLE_NONE, SWIZZLE_64B, SWIZZLE_128B = 0, 2, 3
OP = "sm90_gated_delta_rule_bwd"
NAMES = ("q", "k", "v", "g", "beta", "initial", "offsets", "dout", "dfinal")
OPERAND = 14  # its place among the arguments
RESULTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial")


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
    dfinal: str | None = None
    use_l2norm: bool = False
    state_v_first: bool = False
    output_dinitial: bool = True
    segment_chunks: int = 0
    is_kept: bool = True  # what the forward keeps in bfloat16
    range_slots: int = 0


def make_arguments(call: Call) -> list[Any]:
    """q and k are slices of one projection [B, T, 2, H, 128]; v and do are contiguous."""
    dtype, shape = getattr(torch, call.dtype), (call.batch, call.tokens)
    projection = torch.zeros(*shape, 2, H, 128, dtype=dtype)
    sequences = call.batch if call.offsets is None else len(call.offsets) - 1

    def state(kind, value):
        return None if kind is None else torch.full((sequences, HV, 128, 128), value, dtype=getattr(torch, kind))

    operand = None
    if call.is_kept and call.dtype == "bfloat16":
        slots = call.batch * call.tokens // 64 + sequences
        borders = (slots - 1) // call.range_slots if call.range_slots > 0 else 0
        operand = torch.zeros(slots + (slots + 1535) // 1536 + 11 * borders, HV, 96, 32, dtype=dtype)
    return [
        projection[:, :, 0],
        projection[:, :, 1],
        torch.zeros(*shape, HV, 128, dtype=dtype),
        torch.zeros(*shape, HV, dtype=getattr(torch, call.gate_dtype)),
        torch.zeros(*shape, HV),
        state(call.initial, 2.0),
        None if call.offsets is None else torch.tensor(call.offsets, dtype=getattr(torch, call.offset_dtype)),
        torch.zeros(*shape, HV, 128, dtype=dtype),
        state(call.dfinal, 3.0),
        0.25,
        call.use_l2norm,
        call.state_v_first,
        call.output_dinitial,
        call.segment_chunks,
        operand,
        call.range_slots,
    ]


def run(call: Call):
    """The recorded launches, the addresses of all tensors by name, and the results' shapes and dtypes."""
    arguments = make_arguments(call)
    results = op(OP, *arguments)
    addresses = {name: tensor.data_ptr() for name, tensor in zip(NAMES, arguments, strict=False) if tensor is not None}
    addresses |= {name: tensor.data_ptr() for name, tensor in zip(RESULTS, results, strict=True)}
    addresses |= {} if arguments[OPERAND] is None else {"operand": arguments[OPERAND].data_ptr()}
    return launches(), addresses, [(tuple(tensor.shape), str(tensor.dtype)) for tensor in results]


def run_for_values(call: Call):
    """How many launches, the sum of the gradients of tokens, and the values of dh0."""
    *grads, dinitial = op(OP, *make_arguments(call))
    return len(launches()), sum(grad.abs().sum().item() for grad in grads), dinitial.unique().tolist()


PACKED = Call(offsets=(0, 100, 100, 300), initial="float32", dfinal="float32", use_l2norm=True)
SLOTS = 300 // 64 + 3
PROJECTION_ROW, ROW = 2 * H * 256, 256  # bytes of a token and of a head in q and k's projection


def tile_map(address, dims, strides, box, dtype=BFLOAT16, swizzle=SWIZZLE_128B):
    ones = (1,) * len(dims)
    return TensorMap(address, dtype, dims, strides, box, ones, swizzle, 0, L2_PROMOTION_128B, 0)


def key_rows(address):
    return tile_map(address, (128, 300, H), (PROJECTION_ROW, ROW), (64, 64, 1))


def value_rows(address):
    return tile_map(address, (128, 300, HV), (HV * ROW, ROW), (64, 64, 1))


def states(address):
    """[slots, HV, 2 halves, 64 values, 128 keys]."""
    return tile_map(address, (128, 64, 2, HV, SLOTS), (256, 16384, 32768, HV * 32768), (64, 64, 1, 1, 1))


def errors(address):
    """[slots, HV, 2 halves, 64 tokens, 64 values]."""
    return tile_map(address, (64, 64, 2, HV, SLOTS), (128, 8192, 16384, HV * 16384), (64, 64, 1, 1, 1))


def triangles(address):
    """[slots, HV, 96, 32]."""
    return tile_map(address, (32, 96, HV, SLOTS), (64, 6144, HV * 6144), (32, 96, 1, 1), swizzle=SWIZZLE_64B)


def row_scales(address, vectors):
    """[slots, HV, 9, 64], of which a kernel reads so many at once."""
    return tile_map(address, (64, 9, HV, SLOTS), (256, 2304, HV * 2304), (64, vectors, 1, 1), FLOAT32, SWIZZLE_NONE)


def pair_scales(address):
    """[slots, HV, 3, 64]."""
    return tile_map(address, (64, 3, HV, SLOTS), (256, 768, HV * 768), (64, 3, 1, 1), FLOAT32, SWIZZLE_NONE)


# Sizes that the compiler leaves out of a kernel's arguments when no address depends on them.
DROPPABLE = {"blocks", "chunk_slots", "matrices", "places", "ranges", "row_words", "rows", "segment_slots"}
DROPPABLE |= {"tokens", "words"}


def assert_arguments(launch, expected):
    """Each argument that the kernel takes has its expected value, and none but droppable sizes is missing."""
    assert launch.arguments == {name: expected[name] for name in launch.arguments}
    assert expected.keys() - launch.arguments.keys() <= DROPPABLE


def test_four_kernels_in_order(product_process):
    found, _, _ = product_process.run(run, PACKED)
    names = ("plan", "rows_bf16", "scan_bf16", "gradients_bf16")
    assert [launch.kernel for launch in found] == [f"backward_{name}_kernel" for name in names]
    grids = [3 + 128, SLOTS * H, 3 * HV * 2 * 2, 132]
    assert [launch.grid for launch in found] == [(grid, 1, 1) for grid in grids]
    assert [launch.programmatic for launch in found] == [0, 0, 1, 1]


def test_results_have_the_documented_shapes(product_process):
    _, _, described = product_process.run(run, PACKED)
    assert described == [
        ((1, 300, H, 128), "torch.bfloat16"),
        ((1, 300, H, 128), "torch.bfloat16"),
        ((1, 300, HV, 128), "torch.bfloat16"),
        ((1, 300, HV), "torch.float32"),
        ((1, 300, HV), "torch.float32"),
        ((3, HV, 128, 128), "torch.float32"),
    ]
    _, _, described = product_process.run(run, replace(PACKED, output_dinitial=False))
    assert described[5] == ((0, HV, 128, 128), "torch.float32")


def test_plan_reads_offsets_and_clears_every_gradient(product_process):
    [plan, *_], addresses, _ = product_process.run(run, PACKED)
    expected = {
        "cu_words": addresses["offsets"],
        "chunks": plan.arguments["chunks"],
        "segments": plan.arguments["segments"],
        "dq_words": addresses["dq"],
        "dk_words": addresses["dk"],
        "dv_words": addresses["dv"],
        "dg_words": addresses["dg"],
        "dbeta_words": addresses["dbeta"],
        "cursors": plan.arguments["cursors"],
        "chunk_slots": SLOTS,
        "segment_slots": 3,
        "tokens": 300,
        "key_words": H * 64,
        "value_words": HV * 64,
        "value_heads": HV,
        "words": 8,
        "words_per_entry": 2,
        "dense_length": -1,
        "sequences": 3,
        "segment_chunks": 5,
        "range_slots": SLOTS,
        "ranges": 1,
        "by_length": 1,
    }
    assert_arguments(plan, expected)
    assert len({expected["chunks"], expected["segments"], expected["cursors"], 0}) == 4
    [plan, *_], _, _ = product_process.run(run, replace(PACKED, offset_dtype="int32"))
    assert plan.arguments["words_per_entry"] == 1


def test_plan_of_a_dense_batch_needs_no_offsets(product_process):
    [plan, *_], _, _ = product_process.run(run, Call(batch=5, tokens=70))
    assert (plan.arguments["dense_length"], plan.arguments["sequences"]) == (70, 5)
    assert plan.arguments["cu_words"] == plan.arguments["segments"], "any valid address"
    assert plan.arguments["chunk_slots"] == 350 // 64 + 5


def test_sequences_are_sorted_if_they_are_whole_and_not_too_many(product_process):
    """Each is compared with all others; of a cut sequence the segments stay in their order."""

    def by_length(call):
        found, _, _ = product_process.run(run, call)
        return found[0].arguments["by_length"]

    empty = (0,) * 1024
    assert by_length(replace(PACKED, initial=None, dfinal=None, offsets=(*empty, 300))) == 1
    assert by_length(replace(PACKED, initial=None, dfinal=None, offsets=(0, *empty, 300))) == 0
    assert by_length(replace(PACKED, segment_chunks=1)) == 0


def test_two_blocks_of_the_scan_are_a_cluster(product_process):
    """The halves of a value head, which run the same instructions."""
    found, _, _ = product_process.run(run, replace(PACKED, segment_chunks=1))
    assert [launch.cluster for launch in found] == [(0, 0, 0)] * 2 + [(2, 1, 1)] * 2 + [(0, 0, 0)]
    assert all(launch.grid[0] % 2 == 0 for launch in found if launch.cluster[0])


def test_rows_get_tokens_and_gates(product_process):
    [plan, rows, *_], addresses, _ = product_process.run(run, PACKED)
    names = ("row_scales", "pair_scales", "norms", "bound", "arrivals", "queue")
    own = {name: rows.arguments[name] for name in names}
    strides = {"q_t": 2 * H * 128, "q_h": 128, "k_t": 2 * H * 128, "k_h": 128}
    expected = (
        own
        | strides
        | {
            "q": addresses["q"],
            "k": addresses["k"],
            "g": addresses["g"],
            "beta": addresses["beta"],
            "chunks": plan.arguments["chunks"],
            "chunk_slots": SLOTS,
            "key_heads": H,
            "value_heads": HV,
            "tokens": 300,
            "places": SLOTS * H,
            "scale": 0.25,
            "use_l2norm": 1,
            "writes_bound": 0,
        }
    )
    assert_arguments(rows, expected)
    assert len({*own.values(), plan.arguments["cursors"], 0}) == len(names) + 2


def test_an_operand_that_was_not_kept_is_made_again(product_process):
    found, addresses, _ = product_process.run(run, replace(PACKED, is_kept=False, segment_chunks=1))
    names = ("backward_plan", "factor_kept_bf16", "backward_rows_bf16", *("backward_scan_bf16",) * 2)
    assert [launch.kernel for launch in found] == [f"{name}_kernel" for name in (*names, "backward_gradients_bf16")]
    _, factor, rows, makers, outputs, _ = found
    own = {name: factor.arguments[name] for name in ("operand", "decay", "key_norm", "bound")}
    expected = own | {
        "k_desc": key_rows(addresses["k"]),
        "g": addresses["g"],
        "beta": addresses["beta"],
        "cu_words": addresses["offsets"],
        "ready": own["decay"],
        "o_words": addresses["dv"],
        "chunk_slots": SLOTS,
        "key_heads": H,
        "value_heads": HV,
        "tokens": 300,
        "words": 8,
        "row_words": HV * 64,
        "segment_rows": 0,
        "use_l2norm": 1,
        "words_per_entry": 2,
        "dense_length": -1,
        "sequences": 3,
    }
    assert_arguments(factor, expected)
    assert factor.grid == (SLOTS * H + 128, 1, 1)
    assert len({*own.values(), 0}) == 5
    assert rows.arguments["bound"] == own["bound"]
    assert makers.arguments["solve_desc"] == outputs.arguments["solve_desc"] == triangles(own["operand"])


def test_scan_gets_everything(product_process):
    [plan, rows, scan, gradients], addresses, _ = product_process.run(run, PACKED)
    read = {name: gradients.arguments[f"{name}_desc"].address for name in ("errors", "states", "dstates")}
    expected = {
        "q_desc": key_rows(addresses["q"]),
        "k_desc": key_rows(addresses["k"]),
        "v_desc": value_rows(addresses["v"]),
        "dout_desc": value_rows(addresses["dout"]),
        "dv_desc": value_rows(addresses["dv"]),
        "dv": addresses["dv"],
        "solve_desc": triangles(addresses["operand"]),
        "row_scales_desc": row_scales(rows.arguments["row_scales"], 7),
        "pair_scales_desc": pair_scales(rows.arguments["pair_scales"]),
        "errors_desc": errors(read["errors"]),
        "states_desc": states(read["states"]),
        "dstates_desc": states(read["dstates"]),
        "bound": rows.arguments["bound"],
        "segments": plan.arguments["segments"],
        "segment_states": scan.arguments["segment_states"],
        "transitions": scan.arguments["transitions"],
        "transitions_desc": scan.arguments["transitions_desc"],
        "reach": scan.arguments["reach"],
        "forgets": scan.arguments["forgets"],
        "initial": addresses["initial"],
        "dfinal": addresses["dfinal"],
        "dinitial": addresses["dinitial"],
        "border_state": rows.arguments["row_scales"],  # any valid address
        "gradient_behind": rows.arguments["row_scales"],
        "gradient_before": rows.arguments["row_scales"],
        "arrivals": rows.arguments["arrivals"],
        "queue": rows.arguments["queue"],
        "cursors": plan.arguments["cursors"],
        "chunk_slots": SLOTS,
        "segment_slots": 3,
        "rows": 1,
        "places": SLOTS * H,
        "matrices": 3 * HV,
        "key_heads": H,
        "value_heads": HV,
        "tokens": 300,
        "has_initial": 1,
        "has_dfinal": 1,
        "write_dinitial": 1,
        "state_v_first": 0,
        "segment_chunks": 5,
        "makes_states": 0,
        "has_links": 0,
        "has_cuts": 0,
        "blocks": 3 * HV * 2 * 2,
    }
    assert_arguments(scan, expected)
    assert len({*read.values(), 0}) == 4


def test_states_of_segments_are_made_by_a_launch_of_their_own(product_process):
    found, _, _ = product_process.run(run, replace(PACKED, segment_chunks=1))
    places = 300 // 64 + 3
    names = ("plan", "rows_bf16", "scan_bf16", "scan_bf16", "gradients_bf16")
    assert [launch.kernel for launch in found] == [f"backward_{name}_kernel" for name in names]
    grids = [3 + 128, SLOTS * H, places * HV * 2 * 3, places * HV * 2 * 2, 132]
    assert [launch.grid for launch in found] == [(grid, 1, 1) for grid in grids]
    assert [launch.programmatic for launch in found] == [0, 0, 1, 1, 1]
    plan, rows, makers, outputs, _ = (launch.arguments for launch in found)
    assert (plan["segment_chunks"], makers["segment_chunks"], outputs["segment_chunks"]) == (1, 1, 1)
    assert (rows["writes_bound"], makers["makes_states"], outputs["makes_states"]) == (0, 1, 0)
    assert makers["has_links"] == outputs["has_links"] == 1
    assert (makers["has_cuts"], outputs["has_cuts"]) == (1, 1)
    assert {name for name in makers if makers[name] != outputs[name]} == {"blocks", "makes_states"}


def scans_of(heads, v_heads, tokens):
    """Of each launch of the scan of one sequence: whether it makes states, has links, and cuts the sequence."""
    q, k = (torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16) for _ in range(2))  # never touched: no memory
    v, do = (torch.empty(1, tokens, v_heads, 128, dtype=torch.bfloat16) for _ in range(2))
    gates = [torch.empty(1, tokens, v_heads) for _ in range(2)]
    op(OP, q, k, v, *gates, None, None, do, None, 0.25, False, False, True, 0, None)
    found = [launch.arguments for launch in launches() if launch.kernel == "backward_scan_bf16_kernel"]
    return [(scan["makes_states"], scan["has_links"], scan["segment_chunks"] < tokens // 64) for scan in found]


@pytest.mark.parametrize(
    ("heads", "v_heads", "tokens", "expected"),
    [
        (16, 32, 32768, [(0, 0, False)]),
        (16, 16, 32768, [(0, 0, True)]),
        (2, 4, 32768, [(1, 1, True), (0, 1, True)]),
        (16, 48, 32768, [(0, 0, False)]),
        (16, 64, 8192, [(0, 0, False)]),
    ],
)
def test_what_the_scans_are_cut_into(product_process, heads, v_heads, tokens, expected):
    """Blocks for all SMs as they are, segments that walk on where there are too few, and that link where most SMs would idle."""
    assert product_process.run(scans_of, heads, v_heads, tokens) == expected


IN_TWO = replace(PACKED, range_slots=4)  # of seven slots


def test_scans_and_gradients_take_one_range_after_the_other_from_the_last_on(product_process):
    found, _, _ = product_process.run(run, IN_TWO)
    names = ("plan", "rows_bf16", *("scan_bf16", "gradients_bf16") * 2)
    assert [launch.kernel for launch in found] == [f"backward_{name}_kernel" for name in names]
    plan, rows, *parts = found
    assert (plan.arguments["range_slots"], plan.arguments["ranges"], plan.arguments["segment_slots"]) == (4, 2, 3)
    assert (plan.grid[0], rows.grid[0]) == (2 * 3 + 128, SLOTS * H)
    assert [launch.programmatic for launch in found] == [0, 0, 1, 1, 1, 1]
    assert [launch.grid[0] for launch in parts] == [3 * HV * 2 * 2, 132] * 2
    longer_than_a_range = 4 + 3  # chunks of four slots of three sequences, and one more
    assert {launch.arguments["segment_chunks"] for launch in (plan, parts[0], parts[2])} == {longer_than_a_range}


def test_a_range_gets_its_slots_of_what_all_share_and_writes_to_the_same_place(product_process):
    [plan, rows, *parts], addresses, _ = product_process.run(run, IN_TWO)
    for (scan, gradients), first, slots, index in zip((parts[:2], parts[2:]), (4, 0), (3, 4), (1, 0), strict=True):
        maps = {
            "solve_desc": (addresses["operand"], HV * 96 * 32 * 2),
            "row_scales_desc": (rows.arguments["row_scales"], HV * 9 * 64 * 4),
            "pair_scales_desc": (rows.arguments["pair_scales"], HV * 3 * 64 * 4),
            "norms_desc": (rows.arguments["norms"], H * 2 * 64 * 4),
        }
        for name, (address, row) in maps.items():
            for launch in (scan, gradients):
                if name in launch.arguments:
                    assert launch.arguments[name].address == address + first * row, name
                    assert launch.arguments[name].dims[-1] == slots, name
        assert scan.arguments["bound"] == rows.arguments["bound"] + first * HV * 4
        assert scan.arguments["segments"] == plan.arguments["segments"] + index * 3 * 7 * 4
        assert gradients.arguments["chunks"] == plan.arguments["chunks"] + first * 4 * 4
        assert scan.arguments["arrivals"] == rows.arguments["arrivals"] + first * H * 4
        assert gradients.arguments["places"] == slots * H
        for launch in (scan, gradients):
            assert launch.arguments["queue"] == rows.arguments["queue"] + first * H * 4
            assert launch.arguments["cursors"] == plan.arguments["cursors"] + index * CURSOR_WORDS * 4
        for name in ("errors_desc", "states_desc", "dstates_desc"):
            assert scan.arguments[name] == gradients.arguments[name]
            assert scan.arguments[name].address == parts[0].arguments[name].address
            assert scan.arguments[name].dims[-1] == slots
    apart = {"solve_desc", "row_scales_desc", "pair_scales_desc", "bound", "segments", "errors_desc", "states_desc"}
    apart |= {"dstates_desc", "border_state", "gradient_behind", "gradient_before", "chunk_slots"}
    apart |= {"arrivals", "queue", "cursors"}
    for name in parts[0].arguments.keys() - apart:
        assert parts[0].arguments[name] == parts[2].arguments[name], name


def test_states_at_borders_are_those_of_the_forward_and_gradients_go_on_from_range_to_range(product_process):
    found, addresses, _ = product_process.run(run, replace(PACKED, range_slots=2))
    scans = [launch.arguments for launch in found[2::2]]
    assert len(scans) == 4
    kept = addresses["operand"] + (SLOTS + 1) * HV * 96 * 32 * 2
    assert [scan["border_state"] for scan in scans[:3]] == [kept + border * HV * 128 * 128 * 4 for border in (2, 1, 0)]
    for later, earlier in pairwise(scans):
        assert later["gradient_before"] == earlier["gradient_behind"] != later["gradient_behind"]
    assert 0 not in (scan[name] for scan in scans for name in ("border_state", "gradient_behind", "gradient_before"))


def test_segments_of_ranges_have_places_for_every_sequence(product_process):
    found, _, _ = product_process.run(run, replace(IN_TWO, segment_chunks=1))
    names = ("plan", "rows_bf16", *("scan_bf16", "scan_bf16", "gradients_bf16") * 2)
    assert [launch.kernel for launch in found] == [f"backward_{name}_kernel" for name in names]
    places = (4 + 3 - 1) // 1 + 3
    assert found[0].arguments["segment_slots"] == places
    assert [launch.grid[0] for launch in found[2:]] == [places * HV * 2 * 3, places * HV * 2 * 2, 132] * 2


def test_a_range_of_all_slots_is_the_only_one(product_process):
    found, _, _ = product_process.run(run, replace(PACKED, range_slots=SLOTS))
    assert len(found) == 4 and found[0].arguments["ranges"] == 1


def test_a_negative_range_is_refused(product_process):
    with pytest.raises(RuntimeError, match="range_slots is -1 and must be positive, or 0 for one range"):
        product_process.run(run, replace(PACKED, range_slots=-1))


def test_ranges_without_what_the_forward_keeps_are_refused(product_process):
    with pytest.raises(
        RuntimeError, match="range_slots is 4 and operand is missing, which has the states between ranges"
    ):
        product_process.run(run, replace(IN_TWO, is_kept=False))


def test_a_segment_as_long_as_all_tokens_is_no_cut(product_process):
    found, _, _ = product_process.run(run, replace(PACKED, segment_chunks=5))
    assert len(found) == 4


def test_a_negative_length_of_segments_is_refused(product_process):
    with pytest.raises(RuntimeError, match="segment_chunks is -1 and must be positive, or 0 for a length chosen here"):
        product_process.run(run, replace(PACKED, segment_chunks=-1))


def test_gradients_get_everything(product_process):
    [plan, rows, scan, gradients], addresses, _ = product_process.run(run, PACKED)
    norms = tile_map(
        rows.arguments["norms"], (64, 2, H, SLOTS), (256, 512, H * 512), (64, 2, 1, 1), FLOAT32, SWIZZLE_NONE
    )
    expected = {
        "q_desc": key_rows(addresses["q"]),
        "k_desc": key_rows(addresses["k"]),
        "dout_desc": value_rows(addresses["dout"]),
        "dv_desc": value_rows(addresses["dv"]),
        "errors_desc": scan.arguments["errors_desc"],
        "states_desc": scan.arguments["states_desc"],
        "dstates_desc": scan.arguments["dstates_desc"],
        "row_scales_desc": row_scales(rows.arguments["row_scales"], 4),
        "norms_desc": norms,
        "chunks": plan.arguments["chunks"],
        "queue": rows.arguments["queue"],
        "cursors": plan.arguments["cursors"],
        "dq": addresses["dq"],
        "dk": addresses["dk"],
        "dg": addresses["dg"],
        "dbeta": addresses["dbeta"],
        "chunk_slots": SLOTS,
        "key_heads": H,
        "value_heads": HV,
        "tokens": 300,
        "places": SLOTS * H,
        "scale": 0.25,
        "use_l2norm": 1,
    }
    assert_arguments(gradients, expected)


def test_flags_do_not_stand_for_each_other(product_process):
    flags = ("has_initial", "has_dfinal", "write_dinitial", "state_v_first")
    bare = Call(offsets=PACKED.offsets, output_dinitial=False)
    calls = {
        (0, 0, 0, 0): bare,
        (1, 0, 0, 0): replace(bare, initial="float32"),
        (0, 1, 0, 0): replace(bare, dfinal="float32"),
        (0, 0, 1, 0): replace(bare, output_dinitial=True),
        (0, 0, 0, 1): replace(bare, state_v_first=True),
    }
    for expected, call in calls.items():
        [_, rows, scan, gradients], _, _ = product_process.run(run, call)
        assert tuple(scan.arguments[flag] for flag in flags) == expected
        assert 0 not in (scan.arguments[name] for name in ("initial", "dfinal", "dinitial"))
        assert rows.arguments["use_l2norm"] == gradients.arguments["use_l2norm"] == 0


def test_float16_has_kernels_of_its_own(product_process):
    found, _, described = product_process.run(run, replace(PACKED, dtype="float16"))
    names = [f"backward_{name}_fp16_kernel" for name in ("rows", "scan", "gradients")]
    assert [launch.kernel for launch in found] == ["backward_plan_kernel", "factor_errors_fp16_kernel", *names]
    assert found[3].arguments["solve_desc"].address == found[1].arguments["operand"]
    assert [dtype for _, dtype in described] == ["torch.float16"] * 3 + ["torch.float32"] * 3


def test_bounds_come_with_the_operand_and_in_float16_from_the_rows(product_process):
    [_, rows, makers, outputs, _], addresses, _ = product_process.run(run, replace(PACKED, segment_chunks=1))
    assert rows.arguments["writes_bound"] == 0
    kept = addresses["operand"] + SLOTS * HV * 96 * 32 * 2
    assert {launch.arguments["bound"] for launch in (rows, makers, outputs)} == {kept}
    found, _, _ = product_process.run(run, replace(PACKED, segment_chunks=1, dtype="float16"))
    [rows] = [launch for launch in found if launch.kernel == "backward_rows_fp16_kernel"]
    assert rows.arguments["writes_bound"] == 1


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_states_of_another_dtype_are_copied_to_float32(product_process, kind):
    [_, _, scan, _], addresses, _ = product_process.run(run, replace(PACKED, initial=kind, dfinal=kind))
    assert (scan.arguments["has_initial"], scan.arguments["has_dfinal"]) == (1, 1)
    assert scan.arguments["initial"] not in (0, addresses["initial"])
    assert scan.arguments["dfinal"] not in (0, addresses["dfinal"])


def test_gates_of_another_dtype_are_copied(product_process):
    [_, rows, *_], addresses, _ = product_process.run(run, replace(PACKED, gate_dtype="bfloat16"))
    assert rows.arguments["g"] != addresses["g"]
    assert rows.arguments["beta"] == addresses["beta"]


@pytest.mark.parametrize(
    "call",
    [Call(tokens=0), Call(tokens=0, offsets=(0, 0, 0)), Call(batch=0), Call(tokens=5, offsets=(0,))],
    ids=["no-tokens", "packed-no-tokens", "no-batch", "no-sequences"],
)
@pytest.mark.parametrize("dfinal", [None, "float32", "bfloat16"])
def test_without_chunks_nothing_is_launched_and_states_stay(product_process, call, dfinal):
    launched, total, values = product_process.run(run_for_values, replace(call, dfinal=dfinal))
    has_states = call.batch > 0 and call.offsets != (0,)
    assert (launched, total) == (0, 0.0)
    assert values == ([] if not has_states else [0.0] if dfinal is None else [3.0])


def test_many_sequences_stay_on_the_first_grid_axis(product_process):
    found, _, _ = product_process.run(run, Call(tokens=1, offsets=(0,) * 20_000 + (1,)))
    grids = [20_128, 20_000 * H, 20_000 * HV * 4, 132]
    assert [launch.grid for launch in found] == [(grid, 1, 1) for grid in grids]


def call_with(index, change):
    """A call whose argument `index` went through `change`, a function of this module."""
    arguments = make_arguments(PACKED)
    arguments[index] = globals()[change](arguments[index])
    op(OP, *arguments)


def as_double(tensor):
    return tensor.double()


def with_half_the_dim(tensor):
    return tensor[..., :64]


def with_one_head_more(tensor):
    return torch.cat([tensor, tensor[:, :, :1]], dim=2)


def with_a_token_less(tensor):
    return tensor[:, 1:]


def elsewhere(tensor):
    return place(tensor, 1)


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (0, "as_double", "q is neither bfloat16 nor float16, which the SM90 backward takes"),
        (1, "as_double", "k and q have different dtypes"),
        (2, "with_half_the_dim", "v has head dim 64 and the SM90 kernels take 128"),
        (2, "with_one_head_more", "v has 5 heads and q has 2; the value heads must be a positive multiple"),
        (1, "with_one_head_more", "k.shape[2] is 3 and q gives 2"),
        (3, "with_a_token_less", "g.shape[1] is 299 and v gives 300"),
        (5, "with_a_token_less", "initial_state.shape[1] is 3 and the batch gives 4"),
        (6, "as_double", "cu_seqlens must be int32 or int64"),
        (7, "as_double", "do and q have different dtypes"),
        (7, "with_one_head_more", "do.shape[2] is 5 and v gives 4"),
        (7, "with_a_token_less", "do.shape[1] is 299 and q gives 300"),
        (8, "with_a_token_less", "dht.shape[1] is 3 and the batch gives 4"),
        (OPERAND, "with_a_token_less", "operand.shape[1] is 3 and"),
        (OPERAND, "as_double", "operand"),
        (1, "elsewhere", "k is on device 1 and q is on device 0; move it there."),
        (2, "elsewhere", "v is on device 1 and q is on device 0; move it there."),
        (3, "elsewhere", "g is on device 1 and q is on device 0; move it there."),
        (4, "elsewhere", "beta is on device 1 and q is on device 0; move it there."),
        (5, "elsewhere", "initial_state is on device 1 and q is on device 0; move it there."),
        (6, "elsewhere", "cu_seqlens is on device 1 and q is on device 0; move it there."),
        (7, "elsewhere", "do is on device 1 and q is on device 0; move it there."),
        (8, "elsewhere", "dht is on device 1 and q is on device 0; move it there."),
        (OPERAND, "elsewhere", "operand is on device 1 and q is on device 0; move it there."),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_no_launch(product_process, index, change, words):
    with pytest.raises(RuntimeError) as error:
        product_process.run(call_with, index, change)
    assert words in str(error.value)
    assert product_process.run(launches) == []


def map_of(name, layout):
    """The map of that argument in that layout, and the argument's address, shape and strides for a map."""
    x = {**LOADABLE, **COPIED}[layout](H if name in ("q", "k") else HV)
    arguments = make_arguments(Call(batch=x.shape[0], tokens=x.shape[1]))
    arguments[{"q": 0, "v": 2, "do": 7}[name]] = x
    op(OP, *arguments)
    [launch] = [launch for launch in launches() if launch.kernel == "backward_scan_bf16_kernel"]
    return (
        launch.arguments["dout_desc" if name == "do" else f"{name}_desc"],
        x.data_ptr(),
        tuple(x.shape),
        strides_of_a_map(x),
    )


@pytest.mark.parametrize("name", ("q", "v", "do"))
@pytest.mark.parametrize("layout", [*LOADABLE, *COPIED])
def test_what_tiles_cannot_be_loaded_from_is_copied_and_nothing_else(product_process, name, layout):
    assert_map(layout, *product_process.run(map_of, name, layout))


def strided_bounds():
    bounds = torch.tensor([0, 7, 100, 7, 300, 7])[::2]
    arguments = make_arguments(Call(offsets=(0, 100, 300)))
    arguments[6] = bounds
    op(OP, *arguments)
    return launches()[0].arguments["cu_words"] != bounds.data_ptr()


def test_strided_bounds_are_copied(product_process):
    assert product_process.run(strided_bounds)


def call_with_checked_bounds(wish, call: Call):
    """The message of a call whose environment has that wish, or how many kernels it launched."""
    os.environ["FLASHQLA_CHECK_CU_SEQLENS"] = wish
    try:
        op(OP, *make_arguments(call))
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
    for allowed in range(30):
        torch_fake().fake_fail_allocation(allowed)
        try:
            op(OP, *make_arguments(call))
        except RuntimeError as error:
            messages.append(str(error).splitlines()[0])
        else:
            break
    torch_fake().fake_fail_allocation(-1)  # the process serves other tests
    return messages, torch_fake().fake_open_guards(), torch_fake().fake_live_allocations()


@pytest.mark.parametrize("is_kept", [True, False])
def test_lack_of_memory_at_any_point_is_named_and_leaves_nothing_behind(product_process, is_kept):
    call = replace(PACKED, gate_dtype="bfloat16", is_kept=is_kept)
    messages, guards, live = product_process.run(fail_every_allocation_once, call)
    results = ["dq", "dk", "dv", "dg", "dbeta", "dh0"]
    assert [message.split()[4] for message in messages] == [*results, "workspace", "g"]
    assert guards == 0
    assert live == 6, "the results of the last call, which succeeded"
