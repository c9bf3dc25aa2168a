"""`python -m flashqla_hub demo`, in small."""

import pytest
import torch
from typer.testing import CliRunner

import flashqla_hub
from flashqla_hub import demo
from flashqla_hub.__main__ import build_app
from flashqla_hub.demo_training import CORE, Outcome, help_topics

SMALL = ["--steps", "8", "--seq-len", "48", "--batch-size", "2", "--new-tokens", "5"]


@pytest.fixture
def run(kernel_folder, tmp_path, monkeypatch):
    """Run the command in an empty folder, with the kernel under test unless told otherwise."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def invoke(*options: str, source=kernel_folder):
        return CliRunner().invoke(build_app("demo"), ["demo", *SMALL, "--source", str(source), *options])

    yield invoke
    torch.set_num_threads(threads)


def test_demo_trains_draws_and_writes(run, tmp_path):
    result = run()
    assert result.exit_code == 0, result.output
    assert result.output.count("qwen/flashqla: all parts") == 4
    assert f"{CORE}: PyTorch path" in result.output and "a fall of " in result.output
    assert "it writes: The import statement " in result.output
    assert "step 1 of 8, loss " in result.output and "step 8 of 8, loss " in result.output
    assert (tmp_path / "demo-output" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_demo_repeats_with_its_seed(run):
    losses = [run("--seed", "3").output.partition("held-out loss")[2].splitlines()[0] for _ in range(2)]
    assert losses[0] == losses[1]
    assert losses[0] != run("--seed", "4").output.partition("held-out loss")[2].splitlines()[0]


def test_model_that_does_not_learn_fails_the_demo(run):
    result = run("--learning-rate", "1e-9")
    assert result.exit_code == 1
    assert "has to fall by 20%" in result.output


def test_layer_of_another_kernel_fails_the_demo(run, tmp_path):
    """An empty repository serves nothing; the demo ends before it trains."""
    (tmp_path / "empty" / "build").mkdir(parents=True)
    with pytest.warns(UserWarning, match="replaces nothing"):
        result = run(source=tmp_path / "empty")
    assert result.exit_code == 1
    assert "model.layers.0.linear_attn runs Qwen3_5GatedDeltaNet of transformers, not of qwen/flashqla" in result.output
    assert "held-out" not in result.output


def test_source_that_does_not_exist_is_refused_before_the_model_is_built(run, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "build_model", lambda settings: pytest.fail("the model was built"))
    result = run(source=tmp_path / "nowhere")
    assert result.exit_code == 1 and "does not exist; name the root of a kernel repository" in result.output


def test_layer_that_is_lost_during_training_fails_the_demo(run, monkeypatch):
    monkeypatch.setattr(demo, "continue_text", lambda *args: flashqla_hub.unregister() or "")
    result = run()
    assert result.exit_code == 1 and "of transformers, not of qwen/flashqla" in result.output


@pytest.mark.parametrize(("reasons", "fails"), [({None}, False), ({None, "head size 96"}, True), ({"dtype"}, True)])
def test_detour_on_a_gpu_with_kernels_fails_the_demo(reasons, fails):
    outcome = Outcome(held_out=[5.0, 2.0], detours=reasons)
    demo.require_success(outcome, "cpu")
    if fails:
        with pytest.raises(demo.DemoError, match="took the PyTorch path on a GPU"):
            demo.require_success(outcome, "cuda")
    else:
        demo.require_success(outcome, "cuda")


def test_loss_that_is_not_a_number_fails_the_demo():
    with pytest.raises(demo.DemoError, match=r"held-out loss went from 5\.000 to nan"):
        demo.require_success(Outcome(held_out=[5.0, float("nan")]), "cpu")


def test_device_that_is_not_there_is_named(run):
    result = run("--device", "cuda:7")
    assert result.exit_code == 1 and "device cuda:7 cannot be used here" in result.output


def test_output_that_cannot_be_made_is_named(run, tmp_path):
    (tmp_path / "file").touch()
    result = run("--output", str(tmp_path / "file" / "folder"))
    assert result.exit_code == 1 and "which cannot be made: Not a directory; name another folder." in " ".join(
        result.output.split()
    )


def test_missing_library_is_named_with_its_cure(run, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "accelerate" else True)
    result = run()
    assert result.exit_code == 1 and "accelerate is missing; pip install 'flashqla_hub[transformers]'" in result.output


def test_plot_is_left_out_without_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "plot_losses", lambda outcome, path: False)
    result = run()
    assert result.exit_code == 0 and "pip install 'flashqla_hub[bench]'" in result.output


def test_held_out_text_is_not_trained_on():
    trained, held_out = help_topics()
    assert len(trained) > 200_000 and len(held_out) > 5_000
    assert held_out not in trained
