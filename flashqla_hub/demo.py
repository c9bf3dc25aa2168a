"""`python -m flashqla_hub demo`: a small Qwen3.5 learns to write documentation, on this machine, through the kernel.

Everything a user of transformers does is in it: a model, `flashqla_hub.kernelize`, HF Trainer, `generate`. The model has
random weights and reads bytes, and the text is that of Python's own help topics, so nothing is downloaded.
"""

import math
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from .demo_training import (
    CORE,
    MIN_LAYERS,
    PROMPT,
    VOCABULARY,
    Outcome,
    Settings,
    build_model,
    continue_text,
    train,
    watched_core,
)
from .mapping import Source, names_for
from .package.download import REPO_ID
from .package.errors import PackageError, told_in_one_sentence

if TYPE_CHECKING:
    from .reporting import Report

REQUIRED_FALL = 0.20
PAGE_WIDTH = 120  # of output that is not a terminal


class DemoError(PackageError):
    """The demonstration did not show what it has to show; the message is one sentence."""


def plot_losses(outcome: Outcome, path: Path) -> bool:
    """Draw the losses into a PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per byte", title="Qwen3.5 on qwen/flashqla")
    axes.plot(range(1, len(outcome.losses) + 1), outcome.losses, label="training")
    axes.plot([0, len(outcome.losses)], outcome.held_out, "o", label="held-out text")
    axes.axhline(math.log(VOCABULARY), linestyle=":", color="grey", label="all bytes alike")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def show_report(report: "Report", console: Console) -> None:
    """What serves each layer, one row per layer, and the reasons below."""
    table = Table("layer", "served by", title=f"Gated delta rule layers on {report.device}", title_justify="left")
    for layer in report.layers:
        served = report.served_by(layer)
        by = {server: [name for name in served if served[name] == server] for server in served.values()}
        parts = [
            f"{server}: {'all parts' if names == list(served) else ', '.join(names)}" for server, names in by.items()
        ]
        table.add_row(layer, "\n".join(parts))
    console.print(table)
    for by, reason in dict.fromkeys((part.by, part.reason) for part in report.parts):
        console.print(f"{by}: {reason}", highlight=False)


def require_served(report: "Report", device_type: str) -> None:
    """Raise DemoError if a layer runs anything that the kernel has for this device, its core above all, by another."""
    wanted = {CORE, *names_for(device_type)}
    stranger = next((part for part in report.parts if part.name in wanted and part.by != REPO_ID), None)
    if stranger is not None:
        raise DemoError(
            f"{stranger.layer} runs {stranger.name} of {stranger.by}, not of {REPO_ID}, because {stranger.reason}."
        )


def require_success(outcome: Outcome, device_type: str) -> None:
    """Raise DemoError if a GPU that has kernels did not use them, or the model did not learn."""
    detours = sorted(reason for reason in outcome.detours if reason is not None)
    if device_type == "cuda" and detours:
        raise DemoError(f"{CORE} took the PyTorch path on a GPU that has a kernel, because {detours[0]}.")
    if not outcome.fall >= REQUIRED_FALL:  # also if a loss is not a number
        before, after = outcome.held_out
        raise DemoError(
            f"the held-out loss went from {before:.3f} to {after:.3f} and has to fall by {REQUIRED_FALL:.0%}; take more "
            "--steps, or look for what is wrong in the layers."
        )


def show_outcome(outcome: Outcome, settings: Settings, console: Console) -> None:
    """Which path was taken, losses, speed, the continuation, and where the plot is."""
    before, after = outcome.held_out
    num_bytes = settings.steps * settings.batch_size * settings.seq_len
    paths = sorted("SM90 kernel" if reason is None else f"PyTorch path ({reason})" for reason in outcome.detours)
    plot = settings.output / "loss.png"
    lines = [
        f"{CORE}: {', '.join(paths)}",
        f"held-out loss {before:.3f} -> {after:.3f} nats per byte, a fall of {outcome.fall:.0%}",
        f"{num_bytes:,} bytes in {outcome.seconds:.0f} s, {num_bytes / outcome.seconds:,.0f} a second",
        f"loss curve: {plot}"
        if plot_losses(outcome, plot)
        else "no loss curve, since matplotlib is missing: pip install 'flashqla_hub[bench]' brings it",
        f"it writes: {PROMPT}{outcome.continuation}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False)


def run_demo(settings: Settings, console: Console) -> None:
    """The whole demonstration.

    Raises:
        PackageError: the kernel cannot be loaded, or the demonstration failed; one sentence.
    """
    trust = settings.trust_remote_code
    source = Source.of(settings.source, trust_remote_code=trust)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a source without a fitting build is told by kernelize
        source.available("demo")
    from transformers.utils import logging

    from . import kernelize, report

    logging.set_verbosity_error()
    device_type = torch.device(settings.device).type
    outcome = Outcome()
    model = build_model(settings)
    size = f"{settings.layers} layers, {model.num_parameters() / 1e6:.1f} M parameters"
    console.print(f"Qwen3.5, {size}, on {settings.device}; kernel from {settings.source}", highlight=False)
    kernelize(model, source=settings.source, trust_remote_code=trust, device=settings.device)
    served = report(model)
    show_report(served, console)
    require_served(served, device_type)
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(
            f"--output is {settings.output}, which cannot be made: {error.strerror}; name another folder."
        ) from error
    with watched_core(model, source.module(), outcome):
        train(model, settings, outcome, console)
        outcome.continuation = continue_text(model, settings)
    show_outcome(outcome, settings, console)
    require_served(report(model), device_type)
    require_success(outcome, device_type)


def default_source() -> str:
    """The repository that this file belongs to if it holds a build, else the Hub."""
    root = Path(__file__).parents[1]
    return str(root) if (root / "build").is_dir() else REPO_ID


def chosen_device(device: str | None) -> str:
    """The device that was asked for; by default the GPU if this version of the kernel serves it, else the CPU."""
    if device is None:
        return "cuda" if names_for("cuda") else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DemoError(f"device {device} cannot be used here; name one that torch sees, such as cpu.") from error
    return device


def require_libraries() -> None:
    """Raise DemoError if what HF Trainer needs is not installed."""
    missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise DemoError(f"{missing[0]} is missing; pip install 'flashqla_hub[transformers]' brings it.")


def demo_command(
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 80,
    seq_len: Annotated[int, typer.Option(min=16, max=4096, help="Bytes in a training window.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a step.")] = 4,
    layers: Annotated[
        int, typer.Option(min=MIN_LAYERS, help="Layers; every fourth is one of full attention.")
    ] = MIN_LAYERS,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    new_tokens: Annotated[int, typer.Option(min=1, help="Bytes to generate after the training.")] = 200,
    output: Annotated[Path, typer.Option(help="Folder for the loss curve.")] = Path("demo-output"),
    device: Annotated[
        str | None, typer.Option(help="Where to run: cpu, or cuda if the kernel serves this GPU.")
    ] = None,
    threads: Annotated[
        int,
        typer.Option(min=1, help="CPU threads; more than one is slower for a model this small if other programs run."),
    ] = 1,
    source: Annotated[
        str | None,
        typer.Option(help="Kernel repository on the Hub, or a folder (/..., ./...). Default: this repository."),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="The publisher need not be on the Hub's list.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, text and sampling.")] = 0,
) -> None:
    """Train a small Qwen3.5 with HF Trainer through the kernel, draw its loss, and let it write.

    Takes one to six minutes on two CPU cores, and needs no network. Fails, with a sentence, if anything else serves a gated
    delta rule layer, a GPU with kernels does not use them, or the loss on held-out text falls by less than 20 %.
    """
    with told_in_one_sentence():
        require_libraries()
        torch.set_num_threads(threads)
        settings = Settings(
            steps=steps,
            seq_len=seq_len,
            batch_size=batch_size,
            layers=layers,
            learning_rate=learning_rate,
            new_tokens=new_tokens,
            output=output,
            device=chosen_device(device),
            source=default_source() if source is None else source,
            trust_remote_code=trust_remote_code,
            seed=seed,
        )
        if output.exists() and not output.is_dir():
            raise DemoError(f"--output is {output}, which is a file; name a folder.")
        run_demo(settings, Console(width=None if sys.stdout.isatty() else PAGE_WIDTH))
