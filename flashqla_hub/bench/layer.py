"""`python -m flashqla_hub bench-layer`: the whole GatedDeltaNet layer of Qwen3.5 in transformers, with and without the kernel.

Each implementation runs in a process of its own: `flashqla` is the layer that `kernelize` serves, `transformers` the layer as it
comes, with FLA for the recurrence if that is installed, `fla` the same with FLA's convolution and gated norm put in as well.

`rest_ms` is the time on the GPU of everything but matrix products, which no kernel here changes, from a profile of single calls;
`matrix_ms` is the time of the products alone. The two need not add up to `ms`: products alone heat the card more.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import command
from .record import append, git_commit, run_name

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128
WARM_UPS, ROUNDS = 4, 12
DECODED = 64  # tokens in the cache before the timed step
SECONDS = 300
IMPLEMENTATIONS = ("flashqla", "transformers", "fla")
OPERATIONS = ("forward", "decode", "training")
PRODUCTS = ("nvjet", "gemm", "gemv", "cublas", "cutlass", "splitk")  # in names of kernels of matrix products
PROFILED = 5


@dataclass(frozen=True)
class Shape:
    """The layer of one model: hidden size, key heads and value heads; head size 128, convolution of width 4."""

    hidden: int
    hk: int
    hv: int


SHAPES = {
    "2b": Shape(2048, 16, 16),
    "35b": Shape(2048, 16, 32),
    "27b": Shape(5120, 16, 48),
}


def bench_layer_command(
    shape: Annotated[list[str] | None, typer.Option(help=f"Layers: {', '.join(SHAPES)}; all if left out.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the one sequence of forward and training step.")] = 32768,
    batch: Annotated[int, typer.Option(help="Sequences of the decode step.")] = 1,
    impl: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(IMPLEMENTATIONS)}; all if left out.")] = None,
    operation: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(OPERATIONS)}; all if left out.")] = None,
    source: Annotated[Path, typer.Option(help="Folder of the kernel, with build/ in it.")] = command.ROOT,
    output: Annotated[Path | None, typer.Option(help="Record file; benchmarks/results/<device>/ by default.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the sources, where the checkout has no .git.")] = None,
) -> None:
    """Time forward, decode step and training step of one layer, with and without the kernel; write one JSON line each."""
    console = Console()
    try:
        shapes = _known("shape", shape, tuple(SHAPES))
        names = _known("impl", impl, IMPLEMENTATIONS)
        operations = _known("operation", operation, OPERATIONS)
        device = command.device_facts()
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    common = {"run": run_name(commit or git_commit(command.ROOT)), **device}
    folder = command.ROOT / "benchmarks" / "results" / command.device_folder(device["device"])
    path = output or folder / f"{common['run']}-layer.jsonl"
    records = []
    for name in names:
        found = [{**common, **record} for record in run_implementation(name, shapes, operations, tokens, batch, source)]
        append(path, found)
        records += found
    console.print(as_table(records))
    console.print(f"Written to {path}")
    if any(record.get("skipped") for record in records if record["impl"] == "flashqla"):
        raise typer.Exit(1)


def run_implementation(
    name: str, shapes: tuple[str, ...], operations: tuple[str, ...], tokens: int, batch: int, source: Path
) -> list[dict]:
    """Records of one implementation; what it could not do is a record with the reason."""
    arguments = [name, ",".join(shapes), ",".join(operations), str(tokens), str(batch), str(source)]
    environment = {**os.environ, "FLA_FLASH_QLA": os.environ.get("FLA_FLASH_QLA", "0")}
    process = subprocess.Popen(
        [sys.executable, "-m", "flashqla_hub.bench.layer", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        printed, _ = process.communicate(timeout=SECONDS * len(shapes))
        reason = f"the process ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        reason = f"not done within {SECONDS * len(shapes)} s"
    records = [json.loads(line) for line in printed.splitlines() if line.startswith('{"op"')]
    missing = [shape for shape in shapes if not any(record["layer"] == shape for record in records)]
    return records + [{"op": "layer", "layer": shape, "impl": name, "skipped": reason} for shape in missing]


def as_table(records: list[dict]) -> Table:
    """One row a record."""
    table = Table("layer", "operation", "implementation", "ms", "products ms", "rest ms", "launches", "served by")
    for record in records:
        numbers = [record.get(name) for name in ("ms", "matrix_ms", "rest_ms")]
        cells = [f"{number:.4f}" if number is not None else "-" for number in numbers]
        what = record.get("skipped") or record.get("served", "")
        table.add_row(
            record["layer"], record["op"], record["impl"], *cells, str(record.get("launches", "-")), str(what)
        )
    return table


def _known(option: str, names: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"--{option} is {unknown[0]!r}; it must be one of {', '.join(known)}.")
    return tuple(dict.fromkeys(names or known))


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


def rest_ms(call: Callable[[], object]) -> float:
    """Milliseconds a call that the GPU spends on anything but matrix products."""
    found = kernels(call, PROFILED)
    return sum(ms for name, _, ms in found if not any(word in name.lower() for word in PRODUCTS)) / PROFILED


def put_in_fla(layer: "torch.nn.Module") -> None:
    """FLA's convolution and gated norm in the place of those that transformers computes in PyTorch without more packages."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    from ..models import functions_of

    def convolve(hidden_states, weight, bias=None, activation=None, **kwargs):
        return causal_conv1d(hidden_states.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)

    def norm(hidden_states, gate):
        return rms_norm_gated(hidden_states, gate, layer.norm.weight, None, eps=layer.norm.variance_epsilon)

    functions_of(type(layer).__module__)["causal_conv1d_fn"].forward = convolve
    layer.norm.forward = norm


