"""Packed rows: sequences that share a row know nothing of each other, from whichever argument says where they begin."""

import copy
import inspect
import warnings

import pytest
import torch
from transformers import DynamicCache

import flashqla_hub
from flashqla_hub.boundaries import ATTENTION_JOINS, AXES_RESTART, POSITIONAL, POSITIONS_JUMP, pass_boundaries
from flashqla_hub.models import backbones, gated_delta_nets
from tests.transformers.comparison import assert_close, distance
from tests.transformers.families import token_ids

LENGTHS = (37, 63, 50)


@pytest.fixture
def ids() -> torch.Tensor:
    return token_ids(1, sum(LENGTHS))


@pytest.fixture
def positions() -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.fixture
def bounds() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


@pytest.fixture
def sequence() -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(torch.int32)[None]


@pytest.fixture
def separate(plain, ids) -> torch.Tensor:
    """Logits of the sequences, each alone in a row, from the plain model."""
    with torch.no_grad():
        return torch.cat([plain(part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], dim=1)


def caught(call) -> tuple[torch.Tensor, list[str]]:
    """Logits of a call, and our warnings in it."""
    with warnings.catch_warnings(record=True) as records, torch.no_grad():
        warnings.simplefilter("always")
        logits = call().logits
    ours = (ATTENTION_JOINS, AXES_RESTART, POSITIONS_JUMP)
    return logits, [str(record.message) for record in records if str(record.message) in ours]


@pytest.mark.parametrize("given", ["position_ids", "bounds", "seq_idx", "all"])
def test_packed_row_equals_separate_rows(plain, kernelize, separate, ids, positions, bounds, sequence, given):
    """P1, P2, P3: state and convolution restart; also when only position_ids that restart tell where."""
    kernelize(plain)
    known = {
        "position_ids": {"position_ids": positions},
        "bounds": {"position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds},
        "seq_idx": {"position_ids": positions, "seq_idx": sequence},
        "all": {"position_ids": positions, "cu_seq_lens_q": bounds, "seq_idx": sequence},
    }[given]
    logits, messages = caught(lambda: plain(ids, **known))
    assert_close(logits, separate, 1e-4)
    assert not messages


def test_ignored_boundaries_would_be_noticed(plain, kernelize, separate, ids, positions):
    """Without the hook, the same row with position_ids alone is far off: the tests of this file can fail."""
    kernelize(plain)
    for backbone in backbones(plain):
        backbone._forward_pre_hooks.clear()
    logits, _ = caught(lambda: plain(ids, position_ids=positions, use_cache=False))
    assert distance(logits, separate) > 1e-3


def test_packed_rows_of_a_batch_equal_separate_rows(plain, kernelize, separate, ids, positions):
    """Two rows that pack different lengths: seq_idx knows them apart, bounds could not."""
    order = [2, 0, 1]
    shuffled = [torch.cat([part.split(LENGTHS, dim=1)[i] for i in order], dim=1) for part in (ids, positions)]
    kernelize(plain)
    both = [torch.cat(pair) for pair in zip((ids, positions), shuffled, strict=True)]
    logits, _ = caught(lambda: plain(both[0], position_ids=both[1]))
    again = torch.cat([separate.split(LENGTHS, dim=1)[i] for i in order], dim=1)
    assert_close(logits, torch.cat([separate, again]), 1e-4)


def test_packed_gradients_equal_those_of_separate_rows(plain, kernelize, ids, positions):
    """P1: the gradient of each sequence's embeddings, whose first tokens would feel the neighbour first."""
    kernelize(plain.train())
    embeddings = plain.get_input_embeddings()(ids).detach()

    def gradient(parts, **options):
        leaf = embeddings.clone().requires_grad_()
        for i, part in enumerate(leaf.split(parts, dim=1)):
            logits = plain(inputs_embeds=part, use_cache=False, **options).logits
            (logits * weights.split(parts, dim=1)[i]).sum().backward()
        return leaf.grad

    weights = torch.randn(1, ids.shape[1], plain.config.vocab_size)
    assert_close(gradient(ids.shape[1], position_ids=positions), gradient(LENGTHS), 1e-4)


@pytest.mark.parametrize("use_cache", [None, True])
def test_short_packed_prefill_into_a_cache_is_aligned(plain, kernelize, use_cache):
    """A cache pads a row shorter than the convolution on the left; seq_idx of its tokens still fits."""
    ids = token_ids(1, 3)
    kernelize(plain)
    with torch.no_grad():
        net = gated_delta_nets(plain)[-1].module
        hidden = plain.get_input_embeddings()(ids)
        cache = DynamicCache(config=plain.config) if use_cache else None
        sequence = torch.tensor([[0, 0, 1]], dtype=torch.int32)
        packed = net(hidden, cache_params=cache, seq_idx=sequence)
        apart = torch.cat([net(hidden[:, :2]), net(hidden[:, 2:])], dim=1)
    assert_close(packed, apart)


def test_row_that_continues_a_cache_keeps_its_first_sequence(plain, kernelize):
    """The tokens that a cache puts before a row belong to the row's first sequence; the second starts anew."""
    ids = token_ids(1, 40)
    kernelize(plain)
    with torch.no_grad():
        net = gated_delta_nets(plain)[-1].module
        hidden = plain.get_input_embeddings()(ids)
        cache = DynamicCache(config=plain.config)
        net(hidden[:, :20], cache_params=cache)
        sequence = torch.tensor([[4] * 12 + [5] * 8], dtype=torch.int32)
        packed = net(hidden[:, 20:], cache_params=cache, seq_idx=sequence)
        apart = torch.cat([net(hidden[:, :32])[:, 20:], net(hidden[:, 32:])], dim=1)
    assert_close(packed, apart)


def test_positions_of_one_sequence_leave_the_call_alone(plain, ids):
    """Positions that do not restart, wherever they start, add nothing, so nothing changes for usual calls."""
    positions = torch.arange(7, 7 + ids.shape[1])[None]
    for backbone in backbones(plain):
        assert pass_boundaries(backbone, (ids,), {"position_ids": positions}) is None
        assert pass_boundaries(backbone, (ids,), {}) is None
        assert pass_boundaries(backbone, (ids[:, :1],), {"position_ids": positions[:, :1]}) is None


def test_boundaries_are_those_of_the_positions(plain, ids, positions, bounds, sequence):
    _, found = pass_boundaries(backbones(plain)[0], (ids, None, positions), {"output_attentions": False})
    assert torch.equal(found["cu_seq_lens_q"], bounds)
    assert torch.equal(found["seq_idx"], sequence)
    assert found["seq_idx"].dtype == found["cu_seq_lens_q"].dtype == torch.int32
    assert found["use_cache"] is False and found["output_attentions"] is False


def test_arguments_by_position_are_understood(plain, kernelize, separate, ids, positions):
    """All of the backbone's arguments may come without names, those that the hook changes too."""
    (backbone,) = backbones(kernelize(plain))
    with torch.no_grad():
        hidden = backbone(ids, None, positions, None, None, None).last_hidden_state
        assert_close(plain.lm_head(hidden), separate, 1e-4)


def test_positions_of_another_batch_are_left_to_the_model(plain, ids):
    """The model's own error about them is the better one."""
    for shape in ((2, ids.shape[1]), (1, 5), (5,)):
        call = {"position_ids": torch.zeros(shape, dtype=torch.long)}
        assert pass_boundaries(backbones(plain)[0], (ids,), call) is None


def test_sequences_of_one_token_are_seen(plain):
    """Their positions repeat, 0 after 0, where those of longer sequences decrease."""
    positions = torch.tensor([[0, 0, 0, 1, 0]])
    _, found = pass_boundaries(backbones(plain)[0], (token_ids(1, 5),), {"position_ids": positions})
    assert found["cu_seq_lens_q"].tolist() == [0, 1, 2, 4, 5]
    assert found["seq_idx"].tolist() == [[0, 1, 2, 2, 3]]


def test_four_axes_are_read_by_their_text_axis(plain, ids, positions, bounds):
    """Images let the other axes repeat and fall back; only the first, the text axis, counts."""
    axes = torch.stack([positions, *torch.randint(0, 9, (3, *positions.shape))])
    _, found = pass_boundaries(backbones(plain)[0], (ids,), {"position_ids": axes})
    assert torch.equal(found["cu_seq_lens_q"], bounds)
    flat = torch.stack([torch.arange(ids.shape[1])[None], *torch.randint(0, 9, (3, *positions.shape))])
    assert pass_boundaries(backbones(plain)[0], (ids,), {"position_ids": flat}) is None


def test_three_axes_are_never_taken_for_packing(plain, ids):
    """P3: rotary positions of images [3, B, T] repeat and decrease within one sequence."""
    temporal = torch.arange(ids.shape[1]).clamp(max=60)[None]
    height = torch.cat([torch.arange(60), torch.arange(90) % 10 + 5])[None]
    axes = torch.stack([temporal, height, height.flip(-1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pass_boundaries(backbones(plain)[0], (ids,), {"position_ids": axes}) is None


def test_three_axes_that_all_restart_are_warned_of_once(plain, ids, positions):
    call = {"position_ids": positions.expand(3, 1, -1)}
    with pytest.warns(UserWarning, match="three axes"):
        assert pass_boundaries(backbones(plain)[0], (ids,), call) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pass_boundaries(backbones(plain)[0], (ids,), call) is None


def test_left_padding_is_not_taken_for_packing(plain):
    """generate numbers pads 1, 1, 1 and then starts at 0; under an attention_mask that is one sequence."""
    ids, mask = token_ids(2, 6), torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    call = {"attention_mask": mask, "position_ids": positions}
    assert pass_boundaries(backbones(plain)[0], (ids,), call) is None


@pytest.mark.parametrize("reason", ["mask", "use_cache", "cache"])
def test_attention_that_will_not_keep_sequences_apart_is_warned_of_once(plain, ids, positions, reason):
    options = {
        "mask": {"attention_mask": torch.ones_like(ids)},
        "use_cache": {"use_cache": True},
        "cache": {"past_key_values": DynamicCache(config=plain.config)},
    }[reason]
    call = {"position_ids": positions, **options}
    with pytest.warns(UserWarning, match="use_cache=False"):
        _, found = pass_boundaries(backbones(plain)[0], (ids,), call)
    assert "seq_idx" in found and found.get("use_cache") == {"mask": False, "use_cache": True, "cache": None}[reason]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pass_boundaries(backbones(plain)[0], (ids,), call)


def test_mask_of_the_caller_for_every_pair_of_tokens_is_no_reason_to_warn(plain, ids, positions):
    """A 4D mask is how callers keep attention apart themselves."""
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = pass_boundaries(
            backbones(plain)[0], (ids,), {"position_ids": positions, "attention_mask": mask, "use_cache": False}
        )
    assert "seq_idx" in found


def test_jump_of_positions_is_warned_of_and_does_not_restart(plain):
    """Dropped tokens leave gaps: attention starts anew there, the recurrence of the plain model never did."""
    positions = torch.tensor([[0, 1, 2, 7, 8, 9]])
    with pytest.warns(UserWarning, match="jump forward"):
        assert pass_boundaries(backbones(plain)[0], (token_ids(1, 6),), {"position_ids": positions}) is None


@pytest.mark.parametrize("keyword", ["past_key_values", "cache"])
def test_row_that_continues_a_cache_is_not_searched(plain, kernelize, ids, keyword):
    """The positions of a continued sequence begin anywhere; a filled cache, by either name, says that it is one."""
    kernelize(plain)
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(ids, past_key_values=cache)
    positions = torch.tensor([[150, 0, 1]])
    call = {"position_ids": positions, keyword: cache}
    assert pass_boundaries(backbones(plain)[0], (ids[:, :3],), call) is None


def test_hook_is_installed_once_and_copied_with_the_model(plain, kernelize, ids, positions, separate):
    for model in (kernelize(plain), kernelize(plain), copy.deepcopy(plain)):
        (backbone,) = backbones(model)
        assert list(backbone._forward_pre_hooks.values()) == [pass_boundaries]
        assert_close(caught(lambda model=model: model(ids, position_ids=positions))[0], separate, 1e-4)
    flashqla_hub.unregister(model)
    assert not backbone._forward_pre_hooks


def test_backbones_take_the_arguments_in_the_order_that_the_hook_reads(plain):
    for backbone in backbones(plain):
        names = list(inspect.signature(type(backbone).forward).parameters)[1 : 1 + len(POSITIONAL)]
        assert ["past_key_values" if name == "cache" else name for name in names] == list(POSITIONAL)
