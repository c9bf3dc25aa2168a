"""The op of a few tokens' products: which kernel it launches with which values, and what it refuses."""

import pytest
import torch
from fake_gpu import launches, op

WIDTH = 1024


def make(tokens=(2, 1), rows=(40, 17, 4), dtype="bfloat16", width=WIDTH):
    dtype = getattr(torch, dtype)
    return torch.zeros(*tokens, width, dtype=dtype), [torch.zeros(count, width, dtype=dtype) for count in rows]


def run(options):
    x, weights = make(**options)
    results = op("sm90_token_products", x, *weights, *[None] * (4 - len(weights)))
    addresses = {"x": x.data_ptr()} | {f"w{i}": w.data_ptr() for i, w in enumerate(weights)}
    addresses |= {f"y{i}": y.data_ptr() for i, y in enumerate(results[: len(weights)])}
    return launches(), addresses, [(tuple(y.shape), str(y.dtype)) for y in results]


def test_matrices_share_one_launch(product_process):
    [call], addresses, described = product_process.run(run, {})
    assert (call.kernel, call.grid) == ("token_products_shared_4_bf16_kernel", (10 + 5 + 1, 1, 1))
    assert call.block == (128, 1, 1) and call.programmatic
    expected = {f"rows_{i}": rows for i, rows in enumerate((40, 17, 4, 0))}
    expected |= {"tokens": 2, "vectors": WIDTH // 8, "ahead": 0, **addresses}
    assert {name: call.arguments[name] for name in expected} == expected
    assert described == [((2, 1, rows), "torch.bfloat16") for rows in (40, 17, 4, 0)]


def test_one_token_has_a_kernel_of_its_own(product_process):
    [call], _, described = product_process.run(run, {"tokens": (1, 1), "dtype": "float16", "rows": (16,)})
    assert (call.kernel, call.grid) == ("token_products_shared_1_fp16_kernel", (4, 1, 1))
    assert described == [((1, 1, rows), "torch.float16") for rows in (16, 0, 0, 0)]


@pytest.mark.parametrize(("tokens", "name"), [(1, "1_bf16"), (3, "4_bf16")])
def test_many_rows_are_four_a_warp(product_process, tokens, name):
    for rows, kernel, blocks in (((8192,), f"shared_{name}", 2048), ((8000, 193), name, 500 + 13)):
        [call], _, _ = product_process.run(run, {"tokens": (tokens, 1), "rows": rows, "width": 512})
        assert (call.kernel, call.grid) == (f"token_products_{kernel}_kernel", (blocks, 1, 1))


@pytest.mark.parametrize(("rows", "width", "ahead"), [(2048, 4096, 48), (2048, 2048, 32), (24, 512, 8)])
def test_a_matrix_alone_is_ordered_ahead_up_to_twelve_megabytes(product_process, rows, width, ahead):
    [call], _, _ = product_process.run(run, {"rows": (rows,), "width": width})
    assert call.arguments["ahead"] == ahead and rows * ahead * 128 <= 12 << 20
    [call], _, _ = product_process.run(run, {"rows": (rows,), "width": width, "tokens": (1, 1)})
    assert not call.programmatic and "ahead" not in call.arguments


@pytest.mark.parametrize("options", [{"tokens": (0, 1)}, {"rows": (0,)}])
def test_nothing_to_do_is_no_launch(product_process, options):
    found, _, _ = product_process.run(run, options)
    assert found == []


def refused(options, change):
    x, weights = make(**options)
    if change == "another width":
        weights[1] = weights[1][:, :512].contiguous()
    if change == "a view":
        weights[0] = torch.zeros(WIDTH, 40, dtype=x.dtype).T
    if change == "another dtype":
        weights[2] = weights[2].half()
    try:
        op("sm90_token_products", x, *weights, None)
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ({"tokens": (5, 1)}, None, "x has 5 tokens and the SM90 kernel takes up to 4"),
        ({"width": 520}, None, "x has 520 columns and the SM90 kernel takes multiples of 512"),
        ({"dtype": "float32"}, None, "x is neither bfloat16 nor float16"),
        ({}, "another width", "w1 must be [rows, 1024]"),
        ({}, "a view", "w0 is not contiguous"),
        ({}, "another dtype", "w2 and x have different dtypes"),
    ],
)
def test_what_it_refuses(product_process, options, change, words):
    assert words in product_process.run(refused, options, change)
