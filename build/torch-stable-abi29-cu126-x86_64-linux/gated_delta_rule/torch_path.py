"""Gated delta rule in PyTorch, by chunks, forward and closed-form backward: every device, dtype, head size and length.

Per chunk of C tokens and value head (docs/notation.md), with the scale folded into q and G the cumulative gate:

    D[t, s] = exp(G_t - G_s), s <= t      A = (I + tril(beta K K^T D, -1))^-1      P = tril(Q K^T) D
    U = A beta V      W = A beta gamma K      N = U - W S      O = gamma Q S + P N      S <- gamma_C S + (D_C K)^T N

D comes from sums over the tokens between s and t, never from a difference of two cumulative sums, so gates of any
strength (0 to -inf) keep full precision and no infinity meets another. The backward recomputes one slab of chunks at a
time from the state at its start: memory holds one state per chunk of one slab, never one per token.

Computation is float64 for float64 inputs and float32 otherwise. Shapes inside: chunks n, lanes L (batch rows, or 1 for a
packed row), R = HV / H, M = L * HV; states [n, M, K, V].
"""

from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from . import plan
from .chunks import Chunks, make_chunks

L2_NORM_EPS = 1e-6


class Factors(NamedTuple):
    """What a slab of chunks needs that does not depend on the state."""

    q: Tensor  # [n, L, H, C, K] normalised if asked, times scale
    k: Tensor  # [n, L, H, C, K] normalised if asked
    keys: Tensor  # [n, M, C, K] k once per value head
    v: Tensor  # [n, M, C, V]
    beta: Tensor  # [n, M, C, 1]
    gamma: Tensor  # [n, M, C, 1] exp(G)
    decay: Tensor  # [n, M, C, C] D, zero above the diagonal
    overlap: Tensor  # [n, M, C, C] tril(K K^T D, -1)
    inverse: Tensor  # [n, M, C, C] A
    scores: Tensor  # [n, M, C, C] P
    u: Tensor  # [n, M, C, V]
    w: Tensor  # [n, M, C, K]
    q_in: Tensor  # [n, M, C, K] gamma Q: what reads the state before the chunk
    k_out: Tensor  # [n, M, C, K] D_C K: what writes the state behind the chunk


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: float,
    use_qk_l2norm: bool,
    chunk_size: int,
    save_for_backward: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HV, V] in v's dtype, final state [N, HV, K, V], and the state at the start of each slab (or nothing)."""
    chunks = make_chunks(q.shape[0], q.shape[1], cu_seqlens, chunk_size)
    like = q.new_zeros(0, dtype=compute_dtype(q))
    shape = (v.shape[2], q.shape[3], v.shape[3])
    initial, final = (chunks.state_table(initial_state, shape, like) for _ in range(2))
    state = like.new_zeros(chunks.lanes * shape[0], *shape[1:])
    residuals = like.new_zeros(residual_shape(q, v, cu_seqlens, chunk_size) if save_for_backward else 0)
    out = chunks.zeros_like(v)
    for slab, (start, stop) in enumerate(_slabs(chunks, *shape)):
        if save_for_backward:
            residuals[slab] = state
        f = _factors(chunks, q, k, v, g, beta, scale, use_qk_l2norm, start, stop)
        states, new, state = _scan(chunks, f, state, start, initial, final)
        o = torch.matmul(f.q_in, states).add_(torch.matmul(f.scores, new))
        chunks.store(out, o.unflatten(1, (chunks.lanes, -1)), start, stop)
    return chunks.result(out), chunks.states(final), residuals


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    residuals: Tensor,
    do: Optional[Tensor],
    dht: Optional[Tensor],
    scale: float,
    use_qk_l2norm: bool,
    chunk_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta in their dtypes, and of the initial state [N, HV, K, V] in the computing dtype.

    Empty `residuals` are recomputed, which costs another forward.
    """
    chunks = make_chunks(q.shape[0], q.shape[1], cu_seqlens, chunk_size)
    like = q.new_zeros(0, dtype=compute_dtype(q))
    shape = (v.shape[2], q.shape[3], v.shape[3])
    initial = chunks.state_table(initial_state, shape, like)
    dfinal, dinitial = (chunks.state_table(dht, shape, like) for _ in range(2))
    dstate = like.new_zeros(chunks.lanes * shape[0], *shape[1:])
    grads = [chunks.zeros_like(x) for x in (q, k, v, g, beta)]
    if residuals.numel() == 0:
        residuals = _slab_states(chunks, q, k, v, g, beta, scale, use_qk_l2norm, dstate, initial)
    for slab, (start, stop) in reversed(list(enumerate(_slabs(chunks, *shape)))):
        f = _factors(chunks, q, k, v, g, beta, scale, use_qk_l2norm, start, stop)
        states, new, _ = _scan(chunks, f, residuals[slab], start, initial, None)
        dout = torch.zeros_like(new) if do is None else chunks.load(do, start, stop).to(new.dtype).flatten(1, 2)
        dnew, dstates, dstate = _reverse_scan(chunks, f, dout, dstate, start, dfinal, dinitial)
        slab_grads = _gradients(f, states, new, dout, dnew, dstates, scale)
        if use_qk_l2norm:
            for i, x in enumerate((q, k)):
                slab_grads[i] = _l2_norm_backward(chunks.load(x, start, stop).to(like.dtype), slab_grads[i])
        for grad, slab_grad in zip(grads, slab_grads):
            chunks.store(grad, slab_grad, start, stop)
    dq, dk, dv, dg, dbeta = (chunks.result(grad) for grad in grads)
    return dq, dk, dv, dg, dbeta, chunks.states(dinitial)


def compute_dtype(q: Tensor) -> torch.dtype:
    """Dtype of the state and of all arithmetic: float64 for float64 inputs, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def residual_shape(q: Tensor, v: Tensor, cu_seqlens: Optional[Tensor], chunk_size: int) -> List[int]:
    """Shape of what a differentiable forward keeps, from shapes alone: the state at the start of each slab."""
    batch, tokens, _, dim_k = q.shape
    value_heads, dim_v = v.shape[2:]
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = plan.num_chunks(tokens, sequences, plan.chunk_length(tokens, chunk_size))
    return [plan.num_slabs(chunks, batch * value_heads), batch * value_heads, dim_k, dim_v]


