"""What the documents say is true: paths exist, commands exist, versions agree, examples run."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from flashqla_hub.__main__ import COMMANDS, build_app
from flashqla_hub.bench.record import read
from flashqla_hub.bench.report import by_row, markdown_table, split
from flashqla_hub.finetune.implementations import IMPLEMENTATIONS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Where a backticked path may start; other backticked words with a slash are names on the Hub or on the reader's machine.
ROOMS = ("torch-ext", "flashqla_hub", "build", "tests", "benchmarks", "docs", "requirements", ".ci")


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def paths_named_in(text: str) -> set[str]:
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    quoted = {word for word in re.findall(r"`([\w./-]+)`", text) if word.split("/")[0] in ROOMS and "/" in word}
    commands = set(re.findall(r"python ((?:[\w-]+/)+[\w-]+\.py)", text))
    return {path for path in links | quoted | commands if path}


def test_there_are_documents_to_check():
    names = {str(path) for path in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CARD.md", "docs/notation.md"} <= names


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_named_paths_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    missing = [
        path
        for path in sorted(paths_named_in(text))
        if not (ROOT / path).exists() and not (ROOT / document.parent / path).exists()
    ]
    assert not missing, f"{document} names {missing}, which is not in the tree"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_named_commands_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, flags=re.MULTILINE)) <= targets
    assert set(re.findall(r"python -m flashqla_hub ([a-z-]+)", text)) <= set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_commands_explain_themselves(name):
    done = subprocess.run(
        [sys.executable, "-m", "flashqla_hub", name, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"flashqla-hub {name}" in done.stdout and "--help" in done.stdout


def options_of(command: str) -> set[str]:
    parameters = typer.main.get_command(build_app(command)).commands[command].params
    return {"--help"} | {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_options_of_named_commands_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for command, rest in re.findall(r"python -m flashqla_hub ([a-z-]+)([^\n`#]*)", text):
        assert set(re.findall(r"--[a-z][a-z-]+", rest)) <= options_of(command), (command, rest)


def test_readme_options_of_finetune_exist():
    section = README.partition("## Fine-tune on your own text")[2].partition("\n## ")[0]
    named = set(re.findall(r"--[a-z][a-z-]+", section))
    assert len(named) > 8 and named <= options_of("finetune")


def test_supported_versions_are_those_of_the_requirements():
    pinned = {
        name: dict(
            re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / f"{name}.txt").read_text(), flags=re.MULTILINE)
        )
        for name in ("main", "floor")
    }
    rows = re.findall(r"^\| (5\.[\d.]+) \| (0\.[\d.]+) \| (main|oldest) pair", README, flags=re.MULTILINE)
    assert {(row[2], row[0], row[1]) for row in rows} == {
        ("main", pinned["main"]["transformers"], pinned["main"]["kernels"]),
        ("oldest", pinned["floor"]["transformers"], pinned["floor"]["kernels"]),
    }


def test_package_metadata_admits_the_supported_versions():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for name in ("main", "floor"):
        pinned = dict(
            re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / f"{name}.txt").read_text(), flags=re.MULTILINE)
        )
        for requirement in map(Requirement, listed):
            if requirement.name in pinned:
                assert pinned[requirement.name] in requirement.specifier, (name, requirement)


def test_installing_the_clone_leaves_the_kernel_alone(tmp_path):
    """`pip install /path/to/clone` builds a wheel in the clone, whose build/ is the kernel and not setuptools' to fill."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "flashqla_hub", tmp_path / "flashqla_hub", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "build").mkdir()
    wheel = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", wheel, str(tmp_path / "wheels")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "wheels").glob("flashqla_hub-*.whl"))) == 1
    assert not list((tmp_path / "build").iterdir())


def test_every_example_names_the_version_it_wants():
    calls = [
        (document, call)
        for document in DOCUMENTS
        for call in re.findall(r"get_kernel\(\"[^)]*\)", (ROOT / document).read_text(encoding="utf-8"))
    ]
    assert calls
    assert all("version=" in call for _, call in calls), calls


def test_readme_names_the_public_functions():
    tree = ast.parse((ROOT / "torch-ext/flashqla/__init__.py").read_text())
    public = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    low_level = {"chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd", "layers"}
    assert all(f"`{name}" in README for name in public if name not in low_level)


