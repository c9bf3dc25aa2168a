"""What the property tests draw: calls of the public functions, how they are made, and what they must give.

`Ranges` says from what; everything is drawn on its device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from .inputs import GRADIENTS, TENSORS, Outcome, Problem, make_problem, signed, truth, uniform
from .test_side_effects import VIEWS

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GATES = (0.0, -1e-3, -1.0, -30.0, -1000.0, -float("inf"))


@dataclass(frozen=True)
class Ranges:
    """Where the arguments of a call come from.

    Attributes:
        dims: Strategy of (K, V).
        tokens, heads, ratios: Strategies of T, H and HV / H.
        dtypes: Of q, k and v.
    """

    device: str
    dims: st.SearchStrategy
    tokens: st.SearchStrategy
    heads: st.SearchStrategy
    ratios: st.SearchStrategy
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Call:
    """A call of the gated delta rule: a problem and how it is handed over.

    Attributes:
        entry: "chunk", "recurrent" or "by hand".
        losses: The outputs that are differentiated.
        parameters: A_log and dt_bias if the raw gate input stands in the place of g; g of `problem` is then that input.
        logits: Whether beta of `problem` is handed over as logits.
    """

    problem: Problem
    entry: str
    chunk_size: int
    state_v_first: bool
    losses: tuple[str, ...]
    parameters: tuple[Tensor, Tensor] | None = None
    logits: bool = False


@st.composite
def shapes(draw, ranges: Ranges) -> dict:
    packed = draw(st.booleans())
    heads, tokens = draw(ranges.heads), draw(ranges.tokens)
    dim_k, dim_v = draw(ranges.dims)
    return {
        "batch": 1 if packed else draw(st.integers(0, 3)),
        "tokens": tokens,
        "heads": heads,
        "value_heads": heads * draw(ranges.ratios),
        "dim_k": dim_k,
        "dim_v": dim_v,
        "bounds": [0, *sorted(draw(st.lists(st.integers(0, tokens), max_size=5)))] if packed else None,
        "seed": draw(st.integers(0, 10**6)),
        "states": (1, 2) if draw(st.booleans()) else None,
    }


@st.composite
def problems(draw, ranges: Ranges) -> Problem:
    """Mild gates or those of every strength, keys normalised or not, beta up to 2, any mixture of dtypes, any strides."""
    problem = make_problem(**draw(shapes(ranges)), scale=draw(st.sampled_from([None, 1.0, -0.5])))
    if draw(st.booleans()):
        choice = (len(GATES) * uniform(tuple(problem.g.shape), draw(st.integers(0, 99)))).long()
        problem = replace(problem, g=torch.tensor(GATES, dtype=torch.float64)[choice])
    if draw(st.booleans()):  # keys as they are, of norm below 1
        problem = replace(problem, use_qk_l2norm=False, k=problem.k / problem.k.shape[3] ** 0.5)
    problem = replace(problem, beta=problem.beta * draw(st.sampled_from([1, 2])))
    problem = problem.to(draw(st.sampled_from(ranges.dtypes)))
    for name in ("g", "beta", "initial_state"):
        if getattr(problem, name) is not None:
            problem = replace(problem, **{name: getattr(problem, name).to(draw(st.sampled_from(DTYPES)))})
    for name in (*TENSORS, "do"):
        view = draw(st.sampled_from([None, *VIEWS]))
        problem = replace(problem, **{name: VIEWS[view](getattr(problem, name))}) if view else problem
    return problem


@st.composite
def calls(draw, ranges: Ranges) -> Call:
    with torch.device(ranges.device):
        problem = draw(problems(ranges))
        losses = draw(st.sampled_from([("o",), ("final_state",), ("o", "final_state")]))
        entry = draw(st.sampled_from(["chunk", "recurrent", "by hand"]))
        parameters, logits = None, False
        if entry != "by hand" and draw(st.booleans()):
            heads = (problem.v.shape[2],)
            raw = replace(problem, g=signed(tuple(problem.g.shape), 7).to(problem.g.dtype))
            parameters = tuple(signed(heads, seed).to(draw(st.sampled_from(DTYPES))) for seed in (8, 9))
            problem, logits = raw, draw(st.booleans())
        return Call(
            problem,
            entry,
            chunk_size=64 if entry == "recurrent" else draw(st.sampled_from([16, 32, 64])),
            state_v_first=draw(st.booleans()),
            losses=("o",) if problem.dht is None else losses,
            parameters=parameters,
            logits=logits,
        )


def run(kernel: ModuleType, call: Call) -> Outcome:
    """The outcome through the drawn entry, states in the layout [N, HV, K, V]."""
    problem = call.problem.map(lambda x: x.detach())
    state, dht = (
        None if x is None else x.mT if call.state_v_first else x for x in (problem.initial_state, problem.dht)
    )
    options = {
        "scale": problem.scale,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": problem.use_qk_l2norm,
        "state_v_first": call.state_v_first,
        "cu_seqlens": problem.cu_seqlens,
    }
    if call.entry != "recurrent":
        options["chunk_size"] = call.chunk_size
    tensors = {name: getattr(problem, name) for name in TENSORS}
    grads = {"o": problem.do, "final_state": dht}
    if call.entry == "by hand":
        outputs, gradients = _by_hand(kernel, call, tensors, state, grads, options)
    else:
        outputs, gradients = _by_autograd(kernel, call, tensors, state, grads, options)
    named = dict(zip(GRADIENTS, gradients, strict=False))
    turned = {"final_state": outputs[1], "dh0": named.pop("dh0", None)}
    if call.state_v_first:
        turned = {name: None if x is None else x.mT for name, x in turned.items()}
    return Outcome(o=outputs[0].detach(), **named, **{k: None if x is None else x.detach() for k, x in turned.items()})


def _by_hand(kernel, call: Call, tensors: dict, state, grads: dict, options: dict):
    result = kernel.chunk_gated_delta_rule_fwd(**tensors, initial_state=state, **options)
    do, dht = (grads[name] if name in call.losses else None for name in ("o", "final_state"))
    del options["output_final_state"]
    gradients = kernel.chunk_gated_delta_rule_bwd(
        **tensors, residuals=result.residuals, do=do, dht=dht, initial_state=state, **options
    )
    return (result.o, result.final_state), gradients


def _by_autograd(kernel, call: Call, tensors: dict, state, grads: dict, options: dict):
    leaves = [x.requires_grad_() for x in tensors.values()]
    if state is not None:
        leaves.append(state.requires_grad_())
    if call.parameters is not None:
        A_log, dt_bias = call.parameters
        options |= {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        options["use_beta_sigmoid_in_kernel"] = call.logits
    function = kernel.chunk_gated_delta_rule if call.entry == "chunk" else kernel.fused_recurrent_gated_delta_rule
    outputs = function(**tensors, initial_state=state, **options)
    lossy = [dict(zip(grads, outputs, strict=True))[name] for name in call.losses]
    weights = [grads[name].to(x.dtype) for name, x in zip(call.losses, lossy, strict=True)]
    return outputs, torch.autograd.grad(lossy, leaves, weights)


def expected_of(call: Call, solve: Callable[[Problem], Outcome] = truth) -> Outcome:
    """The outcome of the float64 recurrence, or of another `solve`, through the activations of the gates."""
    problem = call.problem
    silent = {
        "do": problem.do if "o" in call.losses else torch.zeros_like(problem.do),
        "dht": problem.dht if "final_state" in call.losses else None,
    }
    problem = replace(problem, **silent)
    if call.parameters is None:
        return solve(problem)
    raw_g, raw_beta = (x.detach().double().requires_grad_() for x in (problem.g, problem.beta))
    A_log, dt_bias = (x.double() for x in call.parameters)
    g = -A_log.exp() * F.softplus(raw_g + dt_bias)
    beta = raw_beta.sigmoid() if call.logits else raw_beta * 1
    outcome = solve(replace(problem, g=g.detach(), beta=beta.detach()))
    dg, dbeta = torch.autograd.grad((g, beta), (raw_g, raw_beta), (outcome.dg.double(), outcome.dbeta.double()))
    return replace(outcome, dg=dg, dbeta=dbeta)


@dataclass(frozen=True)
class Convolution:
    """A call of the convolution.

    Attributes:
        x: [B, D, T], dy alike; weight [D, W]; bias [D] or None.
        sequence: [B, T] int64, the sequence of each token, negative for none; None for one sequence a row.
        how: The keywords that say the same to `causal_conv1d_fn`.
        initial_states: [B, D, W - 1] or None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    activation: str | None
    sequence: Tensor | None
    how: dict
    initial_states: Tensor | None


