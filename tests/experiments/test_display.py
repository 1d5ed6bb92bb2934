"""The screen while a command works: phases, lines, bars."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest

from experiments.harness.cli import display
from experiments.harness.training.samples import Sample, sample_lines
from jaxformer import optional_dependencies


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_phase_is_one_line_with_its_time_and_one_that_fails_is_not_told_as_done():
    stream = io.StringIO()
    with pytest.raises(KeyError), display.opened(stream):
        with display.phase("making 7 pairs"):
            assert stream.getvalue() == ""
        with display.phase("making 8 pairs"):
            raise KeyError
    assert stream.getvalue() == "making 7 pairs: 0.0 s\n"


def test_a_log_that_was_silent_for_a_while_says_what_is_being_done(monkeypatch):
    monkeypatch.setattr(display.Screen, "silence", 0.1)
    stream = io.StringIO()
    with display.opened(stream), display.phase("encoding") as phase:
        time.sleep(0.25)
        phase.encoded(7_000_000, 23_400_000)
        time.sleep(0.3)
    first, second, last = stream.getvalue().splitlines()
    assert (first, last[:12]) == ("encoding: 0 s so far", "encoding: 0.")
    assert second == "encoding  7 of 23 MB: 0 s so far"


def test_a_line_of_a_log_has_at_most_80_columns(monkeypatch):
    monkeypatch.setattr(display.Screen, "silence", 0.1)
    stream = io.StringIO()
    words = ["step 599,990/600,000", "loss 10.1234", "left 10:00:00", "tokens/s 1,234,567"]
    with display.opened(stream) as screen, display.phase("training") as phase:
        phase.show([*words, "memory 139.00 GB"], 599_990, 600_000)
        screen.say(display.fitting([*words, "38.1% mfu", "memory 139.00 GB"], screen.width))
        time.sleep(0.25)
    logged, *silent, _ = stream.getvalue().splitlines()
    assert logged == "  ".join([*words, "38.1% mfu"]) and len(logged) == 80
    assert silent[0] == "  ".join(words[:3]) + ": 0 s so far"


def test_a_long_line_goes_on_below_with_its_words_whole():
    text = f"attention {'B=3 ' * 19}cudnn\n  not gpu_flash: it needs {'64-bit heads ' * 5}"
    lines = display.wrapped(text).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["attention", "B=3", "not", "64-bit"]
    assert [len(line) - len(line.lstrip()) for line in lines] == [0, 4, 2, 6]
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())


def test_a_terminal_shows_the_phase_while_it_lasts_and_lines_above_it():
    stream = Terminal()
    said = "[bold] is no markup, and a line that is longer than the terminal is not wrapped " * 2
    with display.opened(stream):
        with display.phase("compiling"):
            time.sleep(0.7)
            assert "compiling" in stream.getvalue() and "━" in stream.getvalue()
        display.say(said)
    assert "compiling: 0." in stream.getvalue()
    assert said in stream.getvalue()


def test_a_terminal_of_80_columns_wraps_neither_bars_nor_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    words = ["step 99,990/100,000", "loss 10.1234", "left 10:00:00", "x" * 27]
    with display.opened(stream) as screen, display.phase("training") as phase:
        phase.show([*words, "y" * 20], 99_990, 100_000)
        screen.say(display.fitting([*words, "yy"], screen.width))
        time.sleep(0.7)
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")
    assert all(len(line) <= 80 for line in plain.split("\n"))
    bars = [line for line in plain.split("\n") if "━" in line and "step" in line]
    assert bars and all("left 10:00:00 ━" in line and "0:00:0" in line for line in bars)
    assert "  ".join(words) in plain and "yy" not in plain


def test_a_terminal_without_rich_gets_lines(monkeypatch):
    def absent(name):
        raise optional_dependencies.MissingExtra(name)

    monkeypatch.setattr(display.optional_dependencies, "load", absent)
    stream = Terminal()
    with display.opened(stream), display.phase("compiling") as phase:
        phase.show(["step 5"], 5, 97)
    assert stream.getvalue() == "compiling: 0.0 s\n"


SCREEN = """
import time
from experiments.harness.cli import display, help_text

with display.opened() as screen, display.phase("training") as phase:
    phase.show(["step 99,990/100,000", "loss 10.1234", "x" * 40], 99_990, 100_000)
    time.sleep(0.7)
    print("columns", screen.width, help_text._width())
"""


@pytest.mark.long
@pytest.mark.parametrize(("columns", "said"), [(0, "columns 79 80"), (61, "columns 60 61")])
def test_a_terminal_without_a_size_is_one_of_80_columns(columns, said):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    sizes = ("COLUMNS", "LINES")
    environment = {name: value for name, value in os.environ.items() if name not in sizes}
    call = [sys.executable, "-c", SCREEN]
    with subprocess.Popen(
        call, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as done:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while piece := os.read(ours, 4096):
                shown += piece
        os.close(ours)
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "\n", shown.decode()).replace("\r", "\n")
    lines = [line for line in plain.split("\n") if line]
    assert done.returncode == 0 and said in lines
    assert max(map(len, lines)) <= (columns or 80) and "Traceback" not in plain
    assert any("step 99,990/100,000" in line for line in lines)


def test_no_color_is_respected(monkeypatch):
    def shown():
        stream = Terminal()
        with display.opened(stream), display.phase("compiling") as phase:
            phase.show(["step 5"], 5, 97)
            display.say("above")
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    colored = shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38" in colored and "\x1b[38" not in shown()


def test_samples_longer_than_a_line_are_cut_unless_all_is_asked_for():
    sample = Sample("The dog sleeps.", "Wort " * 50, "Der Hund schläft.")
    first, second, third = sample_lines([sample])
    assert first == "source    The dog sleeps." and third == "  right   Der Hund schläft."
    assert len(second) == 79 and second.startswith("  model   Wort Wort")
    assert sample_lines([sample], None)[1] == "  model   " + "Wort " * 50


def test_a_command_without_a_screen_says_on_a_terminal_alone_what_it_waits_for(monkeypatch):
    for kind, said in ((Terminal, "reading a run: 0.0 s"), (io.StringIO, "")):
        monkeypatch.setattr("sys.stderr", kind())
        with display.waiting("reading a run"):
            pass
        shown = sys.stderr.getvalue()
        assert said in shown if said else not shown
