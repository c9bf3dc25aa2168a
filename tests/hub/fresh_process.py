"""Python processes that know no Hub but the test's own, and whose cache is empty."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hub_server import Hub
from source_tree import ROOT

TOKEN = "hf_secretSecretSecretSecretSecretSecret"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens
HUB_VARIABLES = ("HF_", "HUGGING", "KERNELS_CACHE", "LOCAL_KERNELS", "DO_NOT_TRACK", "DISABLE_TELEMETRY")
RunPython = Callable[..., subprocess.CompletedProcess]


def run_in_fresh_process(
    folder: Path, *arguments: str | Path, hub: Hub | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Run Python with `arguments` in `folder`, which also takes the Hub cache, and `variables` in its environment.

    Variables that would lead it to another Hub, cache or kernel are not inherited.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(HUB_VARIABLES)}
    environment = {
        **inherited,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf-home"),
        "HF_ENDPOINT": hub.url if hub else NOWHERE,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "COLUMNS": "160",
        **variables,
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
