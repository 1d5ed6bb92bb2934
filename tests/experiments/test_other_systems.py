"""Commands where the system lacks what Windows lacks: modules, signals, calls."""

import pytest

from tests.experiments.test_training_config import LANGUAGE
from tests.two_processes import ended, start

HIDDEN = """
import enum, os, select, signal, sys

for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "readline"):
    sys.modules[name] = None
kept = {name: signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGABRT", "SIGSEGV")}
for name in [name for name in vars(signal) if name.startswith("SIG") and name.isupper()]:
    if name not in kept and not name.startswith("SIG_"):
        delattr(signal, name)
signal.Signals = enum.IntEnum("Signals", {name: int(number) for name, number in kept.items()})
for module, names in {
    os: ("O_DIRECTORY", "sched_getaffinity", "fork", "getuid"),
    signal: ("pthread_kill", "pthread_sigmask"),
    select: ("poll",),
}.items():
    for name in names:
        delattr(module, name)
"""
COMMANDS = "evaluate export finetune generate plan prepare train"


def test_all_commands_are_imported_where_only_few_signals_and_modules_exist():
    modules = [f"experiments.language_modelling.{name}" for name in COMMANDS.split()]
    modules += [f"experiments.translation.{name}" for name in ("evaluate", "train", "translate")]
    modules += [f"experiments.{name}" for name in ("runs", "sweep", "plan")]
    (done,) = ended(start("-c", HIDDEN + f"import {', '.join(modules)}"))
    assert done.code == 0, done.err


@pytest.mark.long
def test_a_run_is_trained_where_only_few_signals_and_modules_exist(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("sun moon rain\nhill lake tree\n" * 17)
    words = LANGUAGE.split()[1:]
    code = f"""
from experiments.harness import cli
from experiments.language_modelling import train
sys.exit(cli.run(lambda: train.main(cli.parse(train.PRESETS, {words!r}))))
"""
    (done,) = ended(start("-c", HIDDEN + code, folder=tmp_path))
    assert done.code == 0, done.err
    assert (tmp_path / "runs" / "language_modelling" / "tiny" / "scores.json").exists()
