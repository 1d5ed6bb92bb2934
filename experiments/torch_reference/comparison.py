"""Compares our Transformer with the PyTorch reference: outputs, gradients, training, time."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from experiments.harness.training.build import build_attention
from experiments.torch_reference import weights
from experiments.torch_reference.trainer import Trainer
from experiments.torch_reference.transformer import Transformer
from experiments.translation.load_run import build_model
from experiments.translation.prepare import Prepared
from experiments.translation.presets import TranslationConfig
from experiments.translation.train import make_init_and_step
from jaxformer.distributed import CountedJit, single
from jaxformer.nn.models import EncoderDecoder
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import seq2seq_loss
from jaxformer.training.train_step import TrainState

Step = Callable[[PairBatch], float]
"""step(batch) -> the loss of the batch in nats per token before the update."""


class Agreement(NamedTuple):
    """Differences between the two models on one batch with the same weights.

    `logits`: the greatest |a - b| / max(1, |b|) at target tokens; `loss`: the relative difference;
    `gradient`: the norm of the difference divided by the norm.
    """

    logits: float
    loss: float
    gradient: float


class Trajectory(NamedTuple):
    """The loss before each update in nats per token, and the distance of the final weights.

    `rounding` is the control: our training again, with each initial weight moved to a neighbouring
    float32. `weights` and `rounding_weights` are the distances of the final weights from
    jaxformer's, divided by the distance that training moved jaxformer's.
    """

    jaxformer: list[float]
    reference: list[float]
    rounding: list[float]
    weights: float
    rounding_weights: float


class Speed(NamedTuple):
    """Milliseconds of an update: the median over rounds, and each round."""

    jaxformer: float
    reference: float
    rounds_jaxformer: list[float]
    rounds_reference: list[float]


class JaxSide(NamedTuple):
    """Our configuration, text, initial state (`make_state()`) and compiled step."""

    config: TranslationConfig
    prepared: Prepared
    make_state: Callable[[], TrainState]
    step: CountedJit

    def batches(self, count: int) -> list[PairBatch]:
        """Returns the first `count` batches."""
        return [self.prepared.batches.batch(number) for number in range(count)]

    def reference(self, params: Any) -> Transformer:
        """Returns the reference model with the weights `params`."""
        model = Transformer(self.prepared.model, self.config.training.label_smoothing)
        weights.load_params(params, model, self.prepared.model)
        return model


def assemble_jax(config: TranslationConfig, prepared: Prepared) -> JaxSide:
    """Returns jaxformer's side on one device."""
    devices = single()
    config = replace(config, model=prepared.model)
    model = build_model(config)
    make_state, step = make_init_and_step(config, model, prepared.batches.batch(0), devices)
    return JaxSide(config, prepared, lambda: devices.init(make_state), step)


def agreement(side: JaxSide) -> Agreement:
    """Compares both models on the first batch, with our initial weights."""
    training, sizes = side.config.training, side.prepared.model
    batch, params = side.prepared.batches.batch(0), side.make_state().params
    model, reference = (
        EncoderDecoder(sizes, build_attention(training)),
        side.reference(params),
    )
    loss = seq2seq_loss(model, pad=PAD, label_smoothing=training.label_smoothing)
    (total, _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, None)
    nats, _ = reference.loss(batch)
    nats.backward()

    inputs = batch.source, batch.target[:, :-1], batch.source != PAD
    logits = np.asarray(jax.jit(model.apply)({"params": params}, *inputs))
    with torch.no_grad():
        expected = reference(*map(torch.tensor, inputs)).numpy()
    error = np.abs(logits - expected) / np.maximum(1.0, np.abs(expected))
    return Agreement(
        logits=float(error[batch.target[:, 1:] != PAD].max()),
        loss=abs(float(total) / nats.item() - 1.0),
        gradient=_distance(gradient, weights.gradients_of(reference, sizes)) / _norm(gradient),
    )


def trajectory(side: JaxSide, steps: int) -> Trajectory:
    """Trains both for `steps` updates from the same weights on the same batches."""
    batches = side.batches(steps)
    start = jax.tree.map(np.array, side.make_state().params)
    trainer = Trainer(side.reference(start), side.config.optimizer)
    reference = [_reference_step(trainer)(batch) for batch in batches]
    trained, losses = _trained(side, batches, start)
    rounded, rounding = _trained(side, batches, _neighbours(start))
    moved = _distance(trained, start)
    reference_weights = weights.params_of(trainer.model, side.prepared.model)
    return Trajectory(
        losses,
        reference,
        rounding,
        weights=_distance(reference_weights, trained) / moved,
        rounding_weights=_distance(rounded, trained) / moved,
    )


def speed(side: JaxSide, steps: int, rounds: int) -> Speed:
    """Times both in turn: `rounds` of `steps` updates each, on the same batches.

    A first round, which includes compilation, is not measured.
    """
    state = side.make_state()
    trainer = Trainer(side.reference(state.params), side.config.optimizer)
    runners = {
        "jaxformer": _jax_step(state, side.step),
        "reference": _reference_step(trainer),
    }
    batches = side.batches(steps)
    found: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(rounds + 1):
        for name, run in runners.items():
            begin = time.perf_counter()
            for batch in batches:
                run(batch)
            if turn > 0:
                found[name].append((time.perf_counter() - begin) / steps * 1e3)
    medians = {name: statistics.median(times) for name, times in found.items()}
    return Speed(medians["jaxformer"], medians["reference"], found["jaxformer"], found["reference"])


def _reference_step(trainer: Trainer) -> Step:
    def run(batch: PairBatch) -> float:
        metrics = trainer.step(batch)
        return metrics["loss"] / metrics["tokens"]

    return run


def _jax_step(state: TrainState, step: CountedJit) -> Step:
    def run(batch: PairBatch) -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"]) / float(metrics["tokens"])

    return run


def _trained(side: JaxSide, batches: Iterable[PairBatch], start: Any) -> tuple[Any, list[float]]:
    """Trains from `start` on `batches`; returns our parameters and the losses."""
    state = replace(side.make_state(), params=jax.tree.map(jnp.array, start))
    losses = []
    for batch in batches:
        state, metrics = side.step(state, batch)
        losses.append(float(metrics["loss"]) / float(metrics["tokens"]))
    return jax.tree.map(np.asarray, state.params), losses


def _neighbours(tree: Any) -> Any:
    """Moves each number to the next float32 above or below, at random."""
    rng = np.random.default_rng(0)

    def move(x: np.ndarray) -> np.ndarray:
        return np.nextafter(x, rng.choice(np.array([-np.inf, np.inf], np.float32), x.shape))

    return jax.tree.map(move, tree)


def _norm(tree: Any) -> float:
    squares = (np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree))
    return float(np.sqrt(sum(squares)))


def _distance(a: Any, b: Any) -> float:
    return _norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y), a, b))
