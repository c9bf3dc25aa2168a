"""`python -m flashqla_hub bench`: the kernel beside its peers, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .peers import BY_NAME, IMPLEMENTATIONS
from .record import append, git_commit, run_name
from .rows import GATES, Row

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_ROWS = ("16,64:8192x4", "16,32:8192x4", "2,8:1x32768")
WORKER_SECONDS = 480


def bench_command(
    rows: Annotated[list[str] | None, typer.Argument(help="Rows as HK,HV:SEQS, for example 16,64:8192x4.")] = None,
    gates: Annotated[str, typer.Option(help=f"Gates of the inputs: {', '.join(GATES)}.")] = "bench",
    impl: Annotated[
        list[str] | None, typer.Option(help="Implementations to run; all that are installed if left out.")
    ] = None,
    source: Annotated[Path, typer.Option(help="Folder of the kernel, with build/ in it.")] = ROOT,
    output: Annotated[
        Path | None, typer.Option(help="Record file; benchmarks/results/<device>/<run>.jsonl by default.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the sources, where the checkout has no .git.")] = None,
) -> None:
    """Time the forward on the GPU, correctness gate first, beside the installed peers; write one JSON line a row."""
    console = Console()
    try:
        parsed = [Row.parse(text) for text in rows or DEFAULT_ROWS]
        names = _implementations(impl, gates)
        device = _device()
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    run = run_name(commit or git_commit(ROOT))
    records = []
    for name in names:
        records += run_implementation(
            name, parsed, gates, source, {"run": run, "op": "forward", "gates": gates, **device}
        )
    path = output or ROOT / "benchmarks" / "results" / device_folder(device["device"]) / f"{run}.jsonl"
    append(path, records)
    console.print(summary(records))
    console.print(f"Written to {path}")
    if any(record["impl"] == "flashqla" and record.get("skipped") for record in records):
        raise typer.Exit(1)


def run_implementation(name: str, rows: list[Row], gates: str, source: Path, common: dict) -> list[dict]:
    """Records of one implementation on all rows; what it could not run is a record with the reason."""
    implementation = BY_NAME[name]
    reason = implementation.missing()
    figures: dict[str, dict] = {}
    if reason is None:
        command = [sys.executable, "-m", "flashqla_hub.bench.worker", "--impl", name, "--gates", gates]
        environment = {**os.environ, **dict(implementation.environment), "FLASHQLA_BENCH_SOURCE": str(source)}
        try:
            done = subprocess.run(
                [*command, *(row.name for row in rows)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                timeout=WORKER_SECONDS,
                check=False,
            )
            output, reason = done.stdout, f"the process ended with code {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            output, reason = (expired.stdout or b"").decode(), f"not done within {WORKER_SECONDS} s"
        for line in output.splitlines():
            if line.startswith('{"row"'):
                figure = json.loads(line)
                figures[figure.pop("row")] = figure
    version = None if implementation.missing() else implementation.version()
    return [
        {
            **common,
            "impl": name,
            "version": version,
            "hk": row.hk,
            "hv": row.hv,
            "seqs": row.seqs,
            **figures.get(row.name, {"skipped": reason}),
        }
        for row in rows
    ]


def summary(records: list[dict]) -> Table:
    """A line a row: milliseconds of each implementation in a graph, and how many times faster we are than the best peer."""
    names = list(dict.fromkeys(record["impl"] for record in records))
    table = Table("row", "gates", *(f"{name} ms" for name in names), "best peer / flashqla")
    for key in dict.fromkeys((r["hk"], r["hv"], r["seqs"], r["gates"]) for r in records):
        row = {r["impl"]: r for r in records if (r["hk"], r["hv"], r["seqs"], r["gates"]) == key}
        times = {name: row[name].get("ms") for name in names}
        peers = [ms for name, ms in times.items() if name != "flashqla" and ms]
        ratio = f"{min(peers) / times['flashqla']:.2f}" if peers and times.get("flashqla") else "-"
        cells = (f"{ms:.4f}" if ms else row[name].get("skipped", "-") for name, ms in times.items())
        table.add_row(f"({key[0]},{key[1]}) {key[2]}", key[3], *cells, ratio)
    return table


def device_folder(device: str) -> str:
    """Folder of a device's records: "NVIDIA H200" -> "h200"."""
    return device.lower().removeprefix("nvidia ").replace(" ", "-")


def _implementations(names: list[str] | None, gates: str) -> list[str]:
    if gates not in GATES:
        raise ValueError(f"--gates is {gates!r}; it must be one of {', '.join(GATES)}.")
    unknown = [name for name in names or () if name not in BY_NAME]
    if unknown:
        raise ValueError(f"--impl is {unknown[0]!r}; it must be one of {', '.join(BY_NAME)}.")
    return names or [implementation.name for implementation in IMPLEMENTATIONS]


def _device() -> dict:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA GPU and found none; on a CPU run python benchmarks/compare_torch.py.")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    return {"device": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__}
