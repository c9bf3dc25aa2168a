"""The benchmark's rows, records and table, without a GPU."""

import gc
import io
import itertools
import json
import subprocess
import sys
import time
import types
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest
import torch

from flashqla_hub.bench import anchors, bounds, command, peers, protocol, record, worker
from flashqla_hub.bench.bounds import Rates, bound_ms, row_bytes, row_flops
from flashqla_hub.bench.inputs import copies_of, input_bytes, make_inputs
from flashqla_hub.bench.peers import BY_NAME
from flashqla_hub.bench.rows import GATES, ROW_SETS, Row, parse_rows, shortened
from flashqla_hub.package.download import VERSION

RATES = Rates(copy_tb_s=4.0, matrix_tflop_s=800.0)
COMMON = {"run": "r", "device": "NVIDIA H200", "copy_tb_s": 4.0, "matrix_tflop_s": 800.0}


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("16,64:1x32768", (32768,)),
        ("16,64:8192x4", (8192,) * 4),
        ("16,64:28672+4096", (28672, 4096)),
        ("16,32:8192_8seq", (161, 1928, 3157, 563, 1244, 229, 177, 733)),
    ],
)
def test_row_names_mean_lengths(text, lengths):
    assert Row.parse(text).lengths == lengths
    assert Row.parse(text).name == text


@pytest.mark.parametrize("text", ["16:8192", "16,24:1x10", "16,64:abc", "0,4:1x10", "2,0:1x10", "2,8:4x0", "2,8:1x0"])
def test_malformed_row_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=r".*is '.*'; .* must"):
        Row.parse(text)


def test_shortened_row_keeps_the_number_of_sequences_and_fits():
    assert len(shortened(Row(16, 64, "8192x4"), 1100)) == 4
    assert sum(shortened(Row(16, 64, "8192x4"), 1100)) <= 1100


def test_run_names_sort_by_time():
    early, late = (record.run_name("ffffff0", datetime(2026, 1, d, tzinfo=UTC)) for d in (2, 10))
    assert early < late and late == "20260110T000000Z-ffffff0"


def test_record_refuses_a_field_nobody_knows(tmp_path):
    record.append(tmp_path / "a.jsonl", [{"impl": "fla", "ms": 1.5, "error": None}])
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"impl": "fla", "ms": 1.5}
    with pytest.raises(ValueError, match="speed"):
        record.append(tmp_path / "a.jsonl", [{"speed": 1}])


def test_implementation_that_is_absent_is_a_row_with_its_reason(tmp_path):
    rows = [Row(2, 8, "1x64"), Row(2, 8, "1x65")]
    found = command.records_of(BY_NAME["flash-qla"], None, ["forward"], ["bench", "zero"], rows, COMMON)
    assert [(r["gates"], r["seqs"]) for r in found] == [(g, s) for g in ("bench", "zero") for s in ("1x64", "1x65")]
    assert all(r["skipped"] == "flash-qla is not installed" and "ms" not in r for r in found)
    record.append(tmp_path / "a.jsonl", found)


def test_our_version_is_that_of_the_kernel_not_of_its_loader():
    assert BY_NAME["flashqla"].version() == str(VERSION)


def test_a_peer_is_found_in_the_folders_that_it_was_given_and_named_with_its_compiler(tmp_path):
    for name, version in (("flash_qla", "7.1"), ("tilelang", "7.2")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (tmp_path / "flash_qla.py").write_text("")
    peer = replace(BY_NAME["flash-qla"], folders=(str(tmp_path),))
    assert peer.missing() is None and peer.version() == "7.1 (tilelang 7.2)"
    assert BY_NAME["flash-qla"].missing() == "flash-qla is not installed"


def test_folders_of_a_peer_come_before_the_others_in_its_process_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/others")
    found = command.parse_paths([f"fla={tmp_path}:{command.ROOT}"])
    assert found == {"fla": (str(tmp_path), str(command.ROOT))}
    assert command.search_path(found["fla"]) == f"{tmp_path}:{command.ROOT}:/others"
    assert command.search_path(()) == "/others"
    chosen = command._implementations(["fla", "flashqla"], found, ["forward"])
    assert [peer.folders for peer in chosen] == [found["fla"], ()]


@pytest.mark.parametrize("text", ["fla", "fla=/no/such/folder", "flax=/tmp"])
def test_a_malformed_path_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=f"--path is '{text}'; it must be NAME=FOLDERS"):
        command.parse_paths([text])


