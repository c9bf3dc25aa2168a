"""Field cases on an SM90 GPU, through the public functions in bfloat16; docs/field_cases.md names the cases.

The truth is the float64 recurrence on the rounded inputs.
"""

import importlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.core.compare import relative_error
from tests.core.drawn_calls import Call, expected_of, run
from tests.core.inputs import TENSORS, Outcome, Problem, make_problem, signed, solve, truth, uniform
from tests.core.test_side_effects import VIEWS

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

DEVICE = "cuda"
CEILINGS = {"o": 6e-3, "final_state": 6e-3, "dg": 2e-2}
OTHERS = 1e-2
NEGLIGIBLE = 1e-3  # of the gradient of beta: a gradient of g that small is the rounding of what cancels in it


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """The notice of a PyTorch path is no subject here."""


def on_device(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """q, k, v and do in 16 bits; gates and states as a model has them, in float32."""
    moved = problem.map(lambda x: x.to(DEVICE, torch.float32))
    rounded = {name: getattr(moved, name).to(dtype) for name in ("q", "k", "v", "do")}
    bounds = None if problem.cu_seqlens is None else problem.cu_seqlens.to(DEVICE)
    return replace(moved, **rounded, cu_seqlens=bounds)


def assert_within_ceilings(actual: Outcome, expected: Outcome) -> None:
    """Relative errors of whole tensors; a gradient of g that is nothing beside that of beta has to be as small itself."""
    for name, x in actual.items():
        assert torch.isfinite(x).all(), f"{name} is not finite"
        exact = getattr(expected, name)
        if name == "dg" and exact.norm() < NEGLIGIBLE * expected.dbeta.norm():
            assert x.norm() < 2e-2 * expected.dbeta.norm(), name
            continue
        error = relative_error(x, exact)
        assert error <= CEILINGS.get(name, OTHERS), f"{name} is off by {error:.1e}"


def _padding() -> Problem:
    problem = make_problem(1, 20, 1, 2, seed=30)
    for x in (problem.q, problem.k, problem.v):
        x[:, :7] = 0
    return problem


def _gates(kind: str) -> Problem:
    problem = make_problem(1, 200, 2, 4, seed=31)
    some = uniform(tuple(problem.g.shape), 37)
    if kind == "all zero":
        problem.g.zero_()
    elif kind == "half zero":
        problem.g[some < 0.5] = 0
    else:
        problem.g.fill_(float(kind))
    return problem


def _beta(factor: float | None) -> Problem:
    problem = make_problem(1, 90, 2, 2, seed=95)
    return replace(problem, beta=torch.ones_like(problem.beta) if factor is None else factor * problem.beta)


CASES = {
    "P1 packed": lambda: make_problem(1, 150, 2, 4, seed=10, bounds=[0, 37, 100, 150]),
    "P6 empty sequences": lambda: make_problem(1, 104, 2, 4, seed=60, bounds=[0, 0, 40, 40, 104, 104], states=(66, 67)),
    "N1 zero keys": _padding,
    **{
        f"N2, N3 gates {kind}": lambda kind=kind: _gates(kind)
        for kind in ("all zero", "half zero", "-30", "-1000", "-inf")
    },
    **{f"N5 {tokens} tokens": lambda tokens=tokens: make_problem(1, tokens, 2, 4, seed=50) for tokens in (1, 2, 17)},
    **{f"N5 {tokens} tokens": lambda tokens=tokens: make_problem(1, tokens, 2, 4, seed=50) for tokens in (63, 64, 65)},
    **{f"N5 {tokens} tokens": lambda tokens=tokens: make_problem(1, tokens, 2, 4, seed=50) for tokens in (127, 129)},
    "N8 beta up to 2": lambda: _beta(2),
    "N8 beta of 1": lambda: _beta(None),
    **{f"N9 ratio {r}": lambda r=r: make_problem(1, 100, 2, 2 * r, seed=80) for r in (1, 2, 3, 4, 8)},
    "C3 states": lambda: make_problem(2, 70, 2, 4, seed=70, states=(76, 77)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_case_is_the_recurrence(kernel, case, dtype):
    problem = on_device(CASES[case](), dtype)
    assert_within_ceilings(solve(kernel, problem), truth(problem))


def test_pads_get_zero_gradients(kernel):
    """N1."""
    outcome = solve(kernel, on_device(_padding()))
    for grad in (outcome.dq, outcome.dk, outcome.dv):
        assert grad[:, :7].count_nonzero() == 0


def test_empty_sequences_pass_their_state_through(kernel):
    """P6: bit for bit, forward and backward."""
    problem = on_device(CASES["P6 empty sequences"]())
    outcome = solve(kernel, problem)
    for empty in (0, 2, 4):
        assert torch.equal(outcome.final_state[empty], problem.initial_state[empty])
        assert torch.equal(outcome.dh0[empty], problem.dht[empty])


SHAPES = [(2, 256, 4, 4), (1, 1000, 16, 32), (1, 512, 16, 64), (4, 2048, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_trained_gates(kernel, shape):
    """N4: the gradients of the gate and of its parameters under the decay of a trained model, A up to 16."""
    problem = make_problem(*shape, seed=40)
    heads = shape[3]
    A_log = torch.linspace(math.log(0.01), math.log(16), heads, dtype=torch.float64)
    raw = replace(problem, g=6 * uniform(tuple(problem.g.shape), 48) - 3)
    problem = on_device(raw)
    parameters = [x.to(DEVICE, torch.float32).requires_grad_() for x in (A_log, 0.3 * signed((heads,), 49))]
    leaves = [getattr(problem, name).requires_grad_() for name in TENSORS]
    options = {"use_gate_in_kernel": True, "A_log": parameters[0], "dt_bias": parameters[1]}
    o, _ = kernel.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, **options)
    actual = torch.autograd.grad(o, [*leaves, *parameters], problem.do)
    exact = [x.detach().double().requires_grad_() for x in (*leaves, *parameters)]
    # The PyTorch path in float64, itself within 1e-9 of the recurrence, since a loop over tokens takes minutes here.
    options = {"use_gate_in_kernel": True, "A_log": exact[5], "dt_bias": exact[6]}
    o64, _ = kernel.chunk_gated_delta_rule(*exact[:5], use_qk_l2norm_in_kernel=True, **options)
    expected = torch.autograd.grad(o64, exact, problem.do.double())
    assert relative_error(o.detach(), o64.detach()) <= 6e-3
    for name, x, truth64 in zip(("dq", "dk", "dv", "da", "dbeta", "dA_log", "ddt_bias"), actual, expected, strict=True):
        error = relative_error(x, truth64)
        assert error <= (2e-2 if name in ("da", "dA_log", "ddt_bias") else 1e-2), f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("split", [1, 63, 64, 65, 100])
def test_two_segments_equal_one_shot(kernel, split):
    """C1, C2: the state that is handed on is in float32, so the second segment adds no error of its own."""
    problem = on_device(make_problem(1, 130, 2, 4, seed=20))
    exact, first = truth(problem), problem.rows(None, split)
    state = solve(kernel, first).final_state
    assert state.dtype == torch.float32
    second = solve(kernel, replace(problem.rows(split, None), initial_state=state))
    assert relative_error(second.o, exact.o[:, split:]) <= 6e-3
    assert relative_error(second.final_state, exact.final_state) <= 6e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_initial_states_of_any_dtype(kernel, dtype):
    """C3: h0 is read as it is and its gradient has its dtype; either loss alone works."""
    problem = on_device(make_problem(2, 70, 2, 4, seed=70, states=(76, 77)))
    problem = replace(problem, initial_state=problem.initial_state.to(dtype))
    kept = problem.initial_state.clone()
    for losses in (("o",), ("final_state",), ("o", "final_state")):
        call = Call(problem, "chunk", 64, False, losses)
        outcome = run(kernel, call)
        assert outcome.dh0.dtype == dtype and outcome.final_state.dtype == torch.float32
        expected = expected_of(call)
        for name in ("o", "final_state", "dv", "dh0"):
            assert relative_error(getattr(outcome, name), getattr(expected, name)) <= 1e-2, (losses, name)
    assert torch.equal(problem.initial_state, kept)


@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_bits_of_contiguous_tensors(kernel, view):
    """D2: odd addresses, gaps, any order in memory; forward and backward."""
    problem = on_device(make_problem(2, 65, 2, 4, seed=50, states=(1, 2)))
    viewed, plain = solve(kernel, problem.map(VIEWS[view])), solve(kernel, problem)
    for name, x in plain.items():
        assert torch.equal(getattr(viewed, name), x), name


def test_expanded_gradients(kernel):
    """D2: what `.sum()` hands to the backward."""
    problem = on_device(make_problem(1, 65, 2, 4, seed=50))
    ones = replace(problem, do=torch.ones_like(problem.do))
    expanded = replace(problem, do=problem.do.new_ones(()).expand_as(problem.do))
    for name, x in solve(kernel, ones).items():
        assert torch.equal(getattr(solve(kernel, expanded), name), x), name


@pytest.mark.parametrize("bounds", [None, [0, 100, 300, 512]], ids=["dense", "packed"])
def test_training_step_is_captured(kernel, bounds):
    """I6: one graph of forward and backward, replayed on new inputs, gives the bits of eager calls."""
    first, second = (
        on_device(make_problem(1, 512, 16, 32, seed=seed, bounds=bounds, states=(seed, seed + 1))) for seed in (1, 9)
    )
    static = first.map(torch.clone)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        solve(kernel, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solve(kernel, static)
    for fresh in (first, second):
        for name in (*TENSORS, "do", "dht", "initial_state"):
            getattr(static, name).detach().copy_(getattr(fresh, name))
        graph.replay()
        torch.cuda.synchronize()
        for name, x in solve(kernel, fresh).items():
            assert torch.equal(getattr(captured, name), x), name


def test_training_step_waits_for_nothing(kernel):
    """I6, F2: no host synchronisation in forward or backward, dense or packed, over several layers of one batch."""
    dense = on_device(make_problem(1, 128, 2, 4, seed=3))
    packed = on_device(make_problem(1, 128, 2, 4, seed=3, bounds=[0, 50, 128]))
    for problem in (dense, packed):
        solve(kernel, problem)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for problem in (dense, packed):
            for _ in range(4):
                solve(kernel, problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 37, 100, 150]], ids=["dense", "packed"])
def test_gradient_checkpointing_changes_no_bit(kernel, bounds, reentrant):
    """I7."""
    problem = on_device(make_problem(1, 150, 2, 4, seed=10, bounds=bounds))

    def layer(*tensors: Tensor) -> Tensor:
        return kernel.chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=problem.cu_seqlens)[0]

    leaves = [getattr(problem, name).requires_grad_() for name in TENSORS]
    expected = torch.autograd.grad(layer(*leaves), leaves, problem.do)
    o = checkpoint(layer, *leaves, use_reentrant=reentrant)
    o.backward(problem.do)
    for leaf, grad in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_repeats_are_the_same_bits_beside_other_work(kernel):
    """F3: 50 times, with another stream busy and with freed memory full of NaN."""
    problem = on_device(make_problem(2, 1000, 4, 8, seed=5, states=(1, 2)))
    expected = solve(kernel, problem)
    busy, a = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(50):
        with torch.cuda.stream(busy):
            a @ a
        del_me = torch.full((50_000_000,), float("nan"), device=DEVICE)
        del del_me
        for name, x in solve(kernel, problem).items():
            assert torch.equal(x, getattr(expected, name)), name


def test_row_alone_is_near_that_row_in_a_batch(kernel):
    """F3: rows do not see each other; the plan of a call may depend on all of it, so bits need not be equal."""
    batch = on_device(make_problem(4, 300, 4, 8, seed=6))
    alone = replace(batch, **{name: getattr(batch, name)[:1] for name in (*TENSORS, "do")})
    together, one = solve(kernel, batch), solve(kernel, alone)
    assert_within_ceilings(one, truth(alone))
    for name, x in one.items():
        assert relative_error(getattr(together, name)[:1], x.double()) <= CEILINGS.get(name, OTHERS), name


def peak_bytes(kernel, tokens: int) -> int:
    """Allocated at the peak of a forward and a backward, inputs and gradients included."""
    torch.cuda.empty_cache()
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = ((16, 128), (16, 128), (32, 128))
    q, k, v = (torch.randn(1, tokens, *s, device=DEVICE, generator=generator).bfloat16() for s in shapes)
    g, beta = (torch.rand(1, tokens, 32, device=DEVICE, generator=generator) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v, -g, beta)]
    torch.cuda.reset_peak_memory_stats()
    o, _ = kernel.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
    torch.autograd.grad(o, leaves, torch.ones_like(o))
    return torch.cuda.max_memory_allocated()


def test_memory_grows_with_the_length(kernel):
    """F1."""
    assert peak_bytes(kernel, 32768) <= 2.2 * peak_bytes(kernel, 16384)


LIFE = """
import json, os, sys, time
import torch
from kernels import get_local_kernel
from pathlib import Path
torch.zeros(1, device="cuda")
started = time.perf_counter()
kernel = get_local_kernel(Path(sys.argv[1]))
x = [torch.randn(1, 100, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
g, beta = -torch.rand(1, 100, 2, device="cuda"), torch.rand(1, 100, 2, device="cuda")
o, _ = kernel.chunk_gated_delta_rule(*x, g, beta, use_qk_l2norm_in_kernel=True)
o.sum().backward()
torch.cuda.synchronize()
compilers = [name for name in ("tilelang", "tvm", "triton.compiler") if name in sys.modules]
print(json.dumps({"seconds": time.perf_counter() - started, "compilers": compilers}))
"""


@pytest.mark.parametrize("home", ["", None], ids=["empty", "unset"])
def test_no_compiler_is_needed(kernel_folder, tmp_path, home):
    """L5: without nvcc on the path, whatever CUDA_HOME says; load, forward and backward in less than five seconds."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST")}
    environment |= {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    if home is not None:
        environment |= {"CUDA_HOME": home, "TORCH_CUDA_ARCH_LIST": ""}
    done = subprocess.run(
        [sys.executable, "-c", LIFE, str(kernel_folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-1000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["compilers"] == [] and answer["seconds"] < 5, answer


def milliseconds(call, repeats: int = 10) -> float:
    """Best time of a call from the host's clock."""
    best = math.inf
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 1e3 * best


@pytest.mark.parametrize("shape", [(1, 64), (1, 128), (1, 512), (8, 256), (1, 4096)], ids=str)
def test_short_sequences_are_not_slower_than_in_pytorch(kernel, shape):
    """F2: against our own PyTorch path on the same GPU; FLA's times stand in benchmarks/results/."""
    problem = on_device(make_problem(*shape, 16, 32, seed=4))
    tensors = [getattr(problem, name) for name in TENSORS]
    wide = [x.float() for x in tensors]
    assert kernel.explain_unsupported(*wide) is not None

    def call(given):
        return kernel.chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)

    for given in (tensors, wide):
        call(given)
    assert milliseconds(lambda: call(tensors)) <= 1.1 * milliseconds(lambda: call(wide))


