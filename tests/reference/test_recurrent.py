"""The definition that every kernel is judged by, judged itself: by hand, and by numbers from elsewhere."""

import math

import torch

from flashqla_hub.reference import gated_delta_rule, l2_normalize

from ..core.compare import assert_fingerprint
from ..core.inputs import TENSORS, make_problem

HALF = math.log(0.5)


def column(*values: float) -> torch.Tensor:
    """[1, T, 1] or, as q, k, v of size 1, [1, T, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1)


def test_two_tokens_by_hand():
    """K = V = 1: the state is a number.

    Token 1: S = 0; d = 0.5 (4 - 0) = 2; S = 2; o = 3 * 2 * 1 = 6.
    Token 2: S = 0.5 * 2 = 1; d = 1 (6 - 1 * 2) = 4; S = 1 + 2 * 4 = 9; o = 3 * 9 * -1 = -27.
    """
    q, k, v = (column(*x)[..., None] for x in ((1, -1), (1, 2), (4, 6)))
    out, state = gated_delta_rule(q, k, v, column(HALF, HALF), column(0.5, 1), scale=3.0)
    assert out.flatten().tolist() == [6.0, -27.0]
    assert state.flatten().tolist() == [9.0]


def test_the_state_maps_keys_to_values():
    """Orthogonal unit keys written with beta 1 are read back exactly; rows of the state belong to keys."""
    keys = torch.eye(3, dtype=torch.float64).view(1, 3, 1, 3)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64).view(1, 3, 1, 2)
    gate, beta = column(0, 0, 0), column(1, 1, 1)
    out, state = gated_delta_rule(keys, keys, values, gate, beta, scale=1.0)
    assert torch.equal(out, values)
    assert state.view(3, 2).tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_writing_again_with_beta_one_replaces():
    key = column(1, 1)[..., None]
    out, state = gated_delta_rule(key, key, column(5, 7)[..., None], column(0, 0), column(1, 1), scale=1.0)
    assert out.flatten().tolist() == [5.0, 7.0] and state.item() == 7.0


def test_decay_comes_before_the_error():
    """With the error first, d would be 6 - 8 = -2 and the state 2."""
    key = column(1)[..., None]
    before = torch.full((1, 1, 1, 1), 8.0, dtype=torch.float64)
    out, state = gated_delta_rule(
        key, key, column(6)[..., None], column(HALF), column(1), scale=1.0, initial_state=before
    )
    assert state.item() == 6.0 and out.item() == 6.0 and before.item() == 8.0


def test_default_scale_is_one_by_the_root_of_the_key_size():
    key = torch.ones(1, 1, 1, 16, dtype=torch.float64)
    out, _ = gated_delta_rule(key, key, column(1)[..., None], column(0), column(1))
    assert out.item() == 16 / 4


def test_value_heads_read_the_key_head_of_their_group():
    q = torch.tensor([1.0, 10.0], dtype=torch.float64).view(1, 1, 2, 1)
    value = torch.ones(1, 1, 4, 1, dtype=torch.float64)
    gate = torch.zeros(1, 1, 4, dtype=torch.float64)
    out, _ = gated_delta_rule(q, torch.ones_like(q), value, gate, gate + 1, scale=1.0)
    assert out.flatten().tolist() == [1.0, 1.0, 10.0, 10.0]


def test_packed_sequences_start_from_their_own_states():
    key, value = column(1, 1, 1)[..., None], column(0, 0, 0)[..., None]
    states = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64).view(3, 1, 1, 1)
    out, final = gated_delta_rule(
        key,
        key,
        value,
        column(HALF, HALF, HALF),
        column(0, 0, 0),
        scale=1.0,
        initial_state=states,
        cu_seqlens=torch.tensor([0, 1, 1, 2]),
    )
    assert out.flatten().tolist() == [1.0, 2.5, 0.0]  # the third token belongs to nobody
    assert final.flatten().tolist() == [1.0, 3.0, 2.5]


def test_normalisation_has_its_epsilon_inside_the_root():
    x = torch.tensor([3e-3, 4e-3], dtype=torch.float64)
    assert torch.allclose(l2_normalize(x), x / math.sqrt(25e-6 + 1e-6), rtol=1e-15)
    assert l2_normalize(torch.zeros(2)).tolist() == [0.0, 0.0]


def test_numbers_of_another_implementation():
    """Written in NumPy, apart from this project."""
    p = make_problem(1, 104, 2, 4, seed=60, bounds=[0, 0, 40, 40, 104, 104], states=(66, 67))
    out, state = gated_delta_rule(
        *(getattr(p, name) for name in TENSORS),
        initial_state=p.initial_state,
        cu_seqlens=p.cu_seqlens,
        use_qk_l2norm=True,
    )
    assert_fingerprint(out, l2=3.2658108608, total=-0.84821873398)
    assert_fingerprint(state, l2=257.20597588, total=-96.022276924)


def test_inputs_are_left_alone():
    p = make_problem(1, 5, 1, 2, dim_k=3, dim_v=2, states=(7, 8))
    kept = p.map(torch.clone)
    gated_delta_rule(*(getattr(p, name) for name in TENSORS), initial_state=p.initial_state)
    assert all(torch.equal(getattr(p, name), getattr(kept, name)) for name in (*TENSORS, "initial_state"))
