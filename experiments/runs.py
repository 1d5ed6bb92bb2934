"""A run's folder: its configuration, its surroundings and its metrics."""

import contextlib
import dataclasses
import datetime
import enum
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from experiments import commands
from jaxformer import extras
from jaxformer.config import ConfigError

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
    nothing can be lost. The folder then holds the new configuration.
    """
    for word in (experiment, name):
        if not re.fullmatch(r"\w[\w.-]*", word):
            raise ConfigError(
                f"{word!r} cannot name a folder: use letters, digits, '_', '-' and '.'"
            )
    folder = Path(root) / experiment / name
    given = as_json(config)
    begun = any((folder / "checkpoints").glob("[0-9]*"))
    if begun and (folder / "config.json").exists():
        _refuse_differences(_read_json(folder / "config.json"), given, folder, tuple(may_differ))
    folder.mkdir(parents=True, exist_ok=True)
    _write_environment(folder / "env.json")
    _write_json(folder / "config.json", given)
    return Run(folder)


def load_config(folder: str | Path, kind: type[T]) -> T:
    """The configuration of the run in `folder`, a dataclass of type `kind`.

    `ConfigError` names fields that are unknown, missing or of another type.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.json")
    try:
        return _build(kind, _read_json(path), "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def as_json(config: Any) -> dict:
    """The dataclass `config` as JSON holds it: nested dicts, lists, numbers, strings, None."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=_plain))


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
        """Forgets the metrics after `step`, from which training goes on."""
        with self.surviving("metrics.jsonl"):
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


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value`, as JSON holds it, as the type `kind`; `where` is its dotted name."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        return _build(_choose(options, value, where), value, where)
    if origin is Literal and value in options:
        return value
    if origin in (tuple, list) and isinstance(value, list):
        items = options if origin is tuple and options[-1] is not ... else options[:1] * len(value)
        if len(items) == len(value):
            pairs = enumerate(zip(items, value, strict=True))
            return origin(_build(item, v, f"{where}.{i}") for i, (item, v) in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: _build(options[1], v, f"{where}.{key}") for key, v in value.items()}
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and value in kind.__members__:
        return kind[value]
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind is Any or type(value) is kind or (kind is types.NoneType and value is None):
        return value
    raise ConfigError(f"{where} is {json.dumps(value)}, but must be {_name(kind)}")


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {json.dumps(value)}, but must hold {_name(kind)}")
    prefix = f"{where}." if where else ""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    wrong = [f"{prefix}{name} is unknown" for name in sorted(value.keys() - names)]
    wrong += [f"{prefix}{name} is missing" for name in sorted(names - value.keys())]
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)} (for {_name(kind)})")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _build(hints[name], value[name], prefix + name) for name in names})


def _choose(options: tuple, value: Any, where: str) -> Any:
    """The one of the types `options` that `value` fits."""
    fitting = []
    for option in options:
        with contextlib.suppress(ConfigError):
            _build(option, value, where)
            fitting.append(option)
    exact = [option for option in fitting if option is type(value)]
    if len(exact or fitting) != 1:
        names = " or ".join(map(_name, fitting or options))
        raise ConfigError(f"{where} is {json.dumps(value)}, but must be exactly one of {names}")
    return (exact or fitting)[0]


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    raise ConfigError(f"{value!r} cannot be written to config.json: use plain values")


def _write_environment(path: Path) -> None:
    """Writes what bits and speed depend on besides the configuration, and keeps what was there."""
    earlier = []
    if path.exists():
        before = _read_json(path)
        earlier = [*before.pop("earlier", []), before]
    _write_json(path, {**_environment(), "earlier": earlier})


def _environment() -> dict:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "cpus": len(cores),
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
    except ValueError:
        return None
    return found if isinstance(found, dict) and "step" in found else None


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


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