def has_backward_kernel(kernel) -> bool:
    ops = importlib.import_module(f"{kernel.__name__}._ops").ops
    return hasattr(ops, "sm90_gated_delta_rule_bwd")


def test_gradients_of_more_than_2_31_elements(kernel):
    """S1: two equal rows of together 2.16e9 elements get equal gradients."""
    if not has_backward_kernel(kernel):
        pytest.skip("this build has no backward kernel, and the PyTorch path would not fit")
    tokens, heads = 264_192, 32
    generator = torch.Generator(DEVICE).manual_seed(0)

    def twice(*shape: int) -> Tensor:
        return (
            torch.randn(1, tokens, *shape, device=DEVICE, generator=generator)
            .bfloat16()
            .expand(2, -1, *shape)
            .contiguous()
        )

    q, k, v, do = (twice(heads, 128) for _ in range(4))
    g, beta = -twice(heads).float().abs() / 16, twice(heads).float().sigmoid()
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = kernel.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o[0], o[1])
    o.backward(do)
    for leaf in leaves:
        assert leaf.grad[0].count_nonzero() > 0
        assert torch.equal(leaf.grad[0], leaf.grad[1])


def test_public_paths_are_those_of_the_tests(kernel):
    """The tests above speak of the compiled forward only if it serves what they hand over."""
    problem = on_device(CASES["P1 packed"]())
    assert kernel.explain_unsupported(*(getattr(problem, name) for name in TENSORS)) is None
    assert Path(kernel.__file__).parent.name.startswith("torch-stable-abi")
