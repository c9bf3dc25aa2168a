"""All specs -> libraries and manifest in one folder; what `python -m flashqla_hub compile` and the package builder call."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from .cache import Cache
from .elf import read_shared_library
from .errors import GateFailure
from .gates import library_failures, newest_glibc, size_failures, used_shims
from .inputs import inputs_digest
from .kernel_build import CompiledKernel, KernelSpec, compile_kernel, judge_kernel, lower_kernel
from .launcher_source import HEADER, header_source, launcher_source
from .library import MACHINES, build_library, hand_written_sources
from .tools import Tools, find_tools
from .torch_shims import SINCE_AT_RUN_TIME

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Product:
    """What one run wrote: machine -> library, and the manifest beside them."""

    libraries: Mapping[str, Path]
    manifest: Path
    kernels: Sequence[CompiledKernel]


def compile_kernels(
    specs: Iterable[KernelSpec],
    tools: Tools,
    cache: Cache,
    report: Callable[[CompiledKernel], None] = lambda kernel: None,
    judged: bool = True,
) -> list[CompiledKernel]:
    """Lowers the specs one after the other, compiles two at a time and reports each kernel that passes its gates.

    With `judged=False` every kernel passes: for kernels that serve a tool and are not shipped.

    Raises:
        GateFailure: at least one kernel must not be shipped; all reasons of all kernels, one a line.
    """
    kernels, failures = [], []
    with ThreadPoolExecutor(max_workers=2) as pool:
        pending = []
        for spec in specs:
            pending.append((spec, pool.submit(compile_kernel, lower_kernel(spec, tools, cache), tools, cache)))
        for spec, future in pending:
            try:
                if judged:
                    judge_kernel(future.result(), spec.minimum_instructions)
                kernels.append(future.result())
                report(kernels[-1])
            except GateFailure as failure:
                failures.append(str(failure))
    if failures:
        raise GateFailure("\n".join(failures))
    return kernels


def compile_product(
    out: Path,
    namespace: str,
    specs: Sequence[KernelSpec],
    cache_folder: Path | None,
    report: Callable[[CompiledKernel], None] = lambda kernel: None,
    judged: bool = True,
) -> Product:
    """Writes `<out>/<machine>/<namespace>.so` per CPU and `<out>/manifest.json` in place of an earlier result.

    Args:
        namespace: op namespace of the libraries, a Python identifier.
        cache_folder: earlier results, or None to make everything anew; the bytes are the same.
        judged: see `compile_kernels`.

    Raises:
        ToolsMissing, LoweringError, CompilerError, GateFailure: see their docstrings.
        FileExistsError: `out` holds something that no earlier run wrote; nothing is touched.
    """
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists():
        raise FileExistsError(
            f"{out} holds something other than an earlier result of this command; name another folder."
        )
    tools = find_tools()
    kernels = compile_kernels(specs, tools, Cache(cache_folder), report, judged)
    libraries = {machine: _link(tools, machine, namespace, kernels, cache_folder) for machine in MACHINES}
    manifest = {
        "inputs": inputs_digest(),
        "kernels": {kernel.plan.name: kernel.manifest_entry() for kernel in kernels},
        "libraries": {machine: judge_library(data, machine) for machine, data in libraries.items()},
        "namespace": namespace,
        "tools": tools.versions,
    }
    return _write(out, namespace, libraries, manifest, kernels)


def link_library(machine: str, namespace: str, kernels: Sequence[CompiledKernel], cache_folder: Path | None) -> bytes:
    """The library of compiled kernels for one CPU alone, judged like those of `compile_product` and equal to its bytes.

    Raises:
        CompilerError, GateFailure: it does not link, or would not load everywhere.
    """
    library = _link(find_tools(), machine, namespace, kernels, cache_folder)
    judge_library(library, machine)
    return library


def _link(
    tools: Tools, machine: str, namespace: str, kernels: Sequence[CompiledKernel], cache_folder: Path | None
) -> bytes:
    sources = hand_written_sources("runtime", "ops") | generated_sources(kernels)
    return build_library(tools, machine, namespace, sources, cache_folder / "zig" if cache_folder else None)


def generated_sources(kernels: Sequence[CompiledKernel]) -> dict[str, bytes]:
    """Launchers, their header and the cubins, as files of the folder `generated`."""
    files = {HEADER: header_source(kernel.plan for kernel in kernels).encode()}
    for kernel in kernels:
        files[f"{kernel.plan.name}.cubin"] = kernel.cubin
        files[f"{kernel.plan.name}.cpp"] = launcher_source(kernel.plan, kernel.cubin).encode()
    return {f"generated/{name}": content for name, content in files.items()}


def judge_library(data: bytes, machine: str) -> dict[str, Any]:
    """The manifest's entry of one library.

    Raises:
        GateFailure: it would not load everywhere; one reason a line.
    """
    library = read_shared_library(data)
    failures = library_failures(library, machine) + size_failures(data, machine)
    if failures:
        raise GateFailure("\n".join(failures))
    return {
        "bytes": len(data),
        "glibc": newest_glibc(library),
        "needed": list(library.needed),
        "sha256": sha256(data).hexdigest(),
        "torch_shims": used_shims(library)
        | {name: ".".join(map(str, since)) for name, since in SINCE_AT_RUN_TIME.items()},
    }


def _write(
    out: Path,
    namespace: str,
    libraries: Mapping[str, bytes],
    manifest: Mapping[str, Any],
    kernels: Sequence[CompiledKernel],
) -> Product:
    shutil.rmtree(out, ignore_errors=True)
    paths = {}
    for machine, data in libraries.items():
        paths[machine] = out / machine / f"{namespace}.so"
        paths[machine].parent.mkdir(parents=True)
        paths[machine].write_bytes(data)
    (out / "kernels").mkdir()
    for kernel in kernels:
        (out / "kernels" / f"{kernel.plan.name}.cu").write_text(kernel.source)
        (out / "kernels" / f"{kernel.plan.name}.cubin").write_bytes(kernel.cubin)
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return Product(paths, out / MANIFEST, kernels)
