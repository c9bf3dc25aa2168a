"""The table and the plot of benchmark records, losing rows included."""

from collections.abc import Iterable
from math import exp, log
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .peers import IMPLEMENTATIONS
from .record import read
from .rows import OPS

OURS = "flashqla"
LABELS = {
    OURS: "this kernel",
    "flash-qla": "FlashQLA",
    "flash-qla-uncached": "FlashQLA, cache not kept",
    "flashinfer": "FlashInfer",
    "fla": "FLA",
}
# Not at their best, so none is the best peer; each has a comparison of its own.
VARIANTS = tuple(implementation.name for implementation in IMPLEMENTATIONS if implementation.variant_of)
# Of single parts of a layer.
PART_LABELS = {OURS: "this kernel", "fla": "FLA", "fla-gluon": "FLA, Gluon", "causal-conv1d": "causal-conv1d"}
# Of whole layers in transformers: as it comes with FLA installed, and with FLA's convolution, norm and gates put in.
LAYER_LABELS = {
    OURS: "this kernel",
    "transformers": "transformers, FLA",
    "transformers+flashqla": "transformers, FLA and FlashQLA",
    "fla": "all FLA",
    "fla+flashqla": "all FLA, with FlashQLA",
}

# Colours of the implementations, in the order of LABELS: told apart by people with any colour vision (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#E69F00", "#CC79A7", "#009E73", "#999999")


# Columns of the table and the times that they compare.
SPEEDUPS = {"captured": "ms", "sustained": "sustained_ms", "eager": "eager_ms"}


def report_command(
    records: Annotated[list[Path], typer.Argument(help="Record files of one run.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the speedups into this file, .svg or .png.")] = None,
) -> None:
    """Print the Markdown table of benchmark records, and draw the speedup over the best peer of each row."""
    console = Console()
    try:
        found = read(records)
    except ValueError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from None
    parts, layers, found = split(found)
    for table in (table(some) for table, some in ((parts_table, parts), (layer_table, layers)) if some):
        console.print("\n".join(table) + "\n", soft_wrap=True, markup=False)
    for op, gates in dict.fromkeys((record["op"], record["gates"]) for record in found):
        chosen = [record for record in found if (record["op"], record["gates"]) == (op, gates)]
        console.print(f"{op}, gates {gates}:\n")
        console.print("\n".join(markdown_table(chosen)) + "\n", soft_wrap=True, markup=False)
    if found:
        console.print("\n".join(summary_table(found)) + "\n", soft_wrap=True, markup=False)
    if plot is None:
        return
    try:
        draw(found, plot)
    except ModuleNotFoundError:
        console.print(
            "No plot, since matplotlib is missing: pip install 'flashqla_hub[bench]' brings it.", markup=False
        )
        raise typer.Exit(1) from None
    console.print(f"Drawn to {plot}")


def split(records: list[dict]) -> tuple[list[dict], list[dict], list[dict]]:
    """Records of parts of a layer, those of whole layers and models, and those of the gated delta rule by rows."""
    parts, layers, rows = [], [], []
    for record in records:
        of = rows if "layer" not in record else layers if record["op"].startswith(("layer", "model")) else parts
        of.append(record)
    return parts, layers, rows


def by_row(records: Iterable[dict]) -> dict[tuple, dict[str, dict]]:
    """(hk, hv, seqs, gates) -> implementation -> record of one operation, in the order of the records."""
    rows: dict[tuple, dict[str, dict]] = {}
    for record in records:
        key = (record["hk"], record["hv"], record["seqs"], record["gates"])
        rows.setdefault(key, {})[record["impl"]] = record
    return rows


