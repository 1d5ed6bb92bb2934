"""The end of what a training prints: where everything is, and what to do next."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

_FILES = {
    "scores.json": "the scores, with what is needed to repeat them",
    "metrics.jsonl": "loss and speed over time",
    "config.json, env.json": "all settings; versions, devices, compiler options",
    "checkpoints/": "the weights",
}


def closing(folder: Path, files: Mapping[str, str], commands: Iterable[tuple[str, ...]]) -> str:
    """The contents of the run in `folder`, the experiment's own `files` first, and next commands.

    A command is a module of `experiments` and its further arguments; each gets the run. The last
    one writes the page of the run.
    """
    lines = [f"Everything is in {folder}:"]
    lines += [f"  {name:<23} {what}" for name, what in {**files, **_FILES}.items()]
    lines += ["", "Next:"]
    for module, *args in commands:
        words = ["python", "-m", f"experiments.{module}", "--run", str(folder), *args]
        lines.append("  " + shlex.join(words))
    lines.append("  " + shlex.join(["python", "-m", "experiments.runs", "page", str(folder)]))
    return "\n".join(lines)
