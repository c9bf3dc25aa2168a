"""What the benchmark of a whole model does without a GPU: its model, its counting of tokens, its refusals."""

import pytest
import torch
from typer.testing import CliRunner

import flashqla_hub
from flashqla_hub.__main__ import build_app
from flashqla_hub.bench import layer
from flashqla_hub.bench import model as bench
from flashqla_hub.models import gated_delta_nets

SIZES = {"vocab_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture
def small():
    return bench.make_model(layer.Shape(hidden=64, hk=1, hv=2), "cpu", torch.float32, **SIZES)


def test_kernel_serves_every_layer_whole(small, kernel_folder):
    try:
        assert bench.serve(small, "flashqla", kernel_folder).startswith("Qwen3_5GatedDeltaNet")
        nets = gated_delta_nets(small)
        assert len(nets) == 3 and all(flashqla_hub.report(small).served_whole(net.path) for net in nets)
    finally:
        flashqla_hub.unregister()


def test_milliseconds_are_those_of_one_more_token(small, monkeypatch):
    """A clock that only moves with forwards: a prompt of any length counts as little as its prefill does."""
    clock = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    small.register_forward_pre_hook(lambda *_: clock.__setitem__(0, clock[0] + 0.005))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    ids = torch.randint(1, 128, (1, 20))
    assert bench.token_ms(small, ids) == pytest.approx(5)
    assert bench.token_ms(small, ids, cache_implementation="static", disable_compile=True) == pytest.approx(5)


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--shape", "3b"), "--shape is"), (("--impl", "fa"), "--impl is"), (("--operation", "x"), "--operation is")],
)
def test_unknown_names_are_refused(options, words):
    result = CliRunner().invoke(build_app("bench-model"), ["bench-model", *options])
    assert result.exit_code == 2 and words in result.output