@st.composite
def convolutions(draw, ranges: Ranges) -> Convolution:
    with torch.device(ranges.device):
        packing = draw(st.sampled_from([None, "cu_seqlens", "seq_idx"]))
        batch = 1 if packing == "cu_seqlens" else draw(st.integers(0, 3))
        channels, tokens, width = draw(st.integers(1, 40)), draw(ranges.tokens), draw(st.integers(1, 8))
        if draw(st.booleans()):
            channels *= 8
        dtype = draw(st.sampled_from(ranges.dtypes))
        seed = draw(st.integers(0, 10**6))
        x, dy = (_laid_out(draw, signed((batch, channels, tokens), seed + i).to(dtype)) for i in (0, 1))
        weight_dtype = draw(st.sampled_from([dtype, torch.float32]))
        weight = signed((channels, width), seed + 2).to(weight_dtype)
        bias = signed((channels,), seed + 3).to(weight_dtype) if draw(st.booleans()) else None
        sequence, how = _sequences(draw, packing, batch, tokens)
        states = None
        if packing is None and draw(st.booleans()):
            states = signed((batch, channels, width - 1), seed + 4).to(dtype)
        activation = draw(st.sampled_from([None, "silu", "swish"]))
        return Convolution(x, weight, bias, dy, activation, sequence, how, states)


