"""The text of the translation experiment: where it comes from, how it is split, named settings."""

import dataclasses
import shutil
import tracemalloc
from collections import Counter

import pytest

from experiments.harness.runs import run_folder
from experiments.harness.runs.text_cache import TextCache
from experiments.harness.training import training_config
from experiments.translation import corpus, known_words
from experiments.translation.corpus import GRAMMAR, Text, fingerprint, open_corpus
from experiments.translation.prepare import prepare
from experiments.translation.presets import PRESETS, DataConfig, Files, TranslationConfig
from jaxformer.errors import ConfigError


def write(folder, name, pairs):
    files = []
    for side, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        path = folder / f"{name}.{side}"
        path.write_text("".join(f"{line}\n" for line in lines))
        files.append(str(path))
    return Files(*files)


def load_corpus(config):
    """Training, validation and test text."""
    opened = open_corpus(config)
    return opened.train(), *opened[2:]


def pairs_of(text):
    return list(zip(*text, strict=True))


def test_the_fingerprint_is_that_of_the_text_and_of_nothing_else():
    text = Text(["a", "b c"], ["d", "e"])
    assert fingerprint(text) == fingerprint(Text(["a", "b c"], ["d", "e"]))
    others = [
        Text(["a", "b d"], ["d", "e"]),
        Text(["b c", "a"], ["e", "d"]),
        Text(["d", "e"], ["a", "b c"]),
        Text(["a", "b c", ""], ["d", "e", ""]),
        Text(["a", "b c", "d"], ["e"]),
    ]
    assert len({fingerprint(other) for other in [text, *others]}) == 6


def test_ones_own_pairs_are_set_aside_by_their_source_whatever_the_order(tmp_path):
    pairs = [(f"sentence {i % 1_999}", f"Satz {i}") for i in range(2_999)]
    train_text, validation, test = load_corpus(DataConfig(train=write(tmp_path, "a", pairs)))
    assert test == Text([], [])
    aside, train = set(validation.source), set(train_text.source)
    assert 20 < len(aside) < 60, "about one in fifty"
    assert not aside & train, "a source stands on one side only"
    assert sorted(pairs_of(train_text) + pairs_of(validation)) == sorted(pairs)
    backwards = open_corpus(DataConfig(train=write(tmp_path, "b", pairs[::-1])))
    assert set(backwards.validation.source) == aside


def test_at_most_a_thousand_sources_are_set_aside_and_none_of_them_trains(tmp_path):
    pairs = [(f"sentence {i % 53_003}", f"Satz {i}") for i in range(59_009)]
    train, validation, _ = load_corpus(DataConfig(train=write(tmp_path, "a", pairs)))
    assert len(set(validation.source)) == 1_000 < len(validation.source)
    assert not set(train.source) & set(validation.source)


@pytest.fixture
def small_grammar(monkeypatch):
    """The built-in text, of one pair a part."""
    text = Text(["a"], ["b"]), Text(["c"], ["d"]), Text(["e"], ["f"])
    files = corpus.BUILT_IN["grammar"].files
    monkeypatch.setitem(corpus.BUILT_IN, "grammar", corpus.BuiltIn(lambda: text, files))
    return text


def test_files_of_ones_own_replace_the_part_they_are_given_for(tmp_path, small_grammar):
    own = write(tmp_path, "own", [("g", "h")])
    assert load_corpus(DataConfig()) == small_grammar
    assert load_corpus(DataConfig(test=own)) == (*small_grammar[:2], Text(["g"], ["h"]))
    whole = load_corpus(DataConfig(train=own, validation=own))
    assert whole == (Text(["g"], ["h"]), Text(["g"], ["h"]), Text([], []))


