"""Projections computed together: their outputs and gradients are those of the modules, and nothing but plain ones is bypassed."""

import copy

import pytest
import torch
from torch import nn

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_SM90 = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]
TOKENS, HIDDEN, SIZES = 70, 24, (300, 8, 8)  # one wide projection, two narrow ones


@pytest.fixture
def project(part):
    return part("projections").project


@pytest.fixture
def modules():
    return [nn.Linear(HIDDEN, size, bias=False, dtype=torch.float64) for size in SIZES]


def outcome(call, modules, x, used=(0, 1, 2)):
    """Outputs, then the gradients of x and of every weight, of a loss of some outputs."""
    leaf = x.detach().clone().requires_grad_()
    for module in modules:
        module.zero_grad()
    outputs = call(leaf, modules)
    sum((outputs[i] * outputs[i].sin()).sum() for i in used).backward()
    grads = [leaf.grad, *(parameter.grad for module in modules for parameter in module.parameters())]
    return [output.detach() for output in outputs], grads


def separately(x, modules):
    return tuple(module(x) for module in modules)


def assert_equal_up_to_rounding(found, expected):
    for x, y in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("used", [(0, 1, 2), (1, 2), (2,), (0,)])
def test_outputs_and_gradients_are_those_of_the_modules(project, modules, used):
    x = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)
    assert_equal_up_to_rounding(outcome(project, modules, x, used), outcome(separately, modules, x, used))


def test_it_is_one_operation_for_autograd(project, modules):
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert len({output.grad_fn for output in project(x, modules)}) == 1
    assert len({output.grad_fn for output in project(x[:, :3], modules)}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_token_goes_through_the_modules_where_no_kernel_is(project, dtype):
    modules = [nn.Linear(512, size, bias=False, dtype=dtype) for size in SIZES]
    x = torch.randn(1, 1, 512, dtype=dtype)
    with torch.no_grad():
        assert all(torch.equal(y, module(x)) for y, module in zip(project(x, modules), modules, strict=True))


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1, 2)])
def test_frozen_weights_get_no_gradient(project, modules, frozen):
    for i in frozen:
        modules[i].requires_grad_(False)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64)
    assert_equal_up_to_rounding(outcome(project, modules, x), outcome(separately, modules, x))


def test_input_without_gradient(project, modules):
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64)
    sum(output.sum() for output in project(x, modules)).backward()
    assert x.grad is None and all(module.weight.grad is not None for module in modules)


def test_second_derivatives_are_those_of_the_modules(project, modules):
    """What refuses them in a layer, such as its recurrence, is only reached through these."""

    def second(call):
        x = torch.linspace(-1, 1, TOKENS * HIDDEN, dtype=torch.float64).view(1, TOKENS, HIDDEN).requires_grad_()
        weights = [module.weight for module in modules]
        first = torch.autograd.grad(sum(y.sin().sum() for y in call(x, modules)), [x, *weights], create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), [x, *weights])

    for found, expected in zip(second(project), second(separately), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Doubled(nn.Linear):
    """An adapter: not what its weight says."""

    def forward(self, x):
        return 2 * super().forward(x)


class Weightless(nn.Module):
    def forward(self, x):
        return x[..., :8]


def hooked(module):
    module.register_forward_hook(lambda module, args, output: 2 * output)
    return module


def replaced(module):
    module.forward = lambda x: 2 * nn.functional.linear(x, module.weight)
    return module


def with_bias(module):
    module.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))
    return module


def parametrized(module):
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Softplus())
    return module


ODD = {
    "adapter": lambda module: Doubled(HIDDEN, 8, bias=False, dtype=torch.float64),
    "without a weight": lambda module: Weightless(),
    "hook": hooked,
    "replaced forward": replaced,
    "bias": with_bias,
    "parametrization": parametrized,
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_whatever_is_not_a_plain_linear_layer_is_called(project, modules, change):
    modules[1] = change(modules[1])
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64)
    assert_equal_up_to_rounding(outcome(project, modules, x), outcome(separately, modules, x))


