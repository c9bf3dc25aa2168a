"""The whole GatedDeltaNet layer of the kernel against the forward of transformers' own class, call by call."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import flashqla_hub
from flashqla_hub import serving
from flashqla_hub.models import FAMILIES, WHOLE_LAYERS, functions_of, gated_delta_nets
from tests.transformers.comparison import LOSS_AND_GRADIENTS, assert_close
from tests.transformers.families import INSTALLED, tiny_model

SERVED_WHOLE = [name for name in INSTALLED if FAMILIES[name].hub_name is not None]


@pytest.fixture(params=SERVED_WHOLE)
def family(request):
    return request.param


@pytest.fixture
def net(plain, kernelize) -> nn.Module:
    """The first layer of a kernelized model."""
    return gated_delta_nets(kernelize(plain))[0].module


@pytest.fixture
def cache(plain) -> DynamicCache:
    return DynamicCache(config=plain.config)


def original(net: nn.Module, *args, **kwargs) -> torch.Tensor:
    """What transformers itself computes: the forward of the class, with the functions and the norm as they were."""
    parts = [*functions_of(type(net).__module__).values(), net.norm]
    forwards = [vars(part).pop("forward", None) for part in parts]
    try:
        return type(net).forward(net, *args, **kwargs)
    finally:
        for part, forward in zip(parts, forwards, strict=True):
            if forward is not None:
                part.forward = forward


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 32)


def spy_on(monkeypatch, module, name: str) -> list[tuple]:
    """The calls (args, kwargs) of a function of the kernel from now on."""
    calls, function = [], getattr(module, name)

    def spy(*args, **kwargs):
        calls.append((args, kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, spy)
    return calls


@pytest.mark.parametrize("tokens", [0, 1, 65])
@pytest.mark.parametrize("batch", [1, 2])
def test_equals_the_forward_of_transformers(net, batch, tokens):
    x = hidden(batch, tokens)
    with torch.no_grad():
        actual = net(x)
        assert actual.shape == x.shape
        if tokens:
            assert_close(actual, original(net, x))


def test_gradients_equal_those_of_transformers(net):
    """Of the input and of every parameter, the convolution's and the gate's among them."""
    with torch.no_grad():
        net.A_log.sub_(3)
    x, weights = hidden(2, 70), hidden(2, 70)

    def gradients(forward) -> dict[str, torch.Tensor]:
        net.zero_grad()
        leaf = x.clone().requires_grad_()
        (forward(leaf) * weights).sum().backward()
        return {"x": leaf.grad, **{name: parameter.grad.clone() for name, parameter in net.named_parameters()}}

    expected = gradients(lambda leaf: original(net, leaf))
    actual = gradients(net)
    assert {"A_log", "dt_bias", "conv1d.weight", "norm.weight"} < actual.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, LOSS_AND_GRADIENTS)


def test_bfloat16_stays_as_near_to_float32_as_transformers(net):
    """The cast order is that of transformers, but for the writing strength, which is not rounded: no farther from float32."""
    x = hidden(2, 100)
    with torch.no_grad():
        truth = original(copy.deepcopy(net).float(), x.bfloat16().float())
        net.to(torch.bfloat16)
        errors = [(y.float() - truth).norm() for y in (net(x.bfloat16()), original(net, x.bfloat16()))]
    assert errors[0] <= 1.1 * errors[1]


def test_queries_keys_and_values_are_views(net, part, monkeypatch):
    """One storage behind all three, and key heads are not repeated."""
    calls = spy_on(monkeypatch, part("gated_delta_net"), "chunk_gated_delta_rule")
    with torch.no_grad():
        net(hidden(2, 20))
    ((q, k, v), _) = calls[0]
    assert q.shape == k.shape == (2, 20, net.num_k_heads, net.head_k_dim)
    assert v.shape == (2, 20, net.num_v_heads, net.head_v_dim)
    assert len({x.untyped_storage().data_ptr() for x in (q, k, v)}) == 1


@pytest.mark.parametrize("splits", [(40,), (39, 1), (1, 39), (17, 3, 20), (2, 1, 1, 36), (0, 40)])
def test_segments_on_a_cache_equal_one_call(net, cache, splits):
    x = hidden(2, sum(splits))
    with torch.no_grad():
        expected = net(x)
        parts = [net(part, cache_params=cache) for part in x.split(splits, dim=1)]
    assert_close(torch.cat(parts, dim=1), expected)


def test_cache_ends_up_as_with_transformers(net, cache, plain):
    """Whoever continues, this layer or the class's own forward, finds the same states."""
    x = hidden(2, 45)
    others = DynamicCache(config=plain.config)
    with torch.no_grad():
        for part in x.split((2, 38, 1, 4), dim=1):
            net(part, cache_params=cache)
            original(net, part, cache_params=others)
            mine, theirs = cache.layers[net.layer_idx], others.layers[net.layer_idx]
            torch.testing.assert_close(mine.conv_states[0], theirs.conv_states[0])
            assert_close(mine.recurrent_states[0], theirs.recurrent_states[0])


