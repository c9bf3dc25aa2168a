"""Numbers of the convolution's ops as compiled, against the sum over taps in float64, judged by its result rounded once.

All of the kernels' arithmetic is in float32, so an error may be 1.2 times that of rounding the truth to the dtype of x.
"""

from dataclasses import dataclass

import pytest
import torch

from .shipped_library import find_library, load_ops

LIBRARY = find_library()
HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU"),
    pytest.mark.skipif(LIBRARY is None, reason="there is no library: set FLASHQLA_LIBRARY or run the compile command"),
]

FACTOR, FLOOR = 1.2, 2e-6  # the floor is for gradients of float32 weights


@dataclass(frozen=True)
class Case:
    """One call. `lengths` are of sequences, in turn, of every row; -1 stands for tokens of none."""

    id: str
    batch: int = 2
    tokens: int = 200
    channels: int = 96
    width: int = 4
    bias: bool = True
    silu: bool = True
    lengths: tuple[int, ...] = ()
    states: bool = False
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None
    padding: int = 0


CASES = [
    *(
        Case(f"W{width}-{name}", width=width, dtype=dtype, silu=width % 2 == 0)
        for width in range(1, 9)
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    ),
    *(
        Case(f"T{tokens}-W{width}", tokens=tokens, width=width)
        for tokens in (1, 2, 3, 5, 63, 129)
        for width in (3, 4, 8)
    ),
    *(
        Case(f"states-T{tokens}-W{width}", tokens=tokens, width=width, states=True)
        for tokens in (1, 2, 7, 150)
        for width in (2, 4, 7, 8)
    ),
    Case("states-fp16", states=True, dtype=torch.float16),
    *(
        Case(f"packed-W{width}", width=width, lengths=(1, 2, 3, 0, 60, 1, -1, 1, 40, -9, 82))
        for width in (1, 2, 3, 4, 5, 6, 7, 8)
    ),
    Case("packed-fp16", lengths=(100, -3, 97), dtype=torch.float16),
    Case("packed-none", lengths=(-200,)),
    Case("no-bias", bias=False),
    Case("no-bias-no-silu-packed", bias=False, silu=False, lengths=(150, 50)),
    Case("wide-weights", weight_dtype=torch.float32),
    Case("wide-weights-W3-packed", width=3, weight_dtype=torch.float32, lengths=(77, 123)),
    Case("wide-weights-W8", width=8, weight_dtype=torch.float32, dtype=torch.float16),
    Case("part-of-a-projection", padding=24),
    Case("few-channels", channels=8, tokens=1000),
    Case("many-channels", channels=12_288, batch=1, tokens=70),
    Case("long", channels=2048, batch=1, tokens=5003),
]


@dataclass(frozen=True)
class Call:
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    sequence: torch.Tensor | None
    initial: torch.Tensor | None
    dy: torch.Tensor
    dfinal: torch.Tensor | None


def sequence_of(case):
    """Numbers of the sequences; every third number comes again, so that only changes count."""
    parts = [torch.full((abs(n),), -1 if n < 0 else index % 3) for index, n in enumerate(case.lengths)]
    return torch.cat(parts).int().expand(case.batch, -1).contiguous().cuda()


def make_call(case, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=case.dtype):
        return torch.randn(*shape, generator=generator).to(dtype).cuda()

    weight_dtype = case.weight_dtype or case.dtype
    projection = normal(case.batch, case.tokens, case.channels + case.padding)
    state = (case.batch, case.channels, case.width - 1)
    return Call(
        projection[..., case.padding :],
        normal(case.channels, case.width, dtype=weight_dtype) / 2,
        normal(case.channels, dtype=weight_dtype) if case.bias else None,
        sequence_of(case) if case.lengths else None,
        normal(*state) if case.states else None,
        normal(case.batch, case.tokens, case.channels),
        normal(*state) if case.states else None,
    )


def poison():
    """Freed memory full of NaN, so that what is left unwritten shows."""
    blocks = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(32)]
    del blocks


def forward(ops, case, call):
    poison()
    return ops.sm90_causal_conv1d_fwd(
        call.x, call.weight, call.bias, call.sequence, call.initial, case.silu, not case.lengths, 0
    )


def backward(ops, case, call):
    poison()
    return ops.sm90_causal_conv1d_bwd(
        call.x, call.dy, call.weight, call.bias, call.sequence, call.initial, call.dfinal, case.silu
    )


