"""The op of a decoded token of the layer: which kernel it launches with which values, and what it refuses."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_gpu import launches, op

D, TAPS = 128, 4
KERNELS = {"kv_f32_few": (4, 256), "kv_f32": (2, 128)}  # blocks of a head, and threads of a block
MB = 2**20
LOAD_BALANCING = 2  # CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING


@dataclass(frozen=True)
class Call:
    """A call described so that the process with the fakes can make its tensors."""

    batch: int = 5
    heads: tuple[int, int] = (2, 4)
    dtype: str = "bfloat16"
    parameters: str | None = None  # dtype of A_log, dt_bias and the norm's weight, if it is another
    has_bias: bool = True
    conv_silu: bool = True
    norm_silu: bool = False

    @property
    def channels(self) -> int:
        return (2 * self.heads[0] + self.heads[1]) * D


def make_arguments(call: Call) -> list[Any]:
    """qkv, z, a and b are parts of one projection [B, 1, channels + (128 + 2) HV + 6]."""
    dtype, (_, heads) = getattr(torch, call.dtype), call.heads
    sizes = (call.channels, heads * D, heads, heads, 6)
    qkv, z, a, b, _ = torch.zeros(call.batch, 1, sum(sizes), dtype=dtype).split(sizes, dim=2)
    rate, bias, weight = (
        torch.zeros(size, dtype=getattr(torch, call.parameters or call.dtype)) for size in (heads, heads, D)
    )
    offsets = torch.zeros(call.channels, dtype=dtype) if call.has_bias else None
    return [
        *(
            qkv,
            torch.zeros(call.batch, call.channels, TAPS, dtype=dtype),
            torch.zeros(call.channels, TAPS, dtype=dtype),
        ),
        *(offsets, z, a, b, rate, bias, torch.zeros(call.batch, heads, D, D), weight),
        *(call.conv_silu, 0.5, call.norm_silu),
    ]


NAMES = ("x", "history", "weights", "bias", "z", "a", "b", "A_log", "dt_bias", "states", "weight")


def run(call: Call):
    """The recorded launches, the addresses of all tensors by the kernel's names, and what came back in brief."""
    arguments = make_arguments(call)
    y = op("sm90_gated_delta_net_step", *arguments)
    tensors = zip(NAMES, arguments, strict=False)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors if tensor is not None} | {"y": y.data_ptr()}
    return launches(), addresses, (tuple(y.shape), str(y.dtype))


