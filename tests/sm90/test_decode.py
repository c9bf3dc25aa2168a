"""The SM90 decode kernel behind the public function, against the float64 token recurrence.

Everything but the outputs is float32: the outputs' error may be 1.2 times that of rounding the truth to their dtype, and the
states' 1.2 times that of the recurrence in float32, or of rounding to the dtype of a pool, plus a rounding of float32.
"""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from flashqla_hub.reference import gated_delta_rule

from .measures import kernels_of, relative

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

DIM, SLACK, ROUNDING = 128, 1.2, 2.0**-22
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def served(part):
    """Fails a test whose call would be served by anything but the decode kernel; skips where there is none."""
    module = part("gated_delta_rule.recurrent_ops")
    x = torch.empty(1, 1, 1, DIM, dtype=torch.bfloat16, device="cuda")
    reason = module.explain_unsupported((x, x, x), (), None, 1, False)
    if reason is not None:
        pytest.skip(f"{reason}; FLASHQLA_TEST_VARIANT names the folder of a variant that has one")


@dataclass(frozen=True)
class Case:
    """One call; `lengths` packs sequences, otherwise `batch` rows of `tokens`."""

    id: str
    batch: int = 2
    tokens: int = 1
    heads: tuple[int, int] = (2, 4)
    lengths: tuple[int, ...] | None = None
    unused: int = 0
    dtype: str = "bf16"
    gates: str = "raw"
    strong: float = 2.0
    l2norm: bool = True
    initial: torch.dtype | None = torch.float32
    v_first: bool = False
    offsets: torch.dtype = torch.int32
    strided: bool = False
    double: bool = False


@dataclass
class Call:
    inputs: list
    options: dict
    initial: torch.Tensor | None
    spans: list


