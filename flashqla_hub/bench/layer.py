"""`python -m flashqla_hub bench-layer`: the whole GatedDeltaNet layer of Qwen3.5 in transformers, with and without the kernel.

Each implementation runs in a process of its own. `matrix_ms` is the time of the layer's matrix products alone, which no
kernel here changes; `ms` less that is what the rest costs.
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
IMPLEMENTATIONS = ("flashqla", "transformers")


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
    impl: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(IMPLEMENTATIONS)}; both if left out.")] = None,
    source: Annotated[Path, typer.Option(help="Folder of the kernel, with build/ in it.")] = command.ROOT,
    output: Annotated[Path | None, typer.Option(help="Record file; benchmarks/results/<device>/ by default.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of the sources, where the checkout has no .git.")] = None,
) -> None:
    """Time forward, training step and decode step of one layer; write one JSON line each.

    The implementation `transformers` is the layer as it comes, with FLA if that is installed.
    """
    console = Console()
    try:
        shapes = _known("shape", shape, tuple(SHAPES))
        names = _known("impl", impl, IMPLEMENTATIONS)
        device = command.device_facts()
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    common = {"run": run_name(commit or git_commit(command.ROOT)), **device}
    folder = command.ROOT / "benchmarks" / "results" / command.device_folder(device["device"])
    path = output or folder / f"{common['run']}-layer.jsonl"
    records = []
    for name in names:
        found = [{**common, **record} for record in run_implementation(name, shapes, tokens, batch, source)]
        append(path, found)
        records += found
    console.print(as_table(records))
    console.print(f"Written to {path}")
    if any(record.get("skipped") for record in records if record["impl"] == "flashqla"):
        raise typer.Exit(1)


def run_implementation(name: str, shapes: tuple[str, ...], tokens: int, batch: int, source: Path) -> list[dict]:
    """Records of one implementation; what it could not do is a record with the reason."""
    arguments = [name, ",".join(shapes), str(tokens), str(batch), str(source)]
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
    """One row a record; the last column is the time outside the matrix products."""
    table = Table("layer", "operation", "implementation", "ms", "products ms", "rest ms", "launches", "served by")
    for record in records:
        numbers = [record.get("ms"), record.get("matrix_ms")]
        rest = None if None in numbers else numbers[0] - numbers[1]
        cells = [f"{number:.4f}" if number is not None else "-" for number in (*numbers, rest)]
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


def launches(call: Callable[[], object]) -> int:
    """Kernels and copies that one call puts on the GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in recorded.key_averages() if event.device_type.name == "CUDA")


def measure(shape: Shape, name: str, tokens: int, batch: int, source: Path) -> list[dict]:
    """Figures of forward, training step and decode step of one layer."""
    import torch
    from transformers import DynamicCache

    import flashqla_hub

    layer, config = make_layer(shape, "cuda", torch.bfloat16)
    served = "transformers"
    if name == "flashqla":
        model = flashqla_hub.kernelize(torch.nn.Sequential(layer), source=source)
        found = flashqla_hub.report(model).served_by("0")
        served = ", ".join(part for part, by in found.items() if by == "qwen/flashqla") or "transformers"
    x = torch.randn(1, tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    only = products(layer)
    figures = []
    with torch.no_grad():
        figures.append(
            {"op": "layer-forward", "ms": milliseconds(lambda: layer(x)), "matrix_ms": milliseconds(lambda: only(x))}
        )
        cache = DynamicCache(config=config)
        layer(x[:, :DECODED].expand(batch, -1, -1), cache_params=cache)
        step = x[:, :1].expand(batch, -1, -1).contiguous()

        def decode():
            return layer(step, cache_params=cache)

        figures.append(
            {
                "op": "layer-decode",
                "ms": graph_milliseconds(decode),
                "matrix_ms": graph_milliseconds(lambda: only(step)),
                "eager_ms": milliseconds(decode),
                "launches": launches(decode),
            }
        )
    x.requires_grad_()
    figures.append(
        {
            "op": "layer-training",
            "ms": milliseconds(training_step(layer, x, layer)),
            "matrix_ms": milliseconds(training_step(only, x, layer)),
        }
    )
    return [{**figure, "served": served} for figure in figures]


def main(arguments: list[str]) -> None:
    """The process of one implementation: a JSON line for each operation on each layer."""
    name, shapes, tokens, batch, source = arguments
    for shape in shapes.split(","):
        sizes = SHAPES[shape]
        for figure in measure(sizes, name, int(tokens), int(batch), Path(source)):
            sequences = f"1x{tokens}" if figure["op"] != "layer-decode" else f"1x{batch}"
            about = {"layer": shape, "impl": name, "hk": sizes.hk, "hv": sizes.hv, "seqs": sequences}
            print(json.dumps({"op": figure.pop("op"), **about, **figure}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
