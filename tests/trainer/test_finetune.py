"""`python -m flashqla_hub finetune`, in small."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from flashqla_hub.__main__ import build_app
from flashqla_hub.finetune import command, compare, implementations, model, packing, report, text, training
from flashqla_hub.finetune.settings import FinetuneError

SMALL = ["--steps", "4", "--seq-len", "32", "--held-out", "2"]
DOCUMENTS = [f"Document {i}: " + "the gated delta rule forgets. " * (1 + i % 3) for i in range(40)]


@pytest.fixture
def run(kernel_folder, tmp_path, monkeypatch):
    """Run the command in an empty folder, with the kernel under test, on the CPU."""
    monkeypatch.chdir(tmp_path)

    def invoke(*options: str):
        arguments = ["finetune", *SMALL, "--device", "cpu", "--source", str(kernel_folder), *options]
        return CliRunner().invoke(build_app("finetune"), arguments)

    return invoke


@pytest.fixture
def documents(tmp_path):
    """A file with a short document a line."""
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    return str(file)


def losses_in(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_run_reports_draws_and_saves(run, tmp_path):
    result = run("--save-every", "2")
    assert result.exit_code == 0, result.output
    assert "chunk_gated_delta_rule: qwen/flashqla in 3 layers" in result.output
    folder = tmp_path / "finetune-output"
    summary = json.loads((folder / "report.json").read_text())
    assert summary["losses"] == losses_in(folder) and len(summary["losses"]) == 4
    assert summary["step_ms"] > 0 and summary["tokens_per_second"] > 0 and summary["peak_mb"] > 0
    assert summary["tokens_per_step"] == 32 and len(summary["held_out"]) == 2
    assert summary["tokens_per_second"] == pytest.approx(32e3 / summary["step_ms"])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir()} >= {"checkpoint-2", "checkpoint-4", "model"}


def test_resumed_run_is_the_uninterrupted_one(run, tmp_path):
    """The same losses, bit for bit, and the same weights."""
    assert run("--output", "whole").exit_code == 0
    assert run("--output", "cut", "--save-every", "2", "--stop-after", "3").exit_code == 0
    assert len(losses_in(tmp_path / "cut")) == 3
    result = run("--output", "cut", "--save-every", "2", "--resume")
    assert result.exit_code == 0, result.output
    assert losses_in(tmp_path / "cut") == losses_in(tmp_path / "whole")
    whole, cut = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_interrupted_run_says_how_to_go_on(run, monkeypatch):
    plain_step = training._Trainer.training_step
    taken = []

    def interrupted(self, *args, **kwargs):
        if len(taken) == 3:
            raise KeyboardInterrupt
        taken.append(1)
        return plain_step(self, *args, **kwargs)

    monkeypatch.setattr(training._Trainer, "training_step", interrupted)
    result = run("--save-every", "2")
    assert result.exit_code == 1
    assert "interrupted after step 3; the same command with --resume goes on from checkpoint-2." in result.output


def test_failure_of_another_library_is_told_in_one_sentence(run, monkeypatch):
    """As FLA's backward, which refuses some versions of Triton."""

    def refuse(self, *args, **kwargs):
        raise RuntimeError("Some versions are wrong. Install another\nand a second line")

    monkeypatch.setattr(training._Trainer, "training_step", refuse)
    result = run("--kernel", "plain")
    assert result.exit_code == 1
    assert "error: transformers failed: Some versions are wrong; Install another." in result.output
    assert isinstance(run().exception, RuntimeError)


