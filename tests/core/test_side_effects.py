"""The call sees tensors however they lie in memory, leaves them alone, and shares nothing between threads."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from .compare import assert_equal, assert_fingerprint
from .inputs import TENSORS, Problem, forward, make_problem, solve

SMALL = {"dim_k": 16, "dim_v": 8}


def offset_view(x: Tensor) -> Tensor:
    """The values of x in a storage that begins one element earlier: an address that is not aligned."""
    padded = torch.cat([x.new_zeros(1), x.flatten()])
    view = padded[1:].view(x.shape)
    assert view.storage_offset() == 1
    return view


def inner_view(x: Tensor) -> Tensor:
    """The values of x between NaN on both sides of every dimension."""
    view = torch.nn.functional.pad(x, (1, 2) * x.dim(), value=float("nan"))
    for dim, size in enumerate(x.shape):
        view = view.narrow(dim, 1, size)
    return view


def backward_strides(x: Tensor) -> Tensor:
    """The values of x with the first dimension innermost in memory."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


VIEWS = {f.__name__: f for f in (offset_view, inner_view, backward_strides)}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("bounds", [None, [0, 40, 40, 100]], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_equal_contiguous_tensors(kernel, view, bounds, dtype):
    batch = 2 if bounds is None else 1
    problem = make_problem(batch, 100, 1, 2, seed=800, bounds=bounds, states=(807, 808), **SMALL).to(dtype)
    viewed = problem.map(VIEWS[view])
    assert view == "offset_view" or not viewed.q.is_contiguous()
    assert_equal(solve(kernel, viewed), solve(kernel, problem))


def test_split_views_of_one_projection(kernel):
    """As a model makes them: q, k, v from a transposed convolution output, gates from transposed projections."""
    tokens, heads, value_heads, size = 65, 2, 4, 128
    problem = make_problem(1, tokens, heads, value_heads, seed=50)
    mixed = torch.cat([problem.q.flatten(2), problem.k.flatten(2), problem.v.flatten(2)], dim=2)
    mixed = mixed.transpose(1, 2).contiguous().transpose(1, 2)
    q, k, v = mixed.split([heads * size, heads * size, value_heads * size], dim=2)
    g, beta = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (problem.g, problem.beta))
    viewed = replace(
        problem,
        q=q.unflatten(2, (heads, size)),
        k=k.unflatten(2, (heads, size)),
        v=v.unflatten(2, (-1, size)),
        g=g,
        beta=beta,
    )
    assert not any(getattr(viewed, name).is_contiguous() for name in TENSORS)
    outcome = solve(kernel, viewed)
    assert_equal(outcome, solve(kernel, problem))
    assert_fingerprint(outcome.o, l2=0.85536058533)
    assert_fingerprint(outcome.dk, l2=0.87868348746)


def test_expanded_inputs_equal_contiguous_ones(kernel):
    """One number, or one row, for everybody: stride 0."""
    problem = make_problem(2, 70, 1, 2, seed=805, states=(806, 807), **SMALL)
    expanded = replace(
        problem,
        g=problem.g[:1, :1, :1].expand(2, 70, 2),
        beta=problem.beta[:, :1].expand(2, 70, 2),
        k=problem.k[:1].expand(2, 70, 1, 16),
        initial_state=problem.initial_state[:1].expand(2, 2, 16, 8),
    )
    assert_equal(solve(kernel, expanded), solve(kernel, expanded.map(torch.Tensor.contiguous)))