def test_a_step_is_one_launch(product_process):
    call = Call()
    [step], addresses, described = product_process.run(run, call)
    assert (step.kernel, step.grid, step.block) == ("decode_layer_bf16_kv_f32_few_kernel", (16, 5, 1), (256, 1, 1))
    assert step.cluster == (8, 1, 1), "two value heads of four blocks"
    assert step.programmatic, "it may begin while the kernel before it ends"
    width = call.channels + 4 * (D + 2) + 6
    expected = addresses | {f"{name}_n": width for name in "xzab"}
    expected |= {"sequences": 5, "channels": call.channels, "heads": 4, "values": 4 * D}
    expected |= {"rate_words": 2, "bias_words": 2, "weight_words": D // 2}
    expected |= {"scale": pytest.approx(D**-0.5), "eps": 0.5, "ahead": 16, "heads_per_key": 2, "cluster": 8}
    expected |= {"has_bias": 1, "convolution_silu": 1, "is_silu": 0}
    expected |= {"A_log_is_wide": 0, "dt_bias_is_wide": 0, "weight_is_wide": 0}
    assert step.arguments == {name: expected[name] for name in step.arguments}
    assert expected.keys() - step.arguments.keys() <= {
        "values",
        "sequences",
        "rate_words",
        "bias_words",
        "weight_words",
    }
    assert described == ((5, 1, 4 * D), "torch.bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("heads", "batch", "name"),
    [
        ((16, 32), 2, "kv_f32_few"),
        ((16, 32), 3, "kv_f32"),
        ((16, 16), 4, "kv_f32_few"),
        ((2, 8), 1, "kv_f32"),  # a cluster of the form for few heads would have 16 blocks
        ((16, 48), 1, "kv_f32"),
        ((16, 48), 9, "kv_f32"),
        ((1, 1), 1, "kv_f32_few"),
    ],
)
def test_the_blocks_of_a_key_head_are_a_cluster(product_process, dtype, heads, batch, name):
    [step], _, _ = product_process.run(run, Call(batch, heads, dtype, has_bias=False))
    blocks, threads = KERNELS[name]
    assert step.kernel == f"decode_layer_{'bf16' if dtype == 'bfloat16' else 'fp16'}_{name}_kernel"
    assert (step.grid, step.block) == ((heads[1] * blocks, batch, 1), (threads, 1, 1))
    assert step.cluster == (heads[1] // heads[0] * blocks, 1, 1)
    assert step.arguments["cluster"] == step.cluster[0] and step.grid[0] % step.cluster[0] == 0
    bytes_of_sequence = heads[1] * D * D * 4
    ahead = min(6 * MB, max(4 * MB, batch * bytes_of_sequence // 4)) // bytes_of_sequence
    assert step.arguments["ahead"] == max(1, ahead)


@pytest.mark.parametrize(("batch", "policy"), [(15, 0), (16, LOAD_BALANCING)])
def test_blocks_of_a_cluster_may_share_an_sm_where_there_are_many(product_process, batch, policy):
    [step], _, _ = product_process.run(run, Call(batch, (16, 16)))
    assert (step.cluster, step.cluster_policy) == ((2, 1, 1), policy)


def test_flags_do_not_stand_for_each_other(product_process):
    flags = ("has_bias", "convolution_silu", "is_silu", "A_log_is_wide", "dt_bias_is_wide", "weight_is_wide")
    off = {"has_bias": False, "conv_silu": False, "norm_silu": False}
    for change, expected in (
        ({}, (0, 0, 0, 0, 0, 0)),
        ({"has_bias": True}, (1, 0, 0, 0, 0, 0)),
        ({"conv_silu": True}, (0, 1, 0, 0, 0, 0)),
        ({"norm_silu": True}, (0, 0, 1, 0, 0, 0)),
        ({"parameters": "float32"}, (0, 0, 0, 1, 1, 1)),
    ):
        [step], _, _ = product_process.run(run, Call(**off | change))
        assert tuple(step.arguments[flag] for flag in flags) == expected


def test_more_sequences_than_a_grid_takes_are_refused(product_process):
    [step], _, _ = product_process.run(run, Call(65_535, (1, 1)))
    assert step.grid == (2, 65_535, 1)
    with pytest.raises(RuntimeError, match="qkv has 65536 sequences and the SM90 step of the layer takes up to 65535"):
        product_process.run(run, Call(65_536, (1, 1)))
    assert product_process.run(launches) == []


def test_without_a_bias_other_numbers_are_read_and_left_out(product_process):
    [step], addresses, _ = product_process.run(run, Call(has_bias=False))
    assert (step.arguments["bias"], step.arguments["has_bias"]) == (addresses["weights"], 0)


def test_no_sequences_launch_nothing(product_process):
    found, _, described = product_process.run(run, Call(0))
    assert found == [] and described[0] == (0, 1, 4 * D)


def call_with(index, change, heads=(2, 4)):
    arguments = make_arguments(Call(heads=heads))
    arguments[index] = globals()[change](arguments[index])
    op("sm90_gated_delta_net_step", *arguments)


def as_double(tensor):
    return tensor.double()


def with_columns_apart(tensor):
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def with_a_sequence_less(tensor):
    return tensor[1:]


def with_two_tokens(tensor):
    return tensor.repeat_interleave(2, dim=1)


def turned(tensor):
    return tensor.mT


def unchanged(tensor):
    return tensor


def with_three_taps(tensor):
    return tensor[..., :3].contiguous()


@pytest.mark.parametrize(
    ("index", "change", "words"),
    [
        (0, "as_double", "qkv is neither bfloat16 nor float16"),
        (0, "with_two_tokens", "qkv must be [B, 1, 1024], one token of the batch of qkv"),
        (1, "as_double", "conv_state has a dtype that the SM90 step of the layer does not take there"),
        (1, "with_a_sequence_less", "conv_state.shape[0] is 4"),
        (1, "with_columns_apart", "conv_state must be contiguous at an address that is a multiple of 8"),
        (1, "with_three_taps", "conv_state.shape[2] is 3"),
        (2, "with_three_taps", "conv_weight.shape[1] is 3"),
        (3, "as_double", "conv_bias has a dtype"),
        (4, "as_double", "z and qkv have different dtypes"),
        (4, "with_columns_apart", "z has its columns apart"),
        (5, "with_a_sequence_less", "a must be [B, 1, 4]"),
        (6, "with_two_tokens", "b must be [B, 1, 4]"),
        (7, "as_double", "A_log is neither float32 nor of the dtype of qkv"),
        (9, "as_double", "the state has a dtype"),
        (9, "turned", "the state must be contiguous at an address that is a multiple of 16"),
        (10, "as_double", "norm_weight is neither float32 nor of the dtype of qkv"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_no_launch(product_process, index, change, words):
    with pytest.raises(RuntimeError) as error:
        product_process.run(call_with, index, change)
    assert words in str(error.value)
    assert product_process.run(launches) == []


@pytest.mark.parametrize("heads", [(1, 5), (2, 3)])
def test_heads_that_do_not_fit_a_cluster_are_refused(product_process, heads):
    with pytest.raises(RuntimeError, match="value heads, of 128 channels each"):
        product_process.run(call_with, 0, "unchanged", heads)
    assert product_process.run(launches) == []
