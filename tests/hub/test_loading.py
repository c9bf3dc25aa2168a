"""The kernel in a fresh process: from the Hub, from its cache without a network, and from a folder."""

import os
import shutil
from pathlib import Path

import pytest
from fresh_process import TOKEN, RunPython
from hub_server import Hub
from source_tree import stock

from flashqla_hub.package.check import run_checks
from flashqla_hub.package.errors import PackageError
from flashqla_hub.package.kernel_data import Build
from flashqla_hub.package.loading import load, local_folder
from flashqla_hub.package.subject import read_subject

REPO = "qwen/flashqla"
COMPUTE = "from small_call import assert_computes\n"
GET_KERNEL = f"from kernels import get_kernel\nkernel = get_kernel('{REPO}', version=1{{}})\n"
LOAD = "from flashqla_hub.package.loading import load\nkernel = load({})\n"
DOWNLOAD = "from flashqla_hub.package.download import download\nprint(download({}))\n"
NO_SOCKETS = (
    "import socket\ndef refuse(*a): raise AssertionError('a connection was opened')\nsocket.socket.connect = refuse\n"
)
# Prints the sentence with which load() refuses, behind the type of its cause.
REFUSED = """
from flashqla_hub.package.check import run_checks
from flashqla_hub.package.errors import PackageError
from flashqla_hub.package.loading import load

def refused(*arguments, **options):
    try:
        load(*arguments, **options)
    except PackageError as error:
        print(type(error.__cause__).__name__, error, sep=": ")
    else:
        raise AssertionError("the kernel was loaded")

"""


