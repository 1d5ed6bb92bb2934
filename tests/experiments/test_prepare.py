"""Statistics of a text before training, and cleaning, against counts by hand."""

import json
import re
from dataclasses import replace

import pytest

from experiments.harness import cli
from experiments.harness.results import text_statistics
from experiments.language_modelling import prepare as language
from experiments.translation import clean
from experiments.translation import prepare as translation
from jaxformer.errors import ConfigError, DataError

HERE = __name__


def language_of(text):
    return "de" if "ein" in text else "en"


def called(main, capsys):
    assert cli.run(main) == 0
    return capsys.readouterr().out


def rows(out, part):
    """The rows of a part of a report: name -> value."""
    block = re.search(rf"^{part}\n((?:  .*\n?)+)", out, re.MULTILINE)
    assert block, out
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in block[1].splitlines())


def written(folder, name, pairs):
    for side, texts in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (folder / f"{name}.{side}").write_text("".join(f"{text}\n" for text in texts))


PAIRS = [(f"sun {i} moon", f"Sonne {i}") for i in range(97)]
ODD = [("sun 3 moon", "Sonne 3"), ("same", "same"), ("", "leer"), ("long " * 40, "lang")]
HELD_OUT = [("sun 5 moon", "Sonne 5"), ("sun 5 moon", "anders"), ("star §", "Stern")]


def test_the_report_of_pairs_counts_what_is_there(tmp_path, capsys):
    written(tmp_path, "train", PAIRS + ODD)
    written(tmp_path, "val", HELD_OUT)
    words = f"""--statistics --data.tokenizer words --model.vocab_size 283 --model.max_len 31
        --runs {tmp_path}/runs"""
    for part, name in (("train", "train"), ("validation", "val")):
        words += f" --data.{part}.source {tmp_path}/{name}.en"
        words += f" --data.{part}.target {tmp_path}/{name}.de"
    config = cli.parse(translation.OPTIONS, words.split())
    found = called(lambda: translation.main(config), capsys)
    source, pairs = rows(found, "train source"), rows(found, "train pairs")
    assert source["texts"] == "101" and source["words"] == f"{98 * 3 + 1 + 40:,}"
    assert pairs["same as an earlier pair"] == pairs["same text on both sides"] == "1 (0.99%)"
    assert source["without tokens"] == source["longer than 30 tokens"] == "1 (0.99%)"
    assert source["tokens a text"] == "1 / 3 / 3 / 3 / 40"
    pairs = rows(found, "validation pairs")
    assert pairs["source in the training text"] == "2 (66.67%)"
    assert pairs["pair in the training text"] == "1 (33.33%)"
    assert rows(found, "validation source")["tokens unknown"].startswith("2 ("), "star and §"


def test_the_report_of_documents_counts_what_is_there(tmp_path, capsys):
    line = "the sun goes up over the hill\n"
    (tmp_path / "a.txt").write_text(f"{line}{line}short\n\n" + "moon and stars and rain " * 5)
    (tmp_path / "b.txt").write_text(f"{line}short\n\nanother line that is not known\n\nshort")
    words = f"""--statistics --data.train {tmp_path}/a.txt --data.validation {tmp_path}/b.txt
        --data.split blank_line --data.tokenizer words --model.vocab_size 283 --data.seq_len 19
        --data.batch_size 3 --model.max_len 23 --runs {tmp_path}/runs"""
    config = cli.parse(language.OPTIONS, words.split())
    found = called(lambda: language.main(config), capsys)
    train, validation = rows(found, "train"), rows(found, "validation")
    assert train["texts"] == "2" and train["words"] == str(15 + 25)
    assert train["same as an earlier line"] == "1 (33.33%)"
    assert train["longer than 19 tokens"] == "1 (50.00%)"
    assert validation["texts"] == "3"
    assert validation["lines in the training text"] == "1 (50.00%)"
    assert validation["tokens unknown"].startswith("6 ("), "another line that is not known"


def options(folder, **more):
    sides = {"source": f"{folder}/a.en", "target": f"{folder}/a.de"}
    return clean.CleanOptions(output=str(folder / "out"), **{**sides, **more})


DIRTY = [
    *(("a dog", "ein Hund"), ("a dog", "ein Hund"), ("a dog", "ein Tier"), (" ", "leer")),
    *(("OK", "OK"), ("one two three four five six", "ein"), ("x " * 13, "ein " * 12)),
    *(("ein Hund", "ein Hund!"), ("trees", "Bäume\u2028")),
]


def test_each_pair_is_dropped_for_the_first_reason_that_applies(tmp_path, capsys):
    written(tmp_path, "a", DIRTY)
    found = options(tmp_path, max_words=12, language_id=f"{HERE}:language_of")
    out = called(lambda: clean.main(found), capsys)
    counts = {"kept": 2, "empty": 1, "same text on both sides": 1, "too long": 1}
    counts |= {"length ratio": 1, "language": 2, "duplicate": 1}
    assert json.loads(out.splitlines()[-1]) == {"pairs": 9, **counts}
    assert "duplicate                1 (11.11%)" in out
    assert (tmp_path / "out.source").read_text() == "a dog\na dog\n"
    assert (tmp_path / "out.target").read_text() == "ein Hund\nein Tier\n"
    assert sorted(path.name for path in tmp_path.iterdir() if "unfinished" in path.name) == []


def test_nothing_is_dropped_where_no_check_is_asked_for_but_the_empty(tmp_path):
    written(tmp_path, "a", DIRTY)
    every = options(tmp_path, max_words=0, max_ratio=0.0, keep_duplicates=True, keep_copies=True)
    assert clean.clean(every) == {"kept": 8, "empty": 1}
    assert "Bäume\u2028\n" in (tmp_path / "out.target").read_text()


def test_sides_of_unequal_length_and_no_files_are_refused(tmp_path):
    written(tmp_path, "a", DIRTY)
    (tmp_path / "a.de").write_text("ein Hund\n")
    with pytest.raises(DataError, match="a.de ends before text 2 of the other side"):
        clean.clean(options(tmp_path))
    with pytest.raises(ConfigError, match="give --source FILE and --target FILE"):
        clean.clean(replace(options(tmp_path), source=""))


def test_repeated_and_contained_texts_are_counted_as_sets_count_them():
    texts = ["a", "b", "a", "", "a"]
    digests = text_statistics.digests(texts)
    assert text_statistics.repeated(digests) == "2 (40.00%)"
    assert text_statistics.contained(texts, text_statistics.digests(["a", "c"])) == "3 (60.00%)"
