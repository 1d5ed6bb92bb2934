"""The cells of the grid, and few of them that hold each pair of values."""

import random
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import NamedTuple

FAMILIES = ("gpt", "llama", "translator", "bert")
PROGRAMS = ("train", "validate", "decode 1", "decode 32", "beam")
MESHES = {
    "1": "data=1",
    "fsdp": "fsdp=4",
    "tensor": "tensor=4",
    "sequence": "sequence=4",
    "data x fsdp": "data=2,fsdp=4",
    "fsdp x tensor": "fsdp=2,tensor=4",
    "fsdp x sequence": "fsdp=2,sequence=4",
    "data x fsdp x tensor": "data=2,fsdp=2,tensor=2",
}
"""The axes of each mesh, as `make_mesh` reads them."""
MACHINES = ("v5e", "v6e", "v5p", "h100")
GATHER_AT = ("step", "use")

_LOSSES = ("train", "validate")
_GATHERED = ("fsdp", "sequence")
"""Mesh axes along which a loss gathers parameters."""


class Cell(NamedTuple):
    """One program of the grid; `gather_at` is that of `Strategy.step`."""

    family: str
    program: str
    mesh: str
    machine: str
    gather_at: str = "step"

    @property
    def pairs(self) -> set[tuple[str, ...]]:
        """The pairs of values of family, program, mesh and machine that it holds."""
        return {*combinations(self[:4], 2)}

    def __str__(self) -> str:
        return ", ".join(self)


def table() -> list[Cell]:
    """Every cell that exists.

    An encoder does not decode, and `gather_at` matters only to a loss on a mesh that divides
    parameters along axes along which the loss gathers them.
    """
    every = (Cell(*values) for values in product(FAMILIES, PROGRAMS, MESHES, MACHINES, GATHER_AT))
    return [cell for cell in every if _exists(cell)]


def _exists(cell: Cell) -> bool:
    has_loss = cell.program in _LOSSES
    gathers = has_loss and any(axis in cell.mesh for axis in _GATHERED)
    return (has_loss or cell.family != "bert") and (gathers or cell.gather_at == "step")


def cover(cells: Iterable[Cell], tries: int = 30) -> list[Cell]:
    """Few of `cells` that together hold each pair of values that `cells` hold.

    Each of several tries takes, until no pair is missing, the cell that holds most missing ones;
    among equal ones the one with the values that it has taken least often, the time of gathering
    included, then the first in its order of the cells. The shortest try wins.
    """
    cells = list(cells)
    orders = (random.Random(number).sample(cells, len(cells)) for number in range(tries))
    return min(map(_cover_in_order, orders), key=len)


def _cover_in_order(cells: list[Cell]) -> list[Cell]:
    missing = set().union(*(cell.pairs for cell in cells))
    times: Counter[str] = Counter()
    taken: list[Cell] = []

    def worth(cell: Cell) -> tuple[int, int]:
        return len(cell.pairs & missing), -sum(times[value] for value in cell)

    while missing:
        best = max(cells, key=worth)
        taken.append(best)
        missing -= best.pairs
        times.update(best)
    return taken
