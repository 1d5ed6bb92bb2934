"""Compiles a cell for a machine that is not here."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from experiments.harness.planning import devices, parse_target
from jaxformer.runtime import GPU_OPTIONS
from tests.compilers.grid.cells import MESHES, Cell
from tests.compilers.grid.counts import count
from tests.compilers.grid.programs import lower
from tests.compilers.grid.results import Result

_TOPOLOGIES = {
    "v5e": {1: "1x1", 4: "2x2", 8: "2x4"},
    "v6e": {1: "1x1", 4: "2x2", 8: "2x4"},
    "v5p": {1: "2x2x1", 4: "2x2x1", 8: "2x2x2"},
}

# Without a device the compiler cannot time products. In a loss cuBLAS computes them, which adds
# biases as it does there. In a search it would pad the few rows of a product, and copy them.
_CUBLAS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}


def compile_cell(cell: Cell, folder: Path | None = None) -> Result:
    """What the program of `cell` does; or the error, where it does not compile.

    The program's text is written into `folder`.
    """
    started = time.monotonic()
    try:
        with jax.default_matmul_precision("default"):
            lowered = lower(cell, devices_of(cell))
            compiled = lowered.lowered.compile(compiler_options=_options(cell))
        if folder:
            name = f"{cell}.hlo".replace(", ", "_").replace(" ", "-")
            (folder / name).write_text(compiled.as_text() or "", encoding="utf-8")
        counts = count(compiled, is_search=not _is_loss(cell))
    except Exception as error:  # the table has it, and the other cells are compiled
        message = f"{type(error).__name__}: {error}"[:500]
        return Result(cell, {}, message, time.monotonic() - started)
    return Result(cell, asdict(counts), "", time.monotonic() - started)


def _is_loss(cell: Cell) -> bool:
    return cell.program in ("train", "validate")


def _options(cell: Cell) -> dict[str, Any] | None:
    """The compiler's options for the cell's machine; None: its own."""
    if cell.machine in _TOPOLOGIES:
        return None
    return _CUBLAS | GPU_OPTIONS if _is_loss(cell) else GPU_OPTIONS


def devices_of(cell: Cell) -> list[jax.Device]:
    """As many devices of the cell's machine as its mesh has."""
    sizes = [int(axis.partition("=")[2]) for axis in MESHES[cell.mesh].split(",")]
    number = 1
    for size in sizes:
        number *= size
    topology = _TOPOLOGIES.get(cell.machine)
    name = f"{cell.machine}:{topology[number]}" if topology else cell.machine
    target = parse_target(name)
    return list(devices(target, target.count or number))[:number]
