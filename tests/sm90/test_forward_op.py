"""Numbers of the forward op as compiled, against the float64 token recurrence, judged by the chunk form in 16 bits.

An error may be 1.2 times the yardstick's and never above 6e-3, relative L2 over all tokens and heads of a call.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from flashqla_hub.reference import gated_delta_rule

from .chunk_form import chunk_form
from .shipped_library import find_library, load_ops

LIBRARY = find_library()
HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU"),
    pytest.mark.skipif(LIBRARY is None, reason="there is no library: set FLASHQLA_LIBRARY or run the compile command"),
]

DIM, LIMIT, FACTOR = 128, 6e-3, 1.2
SCALE = DIM**-0.5
DTYPE_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = tuple(DTYPE_NAMES.values())


def constant(value):
    return lambda shape, generator: torch.full(shape, value)


def trained(shape, generator):
    """From heads that hardly decay to heads that forget within a few tokens."""
    strength = torch.exp(torch.linspace(-5, 1.5, shape[-1]))
    return -torch.nn.functional.softplus(torch.randn(shape, generator=generator) + 1) * strength


def mixed(strong, mild):
    def gates(shape, generator):
        is_strong = torch.rand(shape, generator=generator) < 0.3
        return torch.where(is_strong, torch.tensor(strong), -torch.rand(shape, generator=generator) * mild)

    return gates


GATES = {
    "none": constant(0.0),
    "mild": constant(-1e-3),
    "slow": constant(-0.02),
    "one": constant(-1.0),
    "steep": constant(-1.7),
    "thirty": constant(-30.0),
    "thousand": constant(-1000.0),
    "infinite": constant(-float("inf")),
    "trained": trained,
    "huge-among-mild": mixed(-1e30, 0.1),
    "infinite-among-mild": mixed(-float("inf"), 0.01),
    "hundred-among-mild": mixed(-99.0, 0.05),
}


@dataclass(frozen=True)
class Case:
    """One call; `lengths` packs sequences, otherwise `batch` rows of `tokens`."""

    id: str
    tokens: int = 200
    heads: tuple[int, int] = (2, 4)
    batch: int = 1
    lengths: tuple[int, ...] | None = None
    unused: int = 0
    gates: str = "trained"
    dtype: torch.dtype = torch.bfloat16
    l2norm: bool = False
    clusters: float = 0.0
    beta: float = 1.0
    initial: torch.dtype | None = torch.float32
    v_first: bool = False
    scale: float = SCALE
    offsets: torch.dtype = torch.int32
    strided: bool = False
    segment: int = 0  # chunks; 0 lets the library choose


@dataclass(frozen=True)
class Call:
    """Inputs of a case on the GPU."""

    inputs: tuple
    initial: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    spans: list


@pytest.fixture(scope="module")
def forward():
    return load_ops(LIBRARY).sm90_gated_delta_rule_fwd


@pytest.fixture(scope="module")
def kept_forward():
    """The form for training, without what it keeps."""
    op = load_ops(LIBRARY).sm90_gated_delta_rule_fwd_kept
    return lambda *arguments: op(*arguments)[:2]


def make_call(case, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = case.tokens if case.lengths is None else sum(case.lengths) + case.unused
    heads, v_heads = case.heads

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = normal(case.batch, tokens, heads, DIM), normal(case.batch, tokens, heads, DIM)
    if case.clusters:
        centres = normal(8, DIM)[torch.randint(0, 8, k.shape[:3], generator=generator)]
        k = case.clusters * centres + (1 - case.clusters) * k
    if not case.l2norm:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v, shape = normal(case.batch, tokens, v_heads, DIM), (case.batch, tokens, v_heads)
    q, k, v = (x.to(case.dtype).cuda() for x in (q, k, v))
    if case.strided:
        packed = torch.full((case.batch, tokens, (2 * heads + v_heads) * DIM + 24), torch.nan, dtype=case.dtype).cuda()
        places = packed[..., :-24].unflatten(-1, (-1, DIM)).split((heads, heads, v_heads), dim=2)
        for place, x in zip(places, (q, k, v), strict=True):
            place.copy_(x)
        q, k, v = places
    g = GATES[case.gates](shape, generator).float().cuda()
    beta = (case.beta * normal(*shape).sigmoid()).cuda()
    bounds = [n * tokens for n in range(case.batch + 1)]
    cu_seqlens = None
    if case.lengths is not None:
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).to(case.offsets).cuda()
        bounds = cu_seqlens.tolist()
    spans = list(pairwise(bounds))
    initial = None
    if case.initial is not None:
        initial = (0.3 * normal(len(spans), v_heads, DIM, DIM)).to(case.initial).cuda()
    return Call((q, k, v, g, beta), initial, cu_seqlens, spans)


def run(forward, case, call):
    """o and the final states; freed memory is full of NaN first, so that what is left unwritten shows."""
    poison = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
    del poison
    o, state = forward(
        *call.inputs, call.initial, call.cu_seqlens, case.scale, case.l2norm, case.v_first, True, case.segment
    )
    return o, state


def relative(actual, expected):
    actual, expected = torch.cat([x.double().flatten() for x in actual]), torch.cat([x.flatten() for x in expected])
    return ((actual - expected).norm() / expected.norm()).item() if expected.numel() else 0.0


def judge(case, call, o, state):
    """Errors of outputs and states against the truth, next to the yardstick's."""
    rows = [x.flatten(0, 1) for x in call.inputs]
    state, o = state.mT if case.v_first else state, o.flatten(0, 1)
    initial = call.initial if call.initial is None or not case.v_first else call.initial.mT
    truths, yardsticks, ours = [], [], []
    for n, (start, end) in enumerate(call.spans):
        part = [x[start:end] for x in rows]
        first = None if initial is None else initial[n]
        options = {"scale": case.scale, "use_qk_l2norm": case.l2norm}
        wide = [x[None].double() for x in part]
        truths.append(gated_delta_rule(*wide, initial_state=None if first is None else first[None].double(), **options))
        yardsticks.append(chunk_form(*part, scale=case.scale, initial_state=first, l2norm=case.l2norm))
        ours.append((o[start:end], state[n]))
    for index, name in enumerate(("o", "final state")):
        truth = [x[index] for x in truths]
        error = relative([x[index] for x in ours], truth)
        yardstick = relative([x[index] for x in yardsticks], truth)
        assert error <= max(FACTOR * yardstick, 2e-7) and error <= LIMIT, (
            f"{name}: {error:.2e}, yardstick {yardstick:.2e}"
        )


