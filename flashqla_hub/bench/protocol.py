"""Timing: a CUDA graph of several calls for the device's time, back-to-back eager calls for what a user waits."""

import statistics
import time
from collections.abc import Callable

import torch

GRAPH_CALLS = 10
GRAPH_REPLAYS = 5
EAGER_CALLS = 30


def graph_ms(call: Callable) -> float:
    """Median milliseconds a call over replays of a CUDA graph of `GRAPH_CALLS` calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(GRAPH_REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / GRAPH_CALLS)
    return statistics.median(times)


def eager_ms(call: Callable) -> float:
    """Milliseconds a call of `EAGER_CALLS` calls queued one behind the other, from the host's clock."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(EAGER_CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / EAGER_CALLS


def peak_mb(call: Callable) -> float:
    """Megabytes allocated at the peak of a call, above what was allocated before it, outputs included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del outputs
    return (peak - before) / 1e6
