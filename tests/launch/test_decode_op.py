"""The decode ops: which kernel they launch with which values, and what they refuse."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fake_gpu import launches, op

H, HV, D = 2, 4, 128
# Blocks of a head and threads of a block.
KERNELS = {"kv_f32_few": (4, 256), "kv_f32": (2, 128), "kv_bf16": (1, 256), "vk_f32": (4, 128), "vk_bf16": (2, 128)}
FEW = 64  # heads of all sequences
MB = 2**20


def sequences_ahead(name, sequences):
    """How many first sequences' states are ordered before their turn."""
    size = HV * D * D * (4 if name.split("_")[1] == "f32" else 2)
    size_ahead = min(6 * MB, max(4 * MB, sequences * size // 4)) if name.startswith("kv_f32") else 16 * MB
    return size_ahead // size


@dataclass(frozen=True)
class Call:
    """A call of one of the ops, described so that the process with the fakes can make its tensors."""

    batch: int = 5
    tokens: int = 1
    offsets: tuple[int, ...] | None = None
    offset_dtype: str = "int64"
    dtype: str = "bfloat16"
    gate_dtype: str = "bfloat16"
    raw: bool = True
    state: str | None = "float32"
    v_first: bool = False
    l2norm: bool = True
    output_final_state: bool = True
    strength: float = 2.0
    indices: tuple[int, ...] | None = None
    index_dtype: str = "int64"
    in_place: bool = False  # without indices


def make_arguments(call: Call) -> list[Any]:
    """q, k and v are parts of one projection [B, T, 2 H + HV, 128], g and beta of one [B, T, 2 HV]."""
    shape = (call.batch, call.tokens)
    projection = torch.zeros(*shape, 2 * H + HV, D, dtype=getattr(torch, call.dtype)).split((H, H, HV), dim=2)
    gates = torch.zeros(*shape, 2 * HV, dtype=getattr(torch, call.gate_dtype)).split(HV, dim=-1)
    parameters = [torch.zeros(HV), torch.zeros(HV, dtype=getattr(torch, call.dtype))] if call.raw else [None, None]
    sequences = call.batch if call.offsets is None else len(call.offsets) - 1
    slots = sequences if call.indices is None else max(9, sequences)
    states = [None]
    if call.state is not None:
        states = [torch.full((slots, HV, D, D), 3.0, dtype=getattr(torch, call.state))]
    if call.indices is not None:
        states.append(torch.tensor(call.indices, dtype=getattr(torch, call.index_dtype)))
    offsets = None if call.offsets is None else torch.tensor(call.offsets, dtype=getattr(torch, call.offset_dtype))
    options = [0.25, call.strength, call.l2norm, call.v_first]
    if call.in_place:
        states.append(None)
    elif call.indices is None:
        options.append(call.output_final_state)
    return [*projection, *gates, *parameters, *states, offsets, *options]


def run(call: Call):
    """The recorded launches, the addresses of all tensors by name, and what came back in brief."""
    arguments = make_arguments(call)
    updates = call.indices is not None or call.in_place
    results = op("sm90_fused_recurrent_update" if updates else "sm90_fused_recurrent_fwd", *arguments)
    results = (results,) if updates else results
    names = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "states"]
    names += ["indices", "offsets"] if updates else ["offsets"]
    addresses = {name: tensor.data_ptr() for name, tensor in zip(names, arguments, strict=False) if tensor is not None}
    addresses |= {name: tensor.data_ptr() for name, tensor in zip(("o", "final"), results, strict=False)}
    return launches(), addresses, [(tuple(result.shape), str(result.dtype)) for result in results]


def expected_arguments(addresses, tokens, sequences, **changes):
    row = (2 * H + HV) * D
    expected = {name: addresses[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "states", "o")}
    expected |= {f"wide_{name}": addresses[name] for name in ("g", "beta", "A_log", "dt_bias")}
    expected |= {f"{name}_t": row for name in "qkv"} | {f"{name}_h": D for name in "qkv"}
    expected |= {"g_t": 2 * HV, "beta_t": 2 * HV, "tokens": tokens, "heads": HV, "slots": sequences}
    expected |= {"scale": 0.25, "strength": 2.0, "sequences": sequences, "dense_length": 1}
    expected |= {"ahead": sequences_ahead("kv_f32", sequences), "heads_per_key": HV // H}
    expected |= {"words_per_entry": 0, "words_per_index": 0}
    expected |= {"g_is_wide": 0, "beta_is_wide": 0, "A_log_is_wide": 1, "dt_bias_is_wide": 0}
    expected |= {"use_l2norm": 1, "use_gate": 1, "use_sigmoid": 1, "has_dt_bias": 1, "has_initial": 1, "write_final": 1}
    return expected | changes


UNREAD = {"cu_words", "indices"}  # any valid address, where there is no such tensor
DROPPABLE = {"words", "index_words"}  # sizes that no address depends on


def assert_arguments(launch, expected):
    found = {name: value for name, value in launch.arguments.items() if name not in UNREAD or name in expected}
    assert found == {name: expected[name] for name in found}
    assert expected.keys() - launch.arguments.keys() <= DROPPABLE
    assert all(launch.arguments[name] for name in UNREAD)


def test_a_step_is_one_launch(product_process):
    [decode], addresses, described = product_process.run(run, Call())
    assert (decode.kernel, decode.grid, decode.block) == ("decode_bf16_kv_f32_few_kernel", (HV * 4, 5, 1), (256, 1, 1))
    assert decode.programmatic, "it may begin while the kernel before it ends"
    assert_arguments(decode, expected_arguments(addresses, 5, 5, new_states=addresses["final"]))
    assert described == [((5, 1, HV, D), "torch.bfloat16"), ((5, HV, D, D), "torch.float32")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("sequences", [FEW // HV, FEW // HV + 1])
def test_every_layout_and_dtype_has_a_kernel_of_its_own(product_process, dtype, v_first, state, sequences):
    indices = tuple(range(sequences))
    call = Call(sequences, dtype=dtype, gate_dtype=dtype, v_first=v_first, state=state, indices=indices)
    [decode], addresses, _ = product_process.run(run, call)
    name = f"{'vk' if v_first else 'kv'}_{'f32' if state == 'float32' else 'bf16'}"
    if name == "kv_f32" and sequences * HV <= FEW:
        name = "kv_f32_few"
    blocks, threads = KERNELS[name]
    assert decode.kernel == f"decode_{'bf16' if dtype == 'bfloat16' else 'fp16'}_{name}_kernel"
    assert (decode.grid, decode.block) == ((HV * blocks, sequences, 1), (threads, 1, 1))
    assert decode.arguments["states"] == decode.arguments["new_states"] == addresses["states"]
    assert decode.arguments["ahead"] == sequences_ahead(name, sequences)


@pytest.mark.parametrize(("sequences", "ahead"), [(5, 16), (80, 20), (100, 24)])
def test_a_quarter_of_the_states_is_ordered_ahead_within_bounds(product_process, sequences, ahead):
    [decode], _, _ = product_process.run(run, Call(sequences))
    assert decode.arguments["ahead"] == ahead


@pytest.mark.parametrize(("index_dtype", "words"), [("int32", 1), ("int64", 2)])
def test_a_pool_is_addressed_by_its_indices(product_process, index_dtype, words):
    call = Call(indices=(3, -1, 0, 8, 2), index_dtype=index_dtype)
    [decode], addresses, described = product_process.run(run, call)
    changes = {"slots": 9, "new_states": addresses["states"], "indices": addresses["indices"], "words_per_index": words}
    assert_arguments(decode, expected_arguments(addresses, 5, 5, index_words=5 * words, **changes))
    assert described == [((5, 1, HV, D), "torch.bfloat16")]


def test_states_without_indices_are_moved_on_where_they_lie(product_process):
    [decode], addresses, described = product_process.run(run, Call(in_place=True))
    assert_arguments(decode, expected_arguments(addresses, 5, 5, new_states=addresses["states"]))
    assert described == [((5, 1, HV, D), "torch.bfloat16")]


@pytest.mark.parametrize(("offset_dtype", "words"), [("int32", 1), ("int64", 2)])
def test_packed_sequences_are_found_on_the_device(product_process, offset_dtype, words):
    call = Call(batch=1, tokens=9, offsets=(0, 3, 3, 8), offset_dtype=offset_dtype)
    [decode], addresses, described = product_process.run(run, call)
    changes = {"cu_words": addresses["offsets"], "words": 4 * words, "words_per_entry": words, "dense_length": -1}
    expected = expected_arguments(addresses, 9, 3, new_states=addresses["final"], **changes)
    assert_arguments(decode, expected)
    assert decode.grid == (HV * 4, 3, 1) and described[1] == ((3, HV, D, D), "torch.float32")


def test_several_tokens_of_a_dense_batch(product_process):
    [decode], _, _ = product_process.run(run, Call(batch=2, tokens=7))
    assert (decode.arguments["dense_length"], decode.arguments["tokens"]) == (7, 14)
    assert decode.arguments["q_t"] == (2 * H + HV) * D


def test_flags_do_not_stand_for_each_other(product_process):
    plain = Call(raw=False, l2norm=False, state=None, output_final_state=False, strength=0.0, gate_dtype="float32")
    flags = ("use_l2norm", "use_gate", "has_dt_bias", "use_sigmoid", "has_initial", "write_final")
    wide = ("g_is_wide", "beta_is_wide", "A_log_is_wide", "dt_bias_is_wide")
    for change, expected in (
        ({}, (0, 0, 0, 0, 0, 0)),
        ({"l2norm": True}, (1, 0, 0, 0, 0, 0)),
        ({"raw": True}, (0, 1, 1, 0, 0, 0)),
        ({"strength": 1.0}, (0, 0, 0, 1, 0, 0)),
        ({"state": "float32"}, (0, 0, 0, 0, 1, 0)),
        ({"output_final_state": True}, (0, 0, 0, 0, 0, 1)),
    ):
        [decode], _, described = product_process.run(run, replace(plain, **change))
        assert tuple(decode.arguments[flag] for flag in flags) == expected
        assert tuple(decode.arguments[flag] for flag in wide[:2]) == (1, 1)
        assert described[1][0][0] == (5 if expected[-1] else 0)


@pytest.mark.parametrize("state", ["bfloat16", "float16"])
def test_initial_states_of_another_dtype_are_copied_to_float32(product_process, state):
    [decode], addresses, described = product_process.run(run, Call(state=state))
    assert decode.kernel == "decode_bf16_kv_f32_few_kernel"
    assert decode.arguments["states"] not in (0, addresses["states"])
    assert described[1][1] == "torch.float32"


def test_sequences_fold_onto_the_third_axis(product_process):
    call = Call(batch=1, tokens=1, offsets=(0,) * 70_000 + (1,), state=None, output_final_state=False)
    [decode], _, _ = product_process.run(run, call)
    assert decode.grid == (HV * 2, 32768, 3) and decode.arguments["sequences"] == 70_000


def test_states_of_sequences_without_tokens_pass_through_the_kernel(product_process):
    [decode], _, described = product_process.run(run, Call(tokens=0))
    assert decode.arguments["dense_length"] == 0 and described[0][0] == (5, 0, HV, D)


def test_no_sequences_launch_nothing(product_process):
    for call in (Call(batch=0), Call(batch=1, tokens=3, offsets=(0,))):
        found, _, _ = product_process.run(run, call)
        assert found == []


def call_with(index, change, call=None):
    arguments = make_arguments(call or Call())
    arguments[index] = globals()[change](arguments[index])
    op("sm90_fused_recurrent_fwd" if call is None else "sm90_fused_recurrent_update", *arguments)


def as_double(tensor):
    return tensor.double()


def with_half_the_dim(tensor):
    return tensor[..., :64]


def with_one_head_more(tensor):
    return torch.cat([tensor, tensor[:, :, :1]], dim=2)


def with_a_sequence_less(tensor):
    return tensor[1:]


def with_columns_apart(tensor):
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def turned(tensor):
    return tensor.mT


POOL = Call(indices=(0, 1, 2, 3, 4))


@pytest.mark.parametrize(
    ("call", "index", "change", "words"),
    [
        (None, 0, "as_double", "q is neither bfloat16 nor float16"),
        (None, 1, "as_double", "q, k and v have different dtypes"),
        (None, 2, "with_half_the_dim", "v must be [..., 128]"),
        (None, 2, "with_one_head_more", "v has 5 heads and q has 2"),
        (None, 1, "with_a_sequence_less", "k and q have different shapes"),
        (None, 2, "with_columns_apart", "v has strides or an address that are no multiples of 16 bytes"),
        (None, 3, "as_double", "g is neither float32 nor of the dtype of v"),
        (None, 4, "with_a_sequence_less", "beta must be [B, T, HV] = [5, 1, 4]"),
        (None, 3, "with_columns_apart", "g.stride(1) is 2"),
        (None, 5, "as_double", "A_log is neither float32 nor of the dtype of q"),
        (None, 7, "with_a_sequence_less", "initial_state must have one state for each of the 5 sequences"),
        (POOL, 7, "as_double", "the state is neither float32 nor bfloat16"),
        (POOL, 7, "turned", "the state must be [N, 4, 128, 128] and contiguous"),
        (POOL, 8, "as_double", "state_indices must be int32 or int64"),
        (POOL, 8, "with_a_sequence_less", "state_indices must have one axis with an entry for every sequence"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_no_launch(product_process, call, index, change, words):
    with pytest.raises(RuntimeError) as error:
        product_process.run(call_with, index, change, call)
    assert words in str(error.value)
    assert product_process.run(launches) == []
