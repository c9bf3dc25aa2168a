"""What the demonstration trains: a Qwen3.5 that reads bytes, on the text of Python's help topics, with HF Trainer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import Dataset

from .models import gated_delta_nets

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

VOCABULARY = 256  # bytes
HEAD_SIZE = 128  # of the linear layers: what the compiled kernels are made for
FULL_ATTENTION_EVERY = 4  # as in Qwen3.5: three linear layers, then one of full attention
MIN_LAYERS = 5  # four linear layers and one of full attention
HELD_OUT = 0.05
EVALUATED_WINDOWS = 8
PROMPT = "The import statement "
CORE = "chunk_gated_delta_rule"


LINES = 10  # of progress, where no bar can be drawn


@dataclass(frozen=True)
class Settings:
    """The options of the command."""

    steps: int
    seq_len: int
    batch_size: int
    layers: int
    learning_rate: float
    new_tokens: int
    output: Path
    device: str
    source: str
    trust_remote_code: bool
    seed: int


@dataclass
class Outcome:
    """What the run measured.

    Attributes:
        losses: Loss of each training step, in nats per byte.
        held_out: Loss on text that is not trained on, before the first step and after the last.
        seconds: Duration of the training.
        continuation: What the trained model writes after PROMPT.
        detours: Reasons why calls of the core took the kernel's PyTorch path; None stands for calls that did not.
    """

    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    seconds: float = 0.0
    continuation: str = ""
    detours: set[str | None] = field(default_factory=set)

    @property
    def fall(self) -> float:
        before, after = self.held_out
        return 1 - after / before


class Windows(Dataset):
    """`count` windows of `seq_len` bytes, from places that `seed` chooses."""

    def __init__(self, text: bytes, seq_len: int, count: int, seed: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.seq_len = seq_len
        places = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(0, len(text) - seq_len, (count,), generator=places).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]
        window = self.bytes[start : start + self.seq_len].long()
        return {"input_ids": window, "labels": window}


def help_topics() -> tuple[bytes, bytes]:
    """The text of Python's help topics as UTF-8: (what is trained on, what is held out)."""
    from pydoc_data.topics import topics

    text = "\n".join(topics.values()).encode()
    held_out = int(len(text) * HELD_OUT)
    return text[:-held_out], text[-held_out:]


def build_model(settings: Settings) -> "PreTrainedModel":
    """A Qwen3.5 text model with random weights."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = [
        "full_attention" if layer % FULL_ATTENTION_EVERY == 0 else "linear_attention"
        for layer in range(1, settings.layers + 1)
    ]
    torch.manual_seed(settings.seed)
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=settings.layers,
            layer_types=kinds,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=HEAD_SIZE,
            linear_value_head_dim=HEAD_SIZE,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    )
    return model.to(settings.device, torch.bfloat16 if settings.device.startswith("cuda") else torch.float32)


@contextmanager
def watched_core(model: "PreTrainedModel", kernel: ModuleType, outcome: Outcome) -> Iterator[None]:
    """Ask the kernel at each call of the first layer which path its core takes; the answers land in `outcome.detours`."""

    def ask(layer, args, kwargs):
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        queries = hidden_states.new_empty(1, 1, layer.num_k_heads, layer.head_k_dim)
        values = hidden_states.new_empty(1, 1, layer.num_v_heads, layer.head_v_dim)
        gates = values[..., 0]
        outcome.detours.add(kernel.explain_unsupported(queries, queries, values, gates, gates))

    handle = gated_delta_nets(model)[0].module.register_forward_pre_hook(ask, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def progress_callback(settings: Settings, outcome: Outcome, console: Console) -> "TrainerCallback":
    """A bar on a terminal, ten lines where there is none, and the loss of each step in `outcome.losses`."""
    from transformers import TrainerCallback

    columns = (
        "training",
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    task = progress.add_task("training", total=settings.steps, loss="-")
    steps_between_lines = -(-settings.steps // LINES)

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            progress.start()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                outcome.losses.append(logs["loss"])
                progress.update(task, completed=state.global_step, loss=f"{logs['loss']:.3f}")
                if not console.is_terminal and state.global_step % steps_between_lines == 0:
                    console.print(
                        f"step {state.global_step} of {settings.steps}, loss {logs['loss']:.3f}", highlight=False
                    )

        def on_train_end(self, args, state, control, **kwargs):
            progress.stop()

    return Watch()


def train(model: "PreTrainedModel", settings: Settings, outcome: Outcome, console: Console) -> None:
    """Train with HF Trainer, between two looks at the held-out text."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    text, held_out = help_topics()
    arguments = TrainingArguments(
        output_dir=str(settings.output),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=EVALUATED_WINDOWS,
        learning_rate=settings.learning_rate,
        warmup_steps=min(5, settings.steps // 2),
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=settings.device == "cpu",
        bf16=settings.device.startswith("cuda"),
        dataloader_pin_memory=False,
        seed=settings.seed,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(text, settings.seq_len, settings.steps * settings.batch_size, settings.seed),
        eval_dataset=Windows(held_out, settings.seq_len, EVALUATED_WINDOWS, settings.seed),
        callbacks=[progress_callback(settings, outcome, console)],
    )
    trainer.remove_callback(PrinterCallback)
    outcome.held_out.append(trainer.evaluate()["eval_loss"])
    started = time.perf_counter()
    trainer.train()
    outcome.seconds = time.perf_counter() - started
    outcome.held_out.append(trainer.evaluate()["eval_loss"])


def continue_text(model: "PreTrainedModel", settings: Settings) -> str:
    """What the model writes after PROMPT, sampled with the seed."""
    ids = torch.tensor([list(PROMPT.encode())], device=model.device)
    torch.manual_seed(settings.seed)
    written = model.eval().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=settings.new_tokens, do_sample=True, top_k=5
    )
    return bytes(written[0, ids.shape[1] :].tolist()).decode(errors="replace")
