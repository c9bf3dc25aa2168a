"""Integer expressions of the lowered host program as C++ text over int64_t."""

from typing import Any

from tilelang import tvm  # noqa: F401  (importing tilelang puts its own tvm on sys.path)
from tvm import tirx

from .errors import LoweringError

# Sizes, strides and grid extents are never negative, so C++ division equals both TIR's floor and truncated division.
BINARY = {
    tirx.Add: "+",
    tirx.Sub: "-",
    tirx.Mul: "*",
    tirx.Div: "/",
    tirx.FloorDiv: "/",
    tirx.Mod: "%",
    tirx.FloorMod: "%",
}
CALLS = {"tirx.shift_right": ">>", "tirx.shift_left": "<<"}


def cpp_expression(expression: Any) -> str:
    """Prints an integer PrimExpr.

    Raises:
        LoweringError: an operation that no launcher has needed so far.
    """
    if isinstance(expression, int | tirx.IntImm):
        return str(int(expression))
    if isinstance(expression, tirx.Var):
        return expression.name
    if isinstance(expression, tirx.Cast):
        return cpp_expression(expression.value)
    if isinstance(expression, tirx.Max | tirx.Min):
        function = "larger" if isinstance(expression, tirx.Max) else "smaller"
        return f"{function}({cpp_expression(expression.a)}, {cpp_expression(expression.b)})"
    operator = BINARY.get(type(expression))
    if operator is not None:
        return f"({cpp_expression(expression.a)} {operator} {cpp_expression(expression.b)})"
    if isinstance(expression, tirx.Call) and expression.op.name in CALLS:
        left, right = expression.args
        return f"({cpp_expression(left)} {CALLS[expression.op.name]} {cpp_expression(right)})"
    raise LoweringError(f"the launchers cannot express {expression} ({type(expression).__name__}) on the host.")
