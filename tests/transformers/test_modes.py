"""The kernel serves training and inference, however it was installed, and touches nothing but its own names."""

import copy
import pickle
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, register_kernel_mapping, use_kernel_mapping
from torch import nn
from transformers import AutoModelForCausalLM, KernelConfig, MambaConfig, MambaForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

import flashqla_hub
from flashqla_hub import serving
from flashqla_hub.models import PART_NAMES, WHOLE_LAYERS, functions_of, gated_delta_nets
from tests.transformers.comparison import assert_close
from tests.transformers.families import tiny_model, token_ids

OTHER_LAYER = "RMSNormZeroCentered"
FIRST_LAYER = "model.layers.0.linear_attn"


class Doubled(nn.Module):
    """A kernel of somebody else, for the models' other norms."""

    def forward(self, x):
        return 2 * type(self).forward(self, x)


class SomebodysRepository:
    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def load(self) -> type[nn.Module]:
        return self.layer


@pytest.fixture
def model():
    return tiny_model("qwen3_5")


@pytest.fixture
def others_kernel():
    """Somebody else's kernel for OTHER_LAYER, in the mapping for the time of a test."""
    with use_kernel_mapping({OTHER_LAYER: {"cpu": SomebodysRepository(Doubled)}}):
        yield Doubled.forward


def forwards_of_other_layers(model) -> list:
    ours = {id(layer) for net in gated_delta_nets(model) for layer in net.replaceable.values()}
    return [module.forward for module in model.modules() if id(module) not in ours]


def by_kernelize(model, folder: Path):
    return flashqla_hub.kernelize(model, source=folder)


def by_kernelize_with_kernels_in_use(model, folder: Path):
    model.set_use_kernels(True)
    return flashqla_hub.kernelize(model, source=folder)


def by_kernelize_beside_a_config_that_replaces_all_defaults(model, folder: Path):
    config = KernelConfig({}, inherit_mapping=False)
    model.set_use_kernels(True, config)
    return flashqla_hub.kernelize(model, source=folder)


def by_register_before_use(model, folder: Path):
    flashqla_hub.register(folder)
    model.set_use_kernels(True)
    return model


def by_register_after_use(model, folder: Path):
    model.set_use_kernels(True)
    flashqla_hub.register(folder)
    model.set_use_kernels(True)
    return model


def by_kernel_config(model, folder: Path):
    model.set_use_kernels(True, flashqla_hub.kernel_config(folder))
    return model


def by_from_pretrained_after_register(model, folder: Path):
    flashqla_hub.register(folder)
    return reloaded(model, use_kernels=True)


def by_from_pretrained_with_kernel_config(model, folder: Path):
    return reloaded(model, use_kernels=True, kernel_config=flashqla_hub.kernel_config(folder))


def reloaded(model, **options):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def by_kernels_kernelize(model, folder: Path):
    flashqla_hub.register(folder)
    return kernelize(model, mode=Mode.INFERENCE, device="cpu")


def by_a_kernelize_method_of_the_model(model, folder: Path):
    """Older transformers give models such a method."""

    class WithMethod(type(model)):
        def kernelize(self, mode):
            return kernelize(self, mode=mode, device="cpu")

    model.__class__ = WithMethod
    flashqla_hub.kernelize(model, source=folder)
    model.kernelize(Mode.TRAINING)
    return model


WAYS = [
    by_kernelize,
    by_kernelize_with_kernels_in_use,
    by_kernelize_beside_a_config_that_replaces_all_defaults,
    by_register_before_use,
    by_register_after_use,
    by_kernel_config,
    by_from_pretrained_after_register,
    by_from_pretrained_with_kernel_config,
    by_kernels_kernelize,
    by_a_kernelize_method_of_the_model,
]


@pytest.mark.parametrize("install", WAYS, ids=lambda way: way.__name__)
def test_kernel_serves_both_modes_however_it_was_installed(model, kernel_folder, install):
    """I2: after train() and eval(), which make transformers kernelize again, every part is still the kernel's."""
    model = install(model, kernel_folder)
    assert flashqla_hub.is_active(model)
    for flip in (model.train, model.eval, model.train):
        flip()
        assert flashqla_hub.is_active(model)
    model.set_use_kernels(True)
    assert flashqla_hub.is_active(model)