def truth(case, call):
    """y, final states and gradients of x, weight, bias and initial states, in float64."""
    inputs = (call.x, call.weight, call.bias, call.initial)
    leaves = [None if t is None else t.double().requires_grad_() for t in inputs]
    x, weight, bias, initial = leaves
    batch, tokens, channels = x.shape
    history = case.width - 1
    before = x.new_zeros(batch, history, channels) if initial is None else initial.transpose(1, 2)
    extended = torch.cat([before, x], dim=1)
    z = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for back in range(case.width):
        tap = extended[:, history - back : history - back + tokens]
        if call.sequence is not None:
            change = torch.ones_like(call.sequence, dtype=torch.bool)
            change[:, 1:] = call.sequence[:, 1:] != call.sequence[:, :-1]
            place = torch.arange(tokens, device="cuda").expand(batch, -1)
            start = torch.where(change, place, 0).cummax(1).values
            tap = torch.where((place - back >= start)[..., None], tap, 0)
        z = z + weight[:, history - back] * tap
    y = torch.nn.functional.silu(z) if case.silu else z
    if call.sequence is not None:
        y = torch.where((call.sequence >= 0)[..., None], y, 0)
    final = extended[:, tokens:].transpose(1, 2)
    total = (y * call.dy).sum() + (0 if call.dfinal is None else (final * call.dfinal).sum())
    wanted = [leaf for leaf in leaves if leaf is not None]
    grads = iter(torch.autograd.grad(total, wanted))
    return y.detach(), final.detach(), [None if leaf is None else next(grads) for leaf in leaves]


@pytest.fixture(scope="module")
def ops():
    return load_ops(LIBRARY)


def assert_rounded(actual, expected, name):
    expected_norm = expected.norm().item()
    error = (actual.double() - expected).norm().item()
    yardstick = (expected.to(actual.dtype).double() - expected).norm().item()
    assert error <= max(FACTOR * yardstick, FLOOR * expected_norm), f"{name}: {error:.2e}, yardstick {yardstick:.2e}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_values_and_gradients_are_the_sum_over_taps(ops, case):
    call = make_call(case)
    y, final, grads = truth(case, call)
    actual_y, actual_final = forward(ops, case, call)
    assert_rounded(actual_y, y, "y")
    if case.lengths:
        assert not actual_y[call.sequence < 0].any() and actual_final.shape[0] == 0
    else:
        assert torch.equal(actual_final.double(), final)
    for name, actual, expected in zip(
        ("dx", "dweight", "dbias", "dinitial"), backward(ops, case, call), grads, strict=True
    ):
        if expected is None:
            assert actual.numel() == 0
        else:
            assert_rounded(actual, expected, name)


PARTS = [
    case
    for case in CASES
    if case.id in ("W4-bf16", "W3-fp16", "W8-bf16", "packed-W4", "states-T150-W4", "part-of-a-projection")
]


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.id)
@pytest.mark.parametrize("cuts", [(8,), (64,), (32, 40)], ids=str)
def test_dy_in_parts_gives_the_same_bits(ops, case, cuts):
    """As a split of the output into q, k and v leaves it, each part with strides of its own."""
    call = make_call(case)
    whole = backward(ops, case, call)
    parts = list(call.dy.tensor_split(cuts, dim=-1))
    parts[1] = parts[1].contiguous()
    poison()
    in_parts = ops.sm90_causal_conv1d_bwd(
        call.x, parts[0], call.weight, call.bias, call.sequence, call.initial, call.dfinal, case.silu, *parts[1:]
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, in_parts, strict=True))


REPEATED = [case for case in CASES if case.id in ("long", "packed-W4", "states-T150-W8", "few-channels")]


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.id)
def test_equal_input_gives_equal_bits(ops, case):
    call = make_call(case)
    first = [*forward(ops, case, call), *backward(ops, case, call)]
    for _ in range(20):
        again = [*forward(ops, case, call), *backward(ops, case, call)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("width", [3, 4, 8])
def test_a_neighbour_full_of_nan_changes_no_bit(ops, width):
    """A token of another sequence, and one beyond the width, has no part in a token's value or gradient."""
    case = Case("nan", batch=1, lengths=(50, 50, -20, 80), width=width)
    call, spoilt = make_call(case), make_call(case)
    for start, stop in ((0, 50), (100, 120)):
        spoilt.x[:, start:stop] = torch.nan
        spoilt.dy[:, start:stop] = torch.nan
    clean = [forward(ops, case, call)[0], backward(ops, case, call)[0]]
    dirty = [forward(ops, case, spoilt)[0], backward(ops, case, spoilt)[0]]
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[:, 50:100], b[:, 50:100]) and torch.equal(a[:, 120:], b[:, 120:])
    case = Case("nan", batch=1, width=width)
    call, spoilt = make_call(case), make_call(case)
    spoilt.x[:, 99] = torch.inf
    y, dirty = forward(ops, case, call)[0], forward(ops, case, spoilt)[0]
    assert torch.equal(y[:, :99], dirty[:, :99]) and torch.equal(y[:, 99 + width :], dirty[:, 99 + width :])