def _slabs(chunks: Chunks, value_heads: int, dim_k: int, dim_v: int) -> List[Tuple[int, int]]:
    """Ranges of chunks to work on at a time; none if the states are empty, and with them all but zero gradients."""
    lane_heads = chunks.lanes * value_heads
    if lane_heads * dim_k * dim_v == 0:
        return []
    step = plan.slab_chunks(lane_heads)
    return [(start, min(start + step, chunks.count)) for start in range(0, chunks.count, step)]


def _slab_states(chunks, q, k, v, g, beta, scale, use_qk_l2norm, state, initial) -> List[Tensor]:
    """The state at the start of each slab, for a forward that kept none."""
    states = []
    for start, stop in _slabs(chunks, v.shape[2], q.shape[3], v.shape[3]):
        states.append(state)
        f = _factors(chunks, q, k, v, g, beta, scale, use_qk_l2norm, start, stop)
        _, _, state = _scan(chunks, f, state, start, initial, None)
    return states


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)


def _l2_norm_backward(x: Tensor, grad: Tensor) -> Tensor:
    inverse_norm = torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)
    unit = x * inverse_norm
    return inverse_norm * (grad - unit * (unit * grad).sum(-1, keepdim=True))


def _per_value_head(x: Tensor, value_heads: int) -> Tensor:
    """[n, L, H, ...] -> [n, M, ...]: consecutive value heads share a key head (a view where it can be: do not write to it)."""
    ratio = value_heads // x.shape[2]
    return x.unsqueeze(3).expand(*x.shape[:3], ratio, *x.shape[3:]).flatten(1, 3)


def _per_key_head(x: Tensor, like: Tensor) -> Tensor:
    """[n, M, ...] -> [n, L, H, ...]: the gradient of sharing a key head."""
    return x.unflatten(1, (like.shape[1], like.shape[2], -1)).sum(3)


def _pairwise_decay(g: Tensor) -> Tensor:
    """D[t, s] = exp(g_{s+1} + ... + g_t) for s <= t, else 0; g [..., C], D [..., C, C]."""
    row = torch.arange(g.shape[-1], device=g.device)
    between = torch.where(row[:, None] > row, g.unsqueeze(-1), 0)
    return between.cumsum(-2).exp_().tril_()


