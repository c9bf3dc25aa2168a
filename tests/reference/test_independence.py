"""The reference shares no code with what it judges."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "flashqla_hub" / "reference").glob("*.py"))
ALLOWED = {"itertools", "typing", "torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_reference_imports_torch_and_itself_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in ALLOWED
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 and (ROOT / "flashqla_hub" / "reference" / f"{node.module}.py").exists()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"__import__", "exec", "eval"}


def test_there_is_a_reference_to_check():
    assert {"recurrent.py", "backward.py"} <= {path.name for path in FILES}


def test_importing_the_reference_loads_no_kernel():
    code = "import sys, flashqla_hub.reference; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    modules = done.stdout.split()
    assert "flashqla_hub.reference.recurrent" in modules
    assert not [name for name in modules if name.split(".")[0] in {"kernels", "transformers"}]
    assert not [name for name in modules if "flashqla" in name and not name.startswith("flashqla_hub")]


def test_no_shipped_file_names_the_reference():
    for path in (ROOT / "torch-ext").rglob("*.py"):
        assert "flashqla_hub" not in {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        }