def measure_decode(layer: "torch.nn.Module", config: object, x: "torch.Tensor", batch: int) -> dict:
    """One token a sequence, behind a prompt of a few."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    layer(x[:, :DECODED].expand(batch, -1, -1), cache_params=cache)
    step, only = x[:, :1].expand(batch, -1, -1).contiguous(), products(layer)

    def decode():
        return layer(step, cache_params=cache)

    return {
        "ms": graph_milliseconds(decode),
        "matrix_ms": graph_milliseconds(lambda: only(step)),
        "rest_ms": rest_ms(decode),
        "eager_ms": milliseconds(decode),
        "launches": sum(count for _, count, _ in kernels(decode)),
    }


def measure(shape: Shape, name: str, operation: str, tokens: int, batch: int, source: Path) -> dict:
    """Figures of one operation of one layer."""
    import torch

    import flashqla_hub

    layer, config = make_layer(shape, "cuda", torch.bfloat16)
    served = name
    if name == "flashqla":
        model = flashqla_hub.kernelize(torch.nn.Sequential(layer), source=source)
        found = flashqla_hub.report(model).served_by("0")
        served = ", ".join(part for part, by in found.items() if by == "qwen/flashqla") or "transformers"
    elif name == "fla":
        put_in_fla(layer)
    x = torch.randn(1, tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        if operation == "decode":
            return {**measure_decode(layer, config, x, batch), "served": served}
        calls = [lambda: layer(x), lambda: products(layer)(x)]
        if operation == "forward":
            return {**figures_of(*calls), "served": served}
    x.requires_grad_()
    return {**figures_of(training_step(layer, x, layer), training_step(products(layer), x, layer)), "served": served}


def figures_of(call: Callable[[], object], only: Callable[[], object]) -> dict:
    return {"ms": milliseconds(call), "matrix_ms": milliseconds(only), "rest_ms": rest_ms(call)}


def main(arguments: list[str]) -> None:
    """The process of one implementation: a JSON line for each operation on each layer."""
    name, shapes, operations, tokens, batch, source = arguments
    for shape in shapes.split(","):
        sizes = SHAPES[shape]
        for operation in operations.split(","):
            sequences = f"1x{batch}" if operation == "decode" else f"1x{tokens}"
            record = {
                "op": f"layer-{operation}",
                "layer": shape,
                "impl": name,
                "hk": sizes.hk,
                "hv": sizes.hv,
                "seqs": sequences,
            }
            figures = measure(sizes, name, operation, int(tokens), int(batch), Path(source))
            print(json.dumps({**record, **figures}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
