"""The text that ends a training: the files of its run, and the next commands."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

_FILES = {
    "scores.json": "the scores, with what is needed to repeat them",
    "metrics.jsonl": "loss and speed over time",
    "config.json, env.json": "all settings; versions, devices, compiler options",
    "checkpoints/": "the weights",
}


def describe_folder(
    folder: Path, files: Mapping[str, str], commands: Iterable[tuple[str, ...]]
) -> str:
    """The files of the run in `folder`, the experiment's own `files` first, and the next commands.

    A command is a module of `experiments` and its further arguments; each gets the run. The last
    one writes the page of the run.
    """
    lines = [f"Everything is in {folder}:"]
    lines += [
        f"  {names:<23} {content}"
        for names, content in {**files, **_FILES}.items()
        if all((folder / name).exists() for name in names.split(", "))
    ]
    lines += ["", "Next:"]
    for module, *args in commands:
        words = ["python", "-m", f"experiments.{module}", "--run", str(folder), *args]
        lines.append("  " + shlex.join(words))
    lines.append("  " + shlex.join(["python", "-m", "experiments.runs", "page", str(folder)]))
    return "\n".join(lines)
