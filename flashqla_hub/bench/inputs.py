"""Inputs of a row: random values, never zeros, with gates like those of models."""

import math

import torch
import torch.nn.functional as F

HEAD_DIM = 128


def make_inputs(lengths, hk: int, hv: int, gates: str, seed: int = 0, device: str = "cuda") -> dict:
    """q, k [1, T, hk, 128] normalised bf16; v, do [1, T, hv, 128] bf16; g, beta [1, T, hv] and states [N, hv, 128, 128] fp32.

    Args:
        gates: "bench", three quarters of the heads logsigmoid(randn) / 16 and the rest 0; "zero"; "decay", all heads
            logsigmoid(randn) / 16; "trained", -A softplus(a + dt_bias) with log A ~ U(0, log 16), softplus(dt_bias)
            log-uniform in (1e-3, 0.1) and a ~ N(0, 1), as the models are initialised.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    total, count = sum(lengths), len(lengths)

    def randn(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    q, k = (F.normalize(randn(1, total, hk, HEAD_DIM), dim=-1).bfloat16() for _ in range(2))
    v, do = (randn(1, total, hv, HEAD_DIM).bfloat16() for _ in range(2))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    return {
        "q": q,
        "k": k,
        "v": v,
        "do": do,
        "g": _gates(gates, total, hv, generator, device),
        "beta": randn(1, total, hv).sigmoid(),
        "h0": randn(count, hv, HEAD_DIM, HEAD_DIM),
        "dht": randn(count, hv, HEAD_DIM, HEAD_DIM) / 8,
        "cu_seqlens": bounds,
        "cu_seqlens_int64": bounds.long(),
        "max_length": max(lengths),
        "scale": HEAD_DIM**-0.5,
    }


def input_bytes(inputs: dict, op: str) -> int:
    """Bytes that an operation reads: q, k, v, g, beta and the initial states, and for gradients those of the outputs."""
    names = ("q", "k", "v", "g", "beta", "h0", *(("do", "dht") if "backward" in op else ()))
    return sum(inputs[name].numel() * inputs[name].element_size() for name in names)


def copies_of(inputs: dict, count: int) -> list[dict]:
    """The inputs and `count` - 1 copies at other addresses; the bounds are shared, since some peers plan once per tensor."""
    shared = ("cu_seqlens", "cu_seqlens_int64")
    return [inputs] + [
        {name: x.clone() if isinstance(x, torch.Tensor) and name not in shared else x for name, x in inputs.items()}
        for _ in range(count - 1)
    ]


def _gates(kind: str, total: int, hv: int, generator, device: str) -> torch.Tensor:
    noise = torch.randn(1, total, hv, device=device, generator=generator)
    if kind == "trained":
        uniform = torch.rand(2, hv, device=device, generator=generator)
        rate = (uniform[0] * math.log(16)).exp()
        step = (math.log(1e-3) + uniform[1] * math.log(100)).exp()
        return -rate * F.softplus(noise + torch.log(torch.expm1(step)))
    g = F.logsigmoid(noise) / 16
    if kind == "zero":
        return torch.zeros_like(g)
    if kind == "bench":
        still = torch.randperm(hv, device=device, generator=generator)[math.ceil(0.75 * hv) :]
        g[:, :, still] = 0
    return g
