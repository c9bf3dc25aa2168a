"""Qwen3.5 with images: the layers lie in its language model, and positions have several axes."""

import warnings

import pytest
import torch

import flashqla_hub
from flashqla_hub.models import backbones
from tests.transformers.comparison import assert_close, distance
from tests.transformers.families import SHARED, token_ids

IMAGE, VIDEO, START, END = 60, 61, 62, 63
LENGTHS = (37, 63, 50)


@pytest.fixture
def model():
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": SHARED["hidden_size"],
        "patch_size": 4,
        "spatial_merge_size": 1,
        "temporal_patch_size": 1,
        "num_position_embeddings": 16,
    }
    special = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    torch.manual_seed(0)
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config={**SHARED, "intermediate_size": 32, "head_dim": 16},
            vision_config=vision,
            vision_end_token_id=END,
            **special,
        )
    ).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return token_ids(1, sum(LENGTHS)).clamp(max=IMAGE - 1)


def logits(model, ids, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **options).logits


def test_layers_of_the_language_model_are_served(model, kernelize, ids):
    expected = logits(model, ids)
    kernelize(model)
    assert flashqla_hub.is_active(model)
    assert flashqla_hub.report(model).layers[0] == "model.language_model.layers.0.linear_attn"
    assert backbones(model) == [model.model.language_model]
    assert_close(logits(model, ids), expected)


@pytest.mark.parametrize("axes", [None, 4])
def test_packed_row_with_text_positions_equals_separate_rows(model, kernelize, ids, axes):
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    kernelize(model)
    separate = torch.cat([logits(model, part) for part in ids.split(LENGTHS, dim=1)], dim=1)
    packed = logits(model, ids, position_ids=positions if axes is None else positions.expand(axes, 1, -1))
    assert_close(packed, separate, 1e-4)


def test_packed_row_with_three_axes_is_warned_of(model, kernelize, ids):
    """The attention layers of transformers do not keep such a row apart either, so nothing is made of it but a warning."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    kernelize(model)
    with pytest.warns(UserWarning, match="three axes"):
        logits(model, ids, position_ids=positions.expand(3, 1, -1))


def test_image_between_text_changes_nothing(model, kernelize):
    """P3: the positions of its patches repeat and decrease; that is no packing, and nothing to warn of."""
    ids = torch.tensor([[5, 6, START, IMAGE, IMAGE, IMAGE, IMAGE, END, 7, 8, 9]])
    image = {"pixel_values": torch.randn(4, 3 * 4 * 4), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    image["mm_token_type_ids"] = (ids == IMAGE).int()
    expected = logits(model, ids, **image)
    assert distance(logits(model, ids, **{**image, "pixel_values": torch.zeros(4, 48)}), expected) > 0
    kernelize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_close(logits(model, ids, **image), expected)
