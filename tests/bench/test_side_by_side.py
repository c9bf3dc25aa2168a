"""What the benchmarks of layers and models do with their processes: limits, reasons, lines that are written at once."""

import json
import subprocess
import sys
import time

import pytest
import torch
import typer
from rich.console import Console

from flashqla_hub.bench import side_by_side as bench
from flashqla_hub.bench.record import FIELDS, read
from flashqla_hub.called import functions_behind, watched

ROWS = ("a:forward", "b:forward", "c:forward")

# A process of an implementation: what it prints for each row is what the row's name says.
STAND_IN = """
import json, os, sys, time
implementation, rows, share = sys.argv[1:4]
for row in rows.split(","):
    shape, _, operation = row.partition(":")
    with open({log!r}, "a") as log:
        log.write(f"{{implementation}} {{row}} {{share}} {{os.environ['FLA_FLASH_QLA']}}\\n")
    if share:
        continue
    if shape == "dies":
        raise SystemExit(3)
    if shape == "never-warm":
        time.sleep(60)
    print("a library says something")
    if shape == "slow-to-warm":
        time.sleep(1.5)
    print(json.dumps({{"warm": row}}), flush=True)
    if shape == "slow":
        time.sleep(60)
    time.sleep(0.2)
    print(json.dumps({{"op": f"layer-{{operation}}", "layer": shape, "impl": implementation, "ms": 1.5}}), flush=True)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Records of stand-ins of an implementation on some rows."""
    log = tmp_path / "log.txt"
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.format(log=str(log)))
    monkeypatch.setattr(
        bench.Work, "command", lambda self, name, rows, share="": [sys.executable, script, name, ",".join(rows), share]
    )

    def start(*rows, name="fla+flashqla", **limits):
        work = bench.Work("layer", rows, (), {})
        return bench.records_of(work, name, bench.Limits(**limits))

    start.log = log
    return start


def test_rows_are_measured_in_their_order(run):
    records = list(run(*ROWS))
    assert [record["layer"] for record in records] == ["a", "b", "c"] and all(record["ms"] == 1.5 for record in records)
    assert run.log.read_text().splitlines() == [f"fla+flashqla {row}  1" for row in ROWS]


def test_row_is_there_before_the_next_is_begun(run):
    records = run("a:forward", "slow:forward")
    began = time.monotonic()
    assert next(records)["ms"] == 1.5 and time.monotonic() - began < 20
    records.close()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("dies", "the process ended with code 3"),
        ("never-warm", "not warm within 2 s"),
        ("slow", "not measured within 1 s"),
    ],
)
def test_lost_row_leaves_a_reason_and_the_rows_behind_it(run, row, reason):
    records = list(run("a:forward", f"{row}:forward", "b:forward", warm=2, row=1))
    assert [record.get("ms") for record in records] == [1.5, None, 1.5]
    assert records[1] == {"op": "layer-forward", "layer": row, "impl": "fla+flashqla", "skipped": reason}


def test_getting_warm_is_not_measuring(run):
    (record,) = run("slow-to-warm:forward", row=1, total=1)
    assert record["ms"] == 1.5


def test_rows_beyond_the_time_of_an_implementation_are_named(run):
    records = list(run("slow:forward", "b:forward", "c:forward", total=1))
    assert records[0]["skipped"] == "not measured within 1 s"
    assert {record["skipped"] for record in records[1:]} == {"the 1 s of this implementation were over"}


def test_comparison_writes_ours_first_and_every_row_at_once(run, tmp_path, monkeypatch):
    """The file as it is while a row is measured holds the rows before it."""
    path, seen = tmp_path / "record.jsonl", []
    append = bench.append

    def noting(path, records):
        seen.append(len(read([path])) if path.exists() else 0)
        append(path, records)

    monkeypatch.setattr(bench, "append", noting)
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda _: range(4))
    work = bench.Work("layer", ("a:forward", "b:decode"), (), {})
    bench.compare(work, ["fla", "flashqla"], bench.Limits(), False, {"run": "r"}, path)
    assert [(record["impl"], record["layer"]) for record in read([path])] == [
        ("flashqla", "a"),
        ("flashqla", "b"),
        ("fla", "a"),
        ("fla", "b"),
    ]
    assert seen == [0, 1, 2, 3]
    compiling = {line for line in run.log.read_text().splitlines() if "/" in line}
    assert compiling == {f"fla {row} {share}/2 0" for row in work.rows for share in range(2)}


def test_lost_row_of_ours_is_a_failure_and_one_of_a_peer_is_not(run, tmp_path):
    work = bench.Work("layer", ("dies:forward",), (), {})
    bench.compare(work, ["fla"], bench.Limits(), True, {}, tmp_path / "peer.jsonl")
    with pytest.raises(typer.Exit):
        bench.compare(work, ["flashqla"], bench.Limits(), True, {}, tmp_path / "ours.jsonl")


def test_who_has_not_compiled_everything_in_time_is_named_once(capsys):
    def start(seconds):
        return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])

    started = [("fla+flashqla", start(60)), ("fla", start(0)), ("fla+flashqla", start(60))]
    started[1][1].wait()
    bench.finish(started, 1, "before its rows; raise --warm-seconds")
    said = "fla+flashqla had not compiled everything after 1 s, and compiles the rest before its rows; raise --warm-seconds."
    assert capsys.readouterr().out.splitlines() == [said]
    assert all(process.poll() is not None for _, process in started)


def test_process_of_an_implementation_says_when_a_row_is_warm(capsys):
    def measure(shape, operation, warm):
        if shape == "bad":
            raise ValueError("no such luck\nand more")
        warm()
        return {"ms": 2.0}

    def common(shape, operation):
        return {"op": f"layer-{operation}", "layer": shape}

    bench.run_rows("a:forward,bad:decode", "", common, measure)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"warm": "a:forward"},
        {"op": "layer-forward", "layer": "a", "ms": 2.0},
        {"op": "layer-decode", "layer": "bad", "skipped": "ValueError: no such luck"},
    ]
    bench.run_rows("a:forward", "0/2", common, measure)
    assert capsys.readouterr().out == ""


def test_table_shows_figures_and_reasons():
    done = {
        "op": "layer-forward",
        "layer": "2b",
        "impl": "flashqla",
        "ms": 3.5,
        "matrix_ms": 2.0,
        "rest_ms": 1.5,
        "served": "all of it",
        "functions": "some.function",
    }
    failed = {"op": "layer", "layer": "27b", "impl": "transformers", "skipped": "the process ended with code 1"}
    assert set(done) | set(failed) <= set(FIELDS)
    console = Console(width=200, record=True)
    console.print(bench.as_table([done, failed]))
    text = console.export_text()
    assert "1.5000" in text and "all of it" in text and "the process ended with code 1" in text


def test_functions_of_a_call_and_of_its_backward_are_found():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    def rms_norm_gated(x):
        return Doubled.apply(x).sum()

    rms_norm_gated.__code__ = rms_norm_gated.__code__.replace(co_qualname="rms_norm_gated")
    output, functions = watched(lambda: rms_norm_gated(torch.ones(2, requires_grad=True)))
    assert functions == [f"{__name__}.rms_norm_gated"]
    (behind,) = functions_behind(output)
    assert behind.startswith(__name__) and behind.endswith("Doubled")
    assert functions_behind(torch.ones(1)) == []
