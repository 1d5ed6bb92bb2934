"""A run's folder: its configuration, its environment and its metrics."""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import jax

from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.runs import distributed
from experiments.harness.runs.loggers import Loggers, TensorBoard
from jaxformer import records, storage
from jaxformer.config import check_trusted, from_plain, is_import_name, record_trusted, to_plain
from jaxformer.distributed import agreed, assert_processes_agree
from jaxformer.errors import ConfigError
from jaxformer.records import Record
from jaxformer.runtime import cpu_count

T = TypeVar("T")

_FLUSH_SECONDS = 60.0  # between two writes of metrics to a bucket
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # a program depends on them


def open_folder(
    root: str | Path,
    experiment: str,
    name: str,
    config: Any,
    *,
    may_differ: Iterable[str] = (),
) -> "Run":
    """The run `root/experiment/name`, created or opened again with `config`, a dataclass.

    Writes `config` to config.json, and versions and devices to env.json. If the folder already has
    a config.json and a checkpoint, a field with another value raises `ConfigError`, except those
    under the dotted names in `may_differ`; where one of the two values is a function of the user's
    own, these too. Of several processes the first one writes; `ConfigError` where not all see that.
    """
    folder = folder_of(root, experiment, name)
    settings = to_plain(config)
    record_trusted(settings)
    with distributed.together():
        if distributed.is_first():
            _record(folder, settings, may_differ)
    _check_shared(folder)
    return Run(folder, writes=distributed.is_first())


def _record(folder: Path, settings: Any, may_differ: Iterable[str]) -> None:
    begun = any((folder / "checkpoints").glob("[0-9]*"))
    if begun and (folder / "config.json").exists():
        refuse_differences(
            config_files.read_object(folder / "config.json"), settings, folder, may_differ
        )
    folder.mkdir(parents=True, exist_ok=True)
    _write_environment(folder)
    records.write_json(folder / "config.json", settings)


def _check_shared(folder: Path) -> None:
    """Raises `ConfigError` in all processes unless each sees a file that the first one writes."""
    if not distributed.is_several():
        return
    token = folder / f".start-{agreed(time.time())}"  # a folder may be an old copy
    if distributed.is_first():
        token.write_bytes(b"")
    distributed.wait("token")
    try:
        assert_processes_agree({"a shared folder": token.exists()})
    except ConfigError as error:
        raise ConfigError(
            f"{folder} is not shared by all hosts: give --runs a shared folder, or one in a bucket "
            "(gs://BUCKET/PATH)"
        ) from error
    finally:
        if distributed.is_first():
            token.unlink()


def folder_of(root: str | Path, experiment: str, name: str) -> Path:
    """The folder of a run; `ConfigError` for a name that no folder can have."""
    for word in (experiment, name):
        if not re.fullmatch(r"\w[\w.=,+-]*", word):
            raise ConfigError(f"{word!r} cannot name a folder: use letters, digits and _ - . = , +")
    return storage.to_path(root) / experiment / name


def load_config(folder: str | Path, *kinds: type[T]) -> T:
    """The configuration of the run in `folder`: the first dataclass of `kinds` with its fields.

    A field that is absent has its default. `ConfigError` names fields that are unknown, of
    another type, or absent though they have no default.
    """
    path = storage.to_path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.json")
    content = config_files.read_object(path)
    check_trusted(content, path)
    names = {kind: {field.name for field in fields(kind)} for kind in kinds}  # type: ignore[arg-type]
    kind = next((kind for kind in kinds if content.keys() <= names[kind]), None)
    if kind is None:
        unknown = ", ".join(sorted(content.keys() - names[kinds[0]]))
        raise ConfigError(
            f"{folder} was trained by another command or version: config.json has settings that "
            f"are unknown here ({unknown}). env.json has the command and version that trained it"
        )
    try:
        return from_plain(kind, content)
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error}. If another version of jaxformer wrote it, use that one (env.json "
            "has its git_commit), or train again"
        ) from error


def refuse_differences(
    stored: dict, settings: dict, folder: Path, may_differ: Iterable[str]
) -> None:
    """Raises `ConfigError` where `settings` differ from those `stored` in `folder`.

    Those under the dotted names `may_differ` may, unless one is a function of the user's own.
    """
    before, now = config_files.flat(stored), config_files.flat(settings)
    free = tuple(f"{prefix}." for prefix in may_differ)
    wrong = []
    for field in sorted(before.keys() | now.keys()):
        pair = before.get(field, "absent"), now.get(field, "absent")
        imported = any(is_import_name(text.strip('"')) for text in pair)
        if pair[0] != pair[1] and (imported or not f"{field}.".startswith(free)):
            wrong.append(f"{field} is {pair[0]} there but {pair[1]} here")
    if wrong:
        raise ConfigError(
            f"{folder} was made with another configuration: {'; '.join(wrong)}: use another "
            "--name, or give the stored value"
        )


