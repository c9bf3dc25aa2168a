"""The benchmark's rows, records and table, without a GPU."""

import json
from datetime import UTC, datetime

import pytest

from flashqla_hub.bench import command, record
from flashqla_hub.bench.peers import BY_NAME
from flashqla_hub.bench.rows import Row, shortened
from flashqla_hub.package.download import VERSION


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("16,64:1x32768", (32768,)),
        ("16,64:8192x4", (8192,) * 4),
        ("16,64:28672+4096", (28672, 4096)),
        ("16,32:8192_8seq", (161, 1928, 3157, 563, 1244, 229, 177, 733)),
    ],
)
def test_row_names_mean_lengths(text, lengths):
    assert Row.parse(text).lengths == lengths
    assert Row.parse(text).name == text


@pytest.mark.parametrize("text", ["16:8192", "16,24:1x10", "16,64:abc", "0,4:1x10"])
def test_malformed_row_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=r".*is '.*'; .* must"):
        Row.parse(text)


def test_shortened_row_keeps_the_number_of_sequences_and_fits():
    assert len(shortened(Row(16, 64, "8192x4"), 1100)) == 4
    assert sum(shortened(Row(16, 64, "8192x4"), 1100)) <= 1100


def test_run_names_sort_by_time():
    early, late = (record.run_name("ffffff0", datetime(2026, 1, d, tzinfo=UTC)) for d in (2, 10))
    assert early < late and late == "20260110T000000Z-ffffff0"


def test_record_refuses_a_field_nobody_knows(tmp_path):
    record.append(tmp_path / "a.jsonl", [{"impl": "fla", "ms": 1.5, "error": None}])
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"impl": "fla", "ms": 1.5}
    with pytest.raises(ValueError, match="speed"):
        record.append(tmp_path / "a.jsonl", [{"speed": 1}])


def test_implementation_that_is_absent_is_a_row_with_its_reason(tmp_path):
    rows = command.run_implementation("flash-qla", [Row(2, 8, "1x64")], "bench", tmp_path, {"gates": "bench"})
    assert rows[0]["skipped"] == "flash-qla is not installed" and "ms" not in rows[0]


def test_our_version_is_that_of_the_kernel_not_of_its_loader():
    assert BY_NAME["flashqla"].version() == str(VERSION)


def test_summary_compares_with_the_best_peer():
    common = {"hk": 2, "hv": 8, "seqs": "1x64", "gates": "bench"}
    rows = [
        {**common, "impl": "flashqla", "ms": 0.5},
        {**common, "impl": "fla", "ms": 2.0},
        {**common, "impl": "flashinfer", "ms": 1.0},
    ]
    ratio = command.summary(rows).columns[-1]
    assert list(ratio.cells) == ["2.00"]
