"""Measures tables of cases, prints them in Markdown, and writes them as JSON after each table."""

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.benchmarks.interleaved_timing import Summary, TimingConfig
from experiments.benchmarks.subprocesses import Comparison, MakeCase, compare
from experiments.harness.runs import run_folder
from jaxformer import optional_dependencies
from jaxformer.runtime.concurrency import cpu_count

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "torch",
    "transformers",
    "ctranslate2",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu13",
)

Column = Callable[[Summary, Mapping[str, Any]], str]
"""column(summary, metadata) -> the text of a cell."""


def rate(key: str, unit: float = 1.0, digits: int = 0) -> Column:
    """Returns the column of the case's metadata `key` divided by the median time and `unit`."""

    def column(summary: Summary, metadata: Mapping[str, Any]) -> str:
        if metadata.get(key) is None:
            return "-"
        return f"{metadata[key] / summary.median / unit:,.{digits}f}"

    return column


def value(key: str, unit: float = 1.0, digits: int = 1) -> Column:
    """Returns the column of the case's metadata `key` divided by `unit`."""

    def column(summary: Summary, metadata: Mapping[str, Any]) -> str:
        number = metadata.get(key)
        if number is None:
            return "-"
        return f"{number:,}" if unit == 1.0 else f"{number / unit:,.{digits}f}"

    return column


def peak_share(summary: Summary, metadata: Mapping[str, Any]) -> str:
    """Returns the FLOP/s of the case divided by the peak FLOP/s of its device (MFU)."""
    flops, peak = metadata.get("flops"), metadata.get("peak_flops")
    return "-" if not flops or not peak else f"{flops / summary.median / peak:.1%}"


TIMES: dict[str, Column] = {
    "median, ms": lambda summary, metadata: f"{summary.median * 1e3:.1f}",
    "least, ms": lambda summary, metadata: f"{summary.least * 1e3:.1f}",
    "spread": lambda summary, metadata: f"{summary.spread:.0%}",
}
PEERS: dict[str, Column] = {
    "processors, ms": lambda summary, metadata: f"{summary.cpu * 1e3:.1f}",
    "of the best peer": lambda summary, metadata: (
        "-" if summary.ratio is None else f"{summary.ratio:.2f}"
    ),
}
TOKENS: dict[str, Column] = {"tokens a second": rate("tokens")}
MEMORY: dict[str, Column] = {"temporary, MB": value("temporary_bytes", 1e6)}
FLOPS: dict[str, Column] = {"TFLOP/s": rate("flops", 1e12, 1), "of the peak": peak_share}


def run_tables(
    options: TimingConfig,
    tables: Mapping[str, Mapping[str, MakeCase]],
    columns: Mapping[str, Column],
    peers: Sequence[str] = (),
) -> dict[str, Comparison]:
    """Measures each of `tables` (title -> cases), prints it, and writes all so far to a file.

    The file is RUNS/benchmarks/NAME.json, with the options and the environment before the first
    measurement. Ratios are to the fastest of `peers`.
    """
    where = environment()
    comparisons: dict[str, Comparison] = {}
    path = Path(options.runs) / "benchmarks" / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    print("; ".join(f"{name} {value}" for name, value in where.items() if value is not None))
    for title, cases in tables.items():
        comparisons[title] = compare(cases, options, peers=peers)
        print(f"\n{title}\n\n{table(comparisons[title], columns)}", flush=True)
        content = {
            "environment": where,
            "options": run_folder.as_json(options),
            "comparisons": {title: _plain(one) for title, one in comparisons.items()},
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\nall numbers: {path}")
    return comparisons


def table(comparison: Comparison, columns: Mapping[str, Column]) -> str:
    """Returns a row for each case, its metadata, and a line for each that was not measured."""
    rows = [
        [name, *(column(summary, comparison.metadata[name]) for column in columns.values())]
        for name, summary in comparison.measured.items()
    ]
    rule = ["---", *("---:" for _ in columns)]
    lines = [f"| {' | '.join(cells)} |" for cells in (["", *columns], rule, *rows)]
    lines += [
        f"{name}: {', '.join(f'{key} {value}' for key, value in metadata.items())}"
        for name, metadata in comparison.metadata.items()
        if metadata
    ]
    return "\n".join(
        [*lines, *(f"not measured: {name}: {why}" for name, why in comparison.missing.items())]
    )


def _plain(comparison: Comparison) -> dict[str, Any]:
    measured = {name: summary._asdict() for name, summary in comparison.measured.items()}
    return comparison._asdict() | {"measured": measured}


def environment() -> dict[str, str | int | float | None]:
    """Returns date (UTC), processor, cores of this process, load of the last minute, versions.

    A package that is not installed has None. No device is started: each case reports its device.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the name of the processor, or of its architecture where `info` has none."""
    with suppress(OSError):
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_torch(threads: int | None = None) -> ModuleType:
    """Returns PyTorch, set to `threads`; None: as many as this process has processors."""
    torch = optional_dependencies.load("torch")
    torch.set_num_threads(threads or cpu_count())
    return torch


def torch_metadata(model: Any) -> dict[str, Any]:
    """Returns the number of parameters of `model` and of PyTorch's threads."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "threads": optional_dependencies.load("torch").get_num_threads()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