def test_states_of_a_cache_keep_their_place(net, cache):
    """CUDA graphs of generation hold their addresses."""
    states = cache.layers[net.layer_idx]
    places = []
    with torch.no_grad():
        for tokens in (5, 1, 1, 3):
            net(hidden(1, tokens), cache_params=cache)
            places.append((states.conv_states[0].data_ptr(), states.recurrent_states[0].data_ptr()))
    assert len(set(places)) == 1


class CacheBefore5_21:
    """A cache with the interface that transformers had up to 5.20, around one of the installed version."""

    def __init__(self, cache: DynamicCache) -> None:
        self.layers, self._cache = cache.layers, cache

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return self._cache.layers[layer_idx].has_previous_state[state_idx]

    def update_conv_state(self, *args, **kwargs):
        return self._cache.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args, **kwargs):
        return self._cache.update_recurrent_state(*args, **kwargs)


@pytest.mark.parametrize("interface", ["before 5.21", "keyword of 5.24", "by position"])
def test_every_cache_interface_is_served(net, cache, part, monkeypatch, interface):
    """I4: 5.21 has other methods, 5.24 calls the argument `cache`; either way it is not left to transformers."""
    x = hidden(1, 20)
    given = CacheBefore5_21(cache) if interface == "before 5.21" else cache
    monkeypatch.setattr(part("gated_delta_net"), "_notice", lambda layer, reason: pytest.fail(reason))
    with torch.no_grad():
        expected = net(x)
        outputs = []
        for piece in x.split((15, 1, 4), dim=1):
            if interface == "by position":
                outputs.append(net(piece, given))
            else:
                keyword = "cache" if interface.startswith("keyword") else "cache_params"
                outputs.append(net(piece, **{keyword: given}, attention_mask=None))
    assert_close(torch.cat(outputs, dim=1), expected)
    assert cache.layers[net.layer_idx].conv_states[0].any()


@pytest.mark.parametrize(("kind", "earlier"), [(torch.bool, 9), (torch.long, 0), (torch.float32, 0)])
def test_padding_is_masked_in_any_segment(net, kind, earlier):
    """P4, P5: a mask that also covers earlier tokens counts by its end."""
    x = hidden(3, 12)
    mask = torch.ones(3, earlier + 12).to(kind)
    mask[1, : earlier + 5] = 0
    mask[2, earlier + 9 :] = 0
    with torch.no_grad():
        masked = net(x, attention_mask=mask)
        assert_close(masked[1, 5:], net(x[1:2, 5:])[0])
        assert_close(masked[2, :9], net(x[2:3, :9])[0])
        assert_close(masked[0], net(x[:1])[0])


@pytest.mark.parametrize("batch", [1, 3])
def test_pads_get_no_gradient(net, batch):
    """P4: whatever the loss says of the outputs at their places; a single row is masked like a batch is."""
    x, mask = hidden(batch, 12).requires_grad_(), torch.ones(batch, 12)
    mask[0, :2] = mask[-1, 9:] = 0
    net(x, attention_mask=mask).square().sum().backward()
    assert not x.grad[mask == 0].any() and x.grad[mask == 1].all()


@pytest.mark.parametrize("names", [("cu_seq_lens_q",), ("cu_seqlens",), ("seq_idx",), ("cu_seq_lens_q", "seq_idx")])
def test_packed_rows_equal_separate_rows(net, names):
    """P1, P2: with empty sequences between them, values and gradients."""
    lengths = (7, 1, 30, 2)
    known = {
        "cu_seq_lens_q": torch.tensor([0, 7, 7, 8, 38, 40], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 7, 7, 8, 38, 40], dtype=torch.int64),
        "seq_idx": torch.repeat_interleave(torch.tensor([0, 2, 3, 4]), torch.tensor(lengths)).to(torch.int32)[None],
    }
    x, weights = hidden(1, 40), hidden(1, 40)

    def run(forward) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        output = forward(leaf)
        (output * weights).sum().backward()
        return output.detach(), leaf.grad

    packed = run(lambda leaf: net(leaf, **{name: known[name] for name in names}))
    apart = run(lambda leaf: torch.cat([net(part) for part in leaf.split(lengths, dim=1)], dim=1))
    assert_close(packed[0], apart[0])
    assert_close(packed[1], apart[1], LOSS_AND_GRADIENTS)


