"""Measures tables of cases, prints them in Markdown, and writes them as JSON after each table.

Also what several benchmarks share: texts that a compiled program writes, peers' set-up.
"""

import datetime
import importlib.metadata
import os
import platform
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.timing import (
    Case,
    MakeCase,
    Timing,
    TimingConfig,
    Timings,
    measure_cases,
)
from experiments.harness.results.tables import Table, markdown
from jaxformer import optional_dependencies
from jaxformer.config import to_plain
from jaxformer.records import write_json
from jaxformer.runtime import concurrency, concurrently, cpu_count

_PACKAGES = (
    *("jax", "jaxlib", "flax", "torch", "transformers", "ctranslate2"),
    *("jax-cuda13-plugin", "nvidia-cudnn-cu13"),
)

COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[Timing, dict[str, Any]], str]]] = {
    "median, ms": ((), lambda time, _: f"{time.median * 1e3:.1f}"),
    "least, ms": ((), lambda time, _: f"{time.least * 1e3:.1f}"),
    "spread": ((), lambda time, _: f"{time.spread:.0%}"),
    "of the best peer": ((), lambda time, _: "-" if time.ratio is None else f"{time.ratio:.2f}"),
    "tokens a second": (("tokens",), lambda time, case: f"{case['tokens'] / time.median:,.0f}"),
    "TFLOP/s": (("flops",), lambda time, case: f"{case['flops'] / time.median / 1e12:,.1f}"),
    "of the peak": (
        ("flops", "peak_flops"),
        lambda time, case: f"{case['flops'] / time.median / case['peak_flops']:.1%}",
    ),
    "temporary, MB": (
        ("temporary_bytes",),
        lambda _, case: f"{case['temporary_bytes'] / 1e6:,.1f}",
    ),
}
"""The metadata that a column needs, and its cell; a column without any cell is left out."""


def run_tables(
    options: TimingConfig,
    tables: Mapping[str, Mapping[str, MakeCase]],
    peers: Sequence[str] = (),
) -> dict[str, Timings]:
    """Measures each of `tables` (title -> cases), prints it, and writes all so far to a file.

    The file is RUNS/benchmarks/NAME.json, with the options and the environment before the first
    measurement. Ratios are to the fastest of `peers`.
    """
    if not options.interleaved:  # JAX takes 0.75 of a GPU's memory by default
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    content = {"environment": environment(), "options": to_plain(options)}
    path = Path(options.runs) / "benchmarks" / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    print("; ".join(f"{name} {x}" for name, x in content["environment"].items() if x is not None))
    results: dict[str, Timings] = {}
    for title, cases in tables.items():
        results[title] = measure_cases(cases, options, peers=peers)
        print(f"\n{title}\n\n{table(results[title])}", flush=True)
        rows = {
            title: {
                "measured": {name: timing._asdict() for name, timing in timings.measured.items()},
                "missing": timings.missing,
            }
            for title, timings in results.items()
        }
        write_json(path, content | {"tables": rows})
    print(f"\nall numbers: {path}")
    return results


def table(timings: Timings) -> str:
    """A row for each case, its metadata, and a line for each that was not measured."""
    columns = {}
    for title, (needed, cell) in COLUMNS.items():
        cells = [
            cell(timing, timing.metadata) if all(map(timing.metadata.get, needed)) else "-"
            for timing in timings.measured.values()
        ]
        if set(cells) - {"-"}:
            columns[title] = cells
    rows = list(zip(timings.measured, *columns.values(), strict=True))
    lines = [markdown(Table(("", *columns), rows))]
    for name, timing in timings.measured.items():
        facts = ", ".join(f"{key} {value}" for key, value in timing.metadata.items())
        lines += [f"{name}: {facts}"] if facts else []
    lines += [f"not measured: {name}: {why}" for name, why in timings.missing.items()]
    return "\n".join(lines)


def environment() -> dict[str, str | int | float | None]:
    """Date (UTC), processor, cores of this process, load of the last minute, versions.

    A package that is not installed has None. No device is started: each case reports its device.
    """
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text("utf-8")) if info.exists() else []
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **versions,
    }


def text_case(write: Callable[[], np.ndarray], **metadata: Any) -> Case:
    """`write()` gives tokens [B, T]; the first four of three texts and a checksum are reported."""
    text = write()
    checksum = f"{zlib.crc32(text.astype(np.int32).tobytes()):08x}"
    reported = {"tokens": text.size, "first_tokens": text[:3, :4].tolist(), "checksum": checksum}
    return Case(write, metadata | reported)


def compiled_texts(
    write: Callable[..., jax.Array], params: Any, *rows: np.ndarray, **metadata: Any
) -> Case:
    """`write(params, *rows)`, compiled, which gives the tokens [B, T] of texts with `rows` [B, ..].

    Compiler options are the default ones. The rows are split into as many parts as a pipeline
    computes at the same time.
    """
    compiled, count = jax.jit(write), concurrency(params)
    split = [np.array_split(each, min(count, len(each))) for each in rows]
    runs = [
        lambda part=part: np.asarray(compiled(params, *part)) for part in zip(*split, strict=True)
    ]
    return text_case(
        lambda: np.concatenate(list(concurrently(runs, count))),
        device=jax.devices()[0].device_kind,
        **metadata,
    )


def load_torch(threads: int | None = None) -> ModuleType:
    """PyTorch, set to `threads`; None: as many as this process has processors."""
    torch = optional_dependencies.load("torch")
    torch.set_num_threads(threads or cpu_count())
    return torch


def torch_metadata(model: Any) -> dict[str, Any]:
    """The number of parameters of `model` and of PyTorch's threads."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "threads": optional_dependencies.load("torch").get_num_threads()}


def random_params(model: Any, *inputs: np.ndarray) -> Any:
    """Parameters of `model`: normal numbers with standard deviation d_model^-0.5.

    They are larger than at the start of training, so that each layer changes the next token.
    Biases are 0, and scales 1.
    """
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]
    rng = np.random.default_rng(0)
    std = np.float32(model.config.d_model**-0.5)

    def random_leaf(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(leaf.shape) == 1:
            return np.full(leaf.shape, float(path[-1].key == "scale"), np.float32)
        return rng.standard_normal(leaf.shape, np.float32) * std

    return jax.tree_util.tree_map_with_path(random_leaf, shapes)
