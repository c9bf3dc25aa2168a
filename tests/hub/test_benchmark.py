"""`kernels benchmark` runs our benchmark, and the benchmark refuses wrong results."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from fresh_process import RunPython

RUN = "import sys\nfrom kernels.cli import main\nsys.argv[0] = 'kernels'\nmain()"
pytestmark = pytest.mark.skipif(find_spec("tabulate") is None, reason="kernels[benchmark] is not installed")


@pytest.fixture
def repository(released: Path, tmp_path: Path) -> Path:
    for part in ("build", "benchmarks"):
        shutil.copytree(released / part, tmp_path / "repository" / part)
    return tmp_path / "repository"


def run_benchmark(run_python: RunPython, repository: Path, *options: str):
    return run_python("-c", RUN, "benchmark", repository, "--iterations", "2", "--warmup", "1", *options)


def test_benchmark_runs_and_every_workload_is_verified(repository: Path, run_python: RunPython, tmp_path: Path):
    done = run_benchmark(run_python, repository, "--output", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    verified = {result["workload"]: result["verified"] for result in report["results"]}
    assert verified == {"GatedDeltaRule.forward": True, "GatedDeltaRule.forward_and_backward": True}
    metadata = json.loads((repository / "build/torch-universal/metadata.json").read_text())
    assert report["kernelCommitSha"] == metadata["id"].rpartition("_")[2]


def test_slightly_wrong_kernel_is_refused(repository: Path, run_python: RunPython):
    """An error of 0.1 % is far below the runner's own absolute 0.01 and above our tolerance."""
    init = repository / "build/torch-universal/__init__.py"
    wrong = (
        "\n_right = chunk_gated_delta_rule\n"
        "def chunk_gated_delta_rule(*args, **kwargs):\n"
        "    o, state = _right(*args, **kwargs)\n"
        "    return o * 1.001, state\n"
    )
    init.write_text(init.read_text() + wrong)
    done = run_benchmark(run_python, repository)
    assert done.returncode == 1 and "relative error 1.0e-03 is above 2e-05" in done.stderr
