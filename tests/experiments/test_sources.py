"""Text by a name: records, data sets of a hub and functions of one's own."""

import gzip
import json
import os

import numpy as np
import pytest

from experiments.harness.runs import sources
from experiments.harness.runs.records import read_fields
from experiments.harness.runs.sample_tables import lines_digest
from experiments.harness.runs.source_kinds import kind_of
from experiments.harness.runs.text_cache import TextCache
from experiments.language_modelling import corpus as language_corpus
from experiments.language_modelling.presets import DataConfig as LanguageData
from experiments.translation.corpus import Text, open_corpus, read_files
from experiments.translation.presets import DataConfig, Files
from jaxformer.errors import ConfigError, DataError

PAIRS = [("a dog", "ein Hund"), ("a cat", "eine Katze"), ("trees", "Bäume")]


def one_pair():
    return [("x", "y")]


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in PAIRS))
    return path


def files(path, **fields):
    return Files(str(path), source_field="en", target_field="de", **fields)


def test_one_name_holds_both_sides_of_pairs(records, tmp_path):
    expected = Text(*map(list, zip(*PAIRS, strict=True)))
    assert read_files(files(records)) == expected
    (tmp_path / "a.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS))
    assert read_files(Files(str(tmp_path / "a.tsv"))) == expected
    (tmp_path / "a.de").write_text("".join(f"{b}\n" for _, b in PAIRS))
    assert read_files(files(records, target=str(tmp_path / "a.de"))) == expected
    assert read_files(Files(f"{__name__}:one_pair")) == Text(["x"], ["y"])


def test_sides_that_do_not_fit_are_refused(records, tmp_path):
    (tmp_path / "a.de").write_text("Hund\n")
    with pytest.raises(DataError, match="a.de"):
        read_files(files(records, target=str(tmp_path / "a.de")))
    with pytest.raises(ConfigError, match="source='a.txt' and target=''"):
        read_files(Files("a.txt"))


def test_documents_may_be_records_beside_files(records, tmp_path):
    (tmp_path / "b.txt").write_text("sun\n\nmoon\n")
    names = (str(records), str(tmp_path / "b.txt"))
    config = LanguageData(train=names, validation=names, split="blank_line", text_field="de")
    part = language_corpus.load_corpus(config, TextCache(tmp_path / "texts")).train
    found = ["".join(document) for document in part.documents()]
    assert found == ["ein Hund", "eine Katze", "Bäume", "sun", "moon"]
    whole = "".join(found)
    cut = part._replace(start=5, stop=len(whole) - 2)
    assert "".join(b for d in cut.documents() for b in d) == whole[5:-2]


def test_a_corpus_of_records_is_kept_and_edited_records_are_another(records, tmp_path):
    cache = TextCache(tmp_path / "texts")
    data = DataConfig(train=files(records), validation=Files(f"{__name__}:one_pair"))
    first = open_corpus(data, cache)
    assert first.train() == open_corpus(data).train() and first.validation == Text(["x"], ["y"])
    assert open_corpus(data, cache).fingerprint == first.fingerprint
    records.write_text(records.read_text().replace("dog", "fox"))
    assert open_corpus(data, cache).fingerprint != first.fingerprint


def test_a_data_set_is_known_by_its_texts_wherever_it_lies(tmp_path):
    library = pytest.importorskip("datasets", reason="needs the extra data")
    cache, known = TextCache(tmp_path / "texts"), []
    for place, last in (("one", "moon"), ("two", "moon"), ("three", "star")):
        rows = [{"text": "sun", "pair": {"de": "a"}, "n": 1}, {"text": last, "pair": {}, "n": 2}]
        library.Dataset.from_list(rows).save_to_disk(tmp_path / place)
        name = f"hf:{tmp_path / place}"
        known.append(sources.identity(name, cache))
        assert sources.identity(name, TextCache()) == known[-1] == sources.identity(name, cache)
    assert known[0] == known[1] != known[2]


def test_a_data_set_of_the_hub_is_read_from_a_folder_or_as_it_was_saved(records, tmp_path):
    library = pytest.importorskip("datasets", reason="needs the extra data")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "validation.jsonl").write_text(records.read_text())
    name = f"hf:{folder}@validation"
    assert list(sources.read_texts(name, "de")) == [b for _, b in PAIRS]
    assert [a for a, _ in sources.iterate_both(name, ("en", "de"))] == [a for a, _ in PAIRS]
    cache = TextCache(tmp_path / "texts")
    assert sources.identity(name, cache) == sources.identity(name, cache)
    with pytest.raises(DataError, match="validation:0: .*'text'"):
        list(sources.read_texts(name, "text"))
    with pytest.raises(DataError, match="hf:.*absent"):
        list(sources.read_texts(f"hf:{tmp_path}/absent", "text"))
    rows = library.Dataset.from_list([{"text": "sun"}, {"text": "moon"}])
    rows.save_to_disk(tmp_path / "one")
    library.DatasetDict({"test": rows}).save_to_disk(tmp_path / "several")
    for name in (f"hf:{tmp_path}/one", f"hf:{tmp_path}/several@test"):
        assert list(sources.read_texts(name, "text")) == ["sun", "moon"]


