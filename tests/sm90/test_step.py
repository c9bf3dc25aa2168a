"""A decoded token of the layer in one launch, against the operators one by one: the same bits, in outputs and both states."""

from dataclasses import dataclass, replace

import pytest
import torch

from .measures import kernels_of

HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU")]

DIM, WIDTH = 128, 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {2: torch.int16, 4: torch.int32}
PADDING = 24  # elements of a projection that belong to nobody


@dataclass(frozen=True)
class Case:
    """One step of `batch` sequences."""

    batch: int = 3
    heads: tuple[int, int] = (16, 32)
    dtype: str = "bf16"
    parameters: torch.dtype | None = None  # of A_log, dt_bias and the norm's weight; that of the inputs by default
    has_bias: bool = False
    conv_silu: bool = True
    norm_silu: bool = True
    together: bool = False  # qkv, z, b and a are parts of one projection
    eps: float = 1e-6
    id: str = ""


@dataclass
class Token:
    """What a step reads of the projections, [B, 1, ...]."""

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


@dataclass
class Layer:
    """Parameters and states."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    conv: torch.Tensor
    states: torch.Tensor

    def copy(self):
        return replace(self, conv=self.conv.clone(), states=self.states.clone())


@pytest.fixture(autouse=True)
def step(part):
    module = part("gated_delta_net_step")
    if not hasattr(module.ops, module.SM90_STEP):
        pytest.skip("this build has no such kernel; FLASHQLA_TEST_VARIANT names the folder of a variant that has one")
    return module


def sizes_of(case):
    keys, heads = case.heads
    return (2 * keys + heads) * DIM, heads * DIM, heads, heads


def make_token(case, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes, dtype = (*sizes_of(case), PADDING), DTYPES[case.dtype]
    rows = 2 * torch.randn(case.batch, 1, sum(sizes), generator=generator, device="cuda")
    rows[..., -PADDING:] = torch.nan
    parts = rows.to(dtype).split(sizes, dim=2)[:4]
    return Token(*parts) if case.together else Token(*(part.contiguous() for part in parts))


def make_layer(case, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = DTYPES[case.dtype]

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    channels, _, heads, _ = sizes_of(case)
    wide = case.parameters or dtype
    return Layer(
        weight=normal(channels, WIDTH),
        bias=normal(channels) if case.has_bias else None,
        A_log=normal(heads, dtype=wide),
        dt_bias=normal(heads, dtype=wide),
        norm=normal(DIM, dtype=wide),
        conv=normal(case.batch, channels, WIDTH),
        states=0.3 * normal(case.batch, heads, DIM, DIM, dtype=torch.float32),
    )


def in_one_launch(step, case, token, layer):
    poison = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(4)]
    del poison
    with torch.no_grad():
        return step.gated_delta_net_step(*arguments_of(case, token, layer))


def arguments_of(case, token, layer):
    return (
        *(token.qkv, layer.conv, layer.weight, layer.bias, token.z, token.a, token.b),
        *(layer.A_log, layer.dt_bias, layer.states, layer.norm, case.conv_silu, case.eps, case.norm_silu),
    )


def one_by_one(kernel, case, token, layer):
    """As the layer does it operator by operator."""
    keys, heads = case.heads
    with torch.no_grad():
        silu = "silu" if case.conv_silu else None
        mixed = kernel.causal_conv1d_update(token.qkv.transpose(1, 2), layer.conv, layer.weight, layer.bias, silu)
        q, k, v = mixed.transpose(1, 2).unflatten(2, (-1, DIM)).split((keys, keys, heads), dim=2)
        gates = {"use_gate_in_kernel": True, "A_log": layer.A_log, "dt_bias": layer.dt_bias}
        o, _ = kernel.fused_recurrent_gated_delta_rule(
            *(q, k, v),
            g=token.a,
            beta=token.b,
            initial_state=layer.states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            inplace_final_state=True,
            **gates,
        )
        z = token.z.unflatten(2, (-1, DIM))
        activation = "silu" if case.norm_silu else "sigmoid"
        return kernel.rms_norm_gated(o, z, layer.norm, activation=activation, eps=case.eps).flatten(2)


def bits(x):
    return x.contiguous().view(BITS[x.element_size()])


def assert_same_bits(case, y, layer, expected_y, expected_layer):
    assert y.shape == expected_y.shape == (case.batch, 1, case.heads[1] * DIM) and y.is_contiguous()
    for name, one, other in (
        ("y", y, expected_y),
        ("the history", layer.conv, expected_layer.conv),
        ("the state", layer.states, expected_layer.states),
    ):
        differing = (bits(one) != bits(other)).sum().item()
        assert differing == 0, f"{name} differs in {differing} of {one.numel()} elements"


def judge(kernel, step, case, steps=2):
    layer = make_layer(case)
    expected_layer = layer.copy()
    for n in range(steps):
        token = make_token(case, 10 + n)
        y, expected = in_one_launch(step, case, token, layer), one_by_one(kernel, case, token, expected_layer)
        assert y.isfinite().all()
        assert_same_bits(case, y, layer, expected, expected_layer)


HEADS = ((16, 32), (16, 48), (16, 64), (2, 8), (16, 16), (4, 4), (1, 2), (1, 1), (3, 9))


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 33, 128, 300])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bits_are_those_of_the_operators(kernel, step, heads, batch):
    judge(kernel, step, Case(batch, heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"has_bias": True},
        {"conv_silu": False},
        {"norm_silu": False},
        {"together": True},
        {"parameters": torch.float32},
        {"eps": 0.5, "has_bias": True, "norm_silu": False, "together": True, "parameters": torch.float32},
    ],
    ids=lambda options: "-".join(options),
)
def test_bits_with_every_option(kernel, step, dtype, batch, options):
    judge(kernel, step, Case(batch, dtype=dtype, **options))


def test_infinite_and_undefined_inputs_stay_where_they_are(kernel, step):
    """Bit for bit, and no sequence or key head sees another's."""
    case = Case(4, (2, 4))
    layer, token = make_layer(case), make_token(case)
    token.z[0, 0, 5], token.z[0, 0, 6] = torch.inf, -torch.inf
    token.a[1, 0, 2] = torch.inf
    token.qkv[2, 0, 3] = torch.nan
    expected_layer = layer.copy()
    y, expected = in_one_launch(step, case, token, layer), one_by_one(kernel, case, token, expected_layer)
    y, expected = y.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0)
    layer.states.nan_to_num_(7.0), expected_layer.states.nan_to_num_(7.0)
    layer.conv.nan_to_num_(7.0), expected_layer.conv.nan_to_num_(7.0)
    assert_same_bits(case, y, layer, expected, expected_layer)
    assert (y[2] == 7.0).sum() == 2 * DIM and not (y[[1, 3]] == 7.0).any()


