"""I5: a kernelized model compiles as one graph, and computes the same."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from flashqla_hub.models import gated_delta_nets
from tests.transformers.comparison import assert_close, assert_same_gradients, loss_and_gradients
from tests.transformers.families import tiny_model, token_ids

FAMILY = "qwen3_5"


@pytest.fixture
def model(kernelize):
    return kernelize(tiny_model(FAMILY))


def compiled(model, **options):
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


def test_inference_is_one_graph(model):
    ids = token_ids(2, 70)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert_close(compiled(model)(ids, use_cache=False).logits, expected)


def test_training_is_one_graph(model):
    batch = {"input_ids": token_ids(2, 70), "labels": token_ids(2, 70), "use_cache": False}
    loss, gradients = loss_and_gradients(model.train(), **batch)
    model.zero_grad()
    output = compiled(model)(**batch)
    output.loss.backward()
    assert_close(output.loss, loss)
    assert_same_gradients({name: parameter.grad for name, parameter in model.named_parameters()}, gradients)


def test_generated_tokens_of_one_compiled_step_equal_those_of_the_plain_model(kernelize):
    """The step on a static cache as one graph, as transformers compiles it on GPUs by itself."""
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    plain, ids = tiny_model(FAMILY), token_ids(2, 9)
    options = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10}
    expected = plain.generate(ids, **options)
    counters.clear()
    tokens = kernelize(plain).generate(ids, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(tokens, expected)
    assert counters["stats"]["unique_graphs"] == 1


def test_more_lengths_do_not_mean_more_graphs(model):
    """One graph for the first length and one for all others."""
    graphs = []

    def count(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    core = gated_delta_nets(model)[0].replaceable["chunk_gated_delta_rule"]
    counted = torch.compile(core, fullgraph=True, backend=count)
    for tokens in (64, 65, 130, 200):
        q, k, v = (torch.randn(1, tokens, 2, 8) for _ in range(3))
        g, beta = -torch.rand(1, tokens, 2), torch.rand(1, tokens, 2)
        options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
        assert_close(counted(q, k, v, **options)[0], core(q, k, v, **options)[0])
    assert len(graphs) <= 2


@pytest.mark.parametrize("given", ["position_ids", "boundaries"])
def test_packed_row_is_one_graph_and_equals_separate_rows(model, given):
    """While tracing no position is looked at; sequences are kept apart nevertheless."""
    lengths = (13, 20)
    ids = token_ids(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    options = {"position_ids": positions, "use_cache": False}
    if given == "boundaries":
        options["cu_seq_lens_q"] = torch.tensor([0, 13, 33], dtype=torch.int32)
    with torch.no_grad():
        separate = [model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
        packed = compiled(model)(ids, **options).logits
    assert_close(packed, torch.cat(separate, dim=1), 1e-4)


def test_positions_of_one_sequence_compile(model):
    ids = token_ids(2, 30)
    options = {"position_ids": torch.arange(30).expand(2, -1), "use_cache": False}
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert_close(compiled(model)(ids, **options).logits, expected, 1e-4)