def test_only_what_compiles_is_called_beforehand_and_each_row_once(tmp_path, monkeypatch):
    started = []

    def start(implementation, options, source):
        started.append((implementation.name, options))
        return subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(command, "_start_worker", start)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    rows = [Row(2, 8, "1x64"), Row(2, 8, "1x65"), Row(2, 8, "1x66")]
    implementations = [
        replace(BY_NAME[name], module="torch") for name in ("flashqla", "flash-qla", "flashinfer", "fla")
    ]
    command.fill_compile_caches(implementations, ["forward"], rows, "zero", tmp_path, 60)
    shares = [(name, [option for option in options if option.startswith("2,8:")]) for name, options in started]
    assert shares == [
        (name, share) for name in ("flash-qla", "fla") for share in (["2,8:1x64", "2,8:1x66"], ["2,8:1x65"])
    ]
    assert all(options[:1] == ["--compile-only"] for _, options in started)


def test_who_has_not_compiled_everything_in_time_is_named_once(tmp_path, monkeypatch, capsys):
    def start(implementation, options, source):
        seconds = 60 if implementation.name == "flash-qla" else 0
        return subprocess.Popen(
            [sys.executable, "-c", f"import time; time.sleep({seconds})"], stdout=subprocess.PIPE, text=True
        )

    monkeypatch.setattr(command, "_start_worker", start)
    there = [replace(BY_NAME[name], module="torch") for name in ("flash-qla", "fla")]
    command.fill_compile_caches(there, ["forward"], [Row(2, 8, "1x64"), Row(2, 8, "1x65")], "zero", tmp_path, 2)
    said = "flash-qla had not compiled everything after 2 s, and compiles the rest in its own time; raise --seconds."
    assert capsys.readouterr().out.splitlines() == [said]


def test_flash_qla_is_given_the_cache_of_its_forward_and_its_variant_none(monkeypatch):
    """Stand-ins with the defaults of flash-qla 0.1.3: its forward keeps the cache when it is told to."""
    given = []

    def chunk_gated_delta_rule_fwd(*tensors, enable_fwd_cp_cache=False, **options):
        return "g", "A", "o", None, "state", "cache" if enable_fwd_cp_cache else None

    def chunk_gated_delta_rule_bwd(*tensors, cp_cache=None, **options):
        given.append(cp_cache)
        return "dq", "dk", "dv", "dbeta", "dg", "dh0"

    functions = (chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd)
    monkeypatch.setitem(sys.modules, "flash_qla", types.SimpleNamespace(**{each.__name__: each for each in functions}))
    d = make_inputs((20,), 1, 2, "bench", device="cpu")
    for name in ("flash-qla", "flash-qla-uncached"):
        assert BY_NAME[name].backward(d)() == ("dq", "dk", "dv", "dg", "dbeta", "dh0")
    assert given == ["cache", None]


def test_a_variant_has_rows_of_its_own_operation_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "begin", lambda *arguments: ({"run": "r", "device": "none"}, tmp_path / "a.jsonl"))
    monkeypatch.setattr(command, "_rates", lambda: RATES)
    chosen = {"impl": ["flash-qla", "flash-qla-uncached"], "compiled": True}
    command.bench_command(["2,8:1x64"], op=["forward", "backward", "forward_backward"], **chosen)
    written = [(line["impl"], line["op"]) for line in record.read([tmp_path / "a.jsonl"])]
    assert written == [
        *(("flash-qla", op) for op in ("forward", "backward", "forward_backward")),
        ("flash-qla-uncached", "backward"),
    ]


def test_a_variant_is_among_all_where_its_operation_is_and_compiles_for_that_alone(tmp_path, monkeypatch):
    started = []

    def start(implementation, options, source):
        started.append((implementation.name, options[options.index("--op") + 1]))
        return subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(command, "_start_worker", start)
    names = [each.name for each in command._implementations(None, {}, ["forward"])]
    assert names == ["flashqla", "flash-qla", "flashinfer", "fla"]
    ops = ["forward_backward", "backward"]
    everything = command._implementations(None, {}, ops)
    assert {each.name for each in everything} == {*names, "flash-qla-uncached"}
    there = [replace(each, module="torch") for each in everything]
    command.fill_compile_caches(there, ops, [Row(2, 8, "1x64")], "bench", tmp_path, 60)
    every = "forward_backward,backward"
    assert started == [("flash-qla", every), ("flash-qla-uncached", "backward"), ("fla", every)]


