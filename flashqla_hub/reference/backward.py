"""Closed-form gradients of the token recurrence, one token at a time.

Walking back over t with G the gradient of the state behind token t, P = exp(g_t) S the decayed state,
e = v_t - P^T k_t the error and d = beta_t e what was written:

    dq_t    = scale S_t do_t                     G <- G + scale q_t do_t^T
    dd      = G^T k_t                            dk_t = G d - P (beta_t dd)
    dbeta_t = dd . e                             dv_t = beta_t dd
    G <- G - k_t (beta_t dd)^T                   dg_t = <G, P>
    G <- exp(g_t) G
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .recurrent import Sequences, l2_normalize


class Gradients(NamedTuple):
    """Gradients of the inputs, in their shapes."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dh0: Tensor


def gated_delta_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    *,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
) -> Gradients:
    """Gradients of sum(o * do) + sum(final_state * dht); arguments as in `gated_delta_rule`, do [B, T, HV, V]."""
    (batch, num_tokens, heads, dim_k), (value_heads, dim_v) = k.shape, v.shape[2:]
    raw_q, raw_k = q, k
    if use_qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    scale = dim_k**-0.5 if scale is None else scale
    q, k = (x.repeat_interleave(value_heads // heads, dim=2) for x in (q, k))
    spans = Sequences.of(batch, num_tokens, cu_seqlens).spans
    dq, dk, dv, dg, dbeta = (torch.zeros_like(x) for x in (q, k, v, g, beta))
    dh0 = v.new_zeros(len(spans), value_heads, dim_k, dim_v)
    for n, (b, start, stop) in enumerate(spans):
        S = torch.zeros_like(dh0[n]) if initial_state is None else initial_state[n].to(v)
        G = torch.zeros_like(S) if dht is None else dht[n].to(v).clone()
        tape = []
        for t in range(start, stop):
            P = torch.exp(g[b, t])[:, None, None] * S
            e = v[b, t] - torch.einsum("hkv,hk->hv", P, k[b, t])
            d = beta[b, t][:, None] * e
            S = P + torch.einsum("hk,hv->hkv", k[b, t], d)
            tape.append((P, e, d, S))
        for t in reversed(range(start, stop)):
            P, e, d, S = tape.pop()
            out_grad = scale * do[b, t]
            dq[b, t] = torch.einsum("hkv,hv->hk", S, out_grad)
            G = G + torch.einsum("hk,hv->hkv", q[b, t], out_grad)
            dd = torch.einsum("hkv,hk->hv", G, k[b, t])
            dv[b, t] = beta[b, t][:, None] * dd
            dk[b, t] = torch.einsum("hkv,hv->hk", G, d) - torch.einsum("hkv,hv->hk", P, dv[b, t])
            dbeta[b, t] = (dd * e).sum(-1)
            G = G - torch.einsum("hk,hv->hkv", k[b, t], dv[b, t])
            dg[b, t] = (G * P).sum((-2, -1))
            G = torch.exp(g[b, t])[:, None, None] * G
        dh0[n] = G
    dq, dk = (x.unflatten(2, (heads, -1)).sum(3) for x in (dq, dk))
    if use_qk_l2norm:
        dq, dk = _l2_normalize_backward(raw_q, dq), _l2_normalize_backward(raw_k, dk)
    return Gradients(dq, dk, dv, dg, dbeta, dh0)


def _l2_normalize_backward(x: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    squared = (x * x).sum(-1, keepdim=True) + eps
    return dy / torch.sqrt(squared) - x * (x * dy).sum(-1, keepdim=True) / squared**1.5
