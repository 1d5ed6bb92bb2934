"""Prompts on a terminal, and what a finished run says of itself."""

import errno
import hashlib
import os
import shlex
from types import SimpleNamespace

import pytest

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import text_io
from experiments.harness.runs.sample_tables import lines_digest, read_table, write_table
from experiments.translation.corpus import Text
from experiments.translation.known_words import (
    read_known_words,
    unknown_words,
    words_of,
    write_known_words,
)
from experiments.translation.samples import chosen_samples
from experiments.translation.score_report import describe_run
from jaxformer import storage
from jaxformer.errors import DataError


@pytest.fixture
def type_lines(monkeypatch):
    def give(*lines):
        waiting = iter(lines)

        def read(prompt):
            try:
                return next(waiting)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)

    return give


def test_each_typed_line_is_answered_and_a_refused_one_does_not_end_it(type_lines, capsys):
    type_lines("a dog", "  ", "too long", "a bird")

    def answer(line):
        if line == "too long":
            raise DataError("the line is too long")
        print(line.upper())

    text_io.answer_lines("a sentence", answer)
    said = capsys.readouterr()
    assert said.out == "Type a sentence; Ctrl-D ends.\nA DOG\nA BIRD\n\n"
    assert said.err == "error: the line is too long\n"


def test_a_file_on_a_full_disk_is_named(capsys):
    def main():
        with storage.naming("translations.txt"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert cli.run(main) == 74
    assert capsys.readouterr().err == "error: translations.txt: No space left on device\n"


@pytest.mark.parametrize("count", [0, 1, 10_000, 10_001, 25_003])
def test_the_digest_of_a_large_text_is_that_of_its_lines_joined(count):
    lines = [f"ü{number}" for number in range(count)]
    joined = f"{count}\n" + "\n".join(lines) + "1\nx"
    assert lines_digest(lines, ["x"]) == hashlib.sha256(joined.encode()).hexdigest()


def test_a_prompt_is_bold_on_a_terminal_and_plain_elsewhere(monkeypatch):
    assert display.bold("a dog") == "a dog", "pytest's standard output is no terminal"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert display.bold("a dog") == "\x1b[1ma dog\x1b[0m" and display.bold("") == ""
    monkeypatch.setenv("TERM", "dumb")
    assert display.bold("a dog") == "a dog"


def test_words_that_the_training_text_lacks_are_named_once_in_lower_case(tmp_path):
    (tmp_path / "data").mkdir()
    write_known_words(tmp_path / "data", ["The dog's dog sleeps.", "A dog, 17 birds"])
    known = read_known_words(tmp_path)
    assert known[0] == "dog" and set(known) == {"the", "dog's", "dog", "sleeps", "a", "birds"}
    assert unknown_words(known, "Hello dog, HELLO the World 3") == ["hello", "world"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("मैं हिन्दी पढ़ता हूँ।", ["मैं", "हिन्दी", "पढ़ता", "हूँ"]),
        ("น้ำ", ["น้ำ"]),
        ("Cafe\u0301 17", ["cafe\u0301"]),
        ("می\u200cروم", ["می\u200cروم"]),
        ("L'été, porte-clés", ["l'été", "porte-clés"]),
        ("_a1b", ["a", "b"]),
    ],
)
def test_a_word_keeps_its_vowel_signs_and_accents(line, words):
    assert words_of(line) == words


def test_every_word_of_a_large_text_is_known(tmp_path):
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [a + b + c + d for a in letters for b in letters for c in letters for d in letters[:6]]
    assert len(words) > 100_000
    (tmp_path / "data").mkdir()
    write_known_words(tmp_path / "data", [" ".join(words), "the dog"])
    assert unknown_words(read_known_words(tmp_path), f"{words[-1]} {words[0]} dog cat") == ["cat"]


def test_a_folder_without_its_words_names_none(tmp_path):
    assert unknown_words(read_known_words(tmp_path), "Hello") == []


def test_three_samples_are_shown_of_different_length_and_fewer_of_a_small_text():
    lines = [letter * length for length, letter in ((9, "a"), (2, "b"), (5, "c"), (7, "d"))]
    found = chosen_samples(Text(lines, lines[::-1]), [line.upper() for line in lines])
    assert [sample.source for sample in found] == [lines[2], lines[3], lines[0]]
    assert found[2].model == "A" * 9 and found[2].reference == "d" * 7
    assert len(chosen_samples(Text(["x"], ["y"]), ["z"])) == 1


def test_a_table_of_samples_is_read_as_it_was_written_but_for_tabs_and_line_feeds(tmp_path):
    write_table(tmp_path / "a.tsv", {"source": ["a\tb", ""], "model": ["c\nd", "ü"]})
    assert read_table(tmp_path / "a.tsv") == {"source": ["a b", ""], "model": ["c d", "ü"]}


def test_a_finished_run_names_its_words_its_files_and_commands_with_real_arguments(tmp_path):
    folder = tmp_path / "my runs"
    for path in (folder / "data", folder / "samples"):
        path.mkdir(parents=True)
    (folder / "samples" / "test.tsv").write_text("source\n")
    words = [first + second + "ing" for first in "abcdefg" for second in "klmnopq"]
    write_known_words(folder / "data", words)
    scores = {"sentences": 1_234, "exact": 0.5, "bleu": 12.345, "chrf": 6.7}
    scores |= {"bleu_signature": "tok:13a", "chrf_signature": "nc:6"}
    config = SimpleNamespace(data=SimpleNamespace(target_language="de"), init_from="")
    run, text = SimpleNamespace(folder=folder, config=config), Text(["a dog", "x"], ["y", "z"])
    told = describe_run(run, "test", text, scores, ["y", "x"])
    for bleu, praise in (
        (9.9, "not learned to translate"),
        (29.9, "in part"),
        (30.0, "learned to"),
    ):
        said = describe_run(run, "test", text, scores | {"bleu": bleu}, ["y", "x"])
        assert praise in said and ("has learned" in said) == (bleu >= 30)
    assert "test: 1,234 sentences, 50.0% ± 50.0% exactly right" in " ".join(told.split())
    assert "Its training text has 49 words" in " ".join(told.split()) and "samples/test.tsv" in told
    assert "scores.json" not in told, "a file that is not there is not named"
    assert "nonsense" not in told, "a model of a large text translates new sentences"
    commands = [shlex.split(line) for line in told.splitlines() if line.startswith("  python")]
    assert [command[3:] for command in commands] == [["--run", str(folder)], ["page", str(folder)]]
