"""The cells of sweeps that failed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxformer import storage
from jaxformer.records import Record

SWEEP = "sweep.json"
"""The file in a sweep's folder that says what its cells are."""
FAILED = "failed"
"""The folder in a sweep's folder with a record of each cell that failed."""


class FailedCell(NamedTuple):
    """A cell of a sweep that failed."""

    sweep: Path
    name: str
    error: str
    label: str
    """The name; of several sweeps with its sweep before it."""

    def has_run(self, folder: Path) -> bool:
        """Whether the run in `folder` is this cell."""
        return folder.name == self.name and self.sweep in folder.parents


def failed_cells(paths: Iterable[str | Path]) -> list[FailedCell]:
    """The cells that failed of the sweeps in or below `paths`; a run's folder has none below it."""
    sweeps: dict[Path, None] = {}
    for path in map(storage.to_path, paths):
        if not (path / "config.json").is_file():
            sweeps |= dict.fromkeys(record.parent for record in path.rglob(SWEEP))
    return [
        FailedCell(sweep, name, error, name if len(sweeps) == 1 else f"{called}/{name}")
        for sweep, called in zip(sweeps, short_names([*sweeps]), strict=True)
        for name, error in failures_of(sweep).items()
    ]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many folders before it as tell the paths apart.

    >>> short_names([Path("runs/a/seed=0"), Path("runs/b/seed=0"), Path("runs/a/seed=1")])
    ['a/seed=0', 'b/seed=0', 'seed=1']
    """
    names = [path.name for path in paths]
    for length in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        uses = Counter(names)
        names = [
            name if uses[name] == 1 else "/".join(path.parts[-length:])
            for name, path in zip(names, paths, strict=True)
        ]
    return names


def failures_of(sweep: Path) -> dict[str, str]:
    """The errors of the cells that failed in the folder of a sweep, by their names.

    Such a cell may have no folder, where its settings were refused.
    """
    return {
        record.stem: Record(record).read_if_intact().get("error", "see its record")
        for record in sorted((sweep / FAILED).glob("*.json"))
    }
