"""Repeats a reported number: `python -m experiments.repeat EXPERIMENT TABLE SYSTEM METRIC`.

Runs the command of that line of EXPERIMENT/results.jsonl again, prints both scores, and ends with
code 1 unless they agree. Without words it lists the lines that it can repeat; the first words list
fewer. The same command on the same day goes on with what it has trained.
"""

import datetime
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from experiments import results, sweep
from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.results.statistics import decimals, rounded, t_half_width
from experiments.results import Result
from jaxformer.config import Checked, Natural, to_plain
from jaxformer.errors import ConfigError, DataError


@dataclass(frozen=True)
class RepeatOptions(Checked):
    """The line that is repeated, and with what."""

    line: tuple[str, ...] = ()
    """Experiment, table, system and metric of the line; they stand first, without --line."""
    seeds: Natural = 0
    """Seeds that are trained again, the first ones of the line; 0: all."""
    runs: str = ""
    """Folder of the runs that are trained; empty: runs/repeated/DATE."""


class Repetition(NamedTuple):
    """A line's score again; None is what an evaluation does not say."""

    score: float
    interval: float | None
    seeds: list[int]
    config_sha256: str | None


def main(options: RepeatOptions) -> None:
    """Repeats the line, and ends with code 1 where the scores differ."""
    line = find(options.line)
    if reason := refusal(line):
        raise ConfigError(f"{' '.join(options.line)} cannot be repeated: {reason}")
    seeds = (line.seeds or [])[: options.seeds or None]
    runs = Path(options.runs or f"runs/repeated/{datetime.date.today()}")
    started = time.monotonic()
    new = repeat(line, seeds, runs / (line.config_sha256 or "unknown")[:12])
    seconds = time.monotonic() - started
    half, source = allowed(line, len(new.seeds))
    same = "are the same" if new.config_sha256 == line.config_sha256 else "have changed since"
    known = "?" if line.seconds is None else f"{line.seconds:,.0f}"
    print(f"\n{' '.join(options.line)}")
    print(f"line      {_score(line)}, {line.date}, {known} s a seed")
    print(f"repeated  {_score(new)}, {seconds:,.0f} s; the settings {same}")
    agree = abs(new.score - line.score) <= half
    print(
        f"They {'agree' if agree else 'differ'}: the difference is "
        f"{new.score - line.score:+.{decimals(half, half)}f}, and ±{half:.{decimals(half, half)}f} "
        f"is {source}."
    )
    if not agree:
        raise SystemExit(1)


def find(words: Sequence[str]) -> Result:
    """The line that `words` name: experiment, table, system, metric.

    Raises `ConfigError` where it is not one; the lines that the words fit are printed.
    """
    fitting = dict(_lines(words))
    if len(words) == 4 and len(fitting) == 1:
        return next(iter(fitting.values()))
    for name, line in (fitting or dict(_lines(()))).items():
        if not refusal(line):
            print(shlex.join(name))
    raise ConfigError(
        f"{shlex.join(words) or 'nothing'} names no line: give experiment, table, system and "
        "metric of one of these"
    )


def _lines(words: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Result]]:
    for path in sorted(results.ROOT.glob(f"*/{results.FILE}")):
        for line in results.read(path, Result):
            name = path.parent.name, line.table, line.system, line.metric
            if name[: len(words)] == tuple(words):
                yield name, line


def refusal(line: Result) -> str:
    """The reason why `line` cannot be repeated here; "" where it can."""
    _, module, words = _command(line)
    if not line.seeds:
        return "it is of no training: it was compiled, counted or timed"
    if not _is(module, "train") and not _is(module, "evaluate") and module != "experiments.sweep":
        return f"{module or 'no command'} trains and scores no run"
    platform, colon, _ = (line.device or "").partition(":")
    if colon and platform != jax.default_backend():
        return f"it needs a device of the kind {line.device}"
    run = Path(words[words.index("--run") + 1]) if "--run" in words else None
    if run is not None and not run.is_dir():
        return f"it scores the run {run}, which is not here: train it first"
    return ""


def repeat(line: Result, seeds: Sequence[int], folder: Path) -> Repetition:
    """Runs the command of `line` for `seeds`, with its runs in `folder`, and scores them alike."""
    program, module, words = _command(line)
    if _is(module, "evaluate"):
        *_, last = _run([*program, *words], stdout=subprocess.PIPE).splitlines() or [""]
        scores = json.loads(last) if last.startswith("{") else {}
        if line.metric not in scores:
            raise DataError(f"the last line of {line.command} has no {line.metric}: {last!r}")
        return Repetition(scores[line.metric], None, list(seeds), line.config_sha256)
    words = [*words, "--runs", str(folder)]  # of an option that stands twice the last one counts
    if module == "experiments.sweep":
        for number in _cells(line, words, seeds):
            _run([*program, *words, "--cell", str(number)])
    else:
        for seed in seeds:
            _run([*program, *words, "--name", f"seed{seed}", "--training.seed", str(seed)])
    (new,) = results.results_of([folder], line.table, line.system, [line.metric])
    if line.text_sha256 not in (None, new.text_sha256):
        raise DataError(
            f"the line is of the text {line.text_sha256}, its repetition of {new.text_sha256}: "
            "scores of different texts cannot be compared"
        )
    return Repetition(new.score, new.interval, new.seeds or [], new.config_sha256)


def allowed(line: Result, count: int) -> tuple[float, str]:
    """How far the mean of `count` other seeds may be from the score of `line`, and why."""
    values = np.array(line.scores or ())
    if len(values) > 1:
        half = t_half_width(values) * math.sqrt(1 + len(values) / count)
        return half, f"the 95 % prediction interval from its {len(values)} seeds"
    if line.interval is not None:
        return line.interval, "its 95 % interval over test items, for it has one seed"
    return 0.5 * 10.0 ** -decimals(line.score), "what its page rounds to, for it has no interval"


def _cells(line: Result, words: Sequence[str], seeds: Sequence[int]) -> list[int]:
    """The numbers of a sweep's cells with the settings of `line`, or of its only variant."""
    options = cli.parse(sweep.presets_of(words[0]), list(words), positional="experiment")
    configs = list(sweep.open_cells(options).cells.values())
    digests = [results.settings_digest(config_files.flat(to_plain(x))) for x in configs]
    wanted = {line.config_sha256} if len(set(digests)) > 1 else set(digests)
    numbers = [
        number
        for number, (config, digest) in enumerate(zip(configs, digests, strict=True))
        if digest in wanted and config.training.seed in seeds
    ]
    if not numbers:
        raise ConfigError(f"{line.command} has no cell with the settings of the line any more")
    return numbers


def _command(line: Result) -> tuple[list[str], str, list[str]]:
    """The program and module, the module's name, and the options of the line's command."""
    text = line.command or ""
    if text.split()[1:2] != ["-m"]:
        return [], "", []
    _, _, module, *words = shlex.split(text)
    return [sys.executable, "-m", module], module, words


def _is(module: str, name: str) -> bool:
    return module.rpartition(".")[2].partition("_")[0] == name


def _run(command: Sequence[str], stdout: int | None = None) -> str:
    """What `command` prints, if `stdout` is a pipe; ends with its exit code where it fails."""
    print(shlex.join(command), flush=True)
    done = subprocess.run(command, stdout=stdout, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout or ""


def _score(line: Result | Repetition) -> str:
    interval = math.nan if line.interval is None else line.interval
    return f"{rounded(line.score, interval)}, seeds {' '.join(map(str, line.seeds or ()))}"


if __name__ == "__main__":
    cli.start(main, {"default": RepeatOptions()}, __doc__, positional="line")
