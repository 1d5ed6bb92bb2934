"""The file of results of the grid, and the table that a page shows."""

import json
import math
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from tests.compilers.grid.cells import MACHINES, Cell, table
from tests.compilers.grid.needs import needs

MOST = 1.15
"""The most that a program may take over what it needs."""
_SMALL = 20_000


class Known(NamedTuple):
    """A share of a program above `MOST` on TPUs or GPUs: its name, its bound and the reason."""

    program: str
    name: str
    most: float
    reason: str
    machines: tuple[str, ...] = ("v5e", "v6e", "v5p")


_GPU = ("h100",)
KNOWN = (
    Known(
        "decode 1",
        "live",
        1.65,
        "a cache of 0.3 MB a layer fits on the chip: XLA copies it there whole, and back to "
        "another place; its sorts keep 0.1 to 0.2 MB, its collectives nothing. Beside the "
        "weights of a model of a real size both are small",
    ),
    Known(
        "train",
        "live",
        1.6,
        "along tensor XLA moves products of weights' gradients behind the backward pass of the "
        "whole decoder, to have work beside the collectives: 11 gathered inputs and gradients "
        "of 4 MB live together at its end. Without its latency-hiding scheduler, as a trial, "
        "the program keeps 0.91 of its need. A GPU of 80 GB has no reason to compute them "
        "earlier",
        _GPU,
    ),
)

FILE = Path(__file__).parent / "results.jsonl"


class Result(NamedTuple):
    """The counts of a cell by name, or the `error` of one that does not compile."""

    cell: Cell
    counts: Mapping[str, Any]
    error: str
    seconds: float


def append(result: Result) -> None:
    """Adds a line to the file, with the last commit of the package and the date of today."""
    last = ["git", "log", "-1", "--format=%h", "--", "jaxformer"]
    commit = subprocess.run(last, capture_output=True, text=True, check=False).stdout.strip()
    known = {"commit": commit, "date": date.today().isoformat()}
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result._asdict() | known) + "\n")


def read() -> dict[Cell, Result]:
    """The results of the file; of several of a cell the last."""
    if not FILE.exists():
        return {}
    lines = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    results = (Result(Cell(*x["cell"]), x["counts"], x["error"], x["seconds"]) for x in lines)
    return {result.cell: result for result in results}


def shares(result: Result) -> dict[str, float]:
    """What the program does over what it needs, by the names of `Needs`.

    `_SMALL` bytes or FLOPs more than the need, such as sums of numbers over devices, are nothing.
    """
    needed = needs(result.cell)._asdict()
    return {name: _share(result.counts[name], need) for name, need in needed.items()}


def _share(has: float, need: float) -> float:
    if has - need <= _SMALL:
        return min(has / need, 1.0) if need else 0.0
    return has / need if need else math.inf


def above_need(result: Result) -> dict[str, float]:
    """The shares above `MOST`, but for those that `KNOWN` explains."""
    cell = result.cell
    allowed = {
        known.name: known.most
        for known in KNOWN
        if known.program == cell.program and cell.machine in known.machines
    }
    found = shares(result)
    return {name: share for name, share in found.items() if share > allowed.get(name, MOST)}


def line(result: Result) -> str:
    """A cell and its shares in one line."""
    if result.error:
        return f"{result.cell}: {result.error}"
    words = (f"{name} {share:.2f}" for name, share in shares(result).items())
    return f"{result.cell}: {', '.join(words)} ({result.seconds:.0f} s)"


def report() -> str:
    """What a page shows of all results, in Markdown."""
    known = read()
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in table():
        row = rows.setdefault((cell.family, cell.program, cell.mesh, cell.gather_at), {})
        row[cell.machine] = _word(known[cell]) if cell in known else ""
    lines = [
        f"| family | program | mesh | gathered at | {' | '.join(MACHINES)} |",
        f"| --- | --- | --- | --- | {' | '.join(['---:'] * len(MACHINES))} |",
    ]
    for names, row in rows.items():
        if any(row.values()):
            lines.append(f"| {' | '.join([*names, *(row[name] for name in MACHINES)])} |")
    reasons = [
        f"- {x.name} of {x.program} on {', '.join(x.machines)}, up to {x.most}: {x.reason}"
        for x in KNOWN
    ]
    return "\n".join([_summary(known), "", *lines, "", *reasons])


def _summary(known: Mapping[Cell, Result]) -> str:
    compiled = [result for result in known.values() if not result.error]
    failed = [result for result in known.values() if result.error]
    above = [result for result in compiled if above_need(result)]
    lines = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    commits = sorted({f"{line['commit']} ({line['date']})" for line in lines})
    return (
        f"{len(known)} of {len(table())} cells are compiled, with {', '.join(commits)}; "
        f"{len(failed)} do not compile, and {len(above)} take more than {MOST} of their need "
        "without a reason below."
    )


def _word(result: Result) -> str:
    if result.error:
        return "error"
    share, name = max((share, name) for name, share in shares(result).items())
    return f"{share:.2f} {name}"