def test_plain_kernel_config_would_lose_the_kernel_in_training(model, kernel_folder):
    """I2, the trap that `kernel_config` exists for; if transformers closes it, this test says so."""
    config = KernelConfig({}, use_local_kernel=True)
    model.set_use_kernels(True, config)
    name = "chunk_gated_delta_rule"
    repository = LocalLayerRepository(kernel_folder, layer_name=name)
    config.kernel_mapping = {name: {"cpu": {Mode.INFERENCE: repository}}}
    model.set_use_kernels(True)
    served = [flashqla_hub.report(model).served_by(FIRST_LAYER)[name]]
    model.train()
    served.append(flashqla_hub.report(model).served_by(FIRST_LAYER)[name])
    assert served == ["qwen/flashqla", "transformers"]


@pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE])
def test_every_mode_of_kernels_is_served(model, kernel_folder, mode):
    flashqla_hub.kernelize(model, source=kernel_folder, mode=mode)
    assert flashqla_hub.is_active(model)


def test_layers_declare_what_they_can(kernel):
    """I2, I5: `has_backward` and `can_torch_compile`, by which `kernels` decides, stand on each layer's own class."""
    for name in (*WHOLE_LAYERS.values(), *PART_NAMES):
        declared = vars(getattr(kernel.layers, name))
        assert declared["has_backward"] is True and declared["can_torch_compile"] is True


@pytest.mark.parametrize(
    "install", [by_kernelize, by_register_before_use, by_kernel_config], ids=lambda way: way.__name__
)
def test_kernels_of_others_stay(model, kernel_folder, others_kernel, install):
    model.set_use_kernels(True)
    norms = [module for module in model.modules() if getattr(module, "kernel_layer_name", None) == OTHER_LAYER]
    assert norms and all(norm.forward.__func__ is others_kernel for norm in norms)
    install(model, kernel_folder)
    assert flashqla_hub.is_active(model)
    assert all(norm.forward.__func__ is others_kernel for norm in norms)


@pytest.mark.parametrize("plan", ["auto", "invariant", "off"])
def test_the_plan_reaches_the_function_through_whole_layers_and_through_functions(
    model, kernel_folder, monkeypatch, plan
):
    flashqla_hub.kernelize(model, source=kernel_folder, plan=plan)
    net = next(iter(gated_delta_nets(model)))
    seen = []
    for layer in (net.replaceable["chunk_gated_delta_rule"], net.module):
        package = serving.serving_kernel(layer).__name__
        for name, function in (("layers", "_chunk_gated_delta_rule"), ("gated_delta_net", "chunk_gated_delta_rule")):
            part = sys.modules[f"{package}.{name}"]
            original = getattr(part, function)
            monkeypatch.setattr(
                part, function, lambda *a, rule=original, **k: (seen.append(k["plan"]), rule(*a, **k))[1]
            )
    ids = token_ids(1, 9)
    model(ids)
    serving.restore_original(net.module)
    model(ids)
    assert set(seen) == {plan}
    flashqla_hub.unregister(model)
    assert not hasattr(net.replaceable["chunk_gated_delta_rule"], "flashqla_plan")


def test_an_unknown_plan_is_refused(model, kernel_folder):
    with pytest.raises(ValueError, match="plan is 'fast'; it must be one of 'auto', 'invariant', 'off'"):
        flashqla_hub.kernelize(model, source=kernel_folder, plan="fast")


def test_kernelize_leaves_every_other_forward_as_it_is(model, kernel_folder):
    before = forwards_of_other_layers(model)
    flashqla_hub.kernelize(model, source=kernel_folder)
    assert forwards_of_other_layers(model) == before
    assert not model.use_kernels and model.kernel_config is None


def test_functions_are_shared_by_all_models_of_a_family(model, kernel_folder):
    """The docstring warns of it: the functions belong to the module, the norm to the layer."""
    other = tiny_model("qwen3_5")
    flashqla_hub.kernelize(model, source=kernel_folder)
    served = flashqla_hub.report(other).served_by(FIRST_LAYER)
    assert served["chunk_gated_delta_rule"] == "qwen/flashqla" and served["RMSNormGated"] == "transformers"
    assert not flashqla_hub.is_active(other)


def test_copy_of_a_kernelized_model_is_served(model, kernel_folder):
    """Its layers and norms are bound to the copy, and it calls the functions of the module, not copies of them."""
    flashqla_hub.kernelize(model, source=kernel_folder)
    twin = copy.deepcopy(model)
    assert flashqla_hub.is_active(twin)
    layer = gated_delta_nets(twin)[0]
    for module in (layer.module, layer.replaceable["RMSNormGated"]):
        assert module.forward.__self__ is module
    flashqla_hub.unregister()
    assert not flashqla_hub.is_active(model)


