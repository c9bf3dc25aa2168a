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


def problem_with_states(**options):
    return on_gpu(make_problem(1, 300, 2, 4, seed=10, bounds=BOUNDS, states=(16, 17), **options))


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


def test_gradients_agree_with_the_pytorch_path_in_float32(kernel):
    problem = problem_with_states()
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


def test_the_forward_keeps_only_its_inputs(kernel):
    problem, _ = with_leaves(on_gpu(make_problem(1, 2048, 4, 8, seed=90, states=(1, 2))))
    run(kernel, problem)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o, state = run(kernel, problem)
    kept = torch.cuda.memory_allocated() - before
    results = sum(x.numel() * x.element_size() for x in (o, state))
    assert kept <= results + 4096
