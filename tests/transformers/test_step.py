"""When the layer takes the one launch between its projections, on the CPU: a stand-in in PyTorch is the compiled op."""

import copy

import pytest
import torch
from transformers import DynamicCache

from flashqla_hub.models import FAMILIES, gated_delta_nets
from tests.transformers import families
from tests.transformers.families import INSTALLED

DIM, HIDDEN = 128, 32
STEP, COMPILED = "gated_delta_net_step", "sm90_gated_delta_net_step"
SERVED_WHOLE = [name for name in INSTALLED if FAMILIES[name].hub_name is not None]


@pytest.fixture(params=SERVED_WHOLE)
def family(request, monkeypatch):
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        monkeypatch.setitem(families.SHARED, name, DIM)
    return request.param


@pytest.fixture
def net(plain, kernelize):
    """The first layer of a kernelized model, in bfloat16."""
    return gated_delta_nets(kernelize(plain.bfloat16()))[0].module


@pytest.fixture
def taken(kernel, part, monkeypatch):
    """As on a GPU that has the kernel; lists the steps that it has served."""
    module, found = part(STEP), []
    update, recur, norm = kernel.causal_conv1d_update, kernel.fused_recurrent_gated_delta_rule, kernel.rms_norm_gated

    def stand_in(qkv, conv, weight, bias, z, a, b, A_log, dt_bias, states, norm_weight, conv_silu, eps, norm_silu):
        found.append(tuple(qkv.shape))
        heads = a.shape[2]
        keys = (qkv.shape[2] // DIM - heads) // 2
        mixed = update(qkv.transpose(1, 2), conv, weight, bias, "silu" if conv_silu else None)
        q, k, v = mixed.transpose(1, 2).unflatten(2, (-1, DIM)).split((keys, keys, heads), dim=2)
        gates = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True}
        o, _ = recur(
            *(q, k, v),
            g=a,
            beta=b,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            inplace_final_state=True,
            **gates,
        )
        activation = "silu" if norm_silu else "sigmoid"
        return norm(o, z.unflatten(2, (-1, DIM)), norm_weight, activation=activation, eps=eps).flatten(2)

    monkeypatch.setattr(module, "explain_device", lambda x, op: None)
    monkeypatch.setattr(module.ops, COMPILED, stand_in, raising=False)
    return found


def filled(net, plain, batch=2):
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        net(torch.randn(batch, 6, HIDDEN).bfloat16(), cache_params=cache)
    return cache


def states_of(net, cache):
    layer = cache.layers[net.layer_idx]
    return layer.conv_states[0], layer.recurrent_states[0]


def steps(net, cache, tokens):
    with torch.no_grad():
        return torch.cat([net(token, cache_params=cache) for token in tokens], dim=1)


def test_steps_give_the_bits_of_the_operators(net, plain, taken, part, monkeypatch):
    cache = filled(net, plain)
    others, tokens = copy.deepcopy(cache), torch.randn(3, 2, 1, HIDDEN).bfloat16()
    places = [x.data_ptr() for x in states_of(net, cache)]
    outputs = steps(net, cache, tokens)
    assert len(taken) == 3 and [x.data_ptr() for x in states_of(net, cache)] == places
    monkeypatch.setattr(part(STEP), "step", lambda *arguments: None)
    assert torch.equal(outputs, steps(net, others, tokens)) and len(taken) == 3
    for one, other in zip(states_of(net, cache), states_of(net, others), strict=True):
        assert torch.equal(one, other)


def test_only_one_token_on_a_cache_is_a_step(net, plain, taken):
    cache = filled(net, plain)
    with torch.no_grad():
        net(torch.randn(2, 2, HIDDEN).bfloat16(), cache_params=cache)
        net(torch.randn(2, 1, HIDDEN).bfloat16())
        net(torch.randn(2, 1, HIDDEN).bfloat16(), cache_params=DynamicCache(config=plain.config))
    assert taken == []


def with_a_hook_on_the_norm(net):
    net.norm.register_forward_hook(lambda *arguments: None)


def with_a_norm_of_its_own(net):
    vars(net.norm).pop("forward")


class PlainNorm(torch.nn.Module):
    """It has no parameter."""

    def forward(self, x, gate):
        return torch.nn.functional.rms_norm(x, x.shape[-1:]) * torch.sigmoid(gate)


def with_a_norm_without_a_weight(net):
    net.norm = PlainNorm()


def with_a_wide_convolution(net):
    net.conv1d.float()


def with_wide_gates(net):
    """Which are served: parameters of the gates and the norm may be float32."""
    net.A_log.data, net.dt_bias.data = net.A_log.data.float(), net.dt_bias.data.float()
    net.norm.weight.data = net.norm.weight.data.float()


@pytest.mark.parametrize(
    ("change", "served"),
    [
        (with_a_hook_on_the_norm, False),
        (with_a_norm_of_its_own, False),
        (with_a_norm_without_a_weight, False),
        (with_a_wide_convolution, False),
        (with_wide_gates, True),
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_the_operators(net, plain, taken, change, served):
    cache = filled(net, plain)
    change(net)
    output = steps(net, cache, torch.randn(1, 2, 1, HIDDEN).bfloat16())
    assert output.isfinite().all() and len(taken) == served


def test_a_gradient_is_left_to_the_operators(net, plain, taken):
    cache = filled(net, plain)
    x = torch.randn(2, 1, HIDDEN).bfloat16().requires_grad_()
    assert net(x, cache_params=cache).requires_grad and taken == []


def test_states_of_another_dtype_are_left_to_the_operators(net, plain, taken):
    cache = filled(net, plain)
    layer = cache.layers[net.layer_idx]
    layer.recurrent_states[0] = layer.recurrent_states[0].bfloat16()
    steps(net, cache, torch.randn(1, 2, 1, HIDDEN).bfloat16())
    assert taken == []


def test_a_compiled_step_has_the_op_in_its_one_graph(net, plain, taken):
    cache, targets = filled(net, plain), []
    others, token = copy.deepcopy(cache), torch.randn(1, 2, 1, HIDDEN).bfloat16()

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        compiled = torch.compile(net, fullgraph=True, backend=backend)
        output = compiled(token[0], cache_params=cache)
    assert sum(STEP in target for target in targets) == 1
    assert torch.equal(output, steps(net, others, token))
    for one, other in zip(states_of(net, cache), states_of(net, others), strict=True):
        assert torch.equal(one, other)
