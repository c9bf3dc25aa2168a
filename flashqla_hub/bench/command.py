"""`python -m flashqla_hub bench`: the kernel beside its peers, each in a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .anchors import explain_slow
from .bounds import Rates, bound_ms
from .peers import BY_NAME, IMPLEMENTATIONS, Implementation
from .record import append, git_commit, run_name
from .report import rich_table
from .rows import GATES, OPS, ROW_SETS, Row, parse_rows

ROOT = Path(__file__).resolve().parents[2]
WORKER_SECONDS = 480

# Options of every benchmark.
Source = Annotated[Path, typer.Option(help="Folder of the kernel, with build/ in it.")]
Output = Annotated[Path | None, typer.Option(help="Record file; one in benchmarks/results/<device>/ by default.")]
Commit = Annotated[str | None, typer.Option(help="Commit of the sources, where the checkout has no .git.")]

LOG_WIDTH = 180  # characters of the table where there is no terminal to ask


def bench_command(
    rows: Annotated[
        list[str] | None,
        typer.Argument(help=f"Rows as HK,HV:SEQS, for example 16,64:8192x4, or sets of them: {', '.join(ROW_SETS)}."),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help=f"What to time: {', '.join(OPS)}; forward if left out.")] = None,
    gates: Annotated[list[str] | None, typer.Option(help=f"Gates of the inputs: {', '.join(GATES)}, or all.")] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="Implementations to run; all that are installed if left out.")
    ] = None,
    path: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDERS: folders, separated by colons, that are searched first in the process of this implementation."
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="What compiles at the first call has done so: fill no caches beforehand.")
    ] = False,
    sustain: Annotated[float, typer.Option(help="Seconds of sustained load a row as well; 0 leaves it out.")] = 0.0,
    seconds: Annotated[int, typer.Option(help="Time limit of each implementation.")] = WORKER_SECONDS,
    source: Source = ROOT,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Time the kernel on the GPU, correctness gate first, beside the installed peers; write one JSON line a row.

    Ends with code 1 if the kernel has no time for a row, or if a peer was slower than it is known to be.
    """
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    try:
        parsed = parse_rows(rows or ["few"])
        mixes = _gates(gates or ["bench"])
        ops = _ops(op or ["forward"])
        implementations = _implementations(impl, parse_paths(path or ()), ops)
        common, record_path = begin(commit, output)
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    if not compiled:
        fill_compile_caches(implementations, ops, parsed, mixes[0], source, seconds)
    there = [implementation for implementation in implementations if implementation.missing() is None]
    workers = {each.name: Worker(each, each.timed(ops), mixes, parsed, source, sustain) for each in there}
    for worker in workers.values():  # what they do together they do not pay for one after the other
        worker.is_ready.wait(seconds)
    rates = _rates()
    common |= asdict(rates)
    records = []
    for implementation in implementations:
        worker = workers.get(implementation.name)
        found = records_of(implementation, worker, implementation.timed(ops), mixes, parsed, common, seconds)
        append(record_path, found)  # at once, so that what is measured survives what comes next
        records += found
    for name in ops:
        console.print(rich_table([record for record in records if record["op"] == name]))
    console.print(f"Written to {record_path}")
    void = [f"{r['impl']} ({r['hk']},{r['hv']}) {r['seqs']}: {r['void']}" for r in records if r.get("void")]
    for line in void:
        console.print(f"The comparison is void: {line}")
    if void or any(record["impl"] == "flashqla" and record.get("skipped") for record in records):
        raise typer.Exit(1)


class Worker:
    """The process of an implementation: it gets ready beside the others, and does its rows alone, when it is told to."""

    def __init__(
        self,
        implementation: Implementation,
        ops: Sequence[str],
        gates: Sequence[str],
        rows: Sequence[Row],
        source: Path,
        sustain: float,
    ) -> None:
        options = ["--op", ",".join(ops), "--gates", ",".join(gates), "--sustain", str(sustain), "--wait"]
        self.is_ready = threading.Event()
        self._process = _start_worker(implementation, [*options, *(row.name for row in rows)], source)
        self._printed: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, seconds: int) -> tuple[list[str], str]:
        """What it printed, and why it may have printed less than it was asked for."""
        with contextlib.suppress(BrokenPipeError):  # it may have ended, and has then said all it had to say
            self._process.stdin.write("go\n")
            self._process.stdin.close()
        try:
            reason = f"the process ended with code {self._process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            reason = f"not done within {seconds} s"
        self._reader.join()
        return self._printed, reason

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith('{"ready"'):
                self.is_ready.set()
            else:
                self._printed.append(line)
        self.is_ready.set()


def records_of(
    implementation: Implementation,
    worker: Worker | None,
    ops: Sequence[str],
    gates: Sequence[str],
    rows: Sequence[Row],
    common: dict,
    seconds: int = WORKER_SECONDS,
) -> list[dict]:
    """Records of one implementation on all operations, gates and rows; what it could not run is a record with the reason."""
    figures: dict[tuple[str, str, str], dict] = {}
    version, reason = None, implementation.missing()
    if worker is not None:
        version = implementation.version()
        printed, reason = worker.run(seconds)
        for line in printed:
            if line.startswith('{"op"'):
                figure = json.loads(line)
                figures[figure.pop("op"), figure.pop("gates"), figure.pop("row")] = figure
    return [
        complete(
            {
                **common,
                "op": op,
                "impl": implementation.name,
                "version": version,
                "hk": row.hk,
                "hv": row.hv,
                "seqs": row.seqs,
                "gates": mix,
                **figures.get((op, mix, row.name), {"skipped": reason}),
            },
            row,
        )
        for op in ops
        for mix in gates
        for row in rows
    ]


