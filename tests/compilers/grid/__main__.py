"""Compiles the cells of the grid one after the other, and goes on where it was interrupted.

    python -m tests.compilers.grid --machines v5e,v6e,v5p
    python -m tests.compilers.grid --machines h100
    python -m tests.compilers.grid --report

The first needs Python 3.12 with the extra `compilers`, the second the extra `cuda13`. A cell that
the file of results has is not compiled again. The cells of the cover come first, then all others
in an order without a pattern.
"""

import argparse
import random
import time
from pathlib import Path

from tests.compilers.grid import compiling, results
from tests.compilers.grid.cells import MACHINES, cover, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machines", default=",".join(MACHINES), help="of these machines")
    parser.add_argument("--only_cover", action="store_true", help="only the cells of the cover")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell later")
    parser.add_argument("--programs", type=Path, help="a folder for the programs' texts")
    parser.add_argument("--report", action="store_true", help="print the table, compile nothing")
    options = parser.parse_args()
    if options.report:
        print(results.report())
        return
    machines = options.machines.split(",")
    cells = table()
    first = cover(cells)
    others = [] if options.only_cover else sorted({*cells} - {*first})
    random.Random(0).shuffle(others)
    known = results.read()
    cells = [c for c in [*first, *others] if c.machine in machines and c not in known]
    started = time.monotonic()
    for number, cell in enumerate(cells, 1):
        if time.monotonic() - started > options.seconds:
            break
        result = compiling.compile_cell(cell, options.programs)
        results.append(result)
        print(f"{number} of {len(cells)}: {results.line(result)}", flush=True)


if __name__ == "__main__":
    main()
