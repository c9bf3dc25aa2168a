"""Fill the Hub cache once, so that the kernel loads later without a network.

`get_kernel(repo, version=1)` itself leaves too little behind for that: it fetches one variant of a commit, and the offline
path of `kernels` looks up the version's branch by name and wants every file of it.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from .errors import PackageError, told_in_one_sentence

REPO_ID = "qwen/flashqla"
VERSION = 1
BYTECODE = ["*.pyc", "**/__pycache__/**"]  # `kernels` downloads none either: it could differ from the source beside it


def download(repo: str = REPO_ID, *, version: int = VERSION, trust_remote_code: bool | list[str] = False) -> Path:
    """Fetch every variant of a kernel into the cache that `kernels` reads.

    Afterwards `kernels.get_kernel(repo, version=version)` works with HF_HUB_OFFLINE=1, and so does `kernels.load_kernel`
    with a lock file that pins the same commit. Offline, `kernels` loads what the cache holds without asking who
    published it, so the publisher is checked here, before anything is fetched.

    Args:
        repo: Kernel repository on the Hub, "organisation/name".
        version: Version of the kernel's contract, branch `v<version>`.
        trust_remote_code: Fetch it although the Hub does not list the publisher as trusted; a list names the
            repositories for which that holds.

    Returns:
        The downloaded snapshot; its `build/` holds the variants.

    Raises:
        PackageError: untrusted publisher, no such repository or version, no connection, or files that differ from the
            digests they were published with.
    """
    from huggingface_hub import snapshot_download

    from .hub_errors import explained

    with explained(f"download {repo}"):
        allowed = repo in trust_remote_code if isinstance(trust_remote_code, list) else trust_remote_code
        if not allowed:
            _require_trusted_publisher(repo)
        snapshot = Path(
            snapshot_download(
                repo,
                repo_type="kernel",
                revision=f"v{version}",
                cache_dir=os.environ.get("KERNELS_CACHE") or None,
                ignore_patterns=BYTECODE,
            )
        )
    _require_intact(snapshot)
    return snapshot


def _require_trusted_publisher(repo: str) -> None:
    from huggingface_hub import HfApi

    publisher = repo.partition("/")[0]
    if not getattr(HfApi().get_organization_overview(publisher), "trustedKernelPublisher", False):
        raise PackageError(
            f"the Hub does not list {publisher} as a trusted kernel publisher; read the code at "
            f"https://huggingface.co/kernels/{repo} and pass trust_remote_code=True to download it."
        )


def _require_intact(snapshot: Path) -> None:
    from .repository_rules import digest_breaches

    variants = [entry for entry in sorted((snapshot / "build").glob("*")) if entry.is_dir()]
    breaches = [breach for variant in variants for breach in digest_breaches(variant)]
    if not variants:
        raise PackageError(f"{snapshot} holds no build variant; the repository's branch was not published completely.")
    if breaches:
        raise PackageError(breaches[0])


def download_command(
    repo: Annotated[str, typer.Argument(help="Kernel repository on the Hub.")] = REPO_ID,
    version: Annotated[int, typer.Option(help="Version of the kernel's contract.")] = VERSION,
    trust_remote_code: Annotated[bool, typer.Option(help="The publisher need not be on the Hub's list.")] = False,
) -> None:
    """Fetch every variant into the cache; afterwards the kernel loads with HF_HUB_OFFLINE=1."""
    with told_in_one_sentence():
        typer.echo(download(repo, version=version, trust_remote_code=trust_remote_code))
