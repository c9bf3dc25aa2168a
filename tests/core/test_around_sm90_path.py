"""The way to the compiled norm, gates and decode step, on the CPU: reasons, what the ops are handed, and autograd.

Stand-ins take the place of the compiled ops; the kernels themselves are tested on an SM90 GPU.
"""

from types import SimpleNamespace

import pytest
import torch

from flashqla_hub.reference import gated_delta_rule

from .compare import relative_error
from .test_side_effects import VIEWS


def with_gaps(x):
    """The same numbers in a batch whose rows lie apart."""
    wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
    return wide[:, : x.shape[1]]


def columns_apart(x):
    """The same numbers with every second column of memory between them."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]


LAYOUTS = {"plain": lambda x: x, "gaps": with_gaps, "columns": columns_apart, **VIEWS}


class Stub(SimpleNamespace):
    """What the explanations look at of a CUDA tensor."""

    def __init__(self, *shape, dtype=torch.bfloat16, grad=False, contiguous=True):
        super().__init__(shape=shape, dtype=dtype, device=torch.device("cuda:0"), is_cuda=True, requires_grad=grad)
        self.is_contiguous = lambda: contiguous


@pytest.fixture
def gpu(part, monkeypatch):
    """Pretend that there is an SM90 GPU and that the library has every op."""
    sm90 = part("sm90")
    names = ("sm90_rms_norm_gated_fwd", "sm90_gated_delta_gates_fwd", "sm90_fused_recurrent_fwd")
    monkeypatch.setattr(sm90, "ops", SimpleNamespace(**dict.fromkeys(names)))
    monkeypatch.setattr(sm90, "_capability", lambda index: (9, 0))


ROW, WIDE = Stub(3, 128), Stub(128, dtype=torch.float32)
NORMS = {
    "served": ((ROW, ROW, Stub(128), None), None),
    "a float32 weight": ((ROW, ROW, WIDE, None), None),
    "float32": (
        (Stub(3, 128, dtype=torch.float32), ROW, WIDE, None),
        "x has dtype torch.float32, and the SM90 kernels",
    ),
    "another gate": ((ROW, Stub(3, 128, dtype=torch.float16), WIDE, None), "g has dtype torch.float16 and x torch.bf"),
    "another weight": (
        (ROW, ROW, Stub(128, dtype=torch.float16), None),
        "weight has dtype torch.float16, and the SM90",
    ),
    "another size": ((Stub(3, 64), Stub(3, 64), Stub(64), None), "D is 64, and the SM90 kernels take 128"),
    "a bias": ((ROW, ROW, WIDE, WIDE), "there is a bias, and the SM90 kernels have none"),
    "six dimensions": ((Stub(1, 1, 1, 2, 2, 128), ROW, WIDE, None), "x has 6 dimensions, and the SM90 kernels take"),
}


@pytest.mark.parametrize("case", NORMS)
def test_every_reason_of_the_norm(part, gpu, monkeypatch, case):
    arguments, words = NORMS[case]
    reason = part("gated_norm.capability").explain_unsupported(*arguments)
    assert reason is None if words is None else reason.startswith(words.replace("torch.bf", "torch.bfloat16"))


A, HEADS = Stub(1, 5, 4), Stub(4, dtype=torch.float32)
GATES = {
    "served": ((A, A, HEADS, HEADS), None),
    "float32": ((Stub(1, 5, 4, dtype=torch.float32), None, HEADS, None), None),
    "beta alone": ((None, A, None, None), None),
    "float64": ((Stub(1, 5, 4, dtype=torch.float64), None, HEADS, None), "the gates have dtype torch.float64, and the"),
    "two dtypes": ((A, Stub(1, 5, 4, dtype=torch.float32), HEADS, None), "g has dtype torch.bfloat16 and beta torch.f"),
    "another parameter": ((A, A, HEADS, Stub(4, dtype=torch.float16)), "dt_bias has dtype torch.float16, and the SM90"),
}


@pytest.mark.parametrize("case", GATES)
def test_every_reason_of_the_gates(part, gpu, case):
    arguments, words = GATES[case]
    reason = part("gated_delta_rule.gate_ops").explain_unsupported(*arguments)
    assert reason is None if words is None else reason.startswith(words)


Q = Stub(2, 1, 1, 128)
PLAIN = (Stub(2, 1, 1), Stub(2, 1, 1, dtype=torch.float32), HEADS, HEADS)
POOL = Stub(9, 1, 128, 128, dtype=torch.float32)
STEPS = {
    "served": (((Q, Q, Q), PLAIN, POOL, 2, False), None),
    "a pool": (((Q, Q, Q), PLAIN, Stub(9, 1, 128, 128), 2, True), None),
    "a longer call in a pool": (((Stub(2, 99, 1, 128),) * 3, PLAIN, POOL, 2, True), None),
    "float32": (((Stub(2, 1, 1, 128, dtype=torch.float32), Q, Q), PLAIN, None, 2, False), "q has dtype torch.float32"),
    "small keys": (
        ((Stub(2, 1, 1, 64), Q, Q), PLAIN, None, 2, False),
        "K is 64, and the SM90 kernels take head size 128",
    ),
    "large values": (((Q, Q, Stub(2, 1, 1, 256)), PLAIN, None, 2, False), "V is 256, and the SM90 kernels take head"),
    "a gate of float64": (
        ((Q, Q, Q), (Stub(2, 1, 1, dtype=torch.float64), *PLAIN[1:]), None, 2, False),
        "g has dtype torch.float64, and the SM90 kernels take that of q or float32",
    ),
    "a pool of float16": (
        ((Q, Q, Q), PLAIN, Stub(9, 1, 128, 128, dtype=torch.float16), 2, True),
        "the states have dtype torch.float16",
    ),
    "a turned pool": (
        ((Q, Q, Q), PLAIN, Stub(9, 1, 128, 128, contiguous=False), 2, True),
        "the states are not contiguous",
    ),
    "no value heads": (((Q, Q, Stub(2, 1, 0, 128)), PLAIN, None, 2, False), "there are no value heads, and the SM90"),
    "a gradient": (((Q, Stub(2, 1, 1, 128, grad=True), Q), PLAIN, None, 2, False), "a gradient may be asked for"),
    "many tokens": (((Stub(2, 17, 1, 128),) * 3, PLAIN, None, 2, False), "sequences have more than 16 tokens"),
    "many packed tokens": (((Stub(1, 49, 1, 128),) * 3, PLAIN, None, 3, False), "sequences have more than 16 tokens"),
}


@pytest.mark.parametrize("case", STEPS)
def test_every_reason_of_the_decode_step(part, gpu, case):
    arguments, words = STEPS[case]
    reason = part("gated_delta_rule.recurrent_ops").explain_unsupported(*arguments)
    assert reason is None if words is None else reason.startswith(words)


@pytest.fixture
def norm(kernel, part, monkeypatch):
    """Serve norms by a stand-in for the compiled ops; returns what they were handed."""
    seen, torch_path = [], part("gated_norm.torch_path")

    def forward(x, g, weight, eps, is_silu):
        seen.append(("forward", x, g, weight))
        return torch_path.forward(x, g, weight, None, "silu" if is_silu else "sigmoid", eps)

    def backward(dy, x, g, weight, eps, is_silu):
        """In closed form: autograd does not look into an op."""
        seen.append(("backward", dy, x, g, weight))
        dy, wide_x, wide_g, w = (z.double() for z in (dy, x, g, weight))
        inverse = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
        normed, opening = wide_x * inverse, wide_g.sigmoid()
        slope = opening * (1 - opening)
        act = wide_g * opening if is_silu else opening
        dg = dy * w * normed * (opening + wide_g * slope if is_silu else slope)
        along = dy * act * w
        dx = inverse * (along - normed * (along * normed).mean(-1, keepdim=True))
        dweight = (dy * act * normed).sum(dim=tuple(range(x.dim() - 1)))
        return dx.to(x.dtype), dg.to(g.dtype), dweight.to(weight.dtype)

    compiled = SimpleNamespace(sm90_rms_norm_gated_fwd=forward, sm90_rms_norm_gated_bwd=backward)
    monkeypatch.setattr(part("gated_norm.sm90_path"), "ops", compiled)
    monkeypatch.setattr(part("gated_norm.api"), "explain_unsupported", lambda *tensors: None)
    return seen


def step_of_norm(function, x, g, weight, activation):
    inputs = [z.detach().requires_grad_() for z in (x, g, weight)]
    y = function(*inputs, None, activation, 1e-6)
    return [y.detach(), *torch.autograd.grad(y.sum() + (y * y).sum(), inputs)]


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_compiled_norm_gets_rows_it_can_load_and_gradients_are_right(kernel, part, norm, layout, activation):
    x, g = (torch.randn(2, 5, 3, 16).bfloat16() for _ in range(2))
    x, g = LAYOUTS[layout](x), LAYOUTS[layout](g)
    weight = torch.randn(16)
    ours = step_of_norm(kernel.rms_norm_gated, x, g, weight, activation)
    for one, other in zip(
        ours, step_of_norm(part("gated_norm.torch_path").forward, x, g, weight, activation), strict=True
    ):
        assert relative_error(one, other) <= 1e-2, "two roundings to bfloat16 apart"
    assert [name for name, *_ in norm] == ["forward", "backward"]
    for _, *tensors in norm:
        for rows in tensors[:-1]:
            assert rows.data_ptr() % 16 == 0 and rows.stride(-1) == 1
            assert rows.stride(0) == rows.shape[1] * rows.stride(1), "the batch is one run"


def test_a_part_of_a_projection_is_not_copied(kernel, norm):
    x, g = torch.randn(2, 5, 3, 32).bfloat16().split(16, dim=-1)
    kernel.rms_norm_gated(x, g, torch.ones(16))
    _, seen_x, seen_g, _ = norm[0]
    assert seen_x.data_ptr() == x.data_ptr() and seen_g.data_ptr() == g.data_ptr()


def test_a_second_derivative_is_refused_in_one_sentence(kernel, norm):
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    y = kernel.rms_norm_gated(x, torch.ones(4, 16).bfloat16(), torch.ones(16))
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm_gated has no second derivative on the SM90 kernels"):
        dx.float().sum().backward()


@pytest.fixture
def gates(part, monkeypatch):
    """Activate gates by a stand-in for the compiled ops."""
    module = part("gated_delta_rule.gate_ops")

    def outputs(a, b, A_log, dt_bias, strength):
        raw = a if a is None or dt_bias is None else a.float() + dt_bias.float()
        g = None if a is None else -A_log.float().exp() * torch.nn.functional.softplus(raw.float())
        return g, None if b is None else strength * b.float().sigmoid()

    def forward(*arguments):
        return tuple(torch.empty(0) if x is None else x for x in outputs(*arguments))

    def backward(dg, dbeta, a, b, A_log, dt_bias, strength):
        """In closed form: autograd does not look into an op."""
        da = db = torch.empty(0)
        sums = torch.zeros(2, (b if a is None else a).shape[-1])
        if a is not None:
            x = a if dt_bias is None else a + dt_bias
            da = -dg * A_log.exp() * x.sigmoid()
            sums = torch.stack([(dg * outputs(a, None, A_log, dt_bias, 1)[0]).sum((0, 1)), da.sum((0, 1))])
        if b is not None:
            db = dbeta * strength * b.sigmoid() * (1 - b.sigmoid())
        return da, db, sums

    real = module.ops
    stand_in = SimpleNamespace(
        sm90_gated_delta_gates_fwd=forward,
        sm90_gated_delta_gates_bwd=backward,
        gated_delta_gates_fwd=real.gated_delta_gates_fwd,
        gated_delta_gates_bwd=real.gated_delta_gates_bwd,
    )
    monkeypatch.setattr(module, "ops", stand_in)
    monkeypatch.setattr(module, "explain_unsupported", lambda *tensors: None)
    return module


@pytest.mark.parametrize("used", ["both", "g", "beta"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_gradients_reach_every_gate_and_parameter(part, gates, used, has_bias):
    torch_path = part("gated_delta_rule.gates")
    tensors = [torch.randn(2, 7, 3), torch.randn(2, 7, 3), torch.randn(3), torch.randn(3) if has_bias else None]

    def step(activate):
        inputs = [x if x is None else x.detach().requires_grad_() for x in tensors]
        g, beta = activate(*inputs)
        loss = sum((x * x).sum() for name, x in (("g", g), ("beta", beta)) if used in ("both", name))
        given = [x for x in inputs if x is not None]
        return [g, beta, *torch.autograd.grad(loss, given, allow_unused=True)]

    ours = step(lambda a, b, A_log, dt_bias: gates.activate(a, b, A_log, dt_bias, True))
    expected = step(lambda a, b, A, d: (torch_path.log_decay(a, A, d), torch_path.writing_strength(b, True)))
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or relative_error(one, other) <= 1e-6


@pytest.fixture
def decode(part, monkeypatch):
    """Serve decode steps by a stand-in for the compiled op; returns the arguments it was handed."""
    module, seen = part("gated_delta_rule.recurrent_ops"), []

    def forward(q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, scale, strength, l2norm, v_first, wanted):
        seen.append({"q": q, "k": k, "v": v, "g": g, "beta": beta, "wanted": wanted})
        if A_log is not None:
            g = -A_log.exp() * torch.nn.functional.softplus(g if dt_bias is None else g + dt_bias)
        beta = strength * beta.sigmoid() if strength else beta
        o, state = gated_delta_rule(
            *(x.double() for x in (q, k, v, g, beta)),
            scale=scale,
            initial_state=initial.mT if v_first and initial is not None else initial,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm=l2norm,
        )
        state = (state.mT if v_first else state).float()
        return o.to(v.dtype), state if wanted else state[:0]

    monkeypatch.setattr(module, "ops", SimpleNamespace(sm90_fused_recurrent_fwd=forward))
    monkeypatch.setattr(module, "explain_unsupported", lambda *arguments: None)
    return seen


OPTIONS = {
    "plain": {},
    "values first": {"state_v_first": True},
    "no final state": {"output_final_state": False},
    "raw": {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "scale": {"scale": 0.3, "use_qk_l2norm_in_kernel": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", OPTIONS)
def test_a_decode_step_equals_the_chunk_form(kernel, decode, case, layout):
    options = {"output_final_state": True, **OPTIONS[case]}
    q, k, v = (torch.randn(2, 3, heads, 16) / 4 for heads in (1, 1, 2))
    g, beta = -torch.rand(2, 3, 2), torch.rand(2, 3, 2)
    state = torch.randn(2, 2, 16, 16)
    if "use_gate_in_kernel" in options:
        options |= {"A_log": torch.randn(2), "dt_bias": torch.randn(2)}
    tensors = [LAYOUTS[layout](x) for x in (q, k, v, g, beta)]
    o, final = kernel.fused_recurrent_gated_delta_rule(
        *tensors[:3], g=tensors[3], beta=tensors[4], initial_state=state, **options
    )
    expected_o, expected = kernel.chunk_gated_delta_rule(*tensors, initial_state=state, **options)
    assert len(decode) == 1
    assert relative_error(o, expected_o) <= 2e-5
    assert (final is None) == (expected is None)
    assert final is None or relative_error(final, expected) <= 2e-5
    for name in ("q", "k", "v"):
        rows = decode[0][name]
        assert rows.data_ptr() % 16 == 0 and rows.stride(3) == 1 and rows.stride(0) == rows.shape[1] * rows.stride(1)
    for name in ("g", "beta"):
        gate = decode[0][name]
        assert gate.stride(2) == 1 and gate.stride(0) == gate.shape[1] * gate.stride(1)


@pytest.mark.parametrize("start", [0, 1])
def test_states_of_a_pool_are_moved_on_wherever_they_lie(part, monkeypatch, start):
    """The library wants 16-byte addresses, and writes behind PyTorch's back."""
    module, addresses = part("gated_delta_rule.recurrent_ops"), []

    def update(*arguments):
        pool = arguments[7]
        addresses.append(pool.data_ptr())
        pool.numpy()[:] = 5
        return torch.zeros(2, 1, 1, 128)

    monkeypatch.setattr(module, "ops", SimpleNamespace(sm90_fused_recurrent_update=update))
    row, gate = torch.zeros(2, 1, 1, 128), torch.zeros(2, 1, 1)
    pool = torch.zeros(1 + 3 * 128 * 128)[start : start + 3 * 128 * 128].view(3, 1, 128, 128)
    version = pool._version
    module.fused_recurrent_update(row, row, row, gate, gate, None, None, pool, None, None, 1.0, 0.0, False, False)
    assert addresses[0] % 16 == 0 and bool((pool == 5).all()) and pool._version > version


def test_a_weight_inside_a_flat_buffer_is_aligned(part, monkeypatch):
    path, seen = part("gated_norm.sm90_path"), []
    record = SimpleNamespace(
        sm90_rms_norm_gated_fwd=lambda x, g, weight, *options: seen.append(weight),
        sm90_rms_norm_gated_bwd=lambda dy, x, g, weight, *options: seen.append(weight),
    )
    monkeypatch.setattr(path, "ops", record)
    x, weight = torch.randn(3, 128).bfloat16(), torch.randn(129)[1:]
    path.forward(x, x, weight, 1e-6, True)
    path.backward(x, x, x, weight, 1e-6, True)
    assert len(seen) == 2 and all(w.data_ptr() % 16 == 0 and torch.equal(w, weight) for w in seen)


def test_the_notice_of_the_pytorch_path_does_not_break_a_graph(part):
    notice = part("sm90").notice_torch_path

    def step(x):
        notice("an operator", "a reason that no other test gives")
        return x + 1

    assert torch.compile(step, fullgraph=True, backend="eager")(torch.zeros(1)).item() == 1
