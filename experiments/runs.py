"""A run's folder: its configuration, its surroundings and its metrics."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from experiments import commands, fields
from jaxformer import extras
from jaxformer.config import ConfigError
from jaxformer.processors import cores

T = TypeVar("T")

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def open_run(
    root: str | Path,
    experiment: str,
    name: str,
    config: Any,
    *,
    may_differ: Iterable[str] = (),
) -> "Run":
    """The run `root/experiment/name`, made with `config` or opened again with the same one.

    `config` is a dataclass; it is written to config.json, and what the run depends on besides
    it to env.json. When the folder has a config.json and a checkpoint, fields that differ raise
    `ConfigError`, except those under the dotted names in `may_differ`; without a checkpoint
    nothing can be lost. A field that is absent there, as in a run begun before there was one, has
    its default. The folder then holds the new configuration.
    """
    folder = folder_of(root, experiment, name)
    given = as_json(config)
    begun = any((folder / "checkpoints").glob("[0-9]*"))
    if begun and (folder / "config.json").exists():
        stored = fields.with_defaults(_read_json(folder / "config.json"), config)
        _refuse_differences(stored, given, folder, tuple(may_differ))
    folder.mkdir(parents=True, exist_ok=True)
    _write_environment(folder / "env.json")
    _write_json(folder / "config.json", given)
    return Run(folder)


def folder_of(root: str | Path, experiment: str, name: str) -> Path:
    """The folder of a run; `ConfigError` for what cannot name one."""
    for word in (experiment, name):
        if not re.fullmatch(r"\w[\w.-]*", word):
            raise ConfigError(
                f"{word!r} cannot name a folder: use letters, digits, '_', '-' and '.'"
            )
    return Path(root) / experiment / name


def load_config(folder: str | Path, kind: type[T]) -> T:
    """The configuration of the run in `folder`, a dataclass of type `kind`.

    A field that is absent has its default. `ConfigError` names fields that are unknown, of
    another type, or absent though they have no default.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.json")
    try:
        return fields.build(kind, _read_json(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def as_json(config: Any) -> dict:
    """The dataclass `config` as JSON holds it: nested dicts, lists, numbers, strings, None."""
    return fields.plain(config)


def flat(value: Any, name: str = "") -> dict[str, str]:
    """`dotted.name` -> JSON text of each value that is not an object."""
    if not isinstance(value, dict):
        return {name: json.dumps(value)}
    prefix = f"{name}." if name else ""
    return {k: v for key, inner in value.items() for k, v in flat(inner, prefix + key).items()}


def count(params: Any) -> int:
    """How many numbers the tree `params` holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class Run:
    """The folder of one run, and its log of metrics: a JSON line a step, and TensorBoard.

    A metric that cannot be written is lost, with one warning on stderr, and nothing else stops.
    TensorBoard files are written where tensorboardX is installed.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._path = self.folder / "metrics.jsonl"
        self._events: _EventFile | None = None
        self._first_step = 0
        self._torn = False
        self._warned: set[str] = set()

    def log(self, step: int, **values: float) -> None:
        """Appends `values` of `step` to metrics.jsonl, on disk when this returns."""
        numbers = {name: float(value) for name, value in values.items()}
        line = json.dumps({"step": int(step), **numbers}) + "\n"
        with self.surviving("metrics.jsonl"):
            self._append(line.encode())
        with self.surviving("tensorboard"):
            self._write_events(int(step), numbers)

    def resume(self, step: int) -> None:
        """Forgets the metrics after `step`, from which training goes on, and damaged lines.

        Of a damaged one that is not the last, which a crash may tear, it warns.
        """
        with self.surviving("metrics.jsonl"):
            self._warn_of_damage()
            kept = [json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step]
            if self._path.exists():
                _replace(self._path, "".join(kept))
        self._close_events()
        self._first_step = step + 1

    def metrics(self) -> list[dict]:
        """The logged lines in order, without any that a crash left half written."""
        if not self._path.exists():
            return []
        lines = (_parse(line) for line in self._path.read_bytes().split(b"\n"))
        return [line for line in lines if line is not None]

    def close(self) -> None:
        """Closes the TensorBoard file."""
        self._close_events()

    def _warn_of_damage(self) -> None:
        whole = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []
        wrong = [n for n, line in enumerate(whole, 1) if line and _parse(line) is None]
        if wrong:
            said = f"{self._path} lines {', '.join(map(str, wrong))}"
            commands.say(f"warning: {said}: no metrics, left out", sys.stderr)

    @contextlib.contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        """Within it, what cannot be written to `name` is lost, with one warning for each name."""
        try:
            yield
        except OSError as error:
            if name not in self._warned:
                said = f"{self.folder / name} could not be written and now lacks metrics: {error}"
                commands.say(f"warning: {said}", sys.stderr)
            self._warned.add(name)

    def _append(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        self._torn = True
        # unbuffered: what a full disk refused must not come back with the next line
        with self._path.open("ab", buffering=0) as file:
            written = file.write(line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")
        self._torn = False

    def _write_events(self, step: int, numbers: dict[str, float]) -> None:
        if "tensorboard" in self._warned:
            return
        if self._events is None:
            try:
                self._events = _EventFile(self.folder / "tensorboard", self._first_step)
            except extras.MissingExtra:
                self._warned.add("tensorboard")
                return
        self._events.write(step, numbers)

    def _close_events(self) -> None:
        if self._events is not None:
            with self.surviving("tensorboard"):
                self._events.close()
        self._events = None


class Follower(Run):
    """The folder of a run whose log another process writes."""

    def log(self, step: int, **values: float) -> None:
        """Nothing."""

    def resume(self, step: int) -> None:
        """Nothing."""


class _EventFile:
    """A TensorBoard file, written in this thread: tensorboardX's own blocks when its dies."""

    def __init__(self, folder: Path, first_step: int):
        writers = extras.load("tensorboardX.event_file_writer")
        self._summary = extras.load("tensorboardX.summary")
        self._proto = extras.load("tensorboardX.proto.event_pb2")
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = writers.EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._flushed = 0.0
        # TensorBoard hides what earlier files hold from this step on
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        event = self._proto.Event(wall_time=time.time(), step=first_step, session_log=start)
        self._writer.write_event(event)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        now = time.time()
        for name, number in numbers.items():
            summary = self._summary.scalar(name, number)
            self._writer.write_event(self._proto.Event(wall_time=now, step=step, summary=summary))
        if now - self._flushed > 10.0:  # each flush waits for the disk
            self._writer.flush()
            self._flushed = now

    def close(self) -> None:
        self._writer.close()


def _refuse_differences(
    stored: dict, given: dict, folder: Path, may_differ: tuple[str, ...]
) -> None:
    before, now = flat(stored), flat(given)
    free = tuple(f"{prefix}." for prefix in may_differ)
    wrong = [
        f"{field} is {before.get(field, 'absent')} there but {now.get(field, 'absent')} here"
        for field in sorted(before.keys() | now.keys())
        if before.get(field) != now.get(field) and not f"{field}.".startswith(free)
    ]
    if wrong:
        raise ConfigError(
            f"{folder} was made with another configuration: {'; '.join(wrong)}: use another "
            "--name, or give the stored value"
        )


def _write_environment(path: Path) -> None:
    """Writes what bits and speed depend on besides the configuration, and keeps what was there."""
    earlier = []
    if path.exists():
        before = _read_json(path)
        earlier = [*_earlier(before, path), before]
    _write_json(path, {**_environment(), "earlier": earlier})


def _earlier(before: dict, path: Path) -> list:
    earlier = before.pop("earlier", [])
    if not isinstance(earlier, list):
        raise ConfigError(f"{path} is damaged: earlier is no list. Remove it: only history is lost")
    return earlier


def _environment() -> dict:
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "cpus": cores(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
    }


def _git(*words: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _parse(line: bytes) -> dict | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int else None


def _read_json(path: Path) -> dict:
    """The object in `path`; `ConfigError`, naming the file, where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object, but holds {json.dumps(found):.60}")
    return found


def _write_json(path: Path, value: dict) -> None:
    _replace(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def _replace(path: Path, text: str) -> None:
    """Writes `text` to `path` so that a crash leaves either the old file or the new one."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