ROWS = [
    {"id": 3, "translation": {"en": "a dog\u2028sees", "de": "ein Hund"}, "note": "x\ny"},
    {"id": 5, "translation": {"en": "", "de": "Käse"}, "note": "z"},
]
EXPECTED = [("a dog\u2028sees", "x\ny"), ("", "z")]


def written(path, rows=ROWS):
    lines = "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in rows)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="needs the extra data")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_bytes(lines.encode())
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.JSONL", "a.jsonl.gz", "c4.json", "c4.json.gz", "a.parquet"]
)
def test_the_fields_of_each_record_are_read_in_order(tmp_path, name):
    path = written(tmp_path / name)
    assert kind_of(path) == ("parquet" if name == "a.parquet" else "json lines")
    assert list(read_fields(path, ("translation.en", "note"))) == EXPECTED


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_column_whose_name_has_dots_is_a_field(tmp_path, name):
    rows = [{"translation.en": f"{i}", "translation": {"de": f"{i + 7}"}} for i in range(3)]
    path = written(tmp_path / name, rows)
    fields = ("translation.de", "translation.en")
    assert list(read_fields(path, fields)) == [("7", "0"), ("8", "1"), ("9", "2")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "field, said",
    [
        ("text", "'text'"),
        ("translation.fr", "'translation.fr'"),
        ("id", "the field 'id'"),
    ],
)
def test_a_field_that_is_no_text_is_named_with_its_record(tmp_path, name, field, said):
    path = written(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}:1: .*{said}"):
        list(read_fields(path, (field,)))


def test_what_is_no_record_is_named_with_its_line(tmp_path):
    (tmp_path / "half.jsonl").write_text('{"text": "sun"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(DataError, match="half.jsonl:2: .*'text'"):
        list(sources.read_texts(str(tmp_path / "half.jsonl"), "text"))
    path = written(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + b'{"id": ')
    with pytest.raises(DataError, match="a.jsonl:5: "):
        list(read_fields(path, ("note",)))
    path.write_text("\n")
    with pytest.raises(DataError, match="no records"):
        list(read_fields(path, ("note",)))
    pytest.importorskip("pyarrow", reason="needs the extra data")
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match="a.parquet: "):
        list(read_fields(tmp_path / "a.parquet", ("note",)))


GIVEN = None


def given():
    return GIVEN


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "given"),
        (None, "given must give texts or pairs of texts, got None"),
        ([3], "given, item 1"),
        ([("a", "b", "c")], "given, item 1"),
        ([("a", "\ud83d")], "given, item 1"),
    ],
)
def test_a_function_that_gives_no_pairs_is_named_with_what_it_gave(items, said, monkeypatch):
    monkeypatch.setattr(f"{__name__}.GIVEN", items)
    with pytest.raises(DataError, match=said):
        list(sources.iterate_both(f"{__name__}:given", ("source", "target")))


