"""What can go wrong between a spec and a library; every message is a sentence that can be shown as it is."""


class CompileError(RuntimeError):
    """Base of all of them."""


class ToolsMissing(CompileError):
    """A compiler is absent or has another version than the pinned one; the message says which and how to get it."""


class LoweringError(CompileError):
    """The kernel uses something on the host side that the launchers cannot express; the message names it."""


class CompilerError(CompileError):
    """A compiler refused its input; the message holds what it said."""


class GateFailure(CompileError):
    """The compiled result may not be shipped; one line per reason."""
