"""Executes percent scripts into notebooks: `python -m experiments.examples.notebooks.execute`.

The script NAME.py is the source. NAME.ipynb beside it is written anew, with all output.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness import cli
from jaxformer import optional_dependencies
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError, DataError

FOLDER = Path(__file__).parent
_ROOT = FOLDER.parents[2]
_METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}


@dataclass(frozen=True)
class ExecuteOptions:
    """Which notebooks, and how long a cell may take."""

    notebooks: tuple[str, ...] = ()
    """Names of percent scripts in this folder, without ".py"; empty: all."""
    timeout: int = 120
    """Seconds that a cell may take."""
    output: str = ""
    """The folder that receives the notebooks; empty: the folder of the scripts."""

    def __post_init__(self):
        check_at_least(self, 1, "timeout")


def main(options: ExecuteOptions) -> None:
    """Executes the notebooks and writes them."""
    folder = Path(options.output) if options.output else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources(options.notebooks):
        write(execute(read(source), source.stem, options.timeout), folder / f"{source.stem}.ipynb")


def sources(names: Sequence[str] = ()) -> list[Path]:
    """The percent scripts of this folder, or those called `names`."""
    found = {
        path.stem: path
        for path in sorted(FOLDER.glob("*.py"))
        if path.read_text("utf-8").startswith("# %%")
    }
    for name in names:
        if name not in found:
            raise ConfigError(f"there is no notebook {name!r}: choose from {', '.join(found)}")
    return [found[name] for name in names or found]


def read(source: Path) -> Any:
    """The percent script `source` as a notebook without output.

    Cells are numbered, so that an unchanged script gives the same file.
    """
    notebook = optional_dependencies.load("jupytext").read(source)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id, cell.metadata = f"cell-{number}", {}
    return notebook


def execute(notebook: Any, name: str, timeout: int) -> Any:
    """`notebook` with the output of all cells; prints the time and the first line of each.

    Raises `DataError` for a cell that fails or takes more than `timeout` seconds.
    """
    nbclient = optional_dependencies.load("nbclient")
    started = {}

    def start(cell: Any, cell_index: int) -> None:
        started[cell_index] = time.perf_counter()
        first = cell.source.partition("\n")[0]
        print(f"{cell_index + 1:3}/{len(notebook.cells)}  {first[:58]:58}", end="", flush=True)

    def end(cell: Any, cell_index: int, execute_reply: Any) -> None:
        cli.say(f"{time.perf_counter() - started[cell_index]:6.1f} s")

    client = nbclient.NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(_ROOT)}},
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # no warning that the kernel listens on localhost
        on_cell_execute=start,
        on_cell_executed=end,
    )
    cli.say(f"{name}: {len(notebook.cells)} cells")
    try:
        return client.execute()
    except nbclient.exceptions.CellTimeoutError:
        reason = f"took more than {timeout} s: shorten it, or give --timeout"
    except nbclient.exceptions.CellExecutionError as error:
        reason = f"failed: {error.ename}: {error.evalue}"
    cli.say("")  # ends the line of the cell
    raise DataError(f"cell {max(started) + 1} of {name} {reason}")


def write(notebook: Any, path: Path) -> None:
    """Writes `notebook` to `path`, without the version of the Python that executed it."""
    notebook.metadata = _METADATA
    optional_dependencies.load("nbformat").write(notebook, path)
    cli.say(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    cli.start(main, {"default": ExecuteOptions()}, __doc__, positional="notebooks")