def test_copy_is_kernelized_through_the_functions_that_it_calls(model, kernel_folder):
    twin = flashqla_hub.kernelize(copy.deepcopy(model), source=kernel_folder)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule.forward.__func__.__module__.startswith("_flashqla")
    assert flashqla_hub.is_active(twin)


def test_pickle_refuses_a_model_with_and_without_the_kernel(model, kernel_folder):
    """A limit of `kernels`, whose function objects have a local class; save_pretrained and state_dict need no pickle."""
    for _ in range(2):
        with pytest.raises(AttributeError, match="Func"):
            pickle.dumps(model)
        flashqla_hub.kernelize(model, source=kernel_folder)
    assert all(not name.startswith("_") for name in model.state_dict())


def test_saved_model_knows_nothing_of_the_kernel(model, kernel_folder, tmp_path):
    flashqla_hub.kernelize(model, source=kernel_folder).save_pretrained(tmp_path)
    assert "flashqla" not in (tmp_path / "config.json").read_text()
    flashqla_hub.unregister()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not flashqla_hub.is_active(again)
    for (name, parameter), expected in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def test_wrapped_model_is_kernelized(model, kernel_folder):
    """Wrappers such as DDP's or PEFT's put the model one or more levels down."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapper = flashqla_hub.kernelize(Wrapper(Wrapper(model)), source=kernel_folder)
    assert flashqla_hub.is_active(wrapper) and flashqla_hub.is_active(model)
    assert len(model.model._forward_pre_hooks) == 1


def test_adapters_on_every_projection_count(model, kernel_folder):
    """I9: the layer's projections stay modules, so LoRA acts and learns; the base stays frozen."""
    peft = pytest.importorskip("peft")
    projections = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    config = peft.LoraConfig(r=2, target_modules=projections, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    ids = token_ids(1, 70)  # enough for plain projections to be computed together
    expected = adapted(ids, use_cache=False).logits
    flashqla_hub.kernelize(adapted, source=kernel_folder)
    assert flashqla_hub.is_active(adapted)
    output = adapted(ids, use_cache=False, labels=ids)
    assert_close(output.logits, expected)
    output.loss.backward()
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().max() > 0) == ("lora_" in name), name


def test_report_is_a_table_with_reasons(model, kernel_folder):
    assert "call flashqla_hub.kernelize(model)" in str(flashqla_hub.report(model))
    text = str(flashqla_hub.report(flashqla_hub.kernelize(model, source=kernel_folder)))
    title = "Qwen3_5ForCausalLM on cpu: 3 gated delta rule layers, 3 served whole, 0 by functions, 0 not"
    assert text.splitlines()[0] == title
    assert text.count("model.layers.") == 3 and "torch-universal" in text.splitlines()[-1]


def test_report_names_the_kernel_of_somebody_else(model):
    class fused_recurrent_gated_delta_rule(nn.Module):
        def forward(
            self,
            q,
            k,
            v,
            g,
            beta,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
            **kwargs,
        ):
            raise NotImplementedError

    mapping = {"fused_recurrent_gated_delta_rule": {"cpu": SomebodysRepository(fused_recurrent_gated_delta_rule)}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="cpu")
    served = flashqla_hub.report(model).served_by(FIRST_LAYER)
    assert served["fused_recurrent_gated_delta_rule"] == __name__
    assert not flashqla_hub.is_active(model)


