"""Load the kernel into this process, and say in one sentence why that did not work."""

import os
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from .download import REPO_ID, VERSION
from .errors import PackageError

MINIMUM_KERNELS = "0.16.2"
TELEMETRY_SWITCHES = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")


def load(
    source: str | os.PathLike = REPO_ID,
    *,
    version: int = VERSION,
    trust_remote_code: bool | list[str] = False,
    check_arch: bool = True,
) -> ModuleType:
    """Load the kernel from the Hub, from its cache, or from a folder.

    Args:
        source: A Hub repository "organisation/name", or a local kernel repository: a Path, or text that starts with
            ".", "/" or "~".
        version: Version of the kernel's contract on the Hub; a folder has only one.
        trust_remote_code: Load it although the Hub does not list its publisher as trusted; code you chose to trust.
        check_arch: Refuse a build from the Hub whose compiled kernels do not fit the current GPU; False takes the PyTorch
            path there, as a folder always does.

    Returns:
        The kernel module: what `__all__` of torch-ext/flashqla/__init__.py lists.

    Raises:
        PackageError: with the reason and the way out; the error of `kernels` is its cause.
    """
    from kernels import get_kernel, get_local_kernel

    _require_supported_kernels()
    folder = local_folder(source)
    try:
        if folder is not None:
            return get_local_kernel(folder)
        return get_kernel(str(source), version=version, trust_remote_code=trust_remote_code, check_arch=check_arch)
    except Exception as error:
        sentence = _explain(error, Request(str(source), version, folder))
        if sentence is None:
            raise
        raise PackageError(sentence) from error


def local_folder(source: str | os.PathLike) -> Path | None:
    """The folder that `source` names, None if it is a repository on the Hub."""
    if isinstance(source, str) and not source.startswith((".", "/", "~", os.sep)):
        return None
    return Path(source).expanduser().resolve()


class Request(NamedTuple):
    """What `load` was asked for."""

    source: str
    version: int
    folder: Path | None


class Failure(NamedTuple):
    """A failure of `kernels`, recognised by its type and words."""

    error: type[Exception]
    words: str
    sentence: Callable[[Exception, Request], str]


def _explain(error: Exception, request: Request) -> str | None:
    """The sentence for a failure that `load` knows, None for any other."""
    if request.folder is not None and not request.folder.is_dir():
        return f"{request.folder} does not exist; name the root of a kernel repository, which holds build/."
    for failure in FAILURES:
        if isinstance(error, failure.error) and failure.words in str(error):
            return failure.sentence(error, request)
    return _explain_connection(error, request)


def _explain_connection(error: Exception, request: Request) -> str | None:
    from huggingface_hub.errors import HTTPError

    from .hub_errors import redacted, sentence_of

    if not isinstance(error, HTTPError | ConnectionError):
        return None
    if "Illegal header" in str(error) and _telemetry_switches():
        return _forbidden_header(request)
    return f"cannot load {request.source}: {redacted(sentence_of(error))}"


def _untrusted(error: Exception, request: Request) -> str:
    publisher = request.source.partition("/")[0]
    return (
        f"the Hub does not list {publisher} as a trusted kernel publisher; read the code at "
        f"https://huggingface.co/kernels/{request.source} and pass trust_remote_code=True to load it."
    )


def _trust_unknown(error: Exception, request: Request) -> str:
    if _telemetry_switches():
        return _forbidden_header(request)
    return (
        f"the Hub could not be asked whether it trusts the publisher of {request.source}; check the network, or pass "
        "trust_remote_code=True if you do."
    )


def _forbidden_header(request: Request) -> str:
    return (
        f"{' and '.join(_telemetry_switches())} makes `kernels` send a header that HTTP forbids, so it cannot ask the Hub; "
        f"unset it, or run flashqla_hub.download({request.source!r}) and load with HF_HUB_OFFLINE=1."
    )


def _telemetry_switches() -> list[str]:
    return [name for name in TELEMETRY_SWITCHES if os.environ.get(name)]


def _not_in_cache(error: Exception, request: Request) -> str:
    return (
        f"HF_HUB_OFFLINE is set and the cache does not hold version {request.version} of {request.source} completely; "
        f"run flashqla_hub.download({request.source!r}, version={request.version}, trust_remote_code=True) once with a "
        "network, if you trust its publisher."
    )


def _no_such_version(error: Exception, request: Request) -> str:
    available = str(error).rpartition(":")[2].strip() or "none"
    return (
        f"{request.source} has no version {request.version}; available: {available}. Pass one of them as version=..., or "
        "upgrade flashqla_hub."
    )


def _no_variant(error: Exception, request: Request) -> str:
    trace = "; ".join(line.strip() for line in str(error).splitlines()[1:] if line.strip()) or "it holds none"
    return (
        f"{request.source} has no build for this torch and machine ({trace}); install a torch that one of them names, or "
        "a version of the kernel that has torch-universal."
    )


def _other_arch(error: Exception, request: Request) -> str:
    reason = str(error).partition("current device: ")[2].partition(". The declared")[0]
    return f"the compiled kernels do not fit this GPU ({reason}); pass check_arch=False to use the PyTorch path there."


def _kernels_too_old(error: Exception, request: Request) -> str:
    needed = str(error).partition("requires ")[2].partition(",")[0]
    return f"{request.source} needs {needed}, not {installed_version('kernels')}; run `pip install --upgrade kernels`."


FAILURES = (
    Failure(ValueError, "is not from a trusted publisher", _untrusted),
    Failure(ValueError, "could not verify publisher trust status", _trust_unknown),
    Failure(ValueError, "is not available in the local cache", _not_in_cache),
    Failure(FileNotFoundError, "Cannot find a local snapshot", _not_in_cache),
    Failure(ValueError, "not found, available versions", _no_such_version),
    Failure(FileNotFoundError, "Cannot find a build variant", _no_variant),
    Failure(RuntimeError, "does not support the current device", _other_arch),
    Failure(RuntimeError, "requires kernels", _kernels_too_old),
)


def _require_supported_kernels() -> None:
    from packaging.version import Version

    installed = installed_version("kernels")
    if Version(installed) < Version(MINIMUM_KERNELS):
        advice = "run `pip install --upgrade kernels`"
        raise PackageError(f"flashqla_hub needs kernels>={MINIMUM_KERNELS}, not {installed}; {advice}.")