def test_autocast_decides_on_the_dtype(project, modules):
    modules = [module.float() for module in modules]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = project(torch.randn(1, TOKENS, HIDDEN), modules)
    assert all(output.dtype == torch.bfloat16 for output in outputs)


def test_backward_under_autocast_keeps_the_dtype_of_the_forward(project, modules):
    modules = [module.float() for module in modules]
    x = torch.randn(1, TOKENS, HIDDEN)

    def gradients(is_enabled):
        leaf = x.clone().requires_grad_()
        loss = sum(output.square().sum() for output in project(leaf, modules))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
            return torch.autograd.grad(loss, [leaf, *(module.weight for module in modules)])

    assert all(torch.equal(y, z) for y, z in zip(gradients(True), gradients(False), strict=True))


@pytest.mark.parametrize("frozen", [(), (1,), (0, 1, 2)])
def test_input_is_kept_for_the_gradients_of_weights_alone(project, modules, frozen):
    for i in frozen:
        modules[i].requires_grad_(False)
    x, kept = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        project(x, modules)
    assert (x.shape in kept) == (len(frozen) < len(modules))


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_shapes_without_data(project, tokens):
    modules = [nn.Linear(512, size, bias=False, dtype=torch.bfloat16, device="meta") for size in SIZES]
    outputs = project(torch.empty(1, tokens, 512, dtype=torch.bfloat16, device="meta"), modules)
    assert [output.shape for output in outputs] == [(1, tokens, size) for size in SIZES]


class Quantized(torch.Tensor):
    """A weight that computes by itself, as those of torchao do in plain linear layers."""


@pytest.mark.parametrize("kind", [torch.Tensor, Quantized])
def test_a_compiled_step_leaves_other_kinds_of_weights_to_their_modules(part, monkeypatch, kind):
    projections, targets = part("projections"), []
    monkeypatch.setattr(projections, "explain_device", lambda x, op: None)  # as on a GPU that has the kernel
    modules = [nn.Linear(512, size, bias=False, dtype=torch.bfloat16) for size in SIZES]
    for module in modules:
        module.weight = nn.Parameter(module.weight.detach().as_subclass(kind))

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *_: [torch.empty(0) for _ in SIZES]

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(projections.project, fullgraph=True, backend=backend)(
            torch.randn(1, 1, 512, dtype=torch.bfloat16), modules
        )
    assert any("token_products" in target for target in targets) == (kind is torch.Tensor)


def test_weight_that_is_not_gathered_is_left_to_its_module(project, modules):
    modules[1].weight = nn.Parameter(torch.empty(0, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        project(torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64), modules)


def test_it_compiles_to_one_graph(project, modules):
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64)
    compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
    assert_equal_up_to_rounding(outcome(compiled, modules, x), outcome(separately, modules, x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_SM90)])
@pytest.mark.parametrize("sizes", [(1024, 512, 4, 4), (1024, 8)], ids=str)
def test_16_bit_gradients_are_no_worse_than_by_the_modules(project, device, sizes):
    """Beside float64: the partial gradients of x are rounded before they are added up, in either way."""
    options = {"device": device, "dtype": torch.bfloat16}
    modules = [nn.Linear(256, size, bias=False, **options) for size in sizes]
    x, weights = torch.randn(2, 100, 256, **options), [torch.randn(2, 100, size, **options) for size in sizes]

    def gradients(call, x, modules, weights):
        leaf = x.detach().requires_grad_()
        for module in modules:
            module.zero_grad()
        outputs = call(leaf, modules)
        torch.autograd.backward(outputs, weights)
        return [*outputs, leaf.grad, *(module.weight.grad for module in modules)]

    found = gradients(project, x, modules, weights)
    plain = gradients(separately, x, modules, weights)
    exact = gradients(
        separately, x.double(), [copy.deepcopy(m).double() for m in modules], [w.double() for w in weights]
    )
    for y, z, truth in zip(found, plain, exact, strict=True):
        error, allowed = ((other.double() - truth).norm() / truth.norm() for other in (y, z))
        assert error <= 1.05 * allowed
