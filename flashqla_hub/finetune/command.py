"""`python -m flashqla_hub finetune`: options to settings, the run, its report, and the comparisons."""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from ..demo import default_source
from ..package.errors import PackageError, told_in_one_sentence
from . import compare, report
from .implementations import IMPLEMENTATIONS, ONE_BY_ONE, OURS, PLAIN, explain_missing, isolate, require_called
from .model import LARGE, SHAPES, TINY
from .settings import ATTENTIONS, CHECKPOINTING, PRECISIONS, FinetuneError, Settings, one_clause

if TYPE_CHECKING:
    from .training import Measured

COMPARISON_FILE = "comparison.json"
MODEL_FOLDER = "model"
LARGEST_SEED = 2**32 - 1  # of NumPy
PAGE_WIDTH = 120  # of output that is not a terminal
RATES = {True: 3e-4, False: 2e-5}  # default learning rates: of random weights, and of trained ones


def require_libraries() -> None:
    """Raise FinetuneError if what HF Trainer needs is not installed."""
    for name in ("transformers", "accelerate"):
        if find_spec(name) is None:
            raise FinetuneError(f"{name} is missing; pip install 'flashqla_hub[transformers]' brings it.")


def chosen_device(device: str | None) -> str:
    """The device that was asked for; by default a GPU if there is one, else the CPU.

    Of several GPUs, this process sees only the chosen one from here on: HF Trainer would take the first, or all of them.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda":
            return _only_gpu(chosen.index or 0)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, IndexError) as error:
        raise FinetuneError(f"device {device} cannot be used here; name one that torch sees, such as cpu.") from error
    return device


def _only_gpu(index: int) -> str:
    """Hide the other GPUs, before CUDA is initialised; IndexError if there is no such one."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = listed.split(",")[:count] if listed else [str(each) for each in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = names[index].strip()
    return "cuda"


def require_one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise FinetuneError(f"{option} is {value}; it must be one of {', '.join(choices)}.")


def require_runnable(settings: Settings) -> None:
    """Raise FinetuneError for options that do not go together."""
    reason = explain_missing(settings.kernel, settings.device)
    if reason is not None:
        raise FinetuneError(
            f"--kernel is {settings.kernel}, and {reason}; leave the option out to train through {OURS}."
        )
    if settings.kernel == ONE_BY_ONE and not settings.packed:
        raise FinetuneError(f"--kernel is {ONE_BY_ONE}, which is for the documents of packed rows; pass --packed too.")
    if not 0 <= settings.seed <= LARGEST_SEED:
        raise FinetuneError(f"--seed is {settings.seed}; it must be 0 to {LARGEST_SEED}.")
    if settings.stop_after is not None and settings.stop_after > settings.steps:
        raise FinetuneError(
            f"--stop-after is {settings.stop_after} and --steps {settings.steps}; stop no later than that."
        )