def test_a_variant_lies_where_what_it_varies_does_unless_told_otherwise(tmp_path):
    there, elsewhere = (str(tmp_path),), (str(command.ROOT),)
    names = ["flash-qla", "flash-qla-uncached"]
    found = command._implementations(names, {"flash-qla": there}, ["backward"])
    assert [each.folders for each in found] == [there, there]
    found = command._implementations(names, {"flash-qla": there, "flash-qla-uncached": elsewhere}, ["backward"])
    assert [each.folders for each in found] == [there, elsewhere]


def test_a_variant_without_its_operation_is_refused_with_it():
    rule = "--impl is 'flash-qla-uncached', which is timed for backward alone; pass --op backward"
    with pytest.raises(ValueError, match=rule):
        command._implementations(["flashqla", "flash-qla-uncached"], {}, ["forward", "forward_backward"])


def test_what_is_tuned_beside_others_is_not_remembered(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(command.subprocess, "Popen", lambda *args, env, **options: seen.append(env))
    for options in (["--compile-only"], []):
        command._start_worker(BY_NAME["fla"], options, tmp_path)
    assert [env.get("FLA_CACHE_RESULTS") for env in seen] == ["0", None]
    assert all(env["FLA_FLASH_QLA"] == "0" for env in seen)


def test_the_forward_set_is_the_rows_that_have_to_be_won():
    rows = parse_rows(["forward"])
    assert len(rows) == 18 and all(row.hv % row.hk == 0 for row in rows)
    assert {(row.hk, row.hv) for row in rows} == {
        *((2, 8), (4, 16), (8, 24), (8, 32)),
        *((16, 16), (16, 32), (16, 48), (16, 64)),
    }


def test_sets_and_rows_mix_and_none_runs_twice():
    assert [row.name for row in parse_rows(["2,8:1x5", *["few"] * 2])] == ["2,8:1x5", *ROW_SETS["few"]]


def test_an_unknown_set_is_refused_with_the_sets_there_are():
    with pytest.raises(ValueError, match=r"fast.*forward"):
        parse_rows(["fast"])


def test_bytes_and_operations_of_a_row_by_hand():
    """Two sequences, 128 tokens, one key head, two value heads."""
    row = Row(1, 2, "64x2")
    tensors = 128 * (2 * 128 * 2 + 2 * 2 * 128 * 2 + 2 * 2 * 4)  # q k; v o; g beta
    assert row_bytes(row, "forward") == tensors + 2 * 2 * 2 * 128 * 128 * 4
    a_chunk = 2 * 64 * 64 * 128 + 2 * (
        3 * 64 * 128 * 128 + 2 * 64 * 64 * 128
    )  # K K^T, Q K^T; K S, Q S, K^T N, A Z, P N
    assert row_flops(row, "forward") == 2 * 2 * a_chunk


def test_the_bound_is_the_slower_of_bytes_and_operations():
    row = Row(16, 64, "1x32768")
    assert bound_ms(row, "forward", RATES) == pytest.approx(1e3 * row_flops(row, "forward") / 800e12)
    slow_memory = Rates(copy_tb_s=0.1, matrix_tflop_s=800.0)
    assert bound_ms(row, "forward", slow_memory) == pytest.approx(1e3 * row_bytes(row, "forward") / 0.1e12)


def test_bytes_are_those_of_the_inputs_and_outputs_that_are_made():
    row = Row(2, 4, "70+30")
    inputs = make_inputs(row.lengths, row.hk, row.hv, "bench", device="cpu")
    outputs = inputs["v"].numel() * 2 + inputs["h0"].numel() * 4
    assert row_bytes(row, "forward") == input_bytes(inputs, "forward") + outputs


def test_the_backward_reads_and_writes_what_autograd_does():
    row = Row(2, 4, "70+30")
    inputs = make_inputs(row.lengths, row.hk, row.hv, "bench", device="cpu")
    gradients = input_bytes(inputs, "forward")  # one for each input, in its dtype
    assert row_bytes(row, "backward") == input_bytes(inputs, "backward") + gradients
    assert row_bytes(row, "forward_backward") == row_bytes(row, "forward") + row_bytes(row, "backward")


def test_operations_of_the_backward_by_hand():
    """One chunk, one head: dO S^T, K dS, dZ S^T, N dS^T, Q^T dO, K^T dZ and K S, and eight products inside the chunk."""
    large, small, inner = 64 * 128 * 128, 64 * 64 * 128, 64**3
    assert row_flops(Row(1, 1, "1x64"), "backward") == 2 * (2 * small + 7 * large + 8 * small + 2 * inner)


@pytest.mark.parametrize("gates", GATES)
def test_gates_never_grow_and_have_the_share_of_still_heads_that_their_name_says(gates):
    g = make_inputs((300,), 2, 8, gates, device="cpu")["g"]
    still = int((g == 0).all(dim=1).sum())
    assert (g <= 0).all() and still == {"bench": 2, "zero": 8, "decay": 0, "trained": 0}[gates]


def test_copies_lie_elsewhere_but_share_their_bounds():
    inputs = make_inputs((70, 30), 2, 4, "bench", device="cpu")
    first, second = copies_of(inputs, 2)
    assert first is inputs and second["cu_seqlens"] is first["cu_seqlens"]
    assert torch.equal(second["q"], first["q"]) and second["q"].data_ptr() != first["q"].data_ptr()


@pytest.mark.parametrize(("input_bytes", "copies"), [(7, 18), (60, 2), (120, 1), (121, 1), (0, 120)])
def test_small_inputs_are_copied_until_they_exceed_the_cache(input_bytes, copies):
    assert protocol.copies_beyond_cache(input_bytes, cache_bytes=60) == copies


PEER = {
    **COMMON,
    "op": "forward",
    "impl": "flashinfer",
    "hk": 2,
    "hv": 8,
    "seqs": "1x32768",
    "gates": "bench",
    "ms": 0.25,
}


def test_a_peer_slower_than_its_anchor_voids_the_comparison():
    assert anchors.find(PEER)["ms"] == 0.2338
    assert anchors.explain_slow(PEER) is None
    assert anchors.explain_slow({**PEER, "ms": 0.28}) == "20 % slower than its anchor of 0.2338 ms"
    assert (
        anchors.explain_slow({**PEER, "ms": 0.28, "warm_ms": 0.25}) is None
    )  # slower since it reads memory, not the cache
    assert anchors.explain_slow({**PEER, "ms": 0.25, "warm_ms": 0.28})
    assert command.complete({**PEER, "ms": 0.28}, Row(2, 8, "1x32768"))["void"]


@pytest.mark.parametrize("other", [{"device": "NVIDIA H100"}, {"gates": "zero"}, {"impl": "flashqla"}, {"hv": 16}])
def test_an_anchor_speaks_only_of_what_was_measured(other):
    assert anchors.explain_slow({**PEER, "ms": 9.0, **other}) is None


def test_a_variant_is_held_to_the_anchor_of_what_it_varies():
    backward = {**PEER, "op": "backward", "hk": 16, "hv": 32, "ms": 2.98}
    for impl in ("flash-qla", "flash-qla-uncached"):
        assert anchors.find({**backward, "impl": impl})["ms"] == 2.9747
        assert anchors.explain_slow({**backward, "impl": impl}) is None
        assert anchors.explain_slow({**backward, "impl": impl, "ms": 3.6})


def test_anchors_are_rows_and_implementations_of_the_benchmark():
    for row in anchors.read()["rows"]:
        assert row["impl"] in BY_NAME and Row(row["hk"], row["hv"], row["seqs"]).lengths
    forward = {f"{r['hk']},{r['hv']}:{r['seqs']}" for r in anchors.read()["rows"] if r["op"] == "forward"}
    assert set(ROW_SETS["forward"]) - forward == {"16,32:1x32768"}


STAND_IN_WORKER = """
import json, sys, time
option = lambda name: sys.argv[sys.argv.index(name) + 1].split(",")
rows = [a for a in sys.argv if ":" in a]
print("a library prints what it likes")
print('{"ready": true}', flush=True)
assert sys.stdin.readline() == "go\\n"
for op in option("--op"):
    for mix in option("--gates"):
        for row in rows[: len(rows) if mix == "bench" else 1]:
            print(json.dumps({"op": op, "row": row, "gates": mix, "ms": 1.0}), flush=True)
if SLEEPS:
    time.sleep(60)
sys.exit(3)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes workers of a script in place of an implementation, which prints and then ends with code 3, or sleeps."""

    def make(sleeps=False):
        script = tmp_path / "worker"
        script.write_text(f"#!{sys.executable}\n{STAND_IN_WORKER.replace('SLEEPS', str(sleeps))}")
        script.chmod(0o755)
        monkeypatch.setattr(command.sys, "executable", str(script))
        return command.Worker(BY_NAME["flashqla"], OPS_OF_STAND_IN, ["bench", "zero"], ROWS_OF_STAND_IN, tmp_path, 0.0)

    return make


ROWS_OF_STAND_IN, OPS_OF_STAND_IN = [Row(2, 8, "1x64"), Row(2, 8, "1x65")], ["forward", "backward"]


def records_of_stand_in(started, seconds):
    arguments = (OPS_OF_STAND_IN, ["bench", "zero"], ROWS_OF_STAND_IN, COMMON, seconds)
    return command.records_of(replace(BY_NAME["flashqla"], module="torch"), started, *arguments)


def test_what_a_worker_printed_before_it_died_is_kept(stand_in):
    started = stand_in()
    assert started.is_ready.wait(60)
    found = records_of_stand_in(started, 60)
    assert [r.get("ms") for r in found] == [1.0, 1.0, 1.0, None] * 2
    assert [r["op"] for r in found] == ["forward"] * 4 + ["backward"] * 4
    assert found[3]["skipped"] == "the process ended with code 3"


def test_a_worker_that_takes_too_long_keeps_what_it_printed(stand_in):
    started = stand_in(sleeps=True)
    assert started.is_ready.wait(60)
    time.sleep(1)
    found = records_of_stand_in(started, 2)
    assert found[0]["ms"] == 1.0 and found[3]["skipped"] == "not done within 2 s"


def test_a_worker_that_dies_before_it_is_ready_is_a_row_with_that_reason(tmp_path, monkeypatch):
    script = tmp_path / "worker"
    script.write_text("#!/bin/sh\nexit 7\n")
    script.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(script))
    started = command.Worker(BY_NAME["flashqla"], OPS_OF_STAND_IN, ["bench", "zero"], ROWS_OF_STAND_IN, tmp_path, 0.0)
    assert started.is_ready.wait(60)
    assert records_of_stand_in(started, 60)[0]["skipped"] == "the process ended with code 7"