def test_a_change_of_any_file_of_the_grammar_makes_its_text_anew(tmp_path, monkeypatch):
    folder = tmp_path / "grammar"
    shutil.copytree(GRAMMAR, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(corpus, "GRAMMAR", folder)
    made = []
    files = corpus.BUILT_IN["grammar"].files

    def load():
        made.append(1)
        return (Text([str(len(made))], ["b"]),) * 3

    monkeypatch.setitem(corpus.BUILT_IN, "grammar", corpus.BuiltIn(load, files))
    cache = TextCache(tmp_path / "texts")
    paths = [path for path in folder.rglob("*.*") if path.suffix in (".py", ".txt")]
    assert any(path.name == "nouns.txt" for path in paths)
    for count, path in enumerate([paths[0], *paths], start=0):
        if count:
            path.write_text(path.read_text() + "\n")
        for _ in range(2):  # the second time it comes from the cache
            open_corpus(DataConfig(), cache)
        assert len(made) == count + 1, path


def test_a_run_in_lower_case_prepares_no_other(tmp_path):
    own = write(tmp_path, "own", [("A Dog", "Ein Hund"), ("THE dog", "DER Hund"), ("dog", "Öl")])
    data = DataConfig(train=own, validation=own, test=own, lowercase=True)
    small = dataclasses.replace(PRESETS["grammar"].model, vocab_size=270)
    config = dataclasses.replace(
        PRESETS["grammar"], data=data, model=small, text_cache_dir=str(tmp_path / "texts")
    )
    for given in (data, dataclasses.replace(data, lowercase=False)):  # the cache keeps them apart
        train, validation, test = load_corpus(given)
        opened = open_corpus(given, training_config.text_cache(config))
        assert (opened.train(), opened.validation, opened.test) == (train, validation, test)
        assert opened.fingerprint == fingerprint(train)
        assert (train.target[1] == "der hund") == given.lowercase
        assert test.source[0] == ("a dog" if given.lowercase else "A Dog")
    with pytest.raises(ConfigError, match="lowercase=True .*'words'"):
        DataConfig(lowercase=True, tokenizer="words")
    prepared = prepare(config, tmp_path / "run")
    assert prepared.validation.target[2] == "öl"
    assert prepared.source_tokenizer.encode("A DOG") == prepared.source_tokenizer.encode("a dog")


def test_multi30k_has_its_published_sizes(real_data):
    parts = load_corpus(DataConfig(corpus="multi30k"))
    sizes = [len(part.source) for part in parts]
    assert sizes == [len(part.target) for part in parts] == [29_000, 1_014, 1_000]


def test_no_tatoeba_sentence_is_trained_on_and_tested(real_data):
    train, validation, test = load_corpus(DataConfig(corpus="tatoeba"))
    sources = [set(part.source) for part in (train, validation, test)]
    assert not sources[0] & sources[1] and not sources[0] & sources[2]
    assert not sources[1] & sources[2]
    for part in (validation, test):
        assert len(set(part.source)) == len(part.source) > 1_000
    assert len(train.source) > 100_000


def test_every_preset_can_be_written_to_a_run_and_read_back(tmp_path):
    names = "grammar grammar_marian multi30k_tiny multi30k_lower multi30k_base tatoeba wmt14_base"
    names += " wmt14_base_marian wmt14_big summaries translations"
    assert list(PRESETS) == names.split()
    for name, preset in PRESETS.items():
        assert preset.name == name
        run = run_folder.open_folder(tmp_path, "translation", name, preset)
        assert run_folder.load_config(run.folder, TranslationConfig) == preset


def test_the_words_of_a_text_are_counted_as_its_lines_give_them(tmp_path):
    """Each part between spaces is looked at once: the words and their order are the same."""
    lines = [
        "The dog's bone, the DOG!",
        "ΟΔΟΣ, ΑΣ Σ\u2003ΣΑΣ'Σ",
        "don't-do it\u00a0it",
        "a\x1cb a 3 _x_",
    ]
    lines += ["नमस्ते दुनिया नमस्ते", "İstanbul", "the the"]
    expected = Counter(word for line in lines for word in known_words.words_of(line))
    (tmp_path / "data").mkdir()
    known_words.write_known_words(tmp_path / "data", lines)
    assert known_words.read_known_words(tmp_path) == [word for word, _ in expected.most_common()]


def many_pairs(folder, count):
    """Files of `count` short pairs, among them blank lines and ones that end in CR or hold U+2028.

    Some sources come again with another translation.
    """
    numbers = [i * i % 4_001 for i in range(count)]
    source = [f"{'ab'[i % 2]} {n} \u2028{n % 7}" if n % 13 else "" for i, n in enumerate(numbers)]
    target = [f"Ü{n}-{i % 17}\r" if n % 11 else f" {n}" for i, n in enumerate(numbers)]
    paths = folder / "many.en", folder / "many.de"
    for path, lines in zip(paths, (source, target), strict=True):
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return Files(*map(str, paths))


def test_digests_ids_and_what_is_set_aside_stay_as_they_were_recorded(tmp_path):
    """The recorded values are of a version that kept each line as a string of Python."""
    data = DataConfig(train=many_pairs(tmp_path, 7_919), tokenizer="characters")
    opened = open_corpus(data)
    assert opened.fingerprint[:16] == "88b83d9aadee996c"
    assert len(opened.validation.source) == 148
    assert fingerprint(opened.validation)[:16] == "38b429bea0f48732"
    grammar = PRESETS["grammar"]
    config = dataclasses.replace(
        grammar, data=data, runs=str(tmp_path), name="many", text_cache_dir="texts"
    )
    prepared = prepare(config, tmp_path / "translation" / "many")
    ids = prepared.batches.source.fingerprint, prepared.batches.target.fingerprint
    assert [x[:16] for x in ids] == ["b9ac5c154c71c809", "5f3efdf7f1c6bb64"]
    assert prepared.batches.fingerprint[:16] == "ab36c11ee9f5cd4e"
    lower = open_corpus(dataclasses.replace(data, tokenizer="bpe", lowercase=True))
    assert lower.fingerprint[:16] == "4ced068b1980fba5"
    assert lower.train() == Text(*([x.lower() for x in side] for side in opened.train()))


def test_a_text_to_train_on_takes_little_more_memory_than_its_files(tmp_path):
    files = many_pairs(tmp_path, 50_021)
    size = sum(path.stat().st_size for path in tmp_path.glob("many.*"))
    tracemalloc.start()
    try:
        train = open_corpus(DataConfig(train=files)).train()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(train.source) == len(train.target) > 49_000
    eight_bytes_a_line = 8 * 2 * len(train.source)
    assert held < 1.3 * (size + eight_bytes_a_line), "strings of Python take five times as much"
    assert peak < 2.3 * (size + eight_bytes_a_line)
