"""The gradients of one training step of each implementation beside those of float32, from the same weights.

python benchmarks/step_gradients.py --tokens 4096 --seed 0 --seed 1

Implementations of one model round elsewhere, so the losses of their trainings part. How far says nothing about which of them
is nearer to the model. This does: all take the loss of one row and its gradients in bfloat16, and transformers' own code takes
them in float32, from the same bfloat16 weights. The error of an implementation is |gradients - float32's| / |float32's| over all
elements of a kind of parameter, and of all parameters.

The model, its random weights and the text are those of `python -m flashqla_hub finetune`, with gradient checkpointing, and
a seed draws the weights and chooses the row. transformers decides at its import whom its layers call, so each implementation
is a process of its own; they run in turn. One JSON line a seed is appended to `--output`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from flashqla_hub.bench.record import git_commit  # noqa: E402
from flashqla_hub.finetune.command import RATES, chosen_device  # noqa: E402
from flashqla_hub.finetune.implementations import IMPLEMENTATIONS, OURS, PLAIN, ROUNDING, isolate  # noqa: E402
from flashqla_hub.finetune.settings import Settings  # noqa: E402

EXACT = "float32"
ALL = "all parameters"


def main() -> int:
    options = read_options()
    options.device = chosen_device(options.device)
    options.model = options.model or ("tiny" if options.device == "cpu" else "qwen3.5-0.8b")
    if options.one is not None:
        torch.save(step(options.one, options, options.seed[0]), options.into)
        return 0
    names = options.implementation or [OURS, PLAIN, ROUNDING]
    for seed in options.seed or [0]:
        record = compare(names, options, seed)
        print_table(record)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256, help="of the row")
    parser.add_argument("--seed", type=int, action="append", help="of weights and row; may be repeated (default: 0)")
    parser.add_argument(
        "--implementation",
        action="append",
        choices=IMPLEMENTATIONS,
        help=f"may be repeated (default: {OURS}, {PLAIN} and {ROUNDING})",
    )
    parser.add_argument("--model", help="shape with random weights, or name (default: qwen3.5-0.8b, on a CPU tiny)")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--source", default=str(ROOT), help="folder or name of the kernel")
    parser.add_argument("--output", type=Path, help="file of records")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(names: list[str], options: argparse.Namespace, seed: int) -> dict:
    """The record of a seed: the loss in float32, and of each implementation how far loss and gradients are from it."""
    from flashqla_hub.finetune.report import device_name, versions

    with TemporaryDirectory() as folder:
        exact = in_a_process(EXACT, options, seed, Path(folder))
        against = {name: distances(in_a_process(name, options, seed, Path(folder)), exact) for name in names}
    return {
        "device": device_name(options.device),
        "versions": versions(),
        "commit": git_commit(ROOT),
        "model": options.model,
        "tokens": options.tokens,
        "seed": seed,
        "loss": exact["loss"],
        "implementations": against,
    }


def in_a_process(name: str, options: argparse.Namespace, seed: int, folder: Path) -> dict:
    """What `step` returns in a process of its own."""
    file = folder / "step.pt"
    command = [sys.executable, __file__, "--one", name, "--into", file, "--seed", seed, "--tokens", options.tokens]
    command += ["--model", options.model, "--device", options.device, "--source", options.source]
    subprocess.run([str(part) for part in command], check=True)
    return torch.load(file, map_location=options.device)


def step(name: str, options: argparse.Namespace, seed: int) -> dict:
    """{"loss": of a row, "gradients": {parameter: gradient}} by an implementation, or in float32 by transformers' own code."""
    exact, name = name == EXACT, PLAIN if name == EXACT else name
    implementation = IMPLEMENTATIONS[name]
    isolate(name)
    from transformers.utils import logging

    from flashqla_hub import kernelize
    from flashqla_hub.finetune.model import build
    from flashqla_hub.finetune.packing import loss_and_gradients
    from flashqla_hub.finetune.text import join, make_rows, read_documents

    logging.set_verbosity_error()
    settings = settings_of(name, options, seed)
    model, encode = build(settings)
    rows, _ = make_rows(join(read_documents(settings.data, settings.column), encode), settings)
    if exact:
        model.float()
    if implementation.is_ours:
        kernelize(model, source=settings.source, device=settings.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    row = {part: tokens[None] for part, tokens in rows[seed % len(rows)].items()}
    loss, gradients = loss_and_gradients(model, [row], settings)
    return {"loss": loss, "gradients": gradients}


def settings_of(name: str, options: argparse.Namespace, seed: int) -> Settings:
    """Those of a run of `finetune` in bfloat16 with checkpointing, whose steps are not taken."""
    return Settings(
        data=None,
        column="text",
        model=options.model,
        kernel=name,
        attention=IMPLEMENTATIONS[name].attention or "sdpa",
        source=options.source,
        trust_remote_code=False,
        device=options.device,
        seq_len=options.tokens,
        batch_size=1,
        accumulation=1,
        steps=1,
        warmup=0,
        stop_after=None,
        learning_rate=RATES[True],
        precision="bf16",
        checkpointing="non-reentrant",
        packed=False,
        held_out=1,
        evaluate=False,
        save_every=0,
        save_model=False,
        seed=seed,
        output=Path("."),
    )


def distances(found: dict, exact: dict) -> dict:
    """How far a step is from the exact one.

    "loss" is their signed difference, "errors" that of the gradients by kind of parameter, and "signs" the share of all their
    elements whose sign is another: the first step of Adam is made of signs.
    """
    squares: dict[str, torch.Tensor] = {}
    signs = elements = 0
    for name, truth in exact["gradients"].items():
        gradient, truth = found["gradients"][name].float(), truth.float()
        pair = torch.stack([(gradient - truth).square().sum(), truth.square().sum()]).double()
        for kind in (ALL, kind_of(name)):
            squares[kind] = squares.get(kind, 0) + pair
        signs += (gradient.sign() != truth.sign()).sum().item()
        elements += truth.numel()
    errors = {kind: (error / whole).sqrt().item() for kind, (error, whole) in squares.items()}
    return {"loss": found["loss"] - exact["loss"], "errors": errors, "signs": signs / elements}


def kind_of(parameter: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" is of the kind "mlp.up_proj.weight"."""
    return ".".join(part for part in parameter.split(".") if not part.isdecimal() and part not in ("model", "layers"))


def print_table(record: dict) -> None:
    found = record["implementations"]
    print(f"\n{record['model']}, a row of {record['tokens']:,} tokens, seed {record['seed']}, {record['device']}")
    print(f"loss in float32 {record['loss']:.6f}; errors of loss and gradients, and the share of other signs:\n")
    print(f"{'':36}" + "".join(f"{name:>14}" for name in found))
    print(f"{'loss':36}" + "".join(f"{one['loss']:>14.1e}" for one in found.values()))
    print(f"{'signs':36}" + "".join(f"{one['signs']:>14.2%}" for one in found.values()))
    for kind in next(iter(found.values()))["errors"]:
        print(f"{kind:36}" + "".join(f"{one['errors'][kind]:>14.2e}" for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