def cases_of_both_dtypes():
    for name, dtype in DTYPE_NAMES.items():
        for tokens in (0, 1, 2, 17, 63, 64, 65, 127, 128, 129, 200):
            yield Case(f"{name}-B2-T{tokens}", tokens=tokens, batch=2, dtype=dtype, l2norm=True, gates="mild")
        for gates in GATES:
            yield Case(f"{name}-{gates}", tokens=333, heads=(2, 8), gates=gates, dtype=dtype)
            yield Case(f"{name}-{gates}-l2norm-VK", heads=(1, 4), gates=gates, dtype=dtype, l2norm=True, v_first=True)


CASES = [
    *cases_of_both_dtypes(),
    *(
        Case(f"H{h}-HV{hv}", tokens=150, heads=(h, hv), l2norm=True)
        for h, hv in ((1, 1), (3, 3), (2, 6), (1, 16), (5, 10))
    ),
    Case("T1000", tokens=1000, batch=2, gates="mild"),
    Case("clustered-keys-no-gate", tokens=1000, gates="none", clusters=0.7),
    Case("close-keys", tokens=1000, gates="mild", clusters=0.95),
    Case("beta-below-2", tokens=500, gates="mild", beta=2.0),
    Case("packed", lengths=(0, 1, 0, 64, 64, 0, 171, 63, 437, 0), l2norm=True),
    Case("packed-int64-VK", lengths=(500, 0, 1, 499), offsets=torch.int64, v_first=True),
    Case("packed-unused-rows", lengths=(100, 63, 1, 137), unused=399, initial=None),
    Case("packed-all-empty", lengths=(0, 0), unused=64),
    Case("bf16-initial-state", tokens=100, initial=torch.bfloat16),
    Case("scale", tokens=100, scale=-0.37),
    Case("strided", tokens=300, batch=2, strided=True, l2norm=True),
    Case("strided-packed-fp16", lengths=(7, 193, 250), strided=True, dtype=torch.float16),
]


