"""`python -m flashqla_hub bench-layer`: the whole GatedDeltaNet layer of Qwen3.5 in transformers, with and without the kernel.

Each implementation runs in a process of its own: `flashqla` is the layer that `kernelize` serves; `transformers` the layer as it
comes, which takes the recurrence from FLA and the convolution from causal-conv1d where they are installed, and all else from
PyTorch; `fla` the same with FLA's convolution, gated norm and gates put in. With `+flashqla`, FLA hands the recurrence over to
FlashQLA, as it does by itself where that is installed. A record names the functions that served its row.

`rest_ms` is the time on the GPU of everything but matrix products, which no kernel here changes, from a profile of single calls;
`matrix_ms` is the time of the products alone. The two need not add up to `ms`: products alone heat the card more.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..called import functions_behind, watched
from . import command, side_by_side
from .fla_layer import put_in_fla
from .side_by_side import IMPLEMENTATIONS, OURS, Limits, Work, hands_over, known

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128
WARM_UPS, ROUNDS = 4, 12
DECODED = 64  # tokens in the cache before the timed step
OPERATIONS = ("forward", "training", "decode")
LIBRARIES = {"fla": "FLA", "flash_qla": "FlashQLA", "causal_conv1d": "causal-conv1d"}  # by module
OUR_PRODUCTS = "token_products"
PRODUCTS = (
    "nvjet",
    "gemm",
    "gemv",
    "cublas",
    "cutlass",
    "splitk",
    OUR_PRODUCTS,
)  # in names of kernels of matrix products
PROFILED = 5
GATE_TOKENS, LIMIT = (
    300,
    2e-2,
)  # relative error of the output against float64 that the roundings of a bf16 layer stay below


@dataclass(frozen=True)
class Shape:
    """The layer of one model: hidden size, key heads and value heads; head size 128, convolution of width 4."""

    hidden: int
    hk: int
    hv: int


SHAPES = {
    "35b": Shape(2048, 16, 32),
    "27b": Shape(5120, 16, 48),
    "2b": Shape(2048, 16, 16),
}


def bench_layer_command(
    shape: Annotated[list[str] | None, typer.Option(help=f"Layers: {', '.join(SHAPES)}; all if left out.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the one sequence of forward and training step.")] = 32768,
    batch: Annotated[int, typer.Option(help="Sequences of the decode step.")] = 1,
    impl: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(IMPLEMENTATIONS)}; all if left out.")] = None,
    operation: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(OPERATIONS)}; all if left out.")] = None,
    path: Annotated[list[str] | None, typer.Option(help=side_by_side.PATH)] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help=side_by_side.COMPILED)] = False,
    seconds: Annotated[float, typer.Option(help=side_by_side.TIME_LIMIT)] = side_by_side.SECONDS,
    row_seconds: Annotated[float, typer.Option(help=side_by_side.ROW_LIMIT)] = side_by_side.ROW_SECONDS,
    warm_seconds: Annotated[float, typer.Option(help=side_by_side.WARM_LIMIT)] = side_by_side.WARM_SECONDS,
    source: command.Source = command.ROOT,
    output: command.Output = None,
    commit: command.Commit = None,
) -> None:
    """Time forward, training step and decode step of one layer, with and without the kernel.

    Writes a JSON line as soon as a row is measured: of this kernel all rows, then those of its peers, in the order of the
    options.
    """
    try:
        shapes = known("shape", shape, tuple(SHAPES))
        names = known("impl", impl, IMPLEMENTATIONS)
        operations = known("operation", operation, OPERATIONS)
        folders = command.parse_paths(path or (), IMPLEMENTATIONS)
        common, record_file = command.begin(commit, output, "-layer")
    except ValueError as error:
        Console().print(str(error))
        raise typer.Exit(2) from None
    rows = side_by_side.rows_of(shapes, operations)
    work = Work("layer", rows, (str(tokens), str(batch), str(source)), folders)
    limits = Limits(warm_seconds, row_seconds, seconds)
    side_by_side.compare(work, names, limits, compiled, common, record_file)


def make_layer(shape: Shape, device: str, dtype: "torch.dtype") -> tuple["torch.nn.Module", object]:
    """A Qwen3.5 layer of this shape with random weights, and the config that its cache wants."""
    import torch
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=shape.hk,
        linear_num_value_heads=shape.hv,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_conv_kernel_dim=4,
    )
    torch.manual_seed(0)
    with torch.device(device):
        layer = Qwen3_5GatedDeltaNet(config, 0).to(dtype)
    return layer, config


def products(layer: "torch.nn.Module") -> Callable[["torch.Tensor"], "torch.Tensor"]:
    """The layer's matrix products and nothing else: the same sizes in the same number."""

    def run(x):
        outputs = [getattr(layer, name)(x) for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")]
        return outputs, layer.out_proj(outputs[1])

    return run


def training_step(forward: Callable, x: "torch.Tensor", layer: "torch.nn.Module") -> Callable[[], None]:
    """Forward and backward, with gradients of the input and of every parameter that takes part."""
    import torch

    def run():
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = forward(x)
        outputs = [*out[0], out[1]] if isinstance(out, tuple) else [out]
        torch.autograd.backward(outputs, outputs)

    return run


def milliseconds(call: Callable[[], object]) -> float:
    """Median of single calls between events, each queued behind the next."""
    import statistics

    import torch

    for _ in range(WARM_UPS):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) for first, second in pairwise(events))


