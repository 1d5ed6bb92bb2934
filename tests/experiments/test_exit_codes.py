"""The exit codes that guides/reliability.md promises, each with one sentence, from a command.

130 and 143 are those of a training that is stopped by a signal: see test_distributed.py. A bug has
code 1 and a traceback: see test_cli.py.
"""

import asyncio
import signal
import sys
import textwrap
import threading
from pathlib import Path

import jax.numpy as jnp
import pytest

from experiments.harness import cli
from experiments.harness.runs import distributed
from experiments.language_modelling import train
from jaxformer.training.losses import causal_loss
from tests.experiments.commands import call, refused
from tests.experiments.tiny_runs import language_config
from tests.two_processes import ended, start


def endless_loss(model, **options):
    """A loss that is never finite."""
    loss = causal_loss(model, **options)

    def endless(params, batch, rng):
        nats, tokens = loss(params, batch, rng)
        return nats + jnp.inf, tokens

    return endless


@pytest.mark.long
def test_a_loss_that_is_never_finite(tmp_path):
    changes = {"optimizer__total_steps": 13, "training__loss": f"{__name__}:endless_loss"}
    done = call(train, language_config(tmp_path, name="endless", **changes))
    refused(done, 70, "not finite in 10 steps in a row, the last of them step 10 ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("-S -m", 1, "has no jax: run `pip install -e '.[experiments]'`"),
        ("-m", 2, "JAX finds no device for JAX_PLATFORMS=rocm: unset it, or on a machine"),
    ],
)
def test_a_process_ends_with_the_code_and_one_line(words, code, said):
    """Without the packages, and without the devices that are asked for."""
    command = [*words.split(), "experiments.language_modelling.train"]
    (done,) = ended(start(*command, environment={"JAX_PLATFORMS": "rocm"}))
    assert done.code == code and said in done.err and "Traceback" not in done.err
    assert done.err.count("error: ") == 1


TWO_COMMANDS = """
import socket, jax
from experiments.harness import cli
from jaxformer.distributed.termination import _c_handler, _is_another_function

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % free.getsockname()[1]
handlers = []
note = lambda: handlers.append(_c_handler(15))
join = lambda: (jax.distributed.initialize(address, 1, 0), note())
for command in (join, note):
    assert cli.run(command) == 0
    note()
print("changed", [_is_another_function(handlers[0], each) for each in handlers])
"""


def test_two_commands_of_a_process_leave_the_handler_of_jax_that_has_joined_others():
    (done,) = ended(start("-c", TWO_COMMANDS))
    assert "changed [False, False, False, False]" in done.out, done.err


class Reporter:
    """Reports to a loop that has ended, as tensorstore's threads do after a failed save."""

    def __init__(self, report):
        self.report = report

    def __del__(self):
        self.report()


def test_reports_to_a_loop_that_has_ended_are_not_shown_and_other_errors_are(capfd):
    loop = asyncio.new_event_loop()
    loop.close()

    def main():
        Reporter(lambda: loop.call_soon_threadsafe(print))
        Reporter(lambda: [][3])

    before = sys.unraisablehook
    try:
        sys.unraisablehook = sys.__unraisablehook__
        assert cli.run(main) == 0 and sys.unraisablehook is sys.__unraisablehook__
    finally:
        sys.unraisablehook = before
    shown = capfd.readouterr().err
    assert "Event loop is closed" not in shown and "IndexError" in shown


@pytest.fixture
def terminal():
    """A process that hears SIGHUP, as pytest under nohup does not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", distributed.SIGNALS)
def test_each_request_to_stop_is_heard_before_the_next_step_and_has_its_code(number, capsys):
    with pytest.raises(SystemExit) as end:
        with distributed.asked_to_stop() as asked:
            assert not asked()
            signal.raise_signal(number)
            assert asked()
    assert end.value.code == 128 + number
    assert f"{number.name}: saving after the current step" in capsys.readouterr().err


@pytest.mark.usefixtures("terminal")
def test_a_closing_terminal_may_say_so_twice_and_a_second_signal_ends_at_once(monkeypatch):
    ends = []
    monkeypatch.setattr(distributed.os, "_exit", ends.append)
    with pytest.raises(SystemExit) as end:
        with distributed.asked_to_stop() as asked:
            for number in (signal.SIGHUP, signal.SIGHUP):
                signal.raise_signal(number)
            assert asked() and not ends
            signal.raise_signal(signal.SIGINT)
    assert end.value.code == 129 and ends == [130]


def test_a_signal_that_is_ignored_at_the_start_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with distributed.asked_to_stop() as asked:
            signal.raise_signal(signal.SIGHUP)
            assert not asked()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_trains_without_handlers():
    heard = []

    def train():
        with distributed.asked_to_stop() as asked:
            heard.append(asked())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert heard == [False]


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_a_command_whose_streams_are_closed_does_its_work(closed, tmp_path):
    code = f"""
        import os, subprocess, sys
        def close():
            for number in {closed}: os.close(number)
        words = [sys.executable, "-m", "experiments.runs", "list"]
        sys.exit(subprocess.run(words, preexec_fn=close).returncode)
    """
    (done,) = ended(start("-c", textwrap.dedent(code), folder=tmp_path))
    assert done.code == 65 and "Traceback" not in done.err
    assert ("there is no run in" in done.err) == (2 not in closed)


def test_an_output_of_few_characters_shows_the_others_as_question_marks(tmp_path):
    code = """
        import io, sys
        from experiments.harness import cli
        sys.stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
        code = cli.run(lambda: print("Müller"))
        print(code, sys.stdout.buffer.getvalue(), file=sys.stderr)
    """
    (done,) = ended(start("-c", textwrap.dedent(code), folder=tmp_path))
    assert done.err.endswith("0 b'M?ller\\n'\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full disk to test on")
def test_an_output_on_a_full_disk_is_named(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.run(lambda: print("a line")) == 74
        monkeypatch.undo()
    assert capsys.readouterr().err == "error: standard output: No space left on device\n"
