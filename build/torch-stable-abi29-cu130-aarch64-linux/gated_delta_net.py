"""The GatedDeltaNet layer of Qwen3.5, Qwen3-Next and Qwen4-Exp, from hidden states to hidden states.

    x = mask * hidden states                       zero where there is padding
    qkv, z, b, a = projections(x)                  plain ones together, others as modules: adapters, shards and hooks count
    q, k, v = SiLU(short convolution(qkv))
    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
    o = gated delta rule(l2norm(q), l2norm(k), v, g, beta)
    y = out_proj(RMS norm(o) * act(z))

The cast order is that of transformers, but beta is not rounded to the model's dtype. Between the projections and the norm
nothing is transposed, repeated per value head or copied. For inference the convolution divides by the norms of q and k.

A call that is out of the ordinary goes to the forward of the layer's class, which `kernels` leaves in place, with one
notice that says why.
"""

import warnings
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from . import gated_delta_net_step, projections
from .causal_conv1d import causal_conv1d_update
from .causal_conv1d.heads import Heads, convolve_heads
from .causal_conv1d.validation import ACTIVATIONS
from .gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .gated_delta_rule.gate_ops import activate
from .keywords import bounds_of, restart_where_sequence_changes, unknown_keyword


class Projected(NamedTuple):
    """What a layer's projections make of x [B, T, hidden].

    Attributes:
        qkv: [B, T, C], the channels of the convolution: all queries, then keys, then values.
        z: [B, T, HV * V], gate of the norm.
        b, a: [B, T, HV], logit of the writing strength, and input of the log decay.
    """

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


class Past(NamedTuple):
    """What a cache holds of the tokens before this call.

    Attributes:
        conv: [B, C, width], the last inputs of the convolution; None before the first call.
        recurrent: [B, HV, K, V]; None before the first call.
        recording: whether the cache keeps all inputs, so that tokens can be taken back.
    """

    conv: Optional[Tensor] = None
    recurrent: Optional[Tensor] = None
    recording: bool = False


def project_separately(layer: nn.Module, x: Tensor) -> Projected:
    """The four projections of Qwen3.5 and Qwen4-Exp."""
    return Projected(*projections.project(x, (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)))


def project_by_key_head(layer: nn.Module, x: Tensor) -> Projected:
    """The two projections of Qwen3-Next, whose outputs lie together for each key head: q k v z, and b a.

    The convolution wants all queries first, so its input is put together in a copy.
    """
    ratio = layer.num_v_heads // layer.num_k_heads
    keys, values = layer.head_k_dim, ratio * layer.head_v_dim
    qkvz, ba = projections.project(x, (layer.in_proj_qkvz, layer.in_proj_ba))
    q, k, v, z = _of_all_heads(qkvz, (keys, keys, values, values))
    b, a = _of_all_heads(ba, (ratio, ratio))
    return Projected(torch.cat((q, k, v), dim=-1), z, b, a)


def _of_all_heads(x: Tensor, sizes: Tuple[int, ...]) -> Tuple[Tensor, ...]:
    """[..., H * sum(sizes)] with a group of `sizes` for each head, as one [..., H * size] for each size."""
    return tuple(part.flatten(-2) for part in x.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1))


