"""One run with HF Trainer: progress, checkpoints, the loss and the time of each step."""

import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..called import watched
from .implementations import IMPLEMENTATIONS
from .settings import WARM_UP, FinetuneError, Settings
from .text import Rows

STEPS_FILE = "steps.jsonl"
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # PyTorch reads the first of them that is set
FEWER_GAPS = "expandable_segments:True"  # of PyTorch's allocator: freed memory serves requests of other sizes


@dataclass
class Measured:
    """What a run measured.

    Attributes:
        losses: Loss of each optimizer step in nats per token, also of those before a resumption.
        seconds: Duration of each optimizer step of this process, from its first forward to the end of the update.
        held_out: Loss on rows that are not trained on, before the first step and after the last; empty if not wanted.
        peak_bytes: Most memory in use at once: of tensors on a GPU in the steps behind the warm-up, of the whole process on a
            CPU.
        functions: Which functions served the second step, each with its module.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    functions: list[str] = field(default_factory=list)


def flatten(rows: list[dict]) -> dict[str, Any]:
    """One row [1, tokens] of all segments, with their bounds in every form that a layer may ask for."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return collate([segment for row in rows for segment in row["segments"]])


def one_by_one(rows: list[dict]) -> dict[str, Any]:
    """The segments of all rows as [1, tokens] each, and their labels as in `flatten`, so that as many tokens count."""
    segments = [segment for row in rows for segment in row["segments"] if len(segment["input_ids"]) > 1]
    documents = [{name: torch.tensor([segment[name]]) for name in ("input_ids", "labels")} for segment in segments]
    return {"labels": flatten(rows)["labels"], "documents": documents}


class _Trainer(Trainer):
    """Trainer that keeps the loss of every forward on its device, and computes documents one by one if it is given them."""

    def __init__(self, *args, measured: Measured, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.forward_losses: list[Tensor] = []
        self.measured = measured

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, **kwargs):
        """Of the documents, their summed loss over all predicted tokens, as it is of a packed row."""
        documents = inputs.get("documents")
        if documents is not None and num_items_in_batch is None:
            num_items_in_batch = (inputs["labels"] != -100).sum()

        def loss_of(document: dict) -> Tensor:
            return super(_Trainer, self).compute_loss(model, document, False, num_items_in_batch, **kwargs)

        def loss_of_all() -> Tensor:
            return loss_of(inputs) if documents is None else sum(map(loss_of, documents))

        # Not in the first step, which compiles: watching would slow that down.
        if len(self.measured.seconds) == 1 and model.training:
            loss, self.measured.functions = watched(loss_of_all)
        else:
            loss = loss_of_all()
        return (loss, {}) if return_outputs else loss

    def training_step(self, *args, **kwargs) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.forward_losses.append(loss.detach())
        return loss


class _Watch(TrainerCallback):
    """A bar on the console, a line per step in the steps file, and the end after `settings.last_step`."""

    def __init__(
        self, settings: Settings, measured: Measured, console: Console, after_step: Callable[[Measured], None]
    ) -> None:
        self.settings, self.measured, self.after_step = settings, measured, after_step
        self.file = settings.output / STEPS_FILE
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"), TimeRemainingColumn())
        self.progress = Progress("training", *columns, console=console)
        self.task = self.progress.add_task("training", total=settings.last_step, loss="-")
        self.trainer: _Trainer | None = None
        self.started = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.progress.start()

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        loss = torch.stack(self.trainer.forward_losses).float().sum().item()  # waits for the step's work on a GPU
        seconds = time.perf_counter() - self.started
        self.trainer.forward_losses.clear()
        self.measured.losses.append(loss)
        self.measured.seconds.append(seconds)
        self.measured.peak_bytes = _peak_bytes(self.settings.device)
        if self.settings.device.startswith("cuda") and len(self.measured.seconds) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, "loss": loss, "seconds": seconds}) + "\n")
        self.after_step(self.measured)
        self.progress.update(self.task, completed=state.global_step, loss=f"{loss:.3f}")
        if state.global_step >= self.settings.last_step:
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.stop()


