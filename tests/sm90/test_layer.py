"""The whole layer in a model of 128-wide heads on an SM90 GPU, in bfloat16, against itself in float64 on the CPU.

The yardstick is the same layer in bfloat16 on the PyTorch path, whose roundings are those of transformers.
"""

import copy
import functools
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    DynamicCache,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
)

import flashqla_hub
from flashqla_hub import mapping
from flashqla_hub.models import PART_NAMES, gated_delta_nets

from .measures import kernels_of, relative

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU"),
    pytest.mark.skipif(not set(PART_NAMES) <= set(mapping.SM90_KERNELS), reason="a part has no SM90 kernel yet"),
]

HIDDEN = 512
LAUNCHES_OF_A_STEP = {1: 3, 16: 6}  # by sequences: up to four have their projections of one input in one launch
# Relative error of the gradients of A_log and dt_bias, four numbers each, in which terms of both signs cancel by luck: in 24
# draws of 3 to 700 tokens the yardstick is off by 1e-3 to 5.7e-2, and by more than this in two. There its own error is the limit.
GATE_PARAMETERS = 2e-2
SHARED = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@pytest.fixture(params=["qwen3_5", "qwen3_next"])
def plain(request):
    """A model in bfloat16 on the GPU, as transformers runs it, with activations of usual size."""
    torch.manual_seed(0)
    if request.param == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHARED))
    else:
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**SHARED, **EXPERTS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "conv1d" not in name:
                parameter.mul_(3)
        for net in gated_delta_nets(model):
            net.module.A_log.sub_(3)
    yield model.eval().to("cuda", torch.bfloat16)
    flashqla_hub.unregister()


@pytest.fixture
def net(plain, kernel_folder):
    """The first layer of the kernelized model."""
    flashqla_hub.kernelize(plain, source=kernel_folder)
    layer = gated_delta_nets(plain)[0]
    assert flashqla_hub.report(plain).served_whole(layer.path)
    return layer.module


@pytest.fixture(autouse=True)
def _no_detour():
    """No call may leave the SM90 kernels or be left to transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*PyTorch path.*")
        warnings.filterwarnings("error", message=".*leaves a call.*")
        yield


def on_the_cpu(net, dtype: torch.dtype):
    """A copy of the layer, which is served by the kernel's PyTorch path there."""
    return copy.deepcopy(net).to("cpu", dtype)


