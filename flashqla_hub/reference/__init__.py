"""Ground truth in float64: the token recurrence and its closed-form backward. Never imported by a kernel."""

from .backward import gated_delta_rule_backward
from .recurrent import gated_delta_rule, l2_normalize

__all__ = ["gated_delta_rule", "gated_delta_rule_backward", "l2_normalize"]
