"""Runs on ids that others made: nanoGPT's and llm.c's files, what decodes them, what is refused."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.harness.runs import downloads
from experiments.language_modelling import corpus, evaluate, prepare, train
from experiments.language_modelling.load_run import load_run
from experiments.language_modelling.presets import PRESETS
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.metrics import count_text
from jaxformer.text.tokenizers import train_bpe
from tests.experiments.commands import call, metrics_of, refused
from tests.experiments.tiny_runs import WORDS, language_config
from tests.experiments.trained_runs import shared_step
from tests.text.test_id_files import write_llm_c, write_nanogpt, write_npy

DOCUMENTS = [f"The {a} and the {b} é🙂.\nA {c}\n" for a in WORDS for b in WORDS for c in WORDS[:3]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer in a file, whose id 2 (<eos>) separates documents."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = train_bpe(DOCUMENTS, 283, prefix="")
    made.save(path)
    return made, path


@pytest.fixture
def ids(tokenizer, tmp_path):
    """Folder of training ids in two shards, and of validation and test ids."""
    made, path = tokenizer
    rows = [[made.special.eos, *made.encode(text)] for text in DOCUMENTS]
    whole, validation, test = rows[:400], rows[400:420], rows[420:]
    joined = np.concatenate(whole)
    write_llm_c(tmp_path / "w_train_000.bin", joined[:1009])
    write_llm_c(tmp_path / "w_train_001.bin", joined[1009:])
    write_nanogpt(tmp_path / "w_val.bin", np.concatenate(validation))
    write_npy(tmp_path / "w_test.npy", np.concatenate(test))
    return tmp_path


def config_of(ids: Path, tokenizer, **changes):
    options = {
        "data__train": (str(ids / "w_train_*.bin"),),
        "data__validation": (str(ids / "w_val.bin"),),
        "data__test": (str(ids / "w_test.npy"),),
        "data__tokenizer": str(tokenizer[1]),
        "data__document_id": 2,
        "name": "ids",
    }
    return language_config(ids, **options | changes)


def test_a_run_trains_on_shards_resumes_and_is_measured_without_a_copy(ids, tokenizer):
    config, command = config_of(ids, tokenizer), shared_step(train)
    whole = call(command, config)
    assert whole.code == 0, whole.err
    assert "tokens in 2 files, about one document in" in whole.out
    text = "".join(DOCUMENTS[400:420])
    sizes = f"validation: 20 documents, {len(text.split()) + text.count(chr(10)):,} words, "
    assert sizes + f"{len(text.encode()):,} bytes" in whole.out
    folder = Path(config.runs) / "language_modelling" / "ids"
    assert not list((folder / "data").glob("*.tokens"))
    stopped = replace(config, name="stopped")
    short = replace(stopped, optimizer=replace(config.optimizer, total_steps=4))
    assert call(command, replace(short, training=replace(config.training, save_every=2))).code == 0
    shutil.rmtree(max((folder.parent / "stopped" / "checkpoints").iterdir(), key=step_of))
    again = call(command, stopped)
    assert again.code == 0 and "from step 2 to 4" in again.out
    assert metrics_of(folder) == metrics_of(folder.parent / "stopped")
    assert json.loads((folder / "scores.json").read_text())["text"] == "test"
    measured = call(evaluate, {"--run": folder, "--part": "train"})
    assert measured.code == 0 and '"bits_per_byte"' in measured.out
    files = call(evaluate, {"--run": folder, "--files": ids / "w_val.bin"})
    part = call(evaluate, {"--run": folder, "--part": "validation"})
    one, other = (json.loads(done.out.splitlines()[-1]) for done in (files, part))
    assert one["nats"] == other["nats"] and one["bytes"] == other["bytes"] == len(text.encode())


def test_a_run_of_text_is_measured_on_ids_with_an_id_between_documents(causal_run, tmp_path):
    path = tmp_path / "x.bin"
    np.array([5, 2, 7, 9, 2, 11, 13, 17, 2, 19], np.uint16).tofile(path)
    options = {"--run": causal_run.folder, "--files": path}
    refused(call(evaluate, options), 2, "--document_id")
    done = call(evaluate, options | {"--document_id": 2})
    assert done.code == 0 and json.loads(done.out.splitlines()[-1])["tokens"] > 0, done.err
    text = {"--run": causal_run.folder, "--files": causal_run.text / "a.txt", "--document_id": 2}
    refused(call(evaluate, text), 2, "document_id=2 is for --files of ids")


def step_of(folder: Path) -> int:
    return int(folder.name) if folder.name.isdigit() else -1


def test_files_that_change_after_the_run_was_prepared_are_refused_by_name(ids, tokenizer):
    config = config_of(ids, tokenizer)
    folder = ids / "run"
    prepare.prepare(config, folder)
    made = prepare.load_tokenizer(folder)
    raw = bytearray((ids / "w_val.bin").read_bytes())
    raw[-2] ^= 1
    (ids / "w_val.bin").write_bytes(raw)
    with pytest.raises(DataError, match="w_val.bin.* changed"):
        prepare.open_encoded(folder, "validation", made)
    (ids / "w_train_001.bin").unlink()
    with pytest.raises(DataError, match="w_train_001.bin"):
        prepare.open_encoded(folder, "train", made)


def test_without_validation_files_the_end_of_the_ids_is_set_aside(ids, tokenizer):
    config = config_of(ids, tokenizer, data__validation=(), data__test=())
    prepared = prepare.prepare(config, ids / "run")
    whole = corpus.load_corpus(replace(config.data, validation=config.data.train)).train.open()
    train_ids, aside = (part.tokens.ids[:] for part in (prepared.train, prepared.validation))
    assert len(aside) == len(whole.ids) // 20
    assert np.concatenate([train_ids, aside]).tolist() == whole.ids[:].tolist()
    assert prepared.test is None
    few = replace(config.data, validation=config.data.train, validation_tokens=37)
    assert len(corpus.load_corpus(few).validation.open().ids) == 37


def test_words_and_bytes_are_counted_across_the_places_where_decoding_is_cut(
    ids, tokenizer, monkeypatch
):
    from experiments.language_modelling import id_text

    made, _ = tokenizer
    text = "🙂🙂é a🙂 bc\n" * 50
    write_nanogpt(ids / "one.bin", np.array(made.encode(text)))
    tokens = id_text.IdPart((str(ids / "one.bin"),)).open()
    for piece in (3, 7, 11, 1 << 17):
        monkeypatch.setattr(id_text, "_PIECE", piece)
        assert id_text.amount_of(tokens, made) == (1, count_text([text]))


# nanoGPT's Shakespeare


@pytest.fixture
def nanogpt_shakespeare(real_data, tmp_path):
    """train.bin, val.bin and meta.pkl, made as nanoGPT's prepare.py makes them."""
    data = downloads.find("tinyshakespeare", "input.txt").read_text()
    chars = sorted(set(data))
    numbers = {char: i for i, char in enumerate(chars)}
    n = len(data)
    for name, text in (("train", data[: int(n * 0.9)]), ("val", data[int(n * 0.9) :])):
        ids = np.array([numbers[char] for char in text], dtype=np.uint16)
        ids.tofile(tmp_path / f"{name}.bin")
    meta = {"vocab_size": 65, "itos": dict(enumerate(chars)), "stoi": numbers}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    return tmp_path