def speedup(row: dict[str, dict], column: str = "ms") -> float | None:
    """The best peer's time over ours, variants left out; None where either is missing."""
    peers = [record[column] for name, record in row.items() if name not in (OURS, *VARIANTS) and column in record]
    ours = row.get(OURS, {}).get(column)
    return min(peers) / ours if peers and ours else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there."""
    logs = [log(value) for value in values if value is not None]
    return exp(sum(logs) / len(logs)) if logs else None


def cells(records: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: times of each implementation, who wins by how much, and how far the bound is."""
    names = [name for name in LABELS if any(record["impl"] == name for record in records)]
    variants = [name for name in names if name in VARIANTS]
    columns = {name: column for name, column in SPEEDUPS.items() if any(column in record for record in records)}
    op = records[0]["op"] if records else "forward"
    memory = (
        ["scratch MB"] if op == "forward" else ["peak MB", *(f"of {LABELS[name]}" for name in names if name != OURS)]
    )
    header = [
        "(H, HV) sequences",
        *(LABELS[name] for name in names),
        *columns,
        *(f"captured, {LABELS[name]}" for name in variants),
        "host µs",
        "of the bound",
        *memory,
    ]
    body = []
    for (hk, hv, seqs, _), row in by_row(records).items():
        ours = row.get(OURS, {})
        body.append(
            [
                f"({hk}, {hv}) {seqs}",
                *(_time(row.get(name, {})) for name in names),
                *(_factor(speedup(row, column)) for column in columns.values()),
                *(_factor(_relative(row, name)) for name in variants),
                f"{ours['host_us']:.0f}" if "host_us" in ours else "-",
                f"{ours['bound_ms'] / ours['ms']:.0%}" if "ms" in ours and "bound_ms" in ours else "-",
                *(_scratch(ours) if op == "forward" else [_peak(row.get(name, {})) for name in names]),
            ]
        )
    rows = by_row(records).values()
    means = [_factor(geometric_mean(speedup(row, column) for row in rows)) for column in columns.values()]
    means += [_factor(geometric_mean(_relative(row, name) for row in rows)) for name in variants]
    if body:
        body.append(["geometric mean", *("" for _ in names), *means, "", "", *("" for _ in memory)])
    return header, body


def markdown_table(records: list[dict]) -> list[str]:
    """Lines of a Markdown table: milliseconds in a CUDA graph, the best peer's time over ours for each way to time it, and each
    variant's apart from them.

    "scratch MB" is the memory beyond inputs and outputs, and theirs; "peak MB" what a call allocates at its peak.
    """
    header, body = cells(records)
    return [_line(header), _line(["---"] * len(header)), *(_line(row) for row in body)]


def summary_table(records: list[dict]) -> list[str]:
    """Lines of a Markdown table of each operation and gates: each peer's time over ours in the geometric mean of the rows that
    both have, the best peer's for each way to time it, and the rows that the best peer wins in a CUDA graph."""
    names = [name for name in LABELS if name != OURS and any(record["impl"] == name for record in records)]
    columns = {name: column for name, column in SPEEDUPS.items() if any(column in record for record in records)}
    header = [
        "operation, gates",
        *(LABELS[name] for name in names),
        *(f"best, {name}" for name in columns),
        "rows lost",
    ]
    body = []
    for op, gates in dict.fromkeys((record["op"], record["gates"]) for record in records):
        rows = by_row(record for record in records if (record["op"], record["gates"]) == (op, gates))
        lost = [f"({hk}, {hv}) {seqs}" for (hk, hv, seqs, _), row in rows.items() if (speedup(row) or 1) < 1]
        body.append(
            [
                f"{OPS[op]}, {gates}",
                *(_mean_with_count([_relative(row, name) for row in rows.values()]) for name in names),
                *(
                    _factor(geometric_mean(speedup(row, column) for row in rows.values()))
                    for column in columns.values()
                ),
                f"{len(lost)} of {len(rows)}" + (f": {', '.join(lost)}" if lost else ""),
            ]
        )
    return [_line(header), _line(["---"] * len(header)), *(_line(row) for row in body)]


def parts_table(records: list[dict]) -> list[str]:
    """Lines of a Markdown table of a layer's parts: microseconds, the best peer's time over ours, and the bytes we move."""
    rows: dict[tuple, dict[str, dict]] = {}
    for record in records:
        rows.setdefault((record["op"], record.get("seqs", ""), record["layer"]), {})[record["impl"]] = record
    names = [name for name in PART_LABELS if any(name in row for row in rows.values())]
    header = ["operation", "shape", *(f"{PART_LABELS[name]} µs" for name in names), "best peer / ours", "TB/s"]
    body = []
    for (op, seqs, layer), row in rows.items():
        ours = row.get(OURS, {})
        times = [f"{1e3 * row[name]['ms']:.2f}" if "ms" in row.get(name, {}) else "-" for name in names]
        rate = f"{ours['io_mb'] / ours['ms'] / 1e3:.2f}" if "ms" in ours else "-"
        body.append([op, f"{seqs} {layer}".strip(), *times, _factor(speedup(row)), rate])
    return [_line(header), _line(["---"] * len(header)), *(_line(row) for row in body)]


