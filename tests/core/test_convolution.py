"""Laws of the short causal convolution, against a loop over tokens and taps in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .compare import assert_fingerprint, relative_error
from .inputs import signed

BOUNDS = [0, 5, 5, 6, 12, 17]  # in a row of 20 tokens
SEQUENCE = [0] * 5 + [2] + [3] * 6 + [4] * 5 + [-1] * 3


def naive(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, sequence: Tensor | None = None
) -> Tensor:
    """y[t] = act(bias + sum_j weight[W - 1 - j] x[t - j]) over tokens of one sequence; 0 where the sequence is negative."""
    batch, channels, tokens = x.shape
    width = weight.shape[1]
    rows = []
    for b in range(batch):
        columns = []
        for t in range(tokens):
            total = torch.zeros(channels, dtype=x.dtype) if bias is None else bias.clone()
            for back in range(min(width, t + 1)):
                if sequence is None or (sequence[b, t - back : t] == sequence[b, t]).all():
                    total = total + weight[:, width - 1 - back] * x[b, :, t - back]
            silent = sequence is not None and sequence[b, t] < 0
            columns.append(torch.zeros_like(total) if silent else F.silu(total) if activation else total)
        rows.append(torch.stack(columns, dim=-1))
    return torch.stack(rows)


def example(width: int = 4, batch: int = 2, tokens: int = 20, seed: int = 950) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and a gradient of y, of three channels."""
    shapes = ((batch, 3, tokens), (3, width), (3,), (batch, 3, tokens))
    return tuple(signed(shape, seed + i) for i, shape in enumerate(shapes))


