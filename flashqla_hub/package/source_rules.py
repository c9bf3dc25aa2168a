"""What shipped Python may contain, read from its syntax tree; nothing is imported or run.

Each rule takes the sources of one variant, {path: module}, and returns one sentence per breach.
"""

import ast
import sys
from collections.abc import Iterator, Mapping

Sources = Mapping[str, ast.Module]

ALLOWED_PACKAGES = {"torch"}
NETWORK = {
    *(
        "asyncio",
        "ftplib",
        "http",
        "imaplib",
        "nntplib",
        "poplib",
        "smtplib",
        "socket",
        "socketserver",
        "ssl",
        "telnetlib",
    ),
    *("urllib", "webbrowser", "xmlrpc"),
}
PROCESSES = {"multiprocessing", "pty", "subprocess", "concurrent"}
SERIALISERS = {"copyreg", "dbm", "marshal", "pickle", "pickletools", "shelve"}
CODE_LOADERS = {"builtins", "code", "codeop", "ctypes", "imp", "importlib", "pkgutil", "runpy", "site", "zipimport"}
FILES = {"fileinput", "glob", "io", "mmap", "shutil", "sqlite3", "tempfile", "zipfile", "tarfile"}
FORBIDDEN_MODULES = NETWORK | PROCESSES | SERIALISERS | CODE_LOADERS | FILES
FORBIDDEN_BUILTINS = {
    "__builtins__",
    "__import__",
    "__loader__",
    "breakpoint",
    "compile",
    "eval",
    "exec",
    "input",
    "open",
}
# Members by which an object leads to other code, or a path to a changed file, whatever the object is called.
FORBIDDEN_MEMBERS = {
    *("__builtins__", "__code__", "__globals__", "__loader__", "__subclasses__"),
    *("chmod", "mkdir", "makedirs", "rmdir", "rmtree", "symlink_to", "touch", "unlink", "write_bytes", "write_text"),
}
FORBIDDEN_CALLS = {
    "os.popen",
    "os.system",
    "torch.from_file",
    "torch.jit.load",
    "torch.load",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "torch.save",
}
FORBIDDEN_FAMILIES = (
    *("os.exec", "os.fork", "os.open", "os.posix_spawn", "os.remove", "os.rename", "os.spawn", "os.write"),
    *("torch.distributed.", "torch.hub.", "torch.multiprocessing.", "torch.package.", "torch.serialization."),
    "torch.utils.cpp_extension.",
)
# The generated module that registers the ops, and the only one that may load the library beside it.
OPS_MODULE, OPS_MAY_USE = "_ops.py", {"torch.ops.load_library"}

PREFIX = "add_op_namespace_prefix"
DECORATORS = {"custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap", "register_torch_dispatch"}
REGISTRATIONS = DECORATORS | {"define", "impl", "impl_abstract", "register_autocast", "register_autograd", "Library"}


def import_problems(sources: Sources) -> list[str]:
    """Only the standard library, torch, and relative imports that stay inside the kernel."""
    problems = []
    for path, module in sources.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and node.level > path.count("/") + 1:
                problems.append(f"{path}:{node.lineno} imports from outside the kernel; stay inside it.")
            for name in _imported_packages(node):
                if name not in sys.stdlib_module_names and name not in ALLOWED_PACKAGES:
                    problems.append(
                        f"{path}:{node.lineno} imports {name}; shipped code may import the standard library, torch and "
                        "its own modules by relative imports."
                    )
    return problems


def forbidden_use_problems(sources: Sources) -> list[str]:
    """No network, no other process, no file, no evaluated text, no pickles, no module found at run time.

    It reads the source, so it finds what is written there: mistakes, and code that does not hide. Names that are put together
    at run time are out of its reach, but for those that `getattr` and `setattr` look up in an imported module.
    """
    problems = []
    for path, module in sources.items():
        names = imported_names(module)
        for node in ast.walk(module):
            for used in _forbidden_uses(node, names):
                if path == OPS_MODULE and used in OPS_MAY_USE:
                    continue
                problems.append(
                    f"{path}:{node.lineno} uses {used}; shipped code opens no connection or file, starts no process, "
                    "evaluates no text and unpickles nothing, so remove it."
                )
    return problems


def registration_problems(sources: Sources) -> list[str]:
    """Every `torch.library` registration names its op through `add_op_namespace_prefix`."""
    problems = []
    for path, module in sources.items():
        names = imported_names(module)
        decorators = _decorator_calls(module)
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
            kind = _registration(call, names)
            if kind is None or _is_prefixed(call, module, strictly=call in decorators and kind in DECORATORS):
                continue
            problems.append(
                f"{path}:{call.lineno} calls torch.library.{kind} with a name of its own; pass {PREFIX}(...), so "
                "that two builds can live in one process."
            )
    return problems


