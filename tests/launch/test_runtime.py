"""The runtime under the launchers: streams, devices, threads, first use, and errors."""

import ctypes
import gc
import threading

import pytest
import torch
from fake_gpu import cuda_fake, launches, op, place, torch_fake

ROWS = 300


def copy(device=0):
    x, y = (place(torch.zeros(ROWS, 128, dtype=torch.float16), device) for _ in range(2))
    op("stage_cluster_copy", x, y)


def copy_on_two_streams():
    for stream in (0x5EED, 0xBEEF):
        torch_fake().fake_set_stream(0, ctypes.c_uint64(stream))
        copy()
    return [launch.stream for launch in launches()]


def copy_on_another_device():
    torch_fake().fake_set_stream(3, ctypes.c_uint64(33))
    torch_fake().fake_set_device(1)
    cuda_fake().cuCtxSetCurrent(None)
    copy(device=3)
    [launch] = launches()
    shared_memory = cuda_fake().fake_max_shared_memory(b"cluster_copy_kernel", 3)
    carveout = cuda_fake().fake_carveout(b"cluster_copy_kernel", 3)
    return launch.stream, launch.context, torch_fake().fake_current_device(), shared_memory, carveout


def fail_on_another_device():
    torch_fake().fake_set_device(1)
    x = place(torch.zeros(ROWS, 128, dtype=torch.float16), 3)
    try:
        op("stage_cluster_copy", x, torch.zeros(ROWS, 64, dtype=torch.float16))
    except RuntimeError:
        return torch_fake().fake_current_device(), torch_fake().fake_open_guards()


def copy_from_many_threads():
    errors = []

    def work():
        try:
            for _ in range(5):
                copy()
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, len(launches()), cuda_fake().fake_load_count()


def fail_then_copy():
    cuda_fake().fake_fail_next_launches(1)
    with pytest.raises(RuntimeError) as error:
        copy()
    copy()
    return str(error.value), len(launches())


def copy_on(compute_capability):
    cuda_fake().fake_set_compute_capability(compute_capability)
    copy()


def leaked_bytes_of_failing_calls(x_shape):
    """Of 100 calls whose y is 1 MiB and fits no x of that shape."""
    x, y = torch.zeros(x_shape, dtype=torch.float16), torch.zeros(4096, 128, dtype=torch.float16)

    def fail():
        with pytest.raises(RuntimeError):
            op("stage_cluster_copy", x, y.clone())

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    for _ in range(20):
        fail()
    before = resident()
    for _ in range(100):
        fail()
    return resident() - before, torch_fake().fake_open_guards()


def test_launches_go_to_the_current_stream(stand_in_process):
    assert stand_in_process.run(copy_on_two_streams) == [0x5EED, 0xBEEF]


def test_launches_go_to_the_device_of_the_tensors_and_the_callers_device_returns(stand_in_process):
    stream, context, device, shared_memory, carveout = stand_in_process.run(copy_on_another_device)
    assert (stream, context, device) == (33, 1003, 1)
    assert shared_memory == 0, "16 KiB need no permission"
    assert carveout == 100, "16 KiB a block limit the blocks of an SM"


def test_the_callers_device_returns_after_an_error(stand_in_process):
    assert stand_in_process.run(fail_on_another_device) == (1, 0)


def test_eight_threads_load_a_cubin_once(fresh_process):
    errors, launched, loaded = fresh_process.run(copy_from_many_threads)
    assert (errors, launched, loaded) == ([], 40, 1)


def test_a_driver_error_is_named_and_the_next_call_works(stand_in_process):
    message, launched = stand_in_process.run(fail_then_copy)
    assert "cluster_copy_kernel: the CUDA driver reports error 719 (launch failed)." in message
    assert launched == 1


def test_another_architecture_is_refused_by_name(fresh_process):
    with pytest.raises(
        RuntimeError, match=r"runs on compute capability 9.0 only \(H100, H200, GH200\) and device 0 has 12.0"
    ):
        fresh_process.run(copy_on, 120)


@pytest.mark.parametrize("x_shape", [(5, 128), (1, 1, 1, 1, 5, 128)], ids=["when-comparing", "when-reading-the-first"])
def test_failing_calls_leak_nothing(stand_in_process, x_shape):
    leaked, guards = stand_in_process.run(leaked_bytes_of_failing_calls, x_shape)
    assert guards == 0
    assert leaked < 4096 * 128 * 2, "less than one of the hundred arguments"


def test_nothing_can_synchronise(stand_in_library):
    library = stand_in_library.read_bytes()
    for word in (b"Synchronize", b"cuMemcpy", b"aoti_torch_item", b"cudaMemcpy"):
        assert word not in library