def forward(
    layer: nn.Module,
    project: Callable[[nn.Module, Tensor], Projected],
    hidden_states: Tensor,
    cache_params: Optional[Any],
    attention_mask: Optional[Tensor],
    keywords: Dict[str, Any],
) -> Tensor:
    """The whole layer, [B, T, hidden] to [B, T, hidden].

    Args:
        layer: Module of transformers, for its projections, parameters and sizes.
        project: Its projections.
        hidden_states: [B, T, hidden].
        cache_params: Cache of transformers, updated in place, or None; from 5.24 on it may come as keyword `cache`.
        attention_mask: [B, T], or longer on the left: 0 where there is padding; or None.
        keywords: What else transformers passed; of it, the bounds of packed sequences count.
    """
    cache = keywords.pop("cache", None) if cache_params is None else cache_params
    past = _past_of(cache, layer.layer_idx)
    reason = _explain_unusual(layer, hidden_states, cache, past, attention_mask, keywords)
    if reason is not None:
        _notice(layer, reason)
        return type(layer).forward(layer, hidden_states, cache, attention_mask, **keywords)
    # The convolution's weight is read without calling its module, so accelerate's hook, which may have to load it, is run here.
    hook = getattr(layer.conv1d, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(layer.conv1d)
    out = _compute(layer, project, hidden_states, cache, past, attention_mask, keywords)
    if hook is not None:
        hook.post_forward(layer.conv1d, ())
    return out


def _compute(layer, project, hidden_states, cache, past, attention_mask, keywords) -> Tensor:
    if attention_mask is not None:
        padding = attention_mask.shape[1] - hidden_states.shape[1]
        hidden_states = (hidden_states * attention_mask[:, padding:, None]).to(hidden_states.dtype)
    qkv, z, b, a = project(layer, hidden_states)
    normed = None
    if past.conv is not None and past.recurrent is not None and qkv.shape[1] == 1:
        normed = gated_delta_net_step.step(layer, qkv, z, b, a, past.conv, past.recurrent)
    if normed is None:
        normed = _compute_between(layer, qkv, z, b, a, cache, past, keywords)
    else:
        cache.update_recurrent_state(past.recurrent, layer.layer_idx)
    return projections.project(normed, (layer.out_proj,))[0]


def _compute_between(layer, qkv, z, b, a, cache, past, keywords) -> Tensor:
    """What lies between the projections, operator by operator: [B, T, HV * V]."""
    cu_seqlens, seq_idx = bounds_of(keywords), keywords.get("seq_idx")
    if cu_seqlens is not None:
        seq_idx = None
    heads = _convolve(layer, qkv.transpose(1, 2), z.shape[-1], cache, past, seq_idx, cu_seqlens)
    o, state = _recur(layer, heads, b, a, cache, past, seq_idx, cu_seqlens)
    if cache is not None:
        cache.update_recurrent_state(state, layer.layer_idx)
    return layer.norm(o, _heads(z, o.shape[3])).flatten(2)


def _convolve(layer, x: Tensor, value_dim: int, cache, past: Past, seq_idx, cu_seqlens) -> Heads:
    """Convolution and activation of x [B, C, T] as heads; the cache keeps the last inputs.

    How many heads there are is read from the tensors: the layer may hold only its share of them.
    """
    _require_gathered(layer.conv1d.weight)
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    key_dim = (x.shape[1] - value_dim) // 2
    if past.conv is not None and x.shape[2] == 1:
        mixed = causal_conv1d_update(x, past.conv, weight, bias, layer.activation).transpose(1, 2)
        q, k, v = mixed.split((key_dim, key_dim, value_dim), dim=-1)
        return Heads(_heads(q, layer.head_k_dim), _heads(k, layer.head_k_dim), _heads(v, layer.head_v_dim), False)
    out = convolve_heads(
        x,
        weight,
        bias,
        layer.activation,
        key_dim,
        layer.head_k_dim,
        layer.head_v_dim,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        initial_states=past.conv,
    )
    if cache is not None:
        # No more than the cache keeps: it copies what it is given behind what it has.
        width = layer.conv_kernel_size
        cache.update_conv_state(x[..., max(x.shape[2] - width, 0) :], layer.layer_idx, conv_kernel_size=width)
    return out


def _require_gathered(weight: Tensor) -> None:
    """Raise ValueError for the empty parameter that sharding leaves behind in a module whose forward nobody calls."""
    if weight.dim() != 3:
        raise ValueError(
            f"conv1d.weight has shape {list(weight.shape)}; it must be [channels, 1, width] whenever the layer runs: gather the "
            "parameters of the whole layer together, under DeepSpeed ZeRO-3 by set_z3_leaf_modules(model, [type(layer)])."
        )


def _recur(layer, heads: Heads, b, a, cache, past, seq_idx, cu_seqlens) -> Tuple[Tensor, Optional[Tensor]]:
    """o [B, T, HV, V] and the state behind the last token.

    `flashqla_plan` is an attribute that `flashqla_hub.kernelize(plan=...)` gives to a layer.
    """
    if seq_idx is None:
        options = {
            "use_gate_in_kernel": True,
            "A_log": layer.A_log,
            "dt_bias": layer.dt_bias,
            "use_beta_sigmoid_in_kernel": True,
        }
    else:
        a, b = activate(a, b, layer.A_log, layer.dt_bias, False)
        a, options = restart_where_sequence_changes(a, seq_idx, None), {}
    rule = chunk_gated_delta_rule
    if past.recurrent is not None and heads.q.shape[1] == 1:
        # Where no gradient is wanted the state moves on in its place, and the cache has nothing left to copy.
        rule = fused_recurrent_gated_delta_rule
        options["inplace_final_state"] = not torch.is_grad_enabled()
    else:
        options["plan"] = getattr(layer, "flashqla_plan", "auto")
    return rule(
        heads.q,
        heads.k,
        heads.v,
        g=a,
        beta=b,
        initial_state=past.recurrent,
        output_final_state=cache is not None,
        use_qk_l2norm_in_kernel=not heads.is_normed,
        cu_seqlens=cu_seqlens,
        **options,
    )


def _heads(x: Tensor, size: int) -> Tensor:
    """x [B, T, H * size] as [B, T, H, size], without a copy."""
    return x.view(x.shape[0], x.shape[1], x.shape[2] // size, size)


def _past_of(cache: Optional[Any], layer_idx: int) -> Optional[Past]:
    """What the cache holds for a layer, through the interface of transformers up to 5.20 or from 5.21; None if it has neither."""
    if cache is None:
        return Past()
    if hasattr(cache, "get_conv_state"):
        recording = cache.is_recording_past(layer_idx)
        return Past(cache.get_conv_state(layer_idx), cache.get_recurrent_state(layer_idx), recording)
    if not hasattr(cache, "has_previous_state") or not hasattr(cache, "layers"):
        return None
    states = cache.layers[layer_idx]
    if not cache.has_previous_state(layer_idx):
        return Past(recording=states.record_past)
    return Past(states.conv_states[0], states.recurrent_states[0], states.record_past)


def _explain_unusual(layer, hidden_states, cache, past, attention_mask, keywords) -> Optional[str]:
    """Why a call is left to the forward of the layer's class; None for the usual ones."""
    if past is None:
        return f"a cache of type {type(cache).__name__} has no states that it knows how to read"
    if past.recording:
        return "the cache records the past, so that tokens can be taken back"
    if cache is not None and any(keywords.get(name) is not None for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx")):
        return "packed sequences come with a cache"
    if attention_mask is not None and not _is_padding_mask(attention_mask, hidden_states):
        return f"attention_mask has shape {list(attention_mask.shape)}, not [batch, tokens]"
    if layer.activation not in ACTIVATIONS:
        return f"it does not know the activation {layer.activation!r}"
    if not isinstance(layer.conv1d, nn.Conv1d):
        return f"the convolution is a {type(layer.conv1d).__name__}, not a torch.nn.Conv1d"
    if any(hasattr(parameter, "to_local") for parameter in (layer.conv1d.weight, layer.A_log, layer.dt_bias)):
        return "its parameters are sharded"
    unknown = unknown_keyword(keywords)
    return None if unknown is None else f"it does not know the keyword {unknown}"


def _is_padding_mask(mask: Tensor, hidden_states: Tensor) -> bool:
    batch, tokens = hidden_states.shape[:2]
    return mask.dim() == 2 and mask.shape[0] in (1, batch) and mask.shape[1] >= tokens


_noticed = set()


def _notice(layer: nn.Module, reason: str) -> None:
    """Say once per reason that a call was left to transformers; not while tracing, which warnings would interrupt."""
    name = type(layer).__name__
    if torch.compiler.is_compiling() or (name, reason) in _noticed:
        return
    _noticed.add((name, reason))
    warnings.warn(
        f"{name} of qwen/flashqla leaves a call to the layer's own forward: {reason}. Its functions are served as installed.",
        stacklevel=2,
    )
