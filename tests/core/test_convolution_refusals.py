"""Every refusal of the short convolution, word for word."""

import pytest
import torch

from .compare import assert_refuses

T = torch.tensor
ONES = torch.ones

SHARED = {
    "an unknown activation": (
        {"activation": "relu"},
        ValueError,
        "activation is 'relu'; it must be None, 'silu' or 'swish': apply others to the output.",
    ),
    "no tensor": ({"x": None}, TypeError, "x is NoneType; it must be a tensor: convert it with torch.as_tensor."),
    "no weight": (
        {"weight": None},
        TypeError,
        "weight is NoneType; it must be a tensor: convert it with torch.as_tensor.",
    ),
    "integers": (
        {"x": ONES(1, 3, 6, dtype=torch.int32)},
        TypeError,
        "x has dtype torch.int32; it must be bfloat16, float16, float32 or float64: pass x.float().",
    ),
    "weights that an offload hook never loaded": (
        {"weight": ONES(3, 4, device="meta")},
        ValueError,
        "weight is on meta and x on cpu; all inputs must share a device: pass weight.to(x.device).",
    ),
    "a bias elsewhere": (
        {"bias": ONES(3, device="meta")},
        ValueError,
        "bias is on meta and x on cpu; all inputs must share a device: pass bias.to(x.device).",
    ),
    "the weight of a Conv1d": (
        {"weight": ONES(3, 1, 4)},
        ValueError,
        "weight has shape [3, 1, 4]; it must be [channels, width] with 3 channels: "
        "squeeze the middle dimension of a Conv1d weight.",
    ),
    "a sharded weight": (
        {"weight": ONES(2, 4)},
        ValueError,
        "weight has shape [2, 4]; it must be [channels, width] with 3 channels: "
        "squeeze the middle dimension of a Conv1d weight.",
    ),
    "no taps": (
        {"weight": ONES(3, 0)},
        ValueError,
        "weight has shape [3, 0]; it must be [channels, width] with 3 channels: "
        "squeeze the middle dimension of a Conv1d weight.",
    ),
    "a bias of another size": (
        {"bias": ONES(6)},
        ValueError,
        "bias has shape [6]; it must be [3], one entry per channel: check its layer.",
    ),
}

