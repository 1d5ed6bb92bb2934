"""A copy of language_modelling/train.py with another task, to reverse a sequence.

`EDITS` are all that the copy changes, as a person would.
"""

import inspect
from pathlib import Path

from experiments.language_modelling import train as original

DATA = '''
import hashlib
from typing import NamedTuple

import numpy as np

from experiments.harness.planning import PlannedTraining
from experiments.harness.results.pages import Contents
from experiments.harness.training.held_out_loss import loss_sums
from experiments.harness.training.flops import causal_flops
from experiments.language_modelling.presets import DataConfig, OptimizerConfig, TrainingConfig
from jaxformer.config import TransformerConfig
from jaxformer.distributed import single
from jaxformer.text.data import StreamBatch
from jaxformer.training.losses import causal_loss

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


def describe(data, config):
    return f"sequences of {LENGTH} digits"


PRESETS = {
    "reverse": LanguageConfig(
        name="reverse",
        model=TransformerConfig(
            vocab_size=8, d_model=16, d_ff=22, num_heads=2, num_decoder_layers=1, max_len=11
        ),
        data=DataConfig(batch_size=13, seq_len=11),
        optimizer=OptimizerConfig(warmup_steps=2, total_steps=7),
        training=TrainingConfig(
            log_every=1, save_every=3, evaluate_every=3, average_checkpoints=2
        ),
    )
}
'''
SCORES = '''
def cost(run, batch):
    flops = causal_flops(run.config.model, *batch.loss_mask.shape)
    return training.Cost(batch.loss_mask.size, flops)


def evaluate(model, data, run, params, step):
    """The loss of the reversed half."""
    loaded = Loaded(model, params, config=run.config)
    sums = loss_sums(causal_loss, loaded, map(data.validation.batch, range(3)))
    return training.EvaluationResult({"validation_loss": sums["loss"] / sums["tokens"]})


def score(model, data, run, params):
    loss = evaluate(model, data, run, params, 0).scores["validation_loss"]
    digest = data.validation.fingerprint
    run.write_scores({"text": "validation", "text_sha256": digest, "loss": loss})


planned = PlannedTraining(
    prepare=lambda config: config,
    batch=lambda config: Sequences(config.data.batch_size, 0).batch(0),
    build_model=training.build_model,
    make_step=make_step,
    cost=lambda config: training.Cost(
        config.data.batch_size * 2 * LENGTH,
        causal_flops(config.model, config.data.batch_size, 2 * LENGTH),
    ),
    others=lambda *_: {},
)


def page_contents(folder, options, texts=()):
    """The weights, and a sequence with its reverse."""
    params = options.weights.read(single())
    tokens = Sequences(2, 0).batch(0).tokens.tolist()
    return Contents(params, [], {"sequence and its reverse": list(map(str, tokens))})
'''
EDITS = {
    'EXPERIMENT = "language_modelling"\n': 'EXPERIMENT = "reverse"\n' + DATA,
    '            origin={"tokenizer": tokenizer_digest(run.folder)},\n': "",
    inspect.getsource(original.cost): SCORES,
    "scores = scoring.known_scores(config)": 'scores = ("validation_loss",)',
    inspect.getsource(original.evaluate): "",
    inspect.getsource(original.score): "",
}
"""Text of train.py -> text of the copy."""


LINES = (DATA + SCORES).count("\n")
"""Lines of the copy that are its own."""


def write_copy(folder: Path) -> None:
    """Writes the module reverse/train.py into `folder`."""
    text = Path(original.__file__).read_text(encoding="utf-8")
    for before, after in EDITS.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "reverse").mkdir()
    (folder / "reverse" / "train.py").write_text(text, encoding="utf-8")
