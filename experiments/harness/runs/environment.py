"""A run's env.json: versions, devices and the command of each start."""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax

from experiments.harness import cli
from jaxformer import storage
from jaxformer.records import Record
from jaxformer.runtime import cpu_count

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


_COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # a program depends on them


def environment_of(folder: Path) -> Record:
    """The record of versions, devices and command of the starts of a run."""
    return Record(folder / "env.json", "remove it: only history is lost")


def write_environment(folder: Path) -> None:
    """Writes versions, devices and command of this start, and keeps the records of earlier ones.

    The start before this one gets its `seconds`, until the last line that it logged.
    """
    record = environment_of(folder)
    before = record.read(earlier=list)
    earlier = before.pop("earlier", [])
    if before:
        with contextlib.suppress(FileNotFoundError):  # nothing was logged
            ended = storage.modified(folder / "metrics.jsonl")
            started = datetime.datetime.fromisoformat(before["time"]).timestamp()
            before["seconds"] = max(0.0, round(ended - started))
        earlier.append(before)
    record.write({**_environment(), "earlier": earlier})


def now() -> str:
    """The time, as env.json has it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _environment() -> dict:
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "cpus": cpu_count(),
        **{name: os.environ[name] for name in _COMPILER_FLAGS if name in os.environ},
        **_commits(),
        "time": now(),
        "command": cli.own_command(),
    }


def _commits() -> dict[str, str | bool | None]:
    """The commits of this repository, and of a script of another one that was started."""
    repositories = {"": Path(__file__).parent}
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None:
        repositories["script_"] = Path(script).resolve().parent
    commits: dict[str, str | bool | None] = {}
    roots = []
    for prefix, folder in repositories.items():
        root, _, commit = (_git(folder, "rev-parse", "--show-toplevel", "HEAD") or "").partition(
            "\n"
        )
        if prefix and (not commit or root in roots):
            continue
        roots.append(root)
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        commits |= {f"{prefix}git_commit": commit or None, f"{prefix}git_changed": bool(changed)}
    return commits


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
