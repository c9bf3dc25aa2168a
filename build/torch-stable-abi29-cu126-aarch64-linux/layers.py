"""Hub layers: one class per hub name, with the signature of the transformers function or module that it replaces.

`kernels` puts each `forward` in the place of the original one. Inputs that we do not take go to the original forward,
`type(self).forward`, which `kernels` leaves on the class.
"""

import torch
from torch import nn

from . import gated_delta_net as _gated_delta_net
from . import gated_delta_net_step as _gated_delta_net_step
from . import keywords as _keywords
from .causal_conv1d import causal_conv1d_fn as _causal_conv1d_fn
from .causal_conv1d import causal_conv1d_update as _causal_conv1d_update
from .causal_conv1d.validation import ACTIVATIONS as _CONV_ACTIVATIONS
from .gated_delta_rule import chunk_gated_delta_rule as _chunk_gated_delta_rule
from .gated_delta_rule import fused_recurrent_gated_delta_rule as _fused_recurrent_gated_delta_rule
from .gated_norm import rms_norm_gated as _rms_norm_gated
from .gated_norm.torch_path import ACTIVATIONS as _GATE_ACTIVATIONS

__all__ = [
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "RMSNormGated",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
]


def _with_cached_tokens(seq_idx, num_tokens):
    """seq_idx [B, num_tokens] of a row that a cache has extended to the left: its tokens belong to the first sequence."""
    earlier = num_tokens - seq_idx.shape[1]
    return torch.cat([seq_idx[:, :1].expand(-1, earlier), seq_idx], dim=1) if earlier > 0 else seq_idx


class chunk_gated_delta_rule(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        _keywords.refuse_unknown("chunk_gated_delta_rule", kwargs)
        cu_seqlens = _keywords.bounds_of(kwargs)
        return _chunk_gated_delta_rule(
            query,
            key,
            value,
            _keywords.restart_where_sequence_changes(g, kwargs.get("seq_idx"), cu_seqlens),
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            plan=getattr(self, "flashqla_plan", "auto"),
        )


class fused_recurrent_gated_delta_rule(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        _keywords.refuse_unknown("fused_recurrent_gated_delta_rule", kwargs)
        cu_seqlens = _keywords.bounds_of(kwargs)
        return _fused_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=_keywords.restart_where_sequence_changes(g, kwargs.get("seq_idx"), cu_seqlens),
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )


class causal_conv1d_fn(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        if activation not in _CONV_ACTIVATIONS:
            return type(self).forward(self, hidden_states, weight, bias, activation, **kwargs)
        _keywords.refuse_unknown("causal_conv1d_fn", kwargs)
        seq_idx, cu_seqlens = kwargs.get("seq_idx"), _keywords.bounds_of(kwargs)
        if seq_idx is not None:
            seq_idx, cu_seqlens = _with_cached_tokens(seq_idx, hidden_states.shape[-1]), None
        return _causal_conv1d_fn(
            hidden_states, weight, bias, seq_idx=seq_idx, activation=activation, cu_seqlens=cu_seqlens
        )


class causal_conv1d_update(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
        if activation not in _CONV_ACTIVATIONS:
            return type(self).forward(self, hidden_states, conv_state, weight, bias, activation)
        return _causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class RMSNormGated(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, gate):
        activation = getattr(self, "activation", "silu")
        if activation not in _GATE_ACTIVATIONS or gate is None:
            return type(self).forward(self, hidden_states, gate)
        return _rms_norm_gated(hidden_states, gate, self.weight, activation=activation, eps=self.variance_epsilon)


_gated_delta_net_step.norm_forward = RMSNormGated.forward


class Qwen3_5GatedDeltaNet(nn.Module):
    """The whole layer of Qwen3.5, dense and with experts, and of Qwen4-Exp."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        project = _gated_delta_net.project_separately
        return _gated_delta_net.forward(self, project, hidden_states, cache_params, attention_mask, kwargs)


class Qwen3NextGatedDeltaNet(nn.Module):
    """The whole layer of Qwen3-Next."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        project = _gated_delta_net.project_by_key_head
        return _gated_delta_net.forward(self, project, hidden_states, cache_params, attention_mask, kwargs)