def test_getting_ready_calls_every_row_and_its_gate_unless_that_would_tune(monkeypatch):
    monkeypatch.setattr(worker, "make_inputs", lambda lengths, hk, hv, gates: sum(lengths))
    monkeypatch.setattr(worker.torch.cuda, "synchronize", lambda: None)
    seen = []

    def forward(tokens):
        seen.append(tokens)
        if tokens == 4:
            raise RuntimeError("it shows when it is timed")
        return lambda: None

    implementation = replace(BY_NAME["flashqla"], module="json", forward=forward, backward=None)
    worker.get_ready(implementation, ["forward", "backward"], ["1,2:1x4", "1,2:1x2000"], "bench")
    assert seen == [4, 2000, 1099]
    worker.get_ready(replace(implementation, prepares=False), ["forward"], ["1,2:1x8"], "bench")
    assert seen == [4, 2000, 1099]


def test_a_worker_says_that_it_is_ready_waits_and_prints_a_line_a_row(monkeypatch, capsys):
    """Operations first, then gates, then rows; the host is timed with the first gates, since it knows nothing of gates."""
    asked = []

    def measure(implementation, op, row, gates, sustain, with_host):
        asked.append((op, gates, row.name, sustain, with_host))
        if row.seqs == "1x65":
            raise RuntimeError("it broke\\nat length")
        return {"ms": 1.0}

    monkeypatch.setattr(worker, "measure", measure)
    monkeypatch.setattr(worker, "get_ready", lambda *arguments: asked.append("ready"))
    monkeypatch.setattr(worker.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    rows = ["2,8:1x64", "2,8:1x65"]
    options = ["--op", "forward,backward", "--gates", "zero,decay", "--sustain", "2", "--wait"]
    worker.main(["--impl", "flashqla", *options, *rows])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    every = [(op, gates, row) for op in ("forward", "backward") for gates in ("zero", "decay") for row in rows]
    assert asked == ["ready", *((op, gates, row, 2.0, gates == "zero") for op, gates, row in every)]
    assert lines[0] == {"ready": True} and [(x["op"], x["gates"], x["row"]) for x in lines[1:]] == every
    assert lines[1]["ms"] == 1.0 and lines[2]["skipped"].startswith("RuntimeError: it broke")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))  # nobody is left to tell it
    asked.clear()
    worker.main(["--impl", "flashqla", *options, *rows])
    assert asked == ["ready"]


