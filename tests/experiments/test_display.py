"""The screen while a command works: phases, lines, the panel, answers to Ctrl-C."""

import io
import os
import signal
import time

import pytest
from rich.console import Console

from experiments.harness.cli import display
from experiments.harness.training import progress as training_view
from experiments.harness.training.progress import Sample, View
from tests.two_processes import start


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_phase_is_one_line_with_its_time_in_a_log():
    stream = io.StringIO()
    with display.opened(stream), display.phase("making 7 pairs"):
        assert stream.getvalue() == ""
    assert stream.getvalue() == "making 7 pairs: 0.0 s\n"


def test_a_phase_that_lasts_tells_so_in_a_log(monkeypatch):
    monkeypatch.setattr(display.Screen, "log_interval", 0.05)
    stream = io.StringIO()
    with display.opened(stream), display.phase("encoding") as phase:
        time.sleep(0.08)
        phase.encoded(7_000_000, 23_400_000)
        time.sleep(0.3)
    first, *_, last = stream.getvalue().splitlines()[:-1]
    assert first == "encoding: 0 s so far" and last == f"{first}, 7 of 23 MB"


def test_a_phase_that_fails_is_not_told_as_done():
    stream = io.StringIO()
    with pytest.raises(KeyError), display.opened(stream), display.phase("making 7 pairs"):
        raise KeyError
    assert stream.getvalue() == ""


def test_a_terminal_shows_the_phase_while_it_lasts_and_lines_above_it():
    stream = Terminal()
    said = "[bold] is no markup, and a line that is longer than the terminal is not wrapped " * 2
    with display.opened(stream):
        with display.phase("compiling"):
            time.sleep(0.7)
            assert "compiling ... 0 s" in stream.getvalue()
        display.say(said)
    assert "compiling: 0." in stream.getvalue()
    assert said in stream.getvalue()


def view(**changes):
    sample = Sample("The dog sleeps.", "Der Hund schlief.", "Der Hund schläft.")
    given = View(500, 1_000, "loss 1.5000  tokens/s 7", 65.0, "BLEU 9", [sample])
    return given._replace(**changes)


def shown(given, width, height=40, **options):
    console = Console(file=io.StringIO(), width=width, height=height, **options)
    console.print(training_view.render(given, width, height))
    return console.file.getvalue()


def test_a_wide_terminal_shows_bar_scores_and_samples():
    lines = shown(view(), 120).splitlines()
    assert all(len(line) == 120 for line in lines)
    text = "\n".join(lines)
    for said in ("step 500 of 1,000", "50%  left 0:01:05", "loss 1.5000  tokens/s 7  BLEU 9"):
        assert said in text
    for said in ("  model   Der Hund schlief.", "  right   Der Hund schläft."):
        assert said in text


@pytest.mark.parametrize("width, height", [(80, 40), (99, 40), (120, 23)])
def test_a_small_terminal_shows_one_line(width, height):
    said = shown(view(), width, height)
    assert said == "step 500/1000  loss 1.5000  tokens/s 7  left 0:01:05\n"


def test_a_line_longer_than_the_panel_is_cut():
    long = Sample("word " * 50, "Wort " * 50, "Wort " * 50)
    assert all(len(line) == 100 for line in shown(view(samples=[long]), 100).splitlines())


def test_no_color_is_respected(monkeypatch):
    colored = shown(view(), 120, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(view(), 120, force_terminal=True, color_system="standard")
    assert "\x1b[36m" in colored and "\x1b[36m" not in plain


BLOCKED = """
import hashlib
from experiments.harness.runs.preemption import asked_to_stop
with asked_to_stop():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)  # no signal handler runs meanwhile
"""


@pytest.mark.long
def test_control_c_is_answered_while_the_main_thread_cannot_and_twice_ends_it():
    with start("-c", BLOCKED) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            time.sleep(0.3)
            os.kill(child.pid, signal.SIGINT)
            said = child.stderr.readline()
            assert said.startswith("SIGINT: saving after the current step"), said
            os.kill(child.pid, signal.SIGINT)
            assert child.wait(timeout=20) == 130
        finally:
            child.kill()
