"""The table and the plot of records: who wins by how much, with the losing rows."""

import pytest
from typer.testing import CliRunner

from flashqla_hub.__main__ import build_app
from flashqla_hub.bench import report
from flashqla_hub.bench.peers import IMPLEMENTATIONS
from flashqla_hub.bench.record import append, read

ROW = {"op": "forward", "hk": 2, "hv": 8, "seqs": "1x64", "gates": "bench", "device": "NVIDIA H200"}
OURS = {
    **ROW,
    "impl": "flashqla",
    "ms": 0.5,
    "eager_ms": 0.8,
    "host_us": 21.4,
    "bound_ms": 0.1,
    "extra_mb": 5.2,
    "io_mb": 40,
}
RECORDS = [
    OURS,
    {**ROW, "impl": "fla", "ms": 2.0, "eager_ms": 2.0},
    {**ROW, "impl": "flashinfer", "ms": 1.0, "eager_ms": 0.4},
]
LOST = [
    {**OURS, "seqs": "1x65", "ms": 0.8, "bound_ms": 0.4},
    {**ROW, "seqs": "1x65", "impl": "fla", "ms": 0.2, "void": "slow"},
    {**ROW, "seqs": "1x65", "impl": "flashinfer", "skipped": "it broke"},
]


def test_a_row_is_compared_with_the_best_peer_captured_and_eager():
    assert report.markdown_table(RECORDS) == [
        "| (H, HV) sequences | this kernel | FlashInfer | FLA | captured | eager | host µs | of the bound | scratch MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| (2, 8) 1x64 | 0.5000 | 1.0000 | 2.0000 | 2.00x | **0.50x** | 21 | 20% | 5 of 40 |",
        "| geometric mean |  |  |  | 2.00x | **0.50x** |  |  |  |",
    ]


def test_sustained_times_are_compared_where_they_were_taken():
    sustained = [{**record, "sustained_ms": 2 * record["ms"]} for record in RECORDS]
    header, _, row, _ = report.markdown_table([*sustained[:2], {**sustained[2], "sustained_ms": 0.5}])
    assert "| captured | sustained | eager |" in header and "| 2.00x | **0.50x** | **0.50x** |" in row


def test_losing_void_and_skipped_rows_stand_in_the_table():
    *_, row, mean = report.markdown_table(RECORDS + LOST)
    assert row == "| (2, 8) 1x65 | 0.8000 | - | 0.2000 (void) | **0.25x** | - | 21 | 50% | 5 of 40 |"
    assert mean.startswith("| geometric mean |  |  |  | **0.71x** |")  # sqrt(2 * 0.25)


def test_a_row_without_our_time_has_no_ratio():
    [_, _, row, _] = report.markdown_table([{**ROW, "impl": "flashqla", "skipped": "it broke"}, RECORDS[1]])
    assert row == "| (2, 8) 1x64 | - | 2.0000 | - | - | - | - | - |"


def test_the_terminal_table_has_the_gates_of_each_row():
    table = report.rich_table(RECORDS + [{**record, "gates": "zero"} for record in RECORDS])
    assert list(table.columns[1].cells) == ["bench", "zero", ""]


