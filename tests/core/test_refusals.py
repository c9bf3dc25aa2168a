"""Every refusal of the gated delta rule, word for word: the argument, the rule, the value and the way out."""

import pytest
import torch

from .compare import assert_refuses
from .inputs import make_problem

T = torch.tensor
EMPTY = torch.empty


def good_call() -> dict:
    problem = make_problem(2, 6, 2, 4, dim_k=3, dim_v=5, seed=900)
    return {name: getattr(problem, name).float() for name in ("q", "k", "v", "g", "beta")}


REFUSALS = {
    "no tensor": (
        {"q": None},
        TypeError,
        "q is NoneType; it must be a tensor: convert it with torch.as_tensor.",
    ),
    "values that are no tensor": (
        {"v": [1.0]},
        TypeError,
        "v is list; it must be a tensor: convert it with torch.as_tensor.",
    ),
    "integers": (
        {"g": EMPTY(2, 6, 4, dtype=torch.int64)},
        TypeError,
        "g has dtype torch.int64; it must be bfloat16, float16, float32 or float64: pass g.float().",
    ),
    "complex numbers": (
        {"beta": EMPTY(2, 6, 4, dtype=torch.complex64)},
        TypeError,
        "beta has dtype torch.complex64; it must be bfloat16, float16, float32 or float64: pass beta.float().",
    ),
    "queries of another dtype": (
        {"q": EMPTY(2, 6, 2, 3, dtype=torch.bfloat16)},
        TypeError,
        "q has dtype torch.bfloat16 and v torch.float32; q, k and v must agree: pass q.to(v.dtype).",
    ),
    "keys of another dtype": (
        {"k": EMPTY(2, 6, 2, 3, dtype=torch.float64)},
        TypeError,
        "k has dtype torch.float64 and v torch.float32; q, k and v must agree: pass k.to(v.dtype).",
    ),
    "another device": (
        {"k": EMPTY(2, 6, 2, 3, device="meta")},
        ValueError,
        "k is on meta and v on cpu; all inputs must share a device: pass k.to(v.device).",
    ),
    "gates on another device": (
        {"beta": EMPTY(2, 6, 4, device="meta")},
        ValueError,
        "beta is on meta and v on cpu; all inputs must share a device: pass beta.to(v.device).",
    ),
    "flat heads": (
        {"q": EMPTY(2, 6, 6)},
        ValueError,
        "q has shape [2, 6, 6]; it must have four dimensions, [batch, tokens, heads, head size]: transpose or unflatten it.",
    ),
    "flat values": (
        {"v": EMPTY(2, 6, 20)},
        ValueError,
        "v has shape [2, 6, 20]; it must have four dimensions, [batch, tokens, heads, head size]: transpose or unflatten it.",
    ),
    "heads before tokens": (
        {"k": EMPTY(2, 2, 6, 3)},
        ValueError,
        "k has shape [2, 2, 6, 3] and q [2, 6, 2, 3]; they must be equal, [B, T, H, K]: check how they were split.",
    ),
    "values of another batch": (
        {"v": EMPTY(1, 6, 4, 5)},
        ValueError,
        "v has shape [1, 6, 4, 5] and q [2, 6, 2, 3]; batch and tokens must be equal: pass v as [B, T, HV, V].",
    ),
    "values of another length": (
        {"v": EMPTY(2, 7, 4, 5)},
        ValueError,
        "v has shape [2, 7, 4, 5] and q [2, 6, 2, 3]; batch and tokens must be equal: pass v as [B, T, HV, V].",
    ),
    "no key size": (
        {"q": EMPTY(2, 6, 2, 0), "k": EMPTY(2, 6, 2, 0)},
        ValueError,
        "q has shape [2, 6, 2, 0]; its last dimension, the key size, must be at least 1: check how it was split.",
    ),
    "heads that do not divide": (
        {"v": EMPTY(2, 6, 3, 5)},
        ValueError,
        "v has 3 heads and q 2; value heads must be a multiple of key heads, so that consecutive value heads share one: "
        "check the head split of the projection.",
    ),
    "no key head": (
        {"q": EMPTY(2, 6, 0, 3), "k": EMPTY(2, 6, 0, 3)},
        ValueError,
        "v has 4 heads and q 0; value heads must be a multiple of key heads, so that consecutive value heads share one: "
        "check the head split of the projection.",
    ),
    "gates per key head": (
        {"g": EMPTY(2, 6, 2)},
        ValueError,
        "g has shape [2, 6, 2]; it must be [B, T, HV] = [2, 6, 4], one entry per token and value head: "
        "transpose it, or repeat it for the value heads.",
    ),
    "gates per channel": (
        {"beta": EMPTY(2, 6, 4, 5)},
        ValueError,
        "beta has shape [2, 6, 4, 5]; it must be [B, T, HV] = [2, 6, 4], one entry per token and value head: "
        "transpose it, or repeat it for the value heads.",
    ),
    "a chunk size of FLA's other kernels": (
        {"chunk_size": 128},
        ValueError,
        "chunk_size is 128; it must be 16, 32 or 64, and 64 suits every length.",
    ),
    "a fractional chunk size": (
        {"chunk_size": 64.0},
        ValueError,
        "chunk_size is 64.0; it must be 16, 32 or 64, and 64 suits every length.",
    ),
    "a tensor as scale": (
        {"scale": T(1.0)},
        TypeError,
        "scale is Tensor; it must be a number or None: pass float(scale).",
    ),
    "a word as scale": (
        {"scale": "1"},
        TypeError,
        "scale is str; it must be a number or None: pass float(scale).",
    ),
    "bounds in the place of a switch": (
        {"use_beta_sigmoid_in_kernel": T([0, 6])},
        TypeError,
        "use_beta_sigmoid_in_kernel is Tensor; it must be True or False: pass the arguments behind initial_state by name.",
    ),
    "no decision about the final state": (
        {"output_final_state": None},
        TypeError,
        "output_final_state is NoneType; it must be True or False: pass the arguments behind initial_state by name.",
    ),
    "bounds as a list": (
        {"cu_seqlens": [0, 6]},
        TypeError,
        "cu_seqlens is list; it must be an int32 or int64 tensor: pass torch.tensor(bounds, device=q.device).",
    ),
    "fractional bounds": (
        {"cu_seqlens": T([0.0, 6.0])},
        TypeError,
        "cu_seqlens is torch.float32; it must be an int32 or int64 tensor: pass torch.tensor(bounds, device=q.device).",
    ),
    "bounds of two rows": (
        {"cu_seqlens": T([[0, 6], [0, 6]])},
        ValueError,
        "cu_seqlens has shape [2, 2]; it must be [N + 1], the bounds of N sequences: pass lengths.cumsum(0) with a 0 in front.",
    ),
    "no bounds": (
        {"cu_seqlens": T([], dtype=torch.int64)},
        ValueError,
        "cu_seqlens has shape [0]; it must be [N + 1], the bounds of N sequences: pass lengths.cumsum(0) with a 0 in front.",
    ),
    "bounds beside a batch": (
        {"cu_seqlens": T([0, 6])},
        ValueError,
        "q has batch size 2 with cu_seqlens; packed sequences lie in one row: pass tensors flattened to [1, B * T, ...], "
        "or leave cu_seqlens out.",
    ),
    "a state that is no tensor": (
        {"initial_state": 0.0},
        TypeError,
        "initial_state is float; it must be a tensor: convert it with torch.as_tensor.",
    ),
    "a state of integers": (
        {"initial_state": EMPTY(2, 4, 3, 5, dtype=torch.int32)},
        TypeError,
        "initial_state has dtype torch.int32; it must be bfloat16, float16, float32 or float64: pass initial_state.float().",
    ),
    "a state elsewhere": (
        {"initial_state": EMPTY(2, 4, 3, 5, device="meta")},
        ValueError,
        "initial_state is on meta and v on cpu; all inputs must share a device: pass initial_state.to(v.device).",
    ),
    "a transposed state": (
        {"initial_state": EMPTY(2, 4, 5, 3)},
        ValueError,
        "initial_state has shape [2, 4, 5, 3]; it must be [N, HV, K, V] = [2, 4, 3, 5], one state per sequence: "
        "check the number of sequences and state_v_first.",
    ),
    "a state that is not transposed": (
        {"initial_state": EMPTY(2, 4, 3, 5), "state_v_first": True},
        ValueError,
        "initial_state has shape [2, 4, 3, 5]; it must be [N, HV, V, K] = [2, 4, 5, 3], one state per sequence: "
        "check the number of sequences and state_v_first.",
    ),
    "no A_log": (
        {"use_gate_in_kernel": True},
        ValueError,
        "A_log is None with use_gate_in_kernel=True; pass the layer's A_log of shape [HV].",
    ),
    "an A_log that is not used": (
        {"A_log": EMPTY(4)},
        ValueError,
        "A_log is given but use_gate_in_kernel is False, so it would be ignored; "
        "pass use_gate_in_kernel=True with raw gate inputs, or leave it out.",
    ),
    "a dt_bias that is not used": (
        {"dt_bias": EMPTY(4)},
        ValueError,
        "dt_bias is given but use_gate_in_kernel is False, so it would be ignored; "
        "pass use_gate_in_kernel=True with raw gate inputs, or leave it out.",
    ),
    "an A_log that is no tensor": (
        {"use_gate_in_kernel": True, "A_log": 0.5},
        TypeError,
        "A_log is float; it must be a tensor: convert it with torch.as_tensor.",
    ),
    "a sharded A_log": (
        {"use_gate_in_kernel": True, "A_log": EMPTY(0)},
        ValueError,
        "A_log has shape [0]; it must have one entry per value head, [4]: pass the parameter of the layer that made v.",
    ),
    "dt_bias of key heads": (
        {"use_gate_in_kernel": True, "A_log": EMPTY(4), "dt_bias": EMPTY(2)},
        ValueError,
        "dt_bias has shape [2]; it must have one entry per value head, [4]: pass the parameter of the layer that made v.",
    ),
    "A_log elsewhere": (
        {"use_gate_in_kernel": True, "A_log": EMPTY(4, device="meta")},
        ValueError,
        "A_log is on meta and v on cpu; all inputs must share a device: pass A_log.to(v.device).",
    ),
    "double beta without sigmoid": (
        {"allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval=True has an effect only with use_beta_sigmoid_in_kernel=True; "
        "set both, or pass a beta that already reaches 2.",
    ),
    "a context of another library": (
        {"cp_context": object()},
        ValueError,
        "cp_context is given, but context parallelism across devices is not implemented; leave it out or use FLA for it.",
    ),
    "a misspelt option": (
        {"use_qk_l2norm": True},
        TypeError,
        "use_qk_l2norm is not an argument of the gated delta rule; it would be ignored: remove it or check its spelling.",
    ),
    "an option of older versions of FLA": (
        {"head_first": False},
        TypeError,
        "head_first is not an argument of the gated delta rule; it would be ignored: remove it or check its spelling.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_refused_in_one_sentence(kernel, case):
    changes, error, sentence = REFUSALS[case]
    assert_refuses(kernel.chunk_gated_delta_rule, {**good_call(), **changes}, error, sentence)


RECURRENT_OPTIONS = {"chunk_size", "cp_context"}  # not in the signature of the recurrent function


@pytest.mark.parametrize(
    "case", [case for case, (changes, *_) in REFUSALS.items() if not RECURRENT_OPTIONS & changes.keys()]
)
def test_the_recurrent_function_refuses_the_same(kernel, case):
    changes, error, sentence = REFUSALS[case]
    assert_refuses(kernel.fused_recurrent_gated_delta_rule, {**good_call(), **changes}, error, sentence)


@pytest.mark.parametrize(
    "case", [case for case, (changes, *_) in REFUSALS.items() if set(changes) <= {*good_call(), "scale"}]
)
def test_the_functions_outside_autograd_refuse_the_same(kernel, case):
    changes, error, sentence = REFUSALS[case]
    arguments = {**good_call(), **changes}
    assert_refuses(kernel.chunk_gated_delta_rule_fwd, arguments, error, sentence)
    backward = {**arguments, "residuals": EMPTY(1), "do": None}
    assert_refuses(kernel.chunk_gated_delta_rule_bwd, backward, error, sentence)


RECURRENT_REFUSALS = {
    "gates per key channel": (
        {"gk": EMPTY(2, 6, 4, 3)},
        ValueError,
        "gk is given, but gates per key channel belong to KDA and GLA; leave it out or use FLA for it.",
    ),
    "gates per value channel": (
        {"gv": EMPTY(2, 6, 4, 5)},
        ValueError,
        "gv is given, but gates per value channel are not part of the gated delta rule; leave it out or use FLA for it.",
    ),
    "no gate to activate": (
        {"g": None, "use_gate_in_kernel": True, "A_log": EMPTY(4)},
        ValueError,
        "g is None with use_gate_in_kernel=True; pass the raw values to activate, or leave use_gate_in_kernel out.",
    ),
    "no beta to activate, and no gate": (
        {"g": None, "beta": None, "use_beta_sigmoid_in_kernel": True},
        ValueError,
        "beta is None with use_beta_sigmoid_in_kernel=True; pass the raw values to activate, "
        "or leave use_beta_sigmoid_in_kernel out.",
    ),
    "values of no shape": (
        {"g": None, "v": None},
        TypeError,
        "v is NoneType; it must be a tensor: convert it with torch.as_tensor.",
    ),
    "flat values without gates": (
        {"beta": None, "v": EMPTY(2, 6)},
        ValueError,
        "v has shape [2, 6]; it must have four dimensions, [batch, tokens, heads, head size]: transpose or unflatten it.",
    ),
    "a chunk size": (
        {"chunk_size": 64},
        TypeError,
        "chunk_size is not an argument of the gated delta rule; it would be ignored: remove it or check its spelling.",
    ),
}


@pytest.mark.parametrize("case", RECURRENT_REFUSALS)
def test_the_recurrent_function_refuses_in_one_sentence(kernel, case):
    changes, error, sentence = RECURRENT_REFUSALS[case]
    assert_refuses(kernel.fused_recurrent_gated_delta_rule, {**good_call(), **changes}, error, sentence)


BACKWARD_REFUSALS = {
    "no residuals": (
        {"residuals": None},
        TypeError,
        "residuals is NoneType; it must be a tensor: convert it with torch.as_tensor.",
    ),
    "residuals of another call": (
        {"residuals": EMPTY(2, 8, 3, 5)},
        ValueError,
        "residuals has shape [2, 8, 3, 5]; the forward of this call keeps [1, 8, 3, 5]: "
        "pass what chunk_gated_delta_rule_fwd returned for the same inputs, chunk_size and plan.",
    ),
    "a gradient of another shape": (
        {"do": EMPTY(2, 6, 4, 3)},
        ValueError,
        "do has shape [2, 6, 4, 3]; it must be that of o, [B, T, HV, V] = [2, 6, 4, 5]: "
        "pass the gradient of the forward's o.",
    ),
    "a gradient of integers": (
        {"do": EMPTY(2, 6, 4, 5, dtype=torch.int64)},
        TypeError,
        "do has dtype torch.int64; it must be bfloat16, float16, float32 or float64: pass do.float().",
    ),
    "a gradient elsewhere": (
        {"do": EMPTY(2, 6, 4, 5, device="meta")},
        ValueError,
        "do is on meta and v on cpu; all inputs must share a device: pass do.to(v.device).",
    ),
    "a transposed gradient of the state": (
        {"dht": EMPTY(2, 4, 5, 3)},
        ValueError,
        "dht has shape [2, 4, 5, 3]; it must be [N, HV, K, V] = [2, 4, 3, 5], one state per sequence: "
        "check the number of sequences and state_v_first.",
    ),
}


@pytest.mark.parametrize("case", BACKWARD_REFUSALS)
def test_the_backward_by_hand_refuses_in_one_sentence(kernel, case):
    changes, error, sentence = BACKWARD_REFUSALS[case]
    arguments = {**good_call(), "residuals": EMPTY(1, 8, 3, 5), "do": EMPTY(2, 6, 4, 5), **changes}
    assert_refuses(kernel.chunk_gated_delta_rule_bwd, arguments, error, sentence)


def test_an_unknown_plan_is_refused(kernel):
    p = make_problem(1, 5, 1, 2)
    tensors = (p.q, p.k, p.v, p.g, p.beta)
    for call in (kernel.chunk_gated_delta_rule, kernel.chunk_gated_delta_rule_fwd):
        with pytest.raises(ValueError, match="plan is 'fast'; it must be one of 'auto', 'invariant', 'off'"):
            call(*tensors, plan="fast")
        with pytest.raises(ValueError, match=r"plan is \['off'\]; it must be one of"):
            call(*tensors, plan=["off"])


def test_residuals_of_another_chunk_size_are_refused(kernel, part):
    """They would be states at other tokens: wrong gradients without a word."""
    tokens = 64 * part("gated_delta_rule.plan").slab_chunks(64)
    problem = make_problem(1, tokens, 64, 64, dim_k=1, dim_v=1, seed=910)
    inputs = [getattr(problem, name) for name in ("q", "k", "v", "g", "beta")]
    residuals = kernel.chunk_gated_delta_rule_fwd(*inputs, chunk_size=64).residuals
    with pytest.raises(ValueError, match="for the same inputs, chunk_size and plan"):
        kernel.chunk_gated_delta_rule_bwd(*inputs, residuals, problem.do, chunk_size=16)


def test_hints_of_other_implementations_change_nothing(kernel):
    inputs = good_call()
    plain = kernel.chunk_gated_delta_rule(**inputs)[0]
    hinted = kernel.chunk_gated_delta_rule(
        **inputs, cu_seqlens_cpu=T([0, 6]), chunk_indices=T([[0, 0]]), cp_context=None
    )[0]
    assert torch.equal(plain, hinted)