class Run:
    """The folder of one run, and its log of metrics: a JSON line for each step, and TensorBoard.

    `loggers` get the same numbers. If a metric cannot be written, training goes on, with one
    warning on stderr. TensorBoard files are written where tensorboardX is installed. Without
    `writes`, as in all processes but the first, nothing is written.
    """

    def __init__(self, folder: str | Path, *, writes: bool = True):
        self.folder = storage.to_path(folder)
        self._writes = writes
        self._path = self.folder / "metrics.jsonl"
        has_tensorboard = writes and importlib.util.find_spec("tensorboardX") is not None
        own = [TensorBoard(self.folder / "tensorboard")] if has_tensorboard else []
        self._tensorboard, self.loggers = Loggers(own), Loggers()
        self._in_bucket = storage.is_in_bucket(self.folder)
        self._content = b""  # of metrics.jsonl in a bucket, which cannot be appended to
        self._flushed = time.monotonic()
        self._torn = False
        self._warned: set[str] = set()

    def log(self, step: int, **values: float) -> None:
        """Appends `values` of `step` to metrics.jsonl, on disk when this returns.

        One that is not finite is null there, as JSON has no other word for it.
        In a bucket the file is replaced by `flush`, here at most once a minute.
        """
        if not self._writes:
            return
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        line = json.dumps({"step": int(step), **finite}) + "\n"
        with self.surviving("metrics.jsonl"):
            self._append(line.encode())
        self._tensorboard.log(int(step), numbers)
        self.loggers.log(int(step), numbers)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes to a bucket what was logged: call it before a checkpoint that stands on it."""
        self._flushed = time.monotonic()
        if not (self._in_bucket and self._writes and self._content):
            return
        with self.surviving("metrics.jsonl"):
            self._path.write_bytes(self._content)
        self._tensorboard.call("flush")

    def log_text(self, step: int, name: str, lines: Iterable[str]) -> None:
        """Shows `lines` of `step` in TensorBoard, next to numbers that were logged before."""
        self._tensorboard.call("log_text", int(step), name, list(lines))

    def add_environment(self, **facts: str) -> None:
        """Adds `facts` to what env.json says of this start."""
        with self.surviving("env.json"):
            if self._writes:
                environment_of(self.folder).update(**facts)

    def resume(self, step: int, without: str | None = None) -> None:
        """Removes the metrics after `step`, from which training goes on, and damaged lines.

        Also those of `step` with the metric `without`, which will be logged again. Warns of a
        damaged line, unless it is the last one, which a crash may leave half written.
        """
        if not self._writes:
            return
        with self.surviving("metrics.jsonl"):
            self._warn_of_damage()
            last = step if without is None else step - 1
            lines = self._lines()
            kept = [x for x in lines if x["step"] <= (last if without in x else step)]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            if self._path.exists():
                storage.write(self._path, text.encode())
            self._content = text.encode()

    def metrics(self) -> list[dict]:
        """The logged lines in order, without damaged ones and numbers that are not finite."""
        return [
            {name: value for name, value in line.items() if value is not None}
            for line in self._lines()
        ]

    def _lines(self) -> list[dict]:
        if not self._path.exists():
            return []
        lines = (_parse(line) for line in self._path.read_bytes().split(b"\n"))
        return [line for line in lines if line is not None]

    def close(self) -> None:
        """Closes the TensorBoard file and the loggers."""
        self.flush()
        self._tensorboard.close()
        self.loggers.close()

    def _warn_of_damage(self) -> None:
        whole = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []
        wrong = [n for n, line in enumerate(whole, 1) if line and _parse(line) is None]
        if wrong:
            numbers = ", ".join(map(str, wrong))
            cli.say(f"warning: {self._path} lines {numbers}: no metrics, left out", sys.stderr)

    @contextlib.contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        """Within it, an error in writing `name` gives one warning and nothing more."""
        try:
            yield
        except OSError as error:
            if name not in self._warned:
                said = f"{self.folder / name} could not be written and now lacks metrics: {error}"
                cli.say(f"warning: {said}", sys.stderr)
            self._warned.add(name)

    def _append(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        if self._in_bucket:
            self._content += line
            return
        self._torn = True
        # Unbuffered: what a full disk refused must not be written with the next line.
        with self._path.open("ab", buffering=0) as file:
            written = file.write(line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")
        self._torn = False


def environment_of(folder: Path) -> Record:
    """The record of versions, devices and command of the starts of a run."""
    return Record(folder / "env.json", "remove it: only history is lost")


def _write_environment(folder: Path) -> None:
    """Writes versions, devices and command of this start, and keeps those of earlier ones.

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
    """The commit of this repository, and that of a script of another one that was started."""
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


def _parse(line: bytes) -> dict | None:
    try:
        numbers = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return numbers if isinstance(numbers, dict) and type(numbers.get("step")) is int else None
