"""Timing: a CUDA graph of several calls for the device's time, back-to-back eager calls for what a user waits.

A row is timed over one call or several: the same call on copies of its inputs, in turn, so that small inputs come from
memory and not from the L2 cache of the call before.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from .bounds import REST_SECONDS

GRAPH_CALLS = 10
GRAPH_REPLAYS = 5
AWAKE_MS = 5.0  # of replays between a rest and the one that is timed
EAGER_CALLS = 30
HOST_CALLS, HOST_ROUNDS, HOST_SECONDS = 10, 200, 0.25
L2_SIZES = 2  # inputs that are read in turn take at least this many times the L2 cache


def copies_beyond_cache(input_bytes: int, cache_bytes: int) -> int:
    """Copies of the inputs that together exceed the cache `L2_SIZES` times; 1 if one set does."""
    return max(1, math.ceil(L2_SIZES * cache_bytes / max(input_bytes, 1)))


def capture(calls: Sequence[Callable]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A CUDA graph of at least `GRAPH_CALLS` calls, each of `calls` equally often, and their number."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in itertools.islice(itertools.cycle(calls), 3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    rounds = math.ceil(GRAPH_CALLS / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Milliseconds of `replays` replays in a row."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def burst_ms(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Median milliseconds a call over single replays, each behind a rest and some that wake the card."""
    replay_ms(graph, 1)
    awakening = math.ceil(AWAKE_MS / replay_ms(graph, 1))
    return statistics.median(_rested_replay_ms(graph, awakening) for _ in range(GRAPH_REPLAYS)) / count


def _rested_replay_ms(graph: torch.cuda.CUDAGraph, awakening: int) -> float:
    time.sleep(REST_SECONDS)
    replay_ms(graph, awakening)
    return replay_ms(graph, 1)


def sustained_ms(graph: torch.cuda.CUDAGraph, count: int, burst: float, seconds: float) -> float:
    """Mean milliseconds a call over about `seconds` of replays without a pause, when the power limit has its say."""
    replays = max(1, math.ceil(seconds * 1e3 / (burst * count)))
    return replay_ms(graph, replays) / (replays * count)


def graph_ms(calls: Sequence[Callable]) -> float:
    """Median milliseconds a call, from a CUDA graph of them in turn."""
    return burst_ms(*capture(calls))


def eager_ms(calls: Sequence[Callable]) -> float:
    """Milliseconds a call of `EAGER_CALLS` calls queued one behind the other after a rest, from the host's clock."""
    turn = itertools.cycle(calls)
    time.sleep(REST_SECONDS)
    for _ in range(3):
        next(turn)()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(EAGER_CALLS):
        next(turn)()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / EAGER_CALLS


def host_us(calls: Sequence[Callable]) -> float:
    """Microseconds from entering a call to its return: the median of a round's calls, the least of up to `HOST_ROUNDS` rounds.

    A round starts with an idle device and is short enough for its queue, so the host never waits for it. What a call returns is
    freed before the next one, whose results then need no new memory. There are as many rounds as fit into `HOST_SECONDS`, and no
    garbage is collected meanwhile. The median leaves out what hits single calls, the least of the rounds other users of the host.
    """
    turn, rounds = itertools.cycle(calls), []
    gc.collect()
    gc.disable()
    end = time.perf_counter() + HOST_SECONDS
    while not rounds or (len(rounds) < HOST_ROUNDS and time.perf_counter() < end):
        torch.cuda.synchronize()
        seconds = []
        for call in itertools.islice(turn, HOST_CALLS):
            start = time.perf_counter()
            outputs = call()
            seconds.append(time.perf_counter() - start)
            del outputs
        rounds.append(statistics.median(seconds) * 1e6)
    gc.enable()
    torch.cuda.synchronize()
    return min(rounds)


def peak_bytes(call: Callable) -> tuple[int, int]:
    """Bytes allocated at the peak of a call, above what was allocated before it, and those of its outputs among them."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    output_bytes = sum(x.numel() * x.element_size() for x in outputs if isinstance(x, torch.Tensor))
    return peak, output_bytes
