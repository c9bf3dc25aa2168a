"""`python -m flashqla_hub bench-conv`: the short convolution with bias and SiLU, bf16, beside FLA's Triton kernels
and causal-conv1d.

All are gated by the same sum over taps in float64, and timed in one process. `ms` is of a CUDA graph whose calls
read copies of the inputs that together exceed the L2 cache. In a record, `layer` names the channels and the width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import command
from .record import append

if TYPE_CHECKING:
    import torch

WIDTH = 4
GATE_TOKENS = 200
MAX_ERROR = 4e-3  # twice what rounding to bf16 costs: FLA rounds some sums once more
SHAPES = (
    "8x4096x2048",
    *(f"1x{tokens}x{channels}" for channels in (2048, 6144, 8192, 10240, 12288) for tokens in (1024, 8192, 65536)),
)


@dataclass(frozen=True)
class Shape:
    """Batch, tokens and channels, as in `8x4096x2048`."""

    batch: int
    tokens: int
    channels: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"shape is {text!r}; it must be BATCHxTOKENSxCHANNELS, for example 8x4096x2048.")
        return cls(*map(int, parts))


def bench_convolution_command(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="BATCHxTOKENSxCHANNELS; those of docs/speed.md if left out.")
    ] = None,
    source: command.Source = command.ROOT,
    output: command.Output = None,
    commit: command.Commit = None,
) -> None:
    """Time forward and backward of the short convolution beside FLA's and causal-conv1d's; write one JSON line each."""
    console = Console()
    try:
        parsed = [Shape.parse(text) for text in shapes or SHAPES]
        common, path = command.begin(commit, output, "-conv")
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    implementations = {"flashqla": _flashqla(source), "fla": _fla(), "causal-conv1d": _causal_conv1d()}
    records = []
    for name, functions in implementations.items():
        for shape in parsed:
            found = [{**common, **record} for record in measure(shape, name, functions)]
            append(path, found)  # at once, so that what is measured survives what comes next
            records += found
    console.print(as_table(sorted(records, key=lambda record: (record["layer"], record["seqs"], record["op"]))))
    console.print(f"Written to {path}")
    if any(record.get("skipped") for record in records if record["impl"] == "flashqla"):
        raise typer.Exit(1)


def as_table(records: list[dict]) -> Table:
    """One row a record."""
    table = Table("operation", "batch x tokens", "layer", "implementation", "us", "TB/s")
    for record in records:
        ms = record.get("ms")
        rate = "-" if ms is None else f"{record['io_mb'] / ms / 1e3:.2f}"
        time = record.get("skipped") if ms is None else f"{1e3 * ms:.1f}"
        table.add_row(record["op"], record["seqs"], record["layer"], record["impl"], time, rate)
    return table


def measure(shape: Shape, name: str, functions: tuple[Callable, Callable] | str) -> list[dict]:
    """Records of forward and backward of an implementation, which is a pair of functions or the reason for none."""
    import torch

    from . import protocol

    elements = shape.batch * shape.tokens * shape.channels
    cache_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    copies = [make_inputs(shape, seed) for seed in range(protocol.copies_beyond_cache(2 * elements, cache_bytes))]
    about = {"seqs": f"{shape.batch}x{shape.tokens}", "layer": f"D{shape.channels} W{WIDTH}", "buffers": len(copies)}
    records = []
    for index, op in enumerate(("conv-forward", "conv-backward")):
        record = {"op": op, "impl": name, **about, "io_mb": 2 * elements * (2 + index) / 1e6}
        records.append(record)
        if isinstance(functions, str):
            record["skipped"] = functions
            continue
        try:
            record["error"] = error_of(functions[index], index, shape)
            if record["error"] > MAX_ERROR:
                record["skipped"] = f"wrong: relative error {record['error']:.2e}"
            else:
                calls = [lambda inputs=inputs, call=functions[index]: call(*inputs) for inputs in copies]
                record["ms"] = protocol.graph_ms(calls)
        except Exception as failure:  # a peer's failure on one row is a row with its reason
            record["skipped"] = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"[:300]
    return records


def make_inputs(shape: Shape, seed: int) -> tuple["torch.Tensor", ...]:
    """x and dy [B, T, D], weight [D, W] and bias [D], bf16."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    rows = (shape.batch, shape.tokens, shape.channels)

    def normal(*sizes):
        return torch.randn(sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    return normal(*rows), normal(*rows), normal(shape.channels, WIDTH) / 2, normal(shape.channels)


def error_of(call: Callable, index: int, shape: Shape) -> float:
    """Worst relative error of the forward (index 0) or the gradients (1) on a shortened shape, against float64."""
    import torch
    import torch.nn.functional as F

    inputs = make_inputs(Shape(shape.batch, min(shape.tokens, GATE_TOKENS), shape.channels), seed=1)
    x, dy, weight, bias = (tensor.double() for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    padded = F.pad(x, (0, 0, WIDTH - 1, 0))
    y = F.silu(sum(padded[:, j : j + x.shape[1]] * weight[:, j] for j in range(WIDTH)) + bias)
    truth = torch.autograd.grad(y, leaves, dy) if index else [y.detach()]
    found = call(*inputs)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True))


def _flashqla(source: Path) -> tuple[Callable, Callable] | str:
    from ..mapping import Source

    module = Source.of(source).module()
    ops = __import__(f"{module.__name__}._ops", fromlist=["ops"]).ops
    if not hasattr(ops, "sm90_causal_conv1d_fwd"):
        return "this build of the kernel has no library"

    def forward(x, dy, weight, bias):
        return [ops.sm90_causal_conv1d_fwd(x, weight, bias, None, None, True, False, 0)[0]]

    def backward(x, dy, weight, bias):
        return ops.sm90_causal_conv1d_bwd(x, dy, weight, bias, None, None, None, True)[:3]

    return forward, backward


def _fla() -> tuple[Callable, Callable] | str:
    try:
        from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_bwd
    except ImportError as error:
        return f"not installed: {error}"
    import torch

    def forward(x, dy, weight, bias):
        with torch.no_grad():
            return [causal_conv1d(x, weight, bias, activation="silu")[0]]

    def backward(x, dy, weight, bias):
        return causal_conv1d_bwd(
            x=x, dy=dy, dht=None, weight=weight, bias=bias, residual=None, initial_state=None, activation="silu"
        )[:3]

    return forward, backward


def _causal_conv1d() -> tuple[Callable, Callable] | str:
    try:
        from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function
    except ImportError as error:
        return f"not installed: {error}"

    # It takes [B, D, T] with any of the last two next to each other in memory: here D, as the layers of models have it.
    def forward(x, dy, weight, bias):
        return [causal_conv1d_fwd_function(x.transpose(1, 2), weight, bias, None, None, None, True).transpose(1, 2)]

    def backward(x, dy, weight, bias):
        x, dy = x.transpose(1, 2), dy.transpose(1, 2)
        dx, dweight, dbias, _ = causal_conv1d_bwd_function(x, weight, bias, dy, None, None, None, None, False, True)
        return dx.transpose(1, 2), dweight, dbias

    return forward, backward