def graph_milliseconds(call: Callable[[], object], calls: int = 20) -> float:
    """Milliseconds a call, from a CUDA graph of several."""
    from .protocol import graph_ms

    return graph_ms([call] * calls)


def kernels(call: Callable[[], object], calls: int = 1) -> list[tuple[str, int, float]]:
    """What `calls` calls put on the GPU: name, count and milliseconds in all of each kernel and copy."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = (event for event in recorded.key_averages() if event.device_type.name == "CUDA")
    return [(event.key, event.count, event.self_device_time_total / 1e3) for event in events]


def rest_ms(call: Callable[[], object], only: Callable[[], object]) -> float:
    """Milliseconds a call that the GPU spends on anything but the matrix products, which `only` does alone.

    A kernel counts as one of those if it is called like one, and is either used by `only` too or written for this GPU: PyTorch's
    recurrence has products of its own, in float32. Our kernel for those of a few tokens counts, too.
    """
    known_products = {name for name, _, _ in kernels(only)}

    def is_product(name: str) -> bool:
        return any(word in name.lower() for word in PRODUCTS) and (
            name in known_products or name.startswith(("nvjet", OUR_PRODUCTS))
        )

    return sum(ms for name, _, ms in kernels(call, PROFILED) if not is_product(name)) / PROFILED


def exact(layer: "torch.nn.Module", x: "torch.Tensor") -> "torch.Tensor":
    """The layer's output in float64, with the token recurrence, from its parameters as they are."""
    import torch
    import torch.nn.functional as F

    from ..reference import gated_delta_rule

    def project(name, x):
        return F.linear(x, getattr(layer, name).weight.double())

    x = x.double()
    channels = F.pad(project("in_proj_qkv", x).transpose(1, 2), (layer.conv_kernel_size - 1, 0))
    mixed = F.silu(F.conv1d(channels, layer.conv1d.weight.double(), groups=channels.shape[1])).transpose(1, 2)
    q, k, v = (
        part.unflatten(2, (-1, HEAD_DIM))
        for part in mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), dim=2)
    )
    g = -layer.A_log.double().exp() * F.softplus(project("in_proj_a", x) + layer.dt_bias.double())
    o, _ = gated_delta_rule(q, k, v, g, project("in_proj_b", x).sigmoid(), use_qk_l2norm=True)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.variance_epsilon) * layer.norm.weight.double()
    return project("out_proj", o.flatten(2) * F.silu(project("in_proj_z", x)))


@dataclass(frozen=True)
class Step:
    """What is timed of a layer, and its matrix products alone.

    `forward` is the part of the step that calls the functions which serve it, and returns what a backward begins with.
    """

    run: Callable[[], object]
    products: Callable[[], object]
    forward: Callable[[], "torch.Tensor"]


def step_of(layer: "torch.nn.Module", config: object, operation: str, x: "torch.Tensor", batch: int) -> Step:
    """A forward, a training step, or one token a sequence behind a prompt of a few."""
    from transformers import DynamicCache

    only = products(layer)
    if operation == "training":
        return Step(training_step(layer, x, layer), training_step(only, x, layer), lambda: layer(x))
    if operation == "forward":
        return Step(lambda: layer(x), lambda: only(x), lambda: layer(x))
    cache = DynamicCache(config=config)
    layer(x[:, :DECODED].expand(batch, -1, -1), cache_params=cache)
    token = x[:, :1].expand(batch, -1, -1).contiguous()

    def decode():
        return layer(token, cache_params=cache)

    return Step(decode, lambda: only(token), decode)