SPLIT_LENGTHS = (0, 65, 700, 1, 64, 1111, 128, 0)
SPLIT_GATES = (
    "none",
    "mild",
    "one",
    "steep",
    "thirty",
    "infinite",
    "trained",
    "huge-among-mild",
    "infinite-among-mild",
)


def split_cases():
    """Sequences cut into segments that replay, that link to one segment and to many, and ends inside a segment."""
    for gates in SPLIT_GATES:
        for segment in (1, 3, 8):
            yield Case(f"split-{segment}-{gates}", lengths=SPLIT_LENGTHS, heads=(2, 4), gates=gates, segment=segment)
    yield Case("split-fp16", lengths=SPLIT_LENGTHS, dtype=torch.float16, gates="mild", segment=2)
    yield Case("split-dense", tokens=900, batch=3, gates="mild", segment=4, v_first=True)
    yield Case("split-from-zero", tokens=900, gates="none", segment=3, initial=None)
    yield Case("split-l2norm", lengths=SPLIT_LENGTHS, l2norm=True, segment=2, offsets=torch.int64, unused=70)
    yield Case("split-beta-below-2", tokens=900, gates="mild", beta=2.0, segment=2)
    yield Case("split-clustered-keys", tokens=2000, gates="none", clusters=0.9, segment=4)
    yield Case("split-slow-decay", tokens=3000, gates="slow", heads=(1, 4), segment=5)


CASES += split_cases()


