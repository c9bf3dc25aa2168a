"""The shipped op on a GPU: current stream, graphs, threads, errors, devices. Its numbers are the other tests' subject."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from .shipped_library import find_library, load_ops

LIBRARY = find_library()
HAS_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not HAS_SM90, reason="there is no SM90 GPU"),
    pytest.mark.skipif(LIBRARY is None, reason="there is no library: set FLASHQLA_LIBRARY or run the compile command"),
]

H, HV, TOKENS = 2, 4, 300
LENGTHS = (100, 0, 199, 1)
ONE_SECOND = 2_000_000_000  # cycles of torch.cuda._sleep at about 2 GHz


@pytest.fixture(scope="module")
def forward():
    return load_ops(LIBRARY).sm90_gated_delta_rule_fwd


def offsets(lengths, device="cuda"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def make_inputs(seed=0, device="cuda"):
    """q, k, v, g, beta of one packed batch; keys of about unit length, as after the L2 norm."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    q, k = (torch.nn.functional.normalize(normal(1, TOKENS, H, 128), dim=-1).bfloat16() for _ in range(2))
    v = normal(1, TOKENS, HV, 128).bfloat16()
    g, beta = torch.nn.functional.logsigmoid(normal(1, TOKENS, HV)) / 16, normal(1, TOKENS, HV).sigmoid()
    return q, k, v, g, beta


def call(forward, inputs, cu_seqlens):
    return forward(*inputs, None, cu_seqlens, 0.0883883, False, False, True, 0)


def assert_equal(actual, expected):
    """o and the final state, bit for bit."""
    for name, one, other in zip(("o", "final_state"), actual, expected, strict=True):
        assert torch.equal(one, other), f"{name} differs by {(one.float() - other.float()).abs().max().item()}"


@pytest.fixture
def expected(forward):
    """Inputs and results of a quiet call on the default stream."""
    inputs, cu_seqlens = make_inputs(), offsets(LENGTHS)
    results = call(forward, inputs, cu_seqlens)
    torch.cuda.synchronize()
    assert all(torch.isfinite(result).all() for result in results[:2])
    assert results[0].abs().max() > 0.01
    return inputs, cu_seqlens, results


def test_a_call_waits_for_its_own_stream_only(forward, expected):
    inputs, cu_seqlens, results = expected
    stream, late_q = torch.cuda.Stream(), torch.full_like(inputs[0], float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(ONE_SECOND)
        late_q.copy_(inputs[0])
        late = call(forward, (late_q, *inputs[1:]), cu_seqlens)
    early = call(forward, inputs, cu_seqlens)
    torch.cuda.current_stream().synchronize()
    assert not stream.query(), "the side stream is still asleep while the default stream has finished"
    assert_equal(early, results)
    stream.synchronize()
    assert_equal(late, results)


def test_one_graph_serves_other_lengths_of_the_same_total(forward, expected):
    inputs, cu_seqlens, _ = expected
    static = [tensor.clone() for tensor in inputs]
    static_offsets = cu_seqlens.clone()
    call(forward, static, static_offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(forward, static, static_offsets)
    for seed, lengths in ((1, LENGTHS), (2, (300, 0, 0, 0)), (3, (64, 65, 63, 108)), (4, (0, 0, 0, 300))):
        fresh, fresh_offsets = make_inputs(seed), offsets(lengths)
        for place, tensor in zip((*static, static_offsets), (*fresh, fresh_offsets), strict=True):
            place.copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(captured, call(forward, fresh, fresh_offsets))


COLD_CAPTURE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from tests.sm90.test_shipped_op import LENGTHS, assert_equal, call, find_library, load_ops, make_inputs, offsets
forward = load_ops(find_library()).sm90_gated_delta_rule_fwd
inputs, cu_seqlens = make_inputs(), offsets(LENGTHS)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = call(forward, inputs, cu_seqlens)
graph.replay()
torch.cuda.synchronize()
assert_equal(captured, call(forward, inputs, cu_seqlens))
"""


def test_the_first_call_may_be_captured():
    command = [sys.executable, "-c", COLD_CAPTURE, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_synchronises(forward, expected):
    inputs, cu_seqlens, results = expected
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = call(forward, inputs, cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(actual, results)


def test_fresh_threads_get_the_same_results(forward, expected):
    inputs, cu_seqlens, results = expected
    found, problems = [], []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found.extend(call(forward, inputs, cu_seqlens) for _ in range(20))
                torch.cuda.current_stream().synchronize()
        except Exception as problem:
            problems.append(problem)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(found) == 160
    for actual in found:
        assert_equal(actual, results)


def test_after_errors_the_next_call_works(forward, expected):
    inputs, cu_seqlens, results = expected
    q, k, v, g, beta = inputs
    wrong = [
        ((q.double(), k, v, g, beta), cu_seqlens, "neither bfloat16 nor float16"),
        ((q, k[:, :-1], v, g, beta), cu_seqlens, "k.shape"),
        ((q, k, v[..., :64], g, beta), cu_seqlens, "head dim 64"),
        ((q, k, v, g, beta), cu_seqlens.float(), "cu_seqlens must be int32 or int64"),
        ((q, k, v, g, beta), cu_seqlens.cpu(), "cu_seqlens is not a CUDA tensor"),
    ]
    for arguments, lengths, words in wrong:
        with pytest.raises(RuntimeError, match=words):
            call(forward, arguments, lengths)
        assert_equal(call(forward, inputs, cu_seqlens), results)


def test_calls_keep_no_memory(forward, expected):
    inputs, cu_seqlens, _ = expected
    call(forward, inputs, cu_seqlens)
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        call(forward, inputs, cu_seqlens)
        with pytest.raises(RuntimeError):
            call(forward, (inputs[0].clone()[:, :-1], *inputs[1:]), cu_seqlens)
    assert torch.cuda.memory_allocated() == before


def test_states_without_tokens_stay(forward):
    empty = [tensor[:, :0] for tensor in make_inputs()]
    state = torch.randn(2, HV, 128, 128, device="cuda")
    o, final_state = forward(*empty, state, offsets((0, 0)), 1.0, False, False, True, 0)
    assert o.shape == (1, 0, HV, 128)
    assert torch.equal(final_state, state)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_tensors_of_another_device_run_there(forward, expected):
    _, cu_seqlens, results = expected
    inputs = [tensor.to("cuda:1") for tensor in expected[0]]
    with torch.cuda.device(0):
        actual = call(forward, inputs, cu_seqlens.to("cuda:1"))
        assert torch.cuda.current_device() == 0
    assert_equal([tensor.to("cuda:0") for tensor in actual[:2]], results)
