"""torch.compile sees one op with known shapes: no break, no recompilation for new lengths, the same numbers."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from .compare import assert_close, assert_equal, relative_error
from .inputs import TENSORS, Problem, make_problem, signed, solve

SMALL = {"dim_k": 16, "dim_v": 8}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """The kernel with its chunked function compiled into one graph, and a count of the graphs."""

    def __init__(self, kernel):
        self.counter = CompileCounterWithBackend("aot_eager")
        self.chunk_gated_delta_rule = torch.compile(kernel.chunk_gated_delta_rule, fullgraph=True, backend=self.counter)


def problem_of(tokens: int, bounds: list[int] | None = None) -> Problem:
    return make_problem(1, tokens, 1, 2, seed=1000 + tokens, bounds=bounds, states=(1, 2), **SMALL).to(torch.float32)


def test_new_lengths_need_at_most_two_graphs(kernel):
    compiled = Compiled(kernel)
    for tokens in (64, 65, 130, 200, 1000):
        problem = problem_of(tokens)
        assert_equal(solve(compiled, problem), solve(kernel, problem))
    assert compiled.counter.frame_count <= 2


def test_new_bounds_need_no_new_graph(kernel):
    """Neither other values, nor (after one dynamic graph) another number of sequences or tokens."""
    compiled = Compiled(kernel)
    for tokens, bounds in (
        (70, [0, 20, 70]),
        (70, [0, 69, 70]),
        (150, [0, 64, 65, 140]),
        (151, [0, 0, 64, 65, 140]),
        (90, [0, 1, 2, 3, 4, 90]),
    ):
        problem = problem_of(tokens, bounds)
        assert_equal(solve(compiled, problem), solve(kernel, problem))
    assert compiled.counter.frame_count <= 3


def test_a_dynamic_length_needs_one_graph(kernel):
    compiled = Compiled(kernel)
    for tokens in (100, 65, 130, 777):
        problem = problem_of(tokens)
        for name in (*TENSORS, "do"):
            torch._dynamo.mark_dynamic(getattr(problem, name), 1)
        with torch.no_grad():
            o, _ = compiled.chunk_gated_delta_rule(
                *(getattr(problem, name) for name in TENSORS), use_qk_l2norm_in_kernel=True
            )
        expected = solve(kernel, replace(problem, initial_state=None, dht=None))
        assert torch.equal(o, expected.o)
    assert compiled.counter.frame_count == 1


def test_gates_inside_the_call_compile_with_it(kernel):
    compiled = Compiled(kernel)
    problem = problem_of(70)
    options = {
        "use_gate_in_kernel": True,
        "A_log": signed((2,), 3).float(),
        "dt_bias": signed((2,), 4).float(),
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": False,
    }
    assert_close(solve(compiled, problem, **options), solve(kernel, problem, **options), torch.float32)
    assert compiled.counter.frame_count == 1


def test_convolution_and_norm_compile_into_one_graph(kernel):
    def layer(x, weight, gate, bounds):
        mixed = kernel.causal_conv1d_fn(x, weight, activation="silu", cu_seqlens=bounds)
        return kernel.rms_norm_gated(mixed.mT, gate, torch.ones(3))

    x, weight, gate = signed((1, 3, 20), 5), signed((3, 4), 6), signed((1, 20, 3), 7)
    bounds = torch.tensor([0, 5, 20])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x, weight, gate, bounds), layer(x, weight, gate, bounds)) <= 1e-12
    plain = torch.compile(kernel.causal_conv1d_fn, fullgraph=True, backend="aot_eager")
    assert torch.equal(plain(x, weight), kernel.causal_conv1d_fn(x, weight))


def test_an_update_compiles_and_still_writes_its_state(kernel):
    x, weight = signed((1, 3, 1), 5), signed((3, 4), 6)
    states = [signed((1, 3, 4), 7) for _ in range(2)]
    compiled = torch.compile(kernel.causal_conv1d_update, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, states[0], weight), kernel.causal_conv1d_update(x, states[1], weight))
    assert torch.equal(*states)


def test_wrong_input_is_refused_while_compiling(kernel):
    compiled = torch.compile(kernel.chunk_gated_delta_rule, backend="aot_eager")
    problem = problem_of(20)
    with pytest.raises(ValueError, match="chunk_size is 128; it must be 16, 32 or 64"):
        compiled(*(getattr(problem, name) for name in TENSORS), chunk_size=128)


OPERATIONS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


@pytest.mark.parametrize(
    ("tokens", "bounds", "dtype"),
    [
        (70, None, torch.float32),
        (1, None, torch.bfloat16),
        (64, [0, 64], torch.float64),
        (140, [0, 5, 5, 100], torch.bfloat16),
        (9, [0], torch.float32),
    ],
    ids=["dense", "one token", "one sequence", "packed", "no sequence"],
)
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "no state"])
def test_ops_are_what_they_are_registered_as(part, tokens, bounds, dtype, with_state):
    """Schema, shapes, strides and dtypes of the stand-ins for tracing, and autograd, checked by PyTorch itself."""
    ops = part("gated_delta_rule.ops").ops
    problem = make_problem(1, tokens, 1, 2, seed=1100, bounds=bounds, states=(1, 2), **SMALL).to(dtype)
    state = problem.initial_state if with_state else None
    inputs = [getattr(problem, name) for name in TENSORS]
    options = (problem.cu_seqlens, 0.25, True, 64)
    residuals = ops.gated_delta_rule_fwd(*inputs, state, *options, True, "auto")[2]
    leaves = [x.detach().requires_grad_() for x in inputs]
    for keep in (True, False):
        torch.library.opcheck(
            ops.gated_delta_rule_fwd.default,
            (*(leaves if keep else inputs), state, *options, keep, "auto"),
            test_utils=OPERATIONS,
        )
    torch.library.opcheck(
        ops.gated_delta_rule_bwd.default,
        (*inputs, state, problem.cu_seqlens, residuals, problem.do, problem.dht, 0.25, True, 64, "auto"),
        test_utils=OPERATIONS,
    )
