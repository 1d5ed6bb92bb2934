"""The two Transformers beside each other: outputs, gradients, a training, and time."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from experiments.pytorch_twin import weights
from experiments.pytorch_twin.trainer import Trainer
from experiments.pytorch_twin.transformer import Transformer
from experiments.translation.prepare import Prepared
from experiments.translation.presets import TranslationConfig
from experiments.translation.train import assemble
from jaxformer.data import PairBatch
from jaxformer.losses import seq2seq_loss
from jaxformer.models import EncoderDecoder
from jaxformer.parallel import Program, one_device
from jaxformer.tokenizers import PAD
from jaxformer.training import TrainState

Step = Callable[[PairBatch], float]
"""step(batch) -> the loss of the batch in nats a token, before the update that it makes."""


class Agreement(NamedTuple):
    """How far the two are from each other on one batch, with one set of weights.

    `logits`: the greatest |a - b| / max(1, |b|) where there is a target token; `loss`: the share by
    which the losses differ; `gradient`: the norm of the difference, as a share of the norm.
    """

    logits: float
    loss: float
    gradient: float


class Trajectory(NamedTuple):
    """The loss before each update, in nats a token, and how far apart the weights end.

    `rounding` is our own training again, begun with each weight moved to one of its two neighbours
    in float32, as rounding might, though only once and not in every update. `weights` and
    `rounding_weights` are norms of a difference, as a share of the norm of how far training moved
    them.
    """

    ours: list[float]
    twin: list[float]
    rounding: list[float]
    weights: float
    rounding_weights: float


class Speed(NamedTuple):
    """Milliseconds of an update, the median over rounds, and each round's."""

    ours: float
    twin: float
    rounds_ours: list[float]
    rounds_twin: list[float]


class Ours(NamedTuple):
    """Our side: its settings, its text, and its compiled step, which compiles once a shape.

    `make_state()` is the state before the first update.
    """

    config: TranslationConfig
    prepared: Prepared
    make_state: Callable[[], TrainState]
    step: Program

    def batches(self, count: int) -> list[PairBatch]:
        """The first `count` batches."""
        return [self.prepared.batches.batch(number) for number in range(count)]

    def twin(self, params: Any) -> Transformer:
        """The twin with the weights `params`."""
        model = Transformer(self.prepared.model, self.config.training.smoothing)
        weights.give(params, model, self.prepared.model)
        return model


def assemble_ours(config: TranslationConfig, prepared: Prepared) -> Ours:
    """Our side on one device."""
    devices = one_device()
    make_state, step = assemble(config, prepared.model, prepared.batches.batch(0), devices)
    return Ours(config, prepared, lambda: devices.init(make_state), step)


def agreement(ours: Ours) -> Agreement:
    """What the first batch gives in both, with the weights that training begins with."""
    training, sizes = ours.config.training, ours.prepared.model
    batch, params = ours.prepared.batches.batch(0), ours.make_state().params
    model, twin = EncoderDecoder(sizes, training.attention), ours.twin(params)
    loss = seq2seq_loss(model, pad=PAD, smoothing=training.smoothing)
    (total, _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, None)
    nats, _ = twin.loss(batch)
    nats.backward()

    inputs = batch.source, batch.target[:, :-1], batch.source != PAD
    logits = np.asarray(jax.jit(model.apply)({"params": params}, *inputs))
    with torch.no_grad():
        theirs = twin(*map(torch.tensor, inputs)).numpy()
    error = np.abs(logits - theirs) / np.maximum(1.0, np.abs(theirs))
    return Agreement(
        logits=float(error[batch.target[:, 1:] != PAD].max()),
        loss=abs(float(total) / nats.item() - 1.0),
        gradient=_distance(gradient, weights.take_gradients(twin, sizes)) / _norm(gradient),
    )


def trajectory(ours: Ours, steps: int) -> Trajectory:
    """`steps` updates of both from the same weights on the same batches."""
    batches = ours.batches(steps)
    start = jax.tree.map(np.array, ours.make_state().params)
    trainer = Trainer(ours.twin(start), ours.config.optimizer)
    twin = [_twin_step(trainer)(batch) for batch in batches]
    trained, losses = _trained(ours, batches, start)
    rounded, rounding = _trained(ours, batches, _neighbours(start))
    way = _distance(trained, start)
    theirs = weights.take(trainer.model, ours.prepared.model)
    return Trajectory(
        losses,
        twin,
        rounding,
        weights=_distance(theirs, trained) / way,
        rounding_weights=_distance(rounded, trained) / way,
    )


def speed(ours: Ours, steps: int, rounds: int) -> Speed:
    """How long an update takes: both in turn, `rounds` times `steps` updates on the same batches.

    Compilation, and each one's first updates, come before the clock starts.
    """
    state = ours.make_state()
    trainer = Trainer(ours.twin(state.params), ours.config.optimizer)
    runners = {"ours": _our_step(state, ours.step), "twin": _twin_step(trainer)}
    batches = ours.batches(steps)
    found: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(rounds + 1):
        for name, run in runners.items():
            begin = time.perf_counter()
            for batch in batches:
                run(batch)
            if turn > 0:
                found[name].append((time.perf_counter() - begin) / steps * 1e3)
    medians = {name: statistics.median(times) for name, times in found.items()}
    return Speed(medians["ours"], medians["twin"], found["ours"], found["twin"])


def _twin_step(trainer: Trainer) -> Step:
    def run(batch: PairBatch) -> float:
        metrics = trainer.step(batch)
        return metrics["loss"] / metrics["tokens"]

    return run


def _our_step(state: TrainState, step: Program) -> Step:
    def run(batch: PairBatch) -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"]) / float(metrics["tokens"])

    return run


def _trained(ours: Ours, batches: Iterable[PairBatch], start: Any) -> tuple[Any, list[float]]:
    """Our parameters after an update on each of `batches` from `start`, and the losses."""
    state = ours.make_state().replace(params=jax.tree.map(jnp.array, start))
    losses = []
    for batch in batches:
        state, metrics = ours.step(state, batch)
        losses.append(float(metrics["loss"]) / float(metrics["tokens"]))
    return jax.tree.map(np.asarray, state.params), losses


def _neighbours(tree: Any) -> Any:
    """Each number moved to the next float32 above or below; all one way would be a mere scale."""
    rng = np.random.default_rng(0)

    def move(x: np.ndarray) -> np.ndarray:
        return np.nextafter(x, rng.choice(np.array([-np.inf, np.inf], np.float32), x.shape))

    return jax.tree.map(move, tree)


def _norm(tree: Any) -> float:
    squares = (np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree))
    return float(np.sqrt(sum(squares)))


def _distance(a: Any, b: Any) -> float:
    return _norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y), a, b))
