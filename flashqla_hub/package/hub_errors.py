"""Failures of the Hub, each as one sentence with the way out, and never with an access token in it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .errors import PackageError

TOKEN = re.compile(r"\b(hf|oauth)_[A-Za-z0-9_.-]+|(?<=Bearer )\S+")
HIDDEN = "***"
APPROVAL = "https://huggingface.co/spaces/kernels-community/README/discussions/new"
SENTENCES = {
    401: "the Hub does not accept the access token (401); log in with `hf auth login`, or set HF_TOKEN to a valid one.",
    403: (
        "the Hub refuses this token (403); it needs write access, and publishing kernels is enabled for an organisation "
        f"only on request: describe the kernel, its source, purpose and benchmarks at {APPROVAL}."
    ),
    412: "the branch has changed on the Hub since it was compared (412); run the command again.",
    429: "the Hub asks for fewer requests (429); wait a few minutes and run the command again.",
}


@contextmanager
def explained(action: str, token: str | None = None) -> Iterator[None]:
    """Turn every failure of the Hub inside into a PackageError "cannot <action>: <why>", keeping the cause."""
    try:
        yield
    except (HTTPError, HFValidationError, OSError) as error:
        _clear_tokens(error, token)
        raise PackageError(f"cannot {action}: {redacted(sentence_of(error), token)}") from error


def redacted(text: str, token: str | None = None) -> str:
    """`text` with access tokens hidden: the one in use, and all that look like one."""
    for secret in {token, get_token()} - {None, ""}:
        text = text.replace(secret, HIDDEN)
    return TOKEN.sub(HIDDEN, text)


def status_of(error: BaseException) -> int | None:
    """HTTP status of a Hub error, None when no answer came."""
    return getattr(getattr(error, "response", None), "status_code", None)


def sentence_of(error: BaseException) -> str:
    """Why the Hub did not do what was asked, and what helps."""
    status = status_of(error)
    if isinstance(error, HFValidationError):
        return "that is no name of a repository; name it as owner/name, for example qwen/flashqla."
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to reach the Hub."
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no such branch ({_first_line(error)}); it may not be published yet."
    if isinstance(error, RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no such kernel repository that this token may see; check the name, or `hf auth login`."
    if status in SENTENCES:
        return SENTENCES[status]
    if isinstance(error, HfHubHTTPError) or status is not None:
        return f"the Hub answered {status}: {_first_line(error)}"
    if isinstance(error, HTTPError | ConnectionError | LocalEntryNotFoundError):
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}); check the network, or HF_ENDPOINT."
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    """What the server itself said, or what the client says of the failure."""
    text = getattr(error, "server_message", None) or str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def _clear_tokens(error: BaseException | None, token: str | None) -> None:
    """Clear the texts of the error and of all that led to it: a traceback prints every one of them."""
    while error is not None:
        error.args = tuple(redacted(arg, token) if isinstance(arg, str) else arg for arg in error.args)
        error = error.__cause__ or error.__context__