REFUSALS = {
    **SHARED,
    "no channels": (
        {"x": ONES(3, 6)},
        ValueError,
        "x has shape [3, 6]; it must be [batch, channels, tokens]: transpose or unsqueeze it.",
    ),
    "both kinds of boundaries": (
        {"seq_idx": T([[0] * 6]), "cu_seqlens": T([0, 6])},
        ValueError,
        "seq_idx and cu_seqlens are both given; they say the same thing: pass one of them.",
    ),
    "fractional sequence numbers": (
        {"seq_idx": ONES(1, 6)},
        TypeError,
        "seq_idx is torch.float32; it must be an integer tensor: pass the number of each token's sequence.",
    ),
    "sequence numbers as a list": (
        {"seq_idx": [[0] * 6]},
        TypeError,
        "seq_idx is list; it must be an integer tensor: pass the number of each token's sequence.",
    ),
    "sequence numbers of one row": (
        {"seq_idx": T([0] * 6)},
        ValueError,
        "seq_idx has shape [6]; it must be [batch, tokens] = [1, 6]: pass one number per token.",
    ),
    "sequence numbers elsewhere": (
        {"seq_idx": torch.zeros(1, 6, dtype=torch.int32, device="meta")},
        ValueError,
        "seq_idx is on meta and x on cpu; all inputs must share a device: pass seq_idx.to(x.device).",
    ),
    "fractional bounds": (
        {"cu_seqlens": T([0.0, 6.0])},
        TypeError,
        "cu_seqlens is torch.float32; it must be an int32 or int64 tensor: pass torch.tensor(bounds, device=x.device).",
    ),
    "bounds of two rows": (
        {"cu_seqlens": T([[0, 6]])},
        ValueError,
        "cu_seqlens has shape [1, 2]; it must be [N + 1], the bounds of N sequences: pass lengths.cumsum(0) with a 0 in front.",
    ),
    "bounds beside a batch": (
        {"x": ONES(2, 3, 6), "cu_seqlens": T([0, 6])},
        ValueError,
        "x has batch size 2 with cu_seqlens; packed sequences lie in one row: pass tensors flattened to [1, D, B * T], "
        "or leave cu_seqlens out.",
    ),
    "bounds elsewhere": (
        {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")},
        ValueError,
        "cu_seqlens is on meta and x on cpu; all inputs must share a device: pass cu_seqlens.to(x.device).",
    ),
    "bounds that do not start at 0": (
        {"cu_seqlens": T([2, 6])},
        ValueError,
        "cu_seqlens starts at 2; it must start at 0: prepend the first bound.",
    ),
    "bounds that decrease": (
        {"cu_seqlens": T([0, 4, 3])},
        ValueError,
        "cu_seqlens decreases from 4 to 3 at entry 2; it must hold cumulative lengths: "
        "pass lengths.cumsum(0) with a 0 in front.",
    ),
    "bounds of a longer row": (
        {"cu_seqlens": T([0, 7])},
        ValueError,
        "cu_seqlens ends at 7 but the row has 6 tokens; its last entry must not exceed the row: "
        "pass the bounds of this row only.",
    ),
    "initial states of a packed row": (
        {"cu_seqlens": T([0, 6]), "initial_states": ONES(1, 3, 3)},
        ValueError,
        "cu_seqlens is given with initial or final states; a packed row starts every sequence from zeros: "
        "convolve the sequences one by one to carry states.",
    ),
    "final states of a packed row": (
        {"seq_idx": T([[0] * 6]), "return_final_states": True},
        ValueError,
        "seq_idx is given with initial or final states; a packed row starts every sequence from zeros: "
        "convolve the sequences one by one to carry states.",
    ),
    "too short initial states": (
        {"initial_states": ONES(1, 3, 2)},
        ValueError,
        "initial_states has shape [1, 3, 2]; it must be [batch, channels, tokens] = [1, 3, 3] with at least 3 tokens: "
        "allocate it for this batch and width.",
    ),
    "initial states of integers": (
        {"initial_states": ONES(1, 3, 3, dtype=torch.int64)},
        TypeError,
        "initial_states has dtype torch.int64; it must be bfloat16, float16, float32 or float64: pass initial_states.float().",
    ),
    "a place for final states that is too long": (
        {"final_states_out": ONES(1, 3, 4)},
        ValueError,
        "final_states_out has shape [1, 3, 4]; it must be [batch, channels, tokens] = [1, 3, 3] with exactly 3 tokens: "
        "allocate it for this batch and width.",
    ),
}

UPDATE_REFUSALS = {
    **SHARED,
    "no state": (
        {"conv_state": None},
        TypeError,
        "conv_state is NoneType; it must be a tensor: convert it with torch.as_tensor.",
    ),
    "a state of another batch": (
        {"conv_state": ONES(2, 3, 3)},
        ValueError,
        "conv_state has shape [2, 3, 3]; it must be [batch, channels, tokens] = [1, 3, 3] with at least 3 tokens: "
        "allocate it for this batch and width.",
    ),
    "a flat state": (
        {"conv_state": ONES(3, 3)},
        ValueError,
        "conv_state has shape [3, 3]; it must be [batch, channels, tokens] = [1, 3, 3] with at least 3 tokens: "
        "allocate it for this batch and width.",
    ),
    "a state elsewhere": (
        {"conv_state": ONES(1, 3, 3, device="meta")},
        ValueError,
        "conv_state is on meta and x on cpu; all inputs must share a device: pass conv_state.to(x.device).",
    ),
    "one channel": (
        {"x": ONES(6)},
        ValueError,
        "x has shape [6]; it must be [batch, channels, tokens]: transpose or unsqueeze it.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_refused_in_one_sentence(kernel, case):
    changes, error, sentence = REFUSALS[case]
    good = {"x": ONES(1, 3, 6), "weight": ONES(3, 4)}
    assert_refuses(kernel.causal_conv1d_fn, {**good, **changes}, error, sentence)


@pytest.mark.parametrize("case", UPDATE_REFUSALS)
def test_a_refused_update_leaves_the_state_alone(kernel, case):
    changes, error, sentence = UPDATE_REFUSALS[case]
    state = torch.full((1, 3, 3), 7.0)
    good = {"x": ONES(1, 3, 6), "conv_state": state, "weight": ONES(3, 4)}
    assert_refuses(kernel.causal_conv1d_update, {**good, **changes}, error, sentence)
    assert (state == 7).all()
