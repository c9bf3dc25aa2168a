"""A kernelized model computes what the plain one does, in every family that the installed transformers has."""

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import flashqla_hub
from flashqla_hub.models import FAMILIES, PART_NAMES, gated_delta_nets
from flashqla_hub.reference import gated_delta_rule
from tests.transformers.comparison import LOSS_AND_GRADIENTS, assert_close, assert_same_gradients, loss_and_gradients
from tests.transformers.families import token_ids

LINEAR_LAYERS = 3


def greedy(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int = 12, **options) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **options)


def logits(model: PreTrainedModel, ids: torch.Tensor, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **options).logits


def left_padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of different lengths as a batch that ends with their last tokens.

    Pads are token 1: the embedding of the pad token is zero, so that it would change little where nobody masks it.
    """
    length = max(map(len, rows))
    padded = [torch.nn.functional.pad(row, (length - len(row), 0), value=1) for row in rows]
    masks = [torch.nn.functional.pad(torch.ones_like(row), (length - len(row), 0)) for row in rows]
    return {"input_ids": torch.stack(padded), "attention_mask": torch.stack(masks)}


def test_every_layer_and_every_part_of_it_is_served_by_the_kernel(family, plain, kernelize):
    """I3: also in families whose layer class has no name for kernels; one core per linear layer."""
    assert kernelize(plain) is plain
    assert flashqla_hub.is_active(plain)
    found = flashqla_hub.report(plain)
    assert len(found.layers) == LINEAR_LAYERS
    for layer in found.layers:
        whole = FAMILIES[family].hub_name
        assert found.served_by(layer) == dict.fromkeys([whole, *PART_NAMES] if whole else PART_NAMES, "qwen/flashqla")
        assert found.served_whole(layer) == (whole is not None)


def test_logits_equal_plain(plain, kernelize):
    ids = token_ids(2, 150)
    expected = logits(plain, ids)
    assert_close(logits(kernelize(plain), ids), expected)


def test_loss_and_gradients_equal_plain(plain, kernelize):
    """With slow decay: from the initial gates, decay up to exp(-16) a token, plain float32 loses A_log's gradient to 3e-4."""
    with torch.no_grad():
        for net in gated_delta_nets(plain):
            net.module.A_log.sub_(3)
    ids = token_ids(2, 70)
    loss, gradients = loss_and_gradients(plain.train(), input_ids=ids, labels=ids, use_cache=False)
    kernel_loss, kernel_gradients = loss_and_gradients(kernelize(plain), input_ids=ids, labels=ids, use_cache=False)
    assert abs(kernel_loss - loss) <= LOSS_AND_GRADIENTS * loss
    assert_same_gradients(kernel_gradients, gradients)


def test_gradients_equal_those_of_the_float64_recurrence(plain, kernelize):
    """N4: the gradients of gate parameters too, from gates as they are initialised."""

    def recurrence(query, key, value, *, g, beta, **options):
        return gated_delta_rule(query, key, value, g.double(), beta, use_qk_l2norm=True)[0], None

    ids = token_ids(1, 70)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    _, gradients = loss_and_gradients(kernelize(plain).train(), **batch)
    flashqla_hub.unregister()
    gated_delta_nets(plain)[0].replaceable["chunk_gated_delta_rule"].forward = recurrence
    _, truth = loss_and_gradients(plain.double(), **batch)
    assert_same_gradients({name: gradient.double() for name, gradient in gradients.items()}, truth)


def test_greedy_tokens_equal_plain(plain, kernelize):
    batch = left_padded([token_ids(1, length)[0] for length in (67, 9, 30)])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = greedy(plain, ids, attention_mask=mask)
    assert torch.equal(greedy(kernelize(plain), ids, attention_mask=mask), expected)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prefill_by_chunks_equals_one_shot(plain, kernelize, chunk):
    """C1: several tokens at once on a filled cache continue its state."""
    ids = token_ids(1, 70)
    expected = greedy(plain, ids, new_tokens=4)
    assert torch.equal(greedy(kernelize(plain), ids, new_tokens=4, prefill_chunk_size=chunk), expected)


@pytest.mark.parametrize("split", [1, 2, 63, 64, 65, 100])
def test_two_forwards_on_a_cache_equal_one(plain, kernelize, split):
    """C1: the second forward starts from the state and the last tokens of the first."""
    ids = token_ids(2, 130)
    expected = logits(plain, ids)
    cache = DynamicCache(config=plain.config)
    kernelize(plain)
    parts = [logits(plain, part, past_key_values=cache) for part in (ids[:, :split], ids[:, split:])]
    assert_close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("tokens", [6, 66])
