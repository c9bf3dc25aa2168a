"""The benchmark beside transformers: right results first, then times, then a record. Speed itself is not tested here."""

import json
import sys

import pytest

from ..benchmark_scripts import load

pytest.importorskip("transformers.models.qwen3_5", reason="compares with transformers' Qwen3.5")

SMALL = ["--tokens", "70", "--heads", "1", "--value-heads", "2", "--dim", "16", "--threads", "1", "--rounds", "2"]


@pytest.fixture
def benchmark(monkeypatch, kernel_folder):
    module = load("compare_torch")

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["compare_torch.py", *SMALL, "--source", str(kernel_folder), *arguments])
        return module.main()

    module.run = run
    return module


def test_both_implementations_are_right_and_timed(benchmark, capsys, tmp_path):
    benchmark.run("--output", str(tmp_path))
    printed = capsys.readouterr().out
    assert "forward+backward" in printed and "is wrong" not in printed
    (path,) = tmp_path.glob("*.jsonl")
    record = json.loads(path.read_text())
    assert record["shape"] == {"B": 1, "T": 70, "H": 1, "HV": 2, "K": 16, "V": 16}
    assert all(record["gate"][name]["o"] <= 2e-5 for name in ("flashqla", "transformers"))
    for case in ("forward", "forward+backward"):
        for name in ("flashqla", "transformers"):
            row = record["ms"][case][name]
            assert row["n"] == 2 and 0 < row["p20"] <= row["p50"] <= row["p80"]
    assert {"device", "threads", "versions", "commit", "dirty", "kernel"} <= record.keys()


def test_records_are_appended(benchmark, tmp_path):
    for _ in range(2):
        benchmark.run("--output", str(tmp_path))
    (path,) = tmp_path.glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 2


def test_a_wrong_result_is_never_timed(benchmark, capsys, monkeypatch, tmp_path):
    right = benchmark.flashqla_of
    monkeypatch.setattr(benchmark, "flashqla_of", lambda kernel: lambda *inputs: 1.0001 * right(kernel)(*inputs))
    monkeypatch.setattr(benchmark, "measure", lambda *arguments: pytest.fail("a wrong result was timed"))
    assert benchmark.run("--output", str(tmp_path)) == 1
    assert "flashqla is wrong; nothing was timed." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", range(6), ids=["o", "dq", "dk", "dv", "dg", "dbeta"])
def test_a_result_that_is_not_a_number_is_wrong(benchmark, monkeypatch, place):
    right = benchmark.gradients

    def spoilt(*arguments):
        results = list(right(*arguments))
        results[place] = results[place] * float("nan")
        return tuple(results)

    monkeypatch.setattr(benchmark, "gradients", spoilt)
    monkeypatch.setattr(benchmark, "measure", lambda *arguments: pytest.fail("it was timed"))
    assert benchmark.run() == 1


@pytest.mark.parametrize(("ours", "code"), [(1.0, 0), (3.0, 1)])
def test_a_slower_kernel_fails_the_run(benchmark, capsys, monkeypatch, ours, code):
    rows = {"flashqla": [ours] * 2, "transformers": [2.0] * 2}
    monkeypatch.setattr(benchmark, "measure", lambda *arguments: {"forward": rows})
    assert benchmark.run("--no-record") == code
    assert ("flashqla is slower in forward." in capsys.readouterr().out) == bool(code)
