"""The end of a run: figures in a file and on the console, and the losses as a plot."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from .implementations import IMPLEMENTATIONS, ONE_BY_ONE, OURS, PLAIN, ROUNDING
from .settings import WARM_UP, Settings

if TYPE_CHECKING:
    from ..reporting import Report
    from .training import Measured

REPORT_FILE = "report.json"
PLOT_FILE = "loss.png"
LIBRARIES = ("transformers", "kernels", "accelerate", "flash-linear-attention", "flash-qla", "triton")
ALLOWED_LOSS_DIFFERENCE = 1.5  # times that of two runs of transformers which differ in rounding alone


def summarize(settings: Settings, parameters: int, served: Mapping[str, str], measured: "Measured") -> dict:
    """The figures of a run: milliseconds, tokens a second, megabytes (10^6 bytes), nats per token."""
    steady = measured.seconds[WARM_UP:] or measured.seconds
    step_seconds = statistics.median(steady) if steady else None
    return {
        "kernel": settings.kernel,
        "model": settings.model,
        "parameters": parameters,
        "device": device_name(settings.device),
        "versions": versions(),
        "served_by": dict(served),
        "functions": measured.functions,
        "seq_len": settings.seq_len,
        "tokens_per_step": settings.tokens_per_step,
        "precision": settings.precision,
        "checkpointing": settings.checkpointing,
        "packed": settings.packed,
        "steps": len(measured.losses),
        "step_ms": None if step_seconds is None else 1e3 * step_seconds,
        "first_step_ms": 1e3 * measured.seconds[0] if measured.seconds else None,
        "tokens_per_second": None if step_seconds is None else settings.tokens_per_step / step_seconds,
        "peak_mb": measured.peak_bytes / 1e6,
        "held_out": measured.held_out,
        "losses": measured.losses,
        "compared": settings.compared,
    }


def device_name(device: str) -> str:
    """ "NVIDIA H200", or the CPU's architecture with the threads that torch uses."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of torch and of what is installed of LIBRARIES."""
    found = {"torch": torch.__version__}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def servers(report: "Report") -> dict[str, str]:
    """{part: "qwen/flashqla in 18 layers"}, the parts in the order of the report."""
    found: dict[str, dict[str, int]] = {}
    for part in report.parts:
        by = found.setdefault(part.name, {})
        by[part.by] = by.get(part.by, 0) + 1
    return {
        name: ", ".join(f"{by} in {count} layers" for by, count in counts.items()) for name, counts in found.items()
    }


def write(summary: dict, path: Path) -> None:
    """Replace a file at once, so that a run that is ended leaves the report of the step before."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(beside, path)


def show(summary: dict, console: Console) -> None:
    """The figures of one run, a line each."""
    losses, held_out = summary["losses"], summary["held_out"]
    lines = [
        f"{summary['steps']} steps of {summary['tokens_per_step']:,} tokens on {summary['device']}",
        f"step      {_number(summary['step_ms'], '.1f')} ms (the first one {_number(summary['first_step_ms'], '.0f')} ms)",
        f"speed     {_number(summary['tokens_per_second'], ',.0f')} tokens/s",
        f"memory    {summary['peak_mb']:,.0f} MB at the peak",
        f"loss      {losses[0]:.4f} -> {losses[-1]:.4f} nats per token" if losses else "loss      -",
    ]
    if len(held_out) == 2:
        lines.append(f"held out  {held_out[0]:.4f} -> {held_out[1]:.4f} nats per token")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def comparison_table(runs: Sequence[dict], plain: Sequence[float] | None = None) -> Table:
    """A line a run that made a step; `plain` are the losses to compare with, those of transformers among the runs by default."""
    header = ("implementation", "steps", "step ms", "/ ours", "tokens/s", "peak MB", "loss difference")
    table = Table(*header)
    plain = losses_of(runs, PLAIN) if plain is None else plain
    ours = next((run["step_ms"] for run in runs if run["kernel"] == OURS and run.get("step_ms")), None)
    for run in runs:
        if not run.get("step_ms"):
            continue
        difference = loss_difference(run["losses"], plain) if plain and run["kernel"] != PLAIN else None
        table.add_row(
            IMPLEMENTATIONS[run["kernel"]].title,
            str(run["steps"]),
            f"{run['step_ms']:.1f}",
            _number(run["step_ms"] / ours if ours and run["kernel"] != OURS else None, ".2f"),
            f"{run['tokens_per_second']:,.0f}",
            f"{run['peak_mb']:,.0f}",
            _number(difference, ".2e"),
        )
    return table


def missing_runs(runs: Sequence[dict]) -> list[str]:
    """A sentence a run that could not be made, or did not come to its end."""
    sentences = []
    for run in runs:
        title, reason = IMPLEMENTATIONS[run["kernel"]].title, run.get("failed", run.get("missing", "")).rstrip(".")
        if "missing" in run:
            sentences.append(f"no run of {title}: {'failed: ' if 'failed' in run else ''}{reason}.")
        elif "failed" in run:
            sentences.append(f"the run of {title} ended after {run['steps']} steps: {reason}.")
    return sentences


def loss_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest distance of two runs over the steps that both made; infinite if a loss is not a number."""
    distances = [abs(a - b) for a, b in zip(losses, others, strict=False)]
    return max((d if d == d else float("inf") for d in distances), default=0.0)


