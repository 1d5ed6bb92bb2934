"""Measures one GPU: `python -m experiments.benchmarks.gpu`.

Matrix products, training, beam search and attention, each in a process of its own. A section that
fails is reported with its reason. The file RUNS/benchmarks/NAME.json is written after each section.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.benchmarks.environment import environment
from experiments.benchmarks.gpu.sections import Entry, run_all
from experiments.benchmarks.gpu.sizes import FULL, SMALL, sections
from experiments.harness import cli
from jaxformer.errors import ConfigError

_MEMORY_SHARE = "0.92"  # of the GPU's memory; JAX takes 0.75 by default


@dataclass(frozen=True)
class GpuOptions:
    """Which sections are measured, and for how long."""

    name: str = "gpu"
    """Name of the result file, RUNS/benchmarks/NAME.json."""
    minutes: float = 9.0
    """Minutes after which all sections have ended."""
    small: bool = False
    """Runs the same programs in small sizes, for a test on a CPU."""
    only: tuple[str, ...] = ()
    """Names of the sections to run. Empty: all of them."""
    runs: str = "runs"
    """Folder of all runs."""

    def __post_init__(self):
        names = [section.name for section in sections(FULL)]
        unknown = [name for name in self.only if name not in names]
        if unknown:
            raise ConfigError(
                f"there is no section {unknown[0]!r}: choose among {', '.join(names)}"
            )
        if not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes} measures nothing: give more than 0")


def main(options: GpuOptions) -> None:
    """Measures, prints a line for each section and writes the file."""
    chosen = sections(SMALL if options.small else FULL)
    chosen = [section for section in chosen if section.name in (options.only or section.name)]
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEMORY_SHARE)
    where = environment()
    path = Path(options.runs) / "benchmarks" / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def save(found: Mapping[str, Entry]) -> None:
        entries = with_shares(found)
        told = {"environment": where, "small": options.small, "sections": entries}
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        name = next(reversed(entries))
        print(line(name, entries[name]), flush=True)

    run_all(chosen, 60.0 * options.minutes, save)
    print(f"all numbers: {path}")


_RATE = "bfloat16_teraflops"
_SHOWN = (_RATE, "tokens_per_second", "target_tokens_per_second", "teraflops", "share", "ms")


def with_shares(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns `found` with "share" for each training: its rate divided by the matrix rate."""
    rate = found.get("matrix_rate", {}).get(_RATE)

    def shared(entry: Entry) -> Entry:
        if rate is None or "teraflops" not in entry:
            return entry
        return entry | {"share": entry["teraflops"] / rate}

    return {name: shared(entry) for name, entry in found.items()}


def line(name: str, entry: Entry) -> str:
    """Returns one line for a section: its main numbers, each length, and why it failed."""
    facts = [f"{fact} {entry[fact]:,.4g}" for fact in _SHOWN if fact in entry]
    for length, found in entry.items():
        if length.isdecimal():
            told = found.get("failed") or f"{found['ms']:.4g} ms"
            facts.append(f"T={length} {told}")
    facts += [f"FAILED: {entry['failed']}"] if "failed" in entry else []
    return f"{name} ({entry['attempt']}, {entry['seconds']} s): {', '.join(facts)}"


if __name__ == "__main__":
    options = {"default": GpuOptions()}
    sys.exit(cli.run(lambda: main(cli.parse(options, description=__doc__))))