class Exact:
    """An implementation in place of a library, on the CPU: the truth itself, with an error added to one gradient."""

    name = "exact"

    def __init__(self, spoilt: int | None = None, factor: float = 1.0):
        self.spoilt, self.factor = spoilt, factor

    def _call(self, op, d):
        return lambda: [x * (self.factor if i == self.spoilt else 1) for i, x in enumerate(worker.truth_of(op, d))]

    def forward(self, d):
        return self._call("forward", d)

    def backward(self, d):
        return self._call("backward", d)

    forward_backward = None


@pytest.mark.parametrize(("op", "tensors"), [("forward", 2), ("backward", 6)])
def test_the_gate_sees_each_output_and_gradient(op, tensors, monkeypatch):
    monkeypatch.setattr(worker, "make_inputs", partial(make_inputs, device="cpu"))
    row = Row(1, 2, "30+10")
    assert worker.gate(Exact(), op, row, "bench") == (0.0, True)
    for spoilt in range(tensors):
        error, is_right = worker.gate(Exact(spoilt, 1.05), op, row, "bench")
        assert error == pytest.approx(0.05) and not is_right


def test_a_forward_for_training_is_held_to_the_outputs_of_a_forward(monkeypatch):
    monkeypatch.setattr(worker, "make_inputs", partial(make_inputs, device="cpu"))
    exact = Exact()
    exact.training_forward = exact.forward
    assert worker.gate(exact, "training_forward", Row(1, 2, "1x20"), "bench") == (0.0, True)
    for work in (row_bytes, row_flops):
        assert work(Row(1, 2, "1x64"), "training_forward") == work(Row(1, 2, "1x64"), "forward")


