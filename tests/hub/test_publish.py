"""publish: what would change, the change, and every reason not to."""

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from fresh_process import TOKEN, RunPython
from hub_server import Change, Hub
from huggingface_hub.utils import validate_repo_id
from packaging.version import Version
from source_tree import build, commit_all

from flashqla_hub.package import publish as publishing
from flashqla_hub.package.errors import PackageError
from flashqla_hub.package.hub_errors import explained, redacted
from flashqla_hub.package.project import read_project
from flashqla_hub.package.publish import MINIMUM_HUB, publish, published_files

pytestmark = pytest.mark.skipif(
    Version(version("huggingface_hub")) < Version(MINIMUM_HUB),
    reason=f"publishing a kernel needs huggingface_hub>={MINIMUM_HUB}",
)
REPO = "qwen/flashqla"


@pytest.fixture
def api(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    """A client of that Hub, which takes large files over plain HTTP alone."""
    from huggingface_hub import HfApi

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return HfApi(endpoint=hub.url, token=TOKEN)


def publish_all(root: Path, api) -> None:
    publish(root, REPO, api, make_changes=True)


def rebuild_and_commit(root: Path) -> None:
    build(root)
    commit_all(root)


def writes(hub: Hub) -> list[str]:
    return [request for request in hub.requests if not request.startswith(("GET", "HEAD"))]


def test_dry_run_lists_everything_and_changes_nothing(committed: Path, hub: Hub, run_python: RunPython):
    done = run_python("-m", "flashqla_hub", "publish", committed, "--repo", REPO, hub=hub)
    assert done.returncode == 0, done.stderr
    for branch, files in published_files(read_project(committed)).items():
        assert branch in done.stdout
        assert all(path in done.stdout for path in files)
    assert "Dry run" in done.stdout
    assert hub.repositories == {} and writes(hub) == []


def test_command_publishes_build_benchmark_and_card(committed: Path, hub: Hub, run_python: RunPython):
    done = run_python("-m", "flashqla_hub", "publish", committed, "--execute", hub=hub)
    assert done.returncode == 0, done.stderr
    repository = hub.repositories[REPO]
    expected = published_files(read_project(committed))
    assert {"build/torch-universal/metadata.json", "benchmarks/benchmark.py"} <= expected["v1"].keys()
    assert repository.files("v1").items() >= expected["v1"].items()
    assert repository.files("main")["README.md"] == (committed / "CARD.md").read_bytes()
    assert "build/CARD.md" not in repository.files("v1")
    assert [change.branch for change in hub.changes] == ["v1", "main"]


def test_what_is_there_already_is_not_uploaded_again(committed: Path, hub: Hub, api):
    publish_all(committed, api)
    hub.requests.clear()
    publish_all(committed, api)
    assert len(hub.changes) == 2 and writes(hub) == []


def test_only_changed_files_are_uploaded(committed: Path, hub: Hub, api):
    publish_all(committed, api)
    (committed / "CARD.md").write_text((committed / "CARD.md").read_text() + "\nMore.\n")
    rebuild_and_commit(committed)
    publish_all(committed, api)
    assert hub.changes[2:] == [Change("main", ("README.md",), ())]


def test_stale_files_of_our_variants_are_deleted_and_others_stay(committed: Path, hub: Hub, api):
    publish_all(committed, api)
    repository = hub.repositories[REPO]
    stale, foreign = "build/torch-universal/old/part.py", "build/torch-cuda/__init__.py"
    present = repository.commits[repository.branches["v1"]]
    repository.commit(
        "v1", {**present, stale: present["benchmarks/benchmark.py"], foreign: present[next(iter(present))]}
    )
    publish_all(committed, api)
    assert hub.changes[2:] == [Change("v1", (), (stale,))]
    assert foreign in repository.files("v1")


@pytest.mark.parametrize(
    "route", ["POST .*/branch/v1", "POST .*/preupload/v1", "POST .*/commit/v1", "POST .*/commit/main"]
)
def test_interrupted_publication_is_finished_by_running_it_again(committed: Path, hub: Hub, api, route: str):
    hub.fail(route, 400)
    with pytest.raises(PackageError, match="the Hub answered 400"):
        publish_all(committed, api)
    done = list(hub.changes)
    hub.heal()
    publish_all(committed, api)
    for branch, files in published_files(read_project(committed)).items():
        assert hub.repositories[REPO].files(branch).items() >= files.items()
        assert sum(change.branch == branch for change in hub.changes) == 1
    assert hub.changes[: len(done)] == done


def test_half_uploaded_libraries_are_not_uploaded_again(
    committed: Path, hub: Hub, api, monkeypatch: pytest.MonkeyPatch
):
    library = {"build/torch-universal/ops.so": b"\x7fELF library"}
    monkeypatch.setattr(publishing, "published_files", lambda project: {"v1": library})
    hub.fail("POST .*/commit/v1", 400)
    with pytest.raises(PackageError, match="400"):
        publish_all(committed, api)
    hub.heal()
    publish_all(committed, api)
    publish_all(committed, api)
    assert [request.startswith("PUT /large-files/") for request in writes(hub)].count(True) == 1
    assert hub.changes == [Change("v1", tuple(library), ())]


def test_branch_that_moved_meanwhile_is_not_overwritten(
    committed: Path, hub: Hub, api, monkeypatch: pytest.MonkeyPatch
):
    publish_all(committed, api)
    (committed / "benchmarks/benchmark.py").write_text("# another benchmark\n")
    commit_all(committed)
    compared = publishing.plan_branch

    def compare_then_somebody_commits(api, repo_id, branch, files):
        plan = compared(api, repo_id, branch, files)
        hub.repositories[REPO].commit(branch, {})
        return plan

    monkeypatch.setattr(publishing, "plan_branch", compare_then_somebody_commits)
    with pytest.raises(PackageError, match="the branch has changed on the Hub"):
        publish_all(committed, api)
    assert hub.repositories[REPO].files("v1") == {}


def test_dirty_tree_is_refused(committed: Path, hub: Hub, api):
    (committed / "note.txt").write_text("forgotten")
    with pytest.raises(PackageError, match=r"git has 1 uncommitted change .*note\.txt"):
        publish_all(committed, api)
    assert hub.requests == []


def test_source_tree_outside_git_is_refused(built: Path, hub: Hub, api):
    with pytest.raises(PackageError, match="is not a git repository"):
        publish_all(built, api)
    assert hub.requests == []


def test_stale_build_is_refused(committed: Path, hub: Hub, api):
    with (committed / "torch-ext/flashqla/layers.py").open("a") as file:
        file.write("# newer\n")
    commit_all(committed)
    with pytest.raises(PackageError, match="build/ is not what the sources give"):
        publish_all(committed, api)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("route", "status", "message"),
    [
        ("POST /api/repos/create", 403, "publishing kernels is enabled for an organisation only on request"),
        ("POST .*/commit/v1", 403, "https://huggingface.co/spaces/kernels-community/README/discussions/new"),
        ("GET .*/revision/", 401, "log in with `hf auth login`"),
        ("POST /api/repos/create", 429, "wait a few minutes"),
    ],
)
def test_refusal_of_the_hub_is_explained(committed: Path, hub: Hub, api, route: str, status: int, message: str):
    hub.fail(route, status)
    with pytest.raises(PackageError) as caught:
        publish_all(committed, api)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_hub_out_of_reach_is_explained(committed: Path, run_python: RunPython):
    done = run_python("-m", "flashqla_hub", "publish", committed)
    assert done.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr and len(done.stderr.splitlines()) == 1


