"""Batches of a user, from a file outside the project, by name and from Python."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.harness import build, cli
from experiments.language_modelling import prepare as language_prepare
from experiments.language_modelling.presets import PRESETS
from experiments.language_modelling.train import train
from jaxformer.checkpoint import Checkpoints

WORDS = "sun moon star rain snow wind hill lake tree bird fish sand".split()
MODULE = """
from jaxformer.text.data import StreamBatch
import numpy as np


class Counting:
    steps_per_epoch = 5
    fingerprint = "counting"

    def batch(self, step, rows):
        own = rows(3)
        ids = (np.arange(20) + 7 * step + own[:, None]) % 11
        labels = np.ones((len(own), 19), bool)
        return StreamBatch(ids.astype(np.int32), labels, own.astype(np.int32))


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


def parsed(place, *more):
    words = [*SIZES.split(), "--runs", str(place / "runs"), "--data.train", str(place / "a.txt")]
    return cli.parse(PRESETS, [*words, *more], experiment="language_modelling")


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
