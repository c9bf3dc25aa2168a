"""The yardstick of 16-bit precision: the chunk form in PyTorch with rounded matmul operands, on any device and length.

Products accumulate in float32, and gates, state and the inverse stay in float32 or wider. Gradients come in two forms that
round in different places: a backward by chunks, which keeps errors, states and both their gradients in 16 bits because they
are operands, and autograd of the forward. An error budget is the larger of the two.
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
    dtype: torch.dtype | None = None,
    value_scale: float = 1.0,
) -> list[Tensor]:
    """Gradients of q, k, v (in their dtype), g, beta, initial state (float32) of one sequence without a batch dimension.

    Two passes and then chunk by chunk, as backwards of this operator are cut into kernels: states before and gradients behind
    each chunk, errors e = v - S^T k and gradients of v are kept in `dtype`, that of v by default. In float64 it is exact.

    Values and states are multiplied by `value_scale` and the gradients of all others divided by it: the same mathematics with
    other roundings.
    """
    dtype = dtype or v.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    group = v.shape[1] // q.shape[1]
    raw = [x.to(wide).repeat_interleave(group, 1).transpose(0, 1) for x in (q, k)]
    norms = [
        torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if l2norm else torch.ones_like(x[..., :1]) for x in raw
    ]
    unit_q, unit_k = (x * norm for x, norm in zip(raw, norms, strict=True))
    values, out, gates, strengths = (x.to(wide).transpose(0, 1) for x in (v, do, g.double().clamp(min=-1e4), beta))
    parts = [slice(start, start + CHUNK) for start in range(0, v.shape[0], CHUNK)]
    chunks = [
        _Chunk(unit_q[:, part] * scale, unit_k[:, part], gates[:, part], strengths[:, part], rounded) for part in parts
    ]
    S, states, errors = initial_state.to(wide) * value_scale, [], []
    for part, chunk in zip(parts, chunks, strict=True):
        states.append(rounded(S))
        S, error = chunk.forward(S, values[:, part] * value_scale)
        errors.append(rounded(error))
    dS, grads = dht.to(wide), []
    for part, chunk, state, error in reversed(list(zip(parts, chunks, states, errors, strict=True))):
        behind = rounded(dS)
        dS, dv = chunk.reverse(dS, out[:, part])
        grads.append((*chunk.gradients(state, behind, error, out[:, part], rounded(dv)), dv))
    empty = [unit_q[:, :0], unit_k[:, :0], gates[:, :0], strengths[:, :0], values[:, :0]]
    dq, dk, dg, dbeta, dv = (torch.cat(x, 1).transpose(0, 1) for x in zip(empty, *reversed(grads), strict=True))
    dq = dq * scale
    if l2norm:
        dq, dk = (_through_norm(x, *of) for x, *of in zip((dq, dk), raw, norms, strict=True))
    dq, dk = (x.unflatten(1, (-1, group)).sum(2) for x in (dq, dk))
    dq, dk, dg, dbeta = (x / value_scale for x in (dq, dk, dg, dbeta))
    return [x.to(dtype) for x in (dq, dk, dv)] + [dg, dbeta, dS]


def _through_norm(grad, raw, norm):
    """Gradient of x from that of x / |x|."""
    raw, norm = raw.transpose(0, 1), norm.transpose(0, 1)
    return norm * (grad - raw * (norm * norm * (grad * raw).sum(-1, keepdim=True)))


class _Chunk:
    """One chunk of all value heads: queries (scaled) and keys [HV, C, K], with what follows from them and the gates."""

    def __init__(self, q, k, gates, strengths, rounded):
        self.q, self.k, self.rounded = q, k, rounded
        row = torch.arange(gates.shape[1], device=gates.device)
        between = torch.where(row[:, None] > row, gates[..., None], 0.0).cumsum(-2)
        self.decay = torch.where(row[:, None] >= row, between, -torch.inf).exp().to(q.dtype)
        self.read, self.left = gates.cumsum(-1).exp().to(q.dtype)[..., None], self.decay[:, -1, :, None]
        self.end, self.beta = self.read[:, -1:], strengths[..., None]
        self.qk, self.kk = q @ k.mT * self.decay, (k @ k.mT * self.decay).tril(-1)  # what a token reads of a write
        system = (
            torch.eye(len(row), device=gates.device, dtype=torch.float64) + self.kk.double() * self.beta.mT.double()
        )
        self.solve = rounded(torch.linalg.inv(system).to(q.dtype))

    def forward(self, S, v):
        """The state behind the chunk, and its errors."""
        error = self.solve @ self.rounded(v - self.read * (self.k @ self.rounded(S)))
        return self.end * S + self.k.mT @ self.rounded(self.left * self.beta * error), error

    def reverse(self, dS, do):
        """The gradient of the state before the chunk, and that of its values, from the gradient of the state behind it."""
        written = self.rounded(self.qk * self.beta.mT).mT @ do + self.left * self.beta * (self.k @ self.rounded(dS))
        dv = self.solve.mT @ self.rounded(written)
        read = self.q.mT @ self.rounded(self.read * do) - self.k.mT @ self.rounded(self.read * dv)
        return self.end * dS + read, dv

    def gradients(self, S, dS, error, do, dv):
        """dq, dk, dg and dbeta; dq of the scaled queries, dk and dq of the normalised."""
        of_query, of_key = do @ error.mT * self.decay, -(dv @ error.mT * self.decay).tril(-1)
        strength = self.beta.mT
        query_state, key_state, state_key = (
            self.read * (do @ S.mT),
            -self.read * (dv @ S.mT),
            self.left * (error @ dS.mT),
        )
        dq = self.rounded(of_query * strength) @ self.k + query_state
        dk = self.rounded(of_key * strength) @ self.k + key_state + self.beta * state_key
        dk = dk + self.rounded(of_query * strength).mT @ self.q + self.rounded(of_key * strength).mT @ self.k
        pairs = of_query * (self.q @ self.k.mT) + of_key * (self.k @ self.k.mT)
        at_end = (state_key * self.k).sum(-1)
        dbeta = pairs.sum(-2) + at_end
        at_end = at_end * self.beta[..., 0]
        dG = (pairs * strength).sum(-1) - (pairs * strength).sum(-2) - at_end
        dG = dG + (query_state * self.q).sum(-1) + (key_state * self.k).sum(-1)
        dG[:, -1] += at_end.sum(-1) + self.end[:, 0, 0] * (S * dS).sum((-2, -1))
        return dq, dk, dG.flip(-1).cumsum(-1).flip(-1), dbeta


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


def differentiated_chunk_form(
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
    """The same gradients by autograd, through the inverse in float32 and through states that are rounded where they are read."""
    strongest, dtype = -1e4, v.dtype
    leaves = [x.float().detach().requires_grad_() for x in (q, k, v, g.clamp(min=strongest), beta, initial_state)]
    Q, K, V, gates, strengths, S = leaves
    if l2norm:
        Q, K = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (Q, K))
    group = v.shape[1] // q.shape[1]
    Q, K = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (Q * scale, K))
    V, gates, strengths = V.transpose(0, 1), gates.T, strengths.T
    outputs = [V[:, :0]]
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
