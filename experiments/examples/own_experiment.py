"""An experiment of its own, to copy: `python -m experiments.examples.own_experiment`.

A GPT learns to write a sequence of digits in reverse. Only what is its own is here: options, data,
model, loss, evaluation, score, and what `plan` and a page show of it. The harness does the rest:
command line, resuming, checkpoints, devices, logs, sweeps. Change the file from top to bottom,
beginning with the name in `EXPERIMENT`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flax import linen as nn

from experiments.harness import cli, training
from experiments.harness.cli import display
from experiments.harness.planning import PlannedTraining
from experiments.harness.results.pages import Contents
from experiments.harness.runs.loggers import Logger
from experiments.harness.runs.run_folder import TrainResult, read_result
from experiments.harness.training.flops import causal_flops
from experiments.harness.training.held_out_loss import loss_sums
from experiments.harness.training.training_config import (
    COMMON_OPTIONS,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from jaxformer.config import Checked, Count, TransformerConfig
from jaxformer.distributed import Strategy, single
from jaxformer.pretrained import Loaded
from jaxformer.text.data import RowSelection, StreamBatch
from jaxformer.training.losses import causal_loss

EXPERIMENT = "reverse"
"""The runs are in RUNS/reverse/NAME."""

NUM_DIGITS = 7
"""The ids of the digits are 0 to 6."""

SEPARATOR = NUM_DIGITS
"""The id between a sequence and its reverse."""


@dataclass(frozen=True)
class DataConfig(Checked):
    """The sequences. Each field is an option, such as --data.length, and its text is the help."""

    length: Count = 5
    """Digits of a sequence."""
    batch_size: Count = 64
    """Sequences of a batch."""


@dataclass(frozen=True)
class ReverseConfig(RunConfig):
    """A run RUNS/reverse/NAME. The harness reads these five fields of every experiment."""

    common_options: ClassVar[tuple[str, ...]] = ("data.length", "data.batch_size", *COMMON_OPTIONS)
    """The options that --help shows at first."""

    name: str
    """Name of the run's folder."""
    model: TransformerConfig
    """Sizes of the model."""
    data: DataConfig = DataConfig()
    """The sequences."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    training: TrainingConfig = TrainingConfig()
    """The training."""

    def without_effect(self) -> dict[str, str]:
        """Options of the harness that change nothing here, and why; a typed one is refused."""
        no_text = "sequences are drawn, and no text is kept"
        return super().without_effect() | {"text_cache_dir": no_text}


PRESETS = {
    "reverse": ReverseConfig(
        name="reverse",
        model=TransformerConfig(
            vocab_size=NUM_DIGITS + 1,
            d_model=64,
            d_ff=128,
            num_heads=4,
            num_decoder_layers=2,
            dropout_rate=0.0,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20, total_steps=400),
        training=TrainingConfig(evaluate_every=100, save_every=100, average_checkpoints=1),
    )
}
"""The first is the default; options of the command line change its fields."""


class Sequences(NamedTuple):
    """Batches of random sequences, each followed by a separator and itself in reverse.

    A batch is a function of (seed, step), so a resumed run sees the batches of one that was never
    stopped. `rows` selects the rows that a process computes. `fingerprint` tells other data apart:
    a run is not resumed with it.
    """

    length: int
    batch_size: int
    seed: int
    steps_per_epoch: int = 100

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the batches."""
        return hashlib.sha256(repr((EXPERIMENT, self, NUM_DIGITS)).encode()).hexdigest()

    def batch(self, step: int, rows: RowSelection = np.arange) -> StreamBatch:
        """The batch of `step`: B sequences of L digits are `tokens` [B, 2 L + 1].

        Each token but the first is a label; only the reversed half counts.
        """
        rng = np.random.default_rng([self.seed, step])
        forward = rng.integers(0, NUM_DIGITS, (self.batch_size, self.length))
        separator = np.full((self.batch_size, 1), SEPARATOR)
        tokens = np.concatenate([forward, separator, forward[:, ::-1]], axis=1).astype(np.int32)
        labels = tokens[:, 1:]
        is_reversed = np.arange(labels.shape[1]) >= self.length
        loss_mask = np.broadcast_to(is_reversed, labels.shape)
        example_ids = np.arange(self.batch_size, dtype=np.int32)
        selected = rows(self.batch_size)
        return StreamBatch(tokens[selected], loss_mask[selected], example_ids[selected])


