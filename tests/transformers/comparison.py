"""How far two results of one model may lie apart, and the runs that are compared."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Float32, kernelized against plain: the same sums in another order.
LOGITS = 2e-5
LOSS_AND_GRADIENTS = 1e-4


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance."""
    assert actual.shape == expected.shape
    scale = expected.norm().item()
    return (actual - expected).norm().item() / scale if scale > 0 else actual.norm().item()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = LOGITS) -> None:
    """Raise unless `actual` is finite and within the relative Frobenius distance `tolerance` of `expected`."""
    assert torch.isfinite(actual).all()
    assert distance(actual, expected) <= tolerance


def loss_and_gradients(model: PreTrainedModel, **batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a forward in training mode, and the gradient of each parameter that gets one."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def assert_same_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Each gradient within tolerance, none missing, and those of the gates not all zero."""
    assert actual.keys() == expected.keys()
    assert any(gradient.norm() > 0 for name, gradient in expected.items() if "A_log" in name)
    for name, gradient in expected.items():
        assert torch.isfinite(actual[name]).all(), name
        assert distance(actual[name], gradient) <= LOSS_AND_GRADIENTS, name
