"""The kernel in the company of others: copies, processes that start together, homes that cannot be written."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fresh_process import RunPython, run_in_fresh_process
from hub_server import Hub

PROCESSES = 8
NOT_A_FOLDER = "/dev/null/home"  # nothing can be written below it, not even by root

# Load, compute, differentiate; print what came out.
COMPUTE = """
import torch
def digest(kernel):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 16, requires_grad=True) for _ in range(3))
    g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
    o, _ = kernel.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    o.square().sum().backward()
    return o.detach().double().sum().item(), k.grad.double().sum().item()
"""
LOCAL = "from kernels import get_local_kernel\nfrom pathlib import Path\n" + COMPUTE

# Every file that is opened for writing, and every change of a folder, from here on.
WATCH = """
import os, sys
written = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        written.append((event, str(arguments[0])))
    elif event == "open" and arguments[1] is None and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append((event, str(arguments[0])))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.truncate", "shutil.copyfile"):
        written.append((event, str(arguments[0])))
sys.addaudithook(watch)
"""


def test_two_copies_in_one_process_compute_the_same(released: Path, tmp_path: Path, run_python: RunPython):
    """A working copy beside the one in the cache: of one build, so they share their ops; neither disturbs the other."""
    code = LOCAL + (
        "import shutil\nshutil.copytree(FIRST + '/build', 'second/build')\n"
        "first, second = get_local_kernel(Path(FIRST)), get_local_kernel(Path('second'))\n"
        "print(digest(first) == digest(second) == digest(first))"
    )
    done = run_python("-c", code.replace("FIRST", repr(str(released))))
    assert done.stdout.strip() == "True", done.stderr


def test_two_builds_in_one_process_compute_their_own(released: Path, run_python: RunPython):
    """An older version beside a newer one: other digest, other namespace, other modules."""
    code = LOCAL + (
        "import shutil\nshutil.copytree(FIRST + '/build/torch-universal', 'old/build/torch-universal')\n"
        "folder = Path('old/build/torch-universal')\n"
        "import json\nname = json.loads((folder / 'metadata.json').read_text())['id']\n"
        "for path in folder.rglob('*.py'):\n    path.write_text(path.read_text().replace(name, '_flashqla_of_old'))\n"
        "path = folder / 'metadata.json'\npath.write_text(path.read_text().replace(name, '_flashqla_of_old'))\n"
        "first, second = get_local_kernel(Path(FIRST)), get_local_kernel(Path('old'))\n"
        "assert first is not second and first.__name__ != second.__name__\n"
        "print(digest(first) == digest(second) == digest(first))"
    )
    done = run_python("-c", code.replace("FIRST", repr(str(released))))
    assert done.stdout.strip() == "True", done.stderr


def test_processes_that_start_together_share_an_empty_cache(stocked_hub: Hub, tmp_path: Path):
    """Ranks of one machine all download at once; each ends with a whole kernel, and with the same numbers."""
    code = COMPUTE + (
        "from kernels import get_kernel\nprint(digest(get_kernel('qwen/flashqla', version=1, trust_remote_code=True)))"
    )

    def run(_: int):
        return run_in_fresh_process(tmp_path, "-c", code, hub=stocked_hub)

    with ThreadPoolExecutor(PROCESSES) as pool:
        done = list(pool.map(run, range(PROCESSES)))
    assert [process.returncode for process in done] == [0] * PROCESSES, [process.stderr[-500:] for process in done]
    assert len({process.stdout for process in done}) == 1


@pytest.mark.parametrize("where", ["a folder", "the cache"])
def test_home_that_cannot_be_written_is_no_obstacle(released: Path, stocked_hub: Hub, tmp_path: Path, where: str):
    """A folder needs no home at all; a filled cache, which may be read-only, is read and not written."""
    home = {name: NOT_A_FOLDER for name in ("HOME", "XDG_CACHE_HOME", "TORCH_HOME", "TRITON_CACHE_DIR")}
    if where == "a folder":
        code = LOCAL + f"print(digest(get_local_kernel(Path({str(released)!r}))))"
        done = run_in_fresh_process(tmp_path, "-c", code, HF_HOME=NOT_A_FOLDER, **home)
    else:
        fill = "from flashqla_hub import download\ndownload(trust_remote_code=True)"
        assert run_in_fresh_process(tmp_path, "-c", fill, hub=stocked_hub).returncode == 0
        load = (
            "from kernels import get_kernel\nkernel = get_kernel('qwen/flashqla', version=1, trust_remote_code=True)\n"
        )
        code = COMPUTE + WATCH + load + "print(digest(kernel))\nprint(written, file=sys.stderr)\nassert not written"
        done = run_in_fresh_process(tmp_path, "-c", code, HF_HUB_OFFLINE="1", **home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(")


def test_nothing_is_written_at_import_or_at_run_time(released: Path, tmp_path: Path):
    """No cache of plans, no compiled files, no locks; a model is kernelized, trained for a step and used."""
    before = sorted(released.rglob("*"))
    code = (
        "import torch, kernels, transformers\nfrom tests.transformers.families import tiny_model, token_ids\n"
        "plain = tiny_model('qwen3_5')\nids = token_ids(1, 12)\n"
        "plain(ids, labels=ids).loss.backward()\nplain.generate(ids, max_new_tokens=2)\n"
        + WATCH
        + f"import flashqla_hub\nmodel = flashqla_hub.kernelize(tiny_model('qwen3_5'), source={str(released)!r})\n"
        "model(ids, labels=ids).loss.backward()\nmodel.generate(ids, max_new_tokens=2)\nflashqla_hub.unregister()\n"
        "print(written)"
    )
    done = run_in_fresh_process(tmp_path, "-c", code)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stdout + done.stderr
    assert sorted(released.rglob("*")) == before


def test_the_watch_for_writing_can_find_something(tmp_path: Path):
    code = WATCH + "open('x', 'w').close()\nos.mkdir('y')\nos.open('z', os.O_CREAT | os.O_WRONLY)\nprint(len(written))"
    done = run_in_fresh_process(tmp_path, "-c", code)
    assert done.stdout.strip() == "3", done.stderr
