"""The convolution's ops: which kernels they launch with which values, and what they refuse."""

from dataclasses import dataclass, replace

import pytest
import torch
from fake_gpu import launches, op, place

D = 48


@dataclass(frozen=True)
class Call:
    """A call of the ops, described so that the process with the fakes can make its tensors."""

    batch: int = 2
    tokens: int = 300
    channels: int = D
    width: int = 4
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    bias: bool = True
    packed: bool = False
    initial: bool = False
    final: bool = False
    silu: bool = True
    normed: int = 0
    padding: int = 16  # channels of the projection that x is a part of
    cuts: tuple[int, ...] = ()  # of dy's channels


def make_arguments(call: Call):
    """x, weight, bias, sequence, initial; x is a part of a projection."""
    dtype, weight_dtype = getattr(torch, call.dtype), getattr(torch, call.weight_dtype)
    projection = torch.zeros(call.batch, call.tokens, call.channels + call.padding, dtype=dtype)
    return [
        projection[..., call.padding :],
        torch.zeros(call.channels, call.width, dtype=weight_dtype),
        torch.zeros(call.channels, dtype=weight_dtype) if call.bias else None,
        torch.zeros(call.batch, call.tokens, dtype=torch.int32) if call.packed else None,
        torch.full((call.batch, call.channels, call.width - 1), 3.0, dtype=dtype) if call.initial else None,
    ]


def addresses_of(**tensors):
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}


def describe(results):
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in results]


def run_forward(call: Call):
    x, weight, bias, sequence, initial = make_arguments(call)
    y, final = op("sm90_causal_conv1d_fwd", x, weight, bias, sequence, initial, call.silu, call.final, call.normed)
    names = addresses_of(x=x, weight=weight, bias=bias, sequence=sequence, initial=initial, y=y, final=final)
    return launches(), names, describe((y, final)), final.unique().tolist()


def run_backward(call: Call):
    x, weight, bias, sequence, initial = make_arguments(call)
    dy = torch.zeros(call.batch, call.tokens, call.channels, dtype=x.dtype)
    dfinal = torch.full((call.batch, call.channels, call.width - 1), 5.0, dtype=x.dtype) if call.final else None
    parts = [part.contiguous() for part in dy.tensor_split(call.cuts, dim=-1)] if call.cuts else [dy]
    others = (*parts[1:], None, None)[:2]
    results = op("sm90_causal_conv1d_bwd", x, parts[0], weight, bias, sequence, initial, dfinal, call.silu, *others)
    names = addresses_of(
        x=x,
        **dict(zip(("dy", "dy_k", "dy_v"), parts, strict=False)),
        weight=weight,
        bias=bias,
        sequence=sequence,
        initial=initial,
        dfinal=dfinal,
    )
    names |= addresses_of(**dict(zip(("dx", "dweight", "dbias", "dinitial"), results, strict=True)))
    contents = [tensor.unique().tolist() for tensor in results]
    return launches(), names, describe(results), contents


def run_update(call: Call, slots: int, length: int):
    x, weight, bias, _, _ = make_arguments(call)
    x = x.transpose(1, 2)
    state = torch.zeros(slots, call.channels, length, dtype=x.dtype)
    rows = torch.zeros(call.batch, dtype=torch.int32) if call.packed else None
    y = op("sm90_causal_conv1d_update", x, state, weight, bias, rows, call.silu)
    return launches(), addresses_of(x=x, state=state, weight=weight, bias=bias, rows=rows, y=y), describe([y])


# Sizes that the compiler leaves out of a kernel's arguments when no address depends on them.
DROPPABLE = {
    "bias_count",
    "dinitial_count",
    "dfinal_count",
    "dy_vectors",
    "dx_vectors",
    "partial_vectors",
    "entries",
    "final_count",
    "initial_count",
    "row_count",
    "weight_count",
    "wide_bias_count",
    "wide_weight_count",
    "x_vectors",
    "y_vectors",
}


def assert_arguments(launch, expected):
    """Every argument that the kernel takes has its expected value."""
    known = {name: value for name, value in launch.arguments.items() if name not in DROPPABLE}
    assert known == {name: expected[name] for name in known}


