"""Python 3.9 is the oldest version that a Hub kernel must run on; this finds what newer versions have added.

The parser's own `feature_version` rejects the new statements (match, except*, type). It accepts expressions that fail
at run time only, such as `int | None` in an evaluated annotation: those are found here.
"""

import ast
from collections.abc import Iterator, Mapping

from .source_rules import Sources, dotted_name, imported_names

OLDEST = (3, 9)
NEWER_NAMES = {
    "contextlib": {"aclosing", "chdir"},
    "dataclasses": {"KW_ONLY"},
    "enum": {"EnumCheck", "FlagBoundary", "ReprEnum", "StrEnum", "member", "nonmember", "property", "verify"},
    "inspect": {"get_annotations"},
    "itertools": {"batched", "pairwise"},
    "math": {"cbrt", "exp2", "sumprod"},
    "types": {"EllipsisType", "NoneType", "NotImplementedType", "UnionType"},
    "typing": {
        *("Concatenate", "LiteralString", "Never", "NotRequired", "ParamSpec", "ParamSpecArgs", "ParamSpecKwargs"),
        *("Required", "Self", "TypeAlias", "TypeGuard", "TypeVarTuple", "Unpack", "assert_never", "assert_type"),
        *("dataclass_transform", "override", "reveal_type", "is_typeddict"),
    },
}
NEWER_MODULES = {"annotationlib", "compression", "tomllib"}
NEWER_KEYWORDS = {"zip": {"strict"}, "dataclasses.dataclass": {"kw_only", "slots", "weakref_slot"}}
NEWER_BUILTINS = {"ExceptionGroup", "aiter", "anext", "EncodingWarning"}
EVALUATING_DECORATORS = {"torch.library.custom_op", "torch.library.triton_op"}


def parse(files: Mapping[str, bytes]) -> tuple[dict[str, ast.Module], list[str]]:
    """The syntax trees of the Python files, and a sentence for each file that Python 3.9 cannot parse."""
    sources, problems = {}, []
    for path, content in files.items():
        if not path.endswith(".py"):
            continue
        try:
            sources[path] = ast.parse(content, filename=path, feature_version=OLDEST)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", 0)
            problems.append(f"{path}:{line} is not Python 3.9 ({error.args[0]}); shipped code must run there.")
    return sources, problems


def python39_problems(sources: Sources) -> list[str]:
    """What Python 3.9 parses but cannot run."""
    return [
        f"{path}:{node.lineno} needs a Python newer than 3.9: {what}."
        for path, module in sources.items()
        for node, what in _newer(module)
    ]


def _newer(module: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    names = imported_names(module)
    postponed = names.get("annotations") == "__future__.annotations"
    for node in ast.walk(module):
        yield from _newer_names(node, names)
        yield from _newer_expressions(node, names)
        yield from _newer_annotations(node, names, postponed)


def _newer_names(node: ast.AST, names: Mapping[str, str]) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Import):
        yield from ((node, f"module {alias.name}") for alias in node.names if alias.name in NEWER_MODULES)
    if isinstance(node, ast.ImportFrom) and not node.level:
        if node.module in NEWER_MODULES:
            yield node, f"module {node.module}"
        newer = NEWER_NAMES.get(node.module, set())
        yield from ((node, f"{node.module}.{alias.name}") for alias in node.names if alias.name in newer)
    if isinstance(node, ast.Attribute):
        package, _, name = (dotted_name(node, names) or "").rpartition(".")
        if name in NEWER_NAMES.get(package, set()):
            yield node, f"{package}.{name}"
    if isinstance(node, ast.Name) and node.id in NEWER_BUILTINS and node.id not in names:
        yield node, node.id


def _newer_expressions(node: ast.AST, names: Mapping[str, str]) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Call):
        function = dotted_name(node.func, names)
        newer = NEWER_KEYWORDS.get(function, set())
        yield from ((node, f"{function}({k.arg}=...)") for k in node.keywords if k.arg in newer)
        if function in ("isinstance", "issubclass") and len(node.args) == 2 and _is_union(node.args[1]):
            yield node, f"{function} with X | Y; write a tuple"
    if isinstance(node, ast.Assign) and any(_is_union(n) and _joins_none(n) for n in ast.walk(node.value)):
        yield node, "X | None as a value; write Optional[X]"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and _is_bare_star(node.slice):
        yield node, "a starred index"


def _newer_annotations(node: ast.AST, names: Mapping[str, str], postponed: bool) -> Iterator[tuple[ast.AST, str]]:
    """`X | Y` in an annotation is evaluated, unless the module postpones it and nobody evaluates it later."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        evaluated = not postponed or any(dotted_name(d, names) in EVALUATING_DECORATORS for d in decorators)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        annotations = [a.annotation for a in every if a is not None] + [node.returns]
    elif isinstance(node, ast.AnnAssign):
        evaluated, annotations = not postponed, [node.annotation]
    else:
        return
    for annotation in annotations:
        if evaluated and annotation is not None and any(map(_is_union, ast.walk(annotation))):
            yield annotation, f"annotation {ast.unparse(annotation)} is evaluated; write Optional[...] or Union[...]"


def _is_union(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def _joins_none(union: ast.BinOp) -> bool:
    return any(isinstance(side, ast.Constant) and side.value is None for side in (union.left, union.right))


def _is_bare_star(index: ast.Tuple) -> bool:
    """Whether the tuple is written without parentheses and has a starred element, as in `x[*shape]`."""
    starred = any(isinstance(element, ast.Starred) for element in index.elts)
    return starred and index.col_offset == index.elts[0].col_offset
