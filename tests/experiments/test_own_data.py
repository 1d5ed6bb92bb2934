"""Batches, documents and a tokenizer of a user, from a file outside the project."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.harness import cli
from experiments.harness.training import build
from experiments.language_modelling import prepare as language_prepare
from experiments.language_modelling.presets import PRESETS
from experiments.language_modelling.train import train
from experiments.translation import prepare as translation_prepare
from experiments.translation.presets import PRESETS as TRANSLATION
from jaxformer.checkpoint import Checkpoints
from tests.experiments.tiny_runs import WORDS

MODULE = """
from jaxformer.text.data import StreamBatch
from jaxformer.text.tokenizers import SPECIAL_TOKENS, train_characters
import numpy as np


class Counting:
    steps_per_epoch = 5
    fingerprint = "counting"

    def batch(self, step, rows):
        own = rows(3)
        ids = (np.arange(20) + 7 * step + own[:, None]) % 11
        labels = np.ones((len(own), 19), bool)
        return StreamBatch(ids.astype(np.int32), labels, own.astype(np.int32))


def texts():
    return [f"{chr(65 + i % 26)} {chr(65 + i % 25)}" for i in range(997)]


def other():
    return [text[::-1] for text in texts()]


def pairs():
    return [(f"{text} {text} {chr(65 + i % 17)}", text) for i, text in enumerate(texts())]


def upper(texts, vocab_size):
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ "
    return train_characters([letters], special_tokens=SPECIAL_TOKENS)


def counting(config, prepared):
    assert config.data.batch_size == 3 and prepared.tokenizer.vocab_size > 11
    return Counting()
"""
SIZES = """--model.vocab_size 283 --model.d_model 16 --model.d_ff 22 --model.num_heads 2
    --model.num_decoder_layers 1 --model.max_len 23 --data.seq_len 19 --data.batch_size 3
    --optimizer.name adam --optimizer.warmup_steps 1 --optimizer.total_steps 4
    --training.log_every 1 --training.save_every 2 --training.evaluate_every 0
    --sampling.max_new_tokens 3 --prompts sun"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text and a module of the user, which can be imported."""
    folder = tmp_path_factory.mktemp("own")
    lines = (f"{a} {b} {c}\n" for a in WORDS for b in WORDS for c in WORDS[:3])
    (folder / "a.txt").write_text("".join(lines))
    (folder / "my_data.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def parsed(place, *more, presets=PRESETS):
    text = [] if "--data.train" in more else ["--data.train", str(place / "a.txt")]
    words = [*SIZES.split(), "--runs", str(place / "runs"), *text, *more]
    return cli.parse(presets, words, experiment="language_modelling")


@pytest.mark.long
def test_batches_of_ones_own_are_trained_on_and_part_of_the_checkpoint(place):
    import my_data  # pyright: ignore[reportMissingImports]  # the fixture has written it

    config = parsed(place, "--name", "named", "--data.batches", "my_data:counting")
    named = train(config)
    called = train(parsed(place, "--name", "called"), batches=my_data.counting)
    for result in (named, called):
        record = json.loads((result.folder / "config.json").read_text())
        assert record["data"]["batches"] == "my_data:counting"
        assert Checkpoints(result.folder / "checkpoints").metadata()["data"] == "counting"
    steps = [
        [json.loads(line)["loss"] for line in (x.folder / "metrics.jsonl").read_text().splitlines()]
        for x in (named, called)
    ]
    assert steps[0] == steps[1] and len(steps[0]) == 4
    lines = (named.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["data_wait"] >= 0.0 for line in lines[1:]] == [True] * 3
    prepared = language_prepare.prepare(config, named.folder)
    own = build.build_batches(config, prepared).batch(2, lambda count: np.array([0, 2]))
    assert own.tokens[:, 0].tolist() == [3, 5]


def test_documents_and_a_tokenizer_of_ones_own_are_prepared_by_name_and_from_python(place):
    import my_data  # pyright: ignore[reportMissingImports]  # the fixture has written it

    words = [
        "--name",
        "texts",
        "--data.train",
        "my_data:texts",
        "--data.tokenizer",
        "my_data:upper",
    ]
    config = parsed(place, *words)
    same = build.with_values(
        parsed(place, "--name", "texts"), dataset=my_data.texts, tokenizer=my_data.upper
    )
    assert same == config and config.data.train == ("my_data:texts",)
    prepared = language_prepare.prepare(config, place / "texts")
    text = "".join(b for t in my_data.texts() for b in t)
    assert prepared.train.amount.bytes + prepared.validation.amount.bytes == len(text)
    again = language_prepare.load_tokenizer(place / "texts")
    assert again.decode(again.encode("A")) == "A" and again.vocab_size == 4 + 26 + 1
    other = build.with_values(config, dataset=my_data.other)
    changed = language_prepare.prepare(other, place / "texts")
    assert changed.train.tokens.fingerprint != prepared.train.tokens.fingerprint


def test_pairs_and_a_tokenizer_of_ones_own_are_prepared(place):
    import my_data  # pyright: ignore[reportMissingImports]  # the fixture has written it

    config = replace(TRANSLATION["grammar"], runs=str(place / "runs"))
    config = build.with_values(config, dataset=my_data.pairs, tokenizer=my_data.upper)
    prepared = translation_prepare.prepare(config, place / "pairs")
    assert prepared.target_tokenizer.vocab_size == 4 + 26 + 1
    batches = prepared.batches
    assert len(batches.source) + len(prepared.validation.source) == 997


def test_a_repeated_batch_is_the_first_one(place):
    config = parsed(place, "--name", "named", "--data.batches", "my_data:counting")
    prepared = language_prepare.prepare(config, place / "prepared")
    name = "experiments.examples.custom_data:overfit"
    repeated = build.build_batches(
        replace(config, data=replace(config.data, batches=name)), prepared
    )
    rows = lambda count: np.arange(count)  # noqa: E731
    for step in (0, 1):
        expected = prepared.batches.batch(step)
        for found in (repeated.batch(step, rows), repeated.batch(step + 6, rows)):
            np.testing.assert_array_equal(found.tokens, expected.tokens)
