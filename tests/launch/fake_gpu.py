"""A process in which the shipped library runs against fakes of the CUDA driver and of PyTorch's CUDA part.

`Process` starts it; functions handed to `Process.run` execute there and see `op`, `launches`, `place` and the fakes.
"""

import ctypes
import multiprocessing
import re
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAKES = Path(__file__).with_name("fakes")
MAP_MAGIC = 0x7E4507A9
FORMATS = {"int": "<i", "int64_t": "<q", "float": "<f"}


def build_fakes(compiler: str, folder: Path) -> None:
    """Compiles the two fakes into `folder` under the names that the library looks for."""
    for source, soname in (("libcuda.c", "libcuda.so.1"), ("libtorch_cuda.c", "libtorch_cuda.so")):
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", FAKES / source, "-o", folder / soname]
        subprocess.run([*command, f"-Wl,-soname,{soname}", "-ldl", "-lpthread"], check=True, timeout=60)


@dataclass(frozen=True)
class TensorMap:
    """What a launch passed as a tensor map; innermost dimension first, strides in bytes without the innermost."""

    address: int
    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    interleave: int
    l2_promotion: int
    out_of_bounds: int


@dataclass(frozen=True)
class Launch:
    """One recorded launch; `arguments` by the parameter names of the kernel's CUDA source."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_memory: int
    cluster: tuple[int, ...]
    cluster_policy: int
    programmatic: bool
    stream: int
    context: int
    arguments: dict[str, Any]


def kernel_parameters(cuda_source: str) -> dict[str, list[tuple[str, str]]]:
    """Kernel -> [(type, name)] of its parameters, from the declaration in the generated CUDA source."""
    found = {}
    for kernel, text in re.findall(r'extern "C" __global__ void (\w+)\(([^)]*)\);', cuda_source):
        parameters = [parameter.rsplit(None, 1) for parameter in text.split(",")]
        found[kernel] = [(kind.replace("__restrict__", "").strip(), name) for kind, name in parameters]
    return found


class Process:
    """A child process with the fakes and one library loaded."""

    def __init__(self, fakes: Path, library: Path, namespace: str, cuda_sources: list[str]) -> None:
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(fakes, library, namespace, cuda_sources),
        )

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Executes a module-level function there; its result comes back, or its exception is raised."""
        return self._pool.submit(_run, function, arguments).result(timeout=120)

    def stop(self) -> None:
        self._pool.shutdown()


class _State:
    """Of the child process."""

    cuda: ctypes.CDLL
    torch_cuda: ctypes.CDLL
    namespace: str
    parameters: dict[str, list[tuple[str, str]]]


def op(name: str, *arguments: Any) -> Any:
    """Calls an op's CUDA kernel with CPU tensors."""
    import torch

    overload = getattr(getattr(torch.ops, _State.namespace), name).default
    return overload._op_dk(torch._C.DispatchKey.CUDA, *arguments)


def cuda_fake() -> ctypes.CDLL:
    return _State.cuda


def torch_fake() -> ctypes.CDLL:
    return _State.torch_cuda


def place(tensor: Any, device: int) -> Any:
    """Makes a tensor pass for one on that device; others pass for tensors on device 0."""
    _State.torch_cuda.fake_place(ctypes.c_void_p(tensor.data_ptr()), device)
    return tensor


def launches() -> list[Launch]:
    """All launches since this function was last called or `run` began."""
    found = [_decode(_State.cuda.fake_launch(index).contents) for index in range(_State.cuda.fake_launch_count())]
    _State.cuda.fake_reset()
    return found


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char * 64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_memory", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("cluster_policy", ctypes.c_uint32),
        ("programmatic", ctypes.c_uint32),
        ("argument_count", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("arguments", (ctypes.c_ubyte * 128) * 64),
    )


class _Map(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 5),
        ("element_strides", ctypes.c_uint32 * 5),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("interleave", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
        ("l2_promotion", ctypes.c_int32),
        ("out_of_bounds", ctypes.c_int32),
    )


def _start(fakes: Path, library: Path, namespace: str, cuda_sources: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    _State.cuda = ctypes.CDLL(str(fakes / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    _State.torch_cuda = ctypes.CDLL(str(fakes / "libtorch_cuda.so"), mode=ctypes.RTLD_GLOBAL)
    _State.cuda.fake_launch.restype = ctypes.POINTER(_Launch)
    _State.cuda.fake_map.restype = ctypes.POINTER(_Map)
    _State.namespace = namespace
    _State.parameters = {name: parts for source in cuda_sources for name, parts in kernel_parameters(source).items()}
    _State.torch_cuda.fake_peak_bytes.restype = ctypes.c_int64
    for kernel, parameters in _State.parameters.items():
        sizes = [
            128 if "CUtensorMap" in kind else 8 if "*" in kind else struct.calcsize(FORMATS[kind])
            for kind, _ in parameters
        ]
        _State.cuda.fake_describe_kernel(kernel.encode(), len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    torch.ops.load_library(str(library))


def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    _State.cuda.fake_reset()
    _State.cuda.fake_set_compute_capability(90)
    _State.torch_cuda.fake_forget()
    _State.torch_cuda.fake_set_device(0)
    for device in range(8):
        _State.torch_cuda.fake_set_stream(device, ctypes.c_uint64(0))
    return function(*arguments)


def _decode(record: _Launch) -> Launch:
    kernel = record.kernel.decode()
    values = {
        name: _argument(kind, bytes(record.arguments[index]))
        for index, (kind, name) in enumerate(_State.parameters[kernel])
    }
    return Launch(
        kernel=kernel,
        grid=tuple(record.grid),
        block=tuple(record.block),
        shared_memory=record.shared_memory,
        cluster=tuple(record.cluster),
        cluster_policy=record.cluster_policy,
        programmatic=bool(record.programmatic),
        stream=record.stream,
        context=record.context,
        arguments=values,
    )


def _argument(kind: str, data: bytes) -> Any:
    if "CUtensorMap" in kind:
        number, magic = struct.unpack_from("<II", data)
        assert magic == MAP_MAGIC, "the kernel got something else where it expects a tensor map"
        return _tensor_map(_State.cuda.fake_map(number).contents)
    return struct.unpack_from("<Q" if "*" in kind else FORMATS[kind], data)[0]


def _tensor_map(record: _Map) -> TensorMap:
    rank = record.rank
    return TensorMap(
        address=record.address,
        dtype=record.dtype,
        dims=tuple(record.dims[:rank]),
        strides=tuple(record.strides[: rank - 1]),
        box=tuple(record.box[:rank]),
        element_strides=tuple(record.element_strides[:rank]),
        swizzle=record.swizzle,
        interleave=record.interleave,
        l2_promotion=record.l2_promotion,
        out_of_bounds=record.out_of_bounds,
    )