def test_step_on_a_cache_need_not_be_told_that_no_gradient_is_wanted(net, cache):
    """C3: without torch.no_grad the state does not move on in its place, which autograd would forbid."""
    x = hidden(2, 6)
    expected = net(x)[:, 5:]
    assert expected.requires_grad
    with torch.no_grad():
        net(x[:, :5], cache_params=cache)
    assert_close(net(x[:, 5:], cache_params=cache), expected)


def halved(net: nn.Module, half: int) -> nn.Module:
    """The layer with one half of its heads in its tensors, and the sizes of the whole in its attributes."""
    shard = copy.deepcopy(net)
    keys, values = net.num_k_heads // 2, net.num_v_heads // 2

    def rows(weight: torch.Tensor, dims: list[int]) -> torch.Tensor:
        """This half's rows of each block; `dims` says how many rows of a block belong to one half."""
        blocks = weight.split([2 * dim for dim in dims])
        return torch.cat([block[half * dim : (half + 1) * dim] for block, dim in zip(blocks, dims, strict=True)])

    qkv = [keys * net.head_k_dim, keys * net.head_k_dim, values * net.head_v_dim]
    z = [values * net.head_v_dim]
    sizes = {"conv1d": qkv, "in_proj_qkv": qkv, "in_proj_z": z, "in_proj_b": [values], "in_proj_a": [values]}
    sizes |= {"in_proj_qkvz": [sum(qkv) + z[0]], "in_proj_ba": [2 * values]}  # whole key heads, one behind the other
    for name, dims in sizes.items():
        if hasattr(shard, name):
            module = getattr(shard, name)
            module.weight = nn.Parameter(rows(module.weight, dims))
    for name in ("A_log", "dt_bias"):
        setattr(shard, name, nn.Parameter(rows(getattr(shard, name), [values])))
    shard.out_proj.weight = nn.Parameter(net.out_proj.weight[:, half * z[0] : (half + 1) * z[0]])
    return shard


def test_heads_are_counted_in_the_tensors(net):
    """D5: a layer that holds its share of the heads, as under tensor parallelism, gives its share of the output."""
    x = hidden(2, 20)
    with torch.no_grad():
        shares = [halved(net, half)(x) for half in (0, 1)]
        assert_close(shares[0] + shares[1], net(x))


class _LoraLikeConvolution(nn.Module):
    def __init__(self, base: nn.Conv1d) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str):
        return super().__getattr__(name) if name in ("base", "_parameters") else getattr(self.base, name)


class _CacheOfSomebody:
    """Not one that the layer can read; neither can transformers."""


UNUSUAL = {
    "records the past": lambda net, cache: cache.activate_past_recording() or {"cache_params": cache},
    "packed sequences come with a cache": lambda net, cache: {
        "cache_params": cache,
        "seq_idx": torch.zeros(1, 12, dtype=torch.int32),
    },
    "activation 'gelu'": lambda net, cache: setattr(net, "activation", "gelu") or {},
    "not a torch.nn.Conv1d": lambda net, cache: setattr(net, "conv1d", _LoraLikeConvolution(net.conv1d)) or {},
    "attention_mask has shape": lambda net, cache: {"attention_mask": torch.ones(1, 12, 1)},
    "sharded": lambda net, cache: setattr(net.A_log, "to_local", None) or {},
}


