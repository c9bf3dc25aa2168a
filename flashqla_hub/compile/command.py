"""`python -m flashqla_hub compile`: the specs' kernels as libraries, with a table of what came out."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .cache import Cache, default_folder
from .cubin import CompilerError
from .inputs import inputs_digest
from .kernel_build import CompiledKernel, GateFailure
from .product import Product, compile_kernels, compile_product
from .tools import ToolsMissing, find_tools

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
) -> None:
    """Compile the TileLang kernels ahead of time: cubins, C++ launchers, one library per CPU, and a manifest."""
    console = Console()
    cache_folder = None if no_cache else cache or default_folder()
    try:
        from flashqla_hub.kernels.spec import SPECS

        if kernel:
            specs = [spec for spec in SPECS if spec.name in kernel]
            unknown = sorted(set(kernel) - {spec.name for spec in specs})
            if unknown:
                known = ", ".join(spec.name for spec in SPECS)
                raise typer.BadParameter(f"there is no kernel {', '.join(unknown)}; there are {known}.")
            kernels = compile_kernels(specs, find_tools(), Cache(cache_folder), _progress(console))
            console.print(_kernel_table(kernels))
            return
        product = compile_product(out, namespace or default_namespace(), SPECS, cache_folder, _progress(console))
    except (ToolsMissing, CompilerError, GateFailure) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    console.print(_kernel_table(product.kernels))
    _print_libraries(console, product)


def _progress(console: Console):
    def report(kernel: CompiledKernel) -> None:
        console.print(f"compiled {kernel.plan.name}", highlight=False)

    return report


def _kernel_table(kernels) -> Table:
    table = Table("kernel", *(f"{name}" for name in ("registers", "shared memory", "cubin", *SHOWN_OPCODES)))
    for kernel in kernels:
        shared = kernel.resources.static_shared_memory + kernel.plan.dynamic_shared_memory
        counts = (str(kernel.opcodes.get(opcode, 0)) for opcode in SHOWN_OPCODES)
        table.add_row(
            kernel.plan.name, str(kernel.resources.registers), f"{shared} B", f"{len(kernel.cubin)} B", *counts
        )
    return table


def _print_libraries(console: Console, product: Product) -> None:
    for path in (*product.libraries.values(), product.manifest):
        console.print(f"{path}  {path.stat().st_size} B", highlight=False, soft_wrap=True)
