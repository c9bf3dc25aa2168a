"""The GatedDeltaNet layer of transformers with FLA's parts in it, each called at its best."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def put_in_fla(layer: "torch.nn.Module", raw_gates: bool) -> None:
    """A forward of the layer from FLA's convolution, gates, gated delta rule and gated norm.

    With `raw_gates` FLA's rule activates the gates itself. FlashQLA's takes none that are raw, so for it they are FLA's own
    kernel for the decay and PyTorch's sigmoid, for which FLA has none outside the rule. A decode step is always FLA's:
    it hands over nothing there.
    """
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate

    head_dim = layer.head_k_dim

    def convolve(qkv, cache, is_step):
        weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        if is_step:
            state = cache.layers[layer.layer_idx].conv_states[0]
            return causal_conv1d_update(qkv, state, weight=weight, bias=bias, activation="silu")[0]
        if cache is not None:
            width = layer.conv_kernel_size
            cache.update_conv_state(qkv.transpose(1, 2)[..., -width:], layer.layer_idx, conv_kernel_size=width)
        return causal_conv1d(qkv, weight, bias, activation="silu")[0]

    def gates_of(hidden_states, is_step) -> dict:
        b, a = layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states)
        if raw_gates or is_step:
            raw = {"g": a, "beta": b, "A_log": layer.A_log, "dt_bias": layer.dt_bias}
            return {**raw, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        return {"g": fused_gdn_gate(a, layer.A_log, layer.dt_bias), "beta": b.sigmoid()}

    def forward(hidden_states, cache_params=None, **_):
        cache, idx = cache_params, layer.layer_idx
        is_step = cache is not None and cache.has_previous_state(idx)
        mixed = convolve(layer.in_proj_qkv(hidden_states), cache, is_step)
        q, k, v = (
            part.unflatten(2, (-1, head_dim))
            for part in mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), dim=2)
        )
        rule: Callable = fused_recurrent_gated_delta_rule if is_step else chunk_gated_delta_rule
        o, state = rule(
            q,
            k,
            v,
            initial_state=cache.layers[idx].recurrent_states[0] if is_step else None,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            **gates_of(hidden_states, is_step),
        )
        if cache is not None:
            cache.update_recurrent_state(state, idx)
        z = layer.in_proj_z(hidden_states).unflatten(2, (-1, head_dim))
        normed = rms_norm_gated(o, z, layer.norm.weight, None, eps=layer.norm.variance_epsilon)
        return layer.out_proj(normed.flatten(2))

    layer.forward = forward