def run_example(code: str, tmp_path: Path, prelude: str = "") -> subprocess.CompletedProcess:
    """Run an example as a reader would, with the Hub's repository found in this tree and no network."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"LOCAL_KERNELS": f"qwen/flashqla={ROOT}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_readme_first_example_runs(tmp_path):
    done = run_example(code_blocks(README, "python")[0] + "\nprint(tuple(o.shape), tuple(state.shape))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(1, 1000, 4, 128) (1, 4, 128, 128)" in done.stdout


# Stands in for the download of weights, and for the Hub as source, in the README's second example.
SMALL_MODEL = f"""
import functools, torch, transformers, flashqla_hub
config = transformers.Qwen3_5TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8,
)
transformers.AutoModelForCausalLM.from_pretrained = lambda name: transformers.Qwen3_5ForCausalLM(config)
flashqla_hub.kernelize = functools.partial(flashqla_hub.kernelize, source={str(ROOT)!r})
"""


def test_readme_model_example_runs(tmp_path):
    done = run_example(code_blocks(README, "python")[1], tmp_path, SMALL_MODEL)
    assert done.returncode == 0, done.stderr
    assert "chunk_gated_delta_rule" in done.stdout


# Words that only mean something on the machine where a line was written.
FOREIGN = (
    r"/work/",
    r"/tmp/v/",
    r"\.\./shared",
    r"\bsandbox\b",
    r"\bissue #?\d",
    r"\bthis session\b",
    r"files\.pythonhosted",
)


def tracked_text_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    suffixes = {".py", ".md", ".toml", ".txt", ".nix", ".cpp", ".h", ".c", ".json", ""}
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.suffix in suffixes and path.is_file() and path != Path(__file__)]


def test_files_speak_of_the_project_alone():
    found = [
        (str(path.relative_to(ROOT)), match[0])
        for path in tracked_text_files()
        for match in [re.search("|".join(FOREIGN), path.read_text(encoding="utf-8", errors="ignore"))]
        if match
    ]
    assert not found


def speed_tables(text: str) -> list[list[str]]:
    """The rows of each table whose rows start with head counts, `| (H, HV) sequences | ...`."""
    tables = [re.findall(r"^\|.*\|$", part, flags=re.MULTILINE) for part in re.split(r"\n(?!\|)", text)]
    return [rows for table in tables if (rows := [line for line in table if re.match(r"\| \(\d+, \d+\) ", line)])]


def rows_of_runs() -> list[list[str]]:
    """For each run on an H200, its operations and gates, the rows of its table: as `bench-report` prints it, and in brief."""
    found = []
    for path in (ROOT / "benchmarks/results/h200").glob("*.jsonl"):
        *_, records = split(read([path]))
        for kind in {(record["op"], record["gates"]) for record in records}:
            chosen = [record for record in records if (record["op"], record["gates"]) == kind]
            found.append([line for line in markdown_table(chosen) if re.match(r"\| \(\d", line)])
            brief = []
            for (hk, hv, seqs, _), row in by_row(chosen).items():
                times = [row[impl].get("ms") for impl in ("flashqla", "fla") if impl in row]
                if None not in times:
                    brief.append(f"| ({hk}, {hv}) {seqs} | " + " | ".join(f"{ms:.3f}" for ms in times) + " |")
            found.append(brief)
    return found


def test_readme_times_are_those_of_a_record():
    """Every speed table is that of one run under benchmarks/results/h200/, with all of its rows."""
    speed = ROOT / "docs" / "speed.md"
    tables, runs = speed_tables(README + (speed.read_text() if speed.exists() else "")), rows_of_runs()
    assert tables and all(sorted(table) in map(sorted, runs) for table in tables)


def test_readme_training_figures_are_those_of_a_record():
    """Every row of the training table stands in one file under benchmarks/results/h200/finetune/, and they are numbered."""
    form = r"^\| (\d+) \| ([\d,]+) \| ([\w-]+) \| ([^|]+) \| ([\d.]+) \| ([\d,]+) \| ([\d,]+) \| (\w+) \|$"
    rows = re.findall(form, README, flags=re.MULTILINE)
    assert [number for number, *_ in rows] == [str(i + 1) for i in range(len(rows))]
    quoted = {tuple(figures) for _, *figures in rows}
    records = []
    for path in (ROOT / "benchmarks/results/h200/finetune").glob("*.json"):
        runs = json.loads(path.read_text())["runs"]
        records.append(
            {
                (
                    f"{run['seq_len']:,}",
                    run["checkpointing"],
                    IMPLEMENTATIONS[run["kernel"]].title,
                    f"{run['step_ms']:.1f}",
                    f"{run['tokens_per_second']:,.0f}",
                    f"{run['peak_mb']:,.0f}",
                    run.get("commit"),
                )
                for run in runs
                if "missing" not in run
            }
        )
    assert quoted and any(quoted <= record for record in records)