def complete(record: dict, row: Row) -> dict:
    """The record with the bound of its row, and with the reason for which it voids the comparison, if any."""
    rates = Rates(record["copy_tb_s"], record["matrix_tflop_s"])
    record = {**record, "bound_ms": bound_ms(row, record["op"], rates)}
    return {**record, "void": explain_slow(record)}


def device_folder(device: str) -> str:
    """Folder of a device's records: "NVIDIA H200" -> "h200"."""
    return device.lower().removeprefix("nvidia ").replace(" ", "-")


def fill_compile_caches(
    implementations: Sequence[Implementation],
    ops: Sequence[str],
    rows: Sequence[Row],
    gates: str,
    source: Path,
    seconds: int,
) -> None:
    """Let several processes at once compile what the rows need, so that the timed ones find it on disk.

    Says so where that took longer than `seconds`: what is missing then counts in the time limit of the peer.
    """
    jobs = min(len(os.sched_getaffinity(0)), len(rows))
    shares = [[row.name for row in rows[start::jobs]] for start in range(jobs)]
    processes = [
        (
            implementation.name,
            _start_worker(
                implementation,
                ["--compile-only", "--op", ",".join(implementation.timed(ops)), "--gates", gates, *share],
                source,
            ),
        )
        for implementation in implementations
        if implementation.compiling is not None and implementation.missing() is None
        for share in shares
    ]
    deadline = time.monotonic() + seconds
    unfinished = []
    for name, process in processes:
        try:
            output, _ = process.communicate(timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            unfinished.append(name)
            continue
        sys.stdout.writelines(f"{line}\n" for line in output.splitlines() if '"skipped"' in line)
    name_unfinished(unfinished, seconds, "in its own time; raise --seconds")


def name_unfinished(names: Sequence[str], seconds: float, when: str) -> None:
    """Say whose compiling was ended, and when they do the rest."""
    for name in dict.fromkeys(names):
        print(f"{name} had not compiled everything after {seconds:.0f} s, and compiles the rest {when}.")


def _start_worker(implementation: Implementation, options: list[str], source: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "flashqla_hub.bench.worker", "--impl", implementation.name, *options]
    compiling = (implementation.compiling or ()) if "--compile-only" in options else ()
    environment = {**os.environ, **dict(implementation.environment + compiling), "FLASHQLA_BENCH_SOURCE": str(source)}
    environment["PYTHONPATH"] = search_path(implementation.folders)
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def search_path(folders: Sequence[str]) -> str:
    """PYTHONPATH of a process that searches `folders` before what this one was told to."""
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])


def parse_paths(texts: Sequence[str], known: Sequence[str] = tuple(BY_NAME)) -> dict[str, tuple[str, ...]]:
    """`fla=/a:/b` -> {"fla": ("/a", "/b")}."""
    found = {}
    for text in texts:
        name, _, folders = text.partition("=")
        missing = [folder for folder in folders.split(os.pathsep) if not os.path.isdir(folder)]
        if name not in known or missing:
            raise ValueError(
                f"--path is {text!r}; it must be NAME=FOLDERS with folders that exist, and NAME one of {', '.join(known)}."
            )
        found[name] = tuple(folders.split(os.pathsep))
    return found


def _implementations(
    names: list[str] | None, folders: dict[str, tuple[str, ...]], ops: Sequence[str]
) -> list[Implementation]:
    """Those named, or all that have rows of `ops`; a variant lies where what it is a variant of does, unless it has folders."""
    unknown = [name for name in names or () if name not in BY_NAME]
    if unknown:
        raise ValueError(f"--impl is {unknown[0]!r}; it must be one of {', '.join(BY_NAME)}.")
    idle = [name for name in names or () if not BY_NAME[name].timed(ops)]
    if idle:
        own = BY_NAME[idle[0]].timed(list(OPS))[0]
        raise ValueError(
            f"--impl is {idle[0]!r}, which is timed for {OPS[own]} alone; pass --op {own}, or leave it out."
        )
    chosen = [BY_NAME[name] for name in names] if names else [each for each in IMPLEMENTATIONS if each.timed(ops)]
    return [replace(each, folders=folders.get(each.name) or folders.get(each.variant_of, ())) for each in chosen]


def _gates(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in (*GATES, "all")]
    if unknown:
        raise ValueError(f"--gates is {unknown[0]!r}; it must be one of {', '.join(GATES)}, or all.")
    return list(GATES) if "all" in names else list(dict.fromkeys(names))


def _ops(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ValueError(f"--op is {unknown[0]!r}; it must be one of {', '.join(OPS)}.")
    return list(dict.fromkeys(names))


def begin(commit: str | None, output: Path | None, suffix: str = "") -> tuple[dict, Path]:
    """What the lines of a new record have in common, and its file; ValueError, one sentence, without a GPU or a place for it."""
    device = device_facts()
    run = run_name(commit or git_commit(ROOT))
    folder = ROOT / "benchmarks" / "results" / device_folder(device["device"])
    path = output or folder / f"{run}{suffix}.jsonl"
    try:
        append(path, [])  # before anything is measured
    except OSError as error:
        raise ValueError(
            f"the record file is {path}, which cannot be written: {error.strerror}; pass another one as --output."
        ) from error
    return {"run": run, **device}, path


def device_facts() -> dict:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA GPU and found none; on a CPU run python benchmarks/compare_torch.py.")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    return {"device": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__}


def _rates() -> Rates:
    """Measured in a process of its own, so that its memory is free again before the rows run."""
    command = [sys.executable, "-m", "flashqla_hub.bench.bounds"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
    return Rates(**json.loads(output))