def _laid_out(draw, x: Tensor) -> Tensor:
    """Tokens last in memory, channels last as a projection leaves them, or a view of something larger."""
    kind = draw(st.sampled_from(["tokens last", "channels last", *VIEWS]))
    if kind == "channels last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return VIEWS[kind](x) if kind in VIEWS else x


def _sequences(draw, packing: str | None, batch: int, tokens: int) -> tuple[Tensor | None, dict]:
    if packing is None:
        return None, {}
    bounds = [0, *sorted(draw(st.lists(st.integers(0, tokens), max_size=4)))]
    token = torch.arange(tokens)
    sequence = torch.searchsorted(torch.tensor(bounds[1:] or [0]), token, right=True)
    sequence = sequence.masked_fill(token >= bounds[-1], -1).expand(batch, -1)
    if packing == "cu_seqlens":
        return sequence, {"cu_seqlens": torch.tensor(bounds, dtype=draw(st.sampled_from([torch.int32, torch.int64])))}
    return sequence, {"seq_idx": sequence.to(torch.int32)}


def convolve(call: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [B, D, T] by its definition, one shifted copy of x a tap; differentiable."""
    width, tokens = weight.shape[1], x.shape[2]
    before = x.new_zeros(*x.shape[:2], width - 1) if call.initial_states is None else call.initial_states.to(x.dtype)
    extended = torch.cat([before, x], dim=2)
    sequence = torch.zeros_like(x[:, 0], dtype=torch.long) if call.sequence is None else call.sequence
    outside = sequence.new_full((x.shape[0], width - 1), 0 if call.sequence is None else -2)
    owner = torch.cat([outside, sequence], dim=1)
    y = torch.zeros_like(x)
    for tap in range(width):
        same = (owner[:, tap : tap + tokens] == sequence)[:, None]
        y = y + weight[:, tap, None] * extended[:, :, tap : tap + tokens].where(same, x.new_zeros(()))
    if bias is not None:
        y = y + bias[:, None]
    y = F.silu(y) if call.activation else y
    return y.where((sequence >= 0)[:, None], x.new_zeros(()))


@dataclass(frozen=True)
class Norm:
    """A call of the gated norm: x, g and dy [..., D]; weight, bias [D]."""

    x: Tensor
    g: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor
    activation: str


@st.composite
def norms(draw, ranges: Ranges) -> Norm:
    with torch.device(ranges.device):
        size = draw(st.sampled_from([5, 7, 64, 96, 128, 256]))
        shape = (*draw(st.lists(st.integers(0, 9), max_size=3)), size)
        dtype, weight_dtype = draw(st.sampled_from(ranges.dtypes)), draw(st.sampled_from(ranges.dtypes))
        seed = draw(st.integers(0, 10**6))
        x, g, dy = (_strided(draw, 3 * signed(shape, seed + i).to(dtype)) for i in range(3))
        weight = 1 + signed((size,), seed + 3).to(weight_dtype)
        bias = signed((size,), seed + 4).to(weight_dtype) if draw(st.booleans()) else None
        return Norm(x, g, weight, bias, dy, draw(st.sampled_from(["silu", "swish", "sigmoid"])))


def _strided(draw, x: Tensor) -> Tensor:
    view = draw(st.sampled_from([None, *VIEWS]))
    return VIEWS[view](x) if view else x


def normalize(call: Norm, x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y by its definition; differentiable."""
    y = weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    gate = g.sigmoid() if call.activation == "sigmoid" else g * g.sigmoid()
    return (y if bias is None else y + bias) * gate


def gradients(function: Callable, tensors: tuple[Tensor | None, ...], dy: Tensor) -> list[Tensor]:
    """[y, and the gradient of each tensor that is given]."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    y = function(*leaves)
    given = [x for x in leaves if x is not None]
    return [y.detach(), *torch.autograd.grad(y, given, dy.to(y.dtype))]