def gradients(net, x: torch.Tensor, weights: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    net.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    output = net(leaf, **options)
    (output * weights).sum().backward()
    return {"output": output.detach(), "x": leaf.grad, **{name: p.grad for name, p in net.named_parameters()}}


def assert_no_worse_than_the_yardstick(net, tokens: int, batch: int = 1, **options) -> None:
    x, weights = (torch.randn(batch, tokens, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    cpu_options = {name: value.cpu() for name, value in options.items()}
    found = gradients(net, x, weights, **options)
    truth = gradients(on_the_cpu(net, torch.float64), x.cpu().double(), weights.cpu().double(), **cpu_options)
    yardstick = gradients(on_the_cpu(net, torch.bfloat16), x.cpu(), weights.cpu(), **cpu_options)
    for name, expected in truth.items():
        assert torch.isfinite(found[name]).all(), name
        if not expected.any():  # the gate of a first token decays nothing
            assert not found[name].any(), name
            continue
        error, allowed = relative(found[name], expected), relative(yardstick[name], expected)
        limit = max(GATE_PARAMETERS, allowed) if expected.numel() < 16 else 1.2 * allowed + 1e-3
        assert error <= limit, f"{name} is off by {error:.1e}, the yardstick by {allowed:.1e}"


@pytest.mark.parametrize("tokens", [1, 3, 65, 700])
def test_output_and_gradients(net, tokens):
    assert_no_worse_than_the_yardstick(net, tokens, batch=2)


def test_packed_sequences(net):
    bounds = torch.tensor([0, 100, 100, 101, 300], dtype=torch.int32, device="cuda")
    assert_no_worse_than_the_yardstick(net, 300, cu_seq_lens_q=bounds)
    assert_no_worse_than_the_yardstick(net, 300, seq_idx=(torch.arange(300, device="cuda") // 77).int()[None])


def test_padded_rows(net):
    mask = torch.ones(2, 120, device="cuda", dtype=torch.long)
    mask[1, :50] = 0
    assert_no_worse_than_the_yardstick(net, 120, batch=2, attention_mask=mask)


@pytest.mark.parametrize("splits", [(100, 1, 1, 1), (3, 97), (64, 1, 35, 1)])
def test_segments_on_a_cache(net, plain, splits):
    x = torch.randn(3, sum(splits), HIDDEN, device="cuda").bfloat16()
    truth = on_the_cpu(net, torch.float64)
    cache, others = (DynamicCache(config=plain.config) for _ in range(2))
    yardstick = on_the_cpu(net, torch.bfloat16)
    with torch.no_grad():
        expected = truth(x.cpu().double())
        found = torch.cat([net(part, cache_params=cache) for part in x.split(splits, dim=1)], dim=1)
        allowed = torch.cat([yardstick(part, cache_params=others) for part in x.cpu().split(splits, dim=1)], dim=1)
    assert relative(found, expected) <= 1.2 * relative(allowed, expected) + 1e-3


def filled(net, plain, batch: int) -> DynamicCache:
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        net(torch.randn(batch, 40, HIDDEN, device="cuda").bfloat16(), cache_params=cache)
    return cache


@pytest.mark.parametrize("batch", LAUNCHES_OF_A_STEP)
def test_step_takes_few_launches(net, plain, batch):
    cache = filled(net, plain, batch)
    x = torch.randn(batch, 1, HIDDEN, device="cuda").bfloat16()
    with torch.no_grad():
        kernels = kernels_of(lambda: net(x, cache_params=cache))
    copies = 7 if hasattr(net, "in_proj_qkvz") else 0  # q, k, v, z, b and a of all key heads, then q, k and v in one
    assert len(kernels) <= LAUNCHES_OF_A_STEP[batch] + copies, kernels


@pytest.mark.parametrize("batch", [1, 4, 5, 70])
def test_step_has_the_bits_of_the_operators_one_by_one(net, plain, part, monkeypatch, batch):
    cache = filled(net, plain, batch)
    others = copy.deepcopy(cache)
    steps = torch.randn(3, batch, 1, HIDDEN, device="cuda").bfloat16()
    with torch.no_grad():
        found = [net(step, cache_params=cache) for step in steps]
        monkeypatch.setattr(part("gated_delta_net_step"), "step", lambda *arguments: None)
        expected = [net(step, cache_params=others) for step in steps]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for name in ("conv_states", "recurrent_states"):
        assert torch.equal(*(getattr(states.layers[net.layer_idx], name)[0] for states in (cache, others)))


def test_step_in_a_graph_moves_the_cache_on(net, plain):
    cache, others = filled(net, plain, 2), DynamicCache(config=plain.config)
    states = cache.layers[net.layer_idx]
    start = states.conv_states[0].clone(), states.recurrent_states[0].clone()
    steps = torch.randn(3, 2, 1, HIDDEN, device="cuda").bfloat16()
    x = steps[0].clone()
    with torch.no_grad():
        others.update_conv_state(start[0], net.layer_idx, conv_kernel_size=4)
        others.update_recurrent_state(start[1], net.layer_idx)
        expected = [net(step, cache_params=others).clone() for step in steps]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            net(x, cache_params=cache)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = net(x, cache_params=cache)
        for state, value in zip((states.conv_states[0], states.recurrent_states[0]), start, strict=True):
            state.copy_(value)
        for step, output in zip(steps, expected, strict=True):
            x.copy_(step)
            graph.replay()
            assert torch.equal(y, output)


def test_same_input_gives_the_same_bits(net):
    x, weights = (torch.randn(1, 500, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    first, second = (gradients(net, x, weights) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static and compiled": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("plain", ["qwen3_5"], indirect=True)
def test_tokens_agree_with_the_plain_model_up_to_near_ties(plain, kernel_folder, cache):
    """C2: where the plain model prefers its first token by more than 0.1, the kernelized one must choose it too. Not for
    Qwen3-Next: rounding sends a token to another expert now and then, in the plain model as well, and then all differs.
    """
    ids = torch.randint(1, 512, (2, 50), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    flashqla_hub.kernelize(plain, source=kernel_folder)
    tokens = plain.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, **CACHES[cache])
    flashqla_hub.unregister()
    with torch.no_grad():
        logits = plain(tokens[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :].float()
    best = logits.topk(2).values
    clear = best[..., 0] - best[..., 1] > 0.1
    assert clear.float().mean() > 0.5
    assert (logits.argmax(-1) == tokens[:, ids.shape[1] :])[clear].all()


@pytest.mark.parametrize("plain", ["qwen3_5"], indirect=True)
def test_step_of_the_model_in_a_graph_generates_what_eager_steps_do(plain, kernel_folder):
    """I6: a captured step on a static cache moves every state on by itself."""
    ids = torch.randint(1, 512, (2, 50), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    flashqla_hub.kernelize(plain, source=kernel_folder)

    def step(token, cache):
        token.copy_(plain(token, past_key_values=cache).logits[:, -1:].argmax(-1))

    def tokens_of(steps: int, captured: bool) -> torch.Tensor:
        cache, token = StaticCache(config=plain.config, max_cache_len=100), ids[:, :1].clone()
        plain(ids, past_key_values=cache)
        step(token, cache)
        call = functools.partial(step, token, cache)
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            call = graph.replay
        found = []
        for _ in range(steps):
            call()
            found.append(token.clone())
        return torch.cat(found, dim=1)

    with torch.no_grad():
        eager, captured = (tokens_of(30, way) for way in (False, True))
    assert torch.equal(captured, eager)