EXACT_TILES, TILES = 2 * 15, 2 * 19  # rows of 300 tokens in tiles of 20, where every token has 4 taps, or 16
FORWARD = {  # threads own 2 channels
    "batch": 2,
    "tokens": 300,
    "vectors": D // 2,
    "x_row": 300 * (D + 16) // 2,
    "x_token": (D + 16) // 2,
    "width": 4,
    "depth": EXACT_TILES,
    "is_wide": 0,
    "has_bias": 1,
    "is_packed": 0,
    "has_initial": 0,
    "writes_final": 0,
    "silu": 1,
    "normed_vectors": 0,
}
# In place of an operand that is not there stands x.
NOTHING = ("bias", "wide_weights", "wide_bias", "sequence", "initial", "final", "dfinal", "dinitial", "dbias")


def forward_expectation(names, **changes):
    expected = dict.fromkeys(NOTHING, names["x"]) | FORWARD
    return expected | {"x": names["x"], "y": names["y"], "weights": names["weight"], "bias": names["bias"]} | changes


def test_the_forward_is_one_launch(product_process):
    [launch], names, described, _ = product_process.run(run_forward, Call())
    assert launch.kernel == "convolution_exact_4_bf16_kernel"
    assert (launch.grid, launch.block, launch.programmatic) == ((1, EXACT_TILES, 1), (128, 1, 1), True)
    assert_arguments(launch, forward_expectation(names))
    assert described == [((2, 300, D), "torch.bfloat16"), ((0, D, 3), "torch.bfloat16")]


def test_the_forward_of_packed_rows_reads_sequences(product_process):
    [launch], names, _, _ = product_process.run(run_forward, Call(packed=True))
    assert launch.kernel == "convolution_general_4_bf16_kernel"
    assert_arguments(launch, forward_expectation(names, sequence=names["sequence"], is_packed=1, depth=TILES))


def test_states_before_and_after_the_forward(product_process):
    [launch], names, described, _ = product_process.run(run_forward, Call(initial=True, final=True))
    states = {"initial": names["initial"], "final": names["final"], "has_initial": 1, "writes_final": 1}
    assert launch.kernel == "convolution_exact_4_bf16_kernel"
    assert_arguments(launch, forward_expectation(names, **states))
    assert described[1] == ((2, D, 3), "torch.bfloat16")


def test_wide_weights_are_handed_over_as_such(product_process):
    [launch], names, _, _ = product_process.run(run_forward, Call(weight_dtype="float32"))
    wide = {"wide_weights": names["weight"], "wide_bias": names["bias"], "weights": names["x"], "bias": names["x"]}
    assert_arguments(launch, forward_expectation(names, is_wide=1, **wide))


def test_flags_of_the_forward_do_not_stand_for_each_other(product_process):
    flags = ("has_bias", "has_initial", "writes_final", "silu")
    plain = Call(bias=False, silu=False)
    calls = {
        (0, 0, 0, 0): plain,
        (1, 0, 0, 0): replace(plain, bias=True),
        (0, 1, 0, 0): replace(plain, initial=True),
        (0, 0, 1, 0): replace(plain, final=True),
        (0, 0, 0, 1): replace(plain, silu=True),
    }
    for expected, call in calls.items():
        [launch], _, _, _ = product_process.run(run_forward, call)
        assert tuple(launch.arguments[flag] for flag in flags) == expected


