"""The ops of the gated norm and of the gates: which kernels they launch with which values, and what they refuse."""

import pytest
import torch
from fake_gpu import launches, op, torch_fake

B, T, H, D = 2, 50, 3, 128
ROWS = B * T * H
ROWS_OF_A_BLOCK = 64
ROWS_OF_A_PART = 24
MAX_PARTS = 528
MANY_ROWS, MAX_PARTS_OF_MANY = 1 << 20, 924


def run(function, options):
    """A function of this module with keyword arguments."""
    return function(**options)


def make_norm(dtype="bfloat16", weight_dtype="bfloat16", rows=None, others=0):
    """x and g as parts of one projection [B, T, H, 2 D], with `others` heads more that are not theirs; with `rows`, both
    contiguous [rows, D]."""
    dtype, weight = getattr(torch, dtype), torch.zeros(D, dtype=getattr(torch, weight_dtype))
    if rows is not None:
        return torch.zeros(rows, D, dtype=dtype), torch.zeros(rows, D, dtype=dtype), weight
    x, g = torch.zeros(B, T, H + others, 2 * D, dtype=dtype)[:, :, :H].split(D, dim=-1)
    return x, g, weight


def run_norm(is_silu=True, **options):
    x, g, weight = make_norm(**options)
    y = op("sm90_rms_norm_gated_fwd", x, g, weight, 0.5, is_silu)
    addresses = {name: tensor.data_ptr() for name, tensor in (("x", x), ("g", g), ("weight", weight), ("y", y))}
    return launches(), addresses, (tuple(y.shape), str(y.dtype), y.is_contiguous())


def run_norm_backward(**options):
    x, g, weight = make_norm(**options)
    dy = torch.zeros(x.shape, dtype=x.dtype)
    results = op("sm90_rms_norm_gated_bwd", dy, x, g, weight, 0.5, False)
    named = zip(("x", "g", "dy", "weight", "dx", "dg", "dweight"), (x, g, dy, weight, *results), strict=True)
    addresses = {name: tensor.data_ptr() for name, tensor in named}
    return launches(), addresses, [(tuple(result.shape), str(result.dtype)) for result in results]


