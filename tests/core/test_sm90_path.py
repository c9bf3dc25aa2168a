"""The way to the compiled forward, on the CPU: what it is handed, and what the backward makes of what it keeps.

A stand-in takes the place of the compiled op; the kernels themselves are tested on an SM90 GPU.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from flashqla_hub.reference import gated_delta_rule, gated_delta_rule_backward

from .compare import relative_error
from .inputs import GRADIENTS, TENSORS, make_problem, solve, truth
from .test_side_effects import VIEWS

ROOMY = {"dim_k": 16, "dim_v": 16}


def rows(batch: int = 2, tokens: int = 6, heads: int = 3, dim: int = 16) -> Tensor:
    return torch.randn(batch, tokens, heads, dim).bfloat16()


@pytest.fixture
def compiled(part, monkeypatch) -> list[dict]:
    """Serve every forward by a stand-in for the compiled op; the list holds the arguments of its calls."""
    calls = []

    def stand_in(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, l2norm, state_v_first, output_final_state, segment_chunks
    ):
        calls.append({"q": q, "k": k, "v": v, "initial_state": initial_state, "cu_seqlens": cu_seqlens})
        assert (state_v_first, output_final_state) == (False, True)
        o, state = gated_delta_rule(
            *(x.double() for x in (q, k, v, g, beta)),
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=l2norm,
        )
        return o.to(v.dtype), state.to(torch.float32)

    capability = part("gated_delta_rule.capability")
    monkeypatch.setattr(capability, "explain_unsupported", lambda *tensors: None)
    monkeypatch.setattr(capability, "explain_unsupported_backward", lambda *tensors: "not now")
    monkeypatch.setattr(part("gated_delta_rule.sm90_path"), "ops", SimpleNamespace(sm90_gated_delta_rule_fwd=stand_in))
    return calls


@pytest.mark.parametrize("bounds", [None, [0, 40, 40, 90]], ids=["dense", "packed"])
@pytest.mark.parametrize("view", [None, *VIEWS])
def test_the_compiled_forward_gets_its_tensors_in_any_layout_and_the_backward_is_right(kernel, compiled, bounds, view):
    batch = 2 if bounds is None else 1
    problem = make_problem(batch, 100, 1, 2, seed=1300, bounds=bounds, states=(7, 8), **ROOMY).to(torch.float32)
    problem = problem if view is None else problem.map(VIEWS[view])
    outcome, expected = solve(kernel, problem), truth(problem)
    assert len(compiled) == 1
    for name in ("q", "k", "v"):
        assert torch.equal(compiled[0][name], getattr(problem, name))
    for name in ("o", "final_state", *GRADIENTS):
        assert relative_error(getattr(outcome, name), getattr(expected, name)) <= 1e-4, name


def test_the_backward_recomputes_the_states_of_every_slab(kernel, compiled, part):
    """The compiled forward keeps none; a row of several slabs needs each of them."""
    tokens = 16 * part("gated_delta_rule.plan").slab_chunks(64) * 2 + 5
    problem = make_problem(1, tokens, 32, 64, dim_k=4, dim_v=4, seed=1310, states=(7, 8)).to(torch.float32)
    outcome, expected = solve(kernel, problem, chunk_size=16), truth(problem)
    for name in GRADIENTS:
        assert relative_error(getattr(outcome, name), getattr(expected, name)) <= 1e-4, name


def test_empty_residuals_by_hand_are_recomputed(kernel):
    problem = make_problem(1, 130, 1, 2, seed=1320, bounds=[0, 70, 128], states=(7, 8), **ROOMY)
    inputs = [getattr(problem, name) for name in TENSORS]
    grads = kernel.chunk_gated_delta_rule_bwd(
        *inputs,
        torch.empty(0, dtype=torch.float64),
        problem.do,
        problem.dht,
        initial_state=problem.initial_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=problem.cu_seqlens,
    )
    expected = truth(problem)
    for name, grad in zip(GRADIENTS, grads, strict=True):
        assert relative_error(grad, getattr(expected, name)) <= 1e-9, name


@pytest.fixture
def compiled_backward(part, compiled, monkeypatch) -> list[dict]:
    """Serve every backward by a stand-in as well; the list holds the arguments of its calls."""
    calls = []

    def stand_in(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        do,
        dht,
        scale,
        l2norm,
        state_v_first,
        output_dinitial,
        segment,
        kept,
        range_slots,
    ):
        calls.append(
            {"q": q, "k": k, "v": v, "do": do, "dht": dht, "initial_state": initial_state, "segment_chunks": segment}
            | {"kept": kept, "range_slots": range_slots}
        )
        assert not state_v_first and output_dinitial == (initial_state is not None)
        *grads, dh0 = gated_delta_rule_backward(
            *(x.double() for x in (q, k, v, g, beta, do)),
            dht=None if dht is None else dht.double(),
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=l2norm,
        )
        dh0 = dh0 if output_dinitial else dh0[:0]
        return *(grad.to(v.dtype) for grad in grads[:3]), *(grad.float() for grad in grads[3:]), dh0.float()

    path = part("gated_delta_rule.sm90_path")
    monkeypatch.setattr(part("gated_delta_rule.capability"), "explain_unsupported_backward", lambda *tensors: None)
    monkeypatch.setattr(path.ops, "sm90_gated_delta_rule_bwd", stand_in, raising=False)
    return calls


@pytest.mark.parametrize("bounds", [None, [0, 40, 40, 90]], ids=["dense", "packed"])
@pytest.mark.parametrize("view", [None, *VIEWS])
def test_the_compiled_backward_gets_its_tensors_in_any_layout_and_its_gradients_arrive(
    kernel, compiled_backward, bounds, view
):
    batch = 2 if bounds is None else 1
    problem = make_problem(batch, 100, 1, 2, seed=1340, bounds=bounds, states=(7, 8), **ROOMY).to(torch.float32)
    problem = problem if view is None else problem.map(VIEWS[view])
    outcome, expected = solve(kernel, problem), truth(problem)
    [call] = compiled_backward
    for name in ("q", "k", "v"):
        assert torch.equal(call[name], getattr(problem, name))
    for name in GRADIENTS:
        assert relative_error(getattr(outcome, name), getattr(expected, name)) <= 1e-4, name


@pytest.mark.parametrize(("plan", "segment_chunks"), [("auto", 0), ("invariant", 64), ("off", 2**25)])
def test_the_plan_of_the_forward_is_that_of_its_backward(kernel, compiled_backward, plan, segment_chunks):
    problem = make_problem(1, 70, 1, 2, seed=1370, **ROOMY).to(torch.float32)
    leaves = [getattr(problem, name).clone().requires_grad_() for name in TENSORS]
    kernel.chunk_gated_delta_rule(*leaves, plan=plan)[0].sum().backward()
    inputs = (*leaves, torch.empty(0), problem.do)
    kernel.chunk_gated_delta_rule_bwd(*inputs, plan=plan)
    assert [call["segment_chunks"] for call in compiled_backward] == [segment_chunks, segment_chunks]


PLANS = {0: "auto", 64: "invariant", 2**25: "off"}


def slots_of(q, cu_seqlens):
    return q.shape[0] * q.shape[1] // 64 + (q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1)


@pytest.fixture
def kept(part, compiled_backward, monkeypatch) -> list[torch.Tensor]:
    """A stand-in for the forward that keeps what its backward can use; what it has kept."""
    path, tensors = part("gated_delta_rule.sm90_path"), []
    plain = path.ops.sm90_gated_delta_rule_fwd

    def stand_in(q, k, v, g, beta, initial_state, cu_seqlens, *options_and_range):
        *options, range_slots = options_and_range
        shape = path.residual_shape(q, v, cu_seqlens, PLANS[options[-1]])
        assert shape[0] == slots_of(q, cu_seqlens) + 1 + (11 if range_slots else 0)
        tensors.append(torch.full(shape, float(len(tensors) + 1), dtype=q.dtype))
        return *plain(q, k, v, g, beta, initial_state, cu_seqlens, *options), tensors[-1]

    monkeypatch.setattr(path.ops, "sm90_gated_delta_rule_fwd_kept", stand_in, raising=False)
    return tensors


def bfloat16_leaves(seed, **options):
    problem = make_problem(1, 200, 1, 2, seed=seed, **options, **ROOMY).to(torch.bfloat16)
    return problem, [getattr(problem, name).clone().requires_grad_() for name in TENSORS]


@pytest.mark.parametrize("bounds", [None, [0, 64, 64, 200]])
def test_what_a_forward_in_bfloat16_keeps_reaches_its_backward(kernel, compiled_backward, kept, bounds):
    problem, leaves = bfloat16_leaves(1382, bounds=bounds)
    o, _ = kernel.chunk_gated_delta_rule(*leaves, cu_seqlens=problem.cu_seqlens)
    o.sum().backward()
    assert [list(x.shape) for x in kept] == [[200 // 64 + (1 if bounds is None else 3) + 1, 2, 96, 32]]
    assert torch.equal(compiled_backward[0]["kept"], kept[0])


@pytest.mark.parametrize("name", ["auto", "invariant", "off"])
def test_a_tracer_finds_what_a_forward_keeps_without_knowing_a_size(part, name):
    """How many tokens or sequences there are may depend on values, of which no branch may ask."""
    path, shapes = part("gated_delta_rule.sm90_path"), ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens, sequences = shapes.create_unbacked_symint(), shapes.create_unbacked_symint()
        for x in (tokens, sequences):
            torch._check(x >= 0)
        rows_of_all = torch.empty(1, tokens, 32, 128, dtype=torch.bfloat16)
        shape = path.residual_shape(rows_of_all, rows_of_all, torch.empty(sequences + 1, dtype=torch.int64), name)
    for sizes in product((1, 64, 24_000, 25_000, 38_400, 65_536), (1, 2, 383, 384, 600)):
        numbers = dict(zip((tokens.node.expr, sequences.node.expr), sizes, strict=True))
        q, cu_seqlens = torch.empty(1, sizes[0], 32, 0, dtype=torch.bfloat16), torch.empty(sizes[1] + 1)
        rows_of_shape = int(shape[0].node.expr.subs(numbers))
        assert [rows_of_shape, *shape[1:]] == path.residual_shape(q, q, cu_seqlens, name)
        slots, ranges = slots_of(q, cu_seqlens), part("gated_delta_rule.plan").range_slots(*sizes, 32, name)
        assert rows_of_shape == slots + -(-slots // 1536) + 11 * ((slots - 1) // ranges if ranges else 0)


@pytest.fixture
def large(part, monkeypatch) -> None:
    """Calls of these tests count as large ones, whose backward takes two ranges of chunks."""
    monkeypatch.setattr(part("gated_delta_rule.plan"), "STATES_AT_ONCE", 0)


@pytest.mark.parametrize("bounds", [None, [0, 64, 64, 200]])
@pytest.mark.parametrize("plan", ["auto", "invariant", "off"])
def test_a_large_call_keeps_the_states_between_two_ranges_unless_a_plan_says_how_it_is_cut(
    kernel, compiled_backward, kept, large, bounds, plan
):
    problem, leaves = bfloat16_leaves(1383, bounds=bounds)
    o, _ = kernel.chunk_gated_delta_rule(*leaves, cu_seqlens=problem.cu_seqlens, plan=plan)
    o.sum().backward()
    slots = 200 // 64 + (1 if bounds is None else 3)
    ranges = (slots + 1) // 2 if plan == "auto" else 0
    assert [list(x.shape) for x in kept] == [[slots + 1 + (11 if ranges else 0), 2, 96, 32]]
    assert torch.equal(compiled_backward[0]["kept"], kept[0])
    assert compiled_backward[0]["range_slots"] == ranges


def test_a_large_call_that_has_kept_nothing_is_taken_at_once(kernel, compiled_backward, large):
    problem, _ = bfloat16_leaves(1389)
    kernel.chunk_gated_delta_rule_bwd(*(getattr(problem, name) for name in TENSORS), torch.empty(0), problem.do)
    assert (compiled_backward[0]["kept"], compiled_backward[0]["range_slots"]) == (None, 0)


@pytest.mark.parametrize("saves", [True, False])
def test_tracers_expect_the_states_between_two_ranges(part, compiled, kept, large, saves):
    test_tracers_expect_what_the_compiled_forward_keeps(part, compiled, kept, torch.bfloat16, None, saves)


def test_nothing_is_kept_where_no_gradient_is_wanted(kernel, compiled_backward, kept):
    problem, leaves = bfloat16_leaves(1384)
    with torch.no_grad():
        kernel.chunk_gated_delta_rule(*leaves)
    kernel.chunk_gated_delta_rule(*(getattr(problem, name) for name in TENSORS))
    assert not kept


def test_checkpointing_keeps_nothing_until_the_forward_runs_again(kernel, compiled_backward, kept):
    _, leaves = bfloat16_leaves(1386)

    def call(*tensors):
        return kernel.chunk_gated_delta_rule(*tensors)[0]

    o = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=True)
    assert not kept
    o.sum().backward()
    assert len(kept) == 1 and torch.equal(compiled_backward[0]["kept"], kept[0])


def test_empty_residuals_are_none_for_the_compiled_backward(kernel, compiled_backward):
    problem, _ = bfloat16_leaves(1388)
    kernel.chunk_gated_delta_rule_bwd(*(getattr(problem, name) for name in TENSORS), torch.empty(0), problem.do)
    assert compiled_backward[0]["kept"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_residuals_of_another_call_are_refused_by_the_compiled_backward_too(kernel, compiled_backward, dtype):
    problem = make_problem(1, 200, 1, 2, seed=1390, **ROOMY).to(dtype)
    inputs = [getattr(problem, name) for name in TENSORS]
    with pytest.raises(ValueError, match="residuals has shape"):
        kernel.chunk_gated_delta_rule_bwd(*inputs, torch.empty(3, 2, 96, 32, dtype=dtype), problem.do)
    assert not compiled_backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bounds", [None, [0, 64, 64, 200]])
@pytest.mark.parametrize("saves", [True, False])
def test_tracers_expect_what_the_compiled_forward_keeps(part, compiled, kept, dtype, bounds, saves):
    problem = make_problem(1, 200, 1, 2, seed=1392, bounds=bounds, **ROOMY).to(dtype)
    arguments = (*(getattr(problem, name) for name in TENSORS), None, problem.cu_seqlens, 0.1, True)
    real = part("gated_delta_rule.sm90_path").forward(*arguments, saves, "auto")
    expected = part("gated_delta_rule.ops")._forward_fake(*arguments, 64, saves, "auto")
    assert [(x.shape, x.dtype) for x in expected] == [(x.shape, x.dtype) for x in real]


def test_a_backward_in_float16_is_not_cut(kernel, compiled_backward):
    problem = make_problem(1, 70, 1, 2, seed=1380, **ROOMY).to(torch.float16)
    kernel.chunk_gated_delta_rule_bwd(*(getattr(problem, name) for name in TENSORS), torch.empty(0), problem.do)
    assert [call["segment_chunks"] for call in compiled_backward] == [2**25]


def test_a_missing_gradient_of_the_outputs_is_zero_for_the_compiled_backward(kernel, compiled_backward):
    problem = make_problem(1, 70, 1, 2, seed=1350, states=(7, 8), **ROOMY).to(torch.float32)
    leaves = [getattr(problem, name).clone().requires_grad_() for name in TENSORS]
    _, state = kernel.chunk_gated_delta_rule(*leaves, output_final_state=True)
    state.sum().backward()
    [call] = compiled_backward
    assert not call["do"].any() and call["do"].shape == problem.v.shape
    assert call["initial_state"] is None and leaves[0].grad is not None


def test_a_missing_gradient_of_the_states_stays_missing(kernel, compiled_backward):
    problem = make_problem(1, 70, 1, 2, seed=1360, **ROOMY).to(torch.float32)
    leaves = [getattr(problem, name).clone().requires_grad_() for name in TENSORS]
    o, _ = kernel.chunk_gated_delta_rule(*leaves)
    o.sum().backward()
    assert compiled_backward[0]["dht"] is None


def test_gradients_by_hand_have_the_dtype_of_their_inputs(kernel, compiled_backward):
    """The compiled backward gives those of gates and states in float32. Autograd would convert them itself."""
    problem = make_problem(1, 70, 1, 2, seed=1394, states=(7, 8), **ROOMY).to(torch.bfloat16)
    inputs, state = [getattr(problem, name) for name in TENSORS], problem.initial_state
    grads = kernel.chunk_gated_delta_rule_bwd(*inputs, torch.empty(0), problem.do, initial_state=state)
    assert [x.dtype for x in grads] == [torch.bfloat16] * 6 and len(compiled_backward) == 1


def test_bounds_that_the_compiled_backward_refuses_get_their_sentence(kernel, part, compiled_backward, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("the compiled op has its own words for it")

    monkeypatch.setattr(part("gated_delta_rule.sm90_path").ops, "sm90_gated_delta_rule_bwd", refuse)
    problem = make_problem(1, 70, 1, 2, seed=1396, bounds=[0, 50, 30], **ROOMY).to(torch.float32)
    inputs = [getattr(problem, name) for name in TENSORS]
    with pytest.raises(ValueError, match="cu_seqlens decreases from 50 to 30 at entry 2"):
        kernel.chunk_gated_delta_rule_bwd(*inputs, torch.empty(0), problem.do, cu_seqlens=problem.cu_seqlens)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("with_optional", [False, True], ids=["required", "all"])
def test_library_knows_the_op_that_is_called(part, direction, with_optional):
    """The dispatcher matches the arguments with the library's schema before it misses a kernel for the CPU."""
    path = part("gated_delta_rule.sm90_path")
    if not hasattr(path.ops, "sm90_gated_delta_rule_fwd"):
        pytest.skip("this variant has no library")
    q, k, v = rows(dim=128), rows(dim=128), rows(dim=128)
    g = beta = torch.zeros(2, 6, 3)
    state = torch.zeros(2, 3, 128, 128) if with_optional else None
    if direction == "forward":
        arguments = (0.1, True, with_optional, "auto")
    else:
        arguments = (torch.empty(0), v if with_optional else None, state, 0.1, True, "auto")
    with pytest.raises(
        NotImplementedError, match=f"sm90_gated_delta_rule_{'fwd' if direction == 'forward' else 'bwd'}"
    ):
        getattr(path, direction)(q, k, v, g, beta, state, None, *arguments)
