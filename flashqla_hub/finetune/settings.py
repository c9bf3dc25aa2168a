"""The options of a run, the file that keeps them beside its checkpoints, and the one exception of this program."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile

from ..package.errors import PackageError

CHECKPOINTING = ("none", "non-reentrant", "reentrant")
PRECISIONS = ("bf16", "mixed", "fp32")
ATTENTIONS = ("sdpa", "eager")

# What may differ between a run and its continuation: nothing that changes a number of the steps to come.
FREE_TO_CHANGE = ("output", "save_every", "stop_after", "evaluate", "save_model")


# What may differ between runs that are compared: who computes them, where, and what is written.
FREE_TO_COMPARE = (*FREE_TO_CHANGE, "kernel", "attention", "device", "source", "trust_remote_code", "column")

WARM_UP = 2  # steps that compile and tune what they call, and count neither for the speed nor for the memory


class FinetuneError(PackageError):
    """The run cannot be made, or did not end as it has to; the message is one sentence."""


def one_clause(error: Exception) -> str:
    """The first line of another library's message, to be quoted within a sentence of ours."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).replace(". ", "; ").rstrip(".")


@dataclass(frozen=True)
class Settings:
    """The options of the command.

    Attributes:
        data: Text file, folder, .jsonl file or name of a dataset on the Hub; None for Python's help topics.
        column: Field of a .jsonl line or column of a dataset that holds the text.
        model: Name of a shape with random weights (see `model.SHAPES`), or what `from_pretrained` takes.
        kernel: Who serves the gated delta rule (see `implementations.IMPLEMENTATIONS`).
        seq_len: Tokens of a row.
        batch_size, accumulation: Rows of a forward, and forwards of an optimizer step.
        steps, warmup: Length of the learning rate schedule, in optimizer steps.
        stop_after: Optimizer steps after which the run ends, the schedule being that of `steps`; None for its end.
        precision: "bf16", weights and arithmetic; "mixed", float32 weights under bf16 autocast; "fp32".
        checkpointing: Gradient checkpointing: "none", "non-reentrant" or "reentrant".
        packed: Keep the documents of a row apart, as one row or one after the other; otherwise a row is unbroken text.
        held_out: Rows that are not trained on.
        evaluate: Whether the loss on them is measured before and after.
        save_every: Optimizer steps between checkpoints; 0 for none.
        save_model: Whether the trained model is written.
    """

    data: str | None
    column: str
    model: str
    kernel: str
    attention: str
    source: str
    trust_remote_code: bool
    device: str
    seq_len: int
    batch_size: int
    accumulation: int
    steps: int
    warmup: int
    stop_after: int | None
    learning_rate: float
    precision: str
    checkpointing: str
    packed: bool
    held_out: int
    evaluate: bool
    save_every: int
    save_model: bool
    seed: int
    output: Path

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.batch_size * self.accumulation

    @property
    def last_step(self) -> int:
        return self.steps if self.stop_after is None else min(self.steps, self.stop_after)

    @property
    def file(self) -> Path:
        return self.output / "settings.json"

    @property
    def compared(self) -> dict:
        """What two runs must have in common to be compared step by step."""
        return {name: value for name, value in asdict(self).items() if name not in FREE_TO_COMPARE}

    def make_output(self) -> None:
        """Raise FinetuneError if the output folder cannot be made or written to."""
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.output):
                pass
        except OSError as error:
            raise FinetuneError(
                f"--output is {self.output}, which cannot be written: {error.strerror}; name another folder."
            ) from error

    def save(self) -> None:
        self.file.write_text(json.dumps(asdict(self), indent=2, default=str) + "\n", encoding="utf-8")

    def require_same_run(self) -> None:
        """Raise FinetuneError if the run in `output`, which this one is to continue, had other settings."""
        if not self.file.is_file():
            raise FinetuneError(f"{self.output} holds no run to resume; leave out --resume to start one.")
        before = json.loads(self.file.read_text(encoding="utf-8"))
        now = json.loads(json.dumps(asdict(self), default=str))
        for name, value in now.items():
            if name not in FREE_TO_CHANGE and before.get(name) != value:
                option = name.replace("_", "-")
                raise FinetuneError(
                    f"{option} is {value} and the run in {self.output} has {before.get(name)}; resume it with the same "
                    "options, or start another one with another --output."
                )