def many_lengths(*, longest, count=210, seed=0):
    """So many short sequences, of a mean below a chunk, that they have a kernel of their own, and some of other lengths."""
    lengths = torch.randint(0, 33, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    for place, length in enumerate((0, 1, 63, 64, 65, 200, 0, 129, longest, 0)):
        lengths[place * (count // 10)] = length
    return tuple(lengths)


def short_cases():
    lengths = many_lengths(longest=1024)
    for gates in ("none", "trained", "one", "thirty", "infinite-among-mild"):
        yield Case(f"short-{gates}", lengths=lengths, heads=(4, 8), gates=gates)
    yield Case("short-fp16", lengths=lengths, heads=(4, 8), dtype=torch.float16)
    yield Case("short-l2norm-VK", lengths=lengths, heads=(4, 12), l2norm=True, v_first=True)
    yield Case("short-from-zero", lengths=lengths, heads=(4, 4), initial=None, unused=70, offsets=torch.int64)
    for gates in ("trained", "one", "thirty", "infinite-among-mild"):
        yield Case(f"short-from-zero-{gates}", lengths=lengths, heads=(4, 12), gates=gates, initial=None, l2norm=True)
    yield Case("short-from-zero-fp16", lengths=lengths, heads=(4, 20), initial=None, dtype=torch.float16)
    yield Case("short-strided", lengths=lengths, heads=(4, 8), strided=True)
    yield Case("short-dense", tokens=40, batch=210, heads=(4, 8))
    yield Case("short-and-long", lengths=many_lengths(longest=1025), heads=(4, 8))
    yield Case("short-and-longer", lengths=many_lengths(longest=2500), heads=(4, 8), gates="mild", v_first=True)


SHORT_CASES = list(short_cases())
CASES += SHORT_CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_forward_matches_the_recurrence(forward, case):
    call = make_call(case)
    o, state = run(forward, case, call)
    assert torch.isfinite(o).all() and torch.isfinite(state).all()
    assert not o.flatten(0, 1)[call.spans[-1][1] :].any(), "rows behind the last sequence are zero"
    judge(case, call, o, state)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == torch.bfloat16], ids=lambda case: case.id)
def test_forward_for_training_matches_the_recurrence(kept_forward, case):
    test_forward_matches_the_recurrence(kept_forward, case)


def test_forward_for_training_takes_a_beta_of_zero(kept_forward):
    case = Case("beta-zero", tokens=150, l2norm=True, gates="mild")
    call = make_call(case)
    call.inputs[4][:, ::3] = 0
    judge(case, call, *run(kept_forward, case, call))


@pytest.mark.parametrize("op", ["forward", "kept_forward"])
def test_a_neighbour_full_of_nan_changes_no_bit(op, request):
    forward = request.getfixturevalue(op)
    case = Case("neighbours", lengths=(70, 100, 63, 167), gates="mild")
    call = make_call(case)
    o, state = run(forward, case, call)
    spoilt = make_call(case)
    for n in (1, 3):
        start, end = spoilt.spans[n]
        for x in spoilt.inputs:
            x[:, start:end] = torch.nan
        spoilt.initial[n] = torch.nan
    other_o, other_state = run(forward, case, spoilt)
    for n in (0, 2):
        start, end = call.spans[n]
        assert torch.equal(o[:, start:end], other_o[:, start:end]) and torch.equal(state[n], other_state[n])


@pytest.mark.parametrize("gates", ["none", "trained"])
def test_a_neighbour_full_of_nan_changes_no_bit_of_split_sequences(forward, gates):
    case = Case("neighbours", lengths=(700, 1000, 630, 1670), gates=gates, segment=3)
    call, spoilt = make_call(case), make_call(case)
    o, state = run(forward, case, call)
    for n in (1, 3):
        start, end = spoilt.spans[n]
        for x in spoilt.inputs:
            x[:, start:end] = torch.nan
        spoilt.initial[n] = torch.nan
    other_o, other_state = run(forward, case, spoilt)
    for n in (0, 2):
        start, end = call.spans[n]
        assert torch.equal(o[:, start:end], other_o[:, start:end]) and torch.equal(state[n], other_state[n])


def test_a_neighbour_full_of_nan_changes_no_bit_of_short_sequences(forward):
    case = Case("neighbours", lengths=many_lengths(longest=1100), heads=(4, 8), gates="mild")
    call, spoilt = make_call(case), make_call(case)
    o, state = run(forward, case, call)
    for start, end in spoilt.spans[1::2]:
        for x in spoilt.inputs:
            x[:, start:end] = torch.nan
    spoilt.initial[1::2] = torch.nan
    other_o, other_state = run(forward, case, spoilt)
    for start, end in call.spans[::2]:
        assert torch.equal(o[:, start:end], other_o[:, start:end])
    assert torch.equal(state[::2], other_state[::2])


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case.id)
def test_short_sequences_have_the_bits_of_the_recurrence(forward, case):
    """Those of one chunk, and not in float16, where strong gates round in another place; outputs alone are those with states."""
    call = make_call(case)
    o, state = run(forward, case, call)
    options = (case.scale, case.l2norm, case.v_first, False, 0)
    assert torch.equal(o, forward(*call.inputs, call.initial, call.cu_seqlens, *options)[0])
    again_o, again_state = run(forward, case, call)
    assert torch.equal(o, again_o) and torch.equal(state, again_state)
    other_o, other_state = run(forward, replace(case, segment=1 << 25), call)
    if case.dtype == torch.bfloat16:
        o, other_o = o.flatten(0, 1), other_o.flatten(0, 1)
        for n, (start, end) in enumerate(call.spans):
            if end - start <= 64:
                assert torch.equal(o[start:end], other_o[start:end]) and torch.equal(state[n], other_state[n])


def test_an_invariant_cut_gives_the_same_bits_in_any_batch_and_for_any_heads(forward):
    case = Case("whole", heads=(4, 8), lengths=(900, 1300, 77), gates="trained", segment=4)
    call = make_call(case)
    o, state = run(forward, case, call)
    start, end = call.spans[1]
    q, k, v, g, beta = (x[:, start:end] for x in call.inputs)
    part = Call((q[:, :, 2:], k[:, :, 2:], v[:, :, 4:], g[:, :, 4:], beta[:, :, 4:]), call.initial[1:2, 4:], None, [])
    alone_o, alone_state = run(forward, Case("part", segment=4), part)
    assert torch.equal(alone_o, o[:, start:end, 4:]) and torch.equal(alone_state, state[1:2, 4:])


