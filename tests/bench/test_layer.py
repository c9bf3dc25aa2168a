"""What the benchmark of the whole layer does without a GPU: its layer, its products, its table, its refusals."""

import pytest
import torch
from typer.testing import CliRunner

import flashqla_hub
from flashqla_hub.__main__ import build_app
from flashqla_hub.bench import layer as bench

SMALL = bench.Shape(hidden=64, hk=1, hv=2)


@pytest.fixture
def layer():
    return bench.make_layer(SMALL, "cpu", torch.float32)[0]


def test_layer_is_one_that_the_kernel_serves_whole(layer, kernel_folder):
    model = flashqla_hub.kernelize(torch.nn.Sequential(layer), source=kernel_folder)
    try:
        assert flashqla_hub.report(model).served_whole("0")
    finally:
        flashqla_hub.unregister()


def test_yardstick_is_the_layer_of_transformers():
    layer, _ = bench.make_layer(SMALL, "cpu", torch.float64)
    x = torch.randn(2, 9, SMALL.hidden, dtype=torch.float64)
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 2)
        layer.dt_bias.uniform_(-1, 1)
        expected = layer(x)
        assert (bench.exact(layer, x) - expected).norm() < 1e-5 * expected.norm()


def test_step_of_the_products_reaches_every_projection_and_nothing_else(layer):
    x = torch.randn(1, 8, SMALL.hidden, requires_grad=True)
    bench.training_step(bench.products(layer), x, layer)()
    reached = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert reached == {f"{name}.weight" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")}
    assert x.grad is not None


def test_step_of_the_layer_reaches_every_parameter(layer):
    x = torch.randn(1, 8, SMALL.hidden, requires_grad=True)
    bench.training_step(layer, x, layer)()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_peer_that_is_not_installed_is_named(layer, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="FLA and FlashQLA is not installed"):
        bench.serve(layer, "fla+flashqla", None)
    assert bench.serve(layer, "transformers", None) == "transformers"


@pytest.fixture
def on_cpu(monkeypatch):
    """`measure` of a small layer on the CPU, with its clock left out."""
    make_layer = bench.make_layer
    monkeypatch.setattr(bench, "make_layer", lambda *_: make_layer(SMALL, "cpu", torch.float32))
    monkeypatch.setattr(bench, "HEAD_DIM", 32)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def times(step, *_):
        step.run() if isinstance(step, bench.Step) else step()
        return {"ms": 1.0}

    monkeypatch.setattr(bench, "figures_of", times)
    monkeypatch.setattr(bench, "measure_decode", times)


@pytest.mark.parametrize("operation", bench.OPERATIONS)
def test_row_names_the_functions_that_served_it(on_cpu, kernel_folder, operation):
    said = []
    rule = "recurrent" if operation == "decode" else "chunk"
    convolution = "causal_conv1d_update" if operation == "decode" else "causal_conv1d_fn"
    figures = bench.measure(SMALL, "transformers", operation, 400, 2, None, lambda: said.append("warm"))
    assert figures["error"] < 1e-4 and figures["ms"] == 1 and said == ["warm"]
    assert [name.rpartition(".")[2] for name in figures["functions"].split(", ")] == [
        convolution,
        f"torch_{rule}_gated_delta_rule",
        "forward",
    ]
    try:
        ours = bench.measure(SMALL, "flashqla", operation, 400, 2, kernel_folder, lambda: None)
    finally:
        flashqla_hub.unregister()
    assert "chunk_gated_delta_rule" in ours["functions"] or "fused_recurrent" in ours["functions"]
    assert "transformers" not in ours["functions"], ours["functions"]


def test_row_of_another_library_than_it_says_has_no_time(on_cpu, monkeypatch):
    """FLA keeps the recurrence to itself if FlashQLA refuses the call."""
    said = []
    monkeypatch.setattr(bench, "serve", lambda *_: "transformers, FLA, FlashQLA")
    with pytest.raises(RuntimeError, match="FLA did not hand over to FlashQLA; what ran is transformers"):
        bench.measure(SMALL, "fla+flashqla", "forward", 400, 1, None, lambda: said.append("warm"))
    assert not said


def test_wrong_row_has_no_time(on_cpu, monkeypatch):
    exact = bench.exact
    monkeypatch.setattr(bench, "exact", lambda *given: 1.1 * exact(*given))
    figures = bench.measure(SMALL, "transformers", "forward", 400, 1, None, lambda: None)
    assert "ms" not in figures and "wrong: relative error" in figures["skipped"]


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--shape", "3b"), "--shape is"), (("--impl", "fa"), "--impl is"), (("--operation", "x"), "--operation is")],
)
def test_unknown_names_are_refused(options, words):
    result = CliRunner().invoke(build_app("bench-layer"), ["bench-layer", *options])
    assert result.exit_code == 2 and words in result.output