def measure_decode(step: Step) -> dict:
    return {
        "ms": graph_milliseconds(step.run),
        "matrix_ms": graph_milliseconds(step.products),
        "rest_ms": rest_ms(step.run, step.products),
        "eager_ms": milliseconds(step.run),
        "launches": sum(count for _, count, _ in kernels(step.run)),
    }


def measure(
    shape: Shape, name: str, operation: str, tokens: int, batch: int, source: Path, warm: Callable[[], None]
) -> dict:
    """Figures of one operation of one layer; a wrong output gives no times.

    The row itself runs before the short correctness gate, since some tune themselves on the first call that they see.
    """
    import torch

    layer, config = make_layer(shape, "cuda", torch.bfloat16)
    served = serve(layer, name, source)
    x = torch.randn(1, tokens, shape.hidden, device=layer.A_log.device, dtype=layer.A_log.dtype)
    x.requires_grad_(operation == "training")
    with torch.set_grad_enabled(operation == "training"):
        step = step_of(layer, config, operation, x, batch)
        step.run()
        output, functions = watched(step.forward)
        functions += functions_behind(output)
        del output
        with torch.no_grad():
            truth = exact(layer, x[:, :GATE_TOKENS])
            error = ((layer(x[:, :GATE_TOKENS]).double() - truth).norm() / truth.norm()).item()
        check_handed_over(name, operation, functions)
        torch.cuda.synchronize()
        warm()
        figures = {"served": served, "functions": ", ".join(functions), "error": error}
        if not error <= LIMIT:
            return {**figures, "skipped": f"wrong: relative error {error:.2e}"}
        measured = measure_decode(step) if operation == "decode" else figures_of(step.run, step.products)
    return {**figures, **measured}


def check_handed_over(name: str, operation: str, functions: list[str]) -> None:
    """Raise if FLA was to call FlashQLA and has not; it never does in a decode step."""
    if hands_over(name) and operation != "decode" and not any(each.startswith("flash_qla.") for each in functions):
        raise RuntimeError(f"FLA did not hand over to FlashQLA; what ran is {', '.join(functions)}")


def serve(layer: "torch.nn.Module", name: str, source: Path) -> str:
    """Let the implementation serve the layer; what it is made of, in words."""
    import torch

    return serve_with(torch.nn.Sequential(layer), name, source, lambda raw_gates: put_in_fla(layer, raw_gates))


def serve_with(model: "torch.nn.Module", name: str, source: Path, put_in: Callable[[bool], object]) -> str:
    """Kernelize the model, or let FLA's parts be put in, or neither; what serves it then, in words."""
    import flashqla_hub
    from flashqla_hub.models import gated_delta_nets

    if name == OURS:
        flashqla_hub.kernelize(model, source=source)
        found = flashqla_hub.report(model).served_by(gated_delta_nets(model)[0].path)
        return ", ".join(part for part, by in found.items() if by == "qwen/flashqla") or "transformers"
    wanted = {"transformers": (), "fla": ("fla",)}.get(name, ("fla", "flash_qla"))
    missing = [LIBRARIES[module] for module in wanted if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(f"{' and '.join(missing)} is not installed")
    if name.startswith("fla"):
        put_in(name == "fla")
    found = [module for module in ("fla", "causal_conv1d") if find_spec(module) and module not in wanted]
    return ", ".join(("transformers", *(LIBRARIES[module] for module in (*wanted, *found))))


def figures_of(call: Callable[[], object], only: Callable[[], object]) -> dict:
    """Times of a forward or a training step, and the memory that it takes above what was there before it."""
    import torch

    figures = {"ms": milliseconds(call), "matrix_ms": milliseconds(only), "rest_ms": rest_ms(call, only)}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return {**figures, "peak_mb": (torch.cuda.max_memory_allocated() - before) / 1e6}


def main(arguments: list[str]) -> None:
    """The process of one implementation: a JSON line for each row."""
    name, rows, share, tokens, batch, source = arguments

    def common(shape: str, operation: str) -> dict:
        sequences = f"1x{batch}" if operation == "decode" else f"1x{tokens}"
        sizes = SHAPES[shape]
        return {
            "op": f"layer-{operation}",
            "layer": shape,
            "impl": name,
            "hk": sizes.hk,
            "hv": sizes.hv,
            "seqs": sequences,
        }

    def figures(shape: str, operation: str, warm: Callable[[], None]) -> dict:
        return measure(SHAPES[shape], name, operation, int(tokens), int(batch), Path(source), warm)

    side_by_side.run_rows(rows, share, common, figures)


if __name__ == "__main__":
    main(sys.argv[1:])
