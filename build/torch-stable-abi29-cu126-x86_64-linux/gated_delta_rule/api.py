"""Public functions of the gated delta rule: validate, activate gates, call the op."""

from functools import partial
from typing import NamedTuple, Optional, Tuple

from torch import Tensor

from ..sm90 import notice_torch_path
from . import autograd, gate_ops, pool, recurrent_ops, validation

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "fused_recurrent_gated_delta_rule",
]


class ForwardResult(NamedTuple):
    """Outputs of the low-level forward; `residuals` is opaque and only good for the matching backward."""

    o: Tensor
    final_state: Optional[Tensor]
    residuals: Tensor


class BackwardResult(NamedTuple):
    """Gradients of the inputs; `dh0` is None without an initial state."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dh0: Optional[Tensor]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    chunk_indices: Optional[Tensor] = None,
    cp_context: Optional[object] = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    chunk_size: int = 64,
    plan: str = "auto",
    **unknown,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Gated delta rule over whole sequences, by chunks, differentiable.

    Per sequence and value head, with a state S [K, V] that starts at `initial_state` (docs/notation.md; Yang, Kautz,
    Hatamizadeh, "Gated Delta Networks", 2024, equation 10):

        S <- exp(g_t) S;   d = beta_t (v_t - S^T k_t);   S <- S + k_t d^T;   o_t = scale S^T q_t

    Names and meaning are those of FLA's function of the same name.

    Args:
        q, k: [B, T, H, K], bfloat16, float16, float32 or float64. Value head h reads key head h // (HV // H). Keys should
            have norm at most about 1 (see `use_qk_l2norm_in_kernel`): longer keys make the recurrence itself explode. The
            compiled SM90 forward inverts in float16: products of keys above 65,504, or beta |k|^2 far above 2, give
            results that are not finite there before they do on the PyTorch path.
        v: [B, T, HV, V], the dtype of q and k; HV must be a multiple of H.
        g: [B, T, HV], any floating dtype: log decay, at most 0 (-inf forgets everything; positive values are not
            supported). The raw gate input instead if `use_gate_in_kernel`.
        beta: [B, T, HV], any floating dtype: writing strength as given, usually in (0, 1), up to 2. Logits instead if
            `use_beta_sigmoid_in_kernel`.
        scale: factor of the outputs, K ** -0.5 by default.
        initial_state: [N, HV, K, V], any floating dtype, zeros by default; N is B, or the number of packed sequences.
            Never written to.
        output_final_state: also return the state behind each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x / sqrt(|x|^2 + 1e-6).
        use_beta_sigmoid_in_kernel: apply sigmoid to beta, in float32.
        allow_neg_eigval: with the sigmoid, double it, so that beta is in (0, 2).
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64 on q's device: sequences `cu_seqlens[n]:cu_seqlens[n + 1]` packed in the one
            row of the batch (B = 1). The state restarts at each bound; tokens behind the last bound give 0 and get 0
            gradients; empty sequences pass their state through. Its values are checked on the CPU always, and on CUDA
            if the environment variable FLASHQLA_CHECK_CU_SEQLENS is 1, since looking at them waits for the GPU.
        cu_seqlens_cpu, chunk_indices: hints of FLA's interface; no implementation here needs them.
        cp_context: context parallelism across devices is not supported; must be None.
        use_gate_in_kernel: g becomes -exp(A_log) * softplus(g + dt_bias), in float32.
        A_log, dt_bias: [HV], any floating dtype; gradients flow to both.
        chunk_size: tokens a chunk, 16, 32 or 64: a hint that changes the result by rounding only.
        plan: how the SM90 kernels cut long sequences into segments that run side by side. "auto": by lengths and head
            counts, for speed, and large backwards into ranges of chunks, for memory. "invariant": by the sequence's own
            length, so that a sequence gives the same bits in any batch and with its heads spread over any number of GPUs.
            "off": not at all. It changes the result by rounding only, and nothing on the PyTorch path.

    Returns:
        o: [B, T, HV, V], the dtype of v.
        final_state: [N, HV, K, V] float32 (float64 for float64 inputs), or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: one sentence naming the argument, the rule, the value and the way out.

    Notes:
        Computed in float32 (float64 for float64 inputs), also under autocast. The backward recomputes; between forward
        and backward are kept the inputs and, on the PyTorch path, a few states. The SM90 kernels keep the solve of each chunk
        in bfloat16, 6 KB a value head, and of each sequence at least one; where the backward takes a large call in ranges of
        chunks, which changes it by rounding, also states, 64 KB a value head. Second derivatives are not available.
    """
    if cp_context is not None or unknown:
        _refuse_unsupported(cp_context=cp_context, **unknown)
    if not (
        type(output_final_state) is type(use_qk_l2norm_in_kernel) is type(use_beta_sigmoid_in_kernel) is bool
        and type(allow_neg_eigval) is type(state_v_first) is type(use_gate_in_kernel) is bool
    ):
        validation.check_flags(
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            use_gate_in_kernel=use_gate_in_kernel,
        )
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens)
    activates = use_gate_in_kernel or use_beta_sigmoid_in_kernel or allow_neg_eigval
    if not activates and A_log is None and dt_bias is None and validation.are_sound_options(scale, chunk_size):
        # The compiled op checks tensors itself, in a tenth of the time. What it refuses comes back, to get its sentence here.
        direct = autograd.forward_directly(
            *inputs, scale, use_qk_l2norm_in_kernel, chunk_size, state_v_first, output_final_state, plan
        )
        if direct is not None:
            return direct
    validation.check_inputs(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, state_v_first)
    validation.check_plan(plan)
    validation.check_gate_options(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, v)
    if use_gate_in_kernel or use_beta_sigmoid_in_kernel:
        raw = (g if use_gate_in_kernel else None, beta if use_beta_sigmoid_in_kernel else None)
        activated_g, activated_beta = gate_ops.activate(*raw, A_log, dt_bias, allow_neg_eigval)
        g = g if activated_g is None else activated_g
        beta = beta if activated_beta is None else activated_beta
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options = (scale, use_qk_l2norm_in_kernel, chunk_size, state_v_first, output_final_state, plan)
    if activates:
        direct = autograd.forward_directly(*inputs, *options)
        if direct is not None:
            return direct
    return autograd.forward(*inputs, *options)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor] = None,
    gk: Optional[Tensor] = None,
    gv: Optional[Tensor] = None,
    beta: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    *,
    state_indices: Optional[Tensor] = None,
    inplace_final_state: bool = False,
    **unknown,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Gated delta rule for a few tokens, as in generation: the same function as `chunk_gated_delta_rule`.

    On SM90, without gradients, sequences of up to 16 tokens are served by one launch that reads and writes each state once
    and activates gates and strengths on the way; longer ones, and other inputs, as `chunk_gated_delta_rule` serves them.

    Args:
        g: log decay [B, T, HV]; None means 0, a state that never decays.
        beta: writing strength [B, T, HV]; None means 1.
        gk, gv: gates per channel belong to other models; must be None.
        state_indices: [N] int32 or int64: `initial_state` is a pool [slots, HV, K, V] of which sequence n has the state
            `state_indices[n]`. The states are updated in place, so this is for inference, and no two sequences may have
            the same. A sequence whose index lies outside the pool, such as -1, is skipped: its outputs are 0.
        inplace_final_state: without `state_indices`, write the final states where the initial ones [N, HV, K, V] lie; for
            inference too.
        The others as in `chunk_gated_delta_rule`.

    Returns:
        o [B, T, HV, V] and the final state or None, as `chunk_gated_delta_rule`; `initial_state` itself where it is updated in
        place.

    Raises:
        ValueError, TypeError: as `chunk_gated_delta_rule`.
    """
    _refuse_unsupported(gk=gk, gv=gv, **unknown)
    if g is None or beta is None:
        validation.check_values(v)
    validation.check_raw_gates(g, use_gate_in_kernel, beta, use_beta_sigmoid_in_kernel)
    if g is None:
        g = v.new_zeros(v.shape[:3])
    if beta is None:
        beta = v.new_ones(v.shape[:3])
    validation.check_flags(
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        use_gate_in_kernel=use_gate_in_kernel,
        inplace_final_state=inplace_final_state,
    )
    pooled = state_indices is not None
    in_place = pooled or inplace_final_state
    states = None if pooled else initial_state
    validation.check_inputs(q, k, v, g, beta, scale, states, cu_seqlens, 64, state_v_first)
    validation.check_gate_options(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, v)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if pooled:
        validation.check_pool(q, v, initial_state, state_indices, sequences, state_v_first)
    if in_place:
        validation.check_in_place(initial_state)
        name = "state_indices" if pooled else "inplace_final_state"
        validation.check_no_gradient(name, q, k, v, g, beta, A_log, dt_bias, initial_state)
    pool_if_wanted = initial_state if output_final_state else None
    inputs = (q, k, v, g, beta, A_log, dt_bias)
    unsupported = recurrent_ops.explain_unsupported(inputs[:3], inputs[3:], initial_state, sequences, in_place)
    if unsupported is None:
        strength = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else 0.0
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        options = (cu_seqlens, scale, strength, use_qk_l2norm_in_kernel, state_v_first)
        if in_place:
            return recurrent_ops.update(*inputs, initial_state, state_indices, *options), pool_if_wanted
        o, final_state = recurrent_ops.forward(*inputs, initial_state, *options, output_final_state)
        return o, final_state if output_final_state else None

    by_chunks = partial(
        chunk_gated_delta_rule,
        *inputs[:5],
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    if not in_place:
        return by_chunks(initial_state=initial_state, output_final_state=output_final_state)
    if q.is_cuda:
        notice_torch_path("the update of states in place", unsupported)
    return pool.update(by_chunks, initial_state, state_indices, cu_seqlens), pool_if_wanted


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    chunk_size: int = 64,
    plan: str = "auto",
) -> ForwardResult:
    """The forward alone, outside autograd, with what its backward needs.

    Args, raises: as `chunk_gated_delta_rule`, with log decay `g` and activated `beta`.

    Returns:
        `ForwardResult(o, final_state, residuals)`; hand `residuals` to `chunk_gated_delta_rule_bwd`.
    """
    validation.check_flags(
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )
    validation.check_plan(plan)
    validation.check_inputs(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, state_v_first)
    initial_state = autograd.state_k_first(initial_state, state_v_first)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o, final_state, residuals = autograd.forward_alone(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel, chunk_size, plan=plan
    )
    return ForwardResult(o, autograd.public_state(final_state, output_final_state, state_v_first), residuals)


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    residuals: Tensor,
    do: Optional[Tensor],
    dht: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    chunk_size: int = 64,
    plan: str = "auto",
) -> BackwardResult:
    """The backward of `chunk_gated_delta_rule_fwd` called with the same arguments.

    Args:
        residuals: from the forward of the same call.
        do: gradient of o [B, T, HV, V], or None for 0.
        dht: gradient of the final state, in its layout, or None for 0.
        The others as in the forward.

    Returns:
        `BackwardResult(dq, dk, dv, dg, dbeta, dh0)`, each in the dtype and layout of its input.
    """
    validation.check_flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )
    validation.check_plan(plan)
    validation.check_inputs(q, k, v, g, beta, scale, initial_state, cu_seqlens, chunk_size, state_v_first)
    validation.check_gradients(q, v, residuals, do, dht, cu_seqlens, state_v_first)
    state, dht = (autograd.state_k_first(x, state_v_first) for x in (initial_state, dht))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    *grads, dh0 = autograd.backward_alone(
        q, k, v, g, beta, state, cu_seqlens, residuals, do, dht, scale, use_qk_l2norm_in_kernel, chunk_size, plan
    )
    dh0 = autograd.public_state(dh0, initial_state is not None, state_v_first)
    return BackwardResult(*grads, dh0 if dh0 is None else dh0.to(initial_state.dtype))


def _refuse_unsupported(**given) -> None:
    """Raise for arguments that would change the result but are not implemented, and for names nobody knows."""
    reasons = {
        "cp_context": "context parallelism across devices is not implemented",
        "gk": "gates per key channel belong to KDA and GLA",
        "gv": "gates per value channel are not part of the gated delta rule",
    }
    for name, value in given.items():
        if name not in reasons:
            raise TypeError(
                f"{name} is not an argument of the gated delta rule; it would be ignored: remove it or check its spelling."
            )
        if value is not None:
            raise ValueError(f"{name} is given, but {reasons[name]}; leave it out or use FLA for it.")
