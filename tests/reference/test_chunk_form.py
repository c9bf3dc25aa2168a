"""The yardstick of the SM90 backward: exact where nothing is rounded, and off by what 16 bits cost where operands are."""

import pytest
import torch

from flashqla_hub.reference import gated_delta_rule_backward

from ..core.compare import relative_error
from ..core.inputs import make_problem
from ..sm90.chunk_form import chunk_form_gradients, differentiated_chunk_form

TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "do", "dht")


def make_case(tokens):
    """The tensors of one sequence with a batch dimension, and their true gradients."""
    problem = make_problem(1, tokens, 1, 2, seed=40, states=(46, 47))
    tensors = q, k, v, g, beta, initial, do, dht = [getattr(problem, name) for name in TENSORS]
    options = {"dht": dht, "scale": 0.2, "initial_state": initial, "use_qk_l2norm": True}
    return tensors, gated_delta_rule_backward(q, k, v, g, beta, do, **options)


def gradients(tensors, dtype, **options):
    return chunk_form_gradients(*(x[0] for x in tensors), scale=0.2, l2norm=True, dtype=dtype, **options)


@pytest.mark.parametrize("value_scale", [1.0, 1.3])
@pytest.mark.parametrize("tokens", [0, 1, 64, 150])
def test_in_float64_it_is_the_recurrence(tokens, value_scale):
    tensors, truth = make_case(tokens)
    for ours, exact in zip(gradients(tensors, torch.float64, value_scale=value_scale), truth, strict=True):
        assert relative_error(ours, exact[0]) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(torch.bfloat16, 3e-4, 2e-2), (torch.float16, 4e-5, 2e-3)], ids=str
)
def test_rounded_operands_cost_digits_but_only_those(dtype, least, most):
    tensors, truth = make_case(150)
    for ours, exact in zip(gradients(tensors, dtype), truth, strict=True):
        assert least < relative_error(ours, exact[0]) < most


def test_autograd_of_the_form_rounds_as_much():
    tensors, truth = make_case(150)
    rounded = [x[0].bfloat16() if index < 3 or index == 6 else x[0].float() for index, x in enumerate(tensors)]
    for ours, exact in zip(differentiated_chunk_form(*rounded, scale=0.2, l2norm=True), truth, strict=True):
        assert 3e-4 < relative_error(ours, exact[0]) < 2e-2
