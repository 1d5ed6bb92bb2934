"""The runs of folders."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxformer import storage
from jaxformer.errors import ConfigError


def find_runs(folders: Iterable[str | Path]) -> Iterator[Path]:
    """The folders in or below `folders` that hold a run; numbers in names are in their order."""
    for folder in folders:
        paths = storage.to_path(folder).rglob("env.json")
        yield from sorted((path.parent for path in paths), key=_in_order)


def _in_order(folder: Path) -> str:
    return re.sub(r"(?<![.\d])\d+", lambda number: number[0].zfill(9), str(folder))


def expand(paths: Iterable[str | Path], *, finished: bool = False) -> list[Path]:
    """The runs that `paths` name: each a run's folder, or one with runs below it, as of a sweep.

    With `finished` those below a folder count only if they have been scored. Raises `ConfigError`
    for a path without a run, and for no path at all.
    """
    runs: dict[Path, None] = {}
    for path in map(storage.to_path, paths):
        below = [path] if (path / "config.json").is_file() else list(find_runs([path]))
        if finished and below != [path]:
            below = [run for run in below if (run / "scores.json").is_file()]
        if not below:
            raise ConfigError(
                f"{path} is not the folder of a run: it has no config.json, and there is no "
                f"{'finished ' if finished else ''}run below it"
            )
        runs.update(dict.fromkeys(below))
    if not runs:
        raise ConfigError("no runs were given: give their folders, RUN RUN, or a sweep's")
    return list(runs)
