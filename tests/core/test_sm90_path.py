"""The way to the compiled forward, on the CPU: what it is handed, and what the backward makes of what it keeps.

A stand-in takes the place of the compiled op; the kernels themselves are tested on an SM90 GPU.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flashqla_hub.reference import gated_delta_rule, gated_delta_rule_backward

from .compare import relative_error
from .inputs import GRADIENTS, TENSORS, make_problem, solve, truth
from .test_side_effects import VIEWS

ROOMY = {"dim_k": 16, "dim_v": 16}


def fits_tile_loads(x: Tensor) -> bool:
    """Rows of 16-byte units at 16-byte addresses, no stride of 0, and the batch one run of tokens."""
    batch, tokens, heads, _ = x.shape
    walked = [x.stride(axis) for axis, size in ((1, batch * tokens), (2, heads)) if size > 1]
    return (
        x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and all(stride > 0 and stride % 8 == 0 for stride in walked)
        and (batch == 1 or x.stride(0) == tokens * x.stride(1))
    )


def rows(batch: int = 2, tokens: int = 6, heads: int = 3, dim: int = 16) -> Tensor:
    return torch.randn(batch, tokens, heads, dim).bfloat16()


AS_THEY_ARE = {
    "contiguous": lambda: rows(),
    "a part of a packed projection": lambda: rows(heads=9)[:, :, 3:6],
    "one token": lambda: rows(batch=1, tokens=1),
    "heads before tokens": lambda: rows(batch=1, tokens=3, heads=6).transpose(1, 2),
    "one head of odd stride": lambda: rows(heads=1).as_strided((2, 6, 1, 16), (96, 16, 5, 1)),
    "no tokens": lambda: rows(tokens=0),
}
COPIED = {
    "an unaligned start": lambda: VIEWS["offset_view"](rows()),
    "rows of odd length": lambda: VIEWS["inner_view"](rows()),
    "dimensions turned": lambda: VIEWS["backward_strides"](rows()),
    "a batch with gaps": lambda: rows(tokens=9)[:, :6],
    "one row for all heads": lambda: rows(heads=1).expand(2, 6, 3, 16),
    "one token for all": lambda: rows(batch=1, tokens=1).expand(1, 6, 3, 16),
    "one row for the batch": lambda: rows(batch=1).expand(2, 6, 3, 16),
    "one token for the batch": lambda: rows(batch=1, tokens=1).expand(2, 1, 3, 16),
    "every second element": lambda: rows(dim=32)[..., ::2],
}


@pytest.mark.parametrize("layout", AS_THEY_ARE)
def test_rows_that_tiles_can_be_loaded_from_are_not_copied(part, layout):
    x = AS_THEY_ARE[layout]()
    assert part("gated_delta_rule.sm90_path")._loadable(x) is x
    assert fits_tile_loads(x) or x.numel() == 0


@pytest.mark.parametrize("layout", COPIED)
def test_other_rows_are_copied_once_and_then_fit(part, layout):
    x = COPIED[layout]()
    assert not fits_tile_loads(x)
    loaded = part("gated_delta_rule.sm90_path")._loadable(x)
    assert fits_tile_loads(loaded) and torch.equal(loaded, x)


@pytest.mark.parametrize("turned", [lambda: rows(tokens=3, heads=1).transpose(1, 2), lambda: rows()[:, -1:]])
def test_one_token_a_row_is_not_copied_whatever_its_stride(part, turned):
    x = turned()
    loaded = part("gated_delta_rule.sm90_path")._loadable(x)
    assert fits_tile_loads(loaded) and torch.equal(loaded, x) and loaded.data_ptr() == x.data_ptr()


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
def test_the_compiled_forward_gets_what_it_can_load_and_the_backward_is_right(kernel, compiled, bounds, view):
    batch = 2 if bounds is None else 1
    problem = make_problem(batch, 100, 1, 2, seed=1300, bounds=bounds, states=(7, 8), **ROOMY).to(torch.float32)
    problem = problem if view is None else problem.map(VIEWS[view])
    outcome, expected = solve(kernel, problem), truth(problem)
    assert len(compiled) == 1
    for name in ("q", "k", "v"):
        assert torch.equal(compiled[0][name], getattr(problem, name))
    assert compiled[0]["initial_state"].is_contiguous()
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


def test_strided_bounds_reach_the_compiled_forward_contiguous(kernel, compiled):
    problem = make_problem(1, 100, 1, 2, seed=1330, bounds=[0, 40, 100], **ROOMY).to(torch.float32)
    strided = torch.stack([problem.cu_seqlens, problem.cu_seqlens + 1], dim=1)[:, 0]
    solve(kernel, replace(problem, cu_seqlens=strided))
    assert compiled[0]["cu_seqlens"].is_contiguous()


@pytest.fixture
def compiled_backward(part, compiled, monkeypatch) -> list[dict]:
    """Serve every backward by a stand-in as well; the list holds the arguments of its calls."""
    calls = []

    def stand_in(
        q, k, v, g, beta, initial_state, cu_seqlens, do, dht, scale, l2norm, state_v_first, output_dinitial, segment
    ):
        calls.append(
            {"q": q, "k": k, "v": v, "do": do, "dht": dht, "initial_state": initial_state, "segment_chunks": segment}
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
def test_the_compiled_backward_gets_what_it_can_load_and_its_gradients_arrive(kernel, compiled_backward, bounds, view):
    batch = 2 if bounds is None else 1
    problem = make_problem(batch, 100, 1, 2, seed=1340, bounds=bounds, states=(7, 8), **ROOMY).to(torch.float32)
    problem = problem if view is None else problem.map(VIEWS[view])
    outcome, expected = solve(kernel, problem), truth(problem)
    [call] = compiled_backward
    for name in ("q", "k", "v"):
        assert torch.equal(call[name], getattr(problem, name))
    assert call["do"].is_contiguous() and call["dht"].is_contiguous() and call["initial_state"].is_contiguous()
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
    assert fits_tile_loads(compiled_backward[0]["do"]), "the gradient of a sum is one number for all"


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
    gradients = () if direction == "forward" else (v if with_optional else None, state)
    with pytest.raises(
        NotImplementedError, match=f"sm90_gated_delta_rule_{'fwd' if direction == 'forward' else 'bwd'}"
    ):
        getattr(path, direction)(q, k, v, g, beta, state, None, *gradients, 0.1, True, "auto")