def test_a_graph_serves_other_values_and_sequences(ops):
    case = Case("graph", batch=1, lengths=(60, 140))
    call, other = make_call(case), make_call(case, seed=1)
    forward(ops, case, call), backward(ops, case, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [
            *ops.sm90_causal_conv1d_fwd(call.x, call.weight, call.bias, call.sequence, None, True, False, 0),
            *ops.sm90_causal_conv1d_bwd(call.x, call.dy, call.weight, call.bias, call.sequence, None, None, True),
        ]
    other.sequence[:, 30:] = 7
    for name in ("x", "weight", "bias", "sequence", "dy"):
        getattr(call, name).copy_(getattr(other, name))
    graph.replay()
    expected = [*forward(ops, case, other), *backward(ops, case, other)]
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_more_than_two_to_the_31_elements(ops):
    """The last row of a batch, whose elements lie beyond 2^31."""
    case = Case("huge", batch=5, tokens=65_536, channels=8192)
    x = torch.zeros(case.batch, case.tokens, case.channels, dtype=torch.bfloat16, device="cuda")
    small = make_call(Case("last", batch=1, tokens=case.tokens, channels=case.channels))
    x[-1:] = small.x
    y, _ = ops.sm90_causal_conv1d_fwd(x, small.weight, small.bias, None, None, True, False, 0)
    alone, _ = ops.sm90_causal_conv1d_fwd(small.x, small.weight, small.bias, None, None, True, False, 0)
    assert torch.equal(y[-1:], alone)
    del y
    dx = ops.sm90_causal_conv1d_bwd(x, x, small.weight, small.bias, None, None, None, True)[0]
    alone = ops.sm90_causal_conv1d_bwd(small.x, small.x, small.weight, small.bias, None, None, None, True)[0]
    assert torch.equal(dx[-1:], alone)


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("tokens", [1, 3, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("turned", [False, True], ids=["as-allocated", "turned"])
def test_an_update_is_the_forward_behind_a_state(ops, width, tokens, dtype, turned):
    """Rows without a state give 0; states that no row has, and the rest of longer ones, stay as they are."""
    generator = torch.Generator().manual_seed(width)
    channels, slots, length = 200, 6, width + 1

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).cuda()

    x, pool, weight, bias = (
        normal(4, channels, tokens),
        normal(slots, channels, length),
        normal(channels, width),
        normal(channels),
    )
    if turned:
        x, pool = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, pool))
    rows = torch.tensor([5, -1, 0, 3], dtype=torch.int32, device="cuda")
    before = pool.clone()
    y = ops.sm90_causal_conv1d_update(x, pool, weight, bias, rows, True).transpose(1, 2)
    expected = before.clone()
    for row, slot in enumerate(rows.tolist()):
        if slot < 0:
            assert not y[row].any()
            continue
        extended = torch.cat([before[slot], x[row]], dim=-1)
        expected[slot] = extended[:, tokens:]
        z = torch.nn.functional.conv1d(
            extended[None].double(), weight[:, None].double(), bias.double(), groups=channels
        )
        assert_rounded(y[row], torch.nn.functional.silu(z)[0, :, -tokens:], f"row {row}")
    assert torch.equal(pool, expected)


def test_an_update_with_wide_weights_and_no_indices(ops):
    generator = torch.Generator().manual_seed(0)
    x, pool = (torch.randn(3, 64, n, generator=generator).bfloat16().cuda() for n in (2, 3))
    weight = torch.randn(64, 4, generator=generator).cuda()
    extended = torch.cat([pool, x], dim=-1)
    y = ops.sm90_causal_conv1d_update(x, pool, weight, None, None, False).transpose(1, 2)
    expected = torch.nn.functional.conv1d(extended.double(), weight[:, None].double(), groups=64)
    assert_rounded(y, expected, "y")
    assert torch.equal(pool, extended[..., 2:])


TURNED = [
    case
    for case in CASES
    if case.batch * case.tokens * case.channels < 1 << 20 and case.tokens > 1 and not case.padding
]


@pytest.mark.parametrize("case", TURNED, ids=lambda case: case.id)
def test_channels_in_rows_give_the_same_numbers(ops, case):
    """Not only to rounding: both kernels do the same sums."""
    call = make_call(case)
    y, final = forward(ops, case, call)
    wider = torch.nn.functional.pad(call.x.transpose(1, 2), (3, 2), value=torch.nan)[..., 3:-2]
    poison()
    turned_y, turned_final = ops.sm90_causal_conv1d_fwd(
        wider.transpose(1, 2),
        call.weight,
        call.bias,
        call.sequence,
        call.initial,
        case.silu,
        not case.lengths,
        0,
    )
    assert torch.equal(turned_y, y) and torch.equal(turned_final, final)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [(), (77, -3, 120)], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_heads_of_q_and_k_are_normalised(ops, width, lengths, dtype):
    """In the layer's form, before the one rounding; the channels of v are as without."""
    case = Case("heads", channels=640, width=width, lengths=lengths, dtype=dtype, padding=8)
    call = make_call(case)
    y, _, _ = truth(case, call)
    heads = y[..., :384].unflatten(-1, (3, 128))
    y[..., :384] = (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(2)
    poison()
    actual, _ = ops.sm90_causal_conv1d_fwd(call.x, call.weight, call.bias, call.sequence, None, True, False, 384)
    assert_rounded(actual[..., :384], y[..., :384], "q and k")
    plain, _ = ops.sm90_causal_conv1d_fwd(call.x, call.weight, call.bias, call.sequence, None, True, False, 0)
    assert torch.equal(actual[..., 384:], plain[..., 384:])
