"""A copy of language_modelling/train.py with another task: it trains, resumes, sweeps, compares.

The task is to reverse a sequence. `EDITS` are all that the copy changes, as a person would.
"""

import importlib
import inspect
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import registry, sweep
from experiments.harness import cli
from experiments.harness.runs.checkpoint_selection import read_result
from experiments.language_modelling import train as original
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import ConfigError
from tests.experiments.commands import bytes_of, metrics_of

DATA = '''
import hashlib
from typing import NamedTuple

import numpy as np

from experiments.language_modelling.presets import DataConfig, OptimizerConfig, TrainingConfig
from jaxformer.config import TransformerConfig
from jaxformer.text.data import StreamBatch
from jaxformer.text.metrics import Likelihood, TextSize

DIGITS, LENGTH, SEPARATOR = 7, 5, 7


class Sequences(NamedTuple):
    """Random sequences, each followed by a separator and itself in reverse."""

    rows: int
    seed: int
    steps_per_epoch: int = 11

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def batch(self, step, rows=lambda size: np.arange(size)):
        rng = np.random.default_rng([self.seed, step])
        forward = rng.integers(0, DIGITS, (self.rows, LENGTH))
        middle = np.full((self.rows, 1), SEPARATOR)
        tokens = np.concatenate([forward, middle, forward[:, ::-1]], axis=1).astype(np.int32)
        counts = np.broadcast_to(np.arange(2 * LENGTH) >= LENGTH, (self.rows, 2 * LENGTH))
        number = np.arange(self.rows, dtype=np.int32)
        return StreamBatch(*(leaf[rows(self.rows)] for leaf in (tokens, counts, number)))


class Prepared(NamedTuple):
    model: TransformerConfig
    batches: Sequences
    validation: Sequences


def prepare(config, folder):
    rows = config.data.batch_size
    return Prepared(config.model, Sequences(rows, config.training.seed), Sequences(rows, 97))


def describe(data):
    return f"sequences of {LENGTH} digits"


PRESETS = {
    "reverse": LanguageConfig(
        name="reverse",
        model=TransformerConfig(
            vocab_size=8, d_model=16, d_ff=22, num_heads=2, num_decoder_layers=1, max_len=11
        ),
        data=DataConfig(batch_size=13, seq_len=11),
        optimizer=OptimizerConfig(warmup_steps=2, total_steps=9),
        training=TrainingConfig(log_every=2, save_every=3, evaluate_every=3),
    )
}
'''
SCORES = '''
def known_scores(config):
    return "validation_loss", "validation_exact"


@partial(jax.jit, static_argnums=0)
def log_probs(model, params, tokens):
    return jax.nn.log_softmax(model.apply({"params": params}, tokens))


def evaluate(config, data, model, params):
    """The loss of the reversed half, and the share of sequences that are right throughout."""
    nats = right = 0.0
    for step in range(3):
        batch = data.validation.batch(step)
        logits = np.asarray(log_probs(model, params, batch.tokens[:, :-1]))
        labels = batch.tokens[:, 1:]
        each = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
        nats -= float(np.sum(each * batch.loss_mask))
        same = (np.argmax(logits, -1) == labels) | ~batch.loss_mask
        right += float(np.sum(np.all(same, axis=-1)))
    rows = 3 * config.data.batch_size
    scores = {"validation_loss": nats / (5 * rows), "validation_exact": right / rows}
    return session.Evaluated(scores)


def score(run, config, data, model, params):
    scores = evaluate(config, data, model, params).scores
    numbers = {name.removeprefix("validation_"): value for name, value in scores.items()}
    digest = data.validation.fingerprint
    run.write_scores({"text": "validation", "text_sha256": digest, **numbers})
'''
EDITS = {
    'EXPERIMENT = "language_modelling"\n': 'EXPERIMENT = "reverse"\n' + DATA,
    ', "tokenizer": tokenizer_digest(run.folder)': "",
    "score(run, LoadedRun(model, params, data.tokenizer, config=config), data)": (
        "score(run, config, data, model, params)"
    ),
    inspect.getsource(original.known_scores): SCORES,
    inspect.getsource(original.evaluate): "",
    inspect.getsource(original.score): "",
}
"""Text of train.py -> text of the copy."""


@pytest.fixture(scope="module")
def reverse(tmp_path_factory):
    """The module of the copied experiment, in a folder of its own, and that folder."""
    folder = tmp_path_factory.mktemp("copied")
    text = Path(original.__file__).read_text(encoding="utf-8")
    for before, after in EDITS.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "reverse").mkdir()
    (folder / "reverse" / "train.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield importlib.import_module("reverse.train")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def config(reverse, tmp_path_factory):
    return replace(reverse.PRESETS["reverse"], runs=str(tmp_path_factory.mktemp("runs")))


class Killer:
    """Asks the process to stop when it logs a step."""

    def __init__(self, step):
        self.step = step

    def log(self, step, metrics):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def contents(folder):
    """The results of a run: its metrics without speeds, and its last parameters."""
    return metrics_of(folder), bytes_of(folder, 9)


def test_a_copied_experiment_trains_and_resumes_exactly(reverse, config):
    whole = reverse.train(config)
    assert whole.folder == Path(config.runs, "reverse", "reverse")
    assert set(whole.scores) >= {"loss", "exact"} and whole.scores["loss"] < 3.0
    stopped = replace(config, name="stopped")
    with pytest.raises(SystemExit):
        reverse.train(stopped, loggers=[Killer(4)])
    folder = Path(config.runs, "reverse", "stopped")
    assert Checkpoints(folder / "checkpoints").newest_step() < 9
    resumed = reverse.train(stopped)
    assert contents(resumed.folder) == contents(whole.folder) and resumed.scores == whole.scores


@pytest.mark.long
def test_a_copied_experiment_is_swept_and_compared_by_its_module(reverse, config, capsys):
    words = ["reverse.train", "--runs", config.runs, "--name", "seeds", "--seeds", "2"]
    words += ["--training.log_every", "0", "--training.evaluate_every", "0"]
    sweep.main(cli.parse(sweep.presets_of("reverse.train"), words, positional="experiment"))
    said = capsys.readouterr().out
    assert "2 of 2 cells are finished" in said
    table = said[said.index("cells are finished") :]
    assert "loss" in table and "unchanged" in table
    folders = Path(config.runs, "sweeps", "seeds", "reverse").iterdir()
    assert len({read_result(folder).scores["loss"] for folder in folders}) == 2


def test_a_registered_experiment_has_a_name_and_an_unknown_one_is_refused(reverse):
    registry.register("reverse", "reverse.train")
    assert registry.find("reverse").presets is reverse.PRESETS
    assert registry.find("reverse.train").train is reverse.train
    with pytest.raises(ConfigError, match="experiment='forward' is unknown: give translation, lan"):
        registry.find("forward")
    with pytest.raises(ConfigError, match="there is no module 'nowhere'"):
        registry.find("nowhere.train")
    with pytest.raises(ConfigError, match="module experiments.runs has no EXPERIMENT"):
        registry.find("experiments.runs")