def test_the_norm_reads_parts_of_a_projection_where_they_lie(product_process):
    [norm], addresses, described = product_process.run(run, run_norm, {"others": 1})
    assert (norm.kernel, norm.grid, norm.block) == (
        "norm_bf16_kernel",
        (-(-ROWS // ROWS_OF_A_BLOCK), 1, 1),
        (256, 1, 1),
    )
    assert norm.arguments == {
        "x": addresses["x"],
        "g": addresses["g"],
        "weight": addresses["weight"],
        "wide_weight": addresses["weight"],
        "y": addresses["y"],
        "eps": 0.5,
        "is_wide": 0,
        "is_silu": 1,
        "tokens": B * T,
        "heads": H,
        "x_t": (H + 1) * 2 * D,
        "x_h": 2 * D,
        "g_t": (H + 1) * 2 * D,
        "g_h": 2 * D,
        "rows": ROWS,
    }
    assert addresses["g"] == addresses["x"] + 2 * D
    assert described == ((B, T, H, D), "torch.bfloat16", True)


def test_heads_that_lie_behind_those_of_the_token_before_are_tokens(product_process):
    [norm], _, described = product_process.run(run_norm)
    assert (norm.arguments["tokens"], norm.arguments["heads"], norm.arguments["rows"]) == (ROWS, 1, ROWS)
    assert (norm.arguments["x_t"], norm.arguments["g_t"]) == (2 * D, 2 * D)
    assert described[0] == (B, T, H, D)


def test_rows_without_heads_are_tokens(product_process):
    [norm], _, described = product_process.run(run, run_norm, {"rows": 70})
    assert (norm.arguments["tokens"], norm.arguments["heads"], norm.arguments["x_t"]) == (70, 1, D)
    assert norm.grid == (2, 1, 1) and described[0] == (70, D)


def test_flags_and_dtypes_of_the_norm(product_process):
    [norm], _, _ = product_process.run(run, run_norm, {"is_silu": False, "dtype": "float16", "weight_dtype": "float32"})
    assert norm.kernel == "norm_fp16_kernel"
    assert (norm.arguments["is_wide"], norm.arguments["is_silu"]) == (1, 0)


def test_the_backward_leaves_parts_that_a_second_kernel_adds(product_process):
    [norm, sums], addresses, described = product_process.run(run_norm_backward)
    blocks = -(-ROWS // ROWS_OF_A_PART)
    assert (norm.kernel, norm.grid) == ("norm_backward_few_bf16_kernel", (blocks, 1, 1))
    expected = {name: addresses[name] for name in ("x", "g", "dy", "weight", "dx", "dg")}
    expected |= {"wide_weight": addresses["weight"], "eps": 0.5, "is_wide": 0, "is_silu": 0}
    expected |= {"tokens": B * T, "heads": H, "blocks": blocks, "parts": norm.arguments["parts"]}
    expected |= {f"{name}_t": H * 2 * D for name in "xg"} | {f"{name}_h": 2 * D for name in "xg"}
    expected |= {f"{name}_t": H * D for name in ("dy", "dx", "dg")} | {f"{name}_h": D for name in ("dy", "dx", "dg")}
    assert norm.arguments == expected
    assert (sums.kernel, sums.grid, sums.block) == ("partial_sums_bf16_kernel", (4, 1, 1), (1024, 1, 1))
    assert sums.programmatic and not norm.programmatic
    assert sums.arguments == {
        "parts": norm.arguments["parts"],
        "narrow": addresses["dweight"],
        "wide": addresses["dweight"],
        "is_wide": 0,
        "count": blocks,
        "columns": D,
    }
    shape = ((B, T, H, D), "torch.bfloat16")
    assert described == [shape, shape, ((D,), "torch.bfloat16")]


def test_parts_are_bounded_and_a_wide_weight_gets_a_wide_gradient(product_process):
    [norm, sums], _, described = product_process.run(
        run, run_norm_backward, {"rows": 100_000, "weight_dtype": "float32"}
    )
    assert norm.grid == (MAX_PARTS, 1, 1) and sums.arguments["count"] == MAX_PARTS
    assert sums.arguments["is_wide"] == 1 and described[2] == ((D,), "torch.float32")


def test_the_backward_of_many_rows_is_a_kernel_of_its_own(product_process):
    [norm, sums], _, _ = product_process.run(run, run_norm_backward, {"rows": MANY_ROWS - 1})
    assert (norm.kernel, norm.grid) == ("norm_backward_few_bf16_kernel", (MAX_PARTS, 1, 1))
    [norm, sums], addresses, _ = product_process.run(run, run_norm_backward, {"rows": MANY_ROWS})
    assert (norm.kernel, norm.grid) == ("norm_backward_bf16_kernel", (MAX_PARTS_OF_MANY, 1, 1))
    assert sums.arguments["count"] == MAX_PARTS_OF_MANY
    expected = {name: addresses[name] for name in ("x", "g", "dy", "weight", "dx", "dg")}
    expected |= {"wide_weight": addresses["weight"], "eps": 0.5, "is_wide": 0, "is_silu": 0, "heads": 1}
    expected |= {"tokens": MANY_ROWS, "rows": MANY_ROWS, "blocks": MAX_PARTS_OF_MANY, "parts": sums.arguments["parts"]}
    expected |= {f"{name}_t": D for name in ("x", "g", "dy")}
    assert {name: norm.arguments[name] for name in expected} == expected


def run_norm_of_nothing():
    x, g, weight = make_norm(rows=0)
    y = op("sm90_rms_norm_gated_fwd", x, g, weight, 0.5, True)
    dx, dg, dweight = op("sm90_rms_norm_gated_bwd", x, x, g, weight, 0.5, True)
    return len(launches()), [tuple(z.shape) for z in (y, dx, dg)], dweight.abs().sum().item()


def test_no_rows_launch_nothing(product_process):
    assert product_process.run(run_norm_of_nothing) == (0, [(0, D)] * 3, 0.0)


def make_gates(dtype="bfloat16", parameters="float32", heads=H, tokens=T):
    """a and b as parts of one projection [B, T, 2 HV], A_log and dt_bias."""
    a, b = torch.zeros(B, tokens, 2 * heads, dtype=getattr(torch, dtype)).split(heads, dim=-1)
    return a, b, *(torch.zeros(heads, dtype=getattr(torch, parameters)) for _ in range(2))


def run_gates(without=(), **options):
    """`without` names arguments to leave out."""
    names = ("a", "b", "A_log", "dt_bias")
    given = dict(zip(names, make_gates(**options), strict=True)) | dict.fromkeys(without)
    results = op("sm90_gated_delta_gates_fwd", *(given[name] for name in names), 2.0)
    addresses = {name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None}
    addresses |= {"g": results[0].data_ptr(), "beta": results[1].data_ptr()}
    return launches(), addresses, [(tuple(result.shape), str(result.dtype)) for result in results]


def run_gates_backward(**options):
    arguments = make_gates(**options)
    dg, dbeta = (torch.zeros(arguments[0].shape) for _ in range(2))
    results = op("sm90_gated_delta_gates_bwd", dg, dbeta, *arguments, 2.0)
    names = ("dg", "dbeta", "a", "b", "A_log", "dt_bias", "da", "db", "sums")
    tensors = (dg, dbeta, *arguments, *results)
    addresses = {name: tensor.data_ptr() for name, tensor in zip(names, tensors, strict=True)}
    return launches(), addresses, [(tuple(result.shape), str(result.dtype)) for result in results]


def gate_arguments(addresses, **changes):
    """What both gate kernels are given, for a call of `make_gates`."""
    expected = {name: addresses[name] for name in ("a", "b", "A_log", "dt_bias")}
    expected |= {"wide_A_log": addresses["A_log"], "wide_dt_bias": addresses["dt_bias"], "strength": 2.0}
    expected |= {"A_log_is_wide": 1, "dt_bias_is_wide": 1, "has_dt_bias": 1, "makes_g": 1, "makes_beta": 1}
    expected |= {"tokens": B * T, "heads": H, "a_t": 2 * H, "a_h": 1, "b_t": 2 * H, "b_h": 1}
    return expected | changes


def test_both_gates_in_one_launch(product_process):
    [gates], addresses, described = product_process.run(run_gates)
    tokens_of_a_block = 4 * (256 // H)
    assert (gates.kernel, gates.grid) == ("gates_bf16_kernel", (-(-B * T // tokens_of_a_block), 1, 1))
    assert gates.arguments == gate_arguments(addresses, g=addresses["g"], beta=addresses["beta"])
    assert described == [((B, T, H), "torch.float32")] * 2


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gates_of_other_dtypes_have_kernels_of_their_own(product_process, dtype):
    [gates], _, _ = product_process.run(run, run_gates, {"dtype": dtype, "parameters": dtype})
    assert gates.kernel == f"gates_{'fp16' if dtype == 'float16' else 'fp32'}_kernel"
    assert gates.arguments["A_log_is_wide"] == gates.arguments["dt_bias_is_wide"] == int(dtype == "float32")


def test_many_heads_take_blocks_side_by_side(product_process):
    [gates], _, _ = product_process.run(run, run_gates, {"heads": 600})
    assert gates.grid == (-(-B * T // 4), 3, 1)


def test_what_is_left_out_is_flagged(product_process):
    flags = ("makes_g", "makes_beta", "has_dt_bias")
    for without, expected in (
        (("dt_bias",), (1, 1, 0)),
        (("b",), (1, 0, 1)),
        (("a", "A_log", "dt_bias"), (0, 1, 0)),
    ):
        [gates], _, described = product_process.run(run, run_gates, {"without": without})
        assert tuple(gates.arguments[flag] for flag in flags) == expected
        assert 0 not in (gates.arguments["a"], gates.arguments["b"], gates.arguments["A_log"])
        assert [shape != (0,) for shape, _ in described] == [bool(expected[0]), bool(expected[1])]


def test_gate_gradients_are_two_launches(product_process):
    [gates, sums], addresses, described = product_process.run(run_gates_backward)
    blocks = -(-B * T // (256 // H))
    assert (gates.kernel, gates.grid) == ("gates_backward_bf16_kernel", (blocks, 1, 1))
    named = {name: addresses[name] for name in ("dg", "dbeta", "da", "db")}
    strides = {"dg_t": H, "dg_h": 1, "dbeta_t": H, "dbeta_h": 1}
    assert gates.arguments == gate_arguments(
        addresses, **named, **strides, blocks=blocks, parts=gates.arguments["parts"]
    )
    assert (sums.kernel, sums.programmatic) == ("partial_sums_bf16_kernel", True)
    assert sums.arguments == {
        "parts": gates.arguments["parts"],
        "narrow": addresses["sums"],
        "wide": addresses["sums"],
        "is_wide": 1,
        "count": blocks,
        "columns": 2 * H,
    }
    assert described == [((B, T, H), "torch.bfloat16")] * 2 + [((2, H), "torch.float32")]


def test_no_tokens_launch_nothing(product_process):
    found, _, _ = product_process.run(run, run_gates, {"tokens": 0})
    assert found == []
    found, _, _ = product_process.run(run, run_gates_backward, {"tokens": 0})
    assert found == []


def call_norm_with(index, change):
    arguments = [*make_norm(), 0.5, True]
    arguments[index] = globals()[change](arguments[index])
    op("sm90_rms_norm_gated_fwd", *arguments)


def call_gates_with(index, change):
    arguments = [*make_gates(), 2.0]
    arguments[index] = globals()[change](arguments[index])
    op("sm90_gated_delta_gates_fwd", *arguments)


def as_double(tensor):
    return tensor.double()


def as_half(tensor):
    return tensor.half()


def without_last(tensor):
    return tensor[..., :-1]


def without_a_token(tensor):
    return tensor[:, 1:]


def with_odd_rows(tensor):
    return torch.nn.functional.pad(tensor, (0, 1))[..., :-1]


def with_tokens_first(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def left_out(tensor):
    return None


@pytest.mark.parametrize(
    ("call", "index", "change", "words"),
    [
        ("call_norm_with", 0, "as_double", "x is neither bfloat16 nor float16, which the SM90 kernels take"),
        ("call_norm_with", 0, "without_last", "g and x have different shapes"),
        ("call_norm_with", 1, "as_half", "g and x have different dtypes"),
        ("call_norm_with", 1, "without_a_token", "g and x have different shapes"),
        ("call_norm_with", 1, "with_odd_rows", "g has strides or an address that are no multiples of 16 bytes"),
        ("call_norm_with", 0, "with_tokens_first", "x has a first axis that does not continue the ones behind it"),
        ("call_norm_with", 2, "as_half", "weight is neither float32 nor of the dtype of x"),
        ("call_norm_with", 2, "without_last", "weight must have one axis, of size 128"),
        ("call_gates_with", 0, "as_double", "a and b have different dtypes"),
        ("call_gates_with", 1, "without_last", "b and a have different shapes"),
        ("call_gates_with", 2, "without_last", "A_log must have one axis, of size 3"),
        ("call_gates_with", 2, "left_out", "A_log belongs to a; pass both or neither"),
        ("call_gates_with", 0, "left_out", "A_log belongs to a; pass both or neither"),
        ("call_gates_with", 3, "as_half", "dt_bias is neither float32 nor of the dtype of a"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_no_launch(product_process, call, index, change, words):
    with pytest.raises(RuntimeError) as error:
        product_process.run(globals()[call], index, change)
    assert words in str(error.value)
    assert product_process.run(launches) == []


def fail_every_allocation_once():
    """What was allocated when a call failed, for a first, second, ... allocation that fails, and what is left."""
    names = []
    for allowed in range(20):
        torch_fake().fake_fail_allocation(allowed)
        try:
            run_norm_backward()
        except RuntimeError as error:
            names.append(str(error).split()[4])
        else:
            break
    torch_fake().fake_fail_allocation(-1)  # the process serves other tests
    return names, torch_fake().fake_open_guards(), torch_fake().fake_live_allocations()


def test_lack_of_memory_at_any_point_leaves_nothing_behind(product_process):
    names, guards, live = product_process.run(fail_every_allocation_once)
    assert names == ["x", "g", "dweight", "parts"], "gradients are named after what they belong to"
    assert guards == 0
    assert live == 3, "the results of the last call, which succeeded"