def test_a_file_that_is_there_is_no_function_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wmt:train").write_text("a dog\n")
    assert list(sources.read_texts("wmt:train", "text")) == ["a dog"]


def test_a_file_is_what_it_holds_and_is_another_text_if_it_is_read_in_another_way(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("sun", "moon"))
    cache = TextCache(tmp_path / "texts")
    for name in ("web.txt", "web.jsonl", "web.json"):
        (tmp_path / name).write_text(lines)
    read = [list(sources.read_texts(str(tmp_path / x), "text")) for x in ("web.jsonl", "web.json")]
    assert read == [["sun", "moon"]] * 2
    names = [
        sources.identity(str(tmp_path / x), cache) for x in ("web.txt", "web.jsonl", "web.json")
    ]
    assert names[0] != names[1] == names[2]
    for text in ('{\n"text": "sun"\n}', '["sun"]', "sun"):
        (tmp_path / "web.json").write_text(text)
        with pytest.raises(DataError, match="web.json: "):
            list(sources.read_texts(str(tmp_path / "web.json"), "text"))
    (tmp_path / "a.tsv").write_text("a\tb\n")
    with pytest.raises(ConfigError, match="a.tsv"):
        sources.read_texts(str(tmp_path / "a.tsv"), "text")


def test_a_text_that_is_not_there_or_can_be_read_once_has_no_identity(tmp_path):
    cache = TextCache(tmp_path / "texts")
    with pytest.raises(DataError, match="absent.txt"):
        sources.identity(str(tmp_path / "absent.txt"), cache)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe"):
        sources.identity(str(tmp_path / "pipe"), cache)


DOCUMENTS = [f"document {number} of {number * number}" for number in range(293)]
calls: list[int] = []


def shuffled_documents():
    """The same documents in another order at each call."""
    calls.append(len(calls))
    order = np.random.default_rng(len(calls)).permutation(len(DOCUMENTS))
    yield from (DOCUMENTS[i] for i in order)


def shuffled_pairs():
    """The same pairs in another order at each call."""
    yield from ((text, text[::-1]) for text in shuffled_documents())


def test_own_documents_in_another_order_at_each_call_are_held_out_of_what_is_trained_on(tmp_path):
    calls.clear()
    config = LanguageData(train=("tests.experiments.test_sources:shuffled_documents",))
    parts = language_corpus.load_corpus(config, TextCache(tmp_path))
    train, validation = (
        ["".join(document) for document in part.documents()]
        for part in (parts.train, parts.validation)
    )
    again = ["".join(document) for document in parts.train.documents()]
    assert len(calls) == 1 and train == again
    assert sorted("".join(train + validation)) == sorted("".join(DOCUMENTS))
    assert validation and not set(validation) & set(train)


@pytest.mark.parametrize("fields", [("source", "target"), ("pair.en", "pair.de")])
def test_own_pairs_in_another_order_at_each_call_are_read_at_one_call(tmp_path, fields):
    calls.clear()
    name = "tests.experiments.test_sources:shuffled_pairs"
    config = DataConfig(train=Files(name, "", *fields), corpus="files")
    opened = open_corpus(config, TextCache(tmp_path))
    train = opened.train()
    assert len(calls) == 1 and opened.fingerprint == lines_digest(*train)
    assert train == opened.train() and train.source == [text[::-1] for text in train.target]
    assert sorted([*train.source, *opened.validation.source]) == sorted(DOCUMENTS)


@pytest.mark.parametrize("header", ["source\ttarget", "SRC\tTGT\tscore", " src \ttrg"])
def test_a_first_line_that_names_the_sides_of_pairs_is_no_pair(header, tmp_path):
    path, fields = tmp_path / "a.tsv", ("source", "target")
    path.write_text(f"{header}\nsun\tSonne\n{header}\n")
    first, second = sources.iterate_both(str(path), fields)
    assert first == ("sun", "Sonne") and second == tuple(header.split("\t")[:2])
    path.write_text("Source\tQuelle\n")
    assert list(sources.iterate_both(str(path), fields)) == [("Source", "Quelle")]
