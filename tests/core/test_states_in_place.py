"""Final states written where the initial ones lie: generation then copies no state, and a graph finds it in its place."""

import pytest
import torch

H, HV, K, V = 2, 4, 8, 12


def make_call(tokens: int = 1, dtype: torch.dtype = torch.float32, layout: str = "KV") -> dict:
    shape = (3, HV, K, V) if layout == "KV" else (3, HV, V, K)
    return {
        "q": torch.randn(3, tokens, H, K),
        "k": torch.randn(3, tokens, H, K),
        "v": torch.randn(3, tokens, HV, V),
        "g": -torch.rand(3, tokens, HV),
        "beta": torch.rand(3, tokens, HV),
        "initial_state": torch.randn(shape).to(dtype),
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": layout == "VK",
    }


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_states_move_on_in_their_place(kernel, tokens, layout):
    call = make_call(tokens, layout=layout)
    expected = kernel.fused_recurrent_gated_delta_rule(**call, output_final_state=True)
    call["initial_state"] = state = call["initial_state"].clone()
    o, final = kernel.fused_recurrent_gated_delta_rule(**call, output_final_state=True, inplace_final_state=True)
    assert final is state
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def test_states_keep_their_dtype(kernel):
    call = make_call(dtype=torch.bfloat16)
    _, expected = kernel.fused_recurrent_gated_delta_rule(**call, output_final_state=True)
    _, final = kernel.fused_recurrent_gated_delta_rule(**call, inplace_final_state=True)
    assert final is None and call["initial_state"].dtype == torch.bfloat16
    assert torch.equal(call["initial_state"], expected.bfloat16())


def test_packed_sequences_have_a_state_each(kernel):
    call = make_call()
    packed = {name: call[name].transpose(0, 1) for name in ("q", "k", "v", "g", "beta")}
    bounds = torch.tensor([0, 1, 1, 3])
    expected = kernel.fused_recurrent_gated_delta_rule(**{**call, **packed}, cu_seqlens=bounds, output_final_state=True)
    call |= packed
    kernel.fused_recurrent_gated_delta_rule(**call, cu_seqlens=bounds, inplace_final_state=True)
    assert torch.equal(call["initial_state"], expected[1])


def test_there_must_be_states(kernel):
    with pytest.raises(ValueError, match="inplace_final_state is True and initial_state is None; pass the states"):
        kernel.fused_recurrent_gated_delta_rule(**{**make_call(), "initial_state": None}, inplace_final_state=True)


@pytest.mark.parametrize("how", [{"inplace_final_state": True}, {"state_indices": torch.tensor([0, 1, 2])}], ids=list)
def test_states_in_the_same_memory_are_refused(kernel, how):
    call = make_call()
    call["initial_state"] = call["initial_state"][:1].expand(3, -1, -1, -1)
    with pytest.raises(
        ValueError, match=r"initial_state has strides .* must not repeat memory: pass initial_state\.clone"
    ):
        kernel.fused_recurrent_gated_delta_rule(**call, **how)


@pytest.mark.parametrize("name", ["v", "initial_state"])
def test_gradients_are_refused(kernel, name):
    call = make_call()
    call[name].requires_grad_()
    with pytest.raises(
        ValueError, match=r"inplace_final_state is given and an input requires a gradient.*torch\.no_grad"
    ):
        kernel.fused_recurrent_gated_delta_rule(**call, inplace_final_state=True)
    with torch.no_grad():
        kernel.fused_recurrent_gated_delta_rule(**call, inplace_final_state=True)


def test_other_numbers_of_states_are_refused(kernel):
    call = make_call()
    call["initial_state"] = torch.zeros(2, HV, K, V)
    with pytest.raises(ValueError, match="initial_state has shape"):
        kernel.fused_recurrent_gated_delta_rule(**call, inplace_final_state=True)
