"""The way to the compiled convolution, on the CPU: what it is handed, and what autograd and tracing make of it.

A stand-in takes the place of the compiled ops; the kernels themselves are tested on an SM90 GPU.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .compare import relative_error
from .inputs import signed
from .test_convolution import naive

CHANNELS, WIDTH = 8, 4


def taps_of(x, width, sequence, initial):
    """[W, B, T, D]: the token j before each token of x [B, T, D], where it belongs to the same sequence; and whether."""
    batch, tokens, channels = x.shape
    initial = x.new_zeros(batch, channels, width - 1) if initial is None else initial.to(x.dtype)
    extended = torch.cat([initial.transpose(1, 2), x], dim=1)
    seen = torch.ones(width, batch, tokens, dtype=torch.bool)
    if sequence is not None:
        for back in range(1, width):
            seen[back, :, :back] = False
            for t in range(back, tokens):
                seen[back, :, t] = (sequence[:, t - back : t] == sequence[:, t : t + 1]).all(dim=1)
        seen &= sequence >= 0
    places = [slice(width - 1 - back, width - 1 - back + tokens) for back in range(width)]
    return extended, torch.stack([extended[:, place] for place in places]) * seen[..., None], seen[..., None], places


def convolve(taps, weight, bias, sequence):
    z = torch.einsum("jbtd,dj->btd", taps, weight.flip(1).double())
    z = z if bias is None else z + bias.double()
    return z if sequence is None else z * (sequence >= 0)[..., None]


def fits_vector_loads(x: Tensor) -> bool:
    strides = [x.stride(axis) for axis in (0, 1)]
    return x.stride(2) == 1 and x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in strides)


def is_turned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) >= x.shape[1] > 1


def is_flat(*tensors) -> bool:
    return all(x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0) for x in tensors)


class StandIn:
    """The library's three ops, in PyTorch; `calls` has the arguments of each call by the op's name."""

    def __init__(self):
        self.calls = []

    def sm90_causal_conv1d_fwd(self, x, weight, bias, sequence, initial, silu, output_final, normed_channels):
        self.calls.append(("fwd", x, weight, bias, sequence, initial))
        assert fits_vector_loads(x) or (is_turned(x) and not normed_channels)
        assert is_flat(weight, bias, sequence, initial)
        assert sequence is None or sequence.dtype == torch.int32
        width = weight.shape[1]
        extended, taps, _, _ = taps_of(x.double(), width, sequence, initial)
        z = convolve(taps, weight, bias, sequence)
        final = extended[:, extended.shape[1] - width + 1 :].transpose(1, 2)[: x.shape[0] if output_final else 0]
        y = F.silu(z) if silu else z
        heads = y[..., :normed_channels].unflatten(-1, (-1, 128)) if normed_channels else y[..., :0]
        norm = (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        y = torch.cat([(heads / norm).flatten(2), y[..., normed_channels:]], dim=-1) if normed_channels else y
        return y.to(x.dtype).contiguous(), final.to(x.dtype).contiguous()

    def sm90_causal_conv1d_bwd(self, x, dy, weight, bias, sequence, initial, dfinal, silu, *others):
        self.calls.append(("bwd", x, dy, weight, bias, sequence, initial, dfinal, *others))
        assert all(fits_vector_loads(rows) for rows in (x, dy, *others))
        assert is_flat(weight, bias, sequence, initial, dfinal)
        dy = torch.cat([dy, *others], dim=-1)
        width = weight.shape[1]
        extended, taps, seen, places = taps_of(x.double(), width, sequence, initial)
        z = convolve(taps, weight, bias, sequence)
        gate = z.sigmoid()
        dz = dy * (gate + z * gate * (1 - gate) if silu else torch.ones_like(z))
        dz = dz if sequence is None else dz * (sequence >= 0)[..., None]
        dweight = torch.einsum("jbtd,btd->dj", taps, dz).flip(1)
        dextended = torch.zeros_like(extended)
        if dfinal is not None:
            dextended[:, extended.shape[1] - width + 1 :] += dfinal.transpose(1, 2)
        for back, place in enumerate(places):
            dextended[:, place] += weight[:, width - 1 - back] * dz * seen[back]
        dinitial = dextended[:, : width - 1].transpose(1, 2)[: 0 if initial is None else x.shape[0]]
        return (
            dextended[:, width - 1 :].to(x.dtype).contiguous(),
            dweight.to(weight.dtype),
            x.new_empty(0) if bias is None else dz.sum((0, 1)).to(weight.dtype),
            dinitial.to(x.dtype).contiguous(),
        )

    def sm90_causal_conv1d_update(self, x, conv_state, weight, bias, rows, silu):
        self.calls.append(("update", x, conv_state, weight, bias, rows))
        assert is_flat(weight, bias, rows) and (rows is None or rows.dtype == torch.int32)
        y = torch.zeros_like(x)
        for row, slot in enumerate(range(x.shape[0]) if rows is None else rows.tolist()):
            if slot >= 0:
                extended = torch.cat([conv_state[slot], x[row]], dim=-1)
                z = F.conv1d(extended[None], weight[:, None].to(x.dtype), bias, groups=x.shape[1])[0]
                y[row] = (F.silu(z) if silu else z)[:, -x.shape[2] :]
                conv_state[slot] = extended[:, x.shape[2] :]
        return y.transpose(1, 2).contiguous()


@pytest.fixture
def compiled(part, monkeypatch) -> StandIn:
    stand_in = StandIn()
    capability = part("causal_conv1d.capability")
    monkeypatch.setattr(capability, "explain_unsupported", lambda *tensors: None)
    monkeypatch.setattr(capability, "explain_unsupported_update", lambda *tensors: None)
    monkeypatch.setattr(part("causal_conv1d.sm90_path"), "ops", stand_in)
    return stand_in


def example(dtype=torch.float32, batch=2, tokens=11, width=WIDTH):
    shapes = ((batch, CHANNELS, tokens), (CHANNELS, width), (CHANNELS,), (batch, CHANNELS, width - 1))
    return [signed(shape, 1100 + i).to(dtype) for i, shape in enumerate(shapes)]


LAYOUTS = {
    "channels first": lambda x: x.contiguous(),
    "more channels first": lambda x: F.pad(x, (3, 2))[..., 3:-2],
    "channels last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a projection": lambda x: F.pad(x.transpose(1, 2), (8, 16))[..., 8:-16].transpose(1, 2),
    "part at an odd place": lambda x: F.pad(x.transpose(1, 2), (3, 5))[..., 3:-5].transpose(1, 2),
    "dense at an odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "one row for the batch": lambda x: x[:1].expand(x.shape),
    "every second token": lambda x: x.repeat_interleave(2, dim=2)[..., ::2],
}
AS_THEY_ARE = {"channels last", "part of a projection"}
TURNED_BY_THE_KERNEL = {"channels first", "more channels first"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 11])
def test_any_layout_reaches_the_kernel_and_y_lies_in_rows(kernel, compiled, layout, batch, tokens):
    x, weight, bias, _ = example(batch=batch, tokens=tokens)
    x = LAYOUTS[layout](x)
    y = kernel.causal_conv1d_fn(x, weight, bias, activation="silu")
    assert relative_error(y, naive(x.double(), weight.double(), bias.double(), "silu")) <= 1e-6
    assert y.transpose(1, 2).is_contiguous()
    [(_, handed, *_)] = compiled.calls
    if layout in AS_THEY_ARE or (layout in TURNED_BY_THE_KERNEL and tokens > 1):
        assert handed.data_ptr() == x.data_ptr(), "not copied"


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("boundaries", ["none", "states", "cu_seqlens", "seq_idx"])
def test_values_and_gradients_are_those_of_the_pytorch_path(kernel, compiled, part, silu, with_bias, boundaries):
    x, weight, bias, initial = example(batch=1)
    tensors = [x, weight, bias if with_bias else None, initial if boundaries == "states" else None]
    options = {"activation": "silu" if silu else None, "return_final_states": boundaries == "states"}
    if boundaries == "cu_seqlens":
        options["cu_seqlens"] = torch.tensor([0, 4, 4, 9])
    if boundaries == "seq_idx":
        options["seq_idx"] = torch.tensor([[0, 0, 0, 1, 1, -1, -1, 0, 0, 0, 0]])

    def results(dtype):
        leaves = [None if t is None else t.to(dtype).requires_grad_() for t in tensors]
        first, second, third, fourth = leaves
        out = kernel.causal_conv1d_fn(first, second, third, initial_states=fourth, **options)
        out = list(out) if isinstance(out, tuple) else [out]
        weights = [signed(tuple(t.shape), 1200 + i).to(dtype) for i, t in enumerate(out)]
        total = sum((t * w).sum() for t, w in zip(out, weights, strict=True))
        return [*out, *torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])]

    fast = results(torch.float32)
    assert [call[0] for call in compiled.calls] == ["fwd", "bwd"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part("causal_conv1d.capability"), "explain_unsupported", lambda *tensors: "not now")
        slow = results(torch.float64)
    for actual, expected in zip(fast, slow, strict=True):
        assert actual.dtype == torch.float32 and relative_error(actual, expected) <= 1e-5


def test_weights_of_another_dtype_stay_wide_and_get_wide_gradients(kernel, compiled):
    x, weight, bias, _ = example(torch.bfloat16)
    weight, bias = weight.float().requires_grad_(), bias.requires_grad_()
    kernel.causal_conv1d_fn(x, weight, bias, activation="silu").float().sum().backward()
    [(_, _, w, b, *_), _] = compiled.calls
    assert (w.dtype, b.dtype) == (torch.float32, torch.float32)
    assert (weight.grad.dtype, bias.grad.dtype) == (torch.float32, torch.bfloat16)


def test_a_longer_initial_state_counts_from_its_end(kernel, compiled):
    x, weight, bias, initial = example()
    longer = F.pad(initial, (2, 0), value=100.0).requires_grad_()
    y, final = kernel.causal_conv1d_fn(x, weight, bias, initial_states=longer, return_final_states=True)
    assert torch.equal(y, kernel.causal_conv1d_fn(x, weight, bias, initial_states=initial))
    (y.sum() + final.sum()).backward()
    assert not longer.grad[..., :2].any() and longer.grad[..., 2:].any()


def test_an_unused_output_needs_no_gradient(kernel, compiled):
    x, weight, bias, _ = example()
    x.requires_grad_()
    _, final = kernel.causal_conv1d_fn(x, weight, bias, return_final_states=True)
    final.sum().backward()
    assert x.grad.sum() == x.shape[0] * CHANNELS * (WIDTH - 1)


def test_the_second_derivative_is_refused(kernel, compiled):
    x, weight, bias, _ = example()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(kernel.causal_conv1d_fn(x, weight, bias).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="causal_conv1d_fn has no second derivative"):
        dx.sum().backward()


def test_compile_traces_forward_and_backward_in_one_graph(kernel, compiled):
    x, weight, bias, _ = example()
    x.requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, weight, bias):
        return kernel.causal_conv1d_fn(x, weight, bias, activation="silu").transpose(1, 2) * 2

    y = layer(x, weight, bias)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(2 * naive(x.double(), weight.double(), bias.double(), "silu").sum(), x)
    assert relative_error(dx, expected) <= 1e-5


@pytest.mark.parametrize("indices", [None, [2, -1]])
@pytest.mark.parametrize("shape", [(2, CHANNELS), (2, CHANNELS, 3)])
def test_an_update_moves_the_states_on_in_place(kernel, compiled, part, indices, shape):
    _, weight, bias, _ = example()
    x, pool = signed(shape, 1301).float(), signed((2 if indices is None else 3, CHANNELS, WIDTH), 1302).float()
    indices = None if indices is None else torch.tensor(indices)
    other = pool.clone()
    y = kernel.causal_conv1d_update(x, pool, weight, bias, "silu", conv_state_indices=indices)
    assert [call[0] for call in compiled.calls] == ["update"] and y.shape == x.shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part("causal_conv1d.capability"), "explain_unsupported_update", lambda *tensors: "not now")
        expected = kernel.causal_conv1d_update(x, other, weight, bias, "silu", conv_state_indices=indices)
    assert relative_error(y, expected) <= 1e-6 and torch.equal(pool, other)


def test_a_compiled_update_changes_the_state_of_the_caller(kernel, compiled):
    _, weight, bias, _ = example()
    x, pool = signed((2, CHANNELS, 1), 1303).float(), signed((2, CHANNELS, WIDTH), 1304).float()
    other = pool.clone()
    step = torch.compile(
        lambda *tensors: kernel.causal_conv1d_update(*tensors, "silu"), fullgraph=True, backend="aot_eager"
    )
    y = step(x, pool, weight, bias)
    assert torch.equal(y, kernel.causal_conv1d_update(x, other, weight, bias, "silu")) and torch.equal(pool, other)


class Stub(SimpleNamespace):
    """What the capability looks at of a CUDA tensor."""

    def __init__(self, *shape, dtype=torch.bfloat16, device="cuda:0", requires_grad=False):
        super().__init__(
            shape=shape, dtype=dtype, device=torch.device(device), is_cuda=device != "cpu", requires_grad=requires_grad
        )


X, STATE, WEIGHT = Stub(1, 16, 5), Stub(1, 16, 4), Stub(16, 4)


@pytest.fixture
def capability(part, monkeypatch):
    sm90 = part("sm90")
    monkeypatch.setattr(sm90, "ops", SimpleNamespace(sm90_causal_conv1d_fwd=None))
    monkeypatch.setattr(sm90, "_capability", lambda index: (9, 0))
    return part("causal_conv1d.capability")


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (X, WEIGHT, None),
        (X, Stub(16, 1, dtype=torch.float32), None),
        (X, Stub(16, 8, dtype=torch.float16), None),
        (Stub(1, 16, 5, device="cpu"), WEIGHT, "the tensors are on cpu, and the SM90 kernels run on CUDA"),
        (
            Stub(1, 16, 5, dtype=torch.float32),
            WEIGHT,
            "x has dtype torch.float32, and the SM90 kernels take bfloat16 and float16",
        ),
        (
            X,
            Stub(16, 4, dtype=torch.float64),
            "weight has dtype torch.float64, and the SM90 kernels take float32 at most",
        ),
        (X, Stub(16, 9), "the width is 9, and the SM90 kernels take 1 to 8"),
        (Stub(1, 12, 5), WEIGHT, "x has 12 channels, and the SM90 kernels take multiples of 8"),
    ],
)
def test_every_reason_against_the_compiled_forward(capability, x, weight, reason):
    assert capability.explain_unsupported(x, weight) == reason


@pytest.mark.parametrize(
    ("x", "state", "weight", "reason"),
    [
        (X, STATE, WEIGHT, None),
        (Stub(1, 13, 5), Stub(1, 13, 4), Stub(13, 4), None),
        (
            X,
            Stub(1, 16, 4, dtype=torch.float32),
            WEIGHT,
            "conv_state has dtype torch.float32 and x torch.bfloat16, and the SM90 kernel takes the same",
        ),
        (
            X,
            STATE,
            Stub(16, 4, requires_grad=True),
            "a gradient may be asked for, and the SM90 kernel is for inference",
        ),
    ],
)
def test_every_reason_against_the_compiled_update(capability, x, state, weight, reason):
    assert capability.explain_unsupported_update(x, state, weight, None) == reason
    if reason is not None and weight.requires_grad:
        with torch.no_grad():
            assert capability.explain_unsupported_update(x, state, weight, None) is None


HEADS = {"key_channels": 128, "head_k_dim": 128, "head_v_dim": 64}
BOUNDARIES = {
    "none": {},
    "states": {"initial_states": signed((1, 384, 5), 1404).float()},
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 3, 6])},
    "seq_idx": {"seq_idx": torch.tensor([[0, 0, 1, 1, -1, 2, 2]])},
}


def heads_example(width=WIDTH):
    return signed((1, 384, 7), 1401).float(), signed((384, width), 1402).float(), signed((384,), 1403).float()


def normalized(heads):
    if heads.is_normed:
        return heads
    q, k = (z * torch.rsqrt(z.square().sum(-1, keepdim=True) + 1e-6) for z in heads[:2])
    return heads._replace(q=q, k=k, is_normed=True)


@pytest.mark.parametrize("boundaries", BOUNDARIES)
def test_heads_in_one_pass_are_those_of_the_separate_operations(part, compiled, boundaries):
    convolve_heads = part("causal_conv1d.heads").convolve_heads
    tensors = heads_example()
    fast = convolve_heads(*tensors, "silu", **HEADS, **BOUNDARIES[boundaries])
    assert [call[0] for call in compiled.calls] == ["fwd"] and fast.is_normed
    rows = fast.q.data_ptr(), fast.k.data_ptr(), fast.v.data_ptr()
    assert [(b - a) // 4 for a, b in pairwise(rows)] == [128, 128], "parts of one row"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part("causal_conv1d.capability"), "explain_unsupported", lambda *tensors: "not now")
        slow = convolve_heads(*tensors, "silu", **HEADS, **BOUNDARIES[boundaries])
    assert slow.v.shape == (1, 7, 2, 64) and not slow.is_normed
    for actual, expected in zip(fast[:3], normalized(slow)[:3], strict=True):
        assert relative_error(actual, expected) <= 1e-5


@pytest.mark.parametrize("boundaries", ["none", "cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_gradients_of_q_k_and_v_come_back_one_by_one(part, compiled, boundaries, is_traced):
    """They reach the kernel as they lie, and their parts of dx, dweight and dbias are one tensor each."""
    convolve_heads = part("causal_conv1d.heads").convolve_heads

    def layer(*tensors):
        return convolve_heads(*tensors, "silu", **HEADS, **BOUNDARIES[boundaries])[:3]

    def results(dtype, layer=layer):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in heads_example()]
        outputs = layer(*leaves)
        grads = [signed(tuple(t.shape), 1420 + i).to(dtype) for i, t in enumerate(outputs)]
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    fast = results(torch.float32, torch.compile(layer, fullgraph=True, backend="aot_eager") if is_traced else layer)
    assert [call[0] for call in compiled.calls] == ["fwd", "fwd", "fwd", "bwd"]
    dy, others = compiled.calls[-1][2], compiled.calls[-1][8:]
    assert [part.shape[-1] for part in (dy, *others)] == [128, 128, 128]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part("causal_conv1d.capability"), "explain_unsupported", lambda *tensors: "not now")
        slow = results(torch.float64)
    for actual, expected in zip(fast, slow, strict=True):
        assert actual.shape == expected.shape and relative_error(actual, expected) <= 1e-5


@pytest.mark.parametrize("size", [{"head_k_dim": 64}, {"width": 5}])
def test_heads_of_other_sizes_and_widths_are_left_to_the_rule_to_normalise(part, compiled, size):
    heads = HEADS | {"head_k_dim": size.get("head_k_dim", 128)}
    found = part("causal_conv1d.heads").convolve_heads(*heads_example(size.get("width", 4)), "silu", **heads)
    assert not found.is_normed and found.q.shape[-1] == found.k.shape[-1] == heads["head_k_dim"]


def test_autograd_sees_that_an_update_has_written(kernel, compiled, monkeypatch):
    """The library writes behind PyTorch's back."""
    monkeypatch.setattr(
        compiled, "sm90_causal_conv1d_update", lambda x, *others: x.transpose(1, 2).clone(), raising=False
    )
    _, weight, bias, _ = example()
    x, state = signed((2, CHANNELS, 1), 1305).float(), signed((2, CHANNELS, WIDTH), 1306).float()
    used = (state * torch.ones((), requires_grad=True).expand_as(state)).sum()
    kernel.causal_conv1d_update(x, state, weight, bias)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()
