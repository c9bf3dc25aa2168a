"""The benchmark that tells whose gradients are nearer to those of float32."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_gradients.py"
NEARER = 1.1  # times the error of transformers' own bfloat16; roundings that differ differ by less here


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("step_gradients", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernel_is_as_near_to_float32_as_transformers(benchmark, monkeypatch, kernel_folder, tmp_path, capsys):
    output = tmp_path / "records" / "steps.jsonl"
    arguments = ["--tokens", "128", "--device", "cpu", "--source", str(kernel_folder), "--output", str(output)]
    wanted = ["--implementation", "flashqla", "--implementation", "plain", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, *wanted])
    assert benchmark.main() == 0
    (line,) = output.read_text().splitlines()
    record = json.loads(line)
    ours, plain = (record["implementations"][name] for name in ("flashqla", "plain"))
    assert 5 < record["loss"] < 6  # ln 256 = 5.55 of weights that know nothing
    assert {name: record[name] for name in ("model", "tokens", "seed")} == {"model": "tiny", "tokens": 128, "seed": 3}
    assert ours["errors"].keys() == plain["errors"].keys() >= {"all parameters", "linear_attn.A_log", "norm.weight"}
    assert 1e-4 < plain["errors"]["all parameters"] < 2e-2 and 0 < plain["signs"] < 2e-2
    assert 1e-4 < ours["errors"]["all parameters"] <= NEARER * plain["errors"]["all parameters"]
    assert f"{ours['errors']['all parameters']:.2e}" in capsys.readouterr().out


def test_distances_are_those_of_their_definition(benchmark):
    exact = {"loss": 2.0, "gradients": {"a.0.w": torch.tensor([3.0, 4.0]), "b": torch.tensor([-12.0, 0.5])}}
    found = {"loss": 1.5, "gradients": {"a.0.w": torch.tensor([3.0, 4.5]), "b": torch.tensor([-12.0, -0.5])}}
    distances = benchmark.distances(found, exact)
    assert distances["loss"] == -0.5 and distances["signs"] == 0.25
    assert distances["errors"] == pytest.approx(
        {"a.w": 0.1, "b": 1 / (144.25**0.5), "all parameters": (1.25 / 169.25) ** 0.5}
    )


def test_kinds_are_parameters_of_any_layer(benchmark):
    assert benchmark.kind_of("model.layers.3.mlp.up_proj.weight") == "mlp.up_proj.weight"
    assert benchmark.kind_of("model.norm.weight") == "norm.weight"
