"""Laws of the gated norm: weight * rms_norm(x) + bias, times the activated gate."""

import pytest
import torch
from torch import Tensor

from .compare import assert_refuses, relative_error
from .inputs import signed

ACTIVATIONS = {"silu": lambda g: g * g.sigmoid(), "swish": lambda g: g * g.sigmoid(), "sigmoid": torch.sigmoid}


def example(*shape: int, seed: int = 980) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, gate, weight, bias and a gradient of y."""
    size = shape[-1:]
    return tuple(3 * signed(part, seed + i) for i, part in enumerate((shape, shape, size, size, shape)))


def naive(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, activation: str, eps: float) -> Tensor:
    y = weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return (y if bias is None else y + bias) * ACTIVATIONS[activation](g)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(7,), (5, 1), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_values_and_gradients(kernel, activation, with_bias, shape, eps):
    *inputs, dy = example(*shape)
    if not with_bias:
        del inputs[3]
    fast, slow = ([x.detach().requires_grad_() for x in inputs] for _ in range(2))
    out = kernel.rms_norm_gated(*fast, activation=activation, eps=eps)
    expected = naive(*slow[:3], slow[3] if with_bias else None, activation, eps)
    assert relative_error(out.detach(), expected.detach()) <= 1e-12
    for actual, exact in zip(torch.autograd.grad(out, fast, dy), torch.autograd.grad(expected, slow, dy), strict=True):
        assert relative_error(actual, exact) <= 1e-9


def test_swish_is_the_default_and_silu_by_another_name(kernel):
    x, g, weight, _, _ = example(4, 16)
    default = kernel.rms_norm_gated(x, g, weight)
    for name in ("silu", "swish"):
        assert torch.equal(kernel.rms_norm_gated(x, g, weight, activation=name), default)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_16_bit_values_round_where_transformers_does(kernel, dtype, weight_dtype):
    """The normalised values to x's dtype, then the weight, then the gate in float32, and once more at the end."""
    x, g, weight, _, _ = example(64, 128)
    x, g, weight = x.to(dtype), g.to(dtype), weight.to(weight_dtype)
    out = kernel.rms_norm_gated(x, g, weight)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = (weight * normed.to(dtype)) * torch.nn.functional.silu(g.float())
    assert out.dtype == dtype and torch.equal(out, expected.to(dtype))


def test_large_16_bit_values_do_not_overflow(kernel):
    """Squares of float16 values leave its range."""
    x = torch.full((2, 8), 6e4, dtype=torch.float16)
    out = kernel.rms_norm_gated(x, torch.ones_like(x), torch.ones(8, dtype=torch.float16), activation="sigmoid")
    assert torch.allclose(out.float(), torch.tensor(1.0).sigmoid(), rtol=1e-3)


def test_zero_rows_give_zeros_and_finite_gradients(kernel):
    x = torch.zeros(2, 8, requires_grad=True)
    out = kernel.rms_norm_gated(x, torch.ones(2, 8), torch.ones(8))
    out.sum().backward()
    assert out.count_nonzero() == 0 and torch.isfinite(x.grad).all()


def test_autocast_changes_no_bit(kernel):
    x, g, weight, bias, _ = (x.float() for x in example(4, 16))
    plain = kernel.rms_norm_gated(x, g, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kernel.rms_norm_gated(x, g, weight, bias), plain)


def test_views_equal_contiguous_tensors_and_inputs_are_left_alone(kernel):
    x, g, weight, _, _ = example(6, 4, 16)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    kept = turned.clone()
    assert relative_error(kernel.rms_norm_gated(turned, g, weight), kernel.rms_norm_gated(x, g, weight)) <= 1e-12
    assert torch.equal(turned, kept)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_empty_inputs_give_empty_outputs(kernel, shape):
    x = torch.empty(shape)
    assert kernel.rms_norm_gated(x, x, torch.ones(shape[-1])).shape == shape


REFUSALS = {
    "an unknown activation": (
        {"activation": "gelu"},
        ValueError,
        "activation is 'gelu'; it must be one of silu, swish, sigmoid: apply others to the gate yourself.",
    ),
    "no gate": ({"g": None}, TypeError, "g is NoneType; it must be a tensor: convert it with torch.as_tensor."),
    "integers": (
        {"x": torch.ones(2, 8, dtype=torch.int64)},
        TypeError,
        "x has dtype torch.int64; it must be bfloat16, float16, float32 or float64: pass x.float().",
    ),
    "a weight elsewhere": (
        {"weight": torch.ones(8, device="meta")},
        ValueError,
        "weight is on meta and x on cpu; all inputs must share a device: pass weight.to(x.device).",
    ),
    "a number": (
        {"x": torch.ones(()), "g": torch.ones(())},
        ValueError,
        "x has shape []; it must be [..., D]: unsqueeze it.",
    ),
    "a gate of another shape": (
        {"g": torch.ones(8)},
        ValueError,
        "g has shape [8] and x [2, 8]; the gate must match the values: reshape it.",
    ),
    "a weight of another size": (
        {"weight": torch.ones(4)},
        ValueError,
        "weight has shape [4]; it must be [8], the last dimension of x: reshape x so that the normalised values come last.",
    ),
    "a bias of another size": (
        {"bias": torch.ones(2, 8)},
        ValueError,
        "bias has shape [2, 8]; it must be [8], the last dimension of x: reshape x so that the normalised values come last.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_refused_in_one_sentence(kernel, case):
    changes, error, sentence = REFUSALS[case]
    good = {"x": torch.ones(2, 8), "g": torch.ones(2, 8), "weight": torch.ones(8)}
    assert_refuses(kernel.rms_norm_gated, {**good, **changes}, error, sentence)
