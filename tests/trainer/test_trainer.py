"""HF Trainer on a kernelized model: with and without gradient checkpointing, on padded and on packed rows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import flashqla_hub
from tests.transformers.comparison import assert_close
from tests.transformers.families import tiny_model, token_ids

FAMILY = "qwen3_5"
LENGTHS = (23, 37, 50, 14)


class GradientsOfFirstStep(TrainerCallback):
    """Keeps the gradients with which the first optimizer step is taken, and who serves the model then."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.active_in: list[bool] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        if not self.gradients:
            self.gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        self.active_in.append(model.training and flashqla_hub.is_active(model))


def examples(lengths=LENGTHS) -> list[dict[str, list[int]]]:
    rows = [token_ids(1, length)[0].tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model: PreTrainedModel, folder: Path, data, collator=default_data_collator, steps: int = 1, **options):
    """(loss of each step, what the callback saw, the trainer) of a run without shuffling."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        learning_rate=1e-2,
        max_grad_norm=1e9,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"per_device_train_batch_size": len(data), **options},
    )
    seen = GradientsOfFirstStep()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator, callbacks=[seen])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, seen, trainer


def assert_same_run(actual, expected) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-4)
    assert actual[1].gradients.keys() == expected[1].gradients.keys()
    for name, gradient in expected[1].gradients.items():
        assert_close(actual[1].gradients[name], gradient, 1e-4)


@pytest.fixture
def run(kernelize, tmp_path) -> Callable:
    """Train a fresh kernelized model."""
    return lambda data, **options: train(kernelize(tiny_model(FAMILY)), tmp_path, data, **options)


@pytest.fixture
def same_length() -> list[dict[str, list[int]]]:
    return examples((40, 40))


def test_step_equals_that_of_the_plain_model(kernelize, tmp_path, same_length):
    """With slow decay, where the float32 of the plain model is good enough to compare its gate gradients."""

    def slowly_decaying() -> PreTrainedModel:
        model = tiny_model(FAMILY)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    parameter.sub_(3)
        return model

    expected = train(slowly_decaying(), tmp_path, same_length, steps=2)
    actual = train(kernelize(slowly_decaying()), tmp_path, same_length, steps=2)
    assert_same_run(actual, expected)
    assert actual[1].active_in == [True, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(run, same_length, reentrant):
    """I7: the recomputed forward is the same forward, bit for bit on the CPU."""
    expected = run(same_length)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    actual = run(same_length, **options)
    assert actual[0] == expected[0]
    for name, gradient in expected[1].gradients.items():
        assert torch.equal(actual[1].gradients[name], gradient), name


@pytest.mark.parametrize("installed", ["kernelize", "register", "kernel_config"])
def test_kernel_serves_training_and_evaluation(kernel_folder, tmp_path, same_length, installed):
    """I2: Trainer calls train() and eval(), at which transformers kernelizes models with use_kernels again."""
    model = tiny_model(FAMILY)
    if installed == "kernelize":
        flashqla_hub.kernelize(model, source=kernel_folder)
    elif installed == "register":
        flashqla_hub.register(kernel_folder)
        model.set_use_kernels(True)
    else:
        model.set_use_kernels(True, flashqla_hub.kernel_config(kernel_folder))
    _, seen, trainer = train(model, tmp_path, same_length, steps=2)
    assert seen.active_in == [True, True]
    trainer.evaluate(same_length)
    assert not model.training and flashqla_hub.is_active(model)


PACKED = {
    "boundaries": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "flash arguments alone": {"return_flash_attn_kwargs": True},
    "sequence index alone": {"return_seq_idx": True},
    "position_ids alone": {},
}


@pytest.mark.parametrize("given", PACKED)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_equal_separate_rows(run, given, checkpointing):
    """P1, P2, P3, I7: four examples in one row against one example a row, summed over four micro-batches."""
    collator = DataCollatorWithFlattening(**PACKED[given])
    expected = run(examples(), per_device_train_batch_size=1, gradient_accumulation_steps=len(LENGTHS))
    actual = run(examples(), collator=collator, gradient_checkpointing=checkpointing)
    assert_same_run(actual, expected)


def test_packing_that_is_ignored_would_be_noticed(kernelize, tmp_path, run):
    """The comparison above fails by far for a model whose layers do not hear of boundaries."""
    expected = run(examples(), per_device_train_batch_size=1, gradient_accumulation_steps=len(LENGTHS))
    deaf = kernelize(tiny_model(FAMILY))
    deaf.model._forward_pre_hooks.clear()
    actual = train(deaf, tmp_path, examples(), collator=DataCollatorWithFlattening())
    with pytest.raises(AssertionError):
        assert_same_run(actual, expected)


def test_right_padded_rows_equal_separate_rows(run):
    """P4: the usual padding collator, labels of pads ignored."""

    def padded(rows):
        length = max(len(row["input_ids"]) for row in rows)
        pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        full = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
        return default_data_collator(
            [{key: row[key] + [pad[key]] * (length - len(row[key])) for key in pad} for row in full]
        )

    expected = run(examples(), per_device_train_batch_size=1, gradient_accumulation_steps=len(LENGTHS))
    assert_same_run(run(examples(), collator=padded), expected)


def test_loss_falls_in_a_dozen_steps(run, same_length):
    losses, seen, _ = run(same_length, steps=12)
    assert losses[-1] < 0.5 * losses[0]
    assert all(seen.active_in)