@pytest.mark.parametrize("reason", UNUSUAL)
def test_unusual_call_is_left_to_transformers_with_one_notice(net, cache, part, monkeypatch, reason):
    """D7: what this layer does not take is the business of the class's own forward; said once, not at every call."""
    monkeypatch.setattr(part("gated_delta_net"), "_noticed", set())
    options = UNUSUAL[reason](net, cache)
    calls = []
    own = type(net).forward

    def spy(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        calls.append((hidden_states, cache_params, attention_mask, kwargs))
        return torch.zeros_like(hidden_states)

    monkeypatch.setattr(type(net), "forward", spy)
    x = hidden(1, 12)
    with pytest.warns(UserWarning, match=f"{type(net).__name__} of qwen/flashqla leaves a call.*{reason}"):
        net(x, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x, **options)
    named = {"cache_params": calls[0][1], "attention_mask": calls[0][2], **calls[0][3]}
    assert len(calls) == 2 and calls[0][0] is x and own is not spy
    assert {name: value for name, value in named.items() if value is not None} == options


def test_cache_that_cannot_be_read_is_left_to_transformers(net):
    with pytest.raises(AttributeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net(hidden(1, 5), cache_params=_CacheOfSomebody())


def test_unknown_keyword_is_not_swallowed(net):
    """I4: left to transformers, whose functions, served by this kernel, refuse it by name."""
    with pytest.raises(TypeError, match="history is not known"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net(hidden(1, 5), history=object())


def test_hook_of_the_convolution_runs_around_the_layer(net):
    """D4: accelerate loads the weights of an offloaded module in the hook of its forward, which nobody calls here."""
    events = []

    class Hook:
        def pre_forward(self, module, *args, **kwargs):
            events.append(("load", module))

        def post_forward(self, module, output):
            events.append(("free", module))

    net.conv1d._hf_hook = Hook()
    net(hidden(1, 5))
    assert events == [("load", net.conv1d), ("free", net.conv1d)]


@pytest.mark.parametrize("tokens", [5, 70])
def test_projections_and_norm_are_called_as_modules(net, tokens):
    """I9: adapters, shards and quantised weights live in the modules' forwards. Many tokens go through plain ones together."""
    called = set()
    for name, module in net.named_children():
        module.register_forward_hook(lambda *args, name=name: called.add(name))
    net(hidden(1, tokens))
    assert called == {name for name, _ in net.named_children()} - {"conv1d"}


class TestClosedClasses:
    """transformers gives the layer classes of some families no name for kernels; this package does, in the process alone."""

    @pytest.fixture
    def closed(self, plain):
        layer_class = type(gated_delta_nets(plain)[0].module)
        if hasattr(layer_class, "kernel_layer_name"):
            pytest.skip("transformers itself names this class")
        return layer_class

    def test_name_is_given_and_taken_back(self, closed, plain, kernelize):
        kernelize(plain)
        assert closed.kernel_layer_name in WHOLE_LAYERS
        flashqla_hub.unregister()
        assert not hasattr(closed, "kernel_layer_name") and not hasattr(closed, "kernel_condition")

    def test_registered_kernel_serves_models_loaded_later(self, closed, family, kernel_folder):
        flashqla_hub.register(kernel_folder)
        model = tiny_model(family)
        model.set_use_kernels(True)
        assert flashqla_hub.report(model).served_whole(gated_delta_nets(model)[0].path)
        flashqla_hub.unregister(model)
        assert not any(part.by == "qwen/flashqla" for part in flashqla_hub.report(model).parts)

    def test_subclass_of_the_user_is_served(self, closed, plain, kernelize):
        layer = gated_delta_nets(plain)[0].module
        layer.__class__ = type("Mine", (closed,), {})
        kernelize(plain)
        assert serving.is_ours(layer)


def test_unregister_gives_the_layer_its_own_forward_back(net):
    assert serving.is_ours(net)
    flashqla_hub.unregister()
    assert "forward" not in vars(net) and not serving.is_ours(net)


def test_report_says_which_layers_are_served_whole(family, plain, kernelize):
    text = str(flashqla_hub.report(kernelize(plain)))
    assert text.splitlines()[0].endswith("3 gated delta rule layers, 3 served whole, 0 by functions, 0 not")
    text = str(flashqla_hub.report(tiny_model(family)))
    assert "0 served whole, 3 by functions, 0 not" in text.splitlines()[0]


def test_layer_is_one_graph(net):
    """I5: with bounds, with a mask, and with gradients."""
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    bounds = torch.tensor([0, 5, 20], dtype=torch.int32)
    for options in ({}, {"cu_seq_lens_q": bounds}, {"attention_mask": torch.ones(1, 20).bool()}):
        x = hidden(1, 20).requires_grad_()
        assert_close(compiled(x, **options), net(x, **options).detach())
    compiled(x).sum().backward()
    assert x.grad is not None


def test_step_on_a_cache_is_one_graph(net, cache, plain):
    """I5: as generation with a static cache compiles it."""
    others = DynamicCache(config=plain.config)
    x = hidden(2, 12)
    with torch.no_grad():
        for filled in (cache, others):
            net(x, cache_params=filled)
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        for step in hidden(2, 3).split(1, dim=1):
            assert_close(compiled(step, cache_params=cache), net(step, cache_params=others))