CHECKPOINT = ", or pass --checkpointing non-reentrant"
FEWER_GAPS = ", or put expandable_segments:True into PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("options", "environment", "ways"),
    [
        ((), {}, f"1 x 32 tokens; lower --seq-len{CHECKPOINT}{FEWER_GAPS}"),
        (
            ("--batch-size", "2"),
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"},
            f"2 x 32 tokens; lower --batch-size or --seq-len{CHECKPOINT}{FEWER_GAPS}",
        ),
        (
            ("--checkpointing", "reentrant"),
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            "1 x 32 tokens; lower --seq-len, or put expandable_segments:True into PYTORCH_CUDA_ALLOC_CONF",
        ),
        (
            ("--checkpointing", "reentrant"),
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "1 x 32 tokens; lower --seq-len",
        ),
        (
            ("--checkpointing", "non-reentrant"),
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"},
            "1 x 32 tokens; lower --seq-len",
        ),
    ],
)
def test_too_little_memory_is_told_with_what_is_left_to_do(run, monkeypatch, options, environment, ways):
    def exhaust(self, *args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training._Trainer, "training_step", exhaust)
    for name in training.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run(*options)
    assert result.exit_code == 1
    assert " ".join(result.output.split()).endswith(f"error: the GPU has too little memory for {ways}.")


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_loss(run, tmp_path, kind):
    assert run("--output", "without", "--no-save-model").exit_code == 0
    assert run("--output", "with", "--no-save-model", "--checkpointing", kind).exit_code == 0
    assert losses_in(tmp_path / "with") == losses_in(tmp_path / "without")


def test_packed_documents_are_shown_to_be_kept_apart(run, documents, tmp_path):
    result = run("--verify-packing", "--seq-len", "128", "--held-out", "1", "--output", "packed", documents)
    assert result.exit_code == 0, result.output
    assert "its gradients differ from those of the documents one by one by" in result.output
    proof = json.loads((tmp_path / "packed" / "report.json").read_text())["verify_packing"]
    assert "its gradients differ from those of the documents one by one by" in proof
    assert "documents kept apart" in result.output


def test_packing_that_is_ignored_would_be_noticed(run, documents, monkeypatch):
    def deaf(rows):
        batch = training.flatten(rows)
        return {name: batch[name] for name in ("input_ids", "labels")}

    monkeypatch.setattr(packing, "flatten", deaf)
    result = run("--verify-packing", "--seq-len", "128", "--held-out", "1", documents)
    assert result.exit_code == 1 and "packed documents are not kept apart" in result.output


