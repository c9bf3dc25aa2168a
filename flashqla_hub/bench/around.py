"""`python -m flashqla_hub bench-around`: gated norm, gates and decode step, bf16, beside FLA's Triton kernels.

Each implementation is gated against float64 on a small shape, and both are timed in one process, in turn. `ms` is of a CUDA
graph whose calls read copies of the inputs that together exceed the L2 cache. In a record, `layer` names the operation's
shape: rows of 128 for the norm, tokens x heads for the gates, sequences of one token for the decode step (16 key heads, 32
value heads, float32 states).
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import command
from .record import append

if TYPE_CHECKING:
    import torch

DIM, HK, HV = 128, 16, 32
EPS = 1e-6
MAX_ERROR = {"norm-forward": 6e-3, "norm-backward": 6e-3, "gates-forward": 1e-5, "gates-backward": 4e-3, "decode": 4e-3}
SHAPES = {  # in the order in which they are timed: Triton tunes FLA's norm and gates for most of a minute
    "decode": ("1", "8", "32", "128", "256"),
    "norm-forward": ("524288",),
    "norm-backward": ("524288",),
    "gates-forward": ("32768x32", "32768x64"),
    "gates-backward": ("32768x32", "32768x64"),
}
GATE_SHAPES = {"norm": "1000", "gates": "500x32", "decode": "3"}
BYTES = {"norm-forward": 3 * 2 * DIM, "norm-backward": 5 * 2 * DIM, "gates-forward": 12, "gates-backward": 16}
IMPLEMENTATIONS = ("flashqla", "fla")


def bench_around_command(
    op: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SHAPES)}; all if left out.")] = None,
    source: command.Source = command.ROOT,
    output: command.Output = None,
    commit: command.Commit = None,
) -> None:
    """Time gated norm, gates and decode step beside FLA's; write one JSON line each."""
    console = Console()
    try:
        unknown = [name for name in op or () if name not in SHAPES]
        if unknown:
            raise ValueError(f"--op is {unknown[0]!r}; it must be one of {', '.join(SHAPES)}.")
        common, path = command.begin(commit, output, "-around")
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(2) from None
    implementations = {"flashqla": _flashqla(source), "fla": _fla()}
    records = []
    for name in op or SHAPES:
        for shape in SHAPES[name]:
            found = [{**common, **record} for record in measure(name, shape, implementations)]
            append(path, found)
            records += found
    console.print(as_table(records))
    console.print(f"Written to {path}")
    if any(record.get("skipped") for record in records if record["impl"] == "flashqla"):
        raise typer.Exit(1)


def as_table(records: list[dict]) -> Table:
    """One row a record."""
    table = Table("operation", "shape", "implementation", "us", "TB/s")
    for record in records:
        ms = record.get("ms")
        rate = "-" if ms is None else f"{record['io_mb'] / ms / 1e3:.2f}"
        time = record.get("skipped") if ms is None else f"{1e3 * ms:.2f}"
        table.add_row(record["op"], record["layer"], record["impl"], time, rate)
    return table


def moved_bytes(op: str, shape: str) -> int:
    """Bytes that the operation has to read and write, without parameters."""
    if op == "decode":
        return int(shape) * HV * DIM * DIM * 2 * 4
    elements = 1
    for size in shape.split("x"):
        elements *= int(size)
    return elements * BYTES[op]


def measure(op: str, shape: str, implementations: dict[str, dict[str, Callable] | str]) -> list[dict]:
    """A record of each implementation, which is functions by operation or the reason for none."""
    import torch

    from . import protocol

    size = moved_bytes(op, shape)
    cache_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    copies = [make_inputs(op, shape, seed) for seed in range(protocol.copies_beyond_cache(size, cache_bytes))]
    records = []
    for name, functions in implementations.items():
        record = {"op": op, "impl": name, "layer": shape, "buffers": len(copies), "io_mb": size / 1e6}
        records.append(record)
        if isinstance(functions, str):
            record["skipped"] = functions
            continue
        try:
            record["error"] = error_of(op, functions[op])
            if record["error"] > MAX_ERROR[op]:
                record["skipped"] = f"wrong: relative error {record['error']:.2e}"
            else:
                calls = [lambda inputs=inputs, call=functions[op]: call(**inputs) for inputs in copies]
                record["ms"] = protocol.graph_ms(calls)
        except Exception as failure:  # a peer's failure on one row is a row with its reason
            record["skipped"] = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"[:300]
    return records


