"""Lines of a text in one block of memory."""

import pytest

from experiments.harness.runs.compact_lines import CompactLines

LINES = ["", "eins", "Grüße \u2028 \x00\r", "", "\U0001f600", "\ud83d alone", "zwei\n"]


def test_lines_are_what_was_put_in_however_they_are_read():
    lines = CompactLines(LINES)
    assert list(lines) == LINES and len(lines) == 7
    assert [lines[i] for i in range(-7, 7)] == LINES + LINES
    for part in (slice(None), slice(2, 5), slice(None, None, -2), slice(5, 99), slice(3, 3)):
        assert lines[part] == LINES[part]
    for index in (7, -8):
        with pytest.raises(IndexError):
            lines[index]
    lines.append("drei")
    assert lines[-1] == "drei" and lines[6] == "zwei\n" and "drei" in lines


def test_lines_equal_a_list_of_the_same_lines_and_no_other():
    lines = CompactLines(LINES)
    assert lines == LINES and LINES == lines and lines == CompactLines(LINES)
    assert lines != LINES[:-1] and lines != [*LINES[:-1], "zwei"] and lines != [*LINES, ""]
    assert CompactLines() == [] and CompactLines() != "" and CompactLines(["a"]) != "a"