def arguments_of(settings: Settings) -> TrainingArguments:
    """HF Trainer's arguments."""
    on_gpu = settings.device.startswith("cuda")
    return TrainingArguments(
        output_dir=str(settings.output),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        bf16=settings.precision == "mixed",
        gradient_checkpointing=settings.checkpointing != "none",
        gradient_checkpointing_kwargs={"use_reentrant": settings.checkpointing == "reentrant"},
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or settings.steps,
        save_total_limit=2,
        logging_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not on_gpu,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        seed=settings.seed,
    )


def last_checkpoint(settings: Settings) -> Path | None:
    """The newest checkpoint in the output folder that was written to its end, or None."""
    whole = [folder for folder in _checkpoints(settings) if _is_whole(folder)]
    return max(whole, key=_step_of, default=None)


def forget_checkpoints(settings: Settings) -> None:
    """Remove those of an earlier run, from which one that begins again must not be resumed."""
    for folder in _checkpoints(settings):
        shutil.rmtree(folder)


def _checkpoints(settings: Settings) -> list[Path]:
    found = settings.output.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return [path for path in found if path.is_dir() and path.name.rpartition("-")[2].isdecimal()]


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _is_whole(checkpoint: Path) -> bool:
    """Whether it has the state of the trainer, which is written behind everything else."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def train(
    model: PreTrainedModel,
    rows: Rows,
    held_out: Rows,
    settings: Settings,
    resume: Path | None,
    console: Console,
    after_step: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """Train, from a checkpoint if one is given; `after_step` gets what is measured so far.

    Raises:
        FinetuneError: interrupted, or out of memory; one sentence that says what to do.
    """
    measured = Measured(losses=_losses_up_to(settings, resume))
    watch = _Watch(settings, measured, console, after_step)
    trainer = _Trainer(
        model=model,
        args=arguments_of(settings),
        train_dataset=rows,
        eval_dataset=held_out,
        data_collator=_collator(settings),
        callbacks=[watch],
        measured=measured,
    )
    trainer.remove_callback(PrinterCallback)
    watch.trainer = trainer
    if settings.evaluate and settings.held_out:
        measured.held_out.append(trainer.evaluate()["eval_loss"])
    if settings.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    except KeyboardInterrupt as error:
        raise FinetuneError(f"interrupted after step {len(measured.losses)}; {_way_on(settings)}.") from error
    except torch.OutOfMemoryError as error:
        raise FinetuneError(
            f"the GPU has too little memory for {settings.batch_size} x {settings.seq_len} tokens; {_with_less_memory(settings)}."
        ) from error
    finally:
        watch.progress.stop()
    if settings.evaluate and settings.held_out:
        measured.held_out.append(trainer.evaluate()["eval_loss"])
    return measured


def _collator(settings: Settings) -> Callable[[list[dict]], dict[str, Any]]:
    if not settings.packed:
        return default_data_collator
    return flatten if IMPLEMENTATIONS[settings.kernel].keeps_apart else one_by_one


def _losses_up_to(settings: Settings, resume: Path | None) -> list[float]:
    """The losses of the steps that a checkpoint has behind it; the steps file is cut to them, or begun anew."""
    file = settings.output / STEPS_FILE
    done = 0 if resume is None else _step_of(resume)
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]  # a run that was killed may leave a part of one
    kept = [step for step in steps if step["step"] <= done]
    file.write_text("".join(f"{json.dumps(step)}\n" for step in kept), encoding="utf-8")
    return [step["loss"] for step in kept]


def _way_on(settings: Settings) -> str:
    checkpoint = last_checkpoint(settings)
    if checkpoint is None:
        return "no checkpoint is written yet, so the same command with --overwrite begins again"
    return f"the same command with --resume goes on from {checkpoint.name}"


def _with_less_memory(settings: Settings) -> str:
    """What the user has not done yet to fit a step into memory."""
    ways = ["lower --batch-size or --seq-len" if settings.batch_size > 1 else "lower --seq-len"]
    if settings.checkpointing == "none":
        ways.append("pass --checkpointing non-reentrant")
    variable = next((name for name in ALLOCATOR_VARIABLES if name in os.environ), ALLOCATOR_VARIABLES[-1])
    if FEWER_GAPS not in os.environ.get(variable, ""):
        ways.append(f"put {FEWER_GAPS} into {variable}")
    return ", or ".join(ways)


def _peak_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