def test_the_plot_is_the_same_for_the_same_records(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        report.draw(RECORDS + LOST, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "FlashInfer" in (tmp_path / "a.svg").read_text()


def test_the_command_prints_a_table_for_each_operation_and_gates(tmp_path):
    path = tmp_path / "run.jsonl"
    backward = [{**record, "run": "r", "op": "backward"} for record in RECORDS]
    append(path, [{**record, "run": "r"} for record in RECORDS] + backward)
    done = CliRunner().invoke(build_app("bench-report"), ["bench-report", str(path)])
    assert done.exit_code == 0
    assert [line for line in done.output.splitlines() if line.endswith(":")] == [
        "forward, gates bench:",
        "backward, gates bench:",
    ]
    assert done.output.count("| (2, 8) 1x64 | 0.5000 | 1.0000 | 2.0000 | 2.00x | **0.50x** | 21 | 20% | ") == 2


def test_the_command_prints_whole_layers_beside_ours(tmp_path):
    path = tmp_path / "run.jsonl"
    common = {"run": "r", "op": "layer-training", "layer": "2b", "seqs": "1x64"}
    figures = [("flashqla", {"ms": 2.0, "rest_ms": 1.0, "peak_mb": 1234.5}), ("fla", {"ms": 3.0, "rest_ms": 0.5})]
    append(
        path, [{**common, "impl": impl, **numbers} for impl, numbers in [*figures, ("transformers", {"skipped": "x"})]]
    )
    done = CliRunner().invoke(build_app("bench-report"), ["bench-report", str(path)])
    assert done.exit_code == 0
    assert "| 2b 1x64 | training | this kernel | 2.000 | 1.000 | - | 1,234 | - | - |" in done.output
    assert "| 2b 1x64 | training | all FLA | 3.000 | 0.500 | - | - | 1.50x | **0.50x** |" in done.output
    assert "| 2b 1x64 | training | transformers, FLA | - | - | - | - | - | - |" in done.output


@pytest.mark.parametrize("content", [None, "no JSON", '{"op": "forward"}', "[1]"])
def test_a_file_that_is_no_record_is_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content + "\n")
    rule = "does not exist; name a record file" if content is None else "is no record of `python -m flashqla_hub bench`"
    with pytest.raises(ValueError, match=rule):
        read([path])


def test_a_summary_has_each_peer_the_best_and_the_rows_that_are_lost():
    table = report.summary_table(RECORDS + LOST + [{**record, "op": "backward"} for record in RECORDS])
    assert table == [
        "| operation, gates | FlashInfer | FLA | best, captured | best, eager | rows lost |",
        "| --- | --- | --- | --- | --- | --- |",
        "| forward, bench | 2.00x (1 of 2) | 1.00x | **0.71x** | **0.50x** | 1 of 2: (2, 8) 1x65 |",
        "| backward, bench | 2.00x | 4.00x | 2.00x | **0.50x** | 0 of 1 |",
    ]


def test_an_operation_with_gradients_shows_the_peak_of_each_implementation():
    peaks = [{**record, "op": "forward_backward", "peak_mb": 1000 * record["ms"]} for record in RECORDS]
    header, _, row, mean = report.markdown_table(peaks)
    assert header.endswith("| of the bound | peak MB | of FlashInfer | of FLA |")
    assert row.endswith("| 20% | 500 | 1,000 | 2,000 |") and header.count("|") == mean.count("|")


BACKWARD = {**ROW, "op": "backward"}
VARIED = [
    {**OURS, **BACKWARD},
    {**BACKWARD, "impl": "flash-qla", "ms": 1.0, "eager_ms": 1.2},
    {**BACKWARD, "impl": "flash-qla-uncached", "ms": 0.25, "eager_ms": 0.2},
    {**OURS, **BACKWARD, "seqs": "1x65"},
    {**BACKWARD, "impl": "flash-qla", "seqs": "1x65", "ms": 1.0, "eager_ms": 1.2},
    {**BACKWARD, "impl": "flash-qla-uncached", "seqs": "1x65", "ms": 4.0, "eager_ms": 0.2},
]


def test_a_variant_is_never_the_best_peer_and_has_a_column_and_a_mean_of_its_own():
    header, _, row, _, mean = report.markdown_table(VARIED)
    assert header == (
        "| (H, HV) sequences | this kernel | FlashQLA | FlashQLA, cache not kept | captured | eager "
        "| captured, FlashQLA, cache not kept | host µs | of the bound | peak MB | of FlashQLA | of FlashQLA, cache not kept |"
    )
    assert row == ("| (2, 8) 1x64 | 0.5000 | 1.0000 | 0.2500 | 2.00x | 1.50x | **0.50x** | 21 | 20% | - | - | - |")
    assert mean == "| geometric mean |  |  |  | 2.00x | 1.50x | 2.00x |  |  |  |  |  |"  # of 0.5 and 8


def test_a_variant_has_its_mean_in_the_summary_and_wins_no_row():
    assert report.summary_table(VARIED) == [
        "| operation, gates | FlashQLA | FlashQLA, cache not kept | best, captured | best, eager | rows lost |",
        "| --- | --- | --- | --- | --- | --- |",
        "| backward, bench | 2.00x | 2.00x | 2.00x | 1.50x | 0 of 2 |",
    ]


def test_every_implementation_has_a_label_and_a_colour():
    assert list(report.LABELS) == [each.name for each in IMPLEMENTATIONS]
    assert len({*report.COLOURS}) == len(report.LABELS)


def test_parts_of_a_layer_are_compared_with_the_best_peer():
    part = {"op": "conv-forward", "seqs": "8x4096", "layer": "D2048 W4", "io_mb": 268.4}
    records = [
        {**part, "impl": "flashqla", "ms": 0.08},
        {**part, "impl": "fla", "ms": 0.1},
        {**part, "impl": "causal-conv1d", "ms": 0.06},
        {**part, "op": "conv-backward", "impl": "fla", "skipped": "absent"},
    ]
    assert report.parts_table(records)[2:] == [
        "| conv-forward | 8x4096 D2048 W4 | 80.00 | 100.00 | 60.00 | **0.75x** | 3.35 |",
        "| conv-backward | 8x4096 D2048 W4 | - | - | - | - | - |",
    ]
    assert report.split([*records, {"op": "layer-forward", "layer": "2b"}, OURS]) == (
        records,
        [{"op": "layer-forward", "layer": "2b"}],
        [OURS],
    )