def test_prefill_and_one_step_equal_one_shot(plain, kernelize, tokens):
    """C2: a chunk that is not full leaves the state as if the chunk ended there."""
    ids = token_ids(2, tokens)
    expected = logits(plain, ids)[:, -1]
    cache = DynamicCache(config=plain.config)
    kernelize(plain)
    logits(plain, ids[:, :-1], past_key_values=cache)
    assert_close(logits(plain, ids[:, -1:], past_key_values=cache)[:, -1], expected)


@pytest.mark.parametrize("padding", [1, 3, 7, 70])
def test_padding_of_one_row_changes_nothing(plain, kernelize, padding):
    """P4: a single row is masked like a batch is."""
    prompt = token_ids(1, 9)[0]
    kernelize(plain)
    alone = logits(plain, prompt[None])
    row = left_padded([prompt, torch.ones(9 + padding, dtype=torch.long)])
    padded = logits(plain, row["input_ids"][:1], attention_mask=row["attention_mask"][:1])
    assert_close(padded[:, padding:], alone, 1e-4)


def test_padding_of_a_batch_changes_nothing(plain, kernelize):
    """P4: rows of different lengths in one batch equal the rows alone."""
    rows = [token_ids(1, length)[0] for length in (9, 40, 16)]
    kernelize(plain)
    padded = logits(plain, **dict(zip(("ids", "attention_mask"), left_padded(rows).values(), strict=True)))
    for row, of_batch in zip(rows, padded, strict=True):
        assert_close(of_batch[None, -len(row) :], logits(plain, row[None]), 1e-4)


def test_right_padding_changes_nothing(plain, kernelize):
    """P4: neither the output nor the gradients of real tokens know about pads behind them."""
    kernelize(plain)
    embeddings = torch.randn(1, 12, plain.config.hidden_size)
    gradients = []
    for padding in (0, 5):
        padded = torch.nn.functional.pad(embeddings, (0, 0, 0, padding), value=0.5).requires_grad_()
        mask = torch.ones(1, 12 + padding, dtype=torch.long)
        mask[:, 12:] = 0
        outputs = plain(inputs_embeds=padded, attention_mask=mask, use_cache=False).logits[:, :12]
        outputs.square().sum().backward()
        gradients.append(padded.grad)
    assert_close(gradients[1][:, :12], gradients[0], 1e-4)


@pytest.mark.parametrize("cut", [3, 4, 6])
def test_padding_in_a_later_segment_equals_one_shot(plain, kernelize, cut):
    """P5: the mask counts in every forward of a continued sequence, not only in the first."""
    ids = token_ids(2, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1, 1]])
    kernelize(plain)
    expected = logits(plain, ids, attention_mask=mask)[:, -1]
    cache = DynamicCache(config=plain.config)
    logits(plain, ids[:, :cut], attention_mask=mask[:, :cut], past_key_values=cache)
    last = logits(plain, ids[:, cut:], attention_mask=mask, past_key_values=cache)[:, -1]
    assert_close(last, expected, 1e-4)


def test_tokens_taken_back_from_a_cache_act_as_in_plain(plain, kernelize):
    """C4: transformers takes back attention and convolution, not the recurrent state; the kernel changes nothing in that."""

    def run() -> torch.Tensor:
        cache = DynamicCache(config=plain.config)
        cache.activate_past_recording()
        first = logits(plain, ids[:, :8], past_key_values=cache)
        cache.crop(-5)
        return torch.cat([first, logits(plain, ids[:, 8:], past_key_values=cache)], dim=1)

    ids = token_ids(1, 11)
    expected = run()
    kernelize(plain)
    assert_close(run(), expected)


def test_parameters_keep_dtype_and_gates_are_float32(family, plain, kernelize, part, monkeypatch):
    """N7: in a bfloat16 model the gate is computed in float32 and no parameter changes its dtype. A whole layer hands the
    rule what its gate is made of, as it is; that the rule computes it in float32 is tested with the rule."""
    model = kernelize(plain.to(torch.bfloat16))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    layer = gated_delta_nets(model)[0]
    seen = []

    def spied(rule):
        def spy(*args, **kwargs):
            seen.append((kwargs["g"].dtype, kwargs.get("A_log") is layer.module.A_log))
            return rule(*args, **kwargs)

        return spy

    if FAMILIES[family].hub_name is None:
        function = layer.replaceable["chunk_gated_delta_rule"]
        function.forward = spied(function.forward)
    else:
        net = part("gated_delta_net")
        monkeypatch.setattr(net, "chunk_gated_delta_rule", spied(net.chunk_gated_delta_rule))
    ids = token_ids(1, 20)
    assert torch.isfinite(logits(model, ids).float()).all()
    whole = FAMILIES[family].hub_name is not None
    assert seen[0] == ((torch.bfloat16, True) if whole else (torch.float32, False))
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