def make_inputs(op: str, shape: str, seed: int, device: str = "cuda") -> dict[str, "torch.Tensor"]:
    """Tensors of one call by name; bf16 but for parameters of gates, their gradients and states."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*sizes, dtype=torch.bfloat16):
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    if op.startswith("norm"):
        rows = int(shape)
        return {"x": normal(rows, DIM), "g": normal(rows, DIM), "dy": normal(rows, DIM), "weight": normal(DIM)}
    parameters = {"A_log": normal(HV, dtype=torch.float32), "dt_bias": normal(HV, dtype=torch.float32)}
    if op.startswith("gates"):
        tokens, heads = map(int, shape.split("x"))
        a, b = normal(1, tokens, 2 * heads).split(heads, dim=-1)
        grads = {name: normal(1, tokens, heads, dtype=torch.float32) for name in ("dg", "dbeta")}
        parameters = {name: normal(heads, dtype=torch.float32) for name in parameters}
        return {"a": a, "b": b, **parameters, **grads}
    batch = int(shape)
    q, k, v = normal(batch, 1, 2 * HK + HV, DIM).split((HK, HK, HV), dim=2)
    a, b = normal(batch, 1, 2 * HV).split(HV, dim=-1)
    return {
        "q": q,
        "k": k,
        "v": v,
        "a": a,
        "b": b,
        **parameters,
        "state": normal(batch, HV, DIM, DIM, dtype=torch.float32),
    }


def truth_of(op: str, inputs: dict[str, "torch.Tensor"]) -> list["torch.Tensor"]:
    """Outputs, or gradients, in float64."""
    import torch
    import torch.nn.functional as F

    from ..reference import gated_delta_rule

    d = {name: x.double() for name, x in inputs.items()}
    if op.startswith("norm"):
        leaves = [d[name].requires_grad_() for name in ("x", "g", "weight")]
        x, g, weight = leaves
        y = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * F.silu(g)
        return [y.detach()] if op == "norm-forward" else list(torch.autograd.grad(y, leaves, d["dy"]))
    leaves = [d[name].requires_grad_() for name in ("a", "b", "A_log", "dt_bias")]
    a, b, A_log, dt_bias = leaves
    g, beta = -A_log.exp() * F.softplus(a + dt_bias), b.sigmoid()
    if op == "gates-forward":
        return [g.detach(), beta.detach()]
    if op == "gates-backward":
        return list(torch.autograd.grad((g, beta), leaves, (d["dg"], d["dbeta"])))
    with torch.no_grad():
        q, k, v, state = (d[name] for name in ("q", "k", "v", "state"))
        return list(gated_delta_rule(q, k, v, g, beta, scale=DIM**-0.5, initial_state=state, use_qk_l2norm=True))


def error_of(op: str, call: Callable, device: str = "cuda") -> float:
    """Worst relative error on a small shape; a result that an implementation has not is left out (None)."""
    inputs = make_inputs(op, GATE_SHAPES[op.split("-")[0]], 1, device)
    pairs = zip(call(**inputs), truth_of(op, inputs), strict=True)
    return max(((x.double() - truth).norm() / truth.norm()).item() for x, truth in pairs if x is not None)


def _flashqla(source: Path) -> dict[str, Callable] | str:
    from ..mapping import Source

    module = Source.of(source).module()
    ops = __import__(f"{module.__name__}._ops", fromlist=["ops"]).ops
    if not hasattr(ops, "sm90_rms_norm_gated_fwd"):
        return "this build of the kernel has no library"

    def norm_backward(x, g, dy, weight):
        return ops.sm90_rms_norm_gated_bwd(dy, x, g, weight, EPS, True)

    def gates_backward(a, b, A_log, dt_bias, dg, dbeta):
        da, db, sums = ops.sm90_gated_delta_gates_bwd(dg, dbeta, a, b, A_log, dt_bias, 1.0)
        return da, db, *sums.unbind()

    def decode(q, k, v, a, b, A_log, dt_bias, state):
        return ops.sm90_fused_recurrent_fwd(
            q, k, v, a, b, A_log, dt_bias, state, None, DIM**-0.5, 1.0, True, False, True
        )

    return {
        "norm-forward": lambda x, g, dy, weight: [ops.sm90_rms_norm_gated_fwd(x, g, weight, EPS, True)],
        "norm-backward": norm_backward,
        "gates-forward": lambda a, b, A_log, dt_bias, dg, dbeta: ops.sm90_gated_delta_gates_fwd(
            a, b, A_log, dt_bias, 1.0
        ),
        "gates-backward": gates_backward,
        "decode": decode,
    }


def _fla() -> dict[str, Callable] | str:
    try:
        from fla.modules.norm.fused_norm_gate import layer_norm_gated_bwd, layer_norm_gated_fwd
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.gated_delta_rule.gate import gdn_gate_bwd, gdn_gate_fwd
    except ImportError as error:
        return f"not installed: {error}"
    import torch

    statistics: dict[int, torch.Tensor] = {}  # of the forward, which FLA's backward reads

    def norm_forward(x, g, dy, weight):
        y, _, rstd, _ = layer_norm_gated_fwd(x, g, weight, None, "swish", EPS, is_rms_norm=True)
        statistics[x.data_ptr()] = rstd
        return [y]

    def norm_backward(x, g, dy, weight):
        if x.data_ptr() not in statistics:
            norm_forward(x, g, dy, weight)
        rstd = statistics[x.data_ptr()]
        dx, dg, dweight, *_ = layer_norm_gated_bwd(
            dy=dy,
            x=x,
            g=g,
            weight=weight,
            bias=None,
            activation="swish",
            eps=EPS,
            mean=None,
            rstd=rstd,
            is_rms_norm=True,
        )
        return dx, dg, dweight

    def gates_backward(a, b, A_log, dt_bias, dg, dbeta):
        da, dA_log, ddt_bias = gdn_gate_bwd(a.contiguous(), A_log, dt_bias, dg)
        return da, None, dA_log, ddt_bias

    def decode(q, k, v, a, b, A_log, dt_bias, state):
        with torch.no_grad():
            return fused_recurrent_gated_delta_rule(
                q,
                k,
                v,
                g=a,
                beta=b,
                A_log=A_log,
                dt_bias=dt_bias,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                use_qk_l2norm_in_kernel=True,
                initial_state=state,
                output_final_state=True,
            )

    return {
        "norm-forward": norm_forward,
        "norm-backward": norm_backward,
        # FLA's gate kernel makes g alone, and takes contiguous tensors.
        "gates-forward": lambda a, b, A_log, dt_bias, dg, dbeta: (gdn_gate_fwd(a.contiguous(), A_log, dt_bias), None),
        "gates-backward": gates_backward,
        "decode": decode,
    }