def test_nanogpts_shakespeare_gives_the_ids_and_the_losses_of_the_text(nanogpt_shakespeare):
    folder = nanogpt_shakespeare
    options = {
        "--preset": "shakespeare_char_cpu",
        "--runs": folder / "runs",
        "--model.num_decoder_layers": 1,
        "--model.d_model": 20,
        "--model.d_ff": 28,
        "--model.num_heads": 2,
        "--optimizer.total_steps": 7,
        "--optimizer.warmup_steps": 5,
        "--training.log_every": 1,
        "--training.evaluate_every": 0,
        "--training.save_every": 7,
        "--prompts": "A",
        "--sampling.max_new_tokens": 3,
    }
    own = {
        "--data.train": folder / "train.bin",
        "--data.validation": folder / "val.bin",
        "--data.tokenizer": folder / "meta.pkl",
    }
    for name, more in (("text", {}), ("bin", own)):
        done = call(train, options | more | {"--name": name})
        assert done.code == 0, done.err
    folders = [folder / "runs" / "language_modelling" / name for name in ("text", "bin")]
    text, ids = ([load_run(x), x] for x in folders)
    for part in ("train", "validation"):
        one, other = (prepare.open_encoded(x, part, run.tokenizer) for run, x in (text, ids))
        assert one.tokens.ids[:].tolist() == other.tokens.ids[:].tolist()
    assert metrics_of(folders[0]) == metrics_of(folders[1])
    scores = [json.loads((x / "scores.json").read_text()) for x in folders]
    for name in ("nats", "bits_per_byte", "words"):
        assert scores[0][name] == scores[1][name]


