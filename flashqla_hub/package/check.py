"""`python -m flashqla_hub check`: every rule of a kernel repository as one line of a table."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from kernels.variants import VariantAccepted, parse_variant, resolve_variants
from rich.console import Console
from rich.table import Table

from . import repository_rules as repository
from . import source_rules
from .errors import PackageError, told_in_one_sentence
from .python39 import python39_problems
from .subject import Subject, read_subject
from .variants import is_variant_name

LOAD_SECONDS = 120
RECOMPILED = "libraries equal a compilation"


@dataclass(frozen=True)
class Result:
    """What one check found: `problems` empty is good; `skipped` says why there was nothing to look at."""

    name: str
    problems: tuple[str, ...] = ()
    skipped: str = ""


def run_checks(subject: Subject, recompile: bool = False) -> Iterator[Result]:
    """Run every check, in the order of the table; the slow ones come last."""
    checks = CHECKS | ({RECOMPILED: repository.recompilation_problems} if recompile else {})
    for name, problems in checks.items():
        skipped = _skip_reason(name, subject)
        yield Result(name, skipped=skipped) if skipped else Result(name, tuple(problems(subject)))


def source_check(rule: Callable[[source_rules.Sources], list[str]]) -> Callable[[Subject], list[str]]:
    """Apply a rule about Python sources to every variant whose Python differs from the others'."""

    def problems(subject: Subject) -> list[str]:
        found = [(variant, problem) for variant, (sources, _) in subject.parsed.items() for problem in rule(sources)]
        return [f"{variant}/{problem}" for variant, problem in found]

    return problems


def syntax_problems(subject: Subject) -> list[str]:
    """Every module parses and runs on Python 3.9."""
    unparsed = [f"{variant}/{problem}" for variant, (_, problems) in subject.parsed.items() for problem in problems]
    return unparsed + source_check(python39_problems)(subject)


def load_problems(subject: Subject) -> list[str]:
    """`kernels` loads each variant that fits this machine, without a network, and its ops keep to their namespace."""
    problems = []
    for name in loadable_variants(subject):
        answer = _probe(subject.build / name)
        if "error" in answer:
            problems.append(f"kernels cannot load {name} here: {answer['error']}")
            continue
        namespace = f"{answer['module']}::"
        outside = [op for op in answer["ops"] if not op.startswith(namespace)]
        if outside:
            problems.append(f"{name} registers {', '.join(outside)} outside its namespace {namespace}; use the prefix.")
        if not answer["ops"]:
            problems.append(f"{name} registers no op when it is loaded; register ops at import, not at a call.")
        if answer["missing"]:
            problems.append(f"{name} lists {', '.join(answer['missing'])} in __all__ but does not define it.")
    return problems


def loadable_variants(subject: Subject) -> list[str]:
    """The variants that `kernels` would accept on this machine, the preferred one first."""
    names = [parse_variant(name) for name in subject.variants if is_variant_name(name)]
    _, decisions = resolve_variants(names)
    return [decision.variant.variant_str for decision in decisions if isinstance(decision, VariantAccepted)]


CHECKS: dict[str, Callable[[Subject], list[str]]] = {
    "layout": repository.layout_problems,
    "no bytecode": repository.bytecode_problems,
    "metadata": repository.metadata_problems,
    "digests": repository.digest_problems,
    "public names": repository.contract_problems,
    "imports": source_check(source_rules.import_problems),
    "Python 3.9": syntax_problems,
    "no network, process, eval, pickle": source_check(source_rules.forbidden_use_problems),
    "libraries reach nothing": repository.library_problems,
    "op namespace": source_check(source_rules.registration_problems),
    "card": repository.card_problems,
    "build/ equals the sources": repository.freshness_problems,
    "loads with kernels": load_problems,
}


def _skip_reason(name: str, subject: Subject) -> str:
    if name in ("build/ equals the sources", RECOMPILED) and subject.project is None:
        return "a download has no sources beside it"
    if name == "card" and subject.project is None and repository.card_path(subject) is None:
        return "the card is on branch main"
    if name == "loads with kernels" and not loadable_variants(subject):
        return "no variant fits this machine"
    return ""


def _probe(variant: Path) -> dict:
    package = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-B", "-m", "flashqla_hub.package.probe", str(variant.resolve())]
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading took more than {LOAD_SECONDS} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": f"the process ended with code {done.returncode}: {done.stderr.strip()[-300:]}"}
    return json.loads(lines[-1])


def check_command(
    path: Annotated[Path, typer.Argument(help="A source tree with build/, or a download.")] = Path(),
    recompile: Annotated[
        bool, typer.Option("--recompile", help="Also compile the libraries and compare them byte for byte.")
    ] = False,
) -> None:
    """Check a kernel repository: layout, metadata, digests, sources, card, and that it loads."""
    with told_in_one_sentence():
        results = list(run_checks(read_subject(path), recompile))
        _print_table(path, results)
        problems = [problem for result in results for problem in result.problems]
        for problem in problems:
            typer.echo(f"- {problem}", err=True)
        if problems:
            raise PackageError(f"{len(problems)} problem{'s' * (len(problems) > 1)} in {path.resolve()}.")


def _print_table(path: Path, results: list[Result]) -> None:
    table = Table(title=str(path.resolve()), title_justify="left")
    for column in ("check", "result", "detail"):
        table.add_column(column)
    for result in results:
        verdict = "skipped" if result.skipped else "failed" if result.problems else "ok"
        count = f"{len(result.problems)} problem{'s' * (len(result.problems) > 1)}" if result.problems else ""
        table.add_row(result.name, verdict, result.skipped or count)
    Console().print(table)
