"""Signatures of what the kernel replaces, as the installed transformers has them, and keywords it may come to pass."""

import inspect
import shutil

import pytest
import torch
from kernels import Mode
from kernels import kernelize as kernels_kernelize

import flashqla_hub
from flashqla_hub.models import FUNCTION_NAMES, PART_NAMES, WHOLE_LAYERS, gated_delta_nets
from tests.transformers.families import tiny_model, token_ids

TAKES_EXTRAS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "causal_conv1d_fn")


def parameters(function) -> list[tuple[str, inspect._ParameterKind]]:
    return [(parameter.name, parameter.kind) for parameter in inspect.signature(function).parameters.values()]


def test_layers_have_the_parameters_of_what_they_replace(plain, kernel):
    """I4: `kernels` compares number and kind; names count too, since models pass most of them by keyword."""
    (net, *_) = gated_delta_nets(plain)
    assert set(net.replaceable) - set(WHOLE_LAYERS) == set(PART_NAMES)
    for name, replaced in net.replaceable.items():
        layer = WHOLE_LAYERS.get(name, name)
        assert parameters(getattr(kernel.layers, layer).forward) == parameters(type(replaced).forward), name


def test_layer_with_one_parameter_less_would_be_refused(plain, kernel, kernel_folder, tmp_path, monkeypatch):
    """I4: drift shows as an error that names the layer, never as a kernel that was left out in silence."""

    def forward(self, hidden_states):
        return hidden_states

    # `kernels` checks a layer when it first meets its repository, hence a new one.
    variant = (
        kernel_folder if (kernel_folder / "metadata.json").exists() else kernel_folder / "build" / "torch-universal"
    )
    shutil.copytree(variant, tmp_path / "build" / variant.name)
    monkeypatch.setattr(kernel.layers.RMSNormGated, "forward", forward)
    with pytest.raises(TypeError, match="different number of arguments"):
        flashqla_hub.kernelize(plain, source=tmp_path)


@pytest.fixture
def served(kernel_folder):
    """The replaceable parts of a kernelized model's first layer."""
    model = flashqla_hub.kernelize(tiny_model("qwen3_5"), source=kernel_folder)
    return gated_delta_nets(model)[0].replaceable


def arguments(name: str, **extras) -> tuple[tuple, dict]:
    if name == "causal_conv1d_fn":
        return (torch.randn(1, 6, 5), torch.randn(6, 4)), extras
    heads = (torch.randn(1, 5, 2, 8) for _ in range(3))
    return tuple(heads), {"g": -torch.rand(1, 5, 2), "beta": torch.rand(1, 5, 2), **extras}


@pytest.mark.parametrize("name", TAKES_EXTRAS)
@pytest.mark.parametrize("keyword", ["cache", "cache_params", "past_key_values", "sequence_bounds"])
def test_unknown_keyword_that_is_given_is_refused(served, name, keyword):
    """I4: a cache under another name, say, must not be swallowed: generation would forget the prompt."""
    args, kwargs = arguments(name, **{keyword: object()})
    with pytest.raises(TypeError, match=f"{keyword} is not known to {name}.*unregister"):
        served[name](*args, **kwargs)


@pytest.mark.parametrize("name", TAKES_EXTRAS)
def test_unknown_keyword_that_is_none_is_ignored(served, name):
    args, kwargs = arguments(name, some_new_option=None)
    served[name](*args, **kwargs)


@pytest.mark.parametrize("name", TAKES_EXTRAS)
def test_requests_for_outputs_are_ignored(served, name):
    """What transformers hands on from the model's own keywords; a new request for outputs needs no new version of us."""
    args, kwargs = arguments(name, output_attentions=True, return_dict=True, output_new_things=True, use_cache=True)
    served[name](*args, **kwargs)


def test_keywords_that_models_pass_on_are_known(plain, kernelize):
    """Every keyword of transformers' own that is given to the model, in training and generation, in every family."""
    ids = token_ids(1, 12)
    kernelize(plain.train())
    options = {"output_hidden_states": True, "num_items_in_batch": torch.tensor(11), "is_causal": True}
    lengths = {"max_length_q": 12, "max_length_k": 12}
    bounds = torch.tensor([0, 12], dtype=torch.int32)
    plain(ids, labels=ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, **options, **lengths).loss.backward()
    plain.eval().generate(ids, max_new_tokens=2, do_sample=False)


def test_sequence_index_of_another_length_is_refused(served):
    args, kwargs = arguments("chunk_gated_delta_rule", seq_idx=torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"seq_idx has shape \[1, 4\].*\[1, 5\]"):
        served["chunk_gated_delta_rule"](*args, **kwargs)


def test_activation_that_the_kernel_lacks_goes_to_the_original(served):
    """The layers hand what they do not know to transformers, which knows every activation."""
    x, weight, state = torch.randn(1, 6, 5), torch.randn(6, 4), torch.randn(1, 6, 4)
    for name, args in (("causal_conv1d_fn", (x, weight)), ("causal_conv1d_update", (x[..., :1], state, weight))):
        function = served[name]
        copies = [tuple(tensor.clone() for tensor in args) for _ in range(2)]
        actual = function(*copies[0], activation="gelu")
        expected = type(function).forward(function, *copies[1], activation="gelu")
        assert torch.equal(actual, expected)


def test_gate_activation_that_the_kernel_lacks_goes_to_the_original(served):
    norm, x, gate = served["RMSNormGated"], torch.randn(3, 8), torch.randn(3, 8)
    norm.activation = "gelu"
    assert torch.equal(norm(x, gate), type(norm).forward(norm, x, gate))


def test_all_functions_are_found_by_kernels_itself(plain, kernel_folder):
    """The names under which `kernels` finds functions on a layer are those that we look for in its module."""
    flashqla_hub.register(kernel_folder)
    kernels_kernelize(plain, mode=Mode.INFERENCE, device="cpu")
    net = gated_delta_nets(plain)[0]
    attached = net.module._kernel_funcs
    assert set(attached) == set(FUNCTION_NAMES)
    assert all(attached[name] is net.replaceable[name] for name in FUNCTION_NAMES)
