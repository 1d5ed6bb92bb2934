"""A run's folder: its configuration, its log and its result."""

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from experiments.harness.cli import config_files, display
from experiments.harness.runs import distributed
from experiments.harness.runs.environment import environment_of, write_environment
from experiments.harness.runs.loggers import Logger, MetricsFile, TensorBoard
from jaxformer import records, storage
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    check_trusted,
    from_plain,
    is_import_name,
    record_trusted,
    to_plain,
)
from jaxformer.distributed import (
    agreed,
    assert_processes_agree,
)
from jaxformer.errors import ConfigError
from jaxformer.pretrained.run_weights import weights_of
from jaxformer.records import Record

T = TypeVar("T")


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
    _refuse_fewer_steps(settings, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_environment(folder)
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
        if not _are_equal(*pair) and (imported or not f"{field}.".startswith(free)):
            wrong.append(f"{field} is {pair[0]} there but {pair[1]} here")
    if wrong:
        raise ConfigError(
            f"{folder} was made with another configuration: {'; '.join(wrong)}: use another "
            "--name, or give the stored value"
        )


def _are_equal(before: str, now: str) -> bool:
    """Whether two JSON texts stand for one value: 256 and 256.0 do, 1 and true do not."""
    if before == now:
        return True
    with contextlib.suppress(ValueError):  # "absent"
        values = json.loads(before), json.loads(now)
        are_numbers = all(type(value) in (int, float) for value in values)
        return are_numbers and values[0] == values[1]
    return False


def _refuse_fewer_steps(settings: dict, folder: Path) -> None:
    """Raises `ConfigError` where the run in `folder` has done more steps than `settings` ask for.

    Its config.json would otherwise tell of a shorter run than the one whose weights are there.
    """
    total = settings.get("optimizer", {}).get("total_steps")
    names = [path.name for path in (folder / "checkpoints").glob("[0-9]*")]
    if not isinstance(total, int) or not any(x.isdecimal() and int(x) > total for x in names):
        return
    steps = Checkpoints(folder / "checkpoints").steps()
    if steps and total < steps[-1]:
        raise ConfigError(
            f"{folder} is at step {steps[-1]} already, but optimizer.total_steps={total}: give at "
            f"least {steps[-1]}, or train under another --name"
        )


class Run:
    """The folder of one run, and the loggers of its metrics: its file, TensorBoard, the user's.

    If something cannot be written, or a logger fails, training goes on, with one warning on stderr.
    TensorBoard files are written where tensorboardX is installed. Without `writes`, as in all
    processes but the first, nothing is written.
    """

    def __init__(self, folder: str | Path, *, writes: bool = True):
        self.folder = storage.to_path(folder)
        self._writes = writes
        self._file = MetricsFile(self.folder)
        self.loggers: list[Logger] = [self._file] if writes else []
        if writes and importlib.util.find_spec("tensorboardX") is not None:
            self.loggers.append(TensorBoard(self.folder / "tensorboard"))
        self._warned: set[Any] = set()

    def log(self, step: int, **values: float) -> None:
        """Gives `values` of `step` to all loggers."""
        self.call("log", int(step), {name: float(x) for name, x in values.items()})

    def log_text(self, step: int, name: str, lines: Iterable[str]) -> None:
        """Shows `lines` of `step` in TensorBoard, next to numbers that were logged before."""
        self.call("log_text", int(step), name, list(lines))

    def call(self, method: str, *args: Any) -> None:
        """Calls the `method` of each logger that has it, with copies of `args`.

        A logger may fail, or end the process as programs for the command line do: training goes on.
        """
        for logger in self.loggers:
            try:
                getattr(logger, method, lambda *_: None)(*map(copy, args))
            except (Exception, SystemExit) as error:
                reason = f"{type(logger).__name__} failed: {type(error).__name__}: {error}"
                self._warn_once(id(logger), f"the logger {reason}; training goes on")

    def add_environment(self, **facts: Any) -> None:
        """Adds `facts` to what env.json says of this start."""
        with self.surviving("env.json"):
            if self._writes:
                environment_of(self.folder).update(**facts)

    def resume(self, step: int, without: str | None = None) -> None:
        """Removes the metrics after `step`, from which training goes on, and damaged lines.

        Also the lines of `step` with the metric `without`, which will be logged again.
        """
        with self.surviving("metrics.jsonl"):
            if self._writes:
                self._file.resume(step, without)

    def metrics(self) -> list[dict]:
        """The logged lines in order, without damaged ones and numbers that are not finite."""
        return self._file.read()

    @contextlib.contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        """Within it, an error in writing `name` gives one warning and nothing more."""
        try:
            yield
        except OSError as error:
            self._warn_once(name, f"{self.folder / name} could not be written: {error}")

    def _warn_once(self, source: Any, message: str) -> None:
        if source not in self._warned:
            display.say(f"warning: {message}", sys.stderr)
        self._warned.add(source)


class TrainResult(NamedTuple):
    """The results of a training in its `folder`."""

    folder: Path
    steps: list[int]
    """The steps whose mean are the final weights."""
    validation: dict[str, float]
    """The scores of the validation text by which they were chosen."""
    scores: dict[str, Any]
    """The content of scores.json: the scores of the test text, or of the validation text."""


def read_result(folder: Path) -> TrainResult:
    """The result of the finished training in `folder`; `ConfigError` where there is none."""
    scores = scores_of(folder).read()
    if not scores:
        raise ConfigError(f"{folder} has no scores.json: finish its training first")
    validation = weights_of(folder).read(steps=list)
    validation.pop("tree", None)
    return TrainResult(folder, validation.pop("steps", []), validation, scores)


def scores_of(folder: Path) -> Record:
    """The record of the scores that end the training in `folder`."""
    return Record(folder / "scores.json", "score the run again: the command of its training does")