def held_out(config: ReverseConfig) -> Sequences:
    """Other sequences than the training's, the same for every seed: scores are comparable."""
    return Sequences(config.data.length, config.data.batch_size, seed=1_000_003)


def main(config: ReverseConfig) -> None:
    """The command."""
    train(config)


def make_step(
    config: ReverseConfig, model: nn.Module, batch: StreamBatch, devices: Strategy
) -> training.InitAndStep:
    """The function that makes the first state, and the compiled step on batches like `batch`.

    The loss is `causal_loss`, or the one that --training.loss names.
    """
    loss = training.build_loss(config.training, causal_loss)(model)
    return training.gradient_step(config, model, loss, (batch.tokens[:, :-1],), devices)


def train(
    config: ReverseConfig,
    *,
    loggers: Iterable[Logger] = (),
    make_step: training.MakeStep = make_step,
    **values: Any,
) -> TrainResult:
    """Trains from the newest checkpoint, and scores the result; returns the folder and scores.

    `values` are of your own, by the names in `named_values.VALUES`, such as `block`.
    """
    config = training.with_values(config, **values)
    with training.open_run(EXPERIMENT, config, ("validation_loss",), loggers) as run:
        data = run.config.data
        display.say(f"sequences of {data.length} digits")
        model = training.build_model(run.config, contact=run.contact)
        task = training.Task(
            model=model,
            make_step=make_step,
            batches=Sequences(data.length, data.batch_size, run.config.training.seed),
            evaluate=partial(evaluate, model),
            cost=lambda run, batch: step_cost(run.config, batch),
        )
        run, step, state = training.start(run, task)
        training.fit(run, step, state, task)
        score(model, run, training.choose_weights(run, task))
    return read_result(run.folder)


def step_cost(config: ReverseConfig, batch: StreamBatch) -> training.Cost:
    """The positions and the FLOPs of a step on `batch`."""
    rows, length = batch.loss_mask.shape
    return training.Cost(rows * length, causal_flops(config.model, rows, length))


def evaluate(
    model: nn.Module, run: training.OpenRun, params: Any, step: int
) -> training.EvaluationResult:
    """The loss of held-out sequences in nats per digit, and the scores of --training.metrics."""
    loaded, text = Loaded(model, params, config=run.config), held_out(run.config)
    sums = loss_sums(causal_loss, loaded, map(text.batch, range(3)))
    scores = {"loss": sums["loss"] / sums["tokens"]}
    inputs = training.MetricInputs(loaded, text, scores)
    scores |= training.user_metrics(run.config.training, inputs)
    return training.EvaluationResult({f"validation_{name}": x for name, x in scores.items()})


def score(model: nn.Module, run: training.OpenRun, params: Any) -> None:
    """Writes the scores of the final weights, and the digest of the text they were computed on."""
    validated = evaluate(model, run, params, 0).scores
    scores = {name.removeprefix("validation_"): value for name, value in validated.items()}
    digest = held_out(run.config).fingerprint
    run.write_scores({"text": "validation", "text_sha256": digest, **scores})
    display.say(f"loss {scores['loss']:.4f} nats per digit of the reverse")


planned = PlannedTraining(
    prepare=lambda config: config,
    batch=lambda config: held_out(config).batch(0),
    build_model=training.build_model,
    make_step=make_step,
    cost=lambda config: step_cost(config, held_out(config).batch(0)),
    others=lambda *_: {},
)
"""The experiment that `python -m experiments.plan experiments.examples.own_experiment` compiles."""


def page_contents(folder: Path, options: Any, texts: Sequence[str] = ()) -> Contents:
    """Content of a page besides scores and curves: the weights, and two sequences."""
    params = options.weights.read(single())
    tokens = Sequences(length=5, batch_size=2, seed=0).batch(0).tokens.tolist()
    return Contents(params, [], {"sequence and its reverse": list(map(str, tokens))})


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__, experiment=EXPERIMENT)
