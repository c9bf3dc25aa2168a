"""One implementation on some rows, in a process of its own: correctness gate, then times, one JSON line a row."""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import sys

import torch

from ..reference import gated_delta_rule, gated_delta_rule_backward
from . import protocol
from .inputs import copies_of, input_bytes, make_inputs
from .peers import BY_NAME
from .rows import OPS, Row, shortened

# Relative L2 error against the float64 recurrence that bf16 operands allow (see README): o and states; dq dk dv dg dbeta dh0.
OUTPUT_LIMITS = (6e-3, 6e-3)
GRADIENT_LIMITS = (1e-2, 1e-2, 1e-2, 2e-2, 1e-2, 1e-2)
GATE_TOKENS, GRADIENT_GATE_TOKENS = 1100, 300  # the reference's backward keeps two states a token


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """|actual - truth| / |truth|; infinite if anything is not finite."""
    error = ((actual.double() - truth).norm() / truth.norm()).item()
    return error if error == error else float("inf")


def truth_of(op: str, d: dict) -> tuple[torch.Tensor, ...]:
    """Outputs or gradients of the float64 token recurrence."""
    exact = {name: d[name].double() for name in ("q", "k", "v", "g", "beta")}
    options = {"scale": d["scale"], "initial_state": d["h0"].double(), "cu_seqlens": d["cu_seqlens"]}
    if "backward" not in op:
        return gated_delta_rule(**exact, **options)
    return gated_delta_rule_backward(**exact, do=d["do"].double(), dht=d["dht"].double(), **options)


def gate(implementation, op: str, row: Row, gates: str) -> tuple[float, bool]:
    """Worst relative error on a shortened row, and whether every tensor is within its limit."""
    tokens, limits = (GRADIENT_GATE_TOKENS, GRADIENT_LIMITS) if "backward" in op else (GATE_TOKENS, OUTPUT_LIMITS)
    d = make_inputs(shortened(row, tokens), row.hk, row.hv, gates, seed=1)
    found, truth = getattr(implementation, op)(d)(), truth_of(op, d)
    errors = [relative_error(x, exact) for x, exact in zip(found, truth, strict=True)]
    return max(errors), all(error <= limit for error, limit in zip(errors, limits, strict=True))


def measure(implementation, op: str, row: Row, gates: str, sustain: float = 0, with_host: bool = True) -> dict:
    """The figures of one row; a red gate gives no times, and the host's are left out on request."""
    if getattr(implementation, op) is None:
        return {"skipped": f"{implementation.name} has no {OPS[op]}"}
    inputs = make_inputs(row.lengths, row.hk, row.hv, gates)
    getattr(implementation, op)(
        inputs
    )()  # before the short gate, since some tune themselves on the first call that they see
    error, is_right = gate(implementation, op, row, gates)
    if not is_right:
        return {"error": error, "skipped": f"wrong: relative error {error:.2e}"}
    cache_bytes = torch.cuda.get_device_properties(inputs["q"].device).L2_cache_size
    buffers = protocol.copies_beyond_cache(input_bytes(inputs, op), cache_bytes)
    calls = [getattr(implementation, op)(d) for d in copies_of(inputs, buffers)]
    calls[0]()
    peak, outputs = protocol.peak_bytes(calls[0])
    figures = {
        "peak_mb": peak / 1e6,
        "extra_mb": (peak - outputs) / 1e6,
        "io_mb": (input_bytes(inputs, op) + outputs) / 1e6,
        "buffers": buffers,
        "error": error,
    }
    graph, count = protocol.capture(calls)
    figures["ms"] = protocol.burst_ms(graph, count)
    if with_host:
        cheapest = functools.partial(torch.zeros(1, device=inputs["q"].device).add_, 1)
        figures["eager_ms"] = protocol.eager_ms(calls)
        figures["host_us"], figures["launch_us"] = protocol.host_us(calls), protocol.host_us([cheapest])
    if buffers > 1:
        figures["warm_ms"] = protocol.graph_ms(calls[:1])
    if sustain > 0:
        figures["sustained_ms"] = protocol.sustained_ms(graph, count, figures["ms"], sustain)
    return figures


def compile_only(implementation, op: str, row: Row, gates: str) -> dict:
    """Call the row and its gate once, for what the implementation's compiler then keeps."""
    gate_tokens = GRADIENT_GATE_TOKENS if "backward" in op else GATE_TOKENS
    for lengths in (row.lengths, shortened(row, gate_tokens)) if getattr(implementation, op) else ():
        getattr(implementation, op)(make_inputs(lengths, row.hk, row.hv, gates))()
        torch.cuda.synchronize()
    return {}


def get_ready(implementation, ops: list[str], rows: list[str], gates: str) -> None:
    """Import the library; and if what it compiles stays in the process, call each row once. Failures show when it is timed."""
    importlib.import_module(implementation.module)
    if not implementation.prepares:
        return
    for op, text in itertools.product(ops, rows):
        with contextlib.suppress(Exception):
            compile_only(implementation, op, Row.parse(text), gates)
        torch.cuda.empty_cache()


def tune_nothing(share: int = 0, shares: int = 1) -> None:
    """Let Triton's autotuners compile and run their candidates only: times taken beside other processes mean nothing.

    Of `shares` processes that do the same, each takes a share of the candidates of every tuner.
    """
    try:
        import triton.testing
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return

    def call_once(call, *args, **options):
        call()
        return [0.0, 0.0, 0.0]  # a list, as for a candidate that does not fit

    triton.testing.do_bench = call_once
    all_candidates = Autotuner.prune_configs

    def some_candidates(self, kwargs):
        candidates = all_candidates(self, kwargs)
        return candidates[share::shares] or candidates[:1]

    Autotuner.prune_configs = some_candidates


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", required=True, choices=sorted(BY_NAME))
    parser.add_argument("--op", required=True, help="separated by commas")
    parser.add_argument("--gates", required=True, help="separated by commas; host times are taken with the first")
    parser.add_argument("--sustain", type=float, default=0, help="seconds of sustained load a row; 0 leaves it out")
    parser.add_argument("--compile-only", action="store_true", help="call each row once and time nothing")
    parser.add_argument("--wait", action="store_true", help="get ready, say so, and time when a line comes in")
    parser.add_argument("rows", nargs="+")
    args = parser.parse_args(argv)
    implementation, ops, mixes = BY_NAME[args.impl], args.op.split(","), args.gates.split(",")
    if args.compile_only:
        tune_nothing()
    if args.wait:
        get_ready(implementation, ops, args.rows, mixes[0])
        print('{"ready": true}', flush=True)
        if not sys.stdin.readline():  # who started it has ended, and others may be using the GPU
            return
    for op, gates, text in itertools.product(ops, mixes, args.rows):
        row = Row.parse(text)
        try:
            if args.compile_only:
                figures = compile_only(implementation, op, row, gates)
            else:
                figures = measure(implementation, op, row, gates, args.sustain, with_host=gates == mixes[0])
        except Exception as failure:  # a peer's failure on one row is a row with its reason
            reason = (str(failure).splitlines() or [""])[0]
            figures = {"skipped": f"{type(failure).__name__}: {reason}"[:300]}
        print(json.dumps({"op": op, "row": text, "gates": gates, **figures}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
