"""Commands run in this process, and the files that they leave in the folder of a run."""

import contextlib
import io
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from experiments.harness import cli
from jaxformer.checkpoint import Checkpoints
from tests.configs import changed
from tests.stored import stored

SPEEDS = ("tokens_per_second", "mfu", "data_wait")


def options(words: str) -> dict[str, str]:
    """The words of a command line as {option: value}."""
    given = words.split()
    return dict(zip(given[::2], given[1::2], strict=True))


def words_of(args: dict[str, Any]) -> list[str]:
    """{option: value or list of values} as the words of a command line."""
    words = []
    for name, value in args.items():
        if str(value) in ("True", "False"):
            group, dot, field = name.removeprefix("--").rpartition(".")
            words.append(name if str(value) == "True" else f"--{group}{dot}no_{field}")
        else:
            words += [name, *map(str, value if isinstance(value, list) else [value])]
    return words


def parsed(command: Any, args: dict[str, Any] | list[str]) -> Any:
    """The options of the module `command`, from its presets or from its class of options."""
    words = args if isinstance(args, list) else words_of(args)
    if hasattr(command, "parse"):
        return command.parse(words)
    if hasattr(command, "PRESETS"):
        return cli.parse(command.PRESETS, words, experiment=getattr(command, "EXPERIMENT", ""))
    # A module defines its own options after what it imports.
    *_, options = (kind for name, kind in vars(command).items() if name.endswith("Options"))
    return cli.parse({"default": options()}, words)


def call(command: Any, args: Any, given: bytes = b"") -> Any:
    """The exit code of a command, and what it wrote; `given` is its standard input.

    `args` are its options as `parsed` takes them, or the configuration that they make.
    """
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            parse = partial(parsed, command) if isinstance(args, dict) else lambda config: config
            code = cli.run(lambda: command.main(parse(args)))
    return SimpleNamespace(code=code, out=out.buffer.getvalue().decode(), err=err.getvalue())


def refused(done: Any, code: int, said: str) -> None:
    """Asserts that a command ended with `code` and one line of error, which holds `said`."""
    assert done.code == code, done.err
    assert said in done.err and done.err.startswith("error: ") and done.err.count("\n") == 1


def bytes_of(folder: Path, step: int, tree: str = "params") -> bytes:
    """The parameters that a run saved after `step`, or another `tree` of its state."""
    leaves = jax.tree.leaves(stored(Checkpoints(folder / "checkpoints"), step, tree=tree))
    return b"".join(np.asarray(leaf).tobytes() for leaf in leaves)


def assert_resumes_to_the_bit(command: Any, config: Any, folder: Path) -> None:
    """A copy of the finished run in `folder`, resumed at step 2 of its 4, ends as it does.

    `config` is the run's, and `command` the module that trained it.
    """
    copy = shutil.copytree(folder, folder.parent / "resumed")
    shutil.rmtree(copy / "checkpoints" / "4")
    again = call(command, changed(config, name="resumed"))
    assert again.code == 0 and "from step 2 to 4" in again.out, again.err
    assert bytes_of(copy, 4) == bytes_of(folder, 4)
    assert metrics_of(copy) == metrics_of(folder)


def metrics_of(folder: Path, name: str = "step") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that hold `name`, without speeds."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in SPEEDS} for line in lines if name in line]
