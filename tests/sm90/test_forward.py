"""The SM90 forward behind the public function: exact enough, on every shape it takes, with nothing left unwritten."""

import math
from dataclasses import replace

import pytest
import torch

from flashqla_hub.reference import gated_delta_rule

from ..core.compare import relative_error
from ..core.inputs import TENSORS, Problem, make_problem, signed, uniform
from ..core.test_precision import CEILING, KINDS, SLACK
from ..core.yardstick import yardstick

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

DTYPES = (torch.bfloat16, torch.float16)
OPTIONS = ("scale", "cu_seqlens", "initial_state")


def on_gpu(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """q, k, v in `dtype`, gates and states in float32, on the GPU."""
    single = problem.to(torch.float32).map(lambda x: x.cuda())
    bounds = None if problem.cu_seqlens is None else problem.cu_seqlens.cuda()
    return replace(single, q=single.q.to(dtype), k=single.k.to(dtype), v=single.v.to(dtype), cu_seqlens=bounds)


def run(kernel, problem: Problem, **options):
    """o and the final state from the SM90 kernel, and from nothing else."""
    tensors = [getattr(problem, name) for name in TENSORS]
    assert kernel.explain_unsupported(*tensors) is None
    given = {name: getattr(problem, name) for name in OPTIONS}
    return kernel.chunk_gated_delta_rule(
        *tensors, use_qk_l2norm_in_kernel=problem.use_qk_l2norm, output_final_state=True, **{**given, **options}
    )


def truth(problem: Problem):
    """The float64 recurrence on the same rounded inputs, on the CPU."""
    exact = problem.map(lambda x: x.double().cpu())
    return gated_delta_rule(
        *(getattr(exact, name) for name in TENSORS),
        use_qk_l2norm=problem.use_qk_l2norm,
        **{name: getattr(exact, name) for name in OPTIONS if name != "cu_seqlens"},
        cu_seqlens=None if problem.cu_seqlens is None else problem.cu_seqlens.cpu(),
    )


def assert_exact_enough(kernel, problem: Problem, **options) -> None:
    o, state = run(kernel, problem, **options)
    true_o, true_state = truth(problem)
    assert relative_error(o.cpu(), true_o) <= CEILING["o"]
    assert relative_error(state.cpu(), true_state) <= CEILING["final_state"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_stays_below_the_yardstick_and_the_ceiling(kernel, kind, dtype):
    problem = on_gpu(KINDS[kind](), dtype)
    results = dict(zip(("o", "final_state"), run(kernel, problem), strict=True))
    true = dict(zip(results, truth(problem), strict=True))
    rounded = yardstick(problem.map(lambda x: x.cpu()))
    for name, result in results.items():
        allowed = min(CEILING[name], SLACK * relative_error(getattr(rounded, name), true[name]))
        assert relative_error(result.cpu(), true[name]) <= allowed, name


@pytest.mark.parametrize("tokens", [1, 2, 17, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_length(kernel, batch, tokens):
    assert_exact_enough(kernel, on_gpu(make_problem(batch, tokens, 1, 2, seed=50, states=(56, 57))))


def test_no_tokens_pass_the_state_through(kernel):
    problem = on_gpu(make_problem(2, 0, 1, 2, states=(1, 2)))
    o, state = run(kernel, problem)
    assert o.shape == (2, 0, 2, 128) and torch.equal(state, problem.initial_state)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
def test_value_heads_share_key_heads(kernel, ratio):
    assert_exact_enough(kernel, on_gpu(make_problem(1, 150, 2, 2 * ratio, seed=80)))


@pytest.mark.parametrize("gate", [0.0, -1e-3, -1.0, -30.0, -1000.0, -math.inf])
def test_gates_of_every_strength(kernel, gate):
    problem = on_gpu(make_problem(1, 200, 2, 4, seed=32))
    assert_exact_enough(kernel, replace(problem, g=torch.full_like(problem.g, gate)))


def test_gates_of_all_strengths_in_one_chunk(kernel):
    problem = on_gpu(make_problem(1, 200, 2, 4, seed=33))
    strengths = torch.tensor([0.0, -1e-3, -0.1, -1.0, -30.0, -1000.0, -math.inf], device="cuda")
    assert_exact_enough(kernel, replace(problem, g=strengths[(7 * uniform((1, 200, 4), 34)).long().cuda()]))


BOUNDS = [0, 0, 37, 100, 100, 101, 165, 293, 293]


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_packed_sequences_and_zeros_behind_them(kernel, index):
    problem = on_gpu(make_problem(1, 300, 2, 4, seed=10, bounds=BOUNDS, states=(16, 17)))
    problem = replace(problem, cu_seqlens=problem.cu_seqlens.to(index))
    assert_exact_enough(kernel, problem)
    o, state = run(kernel, problem)
    assert not o[:, 293:].any()
    for empty in (0, 3, 7):
        assert torch.equal(state[empty], problem.initial_state[empty])


def test_nan_in_a_neighbour_does_not_leak(kernel):
    clean = on_gpu(make_problem(1, 300, 2, 4, seed=10, bounds=BOUNDS))
    dirty = clean.map(torch.clone)
    for name in TENSORS:
        getattr(dirty, name)[:, 37:100] = math.nan
        getattr(dirty, name)[:, 293:] = math.nan
    (o, state), (dirty_o, dirty_state) = run(kernel, clean), run(kernel, dirty)
    others = torch.tensor([n for n in range(8) if n != 2], device="cuda")
    assert torch.equal(dirty_o[:, :37], o[:, :37]) and torch.equal(dirty_o[:, 100:], o[:, 100:])
    assert torch.equal(dirty_state[others], state[others])


def test_initial_state_in_16_bit_and_state_v_first(kernel):
    problem = on_gpu(make_problem(2, 100, 2, 4, seed=70, states=(76, 77)))
    problem = replace(problem, initial_state=problem.initial_state.bfloat16())
    assert_exact_enough(kernel, problem)
    _, state = run(kernel, problem)
    _, swapped = run(kernel, problem, initial_state=problem.initial_state.mT, state_v_first=True)
    assert torch.equal(swapped.mT, state)


def test_views_of_a_packed_projection(kernel):
    problem = on_gpu(make_problem(1, 200, 2, 4, seed=60))
    rows = torch.cat([problem.q.flatten(2), problem.k.flatten(2), problem.v.flatten(2)], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in rows.split([256, 256, 512], dim=-1))
    views = replace(problem, q=q, k=k, v=v)
    channel_first = replace(problem, v=problem.v.transpose(1, 3).contiguous().transpose(1, 3))
    shifted = torch.empty(problem.q.numel() + 1, dtype=problem.q.dtype, device="cuda")[1:].view_as(problem.q)
    misaligned = replace(problem, q=shifted.copy_(problem.q))
    expected = run(kernel, problem)
    for other in (views, channel_first, misaligned):
        assert all(torch.equal(a, b) for a, b in zip(run(kernel, other), expected, strict=True))


def test_repeats_bit_for_bit_beside_other_work(kernel):
    problem = on_gpu(make_problem(2, 1000, 4, 8, seed=90))
    expected = run(kernel, problem)
    side, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(side):
            noise @ noise
        poison = torch.full((20_000_000,), math.nan, device="cuda")
        del poison
        assert all(torch.equal(a, b) for a, b in zip(run(kernel, problem), expected, strict=True))


def test_row_does_not_depend_on_the_other_rows(kernel):
    problem = on_gpu(make_problem(4, 200, 2, 4, seed=91))
    alone = problem.map(lambda x: x[2:3])
    assert torch.equal(run(kernel, alone)[0], run(kernel, problem)[0][2:3])


def test_more_sequence_heads_than_a_grid_dimension_holds(kernel):
    count, heads = 2200, 32
    lengths = (1 + (3 * uniform((count,), 5)).long()).tolist()
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    problem = on_gpu(make_problem(1, bounds[-1], heads, heads, seed=92, bounds=bounds))
    o, state = run(kernel, problem)
    for n in (0, 1, 1100, count - 1):
        alone = problem.rows(bounds[n], bounds[n + 1])
        alone_o, alone_state = run(kernel, alone)
        assert torch.equal(alone_o, o[:, bounds[n] : bounds[n + 1]]) and torch.equal(alone_state[0], state[n])
    assert_exact_enough(kernel, problem.rows(bounds[5], bounds[9]))


def test_more_than_2_31_elements(kernel):
    tokens, reset, heads = 526_336, 524_288, 32
    assert tokens * heads * 128 > 2**31
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, 128, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in range(3)
    )
    g = -torch.rand(1, tokens, heads, device="cuda", generator=generator)
    g[:, reset] = -1000
    beta = torch.rand(1, tokens, heads, device="cuda", generator=generator)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    o, state = kernel.chunk_gated_delta_rule(q, k, v, g, beta, **options)
    tail = [x[:, reset:].contiguous() for x in (q, k, v, g, beta)]
    tail_o, tail_state = kernel.chunk_gated_delta_rule(*tail, **options)
    assert torch.equal(o[:, reset:], tail_o) and torch.equal(state, tail_state)


@pytest.mark.parametrize("plan", ["auto", "off"])
def test_a_million_tokens(kernel, plan):
    """The end of one sequence of 2^20 tokens, behind a gate that forgets what came before, against the float64 recurrence."""
    tokens, tail = 1 << 20, 1000
    generator = torch.Generator(device="cuda").manual_seed(1)
    q, k, v = (
        torch.randn(1, tokens, heads, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
        for heads in (1, 1, 2)
    )
    g = -0.1 * torch.rand(1, tokens, 2, device="cuda", generator=generator)
    g[:, -tail] = -1000
    beta = torch.rand(1, tokens, 2, device="cuda", generator=generator)
    problem = Problem(q, k, v, g, beta, do=v)
    o, state = run(kernel, problem, plan=plan)
    true_o, true_state = truth(problem.rows(tokens - tail, tokens))
    assert o.shape == v.shape and bool(o.isfinite().all())
    assert relative_error(o[:, -tail:].cpu(), true_o) <= CEILING["o"]
    assert relative_error(state.cpu(), true_state) <= CEILING["final_state"]


def test_no_call_waits_for_the_gpu(kernel):
    dense = on_gpu(make_problem(2, 300, 2, 4, seed=93))
    packed = on_gpu(make_problem(1, 300, 2, 4, seed=10, bounds=BOUNDS))
    run(kernel, dense)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(kernel, dense)
        run(kernel, packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_replays_with_other_lengths_of_the_same_total(kernel):
    problem = on_gpu(make_problem(1, 300, 2, 4, seed=10, bounds=BOUNDS))
    run(kernel, problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run(kernel, problem)
    other = torch.tensor([0, 5, 70, 71, 71, 200, 264, 264, 300], dtype=problem.cu_seqlens.dtype, device="cuda")
    for bounds in (other, problem.cu_seqlens.clone()):
        problem.cu_seqlens.copy_(bounds)
        graph.replay()
        expected = run(kernel, replace(problem, cu_seqlens=bounds))
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def test_compiles_to_one_graph(kernel):
    problem = on_gpu(make_problem(1, 130, 2, 4, seed=94))
    compiled = torch.compile(lambda p: run(kernel, p), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(problem), run(kernel, problem), strict=True))


def test_gradients_flow_through_the_forward(kernel):
    """The forward keeps no states; the backward computes them again."""
    problem = on_gpu(make_problem(1, 200, 2, 4, seed=95))
    leaves = [getattr(problem, name).clone().requires_grad_() for name in TENSORS]
    o, _ = run(kernel, replace(problem, **dict(zip(TENSORS, leaves, strict=True))))
    grads = torch.autograd.grad(o, leaves, problem.do.to(o.dtype))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true_o, _ = gated_delta_rule(*exact, use_qk_l2norm=True)
    true = torch.autograd.grad(true_o, exact, problem.do.to(o.dtype).double())
    for name, grad, expected in zip(TENSORS, grads, true, strict=True):
        assert relative_error(grad, expected) <= CEILING[f"d{name}"], name


@pytest.mark.parametrize(
    ("options", "words"),
    [({"dim_k": 64}, "K is 64"), ({"dim_v": 256}, "V is 256")],
)
def test_other_head_sizes_are_explained_and_served(kernel, options, words):
    problem = on_gpu(make_problem(1, 70, 1, 2, seed=96, **options))
    tensors = [getattr(problem, name) for name in TENSORS]
    assert words in kernel.explain_unsupported(*tensors)
    o, _ = kernel.chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True)
    assert relative_error(o.cpu(), truth(problem)[0]) <= CEILING["o"]


def test_clustered_keys_without_decay_over_a_long_row(kernel):
    problem = on_gpu(make_problem(1, 2048, 1, 2, seed=97))
    nearest = (8 * uniform((1, 2048, 1), 98)).long()
    keys = 0.9 * signed((8, 128), 99)[nearest] + 0.1 * problem.k.double().cpu()
    problem = replace(problem, k=keys.to(problem.k), g=torch.zeros_like(problem.g))
    assert_exact_enough(kernel, problem)
