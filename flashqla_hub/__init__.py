"""FlashQLA on the Hub: the gated delta rule kernels of `qwen/flashqla` in transformers models.

    import flashqla_hub

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3.5-0.8B")
    flashqla_hub.kernelize(model, trust_remote_code=True)
    print(flashqla_hub.report(model))

Importing this package imports neither torch nor transformers; each name does when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import kernel_config
    from .installation import kernelize, unregister
    from .package.download import download
    from .registry import register
    from .reporting import is_active, report

__all__ = ["download", "is_active", "kernel_config", "kernelize", "register", "report", "unregister"]

_HOME = {
    "download": "package.download",
    "is_active": "reporting",
    "kernel_config": "config",
    "kernelize": "installation",
    "register": "registry",
    "report": "reporting",
    "unregister": "installation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
