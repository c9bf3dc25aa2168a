"""What the kernel says about the path that serves a call: before it on request, and once when it is not the fast one."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from .inputs import TENSORS, forward, make_problem


@pytest.fixture
def sm90(part, monkeypatch):
    module = part("sm90")
    monkeypatch.setattr(module, "_noticed", set())
    return module


@pytest.fixture
def capability(part, sm90):
    return part("gated_delta_rule.capability")


def test_a_reason_is_given_before_the_call(kernel):
    """Made to stand in a sentence, so without a full stop; CPU tensors always have one."""
    problem = make_problem(1, 5, 1, 1, dim_k=4, dim_v=4)
    reason = kernel.explain_unsupported(*(getattr(problem, name) for name in TENSORS))
    assert len(reason.split()) > 3 and not reason.endswith(".") and ". " not in reason


def test_each_reason_is_noticed_once(sm90):
    with pytest.warns(UserWarning) as seen:
        for reason in ("it is cold", "it is cold", "it is late", "it is cold"):
            sm90.notice_torch_path("the rule", reason)
    sentences = [str(warning.message) for warning in seen]
    assert sentences == [
        "the rule runs on its PyTorch path: it is cold.",
        "the rule runs on its PyTorch path: it is late.",
    ]


def test_only_cuda_calls_on_the_pytorch_path_are_noticed(part, sm90):
    """A stand-in for a CUDA tensor: only where it lies is looked at."""
    notice = part("gated_delta_rule.ops")._notice_on_cuda
    with pytest.warns(UserWarning, match=r"^the rule runs on its PyTorch path: it is cold\.$"):
        notice("the rule", "it is cold", SimpleNamespace(is_cuda=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notice("the rule", "it is late", SimpleNamespace(is_cuda=False))


class Stub(SimpleNamespace):
    """What `explain_unsupported` looks at of a CUDA tensor."""

    def __init__(self, size: int = 128, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0"):
        super().__init__(
            shape=(1, 5, 1, size), dtype=dtype, device=torch.device(device), is_cuda=device.startswith("cuda")
        )


UNSUPPORTED = {
    "served": (Stub(), Stub(), (9, 0), None),
    "half precision served": (Stub(dtype=torch.float16), Stub(dtype=torch.float16), (9, 0), None),
    "another GPU": (Stub(), Stub(), (8, 0), "the GPU has compute capability 8.0, and the SM90 kernels need 9.0"),
    "a newer GPU": (Stub(), Stub(), (10, 0), "the GPU has compute capability 10.0, and the SM90 kernels need 9.0"),
    "float32": (
        Stub(dtype=torch.float32),
        Stub(dtype=torch.float32),
        (9, 0),
        "q has dtype torch.float32, and the SM90 kernels take bfloat16 and float16",
    ),
    "small keys": (Stub(64), Stub(), (9, 0), "K is 64, and the SM90 kernels take head size 128"),
    "large values": (Stub(), Stub(256), (9, 0), "V is 256, and the SM90 kernels take head size 128"),
    "on the CPU": (
        Stub(device="cpu"),
        Stub(device="cpu"),
        (9, 0),
        "the tensors are on cpu, and the SM90 kernels run on CUDA",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_every_reason_against_the_compiled_forward(capability, sm90, monkeypatch, case):
    q, v, gpu, reason = UNSUPPORTED[case]
    monkeypatch.setattr(sm90, "ops", SimpleNamespace(**{capability.SM90_FORWARD: None}))
    monkeypatch.setattr(sm90, "_capability", lambda index: gpu)
    assert capability.explain_unsupported(q, q, v, None, None) == reason


def test_a_build_without_library_says_so(capability, sm90, monkeypatch):
    monkeypatch.setattr(sm90, "ops", SimpleNamespace())
    assert capability.explain_unsupported(Stub(), Stub(), Stub(), None, None).startswith(
        "this build of the kernel has no"
    )


def test_a_cpu_call_warns_of_nothing(kernel, sm90):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(kernel, make_problem(1, 70, 1, 2, dim_k=4, dim_v=4, bounds=[0, 30, 60]))
