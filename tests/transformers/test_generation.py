"""Generation: token for token what the plain model generates, in float32, however its cache is filled."""

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.transformers.families import tiny_model, token_ids

NEW_TOKENS = 10


@pytest.fixture(params=["qwen3_5", "qwen3_next"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def generate(model: PreTrainedModel, ids: torch.Tensor, **options) -> torch.Tensor:
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return model.generate(ids, do_sample=False, **lengths, **options)


def padded(lengths: tuple[int, ...], side: str) -> dict[str, torch.Tensor]:
    """Prompts of these lengths as one batch."""
    length = max(lengths)
    ids, mask = torch.zeros(len(lengths), length, dtype=torch.long), torch.zeros(len(lengths), length, dtype=torch.long)
    for row, tokens in enumerate(lengths):
        place = slice(length - tokens, None) if side == "left" else slice(0, tokens)
        ids[row, place], mask[row, place] = token_ids(1, tokens)[0], 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy_single(model):
    return generate(model, token_ids(1, 33))


def greedy_padded(model):
    return generate(model, **renamed(padded((40, 3, 17), "left")))


def greedy_padded_by_chunks(model):
    """The pads of the longest row's neighbours reach into later segments."""
    return generate(model, **renamed(padded((40, 3, 17), "left")), prefill_chunk_size=16)


def beam_search(model):
    """The cache is reordered and expanded between steps."""
    return generate(model, token_ids(2, 20), num_beams=3)


def beam_search_padded(model):
    return generate(model, **renamed(padded((20, 7), "left")), num_beams=2, num_return_sequences=2)


def several_returned(model):
    return generate(model, token_ids(1, 9), num_beams=2, num_return_sequences=2)


def without_cache(model):
    return generate(model, token_ids(1, 9), use_cache=False)


def static_cache(model):
    return generate(model, token_ids(1, 9), cache_implementation="static", disable_compile=True)


def continued_chat(model):
    """Three turns on one cache; a later turn feeds several tokens to a filled cache."""
    cache = DynamicCache(config=model.config)
    history = token_ids(1, 12)
    for turn in range(3):
        history = generate(model, history, past_key_values=cache)
        history = torch.cat([history, token_ids(1, 5 + turn)], dim=1)
    return history


def short_prompts(model):
    """Shorter than the convolution is wide."""
    return torch.stack([generate(model, token_ids(1, tokens))[0, -NEW_TOKENS:] for tokens in (1, 2, 3, 4, 5)])


def renamed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


WAYS = [
    greedy_single,
    greedy_padded,
    greedy_padded_by_chunks,
    beam_search,
    beam_search_padded,
    several_returned,
    without_cache,
    static_cache,
    continued_chat,
    short_prompts,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_tokens_equal_those_of_the_plain_model(plain, kernelize, way):
    expected = way(plain)
    assert torch.equal(way(kernelize(plain)), expected)


def test_plain_model_generates_different_tokens(plain):
    """The comparison can fail: tokens depend on the prompt and differ from step to step."""
    first, second = (generate(plain, token_ids(1, tokens))[0, -NEW_TOKENS:] for tokens in (33, 12))
    assert not torch.equal(first, second) and len(set(first.tolist())) > 1


def test_assisted_generation_is_refused_by_transformers_with_and_without_the_kernel(plain, kernelize):
    """transformers cannot take tokens back from a recurrent state; the kernel neither hides nor changes that."""
    messages = []
    for model in (plain, kernelize(plain)):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            generate(model, token_ids(1, 9), assistant_model=tiny_model("qwen3_5"))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_prompt_lookup_acts_as_in_the_plain_model(plain, kernelize):
    """The other way to propose tokens; whatever transformers makes of it, it makes of both."""

    def outcome(model) -> str:
        try:
            return str(generate(model, token_ids(1, 20), prompt_lookup_num_tokens=3).tolist())
        except (ValueError, RuntimeError) as error:
            return str(error)

    expected = outcome(plain)
    assert outcome(kernelize(plain)) == expected
