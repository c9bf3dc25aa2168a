"""Proof on the user's own model and text that packed documents are kept apart."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .settings import FinetuneError, Settings
from .text import Rows
from .training import flatten

# A packed row must come this many times closer to its documents one by one than the same row does with its bounds ignored.
CLOSER = 3.0


def verify(model: PreTrainedModel, rows: Rows, settings: Settings) -> str:
    """Compare loss and gradients of one packed row with those of its documents one by one; return what was found.

    The measure is what the same row gives as unbroken text: were bounds ignored, both would be alike. The row is the
    first one that holds several documents.

    Raises:
        FinetuneError: no row holds several documents, or the packed row is not nearer to its documents; one sentence.
    """
    row = next((row for row in map(rows.__getitem__, range(len(rows))) if len(row["segments"]) > 1), None)
    if row is None:
        raise FinetuneError(
            "no row holds several documents, so there is no packing to verify; bring several documents "
            "(a folder or a .jsonl file), or raise --seq-len."
        )
    segments = row["segments"]
    one_by_one = [flatten([{"segments": [segment]}]) for segment in segments if len(segment["input_ids"]) > 1]
    together = flatten([row])
    unbroken = {name: together[name] for name in ("input_ids", "labels")}
    _, truth = loss_and_gradients(model, one_by_one, settings)
    packed = _distance(loss_and_gradients(model, [together], settings)[1], truth)
    ignored = _distance(loss_and_gradients(model, [unbroken], settings)[1], truth)
    found = (
        f"a row of {len(segments)} documents: its gradients differ from those of the documents one by one by {packed:.1e}, "
        f"with the bounds ignored by {ignored:.1e}"
    )
    if not packed * CLOSER <= ignored:
        raise FinetuneError(f"packed documents are not kept apart in {found}.")
    return found


def loss_and_gradients(
    model: PreTrainedModel, batches: list[dict], settings: Settings
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over all predicted tokens of the batches, and its gradients by name of parameter."""
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    model.train()
    model.zero_grad()
    mean = 0.0
    for batch, count in zip(batches, counts, strict=True):
        with _autocast(settings)():
            moved = {key: x.to(settings.device) if isinstance(x, Tensor) else x for key, x in batch.items()}
            loss = model(**moved, use_cache=False).loss * (count / sum(counts))
        loss.backward()
        mean += loss.item()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return mean, gradients


def _autocast(settings: Settings) -> Callable:
    if settings.precision != "mixed":
        return nullcontext
    return lambda: torch.autocast(torch.device(settings.device).type, torch.bfloat16)


def _distance(gradients: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """|gradients - others| / |others| over all parameters at once."""
    error, whole = sum(squares(gradients[name], others[name]).cpu() for name in gradients.keys() | others.keys())
    return (error / whole).sqrt().item()


def squares(gradient: Tensor, other: Tensor) -> Tensor:
    """|gradient - other|^2 and |other|^2 of one parameter, [2] in float64."""
    gradient, other = gradient.float(), other.float()
    return torch.stack([(gradient - other).square().sum(), other.square().sum()]).double()
