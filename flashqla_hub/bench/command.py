"""`python -m flashqla_hub bench`: the kernel beside its peers, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
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
COMPILE_JOBS = 8
LOG_WIDTH = 180  # characters of the table where there is no terminal to ask


def bench_command(
    rows: Annotated[
        list[str] | None,
        typer.Argument(help=f"Rows as HK,HV:SEQS, for example 16,64:8192x4, or sets of them: {', '.join(ROW_SETS)}."),
    ] = None,
    op: Annotated[str, typer.Option(help=f"What to time: {', '.join(OPS)}.")] = "forward",
    gates: Annotated[list[str] | None, typer.Option(help=f"Gates of the inputs: {', '.join(GATES)}, or all.")] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="Implementations to run; all that are installed if left out.")
    ] = None,
    sustain: Annotated[float, typer.Option(help="Seconds of sustained load a row as well; 0 leaves it out.")] = 0.0,
    seconds: Annotated[int, typer.Option(help="Time limit of each implementation.")] = WORKER_SECONDS,
    source: Annotated[Path, typer.Option(help="Folder of the kernel, with build/ in it.")] = ROOT,
    output: Annotated[
        Path | None, typer.Option(help="Record file; benchmarks/results/<device>/<run>.jsonl by default.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the sources, where the checkout has no .git.")] = None,
) -> None:
    """Time the kernel on the GPU, correctness gate first, beside the installed peers; write one JSON line a row.

    Ends with code 1 if the kernel has no time for a row, or if a peer was slower than it is known to be.
    """
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    try:
        parsed = parse_rows(rows or ["few"])
        mixes = _gates(gates or ["bench"])
        if op not in OPS:
            raise ValueError(f"--op is {op!r}; it must be one of {', '.join(OPS)}.")
        names = _implementations(impl)
        device = device_facts()
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    rates = _rates()
    common = {"run": run_name(commit or git_commit(ROOT)), "op": op, **asdict(rates), **device}
    path = output or ROOT / "benchmarks" / "results" / device_folder(device["device"]) / f"{common['run']}.jsonl"
    records = []
    for name in names:
        found = run_implementation(name, parsed, mixes, source, common, sustain, seconds)
        append(path, found)  # at once, so that what is measured survives what comes next
        records += found
    console.print(rich_table(records))
    console.print(f"Written to {path}")
    void = [f"{r['impl']} ({r['hk']},{r['hv']}) {r['seqs']}: {r['void']}" for r in records if r.get("void")]
    for line in void:
        console.print(f"The comparison is void: {line}")
    if void or any(record["impl"] == "flashqla" and record.get("skipped") for record in records):
        raise typer.Exit(1)


def run_implementation(
    name: str,
    rows: Sequence[Row],
    gates: Sequence[str],
    source: Path,
    common: dict,
    sustain: float = 0.0,
    seconds: int = WORKER_SECONDS,
) -> list[dict]:
    """Records of one implementation on all rows and gates; what it could not run is a record with the reason."""
    implementation = BY_NAME[name]
    reason = implementation.missing()
    figures: dict[tuple[str, str], dict] = {}
    version = None
    if reason is None:
        version = implementation.version()
        if implementation.compiles:
            _fill_compile_cache(implementation, common["op"], rows, gates[0], source, seconds)
        options = [
            "--op",
            common["op"],
            "--gates",
            ",".join(gates),
            "--sustain",
            str(sustain),
            *(row.name for row in rows),
        ]
        output, reason = _run_worker(implementation, options, source, seconds)
        for line in output.splitlines():
            if line.startswith('{"row"'):
                figure = json.loads(line)
                figures[figure.pop("gates"), figure.pop("row")] = figure
    return [
        complete(
            {
                **common,
                "impl": name,
                "version": version,
                "hk": row.hk,
                "hv": row.hv,
                "seqs": row.seqs,
                "gates": mix,
                **figures.get((mix, row.name), {"skipped": reason}),
            },
            row,
        )
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


def _run_worker(implementation: Implementation, options: list[str], source: Path, seconds: int) -> tuple[str, str]:
    """What the worker printed, and why it may have printed less than it was asked for."""
    try:
        process = _start_worker(implementation, options, source)
        output, _ = process.communicate(timeout=seconds)
        return output, f"the process ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return output, f"not done within {seconds} s"


def _fill_compile_cache(implementation, op: str, rows: Sequence[Row], gates: str, source: Path, seconds: int) -> None:
    """Let several processes at once compile what the rows need, so that the timed one finds it on disk."""
    jobs = min(COMPILE_JOBS, os.cpu_count() or 1, len(rows))
    options = ["--compile-only", "--op", op, "--gates", gates]
    shares = [[row.name for row in rows[start::jobs]] for start in range(jobs)]
    processes = [_start_worker(implementation, [*options, *share], source) for share in shares]
    for process in processes:
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()


def _start_worker(implementation: Implementation, options: list[str], source: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "flashqla_hub.bench.worker", "--impl", implementation.name, *options]
    environment = {**os.environ, **dict(implementation.environment), "FLASHQLA_BENCH_SOURCE": str(source)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _implementations(names: list[str] | None) -> list[str]:
    unknown = [name for name in names or () if name not in BY_NAME]
    if unknown:
        raise ValueError(f"--impl is {unknown[0]!r}; it must be one of {', '.join(BY_NAME)}.")
    return names or [implementation.name for implementation in IMPLEMENTATIONS]


def _gates(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in (*GATES, "all")]
    if unknown:
        raise ValueError(f"--gates is {unknown[0]!r}; it must be one of {', '.join(GATES)}, or all.")
    return list(GATES) if "all" in names else list(dict.fromkeys(names))


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
