"""What the benchmark of the convolution does without a GPU: its shapes, its table, its refusals."""

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