def test_leaves_of_a_training_forward_want_gradients():
    d = make_inputs((20,), 1, 2, "bench", device="cpu")
    kept = peers._with_leaves(lambda *args, **options: (args, options), d, peers._options(d))()
    assert all(x.requires_grad for x in (*kept[0], kept[1]["initial_state"])) and len(kept[0]) == 5


def test_a_rate_is_that_of_the_fastest_round(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, other):
            return next(times)

    times = iter([6.0, 3.0, *[9.0] * bounds.ROUNDS])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bounds, "REST_SECONDS", 0)
    called = []
    assert bounds.least_ms(lambda: called.append(0)) == 3.0 / bounds.CALLS
    assert len(called) == 1 + bounds.ROUNDS * bounds.CALLS


def test_a_tuner_that_only_compiles_calls_each_candidate_once(monkeypatch):
    testing = types.SimpleNamespace(do_bench=None)
    tuner = types.SimpleNamespace(Autotuner=types.SimpleNamespace(prune_configs=None))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(testing=testing))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setitem(sys.modules, "triton.runtime", types.SimpleNamespace(autotuner=tuner))
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", tuner)
    worker.tune_nothing()
    called = []
    assert testing.do_bench(lambda: called.append(0), quantiles=(0.5, 0.2, 0.8)) == [0.0, 0.0, 0.0] and called == [0]


def test_the_host_time_is_the_least_of_many_rounds(monkeypatch):
    monkeypatch.setattr(protocol.torch.cuda, "synchronize", lambda: None)
    waits = itertools.chain([0.004] * 15, itertools.repeat(0.0))
    calls = [lambda: time.sleep(next(waits))]
    assert protocol.host_us(calls) < 1000 and gc.isenabled()
    assert protocol.host_us([lambda: time.sleep(0.03)]) >= 30000  # a single round takes longer than all may


def test_a_call_that_something_hits_does_not_count_in_the_host_time(monkeypatch):
    monkeypatch.setattr(protocol.torch.cuda, "synchronize", lambda: None)
    waits = itertools.cycle([0.01, 0.01, 0.01, *[0.0] * 7])
    assert protocol.host_us([lambda: time.sleep(next(waits))]) < 1000


