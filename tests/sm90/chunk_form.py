"""The yardstick of 16-bit precision: the chunk form in PyTorch with rounded matmul operands, on any device and length.

Products accumulate in float32, and gates, state and the inverse stay in float32 or wider.
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
