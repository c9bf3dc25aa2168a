"""The SM90 backward behind the public function: under autograd, checkpointing, autocast, torch.compile and graphs."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ..core.inputs import TENSORS, make_problem
from ..core.test_precision import CEILING
from .test_forward import BOUNDS, HAS_SM90, on_gpu, run

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

LEAVES = (*TENSORS, "initial_state")


@pytest.fixture(autouse=True)
def _library(kernel):
    """These tests are about the compiled kernels, which not every build carries."""
    reason = kernel.explain_unsupported(
        *(torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in TENSORS)
    )
    if reason is not None:
        pytest.skip(f"{reason}; FLASHQLA_TEST_VARIANT names the folder of a variant that has one")


def problem_with_states(dtype=torch.bfloat16):
    return on_gpu(make_problem(1, 300, 2, 4, seed=10, bounds=BOUNDS, states=(16, 17)), dtype)


def with_leaves(problem):
    """The problem with leaves that ask for gradients, and those leaves."""
    leaves = [getattr(problem, name).detach().clone().requires_grad_() for name in LEAVES]
    return replace(problem, **dict(zip(LEAVES, leaves, strict=True))), leaves


def loss_of(problem, o, state):
    return (o.float() * problem.do.to(o.device)).sum() + (state * problem.dht.to(o.device)).sum()


def gradients(kernel, problem):
    problem, leaves = with_leaves(problem)
    return torch.autograd.grad(loss_of(problem, *run(kernel, problem)), leaves)


def assert_same(ours, theirs):
    for name, one, other in zip(LEAVES, ours, theirs, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_agree_with_the_pytorch_path_in_float32(kernel, dtype):
    problem = problem_with_states(dtype=dtype)
    single = problem.map(lambda x: x.float())
    for name, ours, theirs in zip(
        LEAVES, gradients(kernel, problem), gradients_in_float32(kernel, single), strict=True
    ):
        ceiling = CEILING["dh0" if name == "initial_state" else f"d{name}"]
        assert ours.dtype == getattr(problem, name).dtype
        assert ((ours.float() - theirs).norm() / theirs.norm()).item() <= ceiling, name


def gradients_in_float32(kernel, problem):
    problem, leaves = with_leaves(problem)
    given = {name: getattr(problem, name) for name in ("scale", "cu_seqlens", "initial_state")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = kernel.chunk_gated_delta_rule(
            *(getattr(problem, name) for name in TENSORS),
            use_qk_l2norm_in_kernel=problem.use_qk_l2norm,
            output_final_state=True,
            **given,
        )
    return torch.autograd.grad(loss_of(problem, *results), leaves)


def test_the_backward_takes_no_pytorch_path(kernel):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(kernel, problem_with_states())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(kernel, reentrant):
    problem = problem_with_states()
    expected = gradients(kernel, problem)
    inner, leaves = with_leaves(problem)

    def layer(*tensors):
        return run(kernel, replace(inner, **dict(zip(LEAVES, tensors, strict=True))))

    o, state = checkpoint(layer, *leaves, use_reentrant=reentrant)
    loss_of(inner, o, state).backward()
    assert_same([leaf.grad for leaf in leaves], expected)


@pytest.fixture
def in_two_ranges(part, monkeypatch):
    """Every backward in bfloat16 takes its chunks in two ranges, as only large ones do otherwise."""
    plan = part("gated_delta_rule.plan")
    monkeypatch.setattr(plan, "STATES_AT_ONCE", 0)
    monkeypatch.setattr(plan, "LEAST_FILL", 0)


def test_gradients_in_two_ranges_agree_with_those_in_one(kernel, request):
    problem = problem_with_states()
    expected = gradients(kernel, problem)
    request.getfixturevalue("in_two_ranges")
    found = gradients(kernel, problem)
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)), "there is a border"
    for name, ours, theirs in zip(LEAVES, found, expected, strict=True):
        ceiling = CEILING["dh0" if name == "initial_state" else f"d{name}"]
        assert ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item() <= ceiling, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_two_ranges_changes_no_bit(kernel, in_two_ranges, reentrant):
    test_checkpointing_changes_no_bit(kernel, reentrant)


def test_two_ranges_compile_to_one_graph(kernel, in_two_ranges):
    test_compiles_to_one_graph_with_its_backward(kernel)


def test_two_ranges_are_captured_in_a_graph(kernel, in_two_ranges):
    test_a_training_step_is_captured_in_a_graph(kernel)


def test_two_ranges_of_a_long_call_spare_half_of_the_states(kernel, part, monkeypatch):
    """(16, 32) 1 x 32768: states and their gradients of 512 chunks are 1,074 MB, and of half of them half."""
    plan, heads = part("gated_delta_rule.plan"), 32
    tokens, device = 32768, "cuda"
    leaves = [torch.randn(1, tokens, n, 128, device=device).bfloat16() for n in (16, 16, heads)]
    leaves += [-torch.rand(1, tokens, heads, device=device), torch.rand(1, tokens, heads, device=device)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def peak():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        o, _ = kernel.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
        torch.autograd.grad(o, leaves, torch.ones_like(o))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    in_two = peak()
    monkeypatch.setattr(plan, "STATES_AT_ONCE", 2**62)
    in_one = peak()
    print(f"{in_two / 1e6:.0f} MB in two ranges, {in_one / 1e6:.0f} MB in one")
    assert in_two + tokens // 64 // 2 * heads * plan.STATES_OF_CHUNK <= in_one + heads * 128 * 128 * 8


def test_autocast_changes_no_bit(kernel):
    problem = problem_with_states()
    expected = gradients(kernel, problem)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_same(gradients(kernel, problem), expected)


def test_compiles_to_one_graph_with_its_backward(kernel):
    problem = problem_with_states()
    expected = gradients(kernel, problem)
    inner, leaves = with_leaves(problem)
    compiled = torch.compile(lambda p: run(kernel, p), fullgraph=True, backend="aot_eager")
    assert_same(torch.autograd.grad(loss_of(inner, *compiled(inner)), leaves), expected)


def test_a_training_step_is_captured_in_a_graph(kernel):
    problem = problem_with_states()
    inner, leaves = with_leaves(problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(loss_of(inner, *run(kernel, inner)), leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(loss_of(inner, *run(kernel, inner)), leaves)
    for bounds in (problem.cu_seqlens.clone(), torch.tensor([0, 5, 70, 71, 71, 200, 264, 264, 300])):
        problem.cu_seqlens.copy_(bounds)
        graph.replay()
        assert_same(captured, gradients(kernel, problem))


def test_gradients_of_outputs_alone_and_of_states_alone(kernel):
    problem = problem_with_states()
    for only in ("o", "state"):
        zeros = replace(
            problem,
            **{("dht" if only == "o" else "do"): torch.zeros_like(getattr(problem, "dht" if only == "o" else "do"))},
        )
        expected = gradients(kernel, zeros)
        inner, leaves = with_leaves(problem)
        o, state = run(kernel, inner)
        loss = (o.float() * inner.do.cuda()).sum() if only == "o" else (state * inner.dht.cuda()).sum()
        assert_same(torch.autograd.grad(loss, leaves, materialize_grads=True), expected)


def test_an_expanded_gradient_is_taken(kernel):
    problem = problem_with_states()
    ones = replace(problem, do=torch.ones_like(problem.do), dht=torch.zeros_like(problem.dht))
    inner, leaves = with_leaves(problem)
    o, _ = run(kernel, inner)
    assert_same(torch.autograd.grad(o.sum(), leaves, materialize_grads=True), gradients(kernel, ones))


def test_the_forward_keeps_its_inputs_and_the_solve_of_each_chunk(kernel):
    problem, _ = with_leaves(on_gpu(make_problem(1, 2048, 4, 8, seed=90, states=(1, 2))))
    run(kernel, problem)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o, state = run(kernel, problem)
    kept = torch.cuda.memory_allocated() - before
    results = sum(x.numel() * x.element_size() for x in (o, state))
    solves = (2048 // 64 + 1) * 8 * 96 * 32 * 2
    assert results + solves <= kept <= results + solves + 8192


@pytest.mark.parametrize("name", LEAVES)
def test_one_leaf_alone_gets_the_same_gradient(kernel, name):
    problem = problem_with_states()
    expected = gradients(kernel, problem)[LEAVES.index(name)]
    leaf = getattr(problem, name).detach().clone().requires_grad_()
    [grad] = torch.autograd.grad(loss_of(problem, *run(kernel, replace(problem, **{name: leaf}))), leaf)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_and_results_differ_in_rounding_only(kernel, mode):
    problem, _ = with_leaves(problem_with_states())
    expected = run(kernel, problem)
    with mode():
        before = torch.cuda.memory_allocated()
        results = run(kernel, problem)
        kept = torch.cuda.memory_allocated() - before
    assert kept <= sum(x.numel() * x.element_size() for x in results) + 4096
    for ours, theirs, name in zip(results, expected, ("o", "final_state"), strict=True):
        difference = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
        assert difference <= CEILING[name] and not ours.requires_grad and ours.grad_fn is None


class Projected(torch.nn.Module):
    """A layer of one projection: x [B, T, 64] -> q, k of one head, v and gates of two."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel, self.project = kernel, torch.nn.Linear(64, 4 * 128 + 4)

    def forward(self, x):
        q, k, v, g, beta = self.project(x).split((128, 128, 256, 2, 2), dim=-1)
        heads = (y.unflatten(-1, (-1, 128)) for y in (q, k, v))
        gates = -torch.nn.functional.softplus(g), beta.sigmoid()
        return self.kernel.chunk_gated_delta_rule(*heads, *gates, use_qk_l2norm_in_kernel=True)[0]


