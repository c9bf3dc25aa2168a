"""FlashQLA: the gated delta rule of Qwen3-Next and Qwen3.5, and the operators around it.

The names in `__all__` are the public interface of version 1.
"""

from . import layers
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    explain_unsupported,
    fused_recurrent_gated_delta_rule,
)
from .gated_norm import rms_norm_gated

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_fwd",
    "chunk_gated_delta_rule_bwd",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "rms_norm_gated",
    "explain_unsupported",
    "layers",
]
