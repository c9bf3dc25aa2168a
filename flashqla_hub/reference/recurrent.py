"""The gated delta rule one token at a time: the definition that every kernel of the project is judged by.

Per sequence and value head, with state S [K, V], log decay g_t <= 0 and writing strength beta_t:

    S <- exp(g_t) S
    d  = beta_t (v_t - S^T k_t)
    S <- S + k_t d^T
    o_t = scale S^T q_t

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), equation 10, in the
transposed state layout that FLA and transformers use. Plain loops, any floating dtype (use float64), any device.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """The sequences of a call: (batch row, first token, token behind the last) each."""

    spans: list[tuple[int, int, int]]

    @classmethod
    def of(cls, batch: int, num_tokens: int, cu_seqlens: Tensor | None) -> "Sequences":
        if cu_seqlens is None:
            return cls([(b, 0, num_tokens) for b in range(batch)])
        bounds = [int(bound) for bound in cu_seqlens]
        return cls([(0, start, stop) for start, stop in pairwise(bounds)])


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HV, V] and final states [N, HV, K, V].

    Args:
        q, k: [B, T, H, K]; value head h reads key head h // (HV // H).
        v: [B, T, HV, V].
        g: [B, T, HV], log decay.
        beta: [B, T, HV].
        scale: factor of the outputs, K ** -0.5 by default.
        initial_state: [N, HV, K, V], zeros by default; N is B, or the number of packed sequences.
        cu_seqlens: [N + 1], bounds of the sequences packed in the single batch row.
        use_qk_l2norm: normalise q and k first.
    """
    (batch, num_tokens, heads, dim_k), (value_heads, dim_v) = k.shape, v.shape[2:]
    if use_qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    scale = dim_k**-0.5 if scale is None else scale
    q, k = (x.repeat_interleave(value_heads // heads, dim=2) for x in (q, k))
    spans = Sequences.of(batch, num_tokens, cu_seqlens).spans
    out = torch.zeros_like(v)
    final = v.new_zeros(len(spans), value_heads, dim_k, dim_v)
    for n, (b, start, stop) in enumerate(spans):
        S = torch.zeros_like(final[n]) if initial_state is None else initial_state[n].to(v)
        for t in range(start, stop):
            S = torch.exp(g[b, t])[:, None, None] * S
            d = beta[b, t][:, None] * (v[b, t] - torch.einsum("hkv,hk->hv", S, k[b, t]))
            S = S + torch.einsum("hk,hv->hkv", k[b, t], d)
            out[b, t] = scale * torch.einsum("hkv,hk->hv", S, q[b, t])
        final[n] = S
    return out, final
