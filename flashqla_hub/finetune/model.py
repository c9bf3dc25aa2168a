"""What is trained: a model of transformers by name, or a shape of Qwen3.5 with random weights that reads bytes."""

from typing import TYPE_CHECKING

import torch

from .settings import FinetuneError, Settings, one_clause
from .text import Encode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 256  # bytes
DTYPES = {"bf16": torch.bfloat16, "mixed": torch.float32, "fp32": torch.float32}

# Sizes of Qwen3.5-0.8B apart from its vocabulary: 24 layers, of which every fourth is one of full attention.
LARGE = "qwen3.5-0.8b"
TINY = "tiny"
SHAPES = {
    LARGE: {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "max_position_embeddings": 262144,
    },
    TINY: {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 4096,
    },
}


def build(settings: Settings) -> tuple["PreTrainedModel", Encode]:
    """The model on its device in the precision of the settings, and what turns text into its tokens.

    Raises:
        FinetuneError: `from_pretrained` refuses, or the model has no gated delta rule layer; one sentence.
    """
    from ..models import gated_delta_nets

    model, encode = _random(settings) if settings.model in SHAPES else _pretrained(settings)
    if not gated_delta_nets(model):
        raise FinetuneError(
            f"model {settings.model} is a {type(model).__name__} without a gated delta rule layer; name a Qwen3.5, "
            "Qwen3-Next or OLMo-Hybrid model."
        )
    return model.to(settings.device), encode


def _random(settings: Settings) -> tuple["PreTrainedModel", Encode]:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY, tie_word_embeddings=True, pad_token_id=0, **SHAPES[settings.model]
    )
    config._attn_implementation = settings.attention
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):  # a GPU draws half a billion weights in no time
        model = Qwen3_5ForCausalLM(config)
    return model.to(DTYPES[settings.precision]), bytes_of


def bytes_of(text: str) -> torch.Tensor:
    """Tokens [N] of a model that reads bytes."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _pretrained(settings: Settings) -> tuple["PreTrainedModel", Encode]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=DTYPES[settings.precision], attn_implementation=settings.attention
        )
    except (OSError, ValueError) as error:
        raise FinetuneError(
            f"model is {settings.model}, which is none of {', '.join(SHAPES)}, and transformers cannot load it: "
            f"{one_clause(error)}."
        ) from error
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return model, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"] + end
