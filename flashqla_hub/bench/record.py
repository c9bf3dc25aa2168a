"""Records: one JSON line per (run, operation, row, gates, implementation), append-only.

Times are milliseconds a call: `ms` of short CUDA graph replays, each behind a rest in records made after commit 93dd8a2,
`warm_ms` the same of one copy of inputs that fit into the L2 cache, as the anchors were measured, `sustained_ms` of
`--sustain` seconds of replays without a rest, `eager_ms` of calls one behind the other without a graph; `host_us` is what the
host spends between entering an eager call and its return, and `launch_us` in the cheapest one that PyTorch has, `x.add_(1)`,
which tells how fast and how quiet the machine was. `bound_ms` is the least that the device's measured rates `copy_tb_s` and
`matrix_tflop_s` allow. Memory is in 10^6 bytes: `io_mb` of inputs and outputs, `peak_mb` allocated at the peak of a call,
outputs included, and `extra_mb` without them. `buffers` is how many copies of the inputs were read in turn, `error` the
relative error of the correctness gate. Of a whole layer, `layer` is its shape, `matrix_ms` the time of its matrix products
alone, `rest_ms` that of all but products, `launches` what one call puts on the GPU, `served` what the implementation is made
of, `functions` which functions ran in a call, those of a backward as the autograd functions that they belong to; of a whole
model, `layer` is that of its layers. `void` says why a peer's line, and with it the comparison, does not count; `skipped` why
a line has no times.
"""

import json
import subprocess
from collections.abc import Iterable, Set
from datetime import UTC, datetime
from pathlib import Path

FIELDS = (
    "run",
    "op",
    "layer",
    "impl",
    "version",
    "hk",
    "hv",
    "seqs",
    "gates",
    "ms",
    "warm_ms",
    "sustained_ms",
    "eager_ms",
    "host_us",
    "launch_us",
    "matrix_ms",
    "rest_ms",
    "bound_ms",
    "peak_mb",
    "extra_mb",
    "io_mb",
    "buffers",
    "error",
    "launches",
    "served",
    "functions",
    "copy_tb_s",
    "matrix_tflop_s",
    "device",
    "driver",
    "torch",
    "void",
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


def read(paths: Iterable[Path]) -> list[dict]:
    """The records of some files, in their order; ValueError, one sentence, for a file that holds none."""
    return [record for path in paths for record in _read(path)]


def _read(path: Path) -> list[dict]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a record file, such as those under benchmarks/results/.")
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except ValueError:
        records = [None]
    if not all(isinstance(record, dict) and _is_record(record.keys()) for record in records):
        raise ValueError(f"{path} is no record of `python -m flashqla_hub bench`; name one that it wrote.")
    return records


def _is_record(fields: Set[str]) -> bool:
    return {"op", "impl"} <= fields and ("gates" in fields or "layer" in fields)