def test_comparison_runs_the_same_steps_elsewhere(run, tmp_path, monkeypatch):
    """In a process of its own, in which transformers finds no library that it would call, although there are some."""
    (tmp_path / "installed").mkdir()
    for name in implementations.ACCELERATING:
        (tmp_path / "installed" / f"{name}.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    result = run("--compare", "plain:2", "--compare", "fla", "--no-save-model")
    assert result.exit_code == 0, result.output
    assert "no run of FLA: flash-linear-attention is not installed." in result.output
    runs = json.loads((tmp_path / "finetune-output" / "comparison.json").read_text())["runs"]
    assert [one["kernel"] for one in runs] == ["flashqla", "plain", "fla"], runs
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"][:2], rel=1e-5) and runs[1]["served_by"] == {}
    assert [name.rpartition(".")[2] for name in runs[1]["functions"]] == [
        "causal_conv1d_fn",
        "torch_chunk_gated_delta_rule",
        "forward",
    ]
    assert any(name.endswith(".chunk_gated_delta_rule") for name in runs[0]["functions"]), runs[0]["functions"]


# Stands in for the process of a comparison: a report of some steps, then an end.
STAND_IN = """
import json, sys, time
from pathlib import Path
output, ending = Path(sys.argv[1]), sys.argv[2]
if ending != "at once":
    report = {"kernel": output.name, "steps": 2, "step_ms": 5.0, "tokens_per_second": 1.0, "peak_mb": 1.0}
    (output / "report.json").write_text(json.dumps({**report, "losses": [5.0, 4.0]}))
if ending == "slow":
    time.sleep(60)
print("working", "error: no such luck.", sep=chr(10))
raise SystemExit(ending != "well")
"""


@pytest.fixture
def ending(tmp_path, monkeypatch):
    """Let comparisons end as it is said of each."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def endings(**said):
        def command_of(settings):
            return [sys.executable, str(script), str(settings.output), said[settings.kernel]]

        monkeypatch.setattr(compare, "command_of", command_of)

    return endings


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("at once", "no run of transformers: failed: no such luck."),
        ("badly", "the run of transformers ended after 2 steps: no such luck."),
        ("slow", "the run of transformers ended after 2 steps: not done within 1 s."),
    ],
)
def test_failed_comparison_is_a_sentence_and_an_error_behind_the_others(run, tmp_path, ending, how, sentence):
    ending(plain=how, **{"plain-eager": "well"})
    options = ["--compare-seconds", "1", "--no-save-model", "--no-evaluate"]
    result = run("--compare", "plain", "--compare", "plain-eager", *options)
    output = " ".join(result.output.split())
    assert result.exit_code == 1 and sentence in output
    if how == "at once":  # two steps that a comparison has made are compared, and those of the stand-in are far off
        assert "not every comparison came to its end: transformers; see above why." in output
    runs = json.loads((tmp_path / "finetune-output" / "comparison.json").read_text())["runs"]
    assert [run["kernel"] for run in runs] == ["flashqla", "plain", "plain-eager"]
    assert "failed" in runs[1] and "failed" not in runs[2] and runs[2]["steps"] == 2
    assert ("missing" in runs[1]) == (how == "at once") and runs[1].get("losses", [5.0, 4.0]) == [5.0, 4.0]


ENDLESS_COMPARISON = """
import sys
from types import SimpleNamespace
from pathlib import Path
from flashqla_hub.finetune import compare
child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
compare.command_of = lambda settings: [sys.executable, "-c", child]
compare._run(SimpleNamespace(output=Path(sys.argv[1])), 60)
"""


def test_process_of_a_comparison_ends_with_the_command(tmp_path):
    """Asked to end by its terminal, `timeout` or a cluster's scheduler: the other must not keep the GPU."""
    command = subprocess.Popen([sys.executable, "-c", ENDLESS_COMPARISON, str(tmp_path)])
    log, deadline = tmp_path / "log.txt", time.monotonic() + 60
    while not (log.is_file() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    other = int(log.read_text())
    command.terminate()
    assert command.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


def test_result_is_there_before_the_next_comparison_begins(run, tmp_path, ending, monkeypatch):
    ending(plain="well", **{"plain-eager": "well"})
    seen, compare_one = [], compare.compare

    def noting(name, *given):
        path = tmp_path / "finetune-output" / "comparison.json"
        seen.append([run["kernel"] for run in json.loads(path.read_text())["runs"]] if path.exists() else [])
        return compare_one(name, *given)

    monkeypatch.setattr(compare, "compare", noting)
    run("--compare", "plain", "--compare", "plain-eager", "--no-save-model", "--no-evaluate")
    assert seen == [[], ["flashqla", "plain"]]


def test_report_of_a_run_is_that_of_its_last_step(run, tmp_path, monkeypatch):
    """So that a run that is ended from outside leaves what it has done."""
    path, seen = tmp_path / "finetune-output" / "report.json", []
    step = training._Trainer.training_step

    def noting(self, *args, **kwargs):
        seen.append(json.loads(path.read_text())["steps"] if path.exists() else 0)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(training._Trainer, "training_step", noting)
    assert run("--no-save-model").exit_code == 0 and seen == [0, 1, 2, 3]


@pytest.mark.slow
def test_comparisons_made_apart_are_joined(run, tmp_path):
    """This kernel's run and one comparison in one folder, another comparison alone in a second one."""
    assert run("--output", "one", "--compare", "plain:3", "--no-save-model").exit_code == 0
    alone = run("--output", "two", "--compare", "plain-eager:3", "--only")
    assert alone.exit_code == 0, alone.output
    assert not (tmp_path / "two" / "report.json").exists()
    joined = CliRunner().invoke(
        build_app("finetune-report"), ["finetune-report", "one", "two", "--output", "all.json"], env={"COLUMNS": "150"}
    )
    assert joined.exit_code == 0, joined.output
    assert "over 3 steps the loss differs from plain transformers by at most" in joined.output
    assert [run["kernel"] for run in json.loads((tmp_path / "all.json").read_text())["runs"]] == [
        "flashqla",
        "plain",
        "plain-eager",
    ]
    assert run("--output", "three", "--seed", "1", "--compare", "plain:3", "--only").exit_code == 0
    other = CliRunner().invoke(build_app("finetune-report"), ["finetune-report", "one", "three"])
    assert other.exit_code == 1 and "seed is 0 in the run of flashqla and 1 in that of plain" in other.output


def test_two_runs_of_one_implementation_that_differ_are_told_apart():
    runs = [{"kernel": "flashqla", "compared": {"seq_len": length}} for length in (64, 128)]
    with pytest.raises(
        FinetuneError, match="seq-len is 64 in one run of flashqla and 128 in another; compare runs that"
    ):
        compare.require_alike(runs)


@pytest.mark.slow
def test_packed_rows_are_compared_with_documents_one_at_a_time(run, tmp_path, documents):
    """By this kernel and by plain transformers, which cannot pack them; unbroken text would give other losses."""
    options = ["--packed", "--seq-len", "128", "--held-out", "1", "--no-save-model", documents]
    result = run("--compare", "one-by-one", "--compare", "plain", "--compare", "plain-eager", *options)
    assert result.exit_code == 0, result.output
    assert "the loss of packed documents differs from that of the same documents one at a time by at most" in (
        " ".join(result.output.split())
    )
    runs = json.loads((tmp_path / "finetune-output" / "comparison.json").read_text())["runs"]
    losses = {run["kernel"]: run["losses"] for run in runs}
    for name in ("one-by-one", "plain", "plain-eager"):
        assert losses[name] == pytest.approx(losses["flashqla"], rel=1e-5), name
    log = (tmp_path / "finetune-output" / "compare" / "plain" / "log.txt").read_text()
    assert "documents one at a time" in log
    assert run("--output", "unbroken", *options[1:]).exit_code == 0
    assert losses_in(tmp_path / "unbroken") != pytest.approx(losses["flashqla"], rel=1e-5)


def test_comparison_takes_every_option_over(run, monkeypatch):
    """What a process of a comparison is told gives the settings that it was made from, with no more steps than the run has."""
    seen = []

    def keep(settings, *rest):
        seen.append(settings)
        raise FinetuneError("enough.")

    monkeypatch.setattr(command, "run", keep)
    run("--batch-size", "3", "--precision", "mixed", "--learning-rate", "0.01", "some text")
    other = compare._settings_of("plain-eager", 7, seen[0])
    CliRunner().invoke(build_app("finetune"), compare.command_of(other)[3:])
    assert seen[1:] == [other] and other.stop_after == 4
    assert (other.kernel, other.attention, other.batch_size, other.data) == ("plain-eager", "eager", 3, "some text")


@pytest.mark.parametrize(
    ("device", "listed", "seen"),
    [(None, None, "0"), ("cuda", "5,7", "5"), ("cuda:1", "5,7", "7"), ("cuda:3", None, "3"), ("cuda:4", None, None)],
)
def test_one_gpu_is_seen_by_trainer(monkeypatch, device, listed, seen):
    """Trainer takes the first GPU that it sees, and spreads a batch over all if there are several."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 if listed is None else len(listed.split(",")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed or "")
    if seen is None:
        with pytest.raises(FinetuneError, match="device cuda:4 cannot be used here"):
            command.chosen_device(device)
    else:
        assert command.chosen_device(device) == "cuda" and os.environ["CUDA_VISIBLE_DEVICES"] == seen


REFUSED = {
    "kernel": (["--kernel", "nobody"], "--kernel is nobody; it must be one of flashqla, plain,"),
    "kernel not there": (["--kernel", "fla"], "flash-linear-attention is not installed; leave the option out"),
    "checkpointing": (["--checkpointing", "some"], "--checkpointing is some; it must be one of none,"),
    "precision": (["--precision", "fp8"], "--precision is fp8; it must be one of bf16,"),
    "attention": (["--attention", "none"], "--attention is none; it must be one of sdpa,"),
    "comparison": (["--compare", "plain:0"], "--compare is plain:0; it must be all or one of plain,"),
    "documents": (["--kernel", "one-by-one"], "--kernel is one-by-one, which is for the documents of packed rows"),
    "documents compared": (["--compare", "one-by-one"], "--compare is one-by-one; it must be all or one of plain,"),
    "only": (["--only"], "--only is for the comparisons that --compare names"),
    "stop": (["--stop-after", "9"], "--stop-after is 9 and --steps 4; stop no later than that"),
    "device": (["--device", "cuda:7"], "device cuda:7 cannot be used here"),
    "text": (["nowhere.jsonl"], "data is nowhere.jsonl, which is no"),
    "short text": (["short.txt"], "data has 6 tokens, and 2 held-out rows and one to train on take 96"),
    "empty text": (["empty.txt"], "data is empty.txt, which holds no text"),
    "empty folder": (["folder"], "data is folder, which holds no text file; text files end in .txt,"),
    "binary": (["binary.txt"], "binary.txt is not text in UTF-8"),
    "column": (["--column", "body", "lines.jsonl"], "line 1 of lines.jsonl is no JSON object with a field body"),
    "model": (["--model", "./nowhere"], "model is ./nowhere, which is none of qwen3.5-0.8b, tiny, and"),
    "nothing to resume": (["--resume"], "finetune-output holds no run to resume; leave out --resume"),
    "both": (["--resume", "--overwrite"], "--resume and --overwrite are both given; one goes on and the other"),
    "a file as output": (["--output", "short.txt"], "--output is short.txt, which is a file; name a folder"),
    "a folder in a file": (["--output", "short.txt/out"], "--output is short.txt/out, which cannot be written"),
    "no name of data": ([""], "data is an empty name; name a file or folder"),
    "seed": (["--seed", "-1"], "--seed is -1; it must be 0 to 4294967295"),
    "packing": (["--verify-packing", "long.txt"], "no row holds several documents"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_error_is_one_sentence_before_any_work(run, tmp_path, monkeypatch, case):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("short.")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "long.txt").write_text("words " * 200)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n')
    options, sentence = REFUSED[case]
    result = run(*options)
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split("error: ")[1].split())
    assert sentence in said and said.endswith(".") and ". " not in said
    assert not (tmp_path / "finetune-output" / "steps.jsonl").exists()


def test_earlier_run_is_neither_mixed_with_nor_continued_with_other_options(run):
    assert run("--save-every", "2", "--stop-after", "2", "--no-save-model").exit_code == 0
    again, other = run("--save-every", "2"), run("--resume", "--seed", "1")
    assert again.exit_code == other.exit_code == 1
    assert "finetune-output holds checkpoint-2 of an earlier run; pass --resume to go on" in again.output
    assert "seed is 1 and the run in finetune-output has 0; resume it with the same options" in other.output
    assert run("--overwrite", "--no-save-model").exit_code == 0
    assert run("--resume", "--stop-after", "2").exit_code == 1


def test_results_of_an_earlier_run_are_replaced_only_if_that_is_asked_for(run, tmp_path):
    folder = tmp_path / "finetune-output"
    assert run("--compare", "plain:1").exit_code == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = run("--seed", "1")
    assert again.exit_code == 1
    assert "finetune-output holds model of an earlier run; pass --overwrite to begin again, or another" in again.output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert run("--overwrite", "--seed", "1", "--no-save-model").exit_code == 0
    assert not (folder / "model").exists() and not (folder / "comparison.json").exists()
    third = run()
    assert third.exit_code == 1 and "finetune-output holds report.json of an earlier run" in third.output


def test_run_that_begins_again_is_not_resumed_from_a_checkpoint_of_the_one_before(run, tmp_path):
    assert run("--save-every", "4", "--learning-rate", "1e-2", "--no-save-model").exit_code == 0
    assert run("--overwrite", "--stop-after", "2", "--no-save-model").exit_code == 0
    assert not (tmp_path / "finetune-output" / "checkpoint-4").exists()
    result = run("--resume")
    assert result.exit_code == 1 and "finetune-output holds no checkpoint to resume" in result.output


def test_half_written_checkpoint_is_passed_over(run, tmp_path):
    """The state of the trainer is what it writes last."""
    assert run("--output", "whole", "--no-save-model").exit_code == 0
    assert run("--save-every", "2", "--no-save-model").exit_code == 0
    folder = tmp_path / "finetune-output"
    (folder / "checkpoint-4" / "trainer_state.json").unlink()
    (folder / "checkpoint-4" / "model.safetensors").write_bytes(b"half")
    assert run("--resume", "--save-every", "2", "--no-save-model").exit_code == 0
    assert losses_in(folder) == losses_in(tmp_path / "whole")


def test_half_written_line_of_the_steps_does_not_keep_a_run_from_going_on(run, tmp_path):
    assert run("--save-every", "2", "--stop-after", "3", "--no-save-model").exit_code == 0
    file = tmp_path / "finetune-output" / "steps.jsonl"
    file.write_text(file.read_text()[:-20])
    result = run("--resume", "--no-save-model")
    assert result.exit_code == 0, result.output
    assert len(losses_in(tmp_path / "finetune-output")) == 4


def test_pretrained_model_trains_with_its_tokenizer(run, tmp_path, documents):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.transformers.families import tiny_model

    words = sorted({word for document in DOCUMENTS for word in document.split()})
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<end>", *words][:64])}, unk_token="<end>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(tmp_path / "mine")
    tiny_model("qwen3_next").save_pretrained(tmp_path / "mine")
    result = run("--model", str(tmp_path / "mine"), documents)
    assert result.exit_code == 0, result.output
    assert "qwen/flashqla in 3 layers" in result.output


def test_model_without_gated_delta_rule_is_refused(run, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    monkeypatch.setattr(model, "_random", lambda settings: (llama, list))
    result = run()
    assert result.exit_code == 1 and "LlamaForCausalLM without a gated delta rule layer" in result.output


def test_run_of_another_kernel_under_our_name_is_refused(run, tmp_path):
    """An empty repository serves nothing."""
    (tmp_path / "empty" / "build").mkdir(parents=True)
    with pytest.warns(UserWarning, match="replaces nothing"):
        result = run("--source", str(tmp_path / "empty"))
    assert result.exit_code == 1 and "would be served by transformers in 3 layers on cpu" in result.output


def test_library_that_was_not_called_is_no_run_of_it():
    with pytest.raises(FinetuneError, match="flash-linear-attention is installed but the layers did not call it"):
        implementations.require_called("fla", [])
    with pytest.raises(FinetuneError, match="flash-qla is installed but the layers did not call it"):
        implementations.require_called("fla+flashqla", ["fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"])
    implementations.require_called("fla", ["fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"])
    implementations.require_called("plain", ["transformers.models.torch_chunk_gated_delta_rule"])


def run_of(kernel: str, *losses: float) -> dict:
    return {"kernel": kernel, "losses": list(losses)}


def test_verdict_is_measured_by_rounding_alone():
    plain, rounding = run_of("plain", 2.0, 1.0), run_of("plain-eager", 2.0, 1.01)
    assert report.verdict([run_of("flashqla", 2.0, 1.014), plain, rounding])[0]
    assert not report.verdict([run_of("flashqla", 2.0, 1.016), plain, rounding])[0]
    assert not report.verdict([run_of("flashqla", 2.0, float("nan")), plain, rounding])[0]
    assert report.verdict([run_of("flashqla", 2.0), plain]) is None
    passes, sentence = report.verdict([run_of("flashqla", 9.0, 1.0), plain, {"kernel": "plain-eager", "losses": [2.0]}])
    assert not passes and "over 1 steps" in sentence


def test_verdict_says_when_float32_resolves_no_less():
    plain, rounding = run_of("plain", 2.0, 1.0), run_of("plain-eager", 2.0, 1.0)
    passes, sentence = report.verdict([run_of("flashqla", 2.0, 1.0), plain, rounding])
    assert passes and sentence.endswith("by 0.00e+00; 1.5 times what float32 resolves, 2.38e-07, is allowed.")
    _, sentence = report.verdict([run_of("flashqla", 2.0, 1.0), plain, run_of("plain-eager", 2.0, 1.1)])
    assert sentence.endswith("by 1.00e-01; 1.5 times that is allowed.")


@pytest.mark.parametrize("broken", [report.PLAIN, report.ROUNDING, report.OURS])
def test_verdict_without_numbers_is_none_that_passes(broken):
    losses = {name: [3.0, 2.5] for name in (report.OURS, report.PLAIN, report.ROUNDING)}
    losses[broken] = [3.0, float("nan")]
    passes, _ = report.verdict([{"kernel": name, "losses": values} for name, values in losses.items()])
    assert not passes


@pytest.mark.parametrize("content", ['{"half', "[]", "{}"])
def test_report_that_is_none_is_named(tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(FinetuneError, match=r"report.json is no report of a run; remove it, or run again"):
        compare.found([tmp_path])


def test_rows_cut_the_text_and_segments_cut_the_rows():
    corpus = text.join(["abcdef", "gh", "ijklmnop"], lambda document: list(document.encode()))
    assert corpus.starts.tolist() == [0, 6, 8]
    unbroken = text.Rows(corpus, 5, 0, 3, packed=False)
    assert [bytes(row["input_ids"].tolist()).decode() for row in unbroken] == ["abcde", "fghij", "klmno"]
    packed = text.Rows(corpus, 5, 0, 3, packed=True)
    segments = [[bytes(part["input_ids"]).decode() for part in row["segments"]] for row in packed]
    assert segments == [["abcde"], ["f", "gh", "ij"], ["klmno"]]


def test_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name, content in {"b.txt": "second", "a/c.md": "first", "image.png": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert text.read_documents(str(tmp_path), "text") == ["first", "second"]


def test_line_of_a_jsonl_file_ends_with_a_newline_alone(tmp_path):
    """JSON may hold every other character that ends a line of text."""
    documents = ["one\u2028two", "three\x85four", "five"]
    lines = [json.dumps({"text": document}, ensure_ascii=False) for document in documents]
    (tmp_path / "lines.jsonl").write_text("\r\n".join(lines) + "\n", encoding="utf-8", newline="")
    assert text.read_documents(str(tmp_path / "lines.jsonl"), "text") == documents


def test_dataset_of_the_hub_is_read(monkeypatch):
    from types import ModuleType

    class Train(dict):
        column_names = ("text",)

    datasets = ModuleType("datasets")
    datasets.load_dataset = lambda name, split: Train(text=[name, split])
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr(text, "find_spec", lambda name: datasets)
    assert text.read_documents("someone/some-text", "text") == ["someone/some-text", "train"]
    with pytest.raises(FinetuneError, match="has no column body; --column takes text"):
        text.read_documents("someone/some-text", "body")


def test_default_shape_is_that_of_the_small_qwen3_5():
    """24 layers of which 18 are gated delta rule layers, 16 key and 16 value heads of 128."""
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**model.SHAPES[model.LARGE])
    assert config.layer_types.count("linear_attention") == 18 and len(config.layer_types) == 24
    assert config.linear_key_head_dim == config.linear_value_head_dim == 128
    assert (config.linear_num_key_heads, config.linear_num_value_heads, config.hidden_size) == (16, 16, 1024)
