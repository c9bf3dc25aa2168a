"""The kernel's PyTorch path beside transformers' own PyTorch implementation, on the CPU, in one run.

python benchmarks/compare_torch.py

Both compute [1, tokens] in float32 with the same inputs; transformers' function takes no grouped heads, so its time
includes the repetition of q and k that the model puts in front of it. Before anything is timed, both must agree with
the float64 recurrence. Rounds alternate between the two. One JSON line is appended to benchmarks/results/cpu/; the exit
code is 1 if a result is wrong or the kernel is slower.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

# A thread that waits for another sleeps, or a busy machine would measure how two spinning threads share one core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from kernels import get_local_kernel  # noqa: E402
from torch import Tensor  # noqa: E402

from flashqla_hub.reference import gated_delta_rule, gated_delta_rule_backward  # noqa: E402

OUTPUT_ERROR, GRADIENT_ERROR = 2e-5, 1e-4
GATE_TOKENS = 200
NAMES = ("q", "k", "v", "g", "beta")

Function = Callable[..., Tensor]


def main() -> int:
    options = read_options()
    torch.set_num_threads(options.threads)
    kernel = get_local_kernel(options.source)
    functions = {"flashqla": flashqla_of(kernel), "transformers": transformers_of()}
    shape = {"H": options.heads, "HV": options.value_heads, "K": options.dim, "V": options.dim}
    errors = {name: worst_errors(function, shape) for name, function in functions.items()}
    wrong = [name for name, (output, gradient) in errors.items() if output > OUTPUT_ERROR or gradient > GRADIENT_ERROR]
    for name, (output, gradient) in errors.items():
        print(f"{name:>12}: relative error {output:.1e} of o, {gradient:.1e} of the worst gradient")
    if wrong:
        print(f"{' and '.join(wrong)} is wrong; nothing was timed.")
        return 1
    times = measure(functions, options.tokens, shape, options.rounds)
    print_table(times, options)
    if options.output is not None:
        append_record(options.output, record_of(kernel, options, shape, errors, times))
    slower = [case for case, rows in times.items() if p50(rows["flashqla"]) > p50(rows["transformers"])]
    if slower:
        print(f"flashqla is slower in {' and '.join(slower)}.")
    return 1 if slower else 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--value-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, help="size of a key and of a value")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds; one more warms up")
    parser.add_argument("--source", type=Path, default=ROOT, help="folder of the kernel")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "cpu", help="folder of records"
    )
    parser.add_argument("--no-record", dest="output", action="store_const", const=None, help="write no record")
    return parser.parse_args()


def flashqla_of(kernel: ModuleType) -> Function:
    def call(q, k, v, g, beta):
        return kernel.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def transformers_of() -> Function:
    """transformers' implementation itself: the class keeps it when `kernels` replaces the object's forward."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as module

    def call(q, k, v, g, beta):
        group = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
        return type(module).forward(module, q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def make_inputs(tokens: int, shape: dict[str, int]) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g, beta as in a trained layer, and a gradient of o."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(1, tokens, *size, generator=generator)

    heads, value_heads = shape["H"], shape["HV"]
    q, k, v = normal(heads, shape["K"]), normal(heads, shape["K"]), normal(value_heads, shape["V"])
    decay = torch.linspace(0.02, 2.0, value_heads)
    g = -decay * torch.nn.functional.softplus(normal(value_heads))
    return [q, k, v, g, normal(value_heads).sigmoid()], normal(value_heads, shape["V"])


def gradients(function: Function, inputs: list[Tensor], do: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = function(*leaves)
    return (o.detach(), *torch.autograd.grad(o, leaves, do))


def worst_errors(function: Function, shape: dict[str, int]) -> tuple[float, float]:
    """Relative errors of o and of the worst gradient against the float64 recurrence, on a short row; infinite for nan."""
    inputs, do = make_inputs(GATE_TOKENS, shape)
    exact = [x.double() for x in inputs]
    o, _ = gated_delta_rule(*exact, use_qk_l2norm=True)
    grads = gated_delta_rule_backward(*exact, do.double(), use_qk_l2norm=True)[: len(NAMES)]
    outcome = gradients(function, inputs, do)
    errors = [((x - y).norm() / y.norm()).item() for x, y in zip(outcome, (o, *grads), strict=True)]
    errors = [error if error == error else float("inf") for error in errors]  # nan is larger than nothing
    return errors[0], max(errors[1:])


def measure(functions: dict[str, Function], tokens: int, shape: dict[str, int], rounds: int) -> dict:
    """{case: {function: milliseconds of each round}}; the first round is not counted."""
    inputs, do = make_inputs(tokens, shape)

    def forward(function: Function) -> None:
        with torch.no_grad():
            function(*inputs)

    cases = {"forward": forward, "forward+backward": lambda function: gradients(function, inputs, do)}
    times = {case: {name: [] for name in functions} for case in cases}
    for turn in range(rounds + 1):
        for case, run in cases.items():
            for name, function in functions.items():
                started = time.perf_counter()
                run(function)
                if turn > 0:
                    times[case][name].append(1e3 * (time.perf_counter() - started))
    return times


def p50(samples: list[float]) -> float:
    return statistics.median(samples)


def quantiles(samples: list[float]) -> dict[str, float]:
    low, *_, high = statistics.quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else samples * 2
    return {"n": len(samples), "p20": round(low, 3), "p50": round(p50(samples), 3), "p80": round(high, 3)}


def print_table(times: dict, options: argparse.Namespace) -> None:
    print(
        f"\n{processor()}, {options.threads} threads, torch {torch.__version__}, transformers {version('transformers')}"
    )
    print(f"[1, {options.tokens}], {options.heads} key and {options.value_heads} value heads of {options.dim}, float32")
    print(f"\n{'':18}{'flashqla':>12}{'transformers':>15}{'ratio':>8}")
    for case, rows in times.items():
        ours, theirs = (p50(rows[name]) for name in ("flashqla", "transformers"))
        print(f"{case:18}{ours:>9.1f} ms{theirs:>12.1f} ms{theirs / ours:>8.2f}")


def processor() -> str:
    """Model of the processor, without the name of the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def record_of(kernel: ModuleType, options: argparse.Namespace, shape: dict, errors: dict, times: dict) -> dict:
    return {
        "what": "chunk_gated_delta_rule beside transformers' PyTorch implementation",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": processor(),
        "threads": options.threads,
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "kernels")},
        },
        "commit": git("rev-parse", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no", "torch-ext", "benchmarks")),
        "kernel": kernel.__name__,
        "shape": {"B": 1, "T": options.tokens, **shape},
        "dtype": "float32",
        "gate": {
            name: {"o": float(f"{output:.2g}"), "gradients": float(f"{gradient:.2g}")}
            for name, (output, gradient) in errors.items()
        },
        "ms": {case: {name: quantiles(samples) for name, samples in rows.items()} for case, rows in times.items()},
    }


def append_record(folder: Path, record: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['time'][:10]}-{(record['commit'] or 'unknown')[:8]}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"\nrecorded in {path}")


if __name__ == "__main__":
    sys.exit(main())
