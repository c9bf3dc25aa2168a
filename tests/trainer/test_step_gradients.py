"""The benchmark that tells whose gradients are nearer to those of float32."""

import json
import sys

import pytest
import torch

from ..benchmark_scripts import load

NEARER = 1.1  # times the error of transformers' own bfloat16; roundings that differ differ by less here


@pytest.fixture
def benchmark(monkeypatch, kernel_folder):
    """The script; `call` runs it on the CPU with further arguments."""
    module = load("step_gradients")

    def call(*arguments: str) -> int:
        options = ["--seq-len", "128", "--device", "cpu", "--source", str(kernel_folder), *arguments]
        monkeypatch.setattr(sys, "argv", ["step_gradients.py", *options])
        return module.main()

    module.call = call
    return module


def test_kernel_is_as_near_to_float32_as_transformers(benchmark, tmp_path, capsys):
    output = tmp_path / "records" / "steps.jsonl"
    wanted = ["--implementation", "flashqla", "--implementation", "plain", "--seed", "3"]
    assert benchmark.call("--output", str(output), *wanted) == 0
    (line,) = output.read_text().splitlines()
    record = json.loads(line)
    ours, plain = (record["implementations"][name] for name in ("flashqla", "plain"))
    assert 5 < record["loss"] < 6  # ln 256 = 5.55 of weights that know nothing
    assert {name: record[name] for name in ("model", "seq_len", "seed")} == {"model": "tiny", "seq_len": 128, "seed": 3}
    assert ours["errors"].keys() == plain["errors"].keys() >= {"all parameters", "linear_attn.A_log", "norm.weight"}
    assert 1e-4 < plain["errors"]["all parameters"] < 2e-2 and 0 < plain["signs"] < 2e-2
    assert 1e-4 < ours["errors"]["all parameters"] <= NEARER * plain["errors"]["all parameters"]
    assert f"{ours['errors']['all parameters']:.2e}" in capsys.readouterr().out


def test_no_figures_of_another_implementation_are_reported(benchmark, tmp_path, capfd):
    output = tmp_path / "steps.jsonl"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert benchmark.call("--output", str(output), "--implementation", "flashqla", "--source", str(empty)) == 1
    assert "the step of flashqla ended with exit code 1" in capfd.readouterr().err
    assert output.read_text() == ""


def test_bad_arguments_get_a_sentence(benchmark, tmp_path, capsys):
    assert benchmark.call("--implementation", "fla") == 1
    assert "error: --implementation is fla, and flash-linear-attention " in capsys.readouterr().err
    assert benchmark.call("--output", str(tmp_path)) == 1
    assert f"error: --output is {tmp_path}, which cannot be written" in capsys.readouterr().err
    for option, value in (("--seq-len", "1"), ("--seed", "-1")):
        with pytest.raises(SystemExit):
            benchmark.call(f"{option}={value}")
        assert f"{option} is {value}; it must be" in capsys.readouterr().err


def test_distances_are_those_of_their_definition(benchmark):
    exact = {"loss": 2.0, "gradients": {"a.0.w": torch.tensor([3.0, 4.0]), "b": torch.tensor([-12.0, 0.5])}}
    found = {"loss": 1.5, "gradients": {"a.0.w": torch.tensor([3.0, 4.5]), "b": torch.tensor([-12.0, -0.5])}}
    distances = benchmark.distances(found, exact, "cpu")
    assert distances["loss"] == -0.5 and distances["signs"] == 0.25
    assert distances["errors"] == pytest.approx(
        {"a.w": 0.1, "b": 1 / (144.25**0.5), "all parameters": (1.25 / 169.25) ** 0.5}
    )


def test_kinds_are_parameters_of_any_layer(benchmark):
    assert benchmark.kind_of("model.layers.3.mlp.up_proj.weight") == "mlp.up_proj.weight"
    assert benchmark.kind_of("model.norm.weight") == "norm.weight"