def public_names(module: ast.Module) -> list[str] | None:
    """`__all__`, if the module assigns it exactly once, as one literal list of strings."""
    assigned = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    augmented = [node for node in ast.walk(module) if isinstance(node, ast.AugAssign)]
    extended = any(ast.unparse(node.target) == "__all__" for node in augmented)
    if len(assigned) != 1 or extended or not isinstance(assigned[0], ast.List):
        return None
    values = [item.value if isinstance(item, ast.Constant) else None for item in assigned[0].elts]
    return values if all(isinstance(value, str) for value in values) else None


def layer_names(sources: Sources) -> list[str]:
    """The classes of `layers.py`, or of `layers/__init__.py`: those are the kernel's layers on the Hub."""
    module = sources.get("layers.py") or sources.get("layers/__init__.py")
    classes = [node.name for node in module.body if isinstance(node, ast.ClassDef)] if module else []
    return [name for name in classes if not name.startswith("_")]


def imported_names(module: ast.Module) -> dict[str, str]:
    """What each local name stands for: `import torch.library as lib` gives {"lib": "torch.library"}."""
    names = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or target] = target
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted_name(node: ast.AST, names: Mapping[str, str]) -> str | None:
    """The full name of `a.b.c`, with imported names resolved; None when it does not start with a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def _imported_packages(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield node.module.partition(".")[0]


def _forbidden_uses(node: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
    yield from (name for name in _imported_packages(node) if name in FORBIDDEN_MODULES)
    if isinstance(node, ast.Name) and node.id in FORBIDDEN_BUILTINS:
        yield node.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
        yield from _computed_names(node, names)
    mentioned = []
    if isinstance(node, ast.Attribute):
        mentioned = [dotted_name(node, names) or ""]
        if node.attr in FORBIDDEN_MEMBERS:
            yield node.attr
    elif isinstance(node, ast.ImportFrom) and not node.level:
        mentioned = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        mentioned = [f"{alias.name}." for alias in node.names]
    yield from (name for name in mentioned if name in FORBIDDEN_CALLS or name.startswith(FORBIDDEN_FAMILIES))


def _computed_names(call: ast.Call, names: Mapping[str, str]) -> Iterator[str]:
    """What `getattr(a.b, "c")` reaches of a forbidden kind; of an imported module, also that the name is computed.

    A name in capitals is a constant, and the ops of torch are looked up by the name of the build.
    """
    owner, name = dotted_name(call.args[0], names) or "", call.args[1] if len(call.args) > 1 else None
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        reached = f"{owner}.{name.value}"
        if reached in FORBIDDEN_CALLS or reached.startswith(FORBIDDEN_FAMILIES) or name.value in FORBIDDEN_MEMBERS:
            yield reached
    elif owner.partition(".")[0] in names.values() and owner != "torch.ops":
        yield f"{call.func.id} of {owner} with a computed name"


def _decorator_calls(module: ast.Module) -> set[ast.Call]:
    functions = (n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return {decorator for node in functions for decorator in node.decorator_list if isinstance(decorator, ast.Call)}


def _registration(call: ast.Call, names: Mapping[str, str]) -> str | None:
    """Which function of torch.library `call` calls to register something, None for any other call."""
    name = dotted_name(call.func, names) or ""
    package, _, function = name.rpartition(".")
    return function if package == "torch.library" and function in REGISTRATIONS else None


def _is_prefixed(call: ast.Call, module: ast.Module, strictly: bool) -> bool:
    """Whether the op's name comes from PREFIX; `strictly`: it is that call, as the Hub's own build check demands."""
    if not call.args:
        return False
    name = call.args[0]
    if strictly:
        return isinstance(name, ast.Call) and _last_part(name.func) == PREFIX
    return _mentions_prefix(name) or (isinstance(name, ast.Name) and _comes_from_prefix(name.id, module))


def _comes_from_prefix(name: str, module: ast.Module) -> bool:
    """Whether everything assigned to `name` comes from PREFIX, or `name` is an op that a decorator registered."""
    values, registered = [], False
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            values.append(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name == name:
            registered = registered or any(_mentions_prefix(decorator) for decorator in node.decorator_list)
    return registered or (bool(values) and all(map(_mentions_prefix, values)))


def _mentions_prefix(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and _last_part(n.func) == PREFIX for n in ast.walk(node))


def _last_part(function: ast.expr) -> str | None:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