def succeed(run_python: RunPython, code: str, **options: object) -> str:
    done = run_python("-c", code, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusals(run_python: RunPython, *calls: str, **options: object) -> list[str]:
    """The one line that each refused load(<call>) prints, all in one process."""
    code = REFUSED + "".join(f"refused({arguments})\n" for arguments in calls)
    lines = succeed(run_python, code, **options).splitlines()
    assert len(lines) == len(calls), lines
    return lines


@pytest.mark.kernels_ci
def test_get_kernel_and_load_from_the_hub_compute(stocked_hub: Hub, run_python: RunPython):
    code = COMPUTE + GET_KERNEL.format(", trust_remote_code=True") + "assert_computes(kernel)"
    code += "\nfrom flashqla_hub.package.loading import load\nassert load(trust_remote_code=True) is kernel"
    succeed(run_python, code, hub=stocked_hub)
    fetched = [request for request in stocked_hub.requests if request.startswith("GET /kernels/")]
    assert fetched and all("/build/torch-universal/" in request for request in fetched)


def test_get_kernel_from_a_trusted_publisher_needs_no_flag(stocked_hub: Hub, run_python: RunPython):
    stocked_hub.trusted.add("qwen")
    succeed(run_python, COMPUTE + GET_KERNEL.format("") + "assert_computes(kernel)", hub=stocked_hub)


def test_untrusted_publisher_is_refused_with_the_way_out(stocked_hub: Hub, run_python: RunPython):
    (line,) = refusals(run_python, "", hub=stocked_hub)
    assert line.startswith("ValueError: the Hub does not list qwen as a trusted kernel publisher")
    assert "pass trust_remote_code=True" in line
    assert not [request for request in stocked_hub.requests if "/resolve/" in request]


def test_untrusted_download_is_refused_before_it_fetches(stocked_hub: Hub, run_python: RunPython):
    done = run_python("-m", "flashqla_hub", "download", hub=stocked_hub)
    assert done.returncode == 1 and "pass trust_remote_code=True" in done.stderr
    assert not [request for request in stocked_hub.requests if "/resolve/" in request]


def test_kernel_loads_offline_after_download(stocked_hub: Hub, run_python: RunPython):
    snapshot = Path(succeed(run_python, DOWNLOAD.format("trust_remote_code=True"), hub=stocked_hub).strip())
    assert [result for result in run_checks(read_subject(snapshot)) if result.problems] == []
    code = NO_SOCKETS + COMPUTE + GET_KERNEL.format("") + "assert_computes(kernel)\n" + LOAD.format("")
    succeed(run_python, code, HF_HUB_OFFLINE="1")


def test_download_command_fills_the_cache_that_kernels_reads(stocked_hub: Hub, run_python: RunPython, tmp_path: Path):
    cache = {"KERNELS_CACHE": str(tmp_path / "kernels-cache")}
    done = run_python("-m", "flashqla_hub", "download", REPO, "--trust-remote-code", hub=stocked_hub, **cache)
    assert done.returncode == 0 and "kernels-cache" in done.stdout, done.stderr
    succeed(run_python, LOAD.format(""), HF_HUB_OFFLINE="1", **cache)


def test_get_kernel_online_alone_does_not_prepare_for_offline(stocked_hub: Hub, run_python: RunPython):
    succeed(run_python, LOAD.format("trust_remote_code=True"), hub=stocked_hub)
    (line,) = refusals(run_python, "", HF_HUB_OFFLINE="1")
    assert f"run flashqla_hub.download('{REPO}', version=1, trust_remote_code=True) once with a network" in line


def test_offline_without_download_names_the_download(run_python: RunPython):
    (line,) = refusals(run_python, "", HF_HUB_OFFLINE="1")
    assert f"run flashqla_hub.download('{REPO}', version=1, trust_remote_code=True) once with a network" in line


def test_list_of_trusted_repositories_is_a_list_of_names(stocked_hub: Hub, run_python: RunPython):
    succeed(run_python, DOWNLOAD.format(f"trust_remote_code=['{REPO}']"), hub=stocked_hub)
    other = run_python("-c", DOWNLOAD.format("trust_remote_code=['qwen/other']"), hub=stocked_hub)
    assert other.returncode == 1 and "pass trust_remote_code=True" in other.stderr


def test_download_without_a_network_says_so(run_python: RunPython):
    offline = run_python("-m", "flashqla_hub", "download", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1 and "HF_HUB_OFFLINE is set; unset it" in offline.stderr
    unreachable = run_python("-m", "flashqla_hub", "download", "--trust-remote-code")
    assert unreachable.returncode == 1 and "http://127.0.0.1:9 cannot be reached" in unreachable.stderr
    assert len(unreachable.stderr.splitlines()) == 1


def test_download_of_damaged_files_is_refused(stocked_hub: Hub, run_python: RunPython):
    repository = stocked_hub.repositories[REPO]
    files = dict(repository.commits[repository.branches["v1"]])
    files["build/torch-universal/layers.py"] = files["build/torch-universal/_ops.py"]
    repository.commit("v1", files)
    done = run_python("-m", "flashqla_hub", "download", "--trust-remote-code", hub=stocked_hub)
    assert done.returncode == 1 and "torch-universal differs from its digest" in done.stderr


def test_download_leaves_bytecode_behind(stocked_hub: Hub, run_python: RunPython):
    repository = stocked_hub.repositories[REPO]
    files = repository.commits[repository.branches["v1"]]
    bytecode = {"build/torch-universal/__pycache__/layers.cpython-311.pyc": files["build/torch-universal/layers.py"]}
    repository.commit("v1", {**files, **bytecode})
    snapshot = Path(succeed(run_python, DOWNLOAD.format("trust_remote_code=True"), hub=stocked_hub).strip())
    assert not list(snapshot.rglob("*.pyc"))


def test_version_or_repository_that_does_not_exist_is_named(stocked_hub: Hub, run_python: RunPython):
    calls = ("version=7, trust_remote_code=True", "'qwen/other', trust_remote_code=True")
    version, repository = refusals(run_python, *calls, hub=stocked_hub)
    assert f"{REPO} has no version 7; available: 1." in version
    assert "cannot load qwen/other: " in repository and "has no such kernel repository" in repository
    assert TOKEN not in version + repository


def test_hub_out_of_reach_is_named(run_python: RunPython):
    trusting, asking = refusals(run_python, "trust_remote_code=True", "")
    assert "http://127.0.0.1:9 cannot be reached" in trusting
    assert "could not be asked whether it trusts the publisher" in asking


@pytest.mark.parametrize("switch", ["HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"])
def test_telemetry_switch_that_breaks_kernels_is_named(stocked_hub: Hub, run_python: RunPython, switch: str):
    for line in refusals(run_python, "trust_remote_code=True", "", hub=stocked_hub, **{switch: "1"}):
        assert f"{switch} makes `kernels` send a header that HTTP forbids" in line


def test_download_works_with_telemetry_switched_off(stocked_hub: Hub, run_python: RunPython):
    succeed(run_python, DOWNLOAD.format("trust_remote_code=True"), hub=stocked_hub, DO_NOT_TRACK="1")
    succeed(run_python, LOAD.format(""), HF_HUB_OFFLINE="1", DO_NOT_TRACK="1")


def test_no_fitting_variant_lists_what_there_is(stocked_hub: Hub, run_python: RunPython):
    repository = stocked_hub.repositories[REPO]
    files = repository.commits[repository.branches["v1"]]
    universal = {path: file for path, file in files.items() if "/torch-universal/" in path}
    moved = {path.replace("torch-universal", "torch-cuda"): file for path, file in universal.items()}
    repository.commit("v1", moved)
    (line,) = refusals(run_python, "trust_remote_code=True", hub=stocked_hub)
    assert "has no build for this torch and machine (torch-cuda: backend (cuda) does not match" in line


def without_library(variant: Path) -> None:
    """Let the variant register its ops as one without a library does; there is none that could be loaded here."""
    ops = variant / "_ops.py"
    ops.write_text(ops.read_text().partition("\n# A process defines a namespace once")[0])


def test_gpu_of_another_architecture_is_named(built: Path, hub: Hub, run_python: RunPython):
    without_library(built / "build/torch-stable-abi29-cu130-x86_64-linux")
    stock(hub, built)
    fake_gpu = (
        "import torch\n"
        "torch.version.cuda = '13.0'\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.get_device_capability = lambda *a: (8, 0)\n"
    )
    loaded = "load(trust_remote_code=True, check_arch=False)"
    line = succeed(run_python, fake_gpu + REFUSED + "refused(trust_remote_code=True)\n" + loaded, hub=hub)
    assert "the compiled kernels do not fit this GPU (CUDA capability 8.0 of the current device" in line
    assert "pass check_arch=False" in line


def test_too_old_kernels_is_named(built: Path, run_python: RunPython, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashqla_hub.package.loading.installed_version", lambda package: "0.12.0")
    with pytest.raises(PackageError, match=r"needs kernels>=0\.16\.2, not 0\.12\.0; run `pip install"):
        load(built)


@pytest.mark.kernels_ci
def test_folder_loads_with_sockets_blocked(released: Path, run_python: RunPython):
    code = NO_SOCKETS + COMPUTE + LOAD.format(f"{str(released)!r}") + "assert_computes(kernel)"
    succeed(run_python, code, HF_HUB_OFFLINE="0")


def test_local_kernels_redirects_get_kernel_with_sockets_blocked(released: Path, run_python: RunPython):
    code = NO_SOCKETS + COMPUTE + GET_KERNEL.format("") + "assert_computes(kernel)"
    succeed(run_python, code, LOCAL_KERNELS=f"{REPO}={released}")


def test_get_local_kernel_takes_the_root_build_and_variant(released: Path, run_python: RunPython):
    code = (
        "import sys, pathlib\n"
        "from kernels import get_local_kernel\n"
        "for path in sys.argv[1:]: assert get_local_kernel(pathlib.Path(path)).__all__\n"
    )
    folders = (released, released / "build", released / "build/torch-universal")
    done = run_python("-c", NO_SOCKETS + code, *folders)
    assert done.returncode == 0, done.stderr


def test_folder_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(PackageError, match="does not exist; name the root of a kernel repository"):
        load(tmp_path / "nowhere")


def test_source_is_a_folder_only_if_it_is_written_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path(REPO).mkdir(parents=True)
    assert local_folder(REPO) is None
    assert local_folder(f"./{REPO}") == local_folder(Path(REPO)) == tmp_path / REPO
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("~") == Path(os.path.expanduser("~")).resolve()


def test_failure_inside_the_kernel_is_not_hidden(released: Path, tmp_path: Path, run_python: RunPython):
    shutil.copytree(released / "build", tmp_path / "broken/build")
    (tmp_path / "broken/build/torch-universal/__init__.py").write_text("raise ZeroDivisionError('inside')")
    done = run_python("-c", LOAD.format("'./broken'"))
    assert done.returncode == 1 and "ZeroDivisionError: inside" in done.stderr


def test_lock_file_pins_the_commit_and_loads_after_download(stocked_hub: Hub, run_python: RunPython, tmp_path: Path):
    stocked_hub.trusted.add("qwen")
    consumer = tmp_path / "consumer"
    consumer.mkdir()
    (consumer / "pyproject.toml").write_text(f'[project]\nname = "c"\n[tool.kernels.dependencies]\n"{REPO}" = 1\n')
    command = "import sys\nfrom kernels.cli import main\nsys.argv[0] = 'kernels'\nmain()"
    pinned = stocked_hub.repositories[REPO].branches["v1"]
    for verb in ("lock", "download"):
        done = run_python("-c", command, verb, consumer, hub=stocked_hub)
        assert done.returncode == 0, done.stderr
    assert pinned in (consumer / "kernels.lock").read_text()
    succeed(run_python, DOWNLOAD.format(""), hub=stocked_hub)
    code = (
        "import pathlib\nfrom kernels import load_kernel\n"
        f"kernel = load_kernel('{REPO}', lockfile=pathlib.Path('consumer/kernels.lock'))\n"
    )
    succeed(run_python, NO_SOCKETS + COMPUTE + code + "assert_computes(kernel)")


@pytest.mark.skipif(Build is None, reason="kernels 0.16 locks without asking who published")
def test_lock_needs_a_trusted_publisher(stocked_hub: Hub, run_python: RunPython, tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO}" = 1\n')
    command = "import sys\nfrom kernels.cli import main\nsys.argv = ['kernels', 'lock', '.']\nmain()"
    done = run_python("-c", command, hub=stocked_hub)
    assert done.returncode == 1 and "is not from a trusted publisher" in done.stderr
