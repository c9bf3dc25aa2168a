"""What the benchmark of the whole layer does without a GPU: its layer, its products, its table, its refusals."""

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import flashqla_hub
from flashqla_hub.__main__ import build_app
from flashqla_hub.bench import layer as bench
from flashqla_hub.bench.record import FIELDS

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


def test_table_shows_figures_and_reasons():
    done = {
        "op": "layer-forward",
        "layer": "2b",
        "impl": "flashqla",
        "ms": 3.5,
        "matrix_ms": 2.0,
        "rest_ms": 1.5,
        "served": "all of it",
    }
    failed = {"op": "layer", "layer": "27b", "impl": "transformers", "skipped": "the process ended with code 1"}
    assert set(done) | set(failed) <= set(FIELDS)
    console = Console(width=200, record=True)
    console.print(bench.as_table([done, failed]))
    text = console.export_text()
    assert "1.5000" in text and "all of it" in text and "the process ended with code 1" in text


def test_process_that_ends_early_leaves_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    (record,) = bench.run_implementation("layer", "flashqla", ("2b",), ["forward", "64", "1", str(tmp_path)], {})
    assert record["layer"] == "2b" and record["skipped"] == "the process ended with code 1"


def test_peer_that_is_not_installed_is_named(layer, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="FLA and FlashQLA is not installed"):
        bench.serve(layer, "fla+flashqla", None)
    assert bench.serve(layer, "transformers", None) == "transformers"


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--shape", "3b"), "--shape is"), (("--impl", "fa"), "--impl is"), (("--operation", "x"), "--operation is")],
)
def test_unknown_names_are_refused(options, words):
    result = CliRunner().invoke(build_app("bench-layer"), ["bench-layer", *options])
    assert result.exit_code == 2 and words in result.output
