"""Text by a name: records, data sets of a hub, test sets and functions of one's own."""

import json

import pytest

from experiments.harness.runs import sources
from experiments.harness.runs.text_cache import TextCache
from experiments.language_modelling import corpus as language_corpus
from experiments.language_modelling.presets import DataConfig as LanguageData
from experiments.translation.corpus import Text, open_corpus, read_files
from experiments.translation.presets import DataConfig, Files
from jaxformer.errors import ConfigError, DataError

PAIRS = [("a dog", "ein Hund"), ("a cat", "eine Katze"), ("trees", "Bäume")]


def one_pair():
    return [("x", "y")]


def numbers():
    return [3]


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
    with pytest.raises(DataError, match="has 3 texts and .*a.de has 1: text i of one must"):
        read_files(files(records, target=str(tmp_path / "a.de")))
    with pytest.raises(ConfigError, match="needs both files, but source='a.txt' and target=''"):
        read_files(Files("a.txt"))
    with pytest.raises(DataError, match="must give texts or pairs of texts, got 3"):
        read_files(Files(f"{__name__}:numbers"))


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


def test_a_data_set_of_the_hub_is_read_from_a_folder(records, tmp_path):
    pytest.importorskip("datasets", reason="needs the extra data")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "validation.jsonl").write_text(records.read_text())
    name = f"hf:{folder}@validation"
    assert list(sources.read_texts(name, "de")) == [b for _, b in PAIRS]
    assert sources.read_both(name, ("en", "de"))[0] == [a for a, _ in PAIRS]
    cache = TextCache(tmp_path / "texts")
    assert sources.identity(name, cache) == sources.identity(name, cache)
    with pytest.raises(DataError, match="validation:0: there is no field 'text', but en, de"):
        list(sources.read_texts(name, "text"))
    with pytest.raises(DataError, match="hf:.*absent could not be loaded: .*check the name"):
        list(sources.read_texts(f"hf:{tmp_path}/absent", "text"))


def test_a_test_set_of_sacrebleu_is_read_from_its_folder(tmp_path, monkeypatch):
    library = pytest.importorskip("sacrebleu.dataset")
    known = library.DATASETS["wmt17"]
    monkeypatch.setattr(known, "_outdir", str(tmp_path))
    monkeypatch.setattr(known, "_rawdir", str(tmp_path / "raw"))
    source, target = ("".join(f"{line}\n" for line in side) for side in zip(*PAIRS, strict=True))
    for field in known.fieldnames("en-de"):  # all of them are in that folder after a download
        path = tmp_path / f"wmt17.en-de.{field}"
        path.write_text({"src": source, "ref": target}.get(field, "-\n"))
    assert read_files(Files("sacrebleu:wmt17:en-de")) == Text(*map(list, zip(*PAIRS, strict=True)))


def test_a_test_set_that_is_not_there_is_named_with_those_that_are():
    pytest.importorskip("sacrebleu")
    with pytest.raises(ConfigError, match="has no test set 'wmt1': give one such as wmt"):
        read_files(Files("sacrebleu:wmt1:en-de"))
    with pytest.raises(ConfigError, match="the language pair 'en-xx' is none of .*en-de"):
        read_files(Files("sacrebleu:wmt17:en-xx"))


def test_a_test_set_without_a_network_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    library = pytest.importorskip("sacrebleu.dataset")
    known = library.DATASETS["wmt16"]
    monkeypatch.setattr(known, "_outdir", str(tmp_path))
    monkeypatch.setattr(known, "_rawdir", str(tmp_path / "raw"))
    monkeypatch.setattr(known, "data", ["http://127.0.0.1:9/absent.tgz"])
    with pytest.raises(DataError, match="could not be downloaded: check the network, or put"):
        read_files(Files("sacrebleu:wmt16:en-de"))