def test_one_tensor_in_several_roles(kernel):
    problem = make_problem(1, 70, 2, 2, seed=810, dim_k=16, dim_v=16)
    shared = replace(problem, k=problem.q, v=problem.q)
    copies = replace(problem, k=problem.q.clone(), v=problem.q.clone())
    assert_equal(forward(kernel, shared), forward(kernel, copies))
    leaf = problem.q.clone().requires_grad_()
    o, _ = kernel.chunk_gated_delta_rule(leaf, leaf, leaf, problem.g, problem.beta, use_qk_l2norm_in_kernel=True)
    apart = solve(kernel, copies)
    (grad,) = torch.autograd.grad(o, leaf, problem.do)
    assert torch.allclose(grad, apart.dq + apart.dk + apart.dv, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bounds", [None, [0, 64]], ids=["dense", "packed"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_no_input_is_modified(kernel, bounds, tokens):
    """Whole chunks of one head, where a chunk of the computation can be the caller's own memory."""
    bounds = None if bounds is None else [0, tokens]
    problem = make_problem(1, tokens, 1, 1, seed=820, bounds=bounds, states=(827, 828), use_qk_l2norm=False, **SMALL)
    problem = problem.to(torch.float32)
    kept = problem.map(torch.clone)
    solve(kernel, problem)
    forward(kernel, problem)
    for name in (*TENSORS, "do", "dht", "initial_state"):
        assert torch.equal(getattr(problem, name), getattr(kept, name)), name


@pytest.mark.parametrize("name", [*TENSORS, "initial_state"])
def test_an_input_that_changes_before_the_backward_is_noticed(kernel, name):
    """As a cache that is overwritten in place: better an error than the gradient at other values."""
    problem = make_problem(1, 20, 1, 2, seed=825, states=(826, 827), **SMALL)
    leaf = problem.beta.requires_grad_() if name != "beta" else problem.g.requires_grad_()
    o, _ = kernel.chunk_gated_delta_rule(
        *(getattr(problem, each) for each in TENSORS), initial_state=problem.initial_state
    )
    getattr(problem, name).detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum(), leaf)


@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_outputs_share_no_memory_with_inputs(kernel, tokens):
    """A cache may be written to after the call, or a gradient used in place."""
    problem = make_problem(1, tokens, 1, 1, seed=830, states=(837, 838), **SMALL).to(torch.float32)
    outcome = solve(kernel, problem)
    inputs = {getattr(problem, name).untyped_storage().data_ptr() for name in (*TENSORS, "do", "dht", "initial_state")}
    taken = {}
    for name, x in outcome.items():
        address = x.untyped_storage().data_ptr()
        if x.numel():
            assert address not in inputs, f"{name} lies in an input"
            assert address not in taken, f"{name} lies in {taken.get(address)}"
            taken[address] = name


def test_threads_do_not_disturb_each_other(kernel):
    problems = [
        make_problem(
            1, 100 + i, 1, 2, seed=840 + 10 * i, states=(847, 848), bounds=[0, 50, 100] if i % 2 else None, **SMALL
        )
        for i in range(4)
    ]
    expected = [solve(kernel, problem) for problem in problems]
    with ThreadPoolExecutor(max_workers=4) as pool:
        for _ in range(5):
            for actual, outcome in zip(
                pool.map(lambda problem: solve(kernel, problem), problems), expected, strict=True
            ):
                assert_equal(actual, outcome)


def test_the_number_of_threads_changes_rounding_only(kernel):
    problem = make_problem(2, 200, 2, 4, seed=850, states=(857, 858)).to(torch.float32)
    alone = solve(kernel, problem)
    torch.set_num_threads(2)
    try:
        together = solve(kernel, problem)
    finally:
        torch.set_num_threads(1)
    for name, x in together.items():
        assert torch.allclose(x, getattr(alone, name), rtol=1e-4, atol=1e-5), name


def test_deterministic_mode_is_supported(kernel):
    problem = make_problem(1, 100, 1, 2, seed=860, bounds=[0, 30, 90], states=(867, 868), **SMALL)
    expected = solve(kernel, problem)
    torch.use_deterministic_algorithms(True)
    try:
        assert_equal(solve(kernel, problem), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_default_dtype_and_device_do_not_matter(kernel):
    """As under `torch.set_default_dtype(bfloat16)`, which loaders of models use."""
    problem: Problem = make_problem(1, 70, 1, 2, seed=870, states=(877, 878), **SMALL).to(torch.float32)
    expected = solve(kernel, problem)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            outcome = solve(kernel, problem)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(outcome, expected)


def test_random_state_is_left_alone(kernel):
    problem = make_problem(1, 70, 1, 2, seed=880, **SMALL)
    before = torch.get_rng_state()
    solve(kernel, problem)
    assert torch.equal(torch.get_rng_state(), before)
