"""Records: one JSON line per (run, operation, row, gates, implementation), append-only."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

FIELDS = (
    "run",
    "op",
    "impl",
    "version",
    "hk",
    "hv",
    "seqs",
    "gates",
    "ms",
    "eager_ms",
    "peak_mb",
    "error",
    "device",
    "driver",
    "torch",
    "skipped",
)


def git_commit(root: Path) -> str:
    """Short id of the checkout at `root`, with -dirty if tracked files differ, or "unknown" outside git."""
    described = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def run_name(commit: str, now: datetime | None = None) -> str:
    """UTC time, then commit, so that names sort by time: 20261129T151000Z-463600a."""
    return f"{(now or datetime.now(UTC)).strftime('%Y%m%dT%H%M%SZ')}-{commit}"


def append(path: Path, records: list[dict]) -> None:
    """Write records as lines with their fields in the documented order; None is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            unknown = set(record) - set(FIELDS)
            if unknown:
                raise ValueError(f"record has the fields {sorted(unknown)}; a record holds only {', '.join(FIELDS)}.")
            ordered = {field: record[field] for field in FIELDS if record.get(field) is not None}
            file.write(json.dumps(ordered) + "\n")
