"""The yardstick of 16-bit precision: the chunk form with every matmul operand rounded to bfloat16.

Products accumulate in float32, and gates, state and the inverse stay in float32: what a tensor-core kernel without tricks
reaches. Its gradients come from autograd, with the operands of the backward products rounded alike.
"""

import torch
from torch import Tensor

from flashqla_hub.reference import l2_normalize

from .inputs import Outcome, Problem

CHUNK = 64


class RoundedProduct(torch.autograd.Function):
    """a @ b on operands rounded to bfloat16, forward and backward."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return round_to_bf16(a) @ round_to_bf16(b)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad = round_to_bf16(grad)
        return grad @ round_to_bf16(b).mT, round_to_bf16(a).mT @ grad


def round_to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def yardstick(problem: Problem) -> Outcome:
    """Outputs and gradients of a dense problem, outputs and gradients rounded to the dtype of their tensors."""
    assert problem.cu_seqlens is None
    single = problem.to(torch.float32).map(lambda x: x.detach().requires_grad_())
    leaves = [single.q, single.k, single.v, single.g, single.beta, single.initial_state]
    o, state = _chunked(single)
    outputs, weights = (o, state), (single.do.detach(), single.dht.detach())
    grads = torch.autograd.grad(outputs, leaves, weights)
    given = (problem.q, problem.k, problem.v, problem.g, problem.beta, problem.initial_state)
    rounded = [grad.to(x.dtype) for grad, x in zip(grads, given, strict=True)]
    return Outcome(o.detach().to(problem.v.dtype), state.detach(), *rounded)


def _chunked(problem: Problem) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final state [B, HV, K, V] in float32; T must be a multiple of the chunk."""
    dim_k, value_heads = problem.k.shape[3], problem.v.shape[2]
    tokens = problem.v.shape[1]
    assert tokens % CHUNK == 0
    product = RoundedProduct.apply
    q, k = problem.q, problem.k
    if problem.use_qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    scale = dim_k**-0.5 if problem.scale is None else problem.scale
    q, k = (x.repeat_interleave(value_heads // x.shape[2], 2).transpose(1, 2) for x in (q * scale, k))
    v, g, beta = (x.transpose(1, 2) for x in (problem.v, problem.g, problem.beta))
    identity, outputs, S = torch.eye(CHUNK), [], problem.initial_state
    for start in range(0, tokens, CHUNK):
        Q, K, V, G, b = (x[:, :, start : start + CHUNK] for x in (q, k, v, g, beta))
        row = torch.arange(CHUNK)
        between = torch.where(row[:, None] > row, G.unsqueeze(-1), 0).cumsum(-2)
        D = torch.where(row[:, None] >= row, between, -torch.inf).exp()
        gamma, behind, b = G.cumsum(-1).exp()[..., None], D[:, :, -1, :, None], b[..., None]
        A = torch.linalg.inv(identity + (b * product(K, K.mT) * D).tril(-1)) * b.mT
        N = product(A, V - gamma * product(K, S))
        outputs.append(gamma * product(Q, S) + product(product(Q, K.mT) * D, N))
        S = gamma[:, :, -1:] * S + product(K.mT, behind * N)
    return torch.cat(outputs, dim=2).transpose(1, 2), S