def test_nothing_beside_the_states_is_written(step):
    case = Case(5, (2, 4))
    layer, token = make_layer(case), make_token(case)
    borders = []
    for name in ("conv", "states"):
        inner = getattr(layer, name)
        whole = torch.full((case.batch + 2, *inner.shape[1:]), torch.nan, dtype=inner.dtype, device="cuda")
        whole[1:-1] = inner
        setattr(layer, name, whole[1:-1])
        borders += [whole[:1], whole[-1:]]
    y = in_one_launch(step, case, token, layer)
    assert y.isfinite().all() and layer.conv.isfinite().all() and layer.states.isfinite().all()
    assert all(border.isnan().all() for border in borders)


def test_states_at_odd_addresses_are_moved_on_too(kernel, step):
    case = Case(2, (2, 4))
    layer, token = make_layer(case), make_token(case)
    expected_layer = layer.copy()
    for name in ("conv", "states"):
        inner = getattr(layer, name)
        flat = torch.empty(inner.numel() + 1, dtype=inner.dtype, device="cuda")[1:].view(inner.shape)
        setattr(layer, name, flat.copy_(inner))
    y, expected = in_one_launch(step, case, token, layer), one_by_one(kernel, case, token, expected_layer)
    assert_same_bits(case, y, layer, expected, expected_layer)


@pytest.mark.parametrize("batch", [1, 64])
def test_it_repeats_bit_for_bit(step, batch):
    case = Case(batch)
    start, token = make_layer(case), make_token(case)
    first = start.copy()
    y = in_one_launch(step, case, token, first)
    for _ in range(20):
        layer = start.copy()
        assert_same_bits(case, in_one_launch(step, case, token, layer), layer, y, first)


def test_it_is_one_launch(step):
    case = Case(8)
    layer, token = make_layer(case), make_token(case)
    with torch.no_grad():
        kernels = kernels_of(lambda: step.gated_delta_net_step(*arguments_of(case, token, layer)))
    assert len(kernels) == 1 and "decode_layer" in kernels[0], kernels


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_replays_of_steps_in_a_row(kernel, step, batch):
    """Steps that begin while the one before ends move the states on one after the other."""
    case = Case(batch)
    start, token = make_layer(case), make_token(case)
    layer, expected_layer = start.copy(), start.copy()
    in_one_launch(step, case, token, layer)
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.no_grad(), torch.cuda.graph(graph):
        outputs = [step.gated_delta_net_step(*arguments_of(case, token, layer)) for _ in range(6)]
    for state, value in ((layer.conv, start.conv), (layer.states, start.states)):
        state.copy_(value)
    for seed in (3, 4):
        for place, values in zip(vars(token).values(), vars(make_token(case, seed)).values(), strict=True):
            place.copy_(values)
        graph.replay()
        for y in outputs:
            expected = one_by_one(kernel, case, token, expected_layer)
            assert torch.equal(y, expected)
        assert_same_bits(case, y, layer, expected, expected_layer)


def test_compiled_whole_it_gives_the_same_bits(step):
    case = Case(2)
    start, token = make_layer(case), make_token(case)
    layer, expected_layer = start.copy(), start.copy()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arguments: step.ops.gated_delta_net_step(*arguments) * 1, fullgraph=True)
    with torch.no_grad():
        y = compiled(*arguments_of(case, token, layer))
    expected = in_one_launch(step, case, token, expected_layer)
    assert_same_bits(case, y, layer, expected, expected_layer)


def test_as_many_sequences_as_a_launch_takes(kernel, step):
    judge(kernel, step, Case(step.SM90_SEQUENCES, (1, 1)), steps=1)
