"""What shipped Python may contain: torch and the standard library, the syntax of Python 3.9, nothing that reaches out."""

import ast
import sys
from pathlib import Path

import pytest

SHIPPED = Path(__file__).parents[2] / "torch-ext" / "flashqla"
FILES = sorted(SHIPPED.rglob("*.py"))
PYTHON = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SHIPPED)))

# Modules of the standard library that open files or connections, start processes, or run text as code.
REACHING_OUT = {
    "asyncio",
    "builtins",
    "code",
    "ctypes",
    "ftplib",
    "http",
    "importlib",
    "marshal",
    "multiprocessing",
    "pickle",
    "pty",
    "requests",
    "runpy",
    "shelve",
    "shutil",
    "smtplib",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "urllib",
    "xmlrpc",
}
CALLS = {"__import__", "compile", "eval", "exec", "input", "open", "print", "breakpoint"}
ATTRIBUTES = {"system", "popen", "spawnv", "execv", "fork", "load_state_dict_from_url", "hub"}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def test_there_are_sources_to_check():
    assert len(FILES) > 10


@PYTHON
def test_only_torch_and_the_standard_library_are_imported(path):
    for node in nodes(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for root in (name.split(".")[0] for name in names):
            assert root == "torch" or root in sys.stdlib_module_names, f"{root} is not shipped with torch"
            assert root not in REACHING_OUT, f"{root} reaches out"


@PYTHON
def test_nothing_reaches_out_or_runs_text(path):
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in CALLS
        if isinstance(node, ast.Attribute):
            assert node.attr not in ATTRIBUTES


@PYTHON
def test_the_syntax_is_that_of_python_3_9(path):
    ast.parse(path.read_text(), feature_version=(3, 9))


@PYTHON
def test_annotations_run_on_python_3_9(path):
    """`X | None` is a TypeError there when a function is defined; `feature_version` does not see it."""
    for node in nodes(path):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in filter(None, annotations):
            unions = [part for part in ast.walk(annotation) if isinstance(part, ast.BinOp)]
            assert not unions, f"line {annotation.lineno}: write Optional or Union"


@PYTHON
def test_no_option_of_zip_is_newer_than_python_3_9(path):
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            assert not node.keywords


@PYTHON
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


@PYTHON
def test_public_functions_are_documented(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and path.name == "api.py":
            docstring = ast.get_docstring(node) or ""
            missing = [a.arg for a in node.args.args + node.args.kwonlyargs if f"{a.arg}" not in docstring]
            inherited = "others as in" in docstring or "Args, raises: as" in docstring
            assert docstring and (not missing or inherited), f"{node.name} does not document {missing}"