def checkpoint_to_resume(settings: Settings, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to go on from; None for a run from the beginning.

    Raises:
        FinetuneError: nothing to resume, other settings than before, or a run that a new one would mix with.
    """
    from .training import last_checkpoint

    if resume and overwrite:
        raise FinetuneError(
            "--resume and --overwrite are both given; one goes on and the other begins anew: leave one out."
        )
    if settings.output.exists() and not settings.output.is_dir():
        raise FinetuneError(f"--output is {settings.output}, which is a file; name a folder.")
    found = last_checkpoint(settings)
    if not resume:
        results = [settings.output / name for name in (MODEL_FOLDER, report.REPORT_FILE)]
        left = found or next((path for path in results if path.exists()), None)
        if left is not None and not overwrite:
            way_on = "--resume to go on, " if found else ""
            raise FinetuneError(
                f"{settings.output} holds {left.name} of an earlier run; pass {way_on}--overwrite to begin again, or "
                "another --output."
            )
        return None
    settings.require_same_run()
    if found is None:
        raise FinetuneError(
            f"{settings.output} holds no checkpoint to resume; pass --overwrite instead to begin again."
        )
    done = int(found.name.rpartition("-")[2])
    if done >= settings.last_step:
        raise FinetuneError(
            f"{found.name} in {settings.output} is the end of the run; there are no steps left to take."
        )
    return found


def run(settings: Settings, resume: bool, overwrite: bool, verify_packing: bool, console: Console) -> dict:
    """One run in this process: its report, also written to the output folder.

    Raises:
        PackageError: it could not be made, or another kernel served the layers; one sentence.
    """
    from transformers.utils import logging

    from .. import kernelize
    from .. import report as who_serves
    from .model import build
    from .text import join, make_rows, read_documents
    from .training import forget_checkpoints, train

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    checkpoint = checkpoint_to_resume(settings, resume, overwrite)
    settings.make_output()
    documents = read_documents(settings.data, settings.column)
    model, encode = build(settings)
    rows, held_out = make_rows(join(documents, encode), settings)
    implementation = IMPLEMENTATIONS[settings.kernel]
    if implementation.is_ours:
        kernelize(model, source=settings.source, trust_remote_code=settings.trust_remote_code, device=settings.device)
    served = report.servers(who_serves(model)) if implementation.is_ours else {}
    require_ours(settings, served)
    if checkpoint is None:
        forget_checkpoints(settings)
        compare.forget(settings.output)
        (settings.output / COMPARISON_FILE).unlink(missing_ok=True)
        shutil.rmtree(settings.output / MODEL_FOLDER, ignore_errors=True)
    settings.save()
    path = settings.output / report.REPORT_FILE
    path.unlink(missing_ok=True)
    tell_beginning(settings, model.num_parameters(), len(rows), served, console)
    proof = {}
    if verify_packing:
        from .packing import verify

        proof["verify_packing"] = verify(model, rows, settings)
        console.print(proof["verify_packing"], markup=False, highlight=False)

    def keep(measured: "Measured") -> dict:
        require_called(settings.kernel, measured.functions)
        summary = report.summarize(settings, model.num_parameters(), served, measured) | proof
        report.write(summary, path)
        return summary

    with baseline_failures_told(settings):
        measured = train(model, rows, held_out, settings, checkpoint, console, keep)
    summary = keep(measured)
    if settings.save_model:
        model.save_pretrained(settings.output / MODEL_FOLDER)
    report.show(summary, console)
    return summary


@contextmanager
def baseline_failures_told(settings: Settings) -> Iterator[None]:
    """Say in one sentence what stopped a run of another library; of this kernel, the traceback is worth more."""
    try:
        yield
    except PackageError:
        raise
    except Exception as error:
        if IMPLEMENTATIONS[settings.kernel].is_ours:
            raise
        raise FinetuneError(f"{IMPLEMENTATIONS[settings.kernel].title} failed: {one_clause(error)}.") from error


def require_ours(settings: Settings, served: dict[str, str]) -> None:
    """Raise FinetuneError if a run of this kernel would be one of another."""
    core = served.get("chunk_gated_delta_rule", "")
    if IMPLEMENTATIONS[settings.kernel].is_ours and not core.startswith("qwen/flashqla"):
        raise FinetuneError(
            f"the gated delta rule would be served by {core or 'transformers'} on {settings.device}, not by qwen/flashqla; "
            "look at the notice above, or train without it with --kernel plain."
        )


def tell_beginning(settings: Settings, parameters: int, rows: int, served: dict[str, str], console: Console) -> None:
    lines = [
        f"{settings.model}, {parameters / 1e6:.1f} M parameters in {settings.precision} on {settings.device}, by "
        f"{IMPLEMENTATIONS[settings.kernel].title}",
        *(f"  {name}: {by}" for name, by in served.items()),
        f"{rows:,} rows of {settings.seq_len:,} tokens, {kind_of_rows(settings)}",
    ]
    passes = settings.steps * settings.batch_size * settings.accumulation / rows
    if passes > 1:
        lines.append(f"the run reads every row {passes:.1f} times")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def kind_of_rows(settings: Settings) -> str:
    if not settings.packed:
        return "unbroken text"
    return "documents kept apart" if IMPLEMENTATIONS[settings.kernel].keeps_apart else "documents one at a time"


def run_comparisons(comparisons: dict[str, int], settings: Settings, seconds: float, console: Console) -> None:
    """The other implementations, a file of all that there is after each, and the table and the plot.

    Raises:
        FinetuneError: see `conclude`; or another run in the output folder had other options.
    """
    gc.collect()
    torch.cuda.empty_cache()  # the others need the memory of this process
    settings.make_output()
    for name, steps in comparisons.items():
        result = compare.compare(name, steps, settings, seconds, console)
        for line in report.missing_runs([result]):
            console.print(line, markup=False, highlight=False)
        runs = compare.found([settings.output])
        report.write({"runs": runs}, settings.output / COMPARISON_FILE)
    compare.require_alike(runs)
    draw(runs, settings.output, console)
    console.print(report.comparison_table(runs))
    conclude(runs, console)


def conclude(runs: list[dict], console: Console) -> None:
    """What the runs show together.

    Raises:
        FinetuneError: one that could be made failed, or the losses differ from those of plain transformers by more than
            rounding explains.
    """
    passes, sentence = report.verdict(runs) or (True, None)
    for line in filter(None, (report.packing_sentence(runs), sentence if passes else None)):
        console.print(line, markup=False, highlight=False)
    if not passes:
        raise FinetuneError(sentence)
    failed = [IMPLEMENTATIONS[run["kernel"]].title for run in runs if "failed" in run]
    if failed:
        raise FinetuneError(f"not every comparison came to its end: {', '.join(failed)}; see above why.")


def draw(runs: list[dict], output: Path, console: Console) -> None:
    path = output / report.PLOT_FILE
    drawn = report.plot(runs, path)
    line = f"loss curve: {path}" if drawn else "no loss curve, since matplotlib is missing: pip install matplotlib"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def finetune_command(
    data: Annotated[
        str | None,
        typer.Argument(
            help="Text file, folder of text files, .jsonl file, or dataset on the Hub. Default: Python's help topics."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Model on the Hub or in a folder, or a shape with random weights that reads bytes: {', '.join(SHAPES)}. "
            f"Default: {LARGE} on a GPU, {TINY} on a CPU."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 50,
    seq_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row. Default: 4096 on a GPU, 256 on a CPU.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a forward.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Forwards of an optimizer step.")] = 1,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Peak learning rate. Default: 2e-5, or 3e-4 with random weights.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises.")] = 5,
    packed: Annotated[bool, typer.Option(help="Keep the documents of a row apart.")] = False,
    verify_packing: Annotated[
        bool, typer.Option(help="First show that a packed row gives the gradients of its documents one by one.")
    ] = False,
    checkpointing: Annotated[str, typer.Option(help=f"Gradient checkpointing: {', '.join(CHECKPOINTING)}.")] = "none",
    precision: Annotated[
        str | None,
        typer.Option(
            help="bf16; mixed, which keeps the weights in float32; or fp32. Default: bf16 on a GPU, fp32 on a CPU."
        ),
    ] = None,
    attention: Annotated[str, typer.Option(help=f"Attention of transformers: {', '.join(ATTENTIONS)}.")] = "sdpa",
    output: Annotated[Path, typer.Option(help="Folder for checkpoints, model, report and plot.")] = Path(
        "finetune-output"
    ),
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 for none.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin again although --output holds a run.")] = False,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many steps of the schedule; --resume goes on.")
    ] = None,
    held_out: Annotated[int, typer.Option(min=0, help="Rows at the end of the text that are not trained on.")] = 4,
    evaluate: Annotated[bool, typer.Option(help="Measure the loss on them before and after.")] = True,
    save_model: Annotated[bool, typer.Option(help="Write the trained model to OUTPUT/model.")] = True,
    compare_with: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            help="Repeat some steps by others, each in a process of its own: plain, plain-eager, fla, fla+flashqla, or all; "
            "one-by-one too with --packed; NAME:STEPS sets how many.",
        ),
    ] = None,
    compare_seconds: Annotated[
        float, typer.Option(min=1, help="Time limit of each comparison; what it has done by then is kept.")
    ] = compare.SECONDS,
    only: Annotated[
        bool,
        typer.Option(
            "--only", help="Make the comparisons alone, beside what --output holds; finetune-report joins folders."
        ),
    ] = False,
    kernel: Annotated[str, typer.Option(help=f"Who serves the layers: {', '.join(IMPLEMENTATIONS)}.")] = OURS,
    column: Annotated[str, typer.Option(help="Field of a .jsonl line or column of a dataset with the text.")] = "text",
    device: Annotated[str | None, typer.Option(help="Default: the GPU if there is one, else the CPU.")] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Kernel repository on the Hub, or a folder (/..., ./...). Default: this repository."),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="The publisher need not be on the Hub's list.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and order of rows.")] = 0,
) -> None:
    """Train a model with gated delta rule layers on your text, with HF Trainer, through the kernel.

    Writes OUTPUT/report.json (step time, tokens a second, peak memory, losses), steps.jsonl, loss.png, checkpoints and the
    model. Needs no network for local text, a local model or a shape.
    """
    with told_in_one_sentence():
        require_libraries()
        comparisons = compare.parse(compare_with or [], packed or verify_packing)
        require_one_of("--kernel", kernel, tuple(IMPLEMENTATIONS))
        require_one_of("--checkpointing", checkpointing, CHECKPOINTING)
        require_one_of("--attention", attention, ATTENTIONS)
        isolate(kernel)
        place = chosen_device(device)
        on_gpu = place.startswith("cuda")
        chosen_precision = precision or ("bf16" if on_gpu else "fp32")
        require_one_of("--precision", chosen_precision, PRECISIONS)
        chosen_model = model or (LARGE if on_gpu else TINY)
        settings = Settings(
            data=data,
            column=column,
            model=chosen_model,
            kernel=kernel,
            attention=attention,
            source=default_source() if source is None else source,
            trust_remote_code=trust_remote_code,
            device=place,
            seq_len=seq_len or (4096 if on_gpu else 256),
            batch_size=batch_size,
            accumulation=accumulation,
            steps=steps,
            warmup=warmup,
            stop_after=stop_after,
            learning_rate=RATES[chosen_model in SHAPES] if learning_rate is None else learning_rate,
            precision=chosen_precision,
            checkpointing=checkpointing,
            packed=packed or verify_packing,
            held_out=held_out,
            evaluate=evaluate,
            save_every=save_every,
            save_model=save_model,
            seed=seed,
            output=output,
        )
        require_runnable(settings)
        if only and (not comparisons or resume or overwrite):
            raise FinetuneError("--only is for the comparisons that --compare names, without --resume or --overwrite.")
        console = new_console()
        if not only:
            summary = run(settings, resume, overwrite, verify_packing, console)
        if comparisons:
            run_comparisons(comparisons, settings, compare_seconds, console)
        else:
            draw([summary], output, console)


def finetune_report_command(
    folders: Annotated[list[Path], typer.Argument(help="Output folders of runs with the same options.")],
    output: Annotated[Path | None, typer.Option(help="Also write all runs into this JSON file.")] = None,
) -> None:
    """Join the runs and comparisons that several output folders hold: a table of each, and what they show together.

    For comparisons that were made apart (`finetune --only`), or on several GPUs: times are compared within a folder.
    """
    with told_in_one_sentence():
        console = new_console()
        runs = compare.found(folders)
        if not runs:
            raise FinetuneError(f"{', '.join(map(str, folders))} holds no report of a run; name output folders.")
        compare.require_alike(runs)
        plain = report.losses_of(runs, PLAIN)
        for folder in folders:
            console.print(str(folder), markup=False, highlight=False)
            console.print(report.comparison_table(compare.found([folder]), plain))
        if output is not None:
            report.write({"runs": runs}, output)
        for line in report.missing_runs(runs):
            console.print(line, markup=False, highlight=False)
        conclude(runs, console)


def new_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PAGE_WIDTH)