def layer_table(records: list[dict]) -> list[str]:
    """Lines of a Markdown table of whole layers and models: their time, that of all but matrix products, and both over ours."""
    ours = {(record["op"], record["layer"]): record for record in records if record["impl"] == OURS}
    header = ["layer, tokens", "step", "served by", "ms", "rest ms", "launches", "peak MB", "ms / ours", "rest / ours"]
    body = []
    for record in sorted(records, key=lambda record: (record["op"], record["layer"])):
        own = {} if record["impl"] == OURS else ours.get((record["op"], record["layer"]), {})
        factors = (
            record[name] / own[name] if {name} <= record.keys() & own.keys() else None for name in ("ms", "rest_ms")
        )
        body.append(
            [
                f"{record['layer']} {record.get('seqs', '')}",
                record["op"].partition("-")[2],
                LAYER_LABELS[record["impl"]],
                *(f"{record[name]:.3f}" if name in record else "-" for name in ("ms", "rest_ms")),
                str(record.get("launches", "-")),
                f"{record['peak_mb']:,.0f}" if "peak_mb" in record else "-",
                *map(_factor, factors),
            ]
        )
    return [_line(header), _line(["---"] * len(header)), *(_line(row) for row in body)]


def rich_table(records: list[dict]) -> Table:
    """The same for a terminal, with the gates of each row."""
    gates = [key[3] for key in by_row(records)]
    header, body = cells(records)
    table = Table(header[0], "gates", *header[1:])
    for mix, row in zip([*gates, ""], body, strict=False):
        table.add_row(row[0], mix, *row[1:])
    return table


def draw(records: list[dict], path: Path) -> None:
    """Bars of each implementation's time, as a multiple of ours, for each row of the first operation and gates.

    Needs matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "flashqla"  # ids of the elements, the same in every run
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    op, gates = records[0]["op"], records[0]["gates"]
    rows = by_row(record for record in records if (record["op"], record["gates"]) == (op, gates))
    names = [name for name in LABELS if any(name in row for row in rows.values())]
    height = 0.8 / len(names)
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.22 * len(names) * len(rows)))
    for i, name in enumerate(names):
        relative = [_relative(row, name) for row in rows.values()]
        places = [place + i * height for place in range(len(rows))]
        colour = COLOURS[list(LABELS).index(name)]
        axes.barh(places, [value or 0 for value in relative], height, label=LABELS[name], color=colour)
        for place, value in zip(places, relative, strict=True):
            axes.text(value or 0, place, f" {value:.2f}" if value else " -", va="center", fontsize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))])
    axes.set_yticklabels([f"({hk}, {hv}) {seqs}" for hk, hv, seqs, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"time over that of this kernel, {op}, CUDA graph, gates {gates}; {records[0]['device']}")
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _relative(row: dict[str, dict], name: str) -> float | None:
    ours, theirs = row.get(OURS, {}).get("ms"), row.get(name, {}).get("ms")
    return theirs / ours if ours and theirs else None


def _time(record: dict) -> str:
    if "ms" not in record:
        return "-"
    return f"{record['ms']:.4f}" + (" (void)" if record.get("void") else "")


def _mean_with_count(values: list[float | None]) -> str:
    """Their mean, and of how many where some are missing."""
    there = [value for value in values if value is not None]
    return _factor(geometric_mean(there)) + (
        f" ({len(there)} of {len(values)})" if 0 < len(there) < len(values) else ""
    )


def _scratch(record: dict) -> list[str]:
    return [f"{record['extra_mb']:.0f} of {record['io_mb']:.0f}" if "extra_mb" in record else "-"]


def _peak(record: dict) -> str:
    return f"{record['peak_mb']:,.0f}" if "peak_mb" in record else "-"


def _factor(value: float | None) -> str:
    """2.00x; a loss stands out."""
    if value is None:
        return "-"
    return f"{value:.2f}x" if value >= 1 else f"**{value:.2f}x**"


def _line(cells_of_row: list[str]) -> str:
    return "| " + " | ".join(cells_of_row) + " |"
