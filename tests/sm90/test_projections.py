"""Projections of a layer's input on an SM90 GPU: a few tokens by one launch, many as one operation for autograd."""

import pytest
import torch
from torch import nn

from .measures import kernels_of

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative error of one rounding, at most


def make(dtype, width, sizes):
    modules = [nn.Linear(width, size, bias=False, device="cuda", dtype=dtype) for size in sizes]
    return modules, lambda *shape: torch.randn(*shape, width, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("tokens", [(1, 1), (2, 1), (3, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("sizes", [(8192, 4096, 32, 32), (2048,), (6144, 6144, 48), (17, 1, 40, 333)], ids=str)
@pytest.mark.parametrize("width", [512, 2048, 2560, 5120])
def test_few_tokens_are_products_rounded_once(part, dtype, tokens, sizes, width):
    modules, draw = make(dtype, width, sizes)
    x = draw(*tokens)
    with torch.no_grad():
        outputs = part("projections").project(x, modules)
        for y, module in zip(outputs, modules, strict=True):
            exact = x.double() @ module.weight.double().T
            scale = x.double().abs() @ module.weight.double().abs().T  # what float32 sums lose is far below it
            assert y.shape == exact.shape and y.dtype == dtype and y.is_contiguous()
            assert ((y.double() - exact).abs() <= 1.01 * UNIT[dtype] * exact.abs() + 2e-6 * scale).all()


def test_few_tokens_take_one_launch_and_repeat_their_bits(part):
    modules, draw = make(torch.bfloat16, 2048, (8192, 4096, 32, 32))
    x, project = draw(4, 1), part("projections").project
    with torch.no_grad():
        assert len(kernels_of(lambda: project(x, modules))) == 1
        first = [y.clone() for y in project(x, modules)]
        for _ in range(20):
            assert all(torch.equal(y, z) for y, z in zip(first, project(x, modules), strict=True))


def test_few_tokens_compile_to_one_graph_with_that_launch(part):
    modules, draw = make(torch.bfloat16, 2048, (8192, 4096, 32, 32))
    x, project = draw(1, 1), part("projections").project
    compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert all(torch.equal(y, z) for y, z in zip(compiled(x, modules), project(x, modules), strict=True))
        assert len(kernels_of(lambda: compiled(x, modules))) == 1


def test_a_token_does_not_depend_on_the_others(part):
    """Up to four tokens are one program, so a row of a batch of three has the bits that it has in one of four."""
    modules, draw = make(torch.bfloat16, 2048, (300, 32))
    x, project = draw(4, 1), part("projections").project
    with torch.no_grad():
        for y, z in zip(project(x, modules), project(x[:3], modules), strict=True):
            assert torch.equal(y[:3], z)


def test_a_token_may_lie_anywhere(part):
    modules, draw = make(torch.bfloat16, 512, (64, 32))
    x, odd = draw(2, 2), torch.empty(2 * 512 + 1, device="cuda", dtype=torch.bfloat16)
    shifted = odd[1:].view(2, 1, 512).copy_(x[:, :1])
    with torch.no_grad():
        expected = part("projections").project(x[:, :1].contiguous(), modules)
        for view in (x[:, :1], shifted):
            found = part("projections").project(view, modules)
            assert all(torch.equal(y, z) for y, z in zip(found, expected, strict=True))


@pytest.mark.parametrize("change", ["five tokens", "another width", "gradients", "float32", "autocast"])
def test_what_the_kernel_does_not_take_goes_through_the_modules(part, change):
    width, dtype = (520 if change == "another width" else 512), torch.float32 if change == "float32" else torch.bfloat16
    modules, draw = make(dtype, width, (64, 32, 8, 8))
    x = draw(5 if change == "five tokens" else 2, 1)
    with torch.set_grad_enabled(change == "gradients"), torch.autocast("cuda", torch.float16, change == "autocast"):
        outputs = part("projections").project(x, modules)
        for y, module in zip(outputs, modules, strict=True):
            assert torch.equal(y, module(x))
            assert (y.grad_fn is not None) == (change == "gradients")
