"""What the operators share on their way to the compiled ops."""

import pytest
import torch


@pytest.fixture
def library(part):
    return part("library")


def test_indices_outside_stay_outside_when_they_are_narrowed(library):
    wide = torch.tensor([0, 5, -1, 6, 2**31, 2**32 + 1, -(2**40)])
    narrow = library.narrow_indices(wide, 6)
    assert narrow.dtype == torch.int32 and narrow.tolist() == [0, 5, -1, 6, 6, 6, -1]


def test_narrow_indices_are_taken_as_they_are(library):
    indices = torch.tensor([3, -1], dtype=torch.int32)
    assert library.narrow_indices(indices, 6) is indices and library.narrow_indices(None, 6) is None


def refuse(message):
    raise RuntimeError(message)


def test_lack_of_memory_is_pytorch_s_own_error(library):
    message = "PyTorch could not allocate states with 9 elements of float32 on device 0, most likely for lack of memory"
    with pytest.raises(torch.OutOfMemoryError, match="states with 9 elements"):
        library.call_op(refuse, message)


def test_other_errors_of_an_op_stay_what_they_are(library):
    with pytest.raises(RuntimeError, match="q is on device 1") as error:
        library.call_op(refuse, "q is on device 1 and the other tensors are on device 0; move it there.")
    assert type(error.value) is RuntimeError
    assert library.call_op(max, 1, 2) == 2


def test_lack_of_memory_in_the_forward_reaches_the_caller(kernel, part, monkeypatch):
    """Not the rules of the arguments, which are looked up after other failures."""
    monkeypatch.setattr(part("gated_delta_rule.capability"), "explain_unsupported", lambda *tensors: None)
    path = part("gated_delta_rule.sm90_path")
    monkeypatch.setattr(path.ops, "sm90_gated_delta_rule_fwd", lambda *_: refuse("could not allocate o"), raising=False)
    x, gate = torch.zeros(1, 2, 1, 128), torch.zeros(1, 2, 1)
    with pytest.raises(torch.OutOfMemoryError, match="could not allocate o"):
        kernel.chunk_gated_delta_rule(x, x, x, gate, gate)
