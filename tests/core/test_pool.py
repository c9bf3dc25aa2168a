"""States of a pool, by the PyTorch path: what a call with state indices updates, skips and refuses."""

import pytest
import torch

from .compare import relative_error
from .inputs import TENSORS, make_problem

SMALL = {"dim_k": 4, "dim_v": 6}


def call(kernel, problem, pool, indices, **options):
    q, k, v, g, beta = (getattr(problem, name) for name in TENSORS)
    with torch.no_grad():
        return kernel.fused_recurrent_gated_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=pool,
            state_indices=torch.tensor(indices),
            cu_seqlens=problem.cu_seqlens,
            output_final_state=True,
            **options,
        )


def make(bounds=None, batch=3):
    problem = make_problem(batch, 5, 1, 2, seed=1500, bounds=bounds, **SMALL)
    return problem, torch.randn(6, 2, 4, 6, dtype=torch.float64)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bounds", [None, [0, 2, 2, 5]], ids=["dense", "packed"])
def test_a_pool_equals_states_passed_one_by_one(kernel, bounds, index_dtype):
    problem, pool = make(bounds, batch=1 if bounds else 3)
    before, indices = pool.clone(), [4, 0, 5]
    o, result = call(kernel, problem, pool, torch.tensor(indices, dtype=index_dtype).tolist())
    expected_o, expected = kernel.fused_recurrent_gated_delta_rule(
        *(getattr(problem, name) for name in ("q", "k", "v")),
        g=problem.g,
        beta=problem.beta,
        initial_state=before[indices],
        cu_seqlens=problem.cu_seqlens,
        output_final_state=True,
    )
    assert result is pool
    assert relative_error(o, expected_o) <= 1e-12 and relative_error(pool[indices], expected) <= 1e-12
    assert torch.equal(pool[1:4], before[1:4])


@pytest.mark.parametrize("bounds", [None, [0, 2, 4, 4]], ids=["dense", "packed"])
@pytest.mark.parametrize("outside", [-1, -7, 6, 1000, 2**32 + 1])
def test_a_sequence_outside_the_pool_is_skipped(kernel, bounds, outside):
    """Its outputs are 0 whatever its inputs are, and so are those of tokens that no sequence has."""
    problem, pool = make(bounds, batch=1 if bounds else 3)
    problem.v[0, :2] = torch.nan
    before = pool.clone()
    o, _ = call(kernel, problem, pool, [outside, 2, 3])
    rows = o.flatten(0, 1)
    stop = 2 if bounds else 5
    assert rows[:stop].count_nonzero() == 0 and rows.isfinite().all() and rows[stop : stop + 2].count_nonzero() > 0
    if bounds:
        assert rows[4:].count_nonzero() == 0
    assert torch.equal(pool[[0, 1, 4, 5]], before[[0, 1, 4, 5]]) and not torch.equal(pool[2], before[2])


def test_a_pool_without_slots_skips_everything(kernel):
    problem, pool = make()
    o, _ = call(kernel, problem, pool[:0], [0, 1, -1])
    assert o.count_nonzero() == 0


def test_values_first_and_bfloat16_pools(kernel):
    problem, pool = make()
    turned = pool.mT.bfloat16()
    before = turned.clone()
    o, _ = call(kernel, problem, turned, [0, 2, 4], state_v_first=True)
    exact = before.mT.double()
    expected, _ = call(kernel, problem, exact, [0, 2, 4])
    assert relative_error(o, expected) <= 1e-12 and torch.equal(turned.mT.double(), exact.bfloat16().double())


REFUSALS = {
    "no pool": ({"initial_state": None}, ValueError, "initial_state is None with state_indices"),
    "floats": ({"state_indices": torch.zeros(3)}, TypeError, "state_indices is torch.float32; it must be an int32 or"),
    "a list": ({"state_indices": [0, 1, 2]}, TypeError, "state_indices is list; it must be an int32 or int64 tensor"),
    "too few": ({"state_indices": torch.zeros(2, dtype=torch.int64)}, ValueError, "it must be [N] = [3], one entry"),
    "states of another shape": (
        {"initial_state": torch.zeros(6, 2, 6, 4)},
        ValueError,
        "initial_state has shape [6, 2, 6, 4]; with state_indices it must be a pool [slots, HV, K, V], behind the first axis",
    ),
    "a gradient": (
        {"initial_state": torch.zeros(6, 2, 4, 6, requires_grad=True)},
        ValueError,
        "state_indices is given and an input requires a gradient",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_pools_are_refused_and_nothing_is_written(kernel, case):
    changes, error, words = REFUSALS[case]
    problem, pool = make()
    before = pool.clone()
    arguments = {"initial_state": pool, "state_indices": torch.zeros(3, dtype=torch.int64), **changes}
    q, k, v, g, beta = (getattr(problem, name) for name in TENSORS)
    with pytest.raises(error) as raised:
        kernel.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, **arguments)
    assert words in str(raised.value) and torch.equal(pool, before)
