"""The same run by other implementations, each in a process of its own with the same rows in the same order."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from .implementations import BASELINES, IMPLEMENTATIONS, explain_missing
from .report import REPORT_FILE
from .settings import FinetuneError, Settings

LOG_FILE = "log.txt"
TAIL = 300  # characters of a failed run's last line


def parse(wanted: list[str]) -> dict[str, int]:
    """{implementation: steps} of the values of --compare: NAME, NAME:STEPS, or all.

    Raises:
        FinetuneError: a name or a number that is none.
    """
    chosen: dict[str, int] = {}
    for text in wanted:
        name, colon, steps = text.partition(":")
        names = BASELINES if name == "all" else (name,)
        if name not in (*BASELINES, "all") or (colon and not (steps.isdecimal() and int(steps))):
            raise FinetuneError(
                f"--compare is {text}; it must be all or one of {', '.join(BASELINES)}, with :STEPS or not."
            )
        chosen |= {name: int(steps) if colon else IMPLEMENTATIONS[name].compared_steps for name in names}
    return chosen


def compare(name: str, steps: int, settings: Settings, console: Console) -> dict:
    """The report of a run by another implementation, {"kernel", "missing": reason} if there is none.

    The learning rate follows the schedule of `settings`, so the steps are those of the run that is compared.
    """
    reason = explain_missing(name, settings.device)
    if reason is None:
        with console.status(f"comparing with {IMPLEMENTATIONS[name].title}, {min(steps, settings.last_step)} steps"):
            other = _settings_of(name, steps, settings)
            reason = _run(other)
    if reason is not None:
        return {"kernel": name, "missing": reason}
    return json.loads((other.output / REPORT_FILE).read_text(encoding="utf-8"))


def _settings_of(name: str, steps: int, settings: Settings) -> Settings:
    return replace(
        settings,
        kernel=name,
        attention=IMPLEMENTATIONS[name].attention or settings.attention,
        stop_after=min(steps, settings.last_step),
        evaluate=False,
        save_every=0,
        save_model=False,
        output=settings.output / "compare" / name,
    )


def command_of(settings: Settings) -> list[str]:
    """The command line of a run with these settings."""
    command = [sys.executable, "-m", "flashqla_hub", "finetune"]
    for name, value in vars(settings).items():
        option = "--" + name.replace("_", "-")
        if name == "data" or value is None:
            continue
        if isinstance(value, bool):
            command.append(option if value else option.replace("--", "--no-", 1))
        else:
            command += [option, str(value)]
    return [*command, "--overwrite", *([] if settings.data is None else ["--", settings.data])]


def _run(settings: Settings) -> str | None:
    """Run it; None, or why there is no report."""
    settings.output.mkdir(parents=True, exist_ok=True)
    log = settings.output / LOG_FILE
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command_of(settings), env=_environment(), stdout=file, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode == 0:
        return None
    return f"failed: {_last_line(log)}"


def _environment() -> dict[str, str]:
    """This process's, with the folder of this package on the path, wherever it is run from."""
    package = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return (lines or ["it said nothing"])[-1].removeprefix("error: ")[-TAIL:]
