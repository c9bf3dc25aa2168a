"""`kernels benchmark <absolute path of this repository>`: the gated delta rule, forward and backward, small shapes.

The runner loads the kernel, times each `benchmark_*` and compares `out` with what `verify_*` returns, which it also
times. Its comparison allows an absolute 0.01 whatever the data; `verify_*` itself holds every tensor to the relative
tolerance of the kernel's tests, and raises beyond it.
"""

import torch
from kernels.benchmark import Benchmark

# Relative error (Frobenius) against the token recurrence, by dtype of q: o, and the gradients of q, k, v, g, beta.
OUTPUT_TOLERANCE = {torch.float32: [2e-5], torch.bfloat16: [6e-3]}
GRADIENT_TOLERANCE = {torch.float32: [1e-4] * 5, torch.bfloat16: [1e-2, 1e-2, 1e-2, 2e-2, 1e-2]}
BATCH, TOKENS, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 256, 2, 4, 128, 128
SCALE = 0.1  # of v and of the output's gradient; keeps the rounding of bfloat16 below the runner's absolute 0.01


def token_recurrence(q, k, v, g, beta):
    """The rule one token at a time, in float64: S <- e^g S; d = beta (v - S^T k); S <- S + k d^T; o = K^-0.5 S^T q.

    q, k [B, T, H, K]; v [B, T, HV, V]; g, beta [B, T, HV]; returns o [B, T, HV, V] in float64.
    """
    group = v.shape[2] // q.shape[2]
    q, k = (x.double().repeat_interleave(group, dim=2) for x in (q, k))
    v, g, beta = (x.double() for x in (v, g, beta))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        prediction = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        correction = beta[:, t, :, None] * (v[:, t] - prediction)
        state = state + k[:, t, :, :, None] * correction[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1) * k.shape[3] ** -0.5


class GatedDeltaRule(Benchmark):
    """`chunk_gated_delta_rule` on inputs like a model's: unit keys and queries, gates that mostly decay slowly."""

    seed = 0

    def setup(self):
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        rows = (BATCH, TOKENS)
        q, k = (torch.randn(*rows, KEY_HEADS, KEY_DIM, device=self.device) for _ in range(2))
        q, k = (torch.nn.functional.normalize(x, dim=-1).to(self.dtype) for x in (q, k))
        v = SCALE * torch.randn(*rows, VALUE_HEADS, VALUE_DIM, device=self.device, dtype=self.dtype)
        g = torch.nn.functional.logsigmoid(torch.randn(*rows, VALUE_HEADS, device=self.device) + 4)
        beta = torch.rand(*rows, VALUE_HEADS, device=self.device)
        self.inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
        self.do = SCALE * torch.randn(v.shape, device=self.device, dtype=self.dtype)

    def benchmark_forward(self):
        with torch.no_grad():
            self.out, _ = self.kernel.chunk_gated_delta_rule(*self.inputs)

    def verify_forward(self):
        with torch.no_grad():
            expected = token_recurrence(*self.inputs)
        return self._agreed([self.out], [expected], OUTPUT_TOLERANCE)

    def benchmark_forward_and_backward(self):
        o, _ = self.kernel.chunk_gated_delta_rule(*self.inputs)
        self.gradients = torch.autograd.grad(o, self.inputs, self.do)
        self.out = _flat(self.gradients)

    def verify_forward_and_backward(self):
        o = token_recurrence(*self.inputs)
        expected = torch.autograd.grad(o, self.inputs, self.do.double())
        return self._agreed(self.gradients, expected, GRADIENT_TOLERANCE)

    def _agreed(self, actual, expected, tolerances):
        """`expected` in the form of `out`, after holding each tensor to its tolerance."""
        for x, reference, tolerance in zip(actual, expected, tolerances[self.dtype], strict=True):
            error = ((x.double() - reference).norm() / reference.norm()).item()
            if not error <= tolerance:
                raise RuntimeError(f"relative error {error:.1e} is above {tolerance:.0e}; do not trust these times.")
        return (expected[0] if len(expected) == 1 else _flat(expected)).to(self.out.dtype)


def _flat(tensors):
    return torch.cat([x.flatten() for x in tensors])