def verdict(runs: Sequence[dict]) -> tuple[bool, str] | None:
    """Whether this kernel stays as close to plain transformers as rounding allows, and the sentence; None without a yardstick."""
    ours, plain, rounding = (losses_of(runs, name) for name in (OURS, PLAIN, ROUNDING))
    if not ours or not plain or not rounding:
        return None
    steps = min(len(ours), len(plain), len(rounding))
    difference = loss_difference(ours[:steps], plain[:steps])
    resolution = torch.finfo(torch.float32).eps * max(map(abs, plain[:steps]))
    of_two_plain = loss_difference(rounding[:steps], plain[:steps])
    yardstick = max(of_two_plain, resolution)
    passes = difference <= ALLOWED_LOSS_DIFFERENCE * yardstick < float("inf")  # a loss that is no number allows nothing
    sentence = (
        f"over {steps} steps the loss differs from plain transformers by at most {difference:.2e}, and that of two plain "
        f"runs that differ in rounding alone by {of_two_plain:.2e}; {ALLOWED_LOSS_DIFFERENCE} times "
        + (f"what float32 resolves, {resolution:.2e}, is allowed." if yardstick > of_two_plain else "that is allowed.")
    )
    return passes, sentence


def packing_sentence(runs: Sequence[dict]) -> str | None:
    """How far the loss of packed documents is from that of the same documents one at a time; None if one is missing."""
    packed, apart = losses_of(runs, OURS), losses_of(runs, ONE_BY_ONE)
    if not packed or not apart:
        return None
    steps = min(len(packed), len(apart))
    return (
        f"over {steps} steps the loss of packed documents differs from that of the same documents one at a time by at most "
        f"{loss_difference(packed, apart):.2e}."
    )


def losses_of(runs: Sequence[dict], name: str) -> list[float]:
    """The losses of the first run by an implementation that made a step."""
    return next((run["losses"] for run in runs if run["kernel"] == name and run.get("losses")), [])


def plot(runs: Sequence[dict], path: Path) -> bool:
    """Draw the losses of all runs into a PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(
        xlabel="step", ylabel="loss, nats per token", title=next((run["model"] for run in runs if "model" in run), "")
    )
    for run in runs:
        if run.get("losses"):
            line = "-" if run["kernel"] == OURS else "--"
            axes.plot(range(1, len(run["losses"]) + 1), run["losses"], line, label=IMPLEMENTATIONS[run["kernel"]].title)
    held_out = runs[0].get("held_out", [])
    if len(held_out) == 2:
        axes.plot([0, len(runs[0]["losses"])], held_out, "o", label="held-out text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
