"""The same run by other implementations, each in a process of its own with the same rows in the same order."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from .implementations import IMPLEMENTATIONS, baselines, explain_missing
from .report import REPORT_FILE, write
from .settings import FinetuneError, Settings

FOLDER = "compare"  # of the other runs, in the output folder of a run
LOG_FILE = "log.txt"
RESULT_FILE = "result.json"
TAIL = 300  # characters of a failed run's last line
SECONDS = 900  # a comparison
GRACE = 10  # seconds between asking a process to end and ending it


def parse(wanted: list[str], packed: bool = False) -> dict[str, int]:
    """{implementation: steps} of the values of --compare: NAME, NAME:STEPS, or all.

    Raises:
        FinetuneError: a name or a number that is none.
    """
    known = baselines(packed)
    chosen: dict[str, int] = {}
    for text in wanted:
        name, colon, steps = text.partition(":")
        names = known if name == "all" else (name,)
        if name not in (*known, "all") or (colon and not (steps.isdecimal() and int(steps))):
            raise FinetuneError(
                f"--compare is {text}; it must be all or one of {', '.join(known)}, with :STEPS or not."
            )
        chosen |= {name: int(steps) if colon else IMPLEMENTATIONS[name].compared_steps for name in names}
    return chosen


def compare(name: str, steps: int, settings: Settings, seconds: float, console: Console) -> dict:
    """The report of a run by another implementation, also written to its folder as soon as it ends.

    The learning rate follows the schedule of `settings`, so the steps are those of the run that is compared. A run that is not
    possible here is {"kernel", "missing": reason}. One that failed has "failed": reason, and what it had done by then, or
    "missing" too if that is nothing.
    """
    other = _settings_of(name, steps, settings)
    other.output.mkdir(parents=True, exist_ok=True)
    _forget(other.output)
    reason = explain_missing(name, settings.device)
    if reason is not None:
        result = {"kernel": name, "missing": reason}
    else:
        with console.status(f"comparing with {IMPLEMENTATIONS[name].title}, {other.stop_after} steps"):
            reason = _run(other, seconds)
        result = _result(other.output, reason)
    write(result, other.output / RESULT_FILE)
    return result


def forget(output: Path) -> None:
    """Remove the results of earlier comparisons from an output folder whose run begins anew."""
    for name in IMPLEMENTATIONS:
        _forget(output / FOLDER / name)


def _forget(other: Path) -> None:
    for file in (REPORT_FILE, RESULT_FILE):
        (other / file).unlink(missing_ok=True)


def found(folders: Sequence[Path]) -> list[dict]:
    """The results that earlier runs have left in their output folders, folder by folder, this kernel first.

    Also of a comparison that was itself ended: what it had done by then.
    """
    runs = []
    for folder in folders:
        if (folder / REPORT_FILE).is_file():
            runs.append(_read(folder / REPORT_FILE))
        for name in IMPLEMENTATIONS:
            other = folder / FOLDER / name
            if (other / RESULT_FILE).is_file():
                runs.append(_read(other / RESULT_FILE))
            elif (other / REPORT_FILE).is_file():
                runs.append(_result(other, "the comparison was ended from outside"))
    return runs


def require_alike(runs: Sequence[dict]) -> None:
    """Raise FinetuneError if the runs are not those of one model on the same rows by the same schedule."""
    first, *others = [run for run in runs if "compared" in run] or [{}]
    for other in others:
        for name, value in first["compared"].items():
            found = other["compared"].get(name)
            if found != value:
                one, another = f"the run of {first['kernel']}", f"that of {other['kernel']}"
                if first["kernel"] == other["kernel"]:
                    one, another = f"one run of {first['kernel']}", "another"
                raise FinetuneError(
                    f"{name.replace('_', '-')} is {value} in {one} and {found} in {another}; compare runs that have the same "
                    "options."
                )


def _read(path: Path) -> dict:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        run = None
    if not isinstance(run, dict) or run.get("kernel") not in IMPLEMENTATIONS:
        raise FinetuneError(f"{path} is no report of a run; remove it, or run again with --overwrite.")
    return run


def _result(output: Path, reason: str | None) -> dict:
    """What a process has left of its run, and why that is not all."""
    report = output / REPORT_FILE
    if report.is_file():
        result = _read(report)
        return result if reason is None else {**result, "failed": reason}
    reason = reason or "it wrote no report"
    return {"kernel": output.name, "missing": reason, "failed": reason}


def _settings_of(name: str, steps: int, settings: Settings) -> Settings:
    return replace(
        settings,
        kernel=name,
        attention=IMPLEMENTATIONS[name].attention or settings.attention,
        stop_after=min(steps, settings.last_step),
        evaluate=False,
        save_every=0,
        save_model=False,
        output=settings.output / FOLDER / name,
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


def _run(settings: Settings, seconds: float) -> str | None:
    """Run it; None, or why it did not come to its end."""
    log = settings.output / LOG_FILE
    with _exits_when_terminated():
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(command_of(settings), env=_environment(), stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"not done within {seconds:.0f} s"
        finally:
            _end(process)
    return None if code == 0 else _last_line(log)


@contextmanager
def _exits_when_terminated() -> Iterator[None]:
    """SIGTERM ends this process by an exception meanwhile, so that what it has started is ended too."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """This process's, with the folder of this package on the path, wherever it is run from."""
    package = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return (lines or ["it said nothing"])[-1].removeprefix("error: ").rstrip(".")[-TAIL:]
