"""Times of the peers measured once at their best, against which a later run shows whether it called them right."""

import json
from functools import cache
from pathlib import Path

from .peers import BY_NAME

FILE = Path(__file__).with_name("anchors.json")

# A peer this much slower than its anchor was not at its best, and the run says nothing about it.
TOLERANCE = 1.1


@cache
def read() -> dict:
    """Device, versions, method and rows of the anchors, as the file has them."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def find(record: dict) -> dict | None:
    """The anchor of a record's operation, implementation and row, on the same device and with the same gates.

    A variant has that of the implementation that it varies.
    """
    if record["device"] != read()["device"] or record["gates"] != "bench":
        return None
    wanted = {**record, "impl": BY_NAME[record["impl"]].variant_of or record["impl"]}
    keys = ("op", "impl", "hk", "hv", "seqs")
    return next((row for row in read()["rows"] if all(row[key] == wanted[key] for key in keys)), None)


def explain_slow(record: dict) -> str | None:
    """Why a record voids its run, or None: its peer took more than `TOLERANCE` times its anchor.

    Anchors read one copy of their inputs, so that is what is compared where `ms` is of several copies in turn.
    """
    anchor, ms = find(record), record.get("warm_ms", record.get("ms"))
    if anchor is None or ms is None or ms <= TOLERANCE * anchor["ms"]:
        return None
    return f"{(ms / anchor['ms'] - 1) * 100:.0f} % slower than its anchor of {anchor['ms']:.4f} ms"
