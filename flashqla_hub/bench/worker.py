"""One implementation on some rows, in a process of its own: correctness gate, then times, one JSON line a row."""

import argparse
import json
import sys

import torch

from ..reference import gated_delta_rule
from .inputs import make_inputs
from .peers import BY_NAME
from .protocol import eager_ms, graph_ms, peak_mb
from .rows import Row, shortened

# Relative L2 error of outputs and states against the float64 recurrence that bf16 operands allow (see README).
MAX_ERROR = 6e-3
GATE_TOKENS = 1100


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """|actual - truth| / |truth|; infinite if anything is not finite."""
    error = ((actual.double() - truth).norm() / truth.norm()).item()
    return error if error == error else float("inf")


def gate_error(implementation, row: Row, gates: str) -> float:
    """Worst relative error of outputs and final states on a shortened row against the float64 token recurrence."""
    d = make_inputs(shortened(row, GATE_TOKENS), row.hk, row.hv, gates, seed=1)
    o, state = implementation.forward(d)()
    exact = {name: d[name].double() for name in ("q", "k", "v", "g", "beta")}
    truth_o, truth_state = gated_delta_rule(
        **exact, scale=d["scale"], initial_state=d["h0"].double(), cu_seqlens=d["cu_seqlens"]
    )
    return max(relative_error(o, truth_o), relative_error(state, truth_state))


def measure(implementation, row: Row, gates: str) -> dict:
    """The figures of one row; a red gate gives no times."""
    error = gate_error(implementation, row, gates)
    if not error <= MAX_ERROR:
        return {"error": error, "skipped": f"wrong: relative error {error:.2e} exceeds {MAX_ERROR:.0e}"}
    call = implementation.forward(make_inputs(row.lengths, row.hk, row.hv, gates))
    call()
    return {"ms": graph_ms(call), "eager_ms": eager_ms(call), "peak_mb": peak_mb(call), "error": error}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", required=True, choices=sorted(BY_NAME))
    parser.add_argument("--gates", required=True)
    parser.add_argument("rows", nargs="+")
    args = parser.parse_args(argv)
    implementation = BY_NAME[args.impl]
    for text in args.rows:
        row = Row.parse(text)
        try:
            figures = measure(implementation, row, args.gates)
        except Exception as failure:  # a peer's failure on one row is a row with its reason
            reason = (str(failure).splitlines() or [""])[0]
            figures = {"skipped": f"{type(failure).__name__}: {reason}"[:300]}
        print(json.dumps({"row": text, **figures}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
