"""`python -m flashqla_hub compile`: the specs' kernels as libraries, with a line on what came out of each."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .cache import Cache, default_folder
from .errors import CompileError
from .inputs import inputs_digest
from .kernel_build import CompiledKernel, KernelSpec
from .product import Product, compile_kernels, compile_product
from .tools import find_tools

SHOWN_OPCODES = ("HGMMA", "UTMALDG", "UTMASTG")


def default_namespace() -> str:
    """An op namespace for trying things out; the package builder passes its own, which covers the Python files too."""
    return f"_flashqla_{inputs_digest()[:12]}"


def compile_command(
    out: Annotated[Path, typer.Option(help="Folder for libraries, cubins and manifest.json.")] = Path("dist/compiled"),
    namespace: Annotated[str | None, typer.Option(help="Op namespace; by default one made from the inputs.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Compile only this kernel and judge it; repeatable.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of earlier results.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Make everything anew; the bytes are the same.")] = False,
    every_lane: Annotated[
        bool, typer.Option("--every-lane-arrives", help="Slower kernels that compute-sanitizer's racecheck can follow.")
    ] = False,
) -> None:
    """Compile the TileLang kernels ahead of time: cubins, C++ launchers, one library per CPU, and a manifest."""
    console = Console()
    cache_folder = None if no_cache else cache or default_folder()
    try:
        tools = find_tools()  # before the specs, whose kernels import tilelang
        from flashqla_hub.kernels._sm90 import every_lane_arrives
        from flashqla_hub.kernels.spec import SPECS

        with every_lane_arrives() if every_lane else nullcontext():
            if kernel:
                compile_kernels(_choose(SPECS, kernel), tools, Cache(cache_folder), _report_to(console), not every_lane)
                return
            namespace = namespace or default_namespace() + "_every_lane" * every_lane
            product = compile_product(out, namespace, SPECS, cache_folder, _report_to(console), not every_lane)
    except (CompileError, FileExistsError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    _print_libraries(console, product)


def _choose(specs: Sequence[KernelSpec], names: Sequence[str]) -> list[KernelSpec]:
    unknown = sorted(set(names) - {spec.name for spec in specs})
    if unknown:
        known = ", ".join(spec.name for spec in specs)
        raise typer.BadParameter(f"there is no kernel {', '.join(unknown)}; there are {known}.")
    return [spec for spec in specs if spec.name in names]


def _report_to(console: Console) -> Callable[[CompiledKernel], None]:
    def report(kernel: CompiledKernel) -> None:
        resources = kernel.resources
        shared = resources.static_shared_memory + kernel.plan.dynamic_shared_memory
        counts = ", ".join(f"{kernel.opcodes.get(opcode, 0)} {opcode}" for opcode in SHOWN_OPCODES)
        sizes = f"{resources.registers} registers, {shared} B shared memory, cubin {len(kernel.cubin)} B"
        console.print(f"{kernel.plan.name}: {sizes}, {counts}", highlight=False, soft_wrap=True)

    return report


def _print_libraries(console: Console, product: Product) -> None:
    for path in (*product.libraries.values(), product.manifest):
        console.print(f"{path}  {path.stat().st_size} B", highlight=False, soft_wrap=True)