def gradients(function, tensors: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return list(torch.autograd.grad(function(*leaves), leaves, dy))


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_values_and_gradients(kernel, width, activation, tokens):
    x, weight, bias, dy = example(width, tokens=tokens)

    def fast(x, weight, bias):
        return kernel.causal_conv1d_fn(x, weight, bias, activation=activation)

    def slow(x, weight, bias):
        return naive(x, weight, bias, activation)

    assert relative_error(fast(x, weight, bias), slow(x, weight, bias)) <= 1e-12
    for actual, expected in zip(
        gradients(fast, (x, weight, bias), dy), gradients(slow, (x, weight, bias), dy), strict=True
    ):
        assert relative_error(actual, expected) <= 1e-12


def test_a_number_that_comes_again_begins_another_sequence(kernel):
    x, weight, bias, _ = example(8, batch=1, tokens=12)
    sequence = torch.tensor([[0, 1, 0, 0, 1, -1, 1, 1, 2, 1, 1, 1]])
    y = kernel.causal_conv1d_fn(x, weight, bias, seq_idx=sequence, activation="silu")
    assert relative_error(y, naive(x, weight, bias, "silu", sequence)) <= 1e-12


def test_large_numbers_are_as_good_as_small_ones(kernel):
    x, weight = torch.randn(1, 8, 7), torch.randn(8, 4)
    small = torch.tensor([[0, 0, 1, 1, -1, 2, 2]])
    large = torch.tensor([[2**31, 2**31, 2**31 + 2**32, 2**31 + 2**32, -(2**32), 1, 1]])
    expected, found = (kernel.causal_conv1d_fn(x, weight, seq_idx=sequence) for sequence in (small.int(), large))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("packing", ["cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_history_restarts_with_each_sequence(kernel, packing, width, with_bias):
    x, weight, bias, dy = example(width, batch=1)
    bias = bias if with_bias else None
    sequence = torch.tensor([SEQUENCE])
    how = {"cu_seqlens": torch.tensor(BOUNDS)} if packing == "cu_seqlens" else {"seq_idx": sequence}
    inputs = (x, weight, bias) if with_bias else (x, weight)

    def fast(x, weight, bias=None):
        return kernel.causal_conv1d_fn(x, weight, bias, activation="silu", **how)

    def slow(x, weight, bias=None):
        return naive(x, weight, bias, "silu", sequence)

    assert relative_error(fast(*inputs), slow(*inputs)) <= 1e-12
    for actual, expected in zip(gradients(fast, inputs, dy), gradients(slow, inputs, dy), strict=True):
        assert relative_error(actual, expected) <= 1e-12


def test_three_tokens_behind_a_bound_see_nothing_of_the_sequence_before(kernel):
    """A field case as numbers: with the bounds dropped, exactly tokens 5, 6 and 7 change."""
    x, weight = signed((1, 12, 8), 201).mT, signed((8, 4), 202)
    packed = kernel.causal_conv1d_fn(x, weight, activation="silu", cu_seqlens=torch.tensor([0, 5, 12]))
    assert_fingerprint(packed, l2=3.5036634164, total=8.0752242628)
    leaky = kernel.causal_conv1d_fn(x, weight, activation="silu")
    assert_fingerprint(leaky, l2=3.7263153308)
    assert (packed - leaky).abs().amax((0, 1)).gt(1e-12).nonzero().flatten().tolist() == [5, 6, 7]


def test_a_batch_of_packed_rows_by_sequence_numbers(kernel):
    x, weight, bias, _ = example()
    sequence = torch.tensor([SEQUENCE, SEQUENCE[::-1]], dtype=torch.int32)
    packed = kernel.causal_conv1d_fn(x, weight, bias, seq_idx=sequence)
    assert relative_error(packed, naive(x, weight, bias, None, sequence)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_may_be_int32_or_int64(kernel, dtype):
    x, weight, _, _ = example(batch=1)
    packed = kernel.causal_conv1d_fn(x, weight, cu_seqlens=torch.tensor(BOUNDS, dtype=dtype))
    assert torch.equal(packed, kernel.causal_conv1d_fn(x, weight, cu_seqlens=torch.tensor(BOUNDS)))


@pytest.mark.parametrize("bounds", [[0], [0, 0], [0, 20]])
def test_unusual_bounds(kernel, bounds):
    x, weight, bias, _ = example(batch=1)
    packed = kernel.causal_conv1d_fn(x, weight, bias, cu_seqlens=torch.tensor(bounds))
    expected = naive(x, weight, bias, None) if bounds == [0, 20] else torch.zeros_like(x)
    assert relative_error(packed, expected) <= 1e-12


@pytest.mark.parametrize("spoiled", [slice(0, 5), slice(17, 20)], ids=["a neighbour", "behind the last bound"])
def test_nan_does_not_leak(kernel, spoiled):
    """Into no other sequence, and from behind the last bound not into gradients of the weights either."""
    x, weight, bias, dy = example(batch=1)
    bad = x.clone()
    bad[:, :, spoiled] = float("nan")

    def run(x, weight, bias):
        return kernel.causal_conv1d_fn(x, weight, bias, activation="silu", cu_seqlens=torch.tensor(BOUNDS))

    kept = torch.ones(20, dtype=torch.bool)
    kept[spoiled] = False
    assert torch.equal(run(bad, weight, bias)[..., kept], run(x, weight, bias)[..., kept])
    dirty, clean = gradients(run, (bad, weight, bias), dy), gradients(run, (x, weight, bias), dy)
    assert torch.equal(dirty[0][..., kept], clean[0][..., kept])
    if spoiled.start == 17:
        assert all(torch.equal(actual, expected) for actual, expected in zip(dirty, clean, strict=True))


@pytest.mark.parametrize("cut", [0, 1, 3, 10, 20])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_two_segments_equal_one(kernel, cut, width):
    x, weight, bias, _ = example(width)
    whole, whole_state = kernel.causal_conv1d_fn(x, weight, bias, activation="silu", return_final_states=True)
    first, state = kernel.causal_conv1d_fn(x[..., :cut], weight, bias, activation="silu", return_final_states=True)
    second, state = kernel.causal_conv1d_fn(
        x[..., cut:], weight, bias, activation="silu", initial_states=state, return_final_states=True
    )
    assert relative_error(torch.cat([first, second], dim=-1), whole) <= 1e-12
    assert torch.equal(state, whole_state) and state.shape == (2, 3, width - 1)
    assert torch.equal(whole_state, x[..., 20 - (width - 1) :])


def test_gradients_reach_the_initial_states(kernel):
    x, weight, bias, dy = example()
    history = signed((2, 3, 3), 960)

    def fast(x, weight, bias, history):
        return kernel.causal_conv1d_fn(x, weight, bias, activation="silu", initial_states=history)

    def slow(x, weight, bias, history):
        return naive(torch.cat([history, x], dim=-1), weight, bias, "silu")[..., 3:]

    inputs = (x, weight, bias, history)
    for actual, expected in zip(gradients(fast, inputs, dy), gradients(slow, inputs, dy), strict=True):
        assert relative_error(actual, expected) <= 1e-12


def test_final_states_go_where_they_are_wanted(kernel):
    x, weight, _, _ = example()
    wanted = torch.full((2, 3, 3), float("nan"), dtype=torch.bfloat16)
    out, state = kernel.causal_conv1d_fn(x, weight, final_states_out=wanted)
    assert state is wanted and torch.equal(wanted, x[..., -3:].bfloat16())
    assert torch.equal(out, kernel.causal_conv1d_fn(x, weight))


@pytest.mark.parametrize("state_length", [3, 4, 9])
@pytest.mark.parametrize("step", [1, 2, 5, 12])
def test_updates_token_by_token_equal_the_whole(kernel, state_length, step):
    x, weight, bias, _ = example(tokens=24)
    whole = naive(x, weight, bias, "silu")
    state = torch.zeros(2, 3, state_length, dtype=x.dtype)
    kept = state
    parts = [kernel.causal_conv1d_update(part, state, weight, bias, "silu") for part in x.split(step, dim=-1)]
    assert relative_error(torch.cat(parts, dim=-1), whole) <= 1e-12
    assert state is kept and torch.equal(state, x[..., 24 - state_length :])


def test_an_update_of_one_token_may_leave_out_the_token_dimension(kernel):
    x, weight, bias, _ = example(tokens=1)
    states = [signed((2, 3, 3), 961) for _ in range(2)]
    flat = kernel.causal_conv1d_update(x[..., 0], states[0], weight, bias, "silu")
    assert flat.shape == (2, 3)
    assert torch.equal(flat[..., None], kernel.causal_conv1d_update(x, states[1], weight, bias, "silu"))
    assert torch.equal(*states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_16_bit_values_are_rounded_once(kernel, dtype, weight_dtype, packed):
    x, weight, bias, _ = example(batch=1)
    x, weight, bias = x.to(dtype), weight.to(weight_dtype), bias.to(weight_dtype)
    how = {"cu_seqlens": torch.tensor(BOUNDS)} if packed else {}
    out = kernel.causal_conv1d_fn(x, weight, bias, activation="silu", **how)
    wide = kernel.causal_conv1d_fn(x.float(), weight.float(), bias.float(), activation="silu", **how)
    assert out.dtype == dtype and torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_autocast_changes_no_bit(kernel, packed):
    """So that packed rows and single rows stay equal under it, too."""
    x, weight, bias, dy = (x.float() for x in example(batch=1))
    how = {"cu_seqlens": torch.tensor(BOUNDS)} if packed else {}

    def run(x, weight, bias):
        return kernel.causal_conv1d_fn(x, weight, bias, activation="silu", **how)

    plain = [run(x, weight, bias), *gradients(run, (x, weight, bias), dy)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = [run(x, weight, bias), *gradients(run, (x, weight, bias), dy)]
    assert all(torch.equal(actual, expected) for actual, expected in zip(cast, plain, strict=True))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_views_equal_contiguous_tensors_and_inputs_are_left_alone(kernel, packed):
    x, weight, bias, _ = example(batch=1)
    how = {"cu_seqlens": torch.tensor(BOUNDS)} if packed else {}
    expected = kernel.causal_conv1d_fn(x, weight, bias, **how)
    channels_last = x.mT.contiguous().mT
    tall = weight.mT.contiguous().mT
    assert not channels_last.is_contiguous() and not tall.is_contiguous()
    kept = channels_last.clone()
    assert torch.equal(kernel.causal_conv1d_fn(channels_last, tall, bias, **how), expected)
    assert torch.equal(channels_last, kept)


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 5), (2, 0, 5)], ids=["no tokens", "no rows", "no channels"])
def test_empty_inputs_give_empty_outputs(kernel, shape):
    x, weight = torch.empty(shape), torch.ones(shape[1], 4)
    out, state = kernel.causal_conv1d_fn(x, weight, activation="silu", return_final_states=True)
    assert out.shape == shape and state.shape == (*shape[:2], 3)
    if shape[0]:
        sequence = torch.zeros(shape[0], shape[2], dtype=torch.int32)
        assert kernel.causal_conv1d_fn(x, weight, seq_idx=sequence).shape == shape


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_no_tokens_give_parameters_a_gradient_of_zero(kernel, shape, with_bias):
    """As on a rank without tokens: DDP would wait for a gradient that is none."""
    x, weight, bias = signed(shape, 1), signed((3, 4), 2), signed((3,), 3)
    leaves = [tensor.requires_grad_() for tensor in ((x, weight, bias) if with_bias else (x, weight))]
    y = kernel.causal_conv1d_fn(*leaves, activation="silu")
    for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize(("dtype", "outside"), [(torch.int32, -1), (torch.int32, 6), (torch.int64, 2**32 + 1)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_rows_of_an_update_take_their_states_by_index(kernel, dtype, outside, tokens):
    """Rows without a state give 0, and states that nobody names stay."""
    x, weight, bias, _ = example(batch=4, tokens=tokens)
    pool = signed((6, 3, 5), 1001)
    before, indices = pool.clone(), torch.tensor([4, outside, 0, 5]).to(dtype)
    y = kernel.causal_conv1d_update(x, pool, weight, bias, "silu", conv_state_indices=indices)
    expected = before.clone()
    for row, slot in enumerate(indices.tolist()):
        if not 0 <= slot < 6:
            assert not y[row].any()
            continue
        state = before[slot : slot + 1].clone()
        alone = kernel.causal_conv1d_update(x[row : row + 1], state, weight, bias, "silu")
        expected[slot] = state[0]
        assert torch.equal(y[row : row + 1], alone)
    assert torch.equal(pool, expected)


def test_an_update_of_no_rows_changes_nothing(kernel):
    _, weight, bias, _ = example()
    pool = signed((6, 3, 5), 1002)
    before, none = pool.clone(), torch.empty(0, dtype=torch.int32)
    assert kernel.causal_conv1d_update(torch.empty(0, 3, 2), pool, weight, bias, conv_state_indices=none).shape == (
        0,
        3,
        2,
    )
    assert torch.equal(pool, before)


@pytest.mark.parametrize("indices", [None, [1, 0]])
def test_a_state_that_repeats_memory_is_refused(kernel, indices):
    state = torch.zeros(1, 3, 4).expand(2, -1, -1)
    indices = None if indices is None else torch.tensor(indices)
    with pytest.raises(ValueError, match=r"conv_state has strides \[0, 4, 1\]; it is updated in place"):
        kernel.causal_conv1d_update(torch.zeros(2, 3), state, torch.zeros(3, 4), conv_state_indices=indices)