def test_a_pickle_that_would_run_code_is_refused_and_does_not(tmp_path):
    from experiments.language_modelling.nanogpt_characters import read_characters

    class Odd:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for content, message in (
        (pickle.dumps({"stoi": Odd()}), "asks for"),
        (pickle.dumps([1]), "no meta.pkl of nanoGPT"),
        (pickle.dumps({"stoi": {"b": 0, "a": 1}}), "not in the order"),
        (b"", "no meta.pkl of nanoGPT"),
    ):
        (tmp_path / "meta.pkl").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_characters(tmp_path / "meta.pkl")
    assert not (tmp_path / "ran").exists()


# Refusals


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data__document_id": None}, ConfigError, "w_train_"),
        ({"data__tokenizer": "bpe"}, ConfigError, "tokenizer='bpe'"),
        ({"data__document_id": 283}, ConfigError, "document_id=283"),
    ],
)
def test_what_ids_do_not_say_is_asked_for(ids, tokenizer, changes, error, message):
    with pytest.raises(error, match=message):
        prepare.prepare(config_of(ids, tokenizer, **changes), ids / "run")


def test_text_and_ids_in_one_text_and_options_of_ids_for_text_are_refused(ids, tokenizer):
    text = language_config(ids).data
    both = replace(text, train=(*text.train, str(ids / "w_val.bin")))
    with pytest.raises(ConfigError, match="w_val.bin .*a.txt"):
        corpus.load_corpus(both)
    for options in ({"document_id": 5}, {"validation_tokens": 7}):
        (name,) = options
        with pytest.raises(ConfigError, match=f"{name}=[57]"):
            corpus.load_corpus(replace(text, **options))


def test_an_id_beyond_the_tokenizer_is_named_with_its_file_and_place(ids, tokenizer):
    raw = np.fromfile(ids / "w_val.bin", np.uint16)
    raw[97] = 283
    raw.tofile(ids / "w_val.bin")
    message = "w_val.bin, id number 97 of the file: 283 is outside the vocabulary of 283 ids"
    refused(call(train, config_of(ids, tokenizer)), 65, message)


def test_an_id_that_never_separates_documents_is_asked_about(ids, tokenizer):
    said = prepare.describe(
        prepare.prepare(config_of(ids, tokenizer, data__document_id=3), ids / "run"),
        config_of(ids, tokenizer),
    )
    assert "the id 3 (--data.document_id) is not among" in said


def test_ids_are_no_pairs_of_texts(ids):
    from experiments.harness.runs import sources

    with pytest.raises(ConfigError, match="w_val.bin"):
        list(sources.iterate_both(str(ids / "w_val.bin"), ("en", "de")))
    with pytest.raises(ConfigError, match="w_val.bin"):
        sources.read_texts(str(ids / "w_val.bin"), "text")


def test_the_gpt2_preset_trains_on_shards_with_gpt2s_tokenizer(real_data, tmp_path):
    write_llm_c(tmp_path / "fineweb_train_000001.bin", np.full(4099, 262))
    write_llm_c(tmp_path / "fineweb_val_000000.bin", np.array([50256, 464, 3290] * 1409))
    data = replace(
        PRESETS["gpt2_124m"].data,
        train=(str(tmp_path / "fineweb_train_*.bin"),),
        validation=(str(tmp_path / "fineweb_val_*.bin"),),
        document_id=50256,
        validation_tokens=1500,
    )
    config = replace(PRESETS["gpt2_124m"], data=data, runs=str(tmp_path))
    prepared = prepare.prepare(config, tmp_path / "run")
    assert prepared.model.vocab_size == 50257
    assert prepared.validation.documents == 500 and len(prepared.validation.tokens.ids) == 1500
    assert prepared.batches.batch(0).tokens.shape == (480, 1025)
