"""The convolution's public functions on an SM90 GPU: that the kernels serve them, eager, compiled, captured and recomputed."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .measures import relative

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]


@pytest.fixture(autouse=True)
def served(part):
    """Fail where the PyTorch path serves."""
    x, weight = torch.empty(1, 8, 1, dtype=torch.bfloat16, device="cuda"), torch.empty(8, 4, device="cuda")
    reason = part("causal_conv1d.capability").explain_unsupported(x, weight)
    if reason is not None and "library" in reason:
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*PyTorch path")
        yield


def example(tokens=300, channels=256, width=4):
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return normal(2, tokens, channels).transpose(1, 2), normal(channels, width) / 2, normal(channels)


def gradients(function, x, weight, bias):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.full_like(y, 0.25))]


def naive(x, weight, bias):
    padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
    z = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[1])
    return torch.nn.functional.silu(z)


@pytest.mark.parametrize("layout", ["channels last", "channels first"])
def test_values_and_gradients(kernel, layout):
    x, weight, bias = example()
    x = x if layout == "channels last" else x.contiguous()
    found = gradients(lambda *tensors: kernel.causal_conv1d_fn(*tensors, activation="silu"), x, weight, bias)
    truth = gradients(naive, *(tensor.double() for tensor in (x, weight, bias)))
    for actual, expected in zip(found, truth, strict=True):
        assert relative(actual, expected) <= 1.2 * relative(expected.to(torch.bfloat16), expected)
    assert found[0].transpose(1, 2).is_contiguous()


def test_compiled_and_recomputed_gradients_are_the_same_bits(kernel):
    tensors = example()

    def layer(x, weight, bias):
        return kernel.causal_conv1d_fn(x, weight, bias, activation="silu")

    expected = gradients(layer, *tensors)
    compiled = gradients(torch.compile(layer, fullgraph=True), *tensors)
    recomputed = gradients(lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False), *tensors)
    for one, other, third in zip(expected, compiled, recomputed, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


def test_packed_bounds_and_numbers_agree(kernel):
    x, weight, bias = example()
    x = x[:1]
    bounds = torch.tensor([0, 1, 100, 100, 290], device="cuda", dtype=torch.int32)
    numbers = torch.full((1, 300), -1, device="cuda")
    for n, (start, stop) in enumerate(zip([0, 1, 100], [1, 100, 290], strict=True)):
        numbers[:, start:stop] = n
    first = kernel.causal_conv1d_fn(x, weight, bias, activation="silu", cu_seqlens=bounds)
    assert torch.equal(first, kernel.causal_conv1d_fn(x, weight, bias, activation="silu", seq_idx=numbers))
    alone = kernel.causal_conv1d_fn(x[..., 1:100], weight, bias, activation="silu")
    assert torch.equal(first[..., 1:100], alone) and not first[..., 290:].any()


def test_two_parts_with_a_state_are_the_whole(kernel):
    x, weight, bias = example()
    whole, last = kernel.causal_conv1d_fn(x, weight, bias, activation="silu", return_final_states=True)
    first, state = kernel.causal_conv1d_fn(x[..., :111], weight, bias, activation="silu", return_final_states=True)
    second, final = kernel.causal_conv1d_fn(
        x[..., 111:], weight, bias, initial_states=state, activation="silu", return_final_states=True
    )
    assert torch.equal(torch.cat([first, second], dim=-1), whole) and torch.equal(final, last)
    steps = [kernel.causal_conv1d_update(x[..., t], state, weight, bias, "silu") for t in range(111, 300)]
    assert torch.equal(state, last)
    assert relative(torch.stack(steps, dim=-1), second.double()) <= 1e-3, "sums in another order"


def test_a_captured_update_runs_again(kernel):
    x, weight, bias = example(tokens=1)
    state = torch.zeros(4, 256, 4, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([2, -1], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        kernel.causal_conv1d_update(x, state.clone(), weight, bias, "silu", conv_state_indices=rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernel.causal_conv1d_update(x, state, weight, bias, "silu", conv_state_indices=rows)
        other = state.clone()
        for _ in range(3):
            graph.replay()
            expected = kernel.causal_conv1d_update(x, other, weight, bias, "silu", conv_state_indices=rows)
            assert torch.equal(y, expected) and torch.equal(state, other)


def heads_of(part, tensors):
    return part("causal_conv1d.heads").convolve_heads(*tensors, "silu", 256, 128, 64)


def test_heads_in_one_pass_are_those_of_separate_operations(part):
    x, weight, bias = example(channels=640)
    with torch.no_grad():
        fast = heads_of(part, (x, weight, bias))
        slow = heads_of(part, (tensor.double().cpu() for tensor in (x, weight, bias)))
    assert fast.is_normed and not slow.is_normed
    q, k = (z * torch.rsqrt(z.square().sum(-1, keepdim=True) + 1e-6) for z in slow[:2])
    for actual, expected in zip(fast[:3], (q, k, slow.v), strict=True):
        expected = expected.cuda()
        assert relative(actual, expected) <= 1.2 * relative(expected.to(torch.bfloat16), expected)


def test_heads_with_gradients_are_a_split_of_the_convolution(kernel, part):
    """Bit for bit, whether recomputed, compiled or neither."""
    tensors = example(channels=640)
    convolve_heads = part("causal_conv1d.heads").convolve_heads

    def whole(x, weight, bias):
        y = kernel.causal_conv1d_fn(x, weight, bias, activation="silu").transpose(1, 2)
        return y.split((256, 256, 128), dim=2)

    def in_parts(*tensors):
        return tuple(heads.flatten(2) for heads in convolve_heads(*tensors, "silu", 256, 128, 64)[:3])

    def results(function):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        outputs = function(*leaves)
        return [*outputs, *torch.autograd.grad(outputs, leaves, [torch.full_like(t, 0.25) for t in outputs])]

    expected = results(whole)
    for function in (
        in_parts,
        torch.compile(in_parts, fullgraph=True),
        lambda *tensors: checkpoint(in_parts, *tensors, use_reentrant=False),
    ):
        assert all(torch.equal(a, b) for a, b in zip(results(function), expected, strict=True))
