"""`python -m flashqla_hub bench-layer`: the whole GatedDeltaNet layer of Qwen3.5 in transformers, with and without the kernel.

Each implementation runs in a process of its own: `flashqla` is the layer that `kernelize` serves; `transformers` the layer as it
comes, which takes the recurrence from FLA and the convolution from causal-conv1d where they are installed, and all else from
PyTorch; `fla` the same with FLA's convolution, gated norm and gates put in. With `+flashqla`, FLA hands the recurrence over to
FlashQLA, as it does by itself where that is installed.

`rest_ms` is the time on the GPU of everything but matrix products, which no kernel here changes, from a profile of single calls;
`matrix_ms` is the time of the products alone. The two need not add up to `ms`: products alone heat the card more.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import command
from .record import append

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128
WARM_UPS, ROUNDS = 4, 12
DECODED = 64  # tokens in the cache before the timed step
SECONDS = 900  # an implementation
WARM_TOKENS, WARM_SECONDS = 4096, 120
TIME_LIMIT = "Time limit of each implementation; what it has measured by then is kept."
PATH = "NAME=FOLDERS: folders, separated by colons, that are searched first in the process of this implementation."
WARM = "Let what the peers compile at their first call be compiled first, side by side, with few tokens."
OURS = "flashqla"
IMPLEMENTATIONS = (OURS, "transformers", "transformers+flashqla", "fla", "fla+flashqla")
OPERATIONS = ("forward", "decode", "training")
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
    path: Annotated[list[str] | None, typer.Option(help=PATH)] = None,
    warm: Annotated[bool, typer.Option("--warm", help=WARM)] = False,
    seconds: Annotated[int, typer.Option(help=TIME_LIMIT)] = SECONDS,
    source: command.Source = command.ROOT,
    output: command.Output = None,
    commit: command.Commit = None,
) -> None:
    """Time forward, decode step and training step of one layer, with and without the kernel; write one JSON line each."""
    try:
        shapes = known("shape", shape, tuple(SHAPES))
        names = known("impl", impl, IMPLEMENTATIONS)
        operations = known("operation", operation, OPERATIONS)
        folders = command.parse_paths(path or (), IMPLEMENTATIONS)
        common, record_file = command.begin(commit, output, "-layer")
    except ValueError as error:
        Console().print(str(error))
        raise typer.Exit(2) from None
    compare(
        "layer",
        names,
        shapes,
        [",".join(operations), str(tokens), str(batch), str(source)],
        folders,
        warm,
        seconds,
        common,
        record_file,
    )


def compare(
    module: str,
    names: Sequence[str],
    shapes: Sequence[str],
    arguments: list[str],
    folders: dict[str, tuple[str, ...]],
    warm: bool,
    seconds: int,
    common: dict,
    path: Path,
) -> None:
    """Run implementations by the processes of a module of this package, write their records to `path`, and print a table."""
    records = []
    for name in sorted(names, key=lambda name: name != OURS):  # ours first, and then what the peers have to compile
        if warm and name != OURS:
            short, warm = [arguments[0], str(WARM_TOKENS), *arguments[2:]], False
            peers = [(peer, shape) for peer in names if peer != OURS for shape in shapes]
            started = [start_process(module, peer, (shape,), short, folders) for peer, shape in peers]
            deadline = time.monotonic() + WARM_SECONDS
            for process in started:
                printed_by(process, max(1.0, deadline - time.monotonic()))
        ran = run_implementation(module, name, shapes, arguments, folders, seconds)
        found = [{**common, **record} for record in ran]
        append(path, found)  # at once, so that what is measured survives what comes next
        records += found
    console = Console(width=None if sys.stdout.isatty() else command.LOG_WIDTH)
    console.print(as_table(records))
    console.print(f"Written to {path}")
    if any(record.get("skipped") for record in records if record["impl"] == OURS):
        raise typer.Exit(1)


def run_implementation(
    module: str,
    name: str,
    shapes: Sequence[str],
    arguments: list[str],
    folders: dict[str, tuple[str, ...]],
    seconds: int = SECONDS,
) -> list[dict]:
    """Records of one implementation, from the process of this module; what it could not do is a record with the reason."""
    process = start_process(module, name, shapes, arguments, folders)
    printed, reason = printed_by(process, seconds)
    records = [json.loads(line) for line in printed.splitlines() if line.startswith('{"op"')]
    missing = [shape for shape in shapes if not any(record["layer"] == shape for record in records)]
    return records + [{"op": module, "layer": shape, "impl": name, "skipped": reason} for shape in missing]


def start_process(
    module: str, name: str, shapes: Sequence[str], arguments: list[str], folders: dict[str, tuple[str, ...]]
) -> subprocess.Popen:
    environment = {**os.environ, "FLA_FLASH_QLA": "1" if _hands_over(name) else "0"}
    environment["PYTHONPATH"] = command.search_path(folders.get(name, ()))
    arguments = [sys.executable, "-m", f"flashqla_hub.bench.{module}", name, ",".join(shapes), *arguments]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)


def printed_by(process: subprocess.Popen, seconds: float) -> tuple[str, str]:
    """What a process printed, and why it may have printed less than it was asked for."""
    try:
        printed, _ = process.communicate(timeout=seconds)
        return printed, f"the process ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        return printed, f"not done within {seconds} s"


def _hands_over(name: str) -> bool:
    """Whether FLA is to call FlashQLA."""
    return name.endswith("+flashqla")


def check_handed_over(name: str) -> None:
    """Raise if FLA was to call FlashQLA and has not: it imports it at the first call."""
    if _hands_over(name) and "flash_qla" not in sys.modules:
        raise RuntimeError("FLA did not hand over to FlashQLA")


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


def known(option: str, names: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
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


def put_in_fla(layer: "torch.nn.Module", raw_gates: bool) -> None:
    """A forward of the layer from FLA's convolution, gated delta rule and gated norm, each called at its best.

    With `raw_gates` FLA activates the gates; FlashQLA takes none, so there PyTorch does, as in transformers.
    """
    import torch.nn.functional as F
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    def convolve(qkv, cache, is_step):
        weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        if is_step:
            state = cache.layers[layer.layer_idx].conv_states[0]
            return causal_conv1d_update(qkv, state, weight=weight, bias=bias, activation="silu")[0]
        if cache is not None:
            width = layer.conv_kernel_size
            cache.update_conv_state(qkv.transpose(1, 2)[..., -width:], layer.layer_idx, conv_kernel_size=width)
        return causal_conv1d(qkv, weight, bias, activation="silu")[0]

    def forward(hidden_states, cache_params=None, **_):
        cache, idx = cache_params, layer.layer_idx
        is_step = cache is not None and cache.has_previous_state(idx)
        mixed = convolve(layer.in_proj_qkv(hidden_states), cache, is_step)
        q, k, v = (
            part.unflatten(2, (-1, HEAD_DIM))
            for part in mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), dim=2)
        )
        b, a = layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states)
        if raw_gates or is_step:
            gates = {"g": a, "beta": b, "A_log": layer.A_log, "dt_bias": layer.dt_bias}
            gates |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        else:
            decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
            gates = {"g": decay, "beta": b.sigmoid()}
        rule = fused_recurrent_gated_delta_rule if is_step else chunk_gated_delta_rule
        o, state = rule(
            q,
            k,
            v,
            initial_state=cache.layers[idx].recurrent_states[0] if is_step else None,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            **gates,
        )
        if cache is not None:
            cache.update_recurrent_state(state, idx)
        z = layer.in_proj_z(hidden_states).unflatten(2, (-1, HEAD_DIM))
        normed = rms_norm_gated(o, z, layer.norm.weight, None, eps=layer.norm.variance_epsilon)
        return layer.out_proj(normed.flatten(2))

    layer.forward = forward


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
        "rest_ms": rest_ms(decode, lambda: only(step)),
        "eager_ms": milliseconds(decode),
        "launches": sum(count for _, count, _ in kernels(decode)),
    }


def measure(shape: Shape, name: str, operation: str, tokens: int, batch: int, source: Path) -> dict:
    """Figures of one operation of one layer; a wrong output gives no times."""
    import torch

    layer, config = make_layer(shape, "cuda", torch.bfloat16)
    served = serve(layer, name, source)
    x = torch.randn(1, tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        truth = exact(layer, x[:, :GATE_TOKENS])
        error = ((layer(x[:, :GATE_TOKENS]).double() - truth).norm() / truth.norm()).item()
        if not error <= LIMIT:
            return {"error": error, "skipped": f"wrong: relative error {error:.2e}"}
        figures = {"served": served, "error": error}
        if operation == "decode":
            return {**figures, **measure_decode(layer, config, x, batch)}
        if operation == "forward":
            return {**figures, **figures_of(lambda: layer(x), lambda: products(layer)(x))}
    x.requires_grad_()
    return {**figures, **figures_of(training_step(layer, x, layer), training_step(products(layer), x, layer))}


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
    """The process of one implementation: a JSON line for each operation on each layer."""
    import torch

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
            try:
                figures = measure(sizes, name, operation, int(tokens), int(batch), Path(source))
                check_handed_over(name)
            except Exception as failure:  # one that fails on a layer is a line with its reason
                reason = (str(failure).splitlines() or [""])[0]
                figures = {"skipped": f"{type(failure).__name__}: {reason}"[:300]}
            print(json.dumps({**record, **figures}), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
