"""The gradients of one training step of each implementation beside those of float32, from the same weights.

python benchmarks/step_gradients.py --seq-len 4096 --seed 0 --seed 1

Implementations of one model round in different places, so the losses of their trainings part. How far they part does not
tell which of them is nearer to exact arithmetic. This does: each takes the loss of one row and its gradients in bfloat16, and
transformers' own code with sdpa attention takes them in float32, from the same bfloat16 weights. The error of an
implementation is |gradients - float32's| / |float32's| over all elements of a kind of parameter, and of all parameters.

The model (random weights, unless `--model` names another) and the text are those of `python -m flashqla_hub finetune`, with
gradient checkpointing; a seed draws the weights and chooses the row. transformers decides at its import whom its layers call,
so each implementation is a process of its own; they run in turn. A table is printed, and one JSON line a seed appended to
`--output`: "loss" is that of float32 in nats a token, and of an implementation the signed difference from it, "errors" are
those above, and "signs" is the share of all elements of the gradients whose sign is another.
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
from flashqla_hub.finetune.command import LARGEST_SEED, RATES, chosen_device, require_ours  # noqa: E402
from flashqla_hub.finetune.implementations import (  # noqa: E402
    IMPLEMENTATIONS,
    ONE_BY_ONE,
    OURS,
    PLAIN,
    ROUNDING,
    explain_missing,
    isolate,
    require_called,
)
from flashqla_hub.finetune.model import LARGE, TINY  # noqa: E402
from flashqla_hub.finetune.report import device_name, servers, versions  # noqa: E402
from flashqla_hub.finetune.settings import FinetuneError, Settings  # noqa: E402
from flashqla_hub.package.errors import PackageError  # noqa: E402

EXACT = "float32"
ALL = "all parameters"


def main() -> int:
    options = read_options()
    try:
        run(options)
    except torch.OutOfMemoryError:
        print(f"error: the GPU has too little memory for {options.seq_len} tokens; lower --seq-len.", file=sys.stderr)
        return 1
    except PackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    options.device = chosen_device(options.device)
    options.model = options.model or (LARGE if options.device.startswith("cuda") else TINY)
    if options.one is not None:
        torch.save(step(options.one, options, options.seed[0]), options.into)
        return
    names = options.implementation or [OURS, PLAIN, ROUNDING]
    require_runnable(names, options)
    for seed in options.seed or [0]:
        record = compare(names, options, seed)
        print_table(record)
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def require_runnable(names: list[str], options: argparse.Namespace) -> None:
    """Raise FinetuneError, before anything is computed, for what is not installed and a file that cannot be written."""
    for name in names:
        reason = explain_missing(name, options.device)
        if reason is not None:
            raise FinetuneError(f"--implementation is {name}, and {reason}; leave it out.")
    if options.output is not None:
        try:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.open("a").close()
        except OSError as error:
            raise FinetuneError(
                f"--output is {options.output}, which cannot be written: {error.strerror}; name a file."
            ) from error


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of the row, at least 2 (default: 256)")
    parser.add_argument("--seed", type=int, action="append", help="of weights and row; may be repeated (default: 0)")
    parser.add_argument(
        "--implementation",
        action="append",
        choices=[name for name in IMPLEMENTATIONS if name != ONE_BY_ONE],
        help=f"may be repeated (default: {OURS}, {PLAIN} and {ROUNDING})",
    )
    parser.add_argument("--model", help=f"shape with random weights, or name (default: {LARGE} on a GPU, else {TINY})")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--source", default=str(ROOT), help="folder or name of the kernel")
    parser.add_argument("--output", type=Path, help="file to which a JSON line a seed is appended")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seq_len < 2:
        parser.error(f"--seq-len is {options.seq_len}; it must be at least 2, or there is nothing to predict")
    for seed in options.seed or ():
        if not 0 <= seed <= LARGEST_SEED:
            parser.error(f"--seed is {seed}; it must be 0 to {LARGEST_SEED}")
    return options


def compare(names: list[str], options: argparse.Namespace, seed: int) -> dict:
    """The record of a seed: the loss in float32, and of each implementation how far loss and gradients are from it."""
    with TemporaryDirectory() as folder:
        exact = in_a_process(EXACT, options, seed, Path(folder))
        against = {
            name: distances(in_a_process(name, options, seed, Path(folder)), exact, options.device) for name in names
        }
    return {
        "device": device_name(options.device),
        "versions": versions(),
        "commit": git_commit(ROOT),
        "model": options.model,
        "seq_len": options.seq_len,
        "seed": seed,
        "loss": exact["loss"],
        "implementations": against,
    }


def in_a_process(name: str, options: argparse.Namespace, seed: int, folder: Path) -> dict:
    """What `step` returns in a process of its own."""
    file = folder / "step.pt"
    command = [sys.executable, __file__, "--one", name, "--into", file, "--seed", seed, "--seq-len", options.seq_len]
    command += ["--model", options.model, "--device", options.device, "--source", options.source]
    code = subprocess.run([str(part) for part in command], check=False).returncode
    if code != 0:
        raise FinetuneError(f"the step of {name} ended with exit code {code}; what it said stands above.")
    return torch.load(file, map_location="cpu")  # the next process needs the GPU's memory


def step(name: str, options: argparse.Namespace, seed: int) -> dict:
    """{"loss": of a row, "gradients": {parameter: gradient}} by an implementation, or in float32 by transformers' own code."""
    exact, name = name == EXACT, PLAIN if name == EXACT else name
    implementation = IMPLEMENTATIONS[name]
    isolate(name)
    from transformers.utils import logging

    from flashqla_hub import kernelize
    from flashqla_hub import report as who_serves
    from flashqla_hub.finetune.model import build
    from flashqla_hub.finetune.packing import loss_and_gradients
    from flashqla_hub.finetune.text import join, make_rows, read_documents

    logging.set_verbosity_error()
    settings = settings_of(name, options, seed)
    model, encode = build(settings)
    rows, _ = make_rows(join(read_documents(settings.data, settings.column), encode), settings)
    if exact:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        model.float()
    if implementation.is_ours:
        kernelize(model, source=settings.source, device=settings.device)
        require_ours(settings, servers(who_serves(model)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    row = {part: tokens[None] for part, tokens in rows[seed % len(rows)].items()}
    loss, gradients = loss_and_gradients(model, [row], settings)
    require_called(name, ())
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
        seq_len=options.seq_len,
        batch_size=1,
        accumulation=1,
        steps=1,
        warmup=0,
        stop_after=None,
        learning_rate=RATES[True],
        precision="bf16",
        checkpointing="non-reentrant",
        packed=False,
        held_out=0,
        evaluate=False,
        save_every=0,
        save_model=False,
        seed=seed,
        output=Path("."),
    )


def distances(found: dict, exact: dict, device: str) -> dict:
    """How far a step is from the exact one; kinds of parameter whose exact gradients are all zero are left out.

    Signs count because the first step of Adam is made of them.
    """
    from flashqla_hub.finetune.packing import squares

    sums: dict[str, torch.Tensor] = {}
    signs = elements = 0
    for name in found["gradients"].keys() | exact["gradients"].keys():
        gradient, truth = (each["gradients"][name].to(device) for each in (found, exact))
        pair = squares(gradient, truth)
        for kind in (ALL, kind_of(name)):
            sums[kind] = sums.get(kind, 0) + pair
        signs += (gradient.sign() != truth.sign()).sum().item()
        elements += truth.numel()
    errors = {kind: (error / whole).sqrt().item() for kind, (error, whole) in sorted(sums.items()) if whole > 0}
    return {"loss": found["loss"] - exact["loss"], "errors": errors, "signs": signs / elements}


def kind_of(parameter: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" is of the kind "mlp.up_proj.weight"."""
    return ".".join(part for part in parameter.split(".") if not part.isdecimal() and part not in ("model", "layers"))


def print_table(record: dict) -> None:
    found = record["implementations"]
    print(f"\n{record['model']}, a row of {record['seq_len']:,} tokens, seed {record['seed']}, {record['device']}")
    print(f"loss in float32 {record['loss']:.6f}; errors of loss and gradients, and the share of other signs:\n")
    print(f"{'':36}" + "".join(f"{name:>14}" for name in found))
    print(f"{'loss':36}" + "".join(f"{one['loss']:>14.1e}" for one in found.values()))
    print(f"{'signs':36}" + "".join(f"{one['signs']:>14.2%}" for one in found.values()))
    for kind in next(iter(found.values()))["errors"]:
        print(f"{kind:36}" + "".join(f"{one['errors'][kind]:>14.2e}" for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
