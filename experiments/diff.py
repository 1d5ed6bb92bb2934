"""Settings in which two runs differ: `python -m experiments.diff RUN RUN`.

A RUN is the folder of a run, or a .json or .toml file. Prints a line for each setting.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.cli import config_files
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class DiffOptions:
    """The two runs."""

    runs: tuple[str, ...] = ()
    """The folders of two runs, or two files with settings."""

    def __post_init__(self):
        if self.runs and len(self.runs) != 2:
            raise ConfigError(f"{len(self.runs)} runs were given: give 2 to compare")


def main(options: DiffOptions) -> None:
    """Prints a line for each setting that differs."""
    if not options.runs:
        raise ConfigError("no runs were given: give the folders of two, RUN RUN")
    print("\n".join(differences(*options.runs)) or "the settings are equal")


def differences(first: str, second: str) -> list[str]:
    """A line `name: value of the first -> value of the second` for each setting that differs."""
    a, b = (config_files.flat(config_files.read_object(Path(path))) for path in (first, second))
    return [
        f"{name}: {a.get(name, 'absent')} -> {b.get(name, 'absent')}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


if __name__ == "__main__":
    cli.start(main, {"default": DiffOptions()}, __doc__, positional="runs")
