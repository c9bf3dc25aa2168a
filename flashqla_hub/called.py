"""Which functions serve a call, found by watching it run."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Entry points of the libraries that serve a gated delta rule layer, and what transformers calls where none does.
ENTRY_POINTS = frozenset(
    {
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "causal_conv1d",
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "convolve_heads",
        "rms_norm_gated",
        "fused_gdn_gate",
        "Qwen3_5RMSNormGated.forward",
    }
)


def watched(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """(what the call returns, the entry points that it ran, each with its module, in their order).

    Only Python functions of this thread are seen, so no backward: see `functions_behind`.
    """
    found: dict[str, None] = {}

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_qualname in ENTRY_POINTS:
            found[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(before)
    return result, list(found)


def functions_behind(*outputs: "torch.Tensor") -> list[str]:
    """The autograd functions written in Python that a backward from these outputs runs, each with its module."""
    found: dict[str, None] = {}
    left, seen = [output.grad_fn for output in outputs], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        forward = getattr(type(node), "_forward_cls", None)
        if forward is not None:
            found[f"{forward.__module__}.{forward.__qualname__}"] = None
        left += [following for following, _ in node.next_functions]
    return list(found)
