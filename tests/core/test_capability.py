"""What the kernel says about the path that serves a call: before it on request, and once when it is not the fast one."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from .inputs import TENSORS, forward, make_problem


@pytest.fixture
def capability(part, monkeypatch):
    module = part("gated_delta_rule.capability")
    monkeypatch.setattr(module, "_noticed", set())
    return module


def test_a_reason_is_given_before_the_call(kernel):
    """Made to stand in a sentence, so without a full stop; CPU tensors always have one."""
    problem = make_problem(1, 5, 1, 1, dim_k=4, dim_v=4)
    reason = kernel.explain_unsupported(*(getattr(problem, name) for name in TENSORS))
    assert len(reason.split()) > 3 and not reason.endswith(".") and ". " not in reason


def test_each_reason_is_noticed_once(capability):
    with pytest.warns(UserWarning) as seen:
        for reason in ("it is cold", "it is cold", "it is late", "it is cold"):
            capability.notice_torch_path("the rule", reason)
    sentences = [str(warning.message) for warning in seen]
    assert sentences == [
        "the rule runs on its PyTorch path: it is cold.",
        "the rule runs on its PyTorch path: it is late.",
    ]


def test_a_cuda_call_on_the_pytorch_path_is_noticed(part, capability):
    """A stand-in for CUDA tensors: only where they lie is looked at."""
    q = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), shape=(1, 5, 1, 4))
    with pytest.warns(UserWarning, match="chunk_gated_delta_rule runs on its PyTorch path: "):
        part("gated_delta_rule.ops")._before_torch_path(q, None, None, None, None, None)


def test_a_cpu_call_warns_of_nothing(kernel, capability):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(kernel, make_problem(1, 70, 1, 2, dim_k=4, dim_v=4, bounds=[0, 30, 60]))
