"""The yardstick of 16-bit precision: the chunk form in PyTorch with rounded matmul operands, on any device and length.

Products accumulate in float32, and gates, state and the inverse stay in float32 or wider. Gradients come from autograd, with
the operands of the backward's products rounded alike; among them are states and their gradients, which a backward by chunks
keeps in 16 bits.
"""

import torch
from torch import Tensor

CHUNK = 64


def chunk_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """o [T, HV, V] in the dtype of v and the final state [HV, K, V] in float32 of one sequence without a batch dimension."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(v.dtype).float()

    group, strongest = v.shape[1] // q.shape[1], -1e4
    q, k, v32 = (x.float() for x in (q, k, v))
    if l2norm:
        q, k = (rounded(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)) for x in (q, k))
    q, k = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (q, k))
    values, gates, strengths = v32.transpose(0, 1), g.double().clamp(min=strongest).T, beta.float().T
    S = (
        torch.zeros(v.shape[1], q.shape[2], v.shape[2], device=v.device)
        if initial_state is None
        else initial_state.float()
    )
    outputs = [torch.empty(v.shape[1], 0, v.shape[2], device=v.device)]
    for start in range(0, v.shape[0], CHUNK):
        Q, K, V, b = (x[:, start : start + CHUNK] for x in (q, k, values, strengths))
        G = gates[:, start : start + CHUNK].cumsum(1)
        lower = torch.ones(2 * G.shape[1:], dtype=torch.bool, device=v.device).tril()
        D = torch.where(lower, G[:, :, None] - G[:, None], -torch.inf).exp().float()
        identity = torch.eye(G.shape[1], device=v.device)
        A = torch.linalg.inv((identity + (b[..., None] * (K @ K.mT) * D).tril(-1)).double()).float() * b[:, None]
        gamma, to_end = G.exp().float()[..., None], (G[:, -1:] - G).exp().float()[..., None]
        read = rounded(S)
        N = rounded(A) @ rounded(V - gamma * (K @ read))
        outputs.append(scale * gamma * (Q @ read) + rounded(scale * (Q @ K.mT) * D) @ rounded(N))
        S = gamma[:, -1:] * S + K.mT @ rounded(to_end * N)
    return torch.cat(outputs, 1).transpose(0, 1).to(v.dtype), S


class RoundedProduct(torch.autograd.Function):
    """a @ b on operands rounded to `dtype`, forward and backward."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return _round(a, dtype) @ _round(b, dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        grad = _round(grad, ctx.dtype)
        return grad @ _round(b, ctx.dtype).mT, _round(a, ctx.dtype).mT @ grad, None


class DecayedState(torch.autograd.Function):
    """decay * S, whose gradient of the decay comes from the rounded state and its rounded gradient."""

    @staticmethod
    def forward(ctx, decay: Tensor, S: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(decay, S)
        ctx.dtype = dtype
        return decay * S

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        decay, S = ctx.saved_tensors
        pairs = _round(S, ctx.dtype) * _round(grad, ctx.dtype)
        return pairs.sum((-2, -1), keepdim=True), decay * grad, None


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def chunk_form_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    do: Tensor,
    dht: Tensor,
    *,
    scale: float,
    l2norm: bool,
) -> list[Tensor]:
    """Gradients of q, k, v (in their dtype), g, beta, initial state (float32) of one sequence without a batch dimension."""
    strongest, dtype = -1e4, v.dtype
    leaves = [x.float().detach().requires_grad_() for x in (q, k, v, g.clamp(min=strongest), beta, initial_state)]
    Q, K, V, gates, strengths, S = leaves
    if l2norm:
        Q, K = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (Q, K))
    group = v.shape[1] // q.shape[1]
    Q, K = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (Q * scale, K))
    V, gates, strengths = V.transpose(0, 1), gates.T, strengths.T
    outputs = [torch.empty(v.shape[1], 0, v.shape[2], device=v.device)]
    for start in range(0, v.shape[0], CHUNK):
        parts = (x[:, start : start + CHUNK] for x in (Q, K, V, gates, strengths))
        o, S = _differentiable_chunk(*parts, S, dtype)
        outputs.append(o)
    o = torch.cat(outputs, 1).transpose(0, 1)
    grads = torch.autograd.grad((o, S), leaves, (do.float(), dht.float()), materialize_grads=True)
    return [grad.to(dtype) if index < 3 else grad for index, grad in enumerate(grads)]


def _differentiable_chunk(Q, K, V, gates, strengths, S, dtype):
    """Outputs of one chunk [HV, C, V] and the state behind it."""

    def product(a, b):
        return RoundedProduct.apply(a, b, dtype)

    row = torch.arange(gates.shape[1], device=gates.device)
    between = torch.where(row[:, None] > row, gates[..., None], 0.0).cumsum(-2)
    D = torch.where(row[:, None] >= row, between, -torch.inf).exp()
    gamma, to_end, b = gates.cumsum(-1).exp()[..., None], D[:, -1, :, None], strengths[..., None]
    A = torch.linalg.inv(torch.eye(len(row), device=gates.device) + (b * product(K, K.mT) * D).tril(-1)) * b.mT
    N = product(A, V - gamma * product(K, S))
    o = gamma * product(Q, S) + product(product(Q, K.mT) * D, N)
    return o, DecayedState.apply(gamma[:, -1:], S, dtype) + product(K.mT, to_end * N)
