"""`python -m flashqla_hub bench-conv`: the short convolution with bias and SiLU, bf16, beside FLA's kernels and causal-conv1d.

Each implementation runs in a process of its own, which measures a row when it is told to; a row is written as soon as an
implementation has done it, or its time is over. All are gated by the same sum over taps in float64. `ms` is of a CUDA graph
whose calls read copies of the inputs that together exceed the L2 cache. In a record, `layer` names the channels and the width.

`fla` is FLA as it comes, on Triton, and tunes itself once for a number of channels: rows begin with the longest, and what it
compiles is compiled beforehand, side by side. `fla-gluon` is its other form, which FLA_CONV_GLUON=1 asks for.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import command
from .record import append
from .side_by_side import PATH, Lines, finish, known

if TYPE_CHECKING:
    import torch

WIDTH = 4
GATE_TOKENS = 200
SECONDS, COMPILE_SECONDS = 60, 120
MAX_ERROR = 4e-3  # twice what rounding to bf16 costs: FLA rounds some sums once more
OURS = "flashqla"
IMPLEMENTATIONS = (OURS, "fla", "fla-gluon", "causal-conv1d")
OPERATIONS = ("conv-forward", "conv-backward")
COMPILING = ("fla", "fla-gluon")  # at their first call, into a cache on disk
ENVIRONMENT = {"fla": {"FLA_CONV_GLUON": "0"}, "fla-gluon": {"FLA_CONV_GLUON": "1"}}
DISTRIBUTIONS = {"fla": "fla-core", "fla-gluon": "fla-core", "causal-conv1d": "causal-conv1d"}
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

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}x{self.channels}"

    def shortened(self) -> "Shape":
        """The shape on which an implementation is gated."""
        return Shape(self.batch, min(self.tokens, GATE_TOKENS), self.channels)


def bench_convolution_command(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="BATCHxTOKENSxCHANNELS; those of docs/measurements.md if left out.")
    ] = None,
    channels: Annotated[list[int] | None, typer.Option(help="Only the shapes with so many channels.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(IMPLEMENTATIONS)}; all if left out.")] = None,
    path: Annotated[list[str] | None, typer.Option(help=PATH)] = None,
    seconds: Annotated[float, typer.Option(help="Time limit of an implementation on a row.")] = SECONDS,
    source: command.Source = command.ROOT,
    output: command.Output = None,
    commit: command.Commit = None,
) -> None:
    """Time forward and backward of the short convolution beside FLA's and causal-conv1d's; write one JSON line each."""
    console = Console()
    try:
        chosen = choose([Shape.parse(text) for text in shapes or SHAPES], channels)
        names = known("impl", impl, IMPLEMENTATIONS)
        folders = command.parse_paths(path or (), IMPLEMENTATIONS)
        common, record_file = command.begin(commit, output, "-conv")
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    fill_compile_caches(names, chosen, source, folders)
    workers = [Worker(name, source, folders.get(name, ())) for name in names]
    records = []
    for shape in chosen:
        for worker in workers:
            found = [{**common, **record} for record in worker.measure(shape, seconds)]
            append(record_file, found)  # at once, so that what is measured survives what comes next
            records += found
    for worker in workers:
        worker.stop()
    console.print(as_table(sorted(records, key=lambda record: (record["layer"], record["seqs"], record["op"]))))
    console.print(f"Written to {record_file}")
    if any(record.get("skipped") for record in records if record["impl"] == OURS):
        raise typer.Exit(1)


def choose(shapes: Iterable[Shape], channels: Sequence[int] | None) -> list[Shape]:
    """Shapes with one of the numbers of channels, if any are given; of each number the longest first."""
    shapes = list(shapes)
    missing = [number for number in channels or () if number not in {shape.channels for shape in shapes}]
    if missing:
        raise ValueError(f"--channels is {missing[0]}, and no shape has so many; there are {_numbers(shapes)}.")
    chosen = [shape for shape in shapes if not channels or shape.channels in channels]
    return sorted(chosen, key=lambda shape: (shape.channels, -shape.batch * shape.tokens))


def _numbers(shapes: Iterable[Shape]) -> str:
    return ", ".join(map(str, sorted({shape.channels for shape in shapes})))


class Worker:
    """The process of an implementation, started anew when a row took too long or was the end of it."""

    def __init__(self, name: str, source: Path, folders: Sequence[str]) -> None:
        self.name = name
        self._source, self._folders = source, folders
        self._lines: Lines | None = None

    def measure(self, shape: Shape, seconds: float) -> list[dict]:
        """Records of a row; the operations that the process did not get to have the reason instead of a time."""
        if self._lines is None:
            self._lines = Lines(start_process(self.name, "measure", self._source, self._folders), ('{"op"',))
        lines, printed = self._lines, []
        with contextlib.suppress(BrokenPipeError):  # it may have ended, which the next line shows
            lines.process.stdin.write(f"{shape}\n")
            lines.process.stdin.flush()
        deadline = time.monotonic() + seconds
        while len(printed) < len(OPERATIONS):
            record = lines.next(deadline - time.monotonic(), f"not done within {seconds:g} s")
            if record is None:
                self.stop()
                break
            printed.append(record)
        done = {record["op"] for record in printed}
        return printed + [
            {**about(shape, op), "impl": self.name, "skipped": lines.reason} for op in OPERATIONS if op not in done
        ]

    def stop(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def fill_compile_caches(
    names: Sequence[str], shapes: Sequence[Shape], source: Path, folders: dict[str, tuple[str, ...]]
) -> None:
    """Let a process for each number of channels compile what FLA needs, so that the timed ones find it on disk."""
    started = []
    for name in names:
        for number in sorted({shape.channels for shape in shapes}) if name in COMPILING else ():
            process = start_process(name, "compile", source, folders.get(name, ()), {"FLA_CACHE_RESULTS": "0"})
            process.stdin.write("".join(f"{shape}\n" for shape in shapes if shape.channels == number))
            process.stdin.close()
            started.append((name, process))
    finish(started, COMPILE_SECONDS, "in its own time")


def start_process(
    name: str, task: str, source: Path, folders: Sequence[str], beside: dict[str, str] | None = None
) -> subprocess.Popen:
    """A process of this module, which reads shapes from its input."""
    environment = {**os.environ, **ENVIRONMENT.get(name, {}), **(beside or {})}
    environment["PYTHONPATH"] = command.search_path(folders)
    words = [sys.executable, "-m", "flashqla_hub.bench.convolution", name, task, str(source)]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main(name: str, task: str, source: str) -> None:
    """Take shapes from standard input, one a line: print records of each, or call each once for what its compiler keeps."""
    import torch

    from .worker import tune_nothing

    if task == "compile":
        tune_nothing()
    functions = _functions(name, Path(source))
    version = version_of(name)
    for line in sys.stdin:
        shape = Shape.parse(line.strip())
        if task == "compile":
            if not isinstance(functions, str):
                for call in functions:
                    call(*make_inputs(shape, seed=0))
                    call(*make_inputs(shape.shortened(), seed=0))
                torch.cuda.synchronize()
        else:
            for index in range(len(OPERATIONS)):
                record = {**measure(shape, name, functions, index), "version": version}
                print(json.dumps(record), flush=True)
        torch.cuda.empty_cache()


def version_of(name: str) -> str | None:
    """Version of the distribution that an implementation comes from; of a folder without its metadata, as the module says."""
    distribution = DISTRIBUTIONS.get(name)
    if distribution is None:
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get(distribution.replace("-", "_")), "__version__", None)


def as_table(records: list[dict]) -> Table:
    """One row a record."""
    table = Table("operation", "batch x tokens", "layer", "implementation", "us", "TB/s")
    for record in records:
        ms = record.get("ms")
        rate = "-" if ms is None else f"{record['io_mb'] / ms / 1e3:.2f}"
        time = record.get("skipped") if ms is None else f"{1e3 * ms:.1f}"
        table.add_row(record["op"], record["seqs"], record["layer"], record["impl"], time, rate)
    return table


def about(shape: Shape, op: str) -> dict:
    """What a record says of its row: the bytes are those that have to move, tensors of x's shape."""
    size = 2 * shape.batch * shape.tokens * shape.channels
    return {
        "op": op,
        "seqs": f"{shape.batch}x{shape.tokens}",
        "layer": f"D{shape.channels} W{WIDTH}",
        "io_mb": size * (2 + OPERATIONS.index(op)) / 1e6,
    }


