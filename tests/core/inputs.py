"""Calls of the gated delta rule to test with: inputs that are the same on every machine, and their truth in float64.

`uniform` is a hash of the element's index, not a random number generator, so the values that the tests quote can be
computed again anywhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from flashqla_hub.reference import gated_delta_rule, gated_delta_rule_backward

TENSORS = ("q", "k", "v", "g", "beta")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, spreads the seeds
_ROUNDS = ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (0x27D4EB2F, 16))


def uniform(shape: tuple[int, ...], seed: int) -> Tensor:
    """Float64 values in [0, 1): a 32-bit multiply and xor-shift hash of index + seed * golden ratio."""
    x = (torch.arange(math.prod(shape), dtype=torch.int64) + seed * _GOLDEN) & _WORD
    for factor, shift in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return ((x ^ (x >> 15)).double() / 2**32).reshape(shape)


def signed(shape: tuple[int, ...], seed: int) -> Tensor:
    """Float64 values in [-1, 1)."""
    return 2 * uniform(shape, seed) - 1


@dataclass(frozen=True)
class Problem:
    """One call with a loss, sum(o * do) + sum(final_state * dht); shapes as in `chunk_gated_delta_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor
    dht: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    scale: float | None = None
    use_qk_l2norm: bool = True

    def map(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        """Every floating tensor changed."""
        names = (*TENSORS, "do", "dht", "initial_state")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if x is None else change(x) for name, x in given.items()})

    def to(self, dtype: torch.dtype) -> "Problem":
        return self.map(lambda x: x.to(dtype))

    def rows(self, start: int | None, stop: int | None) -> "Problem":
        """The tokens start:stop, as a call without states."""
        cut = {name: getattr(self, name)[:, start:stop] for name in (*TENSORS, "do")}
        return replace(self, **cut, cu_seqlens=None, initial_state=None, dht=None)


@dataclass(frozen=True)
class Outcome:
    """What a call gave; gradients are None where nothing was differentiated."""

    o: Tensor
    final_state: Tensor | None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dg: Tensor | None = None
    dbeta: Tensor | None = None
    dh0: Tensor | None = None

    def items(self) -> list[tuple[str, Tensor]]:
        return [(name, x) for name, x in vars(self).items() if x is not None]


def make_problem(
    batch: int,
    tokens: int,
    heads: int,
    value_heads: int,
    *,
    dim_k: int = 128,
    dim_v: int = 128,
    seed: int = 0,
    bounds: list[int] | None = None,
    states: tuple[int, int] | None = None,
    **options,
) -> Problem:
    """A problem in float64, mild gates in (-0.5, 0], beta in [0.1, 0.9), normalised keys.

    Args:
        seed: q, k, v, g, beta and do use seed + 1 ... seed + 6.
        bounds: cu_seqlens.
        states: seeds of an initial state and of a gradient of the final state; neither by default.
    """
    keys, values, gates = (
        (batch, tokens, heads, dim_k),
        (batch, tokens, value_heads, dim_v),
        (batch, tokens, value_heads),
    )
    state = (batch if bounds is None else len(bounds) - 1, value_heads, dim_k, dim_v)
    return Problem(
        q=signed(keys, seed + 1),
        k=signed(keys, seed + 2),
        v=signed(values, seed + 3),
        g=-0.5 * uniform(gates, seed + 4) ** 2,
        beta=0.1 + 0.8 * uniform(gates, seed + 5),
        do=signed(values, seed + 6),
        initial_state=None if states is None else signed(state, states[0]),
        dht=None if states is None else signed(state, states[1]),
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
        **options,
    )


def forward(kernel: ModuleType, problem: Problem, **options) -> Outcome:
    """The kernel's outputs, without gradients."""
    with torch.no_grad():
        o, final_state = _call(kernel, problem, **options)
    return Outcome(o, final_state)


def solve(kernel: ModuleType, problem: Problem, **options) -> Outcome:
    """The kernel's outputs and the gradients that its autograd gives."""
    problem = problem.map(lambda x: x.detach())
    leaves = {name: getattr(problem, name).requires_grad_() for name in TENSORS}
    if problem.initial_state is not None:
        leaves["initial_state"] = problem.initial_state.requires_grad_()
    o, final_state = _call(kernel, problem, **options)
    outputs, grads = [o], [problem.do.to(o.dtype)]
    if problem.dht is not None:
        outputs, grads = [o, final_state], [*grads, problem.dht.to(final_state.dtype)]
    return Outcome(o.detach(), final_state.detach(), *torch.autograd.grad(outputs, list(leaves.values()), grads))


def truth(problem: Problem) -> Outcome:
    """Outputs and gradients of the float64 recurrence on the values of `problem`."""
    exact = problem.to(torch.float64)
    arguments = [getattr(exact, name) for name in TENSORS]
    options = {
        "scale": exact.scale,
        "initial_state": exact.initial_state,
        "cu_seqlens": exact.cu_seqlens,
        "use_qk_l2norm": exact.use_qk_l2norm,
    }
    outputs = gated_delta_rule(*arguments, **options)
    grads = gated_delta_rule_backward(*arguments, do=exact.do, dht=exact.dht, **options)
    return Outcome(*outputs, **{name: getattr(grads, name) for name in GRADIENTS})


def _call(kernel: ModuleType, problem: Problem, **options):
    return kernel.chunk_gated_delta_rule(
        *(getattr(problem, name) for name in TENSORS),
        scale=problem.scale,
        initial_state=problem.initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=problem.use_qk_l2norm,
        cu_seqlens=problem.cu_seqlens,
        **options,
    )
