"""Implementations beside each other, each in a process of its own, row by row: what is measured is on disk at once.

A row is an operation on a shape, "35b:training". The process of an implementation gets the rows in their order. It says when one
is warm, that is built, compiled, tuned and found right, then measures it and prints its record; the limits on getting
warm and on measuring are apart, so that a peer does not pay for its compiler. A process that is too slow, or dies, loses that row
alone: another one takes those behind it.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from . import command
from .record import append

OURS = "flashqla"
IMPLEMENTATIONS = (OURS, "transformers", "transformers+flashqla", "fla", "fla+flashqla")
SECONDS, ROW_SECONDS, WARM_SECONDS = 900, 60, 300
SHARES = 4  # of the candidates that a peer's tuners compile

# Help texts of options that the benchmarks of a layer and of a model share.
TIME_LIMIT = "Time limit on the measurements of each implementation; what it has measured by then is kept."
ROW_LIMIT = "Time limit on measuring one row."
WARM_LIMIT = "Time limit on getting one row warm, and on filling caches beforehand; neither counts as measuring."
PATH = "NAME=FOLDERS: folders, separated by colons, that are searched first in the process of this implementation."
COMPILED = "What the peers compile at their first call is compiled already: fill no caches beforehand."


@dataclass(frozen=True)
class Limits:
    """Seconds in which a row has to be warm, in which it has to be measured, and for measuring all rows of an implementation."""

    warm: float = WARM_SECONDS
    row: float = ROW_SECONDS
    total: float = SECONDS


@dataclass(frozen=True)
class Work:
    """What is run: a module of this package, rows in the order of their value, its further arguments, folders of the peers."""

    module: str
    rows: tuple[str, ...]
    arguments: tuple[str, ...]
    folders: dict[str, tuple[str, ...]]

    def command(self, name: str, rows: Sequence[str], share: str = "") -> list[str]:
        module = f"flashqla_hub.bench.{self.module}"
        return [sys.executable, "-m", module, name, ",".join(rows), share, *self.arguments]


def known(option: str, names: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"--{option} is {unknown[0]!r}; it must be one of {', '.join(known)}.")
    return tuple(dict.fromkeys(names or known))


def rows_of(shapes: Sequence[str], operations: Sequence[str]) -> tuple[str, ...]:
    """Every operation on the first shape, then on the next."""
    return tuple(f"{shape}:{operation}" for shape in shapes for operation in operations)


def compare(work: Work, names: Sequence[str], limits: Limits, compiled: bool, common: dict, path: Path) -> None:
    """Measure implementations, ours first; append each record to `path` as it comes, and end with a table.

    Exits with code 1 if ours has no time for a row.
    """
    console = Console(width=None if sys.stdout.isatty() else command.LOG_WIDTH)
    peers = [name for name in dict.fromkeys(names) if name != OURS]
    records: list[dict] = []

    def measure(name: str) -> None:
        for record in records_of(work, name, limits):
            record = {**common, **record}
            append(path, [record])
            records.append(record)
            console.print(told(record), markup=False, highlight=False)

    if OURS in names:
        measure(OURS)
    if peers and not compiled:
        fill_compile_caches(work, peers, limits.warm)
    for name in peers:
        measure(name)
    console.print(as_table(records))
    console.print(f"Written to {path}")
    if any(record.get("skipped") for record in records if record["impl"] == OURS):
        raise typer.Exit(1)


def records_of(work: Work, name: str, limits: Limits) -> Iterator[dict]:
    """Records of one implementation as its rows are done; what it could not do is a record with the reason."""
    left, seconds = list(work.rows), limits.total
    while left and seconds > 0:
        started = subprocess.Popen(
            work.command(name, left), stdout=subprocess.PIPE, text=True, env=environment_of(work, name)
        )
        with Lines(started, ('{"op"', '{"warm"'), sys.stdout.write) as process:
            while left and seconds > 0:
                line = process.next(limits.warm, f"not warm within {limits.warm:.0f} s")
                if line is not None and "warm" in line:
                    began, limit = time.monotonic(), min(limits.row, seconds)
                    line = process.next(limit, f"not measured within {limit:.0f} s")
                    seconds -= time.monotonic() - began
                row = left.pop(0)
                if line is None:
                    yield skipped(work, name, row, process.reason)
                    break
                yield line
    for row in left:
        yield skipped(work, name, row, f"the {limits.total:.0f} s of this implementation were over")


def skipped(work: Work, name: str, row: str, reason: str) -> dict:
    shape, _, operation = row.partition(":")
    return {"op": f"{work.module}-{operation}", "layer": shape, "impl": name, "skipped": reason}


class Lines:
    """What a process prints: JSON lines that begin as wanted, and others, which go to `rest`. The process ends with it."""

    def __init__(
        self, process: subprocess.Popen, wanted: tuple[str, ...], rest: Callable[[str], object] = lambda line: None
    ) -> None:
        self.process, self.reason = process, ""
        self._wanted, self._rest = wanted, rest
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def next(self, seconds: float, too_late: str) -> dict | None:
        """The next line; None, and why in `reason`, if there is none: `too_late` after so many seconds, or an end."""
        try:
            text = self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self.reason = too_late
            return None
        if text is None:
            self.reason = f"the process ended with code {self.process.wait()}"
            return None
        return json.loads(text)

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(self._wanted):
                self._lines.put(line)
            else:
                self._rest(line)
        self._lines.put(None)


def finish(started: Sequence[tuple[str, subprocess.Popen]], seconds: float, when: str) -> None:
    """Wait so long in all for what implementations compile, end what is left, and say whose it was and when they do the rest."""
    deadline = time.monotonic() + seconds
    unfinished = []
    for name, process in started:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            unfinished.append(name)
    command.name_unfinished(unfinished, seconds, when)


def fill_compile_caches(work: Work, peers: Sequence[str], seconds: float) -> None:
    """Let several processes at once compile what the rows of the peers need, so that the timed ones find it on disk.

    Beside one process for each row there are some more, among which the candidates of Triton's tuners are shared out.
    """
    shares = min(SHARES, max(1, len(os.sched_getaffinity(0)) // (len(peers) * len(work.rows))))
    started = [
        (
            name,
            subprocess.Popen(
                work.command(name, [row], f"{share}/{shares}"),
                stdout=subprocess.DEVNULL,
                env={**environment_of(work, name), "FLA_CACHE_RESULTS": "0"},  # times taken beside others mean nothing
            ),
        )
        for name in peers
        for row in work.rows
        for share in range(shares)
    ]
    finish(started, seconds, "before its rows; raise --warm-seconds")


def environment_of(work: Work, name: str) -> dict[str, str]:
    environment = {**os.environ, "FLA_FLASH_QLA": "1" if hands_over(name) else "0"}
    environment["PYTHONPATH"] = command.search_path(work.folders.get(name, ()))
    return environment


def hands_over(name: str) -> bool:
    """Whether FLA is to call FlashQLA."""
    return name.endswith("+flashqla")


def run_rows(rows: str, share: str, common: Callable[[str, str], dict], measure: Callable[..., dict]) -> None:
    """The process of one implementation: `measure(shape, operation, warm)` of each row, and its record in a line.

    `warm()` is to be called when a row is ready to be timed; with a share of the candidates, "1/4", it ends the row there.
    """
    import torch

    from .worker import tune_nothing

    if share:
        tune_nothing(*map(int, share.split("/")))
    for row in rows.split(","):
        shape, _, operation = row.partition(":")
        try:
            figures = measure(shape, operation, _Warm(row, only=bool(share)))
        except Compiled:
            continue
        except Exception as failure:  # one that fails on a row is a line with its reason
            reason = (str(failure).splitlines() or [""])[0]
            figures = {"skipped": f"{type(failure).__name__}: {reason}"[:300]}
        print(json.dumps({**common(shape, operation), **figures}), flush=True)
        torch.cuda.empty_cache()


class Compiled(Exception):
    """The row has compiled what it needs, and that was all it was run for."""


class _Warm:
    """Says that a row is warm."""

    def __init__(self, row: str, only: bool) -> None:
        self.row, self.only = row, only

    def __call__(self) -> None:
        if self.only:
            raise Compiled
        print(json.dumps({"warm": self.row}), flush=True)


def told(record: dict) -> str:
    """A line of the console."""
    figure = f"{record['ms']:.3f} ms" if "ms" in record else record.get("skipped", "")
    return f"{record['layer']} {record['op']} by {record['impl']}: {figure}"


def as_table(records: list[dict]) -> Table:
    """One row a record."""
    table = Table("layer", "operation", "implementation", "ms", "products ms", "rest ms", "launches", "served by")
    for record in records:
        numbers = [record.get(name) for name in ("ms", "matrix_ms", "rest_ms")]
        cells = [f"{number:.4f}" if number is not None else "-" for number in numbers]
        what = record.get("skipped") or record.get("served", "")
        table.add_row(
            record["layer"], record["op"], record["impl"], *cells, str(record.get("launches", "-")), str(what)
        )
    return table
