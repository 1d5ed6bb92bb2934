"""All that is measured on one GPU, in one file: `python -m experiments.benchmarks.gpu`.

Matrix products, training of GPTs and Transformers, beam search and attention, each in a process of
its own and within its share of `--minutes`. What fails is told with its reason, and the rest goes
on. The file, RUNS/benchmarks/gpu.json, is written anew after each section.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from experiments import commands
from experiments.benchmarks.environment import environment
from experiments.benchmarks.gpu.plan import FULL, SMALL, sections
from experiments.benchmarks.gpu.sections import Entry, run_all
from jaxformer.config import ConfigError

_SHARE = "0.92"  # of the GPU's memory; JAX takes three quarters unless it is told


def parse(args: list[str] | None = None) -> argparse.Namespace:
    """`minutes`, `small`, `only`, `runs` and `name`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.gpu", description=__doc__
    )
    names = [section.name for section in sections(FULL)]
    parser.add_argument("--minutes", type=float, default=9.0, help="when all ends (9)")
    parser.add_argument("--small", action="store_true", help="small sizes, for a processor")
    parser.add_argument("--only", nargs="+", default=names, metavar="SECTION", help=f"of {names}")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where to write (runs)")
    parser.add_argument("--name", default="gpu", help="the file's name (gpu)")
    return parser.parse_args(args)


def main(options: argparse.Namespace) -> None:
    """Measures, prints a line a section and writes the file.

    Raises `ConfigError` for a section that is unknown, and for no time at all.
    """
    chosen = {section.name: section for section in sections(SMALL if options.small else FULL)}
    unknown = [name for name in options.only if name not in chosen]
    if unknown:
        raise ConfigError(f"there is no section {unknown[0]!r}: choose among {', '.join(chosen)}")
    if not options.minutes > 0:
        raise ConfigError(f"minutes={options.minutes} measures nothing: give more than 0")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _SHARE)
    where = environment()
    path = options.runs / "benchmarks" / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def save(found: Mapping[str, Entry]) -> None:
        entries = with_shares(found)
        told = {"environment": where, "small": options.small, "sections": entries}
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        name = next(reversed(entries))
        print(line(name, entries[name]), flush=True)

    run_all([chosen[name] for name in options.only], 60.0 * options.minutes, save)
    print(f"all numbers: {path}")


_RATE = "bfloat16_teraflops"
_TOLD = (_RATE, "tokens_per_second", "target_tokens_per_second", "teraflops", "share", "ms")


def with_shares(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """`found`, with what each training makes of the matrix rate as its "share" where both are."""
    rate = found.get("matrix_rate", {}).get(_RATE)

    def shared(entry: Entry) -> Entry:
        if rate is None or "teraflops" not in entry:
            return entry
        return entry | {"share": entry["teraflops"] / rate}

    return {name: shared(entry) for name, entry in found.items()}


def line(name: str, entry: Entry) -> str:
    """One section in a line: its chief numbers, those of each length, and why it failed."""
    facts = [f"{fact} {entry[fact]:,.4g}" for fact in _TOLD if fact in entry]
    for length, found in entry.items():
        if length.isdecimal():
            told = found.get("failed") or f"{found['ms']:.4g} ms"
            facts.append(f"T={length} {told}")
    facts += [f"FAILED: {entry['failed']}"] if "failed" in entry else []
    return f"{name} ({entry['attempt']}, {entry['seconds']} s): {', '.join(facts)}"


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(parse())))
