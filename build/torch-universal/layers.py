"""Hub layers: one class per hub name, with the signature of the transformers function or module that it replaces.

`kernels` puts each `forward` in the place of the original one. Inputs that we do not take go to the original forward,
`type(self).forward`, which `kernels` leaves on the class.
"""

import torch
from torch import nn

from .causal_conv1d import causal_conv1d_fn as _causal_conv1d_fn
from .causal_conv1d import causal_conv1d_update as _causal_conv1d_update
from .causal_conv1d.validation import ACTIVATIONS as _CONV_ACTIVATIONS
from .gated_delta_rule import chunk_gated_delta_rule as _chunk_gated_delta_rule
from .gated_delta_rule import fused_recurrent_gated_delta_rule as _fused_recurrent_gated_delta_rule
from .gated_norm import rms_norm_gated as _rms_norm_gated
from .gated_norm.api import ACTIVATIONS as _GATE_ACTIVATIONS

__all__ = [
    "RMSNormGated",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
]

_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")

# Keywords of a model's forward that transformers hands on to these functions, without meaning for them; requests for
# outputs, output_* and return_*, are recognised by their names.
_PASSED_ALONG = frozenset(
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


def _refuse_unknown(name, extras):
    """Raise for a keyword that might change the result and that we would drop, such as a cache under a new name."""
    for key, value in extras.items():
        if value is None or key in _BOUNDARIES or key in _PASSED_ALONG or key.startswith(("output_", "return_")):
            continue
        raise TypeError(
            f"{key} is not known to {name} of qwen/flashqla, which would ignore it; leave it out, "
            "or call flashqla_hub.unregister() to use the model's own forward."
        )


def _restart_where_sequence_changes(g, seq_idx, cu_seqlens):
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


def _with_cached_tokens(seq_idx, num_tokens):
    """seq_idx [B, num_tokens] of a row that a cache has extended to the left: its tokens belong to the first sequence."""
    earlier = num_tokens - seq_idx.shape[1]
    return torch.cat([seq_idx[:, :1].expand(-1, earlier), seq_idx], dim=1) if earlier > 0 else seq_idx


def _bounds(kwargs):
    cu_seqlens = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


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
        _refuse_unknown("chunk_gated_delta_rule", kwargs)
        cu_seqlens = _bounds(kwargs)
        return _chunk_gated_delta_rule(
            query,
            key,
            value,
            _restart_where_sequence_changes(g, kwargs.get("seq_idx"), cu_seqlens),
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
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
        _refuse_unknown("fused_recurrent_gated_delta_rule", kwargs)
        cu_seqlens = _bounds(kwargs)
        return _fused_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=_restart_where_sequence_changes(g, kwargs.get("seq_idx"), cu_seqlens),
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
        _refuse_unknown("causal_conv1d_fn", kwargs)
        seq_idx, cu_seqlens = kwargs.get("seq_idx"), _bounds(kwargs)
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
