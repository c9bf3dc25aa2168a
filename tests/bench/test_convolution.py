"""What the benchmark of the convolution does without a GPU: its shapes, its table, its refusals."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flashqla_hub.__main__ import build_app
from flashqla_hub.bench import convolution as bench
from flashqla_hub.bench.record import FIELDS


def test_default_shapes_are_those_of_the_bars():
    shapes = [bench.Shape.parse(text) for text in bench.SHAPES]
    assert shapes[0] == bench.Shape(8, 4096, 2048)
    assert {(shape.tokens, shape.channels) for shape in shapes[1:]} == {
        (tokens, channels) for tokens in (1024, 8192, 65536) for channels in (2048, 6144, 8192, 10240, 12288)
    }


def test_table_shows_times_rates_and_reasons():
    done = {
        "op": "conv-forward",
        "impl": "flashqla",
        "seqs": "8x4096",
        "layer": "D2048 W4",
        "ms": 0.075,
        "io_mb": 268.4,
    }
    failed = {
        "op": "conv-backward",
        "impl": "fla",
        "seqs": "8x4096",
        "layer": "D2048 W4",
        "io_mb": 1.0,
        "skipped": "absent",
    }
    assert set(done) | set(failed) <= set(FIELDS)
    console = Console(width=160, record=True)
    console.print(bench.as_table([done, failed]))
    text = console.export_text()
    assert "75.0" in text and "3.58" in text and "absent" in text


@pytest.mark.parametrize("shape", ["8x4096", "8x0x4", "axbxc"])
def test_unknown_shapes_are_refused(shape):
    result = CliRunner().invoke(build_app("bench-conv"), ["bench-conv", shape])
    assert result.exit_code == 2 and "it must be BATCHxTOKENSxCHANNELS" in result.output


def test_rows_of_some_channels_begin_with_the_longest():
    shapes = [bench.Shape.parse(text) for text in bench.SHAPES]
    chosen = bench.choose(shapes, [6144, 2048])
    assert [str(shape) for shape in chosen] == [
        *("1x65536x2048", "8x4096x2048", "1x8192x2048", "1x1024x2048"),
        *("1x65536x6144", "1x8192x6144", "1x1024x6144"),
    ]
    assert sorted(map(str, bench.choose(shapes, None))) == sorted(bench.SHAPES)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--channels", "100"), "--channels is 100, and no shape has so many; there are 2048, 6144, 8192"),
        (("--impl", "cudnn"), "--impl is 'cudnn'; it must be one of flashqla, fla, fla-gluon, causal-conv1d"),
    ],
)
def test_options_without_a_row_are_refused(option, words):
    result = CliRunner().invoke(build_app("bench-conv"), ["bench-conv", *option])
    assert result.exit_code == 2 and words in " ".join(result.output.split())


STAND_IN = """
import sys, time
for line in sys.stdin:
    shape = line.strip()
    if shape.startswith("3x"):
        sys.exit(7)
    print('{"op": "conv-forward", "impl": "fla", "seqs": "%s", "ms": 1.0}' % shape, flush=True)
    if shape.startswith("2x"):
        time.sleep(60)
    print('{"op": "conv-backward", "impl": "fla", "seqs": "%s", "ms": 2.0}' % shape, flush=True)
"""


@pytest.fixture
def stand_in(monkeypatch):
    """A worker whose process is a script: rows of batch 2 never end, and those of batch 3 are the end of it."""
    started = []

    def start(name, task, source, folders):
        command = [sys.executable, "-c", STAND_IN]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    monkeypatch.setattr(bench, "start_process", start)
    worker = bench.Worker("fla", bench.command.ROOT, ())
    worker.started = started
    yield worker
    worker.stop()


def test_rows_share_a_process(stand_in):
    for batch in (1, 4):
        records = stand_in.measure(bench.Shape(batch, 8, 8), 20)
        assert [record["ms"] for record in records] == [1.0, 2.0]
    assert len(stand_in.started) == 1


def test_a_row_beyond_its_time_keeps_what_it_has_and_the_next_one_has_its_turn(stand_in):
    forward, backward = stand_in.measure(bench.Shape(2, 8, 8), 3)
    assert forward["ms"] == 1.0
    assert backward["skipped"] == "not done within 3 s" and backward["op"] == "conv-backward"
    assert [record["ms"] for record in stand_in.measure(bench.Shape(1, 8, 8), 20)] == [1.0, 2.0]
    assert [process.poll() is None for process in stand_in.started] == [False, True]


def test_a_process_that_ends_is_a_row_with_that_reason(stand_in):
    records = stand_in.measure(bench.Shape(3, 8, 8), 20)
    assert [record["skipped"] for record in records] == ["the process ended with code 7"] * 2
    assert all(set(record) <= set(FIELDS) for record in records)
    assert [record["ms"] for record in stand_in.measure(bench.Shape(1, 8, 8), 20)] == [1.0, 2.0]


def test_bytes_of_a_row():
    forward, backward = (bench.about(bench.Shape(8, 4096, 2048), op) for op in bench.OPERATIONS)
    assert (forward["io_mb"], backward["io_mb"]) == (2 * 134.217728, 3 * 134.217728)


def test_each_form_of_fla_is_asked_for_by_its_variable(monkeypatch):
    environments = {}
    monkeypatch.setattr(bench.subprocess, "Popen", lambda words, env, **_: environments.update({words[3]: env}))
    for name in bench.IMPLEMENTATIONS:
        bench.start_process(name, "measure", bench.command.ROOT, ())
    assert environments["fla"]["FLA_CONV_GLUON"] == "0" and environments["fla-gluon"]["FLA_CONV_GLUON"] == "1"


def test_a_peer_that_is_not_installed_is_named_by_its_own_process():
    worker = bench.Worker("causal-conv1d", bench.command.ROOT, ())
    records = worker.measure(bench.Shape(1, 8, 8), 120)
    worker.stop()
    assert [record["op"] for record in records] == list(bench.OPERATIONS)
    assert all(record["skipped"].startswith("not installed: No module named 'causal_conv1d'") for record in records)


def test_a_peer_in_a_folder_without_metadata_says_its_version_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(__version__="1.2.3"))
    monkeypatch.setattr(bench.metadata, "version", raise_missing)
    assert bench.version_of("causal-conv1d") == "1.2.3"
    assert bench.version_of("flashqla") is None


def raise_missing(name):
    raise bench.metadata.PackageNotFoundError(name)
