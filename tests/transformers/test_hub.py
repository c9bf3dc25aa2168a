"""The kernel from the Hub into a transformers model, in a fresh process that knows no Hub but the test's own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "hub"))  # the Hub in memory and its helpers live there

from fresh_process import run_in_fresh_process
from hub_server import Hub, serve
from source_tree import build, copy_sources, stock

SETUP = """
import torch
import flashqla_hub
from flashqla_hub.package.errors import PackageError
from tests.transformers.families import tiny_model, token_ids

model = tiny_model("qwen3_5")
ids = token_ids(1, 30)
expected = model(ids, use_cache=False).logits

def assert_served(model):
    assert flashqla_hub.is_active(model), flashqla_hub.report(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
"""
FLIP = "model.set_use_kernels(True)\nmodel.train()\nmodel.eval()\nassert_served(model)\n"


@pytest.fixture
def hub(tmp_path: Path):
    """A Hub that holds qwen/flashqla and trusts nobody."""
    with serve() as server:
        stock(server, build(copy_sources(tmp_path / "sources")))
        yield server


@pytest.fixture
def run(hub: Hub, tmp_path: Path):
    def succeed(code: str, **variables: str) -> str:
        done = run_in_fresh_process(tmp_path, "-c", SETUP + code, hub=hub, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return succeed


@pytest.mark.parametrize("install", ["kernelize(model, {})", "register({})"])
def test_model_is_served_from_the_hub(run, hub, install):
    """The five layers of a model cost one download, and no change of mode asks the Hub again."""
    run(f"flashqla_hub.{install.format('trust_remote_code=True')}\n{FLIP}")
    assert len([request for request in hub.requests if request.endswith("/layers.py")]) in (1, 2)  # HEAD and GET
    assert len([request for request in hub.requests if "/refs" in request]) == 1


def test_from_pretrained_takes_the_kernel_from_the_hub(run):
    run(
        "from transformers import AutoModelForCausalLM\nmodel.save_pretrained('saved')\n"
        "config = flashqla_hub.kernel_config(trust_remote_code=True)\n"
        "model = AutoModelForCausalLM.from_pretrained('saved', use_kernels=True, kernel_config=config)\n"
        f"assert_served(model)\n{FLIP}"
    )


def test_untrusted_publisher_is_refused_and_the_model_stays(run):
    """L3: the flag is never set for the user."""
    said = run(
        "try:\n    flashqla_hub.kernelize(model)\nexcept PackageError as error:\n    print(error)\n"
        "assert not flashqla_hub.is_active(model)\nassert torch.equal(model(ids, use_cache=False).logits, expected)\n"
    )
    assert "does not list qwen as a trusted kernel publisher" in said and "trust_remote_code=True" in said


def test_downloaded_kernel_serves_offline(run, hub):
    """L2: after flashqla_hub.download, with HF_HUB_OFFLINE, not one request is made."""
    run("flashqla_hub.download(trust_remote_code=True)\n")
    hub.requests.clear()
    run(f"flashqla_hub.kernelize(model)\nassert_served(model)\n{FLIP}", HF_HUB_OFFLINE="1")
    assert not hub.requests