def test_results_are_freed_outside_the_host_time_and_before_the_next_call(monkeypatch):
    monkeypatch.setattr(protocol.torch.cuda, "synchronize", lambda: None)

    class Result:
        alive = 0

        def __init__(self):
            Result.alive += 1
            assert Result.alive == 1

        def __del__(self):
            Result.alive -= 1
            time.sleep(0.002)

    assert protocol.host_us([Result]) < 1000


def test_the_row_itself_is_called_before_its_short_gate(monkeypatch):
    """What tunes itself on the first call of its kind is to see the row."""
    monkeypatch.setattr(worker, "make_inputs", partial(make_inputs, device="cpu"))
    monkeypatch.setattr(worker, "GATE_TOKENS", 10)
    seen, wrong = [], Exact(spoilt=0, factor=2.0)
    wrong.forward = lambda d: seen.append(d["q"].shape[1]) or wrong._call("forward", d)
    assert worker.measure(wrong, "forward", Row(1, 2, "1x40"), "bench")["skipped"].startswith("wrong")
    assert seen == [40, 10]


def test_the_burst_is_timed_before_what_heats_the_card(monkeypatch):
    """Eager calls and those for the host's time are tenths of a second of load, behind which a card may be at its power limit."""
    order = []
    monkeypatch.setattr(worker, "make_inputs", partial(make_inputs, device="cpu"))
    monkeypatch.setattr(worker.torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=1))
    for name, figure in {"capture": (None, 1), "burst_ms": 1.0, "eager_ms": 1.0, "host_us": 1.0}.items():
        monkeypatch.setattr(protocol, name, lambda *_, name=name, figure=figure: order.append(name) or figure)
    monkeypatch.setattr(protocol, "peak_bytes", lambda _: (1, 1))
    assert "skipped" not in worker.measure(Exact(), "forward", Row(1, 2, "1x20"), "bench")
    assert order == ["capture", "burst_ms", "eager_ms", "host_us", "host_us"]


def rested_replays(monkeypatch, milliseconds):
    """What a burst does, replays in the untimed and timed order of `milliseconds`, and its median."""
    done, replays = [], iter(milliseconds)
    monkeypatch.setattr(protocol.time, "sleep", lambda seconds: done.append("rest"))
    monkeypatch.setattr(protocol, "replay_ms", lambda _, count: done.append(count) or next(replays))
    return done, protocol.burst_ms(None, 10)


def test_each_replay_that_is_timed_comes_after_a_rest_of_its_own(monkeypatch):
    """Else their median is of some before the card meets its power limit and some behind it, as chance has it."""
    timed = [14.0, 19.0, 15.0, 18.0, 16.0]
    done, median = rested_replays(monkeypatch, [30.0, 20.0, *itertools.chain(*((99.0, each) for each in timed))])
    assert done == [1, 1, *["rest", 1, 1] * 5] and median == 1.6


def test_a_card_is_awake_when_a_short_replay_is_timed(monkeypatch):
    done, _ = rested_replays(monkeypatch, [2.0, 0.5, *[5.0, 0.5] * 5])
    assert done == [1, 1, *["rest", 10, 1] * 5]


def test_eager_calls_come_after_a_rest(monkeypatch):
    done = []
    monkeypatch.setattr(protocol.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(protocol.time, "sleep", lambda seconds: done.append("rest"))
    protocol.eager_ms([lambda: done.append("call")])
    assert done[0] == "rest" and set(done[1:]) == {"call"}


def test_gate_gradients_have_twice_the_room_of_the_others(monkeypatch):
    monkeypatch.setattr(worker, "make_inputs", partial(make_inputs, device="cpu"))
    rights = [worker.gate(Exact(spoilt, 1.015), "backward", Row(1, 2, "1x20"), "bench")[1] for spoilt in range(6)]
    assert rights == [False, False, False, True, False, False]


def test_an_operation_that_a_library_lacks_is_a_row_with_that_reason():
    assert worker.measure(Exact(), "forward_backward", Row(1, 2, "1x20"), "bench") == {
        "skipped": "exact has no forward and backward"
    }


def test_record_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "device_facts", lambda: {"device": "NVIDIA H200", "driver": "1", "torch": "2"})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written: File exists; pass another one as --output"):
        command.begin("abc", tmp_path / "file" / "record.jsonl")
    _, path = command.begin("abc", tmp_path / "folder" / "record.jsonl")
    assert path.read_text() == ""
