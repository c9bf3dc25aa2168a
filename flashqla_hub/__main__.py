"""The command line: `python -m flashqla_hub COMMAND`.

A command is imported only when it is the one that was asked for, so `--help` is quick and needs neither torch nor
tilelang.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

try:
    import typer
except ModuleNotFoundError as error:
    sys.exit(
        f"{error.name} is not installed; run `make demo` once and use .venv/bin/python, "
        "or install what requirements/main.txt lists."
    )


class Command(NamedTuple):
    """Where a command's function lives, and its line in the overview; the function's docstring is its own help."""

    module: str
    function: str
    summary: str

    def load(self) -> Callable[..., None]:
        return getattr(import_module(self.module), self.function)


# The overview lists them in this order; a new command is one more line.
COMMANDS = {
    "demo": Command("flashqla_hub.demo", "demo_command", "Fine-tune a small Qwen3.5 on the kernel."),
    "finetune": Command("flashqla_hub.finetune.command", "finetune_command", "Train a model on your own text."),
    "finetune-report": Command(
        "flashqla_hub.finetune.command", "finetune_report_command", "Join runs and comparisons of several folders."
    ),
    "build": Command("flashqla_hub.package.build", "build_command", "Assemble build/ from the sources."),
    "compile": Command("flashqla_hub.compile.command", "compile_command", "Compile the TileLang kernels for SM90."),
    "check": Command("flashqla_hub.package.check", "check_command", "Check a kernel repository against every rule."),
    "publish": Command("flashqla_hub.package.publish", "publish_command", "Show, or make, the changes on the Hub."),
    "download": Command("flashqla_hub.package.download", "download_command", "Fill the cache for offline use."),
    "bench": Command("flashqla_hub.bench.command", "bench_command", "Time the kernel beside its peers on a GPU."),
    "bench-layer": Command(
        "flashqla_hub.bench.layer", "bench_layer_command", "Time a whole layer with and without the kernel on a GPU."
    ),
    "bench-model": Command(
        "flashqla_hub.bench.model", "bench_model_command", "Time prefill and generation with and without the kernel."
    ),
    "bench-around": Command(
        "flashqla_hub.bench.around", "bench_around_command", "Time gated norm, gates and decode step on a GPU."
    ),
    "bench-conv": Command(
        "flashqla_hub.bench.convolution",
        "bench_convolution_command",
        "Time the short convolution beside FLA's on a GPU.",
    ),
    "bench-report": Command("flashqla_hub.bench.report", "report_command", "Print the table of benchmark records."),
}


def build_app(chosen: str | None) -> typer.Typer:
    """The app whose command `chosen` is complete; every other one is only a line of the overview."""
    app = typer.Typer(
        name="flashqla-hub",
        help="FlashQLA on the Hub: build, check, publish, download and try the kernel.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # a traceback with local variables could show an access token
        add_completion=False,
    )
    for name, command in COMMANDS.items():
        if name == chosen:
            app.command(name)(command.load())
        else:
            app.command(name, help=command.summary)(_not_chosen)
    return app


def _not_chosen() -> None:
    """Stands for a command that this call does not run."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; `arguments` defaults to those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    build_app(chosen)(arguments, prog_name="flashqla-hub")


if __name__ == "__main__":
    main()