def _factors(chunks, q, k, v, g, beta, scale, use_qk_l2norm, start, stop) -> Factors:
    dtype, value_heads = compute_dtype(q), v.shape[2]
    q, k, v, g, beta = (chunks.load(x, start, stop).to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = _l2_norm(q), _l2_norm(k)
    q, k = q * scale, k.contiguous()
    v, g, beta = v.flatten(1, 2), g.flatten(1, 2), beta.flatten(1, 2).unsqueeze(-1)
    gamma, decay = g.cumsum(-1).exp_().unsqueeze(-1), _pairwise_decay(g)
    overlap = (_per_value_head(torch.matmul(k, k.mT), value_heads) * decay).tril_(-1)
    scores = _per_value_head(torch.matmul(q, k.mT), value_heads) * decay
    identity = torch.eye(chunks.length, dtype=dtype, device=q.device).expand_as(overlap)
    inverse = torch.linalg.solve_triangular(overlap * beta, identity, upper=False, unitriangular=True)
    keys = _per_value_head(k, value_heads)
    u, w = torch.matmul(inverse, beta * v), torch.matmul(inverse, (beta * gamma) * keys)
    q_in = _per_value_head(q, value_heads) * gamma
    k_out = decay[..., -1, :].unsqueeze(-1) * keys
    return Factors(q, k, keys, v, beta, gamma, decay, overlap, inverse, scores, u, w, q_in, k_out)


def _scan(chunks, f: Factors, state, start, initial, final) -> Tuple[Tensor, Tensor, Tensor]:
    """States before each chunk [n, M, K, V], new values N [n, M, C, V], and the state behind the slab."""
    new = torch.empty_like(f.u)
    states = state.new_empty(f.u.shape[0], *state.shape)
    for i, before in enumerate(states):
        before.copy_(chunks.enter_first(start + i, state, initial))
        torch.baddbmm(f.u[i], f.w[i], before, alpha=-1, out=new[i])
        state = torch.baddbmm(f.gamma[i, :, -1:] * before, f.k_out[i].mT, new[i])
        if final is not None:
            chunks.leave_last(start + i, state, final)
    return states, new, state


def _reverse_scan(chunks, f: Factors, dout, dstate, start, dfinal, dinitial) -> Tuple[Tensor, Tensor, Tensor]:
    """dN [n, M, C, V], gradients of the states behind each chunk [n, M, K, V], and of the state before the slab."""
    dnew = torch.matmul(f.scores.mT, dout)
    from_out = torch.matmul(f.q_in.mT, dout)
    dstates = torch.empty_like(from_out)
    for i in reversed(range(len(dnew))):
        dstates[i].copy_(chunks.enter_last(start + i, dstate, dfinal))
        dnew[i].baddbmm_(f.k_out[i], dstates[i])
        dstate = torch.baddbmm(from_out[i].addcmul_(f.gamma[i, :, -1:], dstates[i]), f.w[i].mT, dnew[i], alpha=-1)
        chunks.leave_first(start + i, dstate, dinitial)
    return dnew, dstates, dstate


def _gradients(f: Factors, states, new, dout, dnew, dstates, scale: float) -> List[Tensor]:
    """Gradients of (normalised) q and k [n, L, H, C, K], of v [n, L, HV, C, V] and of g and beta [n, L, HV, C]."""
    dw = torch.matmul(dnew, states.mT).neg_()
    dbv, dbk = torch.matmul(f.inverse.mT, dnew), torch.matmul(f.inverse.mT, dw)
    dlower = torch.matmul(dbv, f.u.mT).add_(torch.matmul(dbk, f.w.mT)).neg_().tril_(-1)
    dscores = torch.matmul(dout, new.mT).tril_()
    dq_in, dk_out = torch.matmul(dout, states.mT), torch.matmul(new, dstates.mT)

    dqk = _per_key_head(dscores * f.decay, f.q)
    dkk = _per_key_head(dlower * f.decay * f.beta, f.k)
    dq = torch.matmul(dqk, f.k).add_(_per_key_head(dq_in * f.gamma, f.q)).mul_(scale)
    dk = torch.matmul(dqk.mT, f.q).add_(torch.matmul(dkk + dkk.mT, f.k))
    dk.add_(_per_key_head((f.beta * f.gamma) * dbk + f.decay[..., -1, :].unsqueeze(-1) * dk_out, f.k))

    written = f.gamma * (dbk * f.keys).sum(-1, keepdim=True)
    doverlap = dlower.mul_(f.overlap)
    dbeta = (dbv * f.v).sum(-1, keepdim=True).add_(written).add_(doverlap.sum(-1, keepdim=True))
    dpairs = doverlap.mul_(f.beta).addcmul_(dscores, f.scores)
    dpairs[..., -1, :] += (f.k_out * dk_out).sum(-1)
    dcumulative = ((f.q_in * dq_in).sum(-1, keepdim=True) + f.beta * written).squeeze(-1)
    dcumulative[..., -1] += f.gamma[..., -1, 0] * (states * dstates).sum((-2, -1))
    dg = _gate_gradient(dpairs, dcumulative)

    lanes = (f.k.shape[1], -1)
    return [dq, dk, *(x.unflatten(1, lanes) for x in (f.beta * dbv, dg, dbeta.squeeze(-1)))]


def _gate_gradient(dpairs: Tensor, dcumulative: Tensor) -> Tensor:
    """dg_i from the gradients of log D[t, s] and of G_t: everything that token i lies between, with no cancellation."""
    across = dpairs.tril(-1).flip(-2).cumsum(-2).flip(-2).tril_(-1).sum(-1)
    return across.add_(dcumulative.flip(-1).cumsum(-1).flip(-1))
