"""Keywords that transformers hands down to the layers: where packed sequences begin, and much that is not for them."""

from typing import Mapping, Optional

import torch
from torch import Tensor

BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")

# Keywords of a model's forward that transformers hands on, without meaning for the gated delta rule; requests for outputs,
# output_* and return_*, are recognised by their names.
PASSED_ALONG = frozenset(
    {
        "cu_seq_lens_k",
        "debug_io",
        "debug_io_dir",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "position_ids",
        "prune_layers",
        "use_cache",
    }
)


def unknown_keyword(keywords: Mapping[str, object]) -> Optional[str]:
    """A keyword that is given and might change the result, such as a cache under a new name; None if there is none."""
    for key, value in keywords.items():
        known = key in BOUNDARIES or key in PASSED_ALONG or key.startswith(("output_", "return_"))
        if value is not None and not known:
            return key
    return None


def refuse_unknown(name: str, keywords: Mapping[str, object]) -> None:
    """Raise TypeError for a keyword that `name` would drop although it might change the result."""
    key = unknown_keyword(keywords)
    if key is not None:
        raise TypeError(
            f"{key} is not known to {name} of qwen/flashqla, which would ignore it; leave it out, "
            "or call flashqla_hub.unregister() to use the model's own forward."
        )


def bounds_of(keywords: Mapping[str, object]) -> Optional[Tensor]:
    """cu_seqlens [N + 1] under either of its names, or None."""
    cu_seqlens = keywords.get("cu_seqlens")
    return keywords.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


def restart_where_sequence_changes(g: Tensor, seq_idx: Optional[Tensor], cu_seqlens: Optional[Tensor]) -> Tensor:
    """Without bounds, `seq_idx` restarts the state by a log decay of -inf on the first token of each sequence."""
    if seq_idx is None or cu_seqlens is not None:
        return g
    if seq_idx.shape != g.shape[:2]:
        raise ValueError(
            f"seq_idx has shape {list(seq_idx.shape)}; it must be [batch, tokens] = {list(g.shape[:2])} of this call: "
            "pass the part that belongs to its tokens."
        )
    starts = torch.zeros_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return g.masked_fill(starts.unsqueeze(-1), float("-inf"))
