"""The SM90 kernels of the gated norm behind the public function, against float64 and beside the PyTorch path.

An error may be 1.2 times that of the PyTorch path, which rounds where transformers does.
"""

import pytest
import torch

from .measures import relative

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

SLACK, EPS = 1.2, 1e-6
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MANY_ROWS = 1 << 20  # have a backward kernel of their own
SHAPES = [(128,), (1, 128), (7, 128), (33, 1, 128), (5, 3, 128), (2, 65, 4, 128), (3001, 2, 128), (20000, 128)]
SHAPES += [(MANY_ROWS, 128), (MANY_ROWS // 3 + 1, 3, 128)]
GRADIENTS = ("dx", "dg", "dweight")


@pytest.fixture(autouse=True)
def _library(part):
    """These tests are about the compiled kernels, which not every build carries."""
    x = torch.empty(1, 128, dtype=torch.bfloat16, device="cuda")
    reason = part("gated_norm.capability").explain_unsupported(x, x, x[0], None)
    if reason is not None:
        pytest.skip(f"{reason}; FLASHQLA_TEST_VARIANT names the folder of a variant that has one")


def make_inputs(shape, dtype, weight_dtype, strided=False):
    """x, g, weight and dy; strided ones are parts of wider rows, the rest of which is NaN."""
    wide = torch.full((*shape[:-1], 3 * 128), torch.nan, dtype=dtype, device="cuda")
    x, g, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    if strided:
        wide[..., :128], wide[..., 256:] = x, g
        x, g = wide[..., :128], wide[..., 256:]
    return x, g, (1 + torch.randn(128, device="cuda") / 4).to(weight_dtype), dy


def differentiate(function, x, g, weight, dy, activation):
    """y and the gradients of x, g and the weight."""
    inputs = [tensor.detach().requires_grad_() for tensor in (x, g, weight)]
    y = function(*inputs, None, activation, EPS)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("weight_is_wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_as_exact_as_on_the_pytorch_path(
    kernel, part, shape, dtype, weight_is_wide, activation
):
    dtype = DTYPES[dtype]
    inputs = make_inputs(shape, dtype, torch.float32 if weight_is_wide else dtype)
    truth = differentiate(part("gated_norm.torch_path").forward, *(x.double() for x in inputs), activation)
    yardstick = differentiate(part("gated_norm.torch_path").forward, *inputs, activation)
    for name, actual, rounded, exact in zip(
        ("y", *GRADIENTS), differentiate(kernel.rms_norm_gated, *inputs, activation), yardstick, truth, strict=True
    ):
        assert actual.dtype == rounded.dtype and actual.shape == rounded.shape
        assert relative(actual, exact) <= SLACK * relative(rounded, exact) + 1e-6, name


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_values_round_where_the_pytorch_path_does(kernel, part, activation):
    """Bits differ only where sums in another order fall on the other side of a rounding."""
    x, g, weight, _ = make_inputs((4096, 128), torch.bfloat16, torch.bfloat16)
    ours = kernel.rms_norm_gated(x, g, weight, None, activation, EPS)
    assert (ours != part("gated_norm.torch_path").forward(x, g, weight, None, activation, EPS)).float().mean() < 0.02


@pytest.mark.parametrize("shape", [(129, 4, 128), (2, 33, 3, 128), (MANY_ROWS // 4, 4, 128)], ids=str)
def test_parts_of_wider_rows_give_the_same_bits(kernel, shape):
    torch.manual_seed(1)
    plain = make_inputs(shape, torch.bfloat16, torch.float32)
    torch.manual_seed(1)
    strided = make_inputs(shape, torch.bfloat16, torch.float32, strided=True)
    for one, other in zip(
        differentiate(kernel.rms_norm_gated, *plain, "silu"),
        differentiate(kernel.rms_norm_gated, *strided, "silu"),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(65, 128), (MANY_ROWS, 128)], ids=str)
@pytest.mark.parametrize("weight_is_wide", [False, True], ids=["narrow", "wide"])
def test_a_sigmoid_of_an_infinite_gate_is_0_or_1(kernel, shape, weight_is_wide):
    x, g, weight, dy = make_inputs(shape, torch.float16, torch.float32 if weight_is_wide else torch.float16)
    g[:, ::2] = 60_000.0
    g[:, 1::2] = -60_000.0
    finite = differentiate(kernel.rms_norm_gated, x, g, weight, dy, "sigmoid")
    infinite = differentiate(kernel.rms_norm_gated, x, g * 2, weight, dy, "sigmoid")
    for one, other in zip(finite, infinite, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


def test_gradients_repeat_bit_for_bit(kernel):
    inputs = make_inputs((50_000, 128), torch.bfloat16, torch.bfloat16)
    first = differentiate(kernel.rms_norm_gated, *inputs, "silu")
    for _ in range(20):
        for one, other in zip(first, differentiate(kernel.rms_norm_gated, *inputs, "silu"), strict=True):
            assert torch.equal(one, other)


def test_every_element_is_written(kernel):
    """Freed memory is full of NaN, so that what is left unwritten shows."""
    inputs = make_inputs((777, 3, 128), torch.bfloat16, torch.bfloat16)
    poison = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(16)]
    del poison
    assert all(x.isfinite().all() for x in differentiate(kernel.rms_norm_gated, *inputs, "silu"))


def test_a_gradient_of_one_number_for_all(kernel, part):
    x, g, weight, _ = make_inputs((65, 2, 128), torch.bfloat16, torch.float32)
    one = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(65, 2, 128)
    expanded = differentiate(kernel.rms_norm_gated, x, g, weight, one, "silu")
    for a, b in zip(expanded, differentiate(kernel.rms_norm_gated, x, g, weight, one.clone(), "silu"), strict=True):
        assert torch.equal(a, b)


def test_no_rows_give_no_rows_and_a_zero_gradient(kernel):
    x, g, weight, dy = make_inputs((0, 128), torch.bfloat16, torch.float32)
    y, dx, dg, dweight = differentiate(kernel.rms_norm_gated, x, g, weight, dy, "silu")
    assert y.shape == dx.shape == dg.shape == (0, 128) and dweight.count_nonzero() == 0


def test_a_captured_step_serves_other_numbers(kernel):
    static = make_inputs((500, 128), torch.bfloat16, torch.float32)
    differentiate(kernel.rms_norm_gated, *static, "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiate(kernel.rms_norm_gated, *static, "silu")
    fresh = make_inputs((500, 128), torch.bfloat16, torch.float32)
    for place, tensor in zip(static, fresh, strict=True):
        place.copy_(tensor)
    graph.replay()
    for one, other in zip(captured, differentiate(kernel.rms_norm_gated, *fresh, "silu"), strict=True):
        assert torch.equal(one, other)


def test_compiled_whole_it_gives_the_same_bits(kernel):
    inputs = make_inputs((100, 4, 128), torch.bfloat16, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(kernel.rms_norm_gated, fullgraph=True)
    for one, other in zip(
        differentiate(kernel.rms_norm_gated, *inputs, "silu"), differentiate(compiled, *inputs, "silu"), strict=True
    ):
        assert torch.equal(one, other)


def test_more_than_two_billion_elements(kernel):
    """Rows at both ends of 2^31 + 4096 elements; in between addresses pass 32 bits."""
    rows = (1 << 24) + 32
    x = torch.empty(rows, 128, dtype=torch.bfloat16, device="cuda")
    g, weight = torch.ones_like(x), torch.ones(128, device="cuda")
    x[:40], x[40:-40] = 2, 1
    x[-40:] = torch.randn(40, 128, device="cuda").bfloat16()
    y = kernel.rms_norm_gated(x, g, weight)
    assert torch.equal(y[-40:], kernel.rms_norm_gated(x[-40:].clone(), g[-40:].clone(), weight))
    assert torch.equal(y[:40], kernel.rms_norm_gated(x[:40].clone(), g[:40].clone(), weight))