def test_distributed_data_parallel_changes_no_bit(kernel, tmp_path):
    """One process of a group, whose hooks gather and hand out the gradients of every parameter."""
    layer = Projected(kernel).cuda().bfloat16()
    x = torch.randn(2, 130, 64, device="cuda", dtype=torch.bfloat16)
    expected = torch.autograd.grad(layer(x).float().square().mean(), list(layer.parameters()))
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[torch.cuda.current_device()])
        wrapped(x).float().square().mean().backward()
        for parameter, grad in zip(layer.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, grad)
    finally:
        torch.distributed.destroy_process_group()


def test_lack_of_memory_is_pytorch_s_own_error(kernel):
    """A script that catches it can go on with a smaller batch."""
    problem = on_gpu(make_problem(1, 2048, 4, 8, seed=90, states=(1, 2)))
    tensors = [getattr(problem, name) for name in TENSORS]
    residuals, do, results = problem.q.new_empty(0), problem.do.to(problem.v), []
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 22)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="PyTorch could not allocate"):
            kernel.chunk_gated_delta_rule_bwd(*tensors, residuals=residuals, do=do)
        with pytest.raises(torch.OutOfMemoryError, match="PyTorch could not allocate"):
            results += [run(kernel, problem) for _ in range(16)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    run(kernel, problem)
