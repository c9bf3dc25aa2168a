"""docs/field_cases.md names tests that exist, for every case."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "field_cases.md"
CASES = {"P": 7, "N": 10, "C": 4, "S": 1, "D": 5, "I": 9, "L": 5, "F": 3}  # letter: cases
ROW = re.compile(r"^\| (?P<case>[A-Z]\d+) \| (?P<what>[^|]+) \| (?P<tests>[^|]*)\| (?P<status>[^|]+) \|$", re.MULTILINE)
STATUSES = ("tested", "SM90", "open")

ROWS = list(ROW.finditer(TABLE.read_text()))


def named_by(row: re.Match) -> list[str]:
    return re.findall(r"`([^`]+)`", row["tests"])


def names_in(path: Path) -> set[str]:
    """As pytest names them: behind the name of their class, if they have one."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        prefix, members = (f"{node.name}::", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        found |= {prefix + member.name for member in members if isinstance(member, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def test_every_case_has_one_row():
    cases = [row["case"] for row in ROWS]
    assert cases == [f"{letter}{n}" for letter, count in CASES.items() for n in range(1, count + 1)]


def test_no_line_of_a_table_is_unreadable():
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    heads = [line for line in lines if line.startswith(("| case |", "|---"))]
    assert len(lines) - len(heads) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_named_tests_exist(row):
    for nodeid in named_by(row):
        path, _, test = nodeid.partition("::")
        assert (ROOT / path).is_file(), f"{path} is not in the tree"
        assert test in names_in(ROOT / path), f"{nodeid} does not exist"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_a_case_that_is_called_tested_has_tests(row):
    assert row["status"].startswith(STATUSES)
    assert named_by(row) or not row["status"].startswith("tested")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_a_case_that_is_called_tested_on_a_gpu_has_tests_there(row):
    called = bool(re.search(r"SM90(?! open)", row["status"]))
    assert called == any(name.startswith("tests/sm90/") for name in named_by(row))