@pytest.mark.parametrize(
    ("width", "kernel"),
    [
        (1, "general_4"),
        (2, "general_4"),
        (3, "general_4"),
        (4, "exact_4"),
        (5, "general_8"),
        (7, "general_8"),
        (8, "exact_8"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_width_and_dtype_has_its_kernels(product_process, width, kernel, dtype):
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    call = Call(width=width, dtype=dtype, weight_dtype=dtype)
    [launch], _, _, _ = product_process.run(run_forward, call)
    assert launch.kernel == f"convolution_{kernel}_{short}_kernel" and launch.arguments["width"] == width
    found, _, _, _ = product_process.run(run_backward, call)
    assert [launch.kernel for launch in found] == [
        f"convolution_backward_{kernel}_{short}_kernel",
        f"convolution_gradients_{short}_kernel",
    ]
    [launch], _, _ = product_process.run(run_update, call, 2, width)
    assert launch.kernel == f"convolution_update_{4 if width <= 4 else 8}_{short}_kernel"


@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "grid"),
    [
        (1, 16, 8, (1, 1, 1)),
        (8, 4096, 2048, (8, 8 * 205, 1)),
        (1, 20 * 65_536, 8, (1, 65_535, 2)),  # more tiles than a grid has blocks along its second axis
    ],
)
def test_a_block_of_the_forward_is_a_tile_of_128_vectors(product_process, batch, tokens, channels, grid):
    [launch], _, _, _ = product_process.run(run_forward, Call(batch=batch, tokens=tokens, channels=channels, padding=0))
    assert launch.grid == grid


@pytest.mark.parametrize(
    ("packed", "batch", "tokens", "channels", "expected"),
    [
        (False, 8, 4096, 2048, 256),  # 128 tiles of 512 threads are one wave of 67,584, and 136 of 248 tokens are two
        (False, 1, 1024, 2048, 8),  # 128 tiles of 512 threads are one wave
        (True, 8, 4096, 2048, 172),  # 192 tiles are two waves of 50,688
    ],
)
def test_tiles_of_the_backward_follow_the_waves(product_process, packed, batch, tokens, channels, expected):
    call = Call(packed=packed, batch=batch, tokens=tokens, channels=channels, padding=0)
    [launch, _], _, _, _ = product_process.run(run_backward, call)
    assert launch.arguments["tokens_per_thread"] == expected


def run_turned(call: Call):
    x, weight, bias, sequence, initial = make_arguments(call)
    x = torch.zeros(call.batch, call.channels, call.tokens + 5, dtype=x.dtype)[..., 5:].transpose(1, 2)
    y, final = op("sm90_causal_conv1d_fwd", x, weight, bias, sequence, initial, call.silu, call.final, 0)
    return launches(), addresses_of(x=x, weight=weight, bias=bias, sequence=sequence, initial=initial, y=y, final=final)


def test_channels_in_rows_are_turned_by_a_kernel_of_their_own(product_process):
    [launch], names = product_process.run(run_turned, Call(initial=True, final=True))
    assert (launch.kernel, launch.grid) == ("convolution_turned_4_bf16_kernel", (5, 1, 2))
    expected = dict.fromkeys(NOTHING, names["x"]) | {
        name: names[name] for name in ("x", "y", "initial", "final", "bias")
    }
    expected |= {
        "weights": names["weight"],
        "batch": 2,
        "channels": D,
        "tokens": 300,
        "x_b": 305 * D,
        "x_d": 305,
        "width": 4,
        "is_wide": 0,
        "has_bias": 1,
        "is_packed": 0,
        "has_initial": 1,
        "writes_final": 1,
        "silu": 1,
    }
    assert_arguments(launch, expected)
    [launch], names = product_process.run(
        run_turned, Call(width=7, packed=True, dtype="float16", weight_dtype="float16")
    )
    assert launch.kernel == "convolution_turned_8_fp16_kernel"
    assert (launch.arguments["sequence"], launch.arguments["is_packed"]) == (names["sequence"], 1)


def test_heads_are_normalised_by_kernels_of_their_own(product_process):
    call = Call(channels=512, normed=256, padding=0)
    [launch], _, _, _ = product_process.run(run_forward, call)
    assert (launch.kernel, launch.arguments["normed_vectors"]) == ("convolution_normed_exact_4_bf16_kernel", 64)
    assert launch.grid == (1, TILES, 1), "threads own 4 channels, so that a head is a warp"
    [launch], _, _, _ = product_process.run(
        run_forward, replace(call, packed=True, dtype="float16", weight_dtype="float16")
    )
    assert launch.kernel == "convolution_normed_general_4_fp16_kernel"
    for wrong in (replace(call, normed=100), replace(call, channels=200, normed=128), replace(call, width=5)):
        with pytest.raises(RuntimeError, match="the SM90 convolution normalises heads of 128 channels"):
            product_process.run(run_forward, wrong)


BACKWARD_TILE = 4
BACKWARD_TILES = 2 * (300 // BACKWARD_TILE)


def backward_expectation(names, launch, **changes):
    expected = dict.fromkeys(NOTHING, names["x"]) | FORWARD
    expected |= {name: names[name] for name in ("x", "dy", "dx", "bias")}
    expected |= {
        "weights": names["weight"],
        "partial": launch.arguments["partial"],
        "vectors": D // 4,
        "row_vectors": D // 4,
        "x_row": 300 * (D + 16) // 4,
        "x_token": (D + 16) // 4,
        "dy_row": 300 * D // 4,
        "dy_token": D // 4,
        "tokens_per_thread": BACKWARD_TILE,
        "has_dfinal": 0,
    }
    return expected | changes


def test_the_backward_sums_over_tiles_and_then_over_all(product_process):
    [backward, gradients], names, described, _ = product_process.run(run_backward, Call())
    assert backward.kernel == "convolution_backward_exact_4_bf16_kernel"
    assert backward.grid == (-(-BACKWARD_TILES * 12 // 128), 1, 1)
    assert backward.programmatic and gradients.programmatic
    assert_arguments(backward, backward_expectation(names, backward))
    assert (gradients.kernel, gradients.grid) == ("convolution_gradients_bf16_kernel", (2, 5, 1))
    expected = {
        "partial": backward.arguments["partial"],
        "dweight": names["dweight"],
        "dbias": names["dbias"],
        "tiles": BACKWARD_TILES,
        "rows": 5,
        "channels": D,
        "width": 4,
        "has_bias": 1,
    }
    assert_arguments(gradients, expected)
    bf16 = "torch.bfloat16"
    assert described == [((2, 300, D), bf16), ((D, 4), bf16), ((D,), bf16), ((0, D, 3), bf16)]


def test_dy_in_parts_is_a_launch_each_and_one_sum(product_process):
    call = Call(cuts=(8, 32), initial=True, final=True)
    found, names, _, _ = product_process.run(run_backward, call)
    *parts, gradients = found
    first, sizes = 0, (8, 24, 16)
    for launch, name, channels in zip(parts, ("dy", "dy_k", "dy_v"), sizes, strict=True):
        moved = {key: names[key] + 2 * first for key in ("x", "dx", "bias")}
        moved |= {key: names[key] + 2 * 3 * first for key in ("initial", "dfinal", "dinitial")}
        expected = backward_expectation(
            names,
            launch,
            **moved,
            **{"dy": names[name], "weights": names["weight"] + 2 * 4 * first, "vectors": channels // 4},
            **{"dy_row": 300 * channels // 4, "dy_token": channels // 4, "has_initial": 1, "has_dfinal": 1},
            partial=gradients.arguments["partial"] + 4 * first,
        )
        for absent in ("wide_weights", "wide_bias", "sequence"):
            expected[absent] = names["x"]
        assert_arguments(launch, expected)
        assert launch.grid == (-(-BACKWARD_TILES * channels // 4 // 128), 1, 1)
        first += channels


def test_parts_of_dy_cover_every_channel(product_process):
    with pytest.raises(RuntimeError, match="dy has 40 channels in all and x has 48; give a gradient for each of them"):
        product_process.run(run_backward_without_its_last_part)


def run_backward_without_its_last_part():
    x, weight, bias, _, _ = make_arguments(Call())
    dy = torch.zeros(2, 300, 40, dtype=x.dtype)
    op("sm90_causal_conv1d_bwd", x, dy, weight, bias, None, None, None, True, None, None)


def test_without_bias_there_is_no_gradient_of_it(product_process):
    [_, gradients], _, described, _ = product_process.run(run_backward, Call(bias=False))
    assert gradients.grid == (2, 4, 1) and gradients.arguments["has_bias"] == 0
    assert described[2] == ((0,), "torch.bfloat16")


def test_wide_weights_have_wide_gradients(product_process):
    [_, gradients], _, described, _ = product_process.run(run_backward, Call(weight_dtype="float32"))
    assert gradients.kernel == "convolution_gradients_fp32_kernel"
    assert [dtype for _, dtype in described[1:3]] == ["torch.float32", "torch.float32"]


def test_packed_rows_and_states_have_backwards_of_their_own(product_process):
    [packed, _], names, _, _ = product_process.run(run_backward, Call(packed=True))
    assert packed.kernel == "convolution_backward_general_4_bf16_kernel"
    assert_arguments(packed, backward_expectation(names, packed, sequence=names["sequence"], is_packed=1))
    [states, _], names, described, _ = product_process.run(run_backward, Call(initial=True, final=True))
    assert states.kernel == "convolution_backward_states_4_bf16_kernel"
    found = {name: names[name] for name in ("initial", "dfinal", "dinitial")}
    assert_arguments(states, backward_expectation(names, states, **found, has_initial=1, has_dfinal=1))
    assert described[3] == ((2, D, 3), "torch.bfloat16")
    [states, _], names, _, _ = product_process.run(run_backward, Call(final=True))
    assert_arguments(states, backward_expectation(names, states, dfinal=names["dfinal"], has_dfinal=1))


@pytest.mark.parametrize("call", [Call(tokens=0), Call(batch=0), Call(channels=0, padding=8)])
def test_without_tokens_nothing_is_launched_and_states_stay(product_process, call):
    has_states = call.batch * call.channels > 0
    call = replace(call, final=True)
    found, _, _, final = product_process.run(run_forward, call)
    assert (found, final) == ([], [0.0] if has_states else [])
    found, _, _, final = product_process.run(run_forward, replace(call, initial=True))
    assert (found, final) == ([], [3.0] if has_states else [])
    found, _, _, [_, dweight, dbias, dinitial] = product_process.run(run_backward, replace(call, initial=True))
    assert found == [] and (dinitial == [5.0] if has_states else dinitial == [])
    assert dweight == dbias == ([0.0] if call.channels else [])


def test_the_update_takes_strides_and_states_by_row(product_process):
    call = Call(batch=3, tokens=2, packed=True)
    [launch], names, described = product_process.run(run_update, call, 7, 5)
    assert launch.grid == (1, 3, 1)
    expected = {
        **{name: names[name] for name in ("x", "state", "rows", "y", "bias")},
        "weights": names["weight"],
        "wide_weights": names["x"],
        "wide_bias": names["x"],
        "batch": 3,
        "channels": D,
        "count": 2,
        "slots": 7,
        "length": 5,
        **{"x_b": 2 * (D + 16), "x_d": 1, "x_t": D + 16},
        **{"y_b": 2 * D, "y_d": 1, "y_t": D},
        **{"s_n": 5 * D, "s_d": 5, "s_t": 1},
        "width": 4,
        "is_wide": 0,
        "has_bias": 1,
        "has_rows": 1,
        "silu": 1,
    }
    assert_arguments(launch, expected)
    assert described == [((3, 2, D), "torch.bfloat16")]


def call_with(change):
    """A forward whose arguments went through `change`, a function of this module."""
    arguments = [*make_arguments(Call(packed=True)), True, False, 0]
    globals()[change](arguments)
    op("sm90_causal_conv1d_fwd", *arguments)


def with_float32_rows(arguments):
    arguments[0] = arguments[0].float()


def with_odd_channels(arguments):
    arguments[0] = arguments[0][..., 4:]


def with_one_row_for_all(arguments):
    arguments[0] = arguments[0][:1].expand(2, -1, -1)


def with_nine_taps(arguments):
    arguments[1] = arguments[1].repeat(1, 3)[:, :9].contiguous()


def with_a_bias_of_another_dtype(arguments):
    arguments[2] = arguments[2].float()


def with_long_sequences(arguments):
    arguments[3] = arguments[3].long()


def with_a_sequence_too_few(arguments):
    arguments[3] = arguments[3][:1]


def with_a_weight_elsewhere(arguments):
    place(arguments[1], 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("with_float32_rows", "x is neither bfloat16 nor float16, which the SM90 kernels take"),
        ("with_odd_channels", "x has 44 channels and strides (19200, 64, 1); the SM90 convolution needs"),
        ("with_one_row_for_all", "x has 48 channels and strides (0, 64, 1); the SM90 convolution needs"),
        ("with_nine_taps", "weight must be [D, W] with the channels of x and a width from 1 to 8"),
        ("with_a_bias_of_another_dtype", "bias has a dtype that the SM90 convolution does not take there"),
        ("with_long_sequences", "sequence has a dtype that the SM90 convolution does not take there"),
        ("with_a_sequence_too_few", "sequence.shape[0] is 1 and the SM90 convolution takes 2"),
        ("with_a_weight_elsewhere", "weight is on device 1 and x is on device 0; move it there."),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_no_launch(product_process, change, words):
    with pytest.raises(RuntimeError) as error:
        product_process.run(call_with, change)
    assert words in str(error.value)
    assert product_process.run(launches) == []
