"""Who may import whom in the shipped kernel, read from the syntax trees."""

import ast
from pathlib import Path

import pytest

SHIPPED = Path(__file__).parents[2] / "torch-ext" / "flashqla"
GENERATED = "_ops"  # written by the build
FILES = sorted(path for path in SHIPPED.rglob("*.py") if path.stem != GENERATED)
MODULES = {".".join(path.relative_to(SHIPPED).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}

# What each module imports of ours. Data flows one way: api -> validation, gates, autograd; autograd -> ops;
# ops -> torch_path. An op reaches its implementation, nobody else does.
ARROWS = {
    "__init__": {"layers", "causal_conv1d", "gated_delta_rule", "gated_norm"},
    "checks": set(),
    "sm90": {GENERATED},
    "library": {GENERATED},
    "keywords": set(),
    "projections": {GENERATED, "checks", "library", "sm90"},
    "gated_delta_net": {
        "causal_conv1d",
        "causal_conv1d.heads",
        "causal_conv1d.validation",
        "gated_delta_rule",
        "gated_delta_rule.gate_ops",
        "gated_delta_net_step",
        "keywords",
        "projections",
    },
    "gated_delta_net_step": {GENERATED, "checks", "gated_norm.torch_path", "library", "sm90"},
    "layers": {
        "causal_conv1d",
        "causal_conv1d.validation",
        "gated_delta_net",
        "gated_delta_net_step",
        "gated_delta_rule",
        "gated_norm",
        "gated_norm.torch_path",
        "keywords",
    },
    "gated_delta_rule": {"gated_delta_rule.api", "gated_delta_rule.capability"},
    "gated_delta_rule.api": {
        "sm90",
        "gated_delta_rule.validation",
        "gated_delta_rule.gate_ops",
        "gated_delta_rule.recurrent_ops",
        "gated_delta_rule.pool",
        "gated_delta_rule.autograd",
    },
    "gated_delta_rule.gate_ops": {"library", GENERATED, "checks", "sm90", "gated_delta_rule.gates"},
    "gated_delta_rule.recurrent_ops": {"library", GENERATED, "checks", "sm90"},
    "gated_delta_rule.pool": set(),
    "gated_delta_rule.autograd": {"checks", "gated_delta_rule.ops"},
    "gated_delta_rule.ops": {
        "library",
        GENERATED,
        "checks",
        "sm90",
        "gated_delta_rule.capability",
        "gated_delta_rule.sm90_path",
        "gated_delta_rule.torch_path",
        "gated_delta_rule.validation",
    },
    "gated_delta_rule.sm90_path": {"library", GENERATED, "gated_delta_rule.plan"},
    "gated_delta_rule.torch_path": {"gated_delta_rule.chunks", "gated_delta_rule.plan"},
    "gated_delta_rule.chunks": {"gated_delta_rule.plan"},
    "gated_delta_rule.validation": {"checks", "gated_delta_rule.plan"},
    "gated_delta_rule.capability": {"sm90"},
    "gated_delta_rule.gates": set(),
    "gated_delta_rule.plan": set(),
    "causal_conv1d": {"causal_conv1d.api"},
    "causal_conv1d.api": {
        "sm90",
        "causal_conv1d.autograd",
        "causal_conv1d.capability",
        "causal_conv1d.torch_path",
        "causal_conv1d.validation",
    },
    "causal_conv1d.autograd": {"causal_conv1d.ops"},
    "causal_conv1d.ops": {"library", GENERATED, "checks", "causal_conv1d.sm90_path"},
    "causal_conv1d.sm90_path": {"library", GENERATED},
    "causal_conv1d.heads": {
        "checks",
        "causal_conv1d.api",
        "causal_conv1d.autograd",
        "causal_conv1d.capability",
        "causal_conv1d.sm90_path",
    },
    "causal_conv1d.capability": {"sm90"},
    "causal_conv1d.torch_path": set(),
    "causal_conv1d.validation": {"checks"},
    "gated_norm": {"gated_norm.api"},
    "gated_norm.api": {
        "checks",
        "sm90",
        "gated_norm.autograd",
        "gated_norm.capability",
        "gated_norm.torch_path",
    },
    "gated_norm.autograd": {"gated_norm.ops"},
    "gated_norm.ops": {"library", GENERATED, "checks", "gated_norm.sm90_path"},
    "gated_norm.sm90_path": {"library", GENERATED},
    "gated_norm.capability": {"sm90"},
    "gated_norm.torch_path": set(),
}


def package_of(module: str) -> list[str]:
    """The package that relative imports of `module` start from."""
    parts = [] if module == "__init__" else module.split(".")
    return parts if MODULES[module].name == "__init__.py" else parts[:-1]


def imports_of(module: str) -> set[str]:
    """Our modules that `module` imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = package_of(module)[: len(package_of(module)) - (node.level - 1)]
        base = [*base, *(node.module.split(".") if node.module else [])]
        submodules = {".".join([*base, alias.name]) for alias in node.names}
        found |= (submodules & {*MODULES, GENERATED}) or {".".join(base)}
    return found


def test_every_module_has_its_arrows():
    assert set(ARROWS) == set(MODULES)


@pytest.mark.parametrize("module", ARROWS)
def test_modules_import_along_the_arrows_only(module):
    assert imports_of(module) <= ARROWS[module]


@pytest.mark.parametrize("module", ARROWS)
def test_no_arrow_is_drawn_that_nobody_needs(module):
    assert ARROWS[module] <= imports_of(module)


def test_arrows_do_not_run_in_circles():
    """Every module can be loaded before those that import it."""
    waiting = {module: arrows - {GENERATED} for module, arrows in ARROWS.items()}
    while waiting:
        free = {module for module, arrows in waiting.items() if not arrows & waiting.keys()}
        assert free, f"{sorted(waiting)} import each other in a circle"
        waiting = {module: arrows for module, arrows in waiting.items() if module not in free}
