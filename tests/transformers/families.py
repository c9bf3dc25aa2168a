"""A tiny model of every family that has gated delta rule layers, with heads as in the large ones: HV = 2 H, K = V."""

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 64
LINEAR, FULL = "linear_attention", "full_attention"

SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def _qwen3_5() -> PreTrainedModel:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHARED, intermediate_size=32, head_dim=16))


def _qwen3_5_moe() -> PreTrainedModel:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SHARED, **EXPERTS, head_dim=16))


def _qwen3_next() -> PreTrainedModel:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(**SHARED, **EXPERTS, intermediate_size=32, head_dim=16))


def _qwen4_exp() -> PreTrainedModel:
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    options = {"hc_count": 2, "hc_lowrank": 8, "output_gate_type": "sigmoid", "head_dim": 16}
    indexer = {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 1024,
        "indexer_compress_ratio": 4,
    }
    return Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**SHARED, **EXPERTS, **options, **indexer))


def _olmo_hybrid() -> PreTrainedModel:
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    # Its keys are narrower than its values, and beta reaches 2.
    sizes = {**SHARED, "linear_key_head_dim": 6, "linear_value_head_dim": 12, "linear_num_value_heads": 2}
    return OlmoHybridForCausalLM(OlmoHybridConfig(**sizes, intermediate_size=32, eos_token_id=None))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen4_exp": _qwen4_exp,
    "olmo_hybrid": _olmo_hybrid,
}
INSTALLED = [name for name in FAMILIES if hasattr(transformers.models, name)]


def tiny_model(family: str) -> PreTrainedModel:
    """A tiny float32 model in eval mode, the same in every call."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    model.set_experts_implementation("eager")  # the default one has no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # From the usual 0.02, activations would be too small for an error in a layer to show in the logits.
            if parameter.dim() >= 2 and "conv1d" not in name:
                parameter.mul_(4)
    return model


def token_ids(batch: int, tokens: int) -> torch.Tensor:
    """Token ids [batch, tokens] from a fixed generator, none of them the pad token."""
    generator = torch.Generator().manual_seed(batch * 1000 + tokens)
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=generator)