def measure(shape: Shape, name: str, functions: tuple[Callable, Callable] | str, index: int) -> dict:
    """Record of an operation of an implementation, which is a pair of functions or the reason for none."""
    import torch

    from . import protocol

    record = {**about(shape, OPERATIONS[index]), "impl": name}
    if isinstance(functions, str):
        return {**record, "skipped": functions}
    call = functions[index]
    try:
        cache_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
        size = 2 * shape.batch * shape.tokens * shape.channels
        copies = [make_inputs(shape, seed) for seed in range(protocol.copies_beyond_cache(size, cache_bytes))]
        record["buffers"] = len(copies)
        call(*copies[0])  # before the short gate: FLA tunes itself on the first call that it sees
        record["error"] = error_of(call, index, shape)
        if record["error"] > MAX_ERROR:
            return {**record, "skipped": f"wrong: relative error {record['error']:.2e}"}
        record["ms"] = protocol.graph_ms([lambda inputs=inputs: call(*inputs) for inputs in copies])
    except Exception as failure:  # a peer's failure on one row is a row with its reason
        record["skipped"] = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"[:300]
    return record


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

    inputs = make_inputs(shape.shortened(), seed=1)
    x, dy, weight, bias = (tensor.double() for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    padded = F.pad(x, (0, 0, WIDTH - 1, 0))
    y = F.silu(sum(padded[:, j : j + x.shape[1]] * weight[:, j] for j in range(WIDTH)) + bias)
    truth = torch.autograd.grad(y, leaves, dy) if index else [y.detach()]
    found = call(*inputs)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True))


def _functions(name: str, source: Path) -> tuple[Callable, Callable] | str:
    if name == OURS:
        return _flashqla(source)
    return _causal_conv1d() if name == "causal-conv1d" else _fla()


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


if __name__ == "__main__":
    main(*sys.argv[1:])