def test_a_captured_graph_serves_other_lengths_of_the_same_total(forward):
    case = Case("graph", lengths=(900, 0, 1300, 77), gates="slow", segment=3)
    call = make_call(case)
    run(forward, case, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run(forward, case, call)
    for lengths in ((1, 2200, 0, 76), (570, 569, 569, 569), case.lengths):
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(case.offsets).cuda()
        call.cu_seqlens.copy_(bounds)
        graph.replay()
        expected_o, expected_state = run(forward, case, Call(call.inputs, call.initial, bounds, []))
        assert torch.equal(o, expected_o) and torch.equal(state, expected_state)


def chunk_truth(q, k, v, beta, scale):
    """o and the last state in float64 without gates, by chunks, since the token recurrence is slow on 32768 tokens."""
    group = v.shape[1] // q.shape[1]
    q, k = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (q, k))
    v, beta = v.double().transpose(0, 1), beta.double().T[..., None]
    S, outputs, eye = torch.zeros(v.shape[0], DIM, DIM, dtype=v.dtype, device=v.device), [], torch.eye(64).to(v)
    for q_c, k_c, v_c, b_c in zip(*(x.split(64, dim=1) for x in (q, k, v, beta)), strict=True):
        N = torch.linalg.solve_triangular(eye + (b_c * (k_c @ k_c.mT)).tril(-1), b_c * (v_c - k_c @ S), upper=False)
        outputs.append(scale * (q_c @ S + (q_c @ k_c.mT).tril() @ N))
        S = S + k_c.mT @ N
    return torch.cat(outputs, 1).transpose(0, 1), S


@pytest.mark.parametrize("strength", [1.0, 0.1])
@pytest.mark.parametrize("clusters", [0.0, 0.9])
def test_cutting_a_long_row_without_decay_costs_no_precision(forward, clusters, strength):
    case = Case("long", tokens=32768, heads=(1, 2), gates="none", clusters=clusters, beta=strength, initial=None)
    call = make_call(case)
    truth = chunk_truth(*(x[0] for x in call.inputs[:3]), call.inputs[4][0], case.scale)
    errors = {}
    for segment in (1 << 25, 0, 16, 64):
        o, state = run(forward, replace(case, segment=segment), call)
        errors[segment] = relative([o[0]], [truth[0]]), relative([state[0]], [truth[1]])
    print(case.id, clusters, strength, errors)
    for error in errors.values():
        assert all(a <= 1.1 * b for a, b in zip(error, errors[1 << 25], strict=True)), errors


@pytest.mark.parametrize("gates", ["mild", "trained"])
@pytest.mark.parametrize("segment", [0, 5])
def test_forward_repeats_bit_for_bit(forward, gates, segment):
    case = Case("repeat", heads=(16, 64), lengths=(1000, 1, 999, 2048), gates=gates, l2norm=True, segment=segment)
    call = make_call(case)
    o, state = run(forward, case, call)
    for _ in range(50):
        again_o, again_state = run(forward, case, call)
        assert torch.equal(o, again_o) and torch.equal(state, again_state)


def test_more_than_65535_sequence_heads(forward):
    """One token a sequence: o = scale (q k) beta v and S = k beta v^T."""
    sequences, heads, v_heads = 1100, 16, 64
    case = Case("many", heads=(heads, v_heads), lengths=(1,) * sequences, gates="mild", initial=None)
    call = make_call(case)
    o, state = run(forward, case, call)
    q, k, v, _, beta = (x[0].double() for x in call.inputs)
    q, k = (x.repeat_interleave(v_heads // heads, 1) for x in (q, k))
    written = beta[..., None] * v
    assert relative([o[0]], [SCALE * (q * k).sum(-1, keepdim=True) * written]) <= LIMIT
    assert relative([state], [k[..., None] * written[:, :, None]]) <= LIMIT