class TestUnregister:
    def test_original_forwards_come_back(self, model, kernel_folder):
        ids = token_ids(1, 30)
        expected = model(ids, use_cache=False).logits
        flashqla_hub.kernelize(model, source=kernel_folder)
        flashqla_hub.unregister()
        assert not any(part.by == "qwen/flashqla" for part in flashqla_hub.report(model).parts)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        model.set_use_kernels(True)
        assert not any(part.by == "qwen/flashqla" for part in flashqla_hub.report(model).parts)

    def test_norms_of_a_model_that_transformers_kernelized_come_back(self, model, kernel_folder):
        by_register_before_use(model, kernel_folder)
        flashqla_hub.unregister(model)
        assert not any(part.by == "qwen/flashqla" for part in flashqla_hub.report(model).parts)

    def test_kernel_config_forgets_the_kernel(self, model, kernel_folder):
        by_kernel_config(model, kernel_folder)
        flashqla_hub.unregister()
        model.train()
        assert not any(part.by == "qwen/flashqla" for part in flashqla_hub.report(model).parts)

    def test_what_was_registered_before_comes_back(self, model, kernel_folder):
        class Gated(nn.Module):
            def forward(self, hidden_states, gate):
                return hidden_states

        name = "RMSNormGated"
        with use_kernel_mapping({name: {"cpu": SomebodysRepository(Gated)}}):
            flashqla_hub.register(kernel_folder)
            flashqla_hub.register(kernel_folder)
            flashqla_hub.unregister()
            model.set_use_kernels(True)
            assert gated_delta_nets(model)[0].replaceable[name].forward.__func__ is Gated.forward

    def test_other_names_stay_registered(self, model, kernel_folder):
        with use_kernel_mapping({}):
            register_kernel_mapping({OTHER_LAYER: {"cpu": SomebodysRepository(Doubled)}})
            flashqla_hub.register(kernel_folder)
            flashqla_hub.unregister()
            model.set_use_kernels(True)
            assert model.model.norm.forward.__func__ is Doubled.forward

    def test_convolution_of_another_family_comes_back(self, kernel_folder):
        """Mamba has the same short convolution under the same name, so `register` serves it, with the same numbers."""
        torch.manual_seed(0)
        mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
        convolution = functions_of(type(mamba).__module__)["causal_conv1d_fn"]
        ids = token_ids(2, 20)
        expected = mamba(ids).logits
        flashqla_hub.register(kernel_folder)
        mamba.set_use_kernels(True)
        assert serving.is_ours(convolution)
        torch.testing.assert_close(mamba(ids).logits, expected, rtol=1e-4, atol=1e-6)
        flashqla_hub.unregister()
        assert not serving.is_ours(convolution)

    def test_twice_or_without_register_does_nothing(self):
        flashqla_hub.unregister()
        flashqla_hub.unregister()


class TestWrongArguments:
    def test_model_without_a_gated_delta_rule_layer_is_refused(self, kernel_folder):
        for call in (flashqla_hub.kernelize, flashqla_hub.report, flashqla_hub.is_active):
            with pytest.raises(ValueError, match="Linear without a gated delta rule layer"):
                call(nn.Linear(1, 1))

    @pytest.mark.parametrize("thing", ["Qwen/Qwen3.5-0.8B", 3, None])
    def test_what_is_no_model_is_refused(self, kernel_folder, thing):
        for call in (flashqla_hub.kernelize, flashqla_hub.report, flashqla_hub.is_active):
            with pytest.raises(TypeError, match=f"model is a {type(thing).__name__}; "):
                call(thing)

    def test_kernel_config_refuses_a_model_without_one(self, kernel_folder):
        with pytest.raises(ValueError, match="without a gated delta rule layer"):
            flashqla_hub.kernel_config(kernel_folder).sanitize_kernel_mapping(nn.Linear(1, 1))

    def test_device_that_torch_does_not_know_is_refused(self, model, kernel_folder):
        with pytest.raises(ValueError, match="device is 'gpu'"):
            flashqla_hub.kernelize(model, source=kernel_folder, device="gpu")

    def test_mode_that_is_none_of_kernels_is_refused(self, model, kernel_folder):
        with pytest.raises(TypeError, match=r"kernels\.Mode"):
            flashqla_hub.kernelize(model, source=kernel_folder, mode="training")
        with pytest.raises(ValueError, match="must contain"):
            flashqla_hub.kernelize(model, source=kernel_folder, mode=Mode.FALLBACK)

    def test_model_without_data_must_come_with_a_device(self, model, kernel_folder):
        with pytest.raises(ValueError, match="device is None"):
            flashqla_hub.kernelize(model.to("meta"), source=kernel_folder)
        flashqla_hub.kernelize(model, source=kernel_folder, device="cpu")


class TestModelWithAKernelizeMethod:
    """Transformers up to 5.10 gave models a `kernelize` method, which asks the mapping of `kernels` anew."""

    @pytest.fixture
    def old_style(self, model, monkeypatch):
        def own_kernelize(self, mode=None):
            kernelize(self, device="cpu", mode=mode or (Mode.TRAINING if self.training else Mode.INFERENCE))

        monkeypatch.setattr(type(model), "kernelize", own_kernelize, raising=False)
        return model

    def test_registered_kernel_is_installed_by_the_method(self, old_style, kernel_folder):
        flashqla_hub.register(kernel_folder)
        assert not flashqla_hub.is_active(old_style)
        old_style.kernelize()
        assert flashqla_hub.is_active(old_style)

    @pytest.mark.parametrize("mode", [Mode.TRAINING, Mode.INFERENCE])
    def test_method_keeps_what_kernelize_installed(self, old_style, kernel_folder, mode):
        flashqla_hub.kernelize(old_style, source=kernel_folder)
        old_style.kernelize(mode)
        assert flashqla_hub.is_active(old_style)