def test_token_is_never_printed(committed: Path, hub: Hub, run_python: RunPython):
    hub.fail("POST .*/commit/", 500, "you sent {authorization}", times=10**6)
    done = run_python("-m", "flashqla_hub", "publish", committed, "--execute", hub=hub)
    assert done.returncode == 1 and "you sent Bearer ***" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_tokens_are_hidden_whoever_they_belong_to():
    for text in (
        "got hf_ABCdef123",
        "got oauth_eyJ.a-b_c",
        "got Bearer something",
        "got my own",
        "got hf_ABCdef123, then",
    ):
        assert redacted(text, token="my own").startswith("got ***" if "Bearer" not in text else "got Bearer ***")


def test_token_is_in_no_part_of_the_error(committed: Path, hub: Hub, api):
    hub.fail("POST .*/commit/", 400, "you sent {authorization}")
    with pytest.raises(PackageError) as caught:
        publish_all(committed, api)
    error, texts = caught.value, []
    while error is not None:
        texts.append(f"{error} {error!r} {error.args}")
        error = error.__cause__ or error.__context__
    assert len(texts) > 1 and "you sent Bearer ***" in texts[0]
    assert not [text for text in texts if TOKEN in text]


def test_published_commit_names_its_source(committed: Path, hub: Hub, api, monkeypatch: pytest.MonkeyPatch):
    described = []
    monkeypatch.setattr(api, "create_commit", lambda *_, **options: described.append(options["commit_description"]))
    publish_all(committed, api)
    head = subprocess.run(
        ["git", "-C", str(committed), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert described == [f"Built from commit {head.stdout.strip()}."] * 2


def test_name_that_no_repository_can_have_is_explained():
    with (
        pytest.raises(PackageError, match=r"^cannot read it: that is no name of a repository; name it as owner/name"),
        explained("read it"),
    ):
        validate_repo_id("a/b/c")
