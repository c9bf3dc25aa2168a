"""One tiny call of a loaded kernel against the token recurrence in float64; imported by the tests' fresh processes."""

import torch


def token_recurrence(q, k, v, g, beta):
    """(o [B, T, HV, V], state [B, HV, K, V]) of the gated delta rule, token by token, in float64."""
    group = v.shape[2] // q.shape[2]
    q, k = (x.double().repeat_interleave(group, dim=2) for x in (q, k))
    v, g, beta = (x.double() for x in (v, g, beta))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        state = torch.exp(g[:, t])[..., None, None] * state
        error = v[:, t] - (k[:, t, :, None, :] @ state)[..., 0, :]
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[..., None, :]
        outputs.append((q[:, t, :, None, :] @ state)[..., 0, :] * k.shape[3] ** -0.5)
    return torch.stack(outputs, dim=1), state


def assert_computes(kernel):
    """Outputs, final state and all gradients of `kernel.chunk_gated_delta_rule`, in float32, within its tolerances."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 70, 1, 8), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(2, 70, 2, 4), -torch.rand(2, 70, 2), torch.rand(2, 70, 2)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    cotangents = torch.randn(2, 70, 2, 4), torch.randn(2, 2, 8, 4)
    actual = kernel.chunk_gated_delta_rule(*inputs, output_final_state=True)
    expected = token_recurrence(*inputs)
    gradients = torch.autograd.grad(actual, inputs, cotangents)
    expected_gradients = torch.autograd.grad(expected, inputs, [x.double() for x in cotangents])
    _assert_close(actual, expected, 2e-5)
    _assert_close(gradients, expected_gradients, 1e-4)


def _assert_close(actual, expected, tolerance):
    for x, reference in zip(actual, expected, strict=True):
        error = ((x.double() - reference).norm() / reference.norm()).item()
        assert error <= tolerance, f"relative error {error:.1e} of a tensor {list(x.shape)}"