def make_call(case, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if case.lengths is not None else case.batch
    tokens = case.tokens if case.lengths is None else sum(case.lengths) + case.unused
    heads, v_heads = case.heads
    dtype = DTYPES[case.dtype]

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    sizes = (heads, heads, v_heads)
    q, k, v = (normal(batch, tokens, size, DIM) for size in sizes)
    if not case.l2norm:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    q, k, v = (x.to(dtype).cuda() for x in (q, k, v))
    if case.strided:
        wide = torch.full((batch, tokens, sum(sizes) * DIM + 8), torch.nan, dtype=dtype, device="cuda")
        places = wide[..., :-8].unflatten(-1, (-1, DIM)).split(sizes, dim=2)
        for place, x in zip(places, (q, k, v), strict=True):
            place.copy_(x)
        q, k, v = places
    options = {"use_qk_l2norm_in_kernel": case.l2norm, "state_v_first": case.v_first, "output_final_state": True}
    if case.gates == "raw":
        a, b = ((2 * normal(batch, tokens, 2 * v_heads)).to(dtype).cuda()).split(v_heads, dim=-1)
        options |= {"g": a, "beta": b, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        options |= {"A_log": normal(v_heads).cuda(), "dt_bias": normal(v_heads).to(dtype).cuda()}
        options["allow_neg_eigval"] = case.double
    else:
        options["g"] = (-case.strong * torch.rand(batch, tokens, v_heads, generator=generator)).cuda()
        options["beta"] = normal(batch, tokens, v_heads).sigmoid().to(dtype).cuda()
    bounds = [n * tokens for n in range(batch + 1)]
    if case.lengths is not None:
        options["cu_seqlens"] = torch.tensor([0, *case.lengths]).cumsum(0).to(case.offsets).cuda()
        bounds = options["cu_seqlens"].tolist()
    initial = None
    if case.initial is not None:
        initial = (0.3 * normal(len(bounds) - 1, v_heads, DIM, DIM)).to(case.initial).cuda()
    return Call([q, k, v], options, initial, list(pairwise(bounds)))


def run(kernel, call, **options):
    poison = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(16)]
    del poison
    with torch.no_grad():
        return kernel.fused_recurrent_gated_delta_rule(
            *call.inputs, **{"initial_state": call.initial, **call.options, **options}
        )


def recurrence(case, call, dtype):
    """o and final states of each sequence by the token recurrence in `dtype`, states [HV, K, V]."""
    options = call.options
    g, beta = (options[name].to(dtype) for name in ("g", "beta"))
    if case.gates == "raw":
        g = -options["A_log"].to(dtype).exp() * torch.nn.functional.softplus(g + options["dt_bias"].to(dtype))
        beta = (2 if case.double else 1) * beta.sigmoid()
    rows = [x.to(dtype).flatten(0, 1) for x in (*call.inputs, g, beta)]
    found = []
    for n, (start, stop) in enumerate(call.spans):
        initial = None if call.initial is None else call.initial[n : n + 1].to(dtype)
        if initial is not None and case.v_first:
            initial = initial.mT
        o, state = gated_delta_rule(
            *(x[None, start:stop] for x in rows),
            scale=DIM**-0.5,
            initial_state=initial,
            use_qk_l2norm=case.l2norm,
        )
        found.append((o[0], state[0]))
    return [torch.cat([o for o, _ in found]), torch.stack([state for _, state in found])]


def judge(case, call, o, state):
    truth_o, truth_state = recurrence(case, call, torch.float64)
    _, single_state = recurrence(case, call, torch.float32)
    last = call.spans[-1][1]
    rows = o.flatten(0, 1)
    assert o.isfinite().all() and state.isfinite().all()
    assert rows[last:].count_nonzero() == 0, "rows behind the last sequence are zero"
    assert relative(rows[:last], truth_o) <= SLACK * relative(truth_o.to(o.dtype), truth_o)
    state = state.mT if case.v_first else state
    assert relative(state, truth_state) <= SLACK * relative(single_state, truth_state) + ROUNDING


CASES = [
    *(
        Case(f"{dtype}-{'VK' if v_first else 'KV'}-T{tokens}", tokens=tokens, dtype=dtype, v_first=v_first, batch=3)
        for dtype in DTYPES
        for v_first in (False, True)
        for tokens in (0, 1, 2, 5, 16)
    ),
    *(Case(f"H{h}-HV{hv}", heads=(h, hv), tokens=2) for h, hv in ((1, 1), (3, 3), (2, 6), (16, 32), (16, 64))),
    Case("activated", gates="given", tokens=3),
    Case("activated-no-norm", gates="given", tokens=3, l2norm=False),
    Case("strong-gates", gates="given", strong=1000.0, tokens=4),
    Case("no-initial-state", initial=None, tokens=3),
    Case("bf16-initial-state", initial=torch.bfloat16),
    Case("beta-below-2", double=True, tokens=3),
    Case("strided", strided=True, tokens=3),
    Case("strided-one-token-VK", strided=True, v_first=True),
    Case("packed", lengths=(1, 0, 3, 16, 1, 2)),
    Case("packed-int64-VK", lengths=(0, 2, 0, 1), offsets=torch.int64, v_first=True),
    Case("packed-unused-rows", lengths=(2, 1), unused=9),
    Case("many", batch=300, heads=(1, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_decode_matches_the_recurrence(kernel, case):
    call = make_call(case)
    judge(case, call, *run(kernel, call))


def test_infinite_gates_forget(kernel):
    case = Case("infinite", gates="given", tokens=2)
    call = make_call(case)
    call.options["g"] = torch.full_like(call.options["g"], -torch.inf)
    o, state = run(kernel, call)
    call.initial = torch.zeros_like(call.initial)
    judge(case, call, o, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("v_first", [False, True], ids=["KV", "VK"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("lengths", [None, (1, 3, 0, 2, 1)], ids=["dense", "packed"])
def test_a_pool_is_updated_in_place_and_skipped_slots_stay(kernel, dtype, v_first, index_dtype, lengths):
    case = Case("pool", batch=5, tokens=2, lengths=lengths, v_first=v_first)
    call = make_call(case)
    pool = (0.3 * torch.randn(9, 4, DIM, DIM, device="cuda")).to(dtype)
    before = pool.clone()
    indices = [7, -1, 2, 8, 1000]
    o, result = run(kernel, call, initial_state=pool, state_indices=torch.tensor(indices, dtype=index_dtype).cuda())
    assert result is pool
    call.initial = torch.stack([before[i] if 0 <= i < 9 else torch.zeros_like(before[0]) for i in indices])
    truth_o, truth_state = recurrence(case, call, torch.float64)
    rows = o.flatten(0, 1)
    for n, (index, (start, stop)) in enumerate(zip(indices, call.spans, strict=True)):
        if not 0 <= index < 9:
            assert rows[start:stop].count_nonzero() == 0
            continue
        part = truth_o[start:stop]
        assert relative(rows[start:stop], part) <= SLACK * relative(part.bfloat16(), part)
        state = pool[index].mT if v_first else pool[index]
        allowed = SLACK * relative(truth_state[n].to(dtype), truth_state[n]) + 4 * ROUNDING
        assert relative(state, truth_state[n]) <= allowed
    untouched = [slot for slot in range(9) if slot not in indices]
    assert torch.equal(pool[untouched], before[untouched])


def test_two_steps_equal_one_call_with_two_tokens(kernel):
    """Nothing but the state passes from token to token, and it is not rounded on the way."""
    call = make_call(Case("two", tokens=2, batch=3, initial=torch.float32))
    o, state = run(kernel, call)
    carried, outputs = call.initial, []
    for t in range(2):
        step = Call([x[:, t : t + 1] for x in call.inputs], dict(call.options), carried, call.spans)
        step.options |= {name: call.options[name][:, t : t + 1] for name in ("g", "beta")}
        part, carried = run(kernel, step)
        outputs.append(part)
    assert torch.equal(torch.cat(outputs, 1), o) and torch.equal(carried, state)


def test_a_sequence_does_not_depend_on_its_batch(kernel):
    case = Case("batch", batch=40, heads=(16, 32))
    call = make_call(case)
    o, state = run(kernel, call)
    alone = Call([x[7:8] for x in call.inputs], dict(call.options), call.initial[7:8], call.spans[:1])
    alone.options |= {name: call.options[name][7:8] for name in ("g", "beta")}
    single_o, single_state = run(kernel, alone)
    assert torch.equal(single_o[0], o[7]) and torch.equal(single_state[0], state[7])


def test_decode_repeats_bit_for_bit(kernel):
    call = make_call(Case("repeat", batch=64, heads=(16, 32), tokens=3))
    o, state = run(kernel, call)
    for _ in range(20):
        again_o, again_state = run(kernel, call)
        assert torch.equal(o, again_o) and torch.equal(state, again_state)


def test_one_launch_for_a_step(kernel):
    call = make_call(Case("launches", batch=8, heads=(16, 32)))
    step = kernel.fused_recurrent_gated_delta_rule
    with torch.no_grad():
        kernels = kernels_of(lambda: step(*call.inputs, initial_state=call.initial, **call.options))
    assert len(kernels) == 1, kernels


def test_a_captured_step_moves_a_pool_on(kernel):
    case = Case("graph", batch=4)
    call = make_call(case)
    pool, indices = torch.randn(6, 4, DIM, DIM, device="cuda"), torch.tensor([5, 0, 3, 1], device="cuda")
    run(kernel, call, initial_state=pool.clone(), state_indices=indices)
    static = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured, _ = kernel.fused_recurrent_gated_delta_rule(
            *call.inputs, initial_state=static, state_indices=indices, **call.options
        )
    static.copy_(pool)
    expected = pool.clone()
    for turn in ([5, 0, 3, 1], [2, -1, 4, 0]):
        indices.copy_(torch.tensor(turn))
        graph.replay()
        o, _ = run(kernel, call, initial_state=expected, state_indices=indices)
        assert torch.equal(captured, o) and torch.equal(static, expected)


def test_compiled_whole_it_gives_the_same_bits(kernel):
    call = make_call(Case("compile", batch=2))
    torch._dynamo.reset()
    compiled = torch.compile(kernel.fused_recurrent_gated_delta_rule, fullgraph=True)
    with torch.no_grad():
        o, state = compiled(*call.inputs, initial_state=call.initial, **call.options)
        pool, indices = call.initial.clone(), torch.tensor([1, 0], device="cuda")
        pooled, _ = compiled(*call.inputs, initial_state=pool, state_indices=indices, **call.options)
    expected_o, expected_state = run(kernel, call)
    assert torch.equal(o, expected_o) and torch.equal(state, expected_state)
    again = call.initial.clone()
    expected_pooled, _ = run(kernel, call, initial_state=again, state_indices=indices)
    assert torch.equal(pooled, expected_pooled) and torch.equal(pool, again)


def test_states_beyond_two_billion_elements(kernel):
    """One head of each of 70,000 sequences: more than CUDA's second grid axis holds, and addresses beyond 32 bits."""
    sequences = 140_000
    case = Case("huge", batch=1, heads=(1, 1))
    call = make_call(case)
    q, k, v = (x.expand(sequences, -1, -1, -1) for x in call.inputs)
    options = call.options | {name: call.options[name].expand(sequences, -1, -1) for name in ("g", "beta")}
    with torch.no_grad():
        o, state = kernel.fused_recurrent_gated_delta_rule(q, k, v, **options)
    expected_o, expected_state = run(kernel, call, initial_state=None)
    for n in (0, 32_767, 32_768, 131_071, 131_072, sequences - 1):
        assert torch.equal(o[n], expected_o[0]) and torch.equal(state[n], expected_state[0])
