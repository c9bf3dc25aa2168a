"""The SM90 gate kernels behind the public function, against float64.

Gates and their gradients are float32 inside: an error may be 1.2 times that of PyTorch's own float32 operations on the same
inputs, and a rounding of float32 on top for the fast reciprocal; for sums over tokens, a rounding of what they add up.
"""

import pytest
import torch

from .measures import kernels_of, relative

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

SLACK, ROUNDING = 1.2, 2.0**-22
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = [(1, 1, 1), (1, 5, 4), (2, 33, 48), (1, 1000, 32), (3, 70, 300), (1, 40_000, 8)]
NAMES = ("g", "beta", "da", "db", "dA_log", "ddt_bias")


@pytest.fixture
def ops(part):
    module = part("gated_delta_rule.gate_ops")
    x = torch.empty(1, 1, 1, device="cuda")
    reason = module.explain_unsupported(x, x, x[0, 0], None)
    if reason is not None:
        pytest.skip(f"{reason}; FLASHQLA_TEST_VARIANT names the folder of a variant that has one")
    return module


def make_inputs(shape, dtype, parameter_dtype, spread=3.0):
    """a and b as parts of one projection, A_log, dt_bias, and gradients of g and beta."""
    heads = shape[2]
    projection = (spread * torch.randn(*shape[:2], 2 * heads, device="cuda")).to(dtype)
    a, b = projection.split(heads, dim=-1)
    A_log, dt_bias = (torch.randn(heads, device="cuda").to(parameter_dtype) for _ in range(2))
    return (a, b, A_log, dt_bias), (torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda"))


def by_pytorch(a, b, A_log, dt_bias, double):
    decay = -A_log.exp() * torch.nn.functional.softplus(a if dt_bias is None else a + dt_bias)
    return decay, (2 if double else 1) * b.sigmoid()


def differentiate(function, inputs, grads):
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, inputs, grads)]


@pytest.mark.parametrize("double", [False, True], ids=["beta-below-1", "beta-below-2"])
@pytest.mark.parametrize("parameters_are_wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_and_gradients_match_float64(ops, shape, dtype, parameters_are_wide, double):
    dtype = DTYPES[dtype]
    inputs, grads = make_inputs(shape, dtype, torch.float32 if parameters_are_wide else dtype)
    exact = differentiate(lambda *x: by_pytorch(*x, double), [x.double() for x in inputs], [x.double() for x in grads])
    single = differentiate(lambda *x: by_pytorch(*x, double), [x.float() for x in inputs], grads)
    ours = differentiate(lambda *x: ops.activate(*x, double), inputs, grads)
    dtypes = (torch.float32, torch.float32, *(x.dtype for x in inputs))
    for name, actual, yardstick, truth, expected in zip(NAMES, ours, single, exact, dtypes, strict=True):
        assert actual.dtype == expected and actual.shape == truth.shape
        added = {"dA_log": grads[0] * exact[0], "ddt_bias": exact[2]}.get(name, truth).abs()
        added = added.sum((0, 1)) if name in ("dA_log", "ddt_bias") else added
        allowed = SLACK * relative(yardstick.to(expected), truth) + ROUNDING * (added.norm() / truth.norm()).item()
        assert relative(actual, truth) <= allowed, name


def test_extreme_inputs(ops):
    a = torch.tensor([-200.0, -30.0, 0.0, 19.9, 20.1, 500.0], device="cuda")[None, :, None].expand(1, 6, 2)
    A_log = torch.tensor([0.0, -torch.inf], device="cuda")
    g, beta = ops.activate(a, a, A_log, None, False)
    expected = by_pytorch(a.double(), a.double(), A_log.double(), None, False)
    assert torch.allclose(g.double(), expected[0], rtol=1e-6, atol=1e-38)
    assert torch.allclose(beta.double(), expected[1], rtol=1e-6, atol=1e-38)


def test_one_of_the_two_alone(ops):
    (a, b, A_log, dt_bias), (dg, dbeta) = make_inputs((2, 33, 5), torch.bfloat16, torch.float32)
    both = differentiate(lambda *x: ops.activate(*x, True), (a, b, A_log, dt_bias), (dg, dbeta))
    g = differentiate(lambda a, A, d: ops.activate(a, None, A, d, True)[:1], (a, A_log, dt_bias), (dg,))
    beta = differentiate(lambda b: ops.activate(None, b, None, None, True)[1:], (b,), (dbeta,))
    assert all(torch.equal(g[i], both[j]) for i, j in enumerate((0, 2, 4, 5)))
    assert all(torch.equal(beta[i], both[j]) for i, j in enumerate((1, 3)))


def test_gradients_repeat_bit_for_bit(ops):
    inputs, grads = make_inputs((1, 30_000, 32), torch.bfloat16, torch.bfloat16)
    first = differentiate(lambda *x: ops.activate(*x, False), inputs, grads)
    for _ in range(20):
        again = differentiate(lambda *x: ops.activate(*x, False), inputs, grads)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_one_launch_forward(ops):
    inputs, _ = make_inputs((1, 1000, 32), torch.bfloat16, torch.float32)
    with torch.no_grad():
        kernels = kernels_of(lambda: ops.activate(*inputs, False))
    assert len(kernels) == 1, kernels


def test_the_public_function_takes_raw_gates(kernel, ops):
    """Raw gates through the kernel equal gates that PyTorch activates in float32."""
    inputs, _ = make_inputs((1, 100, 4), torch.bfloat16, torch.float32)
    q, k = (torch.nn.functional.normalize(torch.randn(1, 100, 2, 128, device="cuda"), dim=-1).bfloat16() for _ in "qk")
    v = torch.randn(1, 100, 4, 128, device="cuda").bfloat16()
    a, b, A_log, dt_bias = inputs
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True}
    with torch.no_grad():
        raw, _ = kernel.chunk_gated_delta_rule(q, k, v, a, b, **options)
        g, beta = by_pytorch(a.float(), b.float(), A_log, dt_bias, False)
        activated, _ = kernel.chunk_gated_delta_rule(q, k, v, g, beta)
    assert relative(raw, activated.double()) <= 1e-3


def test_no_tokens(ops):
    inputs, grads = make_inputs((1, 0, 4), torch.bfloat16, torch.float32)
    *_, dA_log, ddt_bias = differentiate(lambda *x: ops.activate(*x, False), inputs, grads)
    assert dA_log.count_nonzero() == 0 and ddt_bias.count_nonzero() == 0
