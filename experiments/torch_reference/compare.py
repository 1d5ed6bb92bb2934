"""Compares jaxformer's Transformer with PyTorch's: `python -m experiments.torch_reference.compare`.

Both start from the same weights and get the same batches. Prints the differences of outputs,
gradients and training; writes runs/torch_reference/NAME. `experiments.benchmarks.train` times both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.harness import cli
from experiments.harness.runs import run_folder
from experiments.harness.training.build import build_model
from experiments.translation.prepare import describe, prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from experiments.translation.train import make_init_and_step
from jaxformer import optional_dependencies
from jaxformer.config import Count, Sinusoidal, TransformerConfig, with_fields
from jaxformer.distributed import CompiledStep, single
from jaxformer.nn.models import EncoderDecoder
from jaxformer.records import write_json
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import seq2seq_loss
from jaxformer.training.train_step import TrainState


@dataclass(frozen=True)
class CompareConfig(TranslationConfig):
    """A preset of translation, and the length of the comparison."""

    steps: Count = 100
    """Number of updates of which the losses are compared."""


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

    `weights` is that distance divided by the distance that training moved jaxformer's weights.
    """

    jaxformer: list[float]
    reference: list[float]
    weights: float


def presets() -> dict[str, CompareConfig]:
    """The presets that the PyTorch reference supports.

    `grammar` is made smaller, with the positions of the paper and one batch shape, so that the
    comparison takes about a minute.
    """
    grammar, tiny = PRESETS["grammar"], PRESETS["multi30k_tiny"]
    sizes = replace(grammar.model, d_model=64, d_ff=128, vocab_size=1_000, positions=Sinusoidal())
    data = replace(grammar.data, buckets=1, batch_tokens=1_024)
    adam = replace(grammar.optimizer, name="adam", learning_rate=3e-3)  # PyTorch has another Muon
    grammar = replace(grammar, model=sizes, data=data, optimizer=adam)
    return {
        preset.name: CompareConfig(**{x.name: getattr(preset, x.name) for x in fields(preset)})
        for preset in (grammar, tiny)
    }


def main(config: CompareConfig) -> None:
    """Prints the comparison; writes comparison.json."""
    torch = optional_dependencies.load("torch")
    folder = run_folder.open_folder(config.runs, "torch_reference", config.name, config).folder
    prepared = prepare(config, folder)
    print(describe(prepared))
    config = replace(config, model=without_dropout(prepared.model))
    devices, model = single(), build_model(config)
    batches = [prepared.batches.batch(number) for number in range(config.steps)]
    make_state, step = make_init_and_step(config, model, batches[0], devices)
    state = devices.init(make_state)
    params = jax.tree.map(np.array, state.params)  # a step donates its state
    same_weights = agreement(config, model, params, batches[0])
    training = trajectory(config, step, lambda: devices.init(make_state), batches, params)
    numbers = {
        "agreement": same_weights._asdict(),
        "trajectory": training._asdict(),
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
    }
    write_json(folder / "comparison.json", numbers)
    print(report(same_weights, training))
    print(f"all numbers: {folder / 'comparison.json'}")


def without_dropout(sizes: TransformerConfig) -> TransformerConfig:
    """`sizes` without dropout, which draws different random numbers in the two libraries."""
    parts = ("attention", "feed_forward")
    none = {f"{part}.dropout_rate": 0.0 for part in parts}
    return with_fields(sizes, {"dropout_rate": 0.0, **none})


def reference_of(config: TranslationConfig, params: Any) -> Any:
    """The reference model with the weights `params`."""
    from experiments.torch_reference import weights
    from experiments.torch_reference.transformer import Transformer

    model = Transformer(config.model, config.training.label_smoothing)
    weights.load_params(params, model, config.model)
    return model


def agreement(
    config: TranslationConfig, model: EncoderDecoder, params: Any, batch: PairBatch
) -> Agreement:
    """Compares both models with the weights `params` on one batch."""
    import torch

    from experiments.torch_reference import weights

    reference = reference_of(config, params)
    loss = seq2seq_loss(model, pad=PAD, label_smoothing=config.training.label_smoothing)
    (total, _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, None)
    nats, _ = reference.loss(batch)
    nats.backward()

    inputs = batch.source, batch.target[:, :-1], batch.source != PAD
    logits = np.asarray(jax.jit(model.apply)({"params": params}, *inputs))
    with torch.no_grad():
        expected = reference(*map(torch.tensor, inputs)).numpy()
    error = np.abs(logits - expected) / np.maximum(1.0, np.abs(expected))
    difference = _distance(gradient, weights.gradients_of(reference, config.model))
    return Agreement(
        logits=float(error[batch.target[:, 1:] != PAD].max()),
        loss=abs(float(total) / nats.item() - 1.0),
        gradient=difference / float(optax.tree.norm(gradient)),
    )


def trajectory(
    config: TranslationConfig,
    step: CompiledStep,
    make_state: Callable[[], TrainState],
    batches: Sequence[PairBatch],
    start: Any,
) -> Trajectory:
    """Trains both, an update on each of `batches`, from the weights `start`."""
    from experiments.torch_reference import weights
    from experiments.torch_reference.trainer import Trainer

    state, losses = make_state(), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(_nats_per_token(metrics))
    trainer = Trainer(reference_of(config, start), config.optimizer)
    reference = [_nats_per_token(trainer.step(batch)) for batch in batches]
    ours, theirs = state.params, weights.params_of(trainer.model, config.model)
    return Trajectory(losses, reference, _distance(theirs, ours) / _distance(ours, start))


def report(same_weights: Agreement, training: Trajectory) -> str:
    """What `main` prints."""
    losses = list(zip(training.jaxformer, training.reference, strict=True))
    shown = [number for number in (1, 2, 5, 10, 20, 50, len(losses)) if number <= len(losses)]
    rows = ["{:13}  {:9.4f}  {:9.4f}".format(i, *losses[i - 1]) for i in shown]
    largest = max(abs(a - b) / abs(a) for a, b in losses)
    return "\n".join(
        [
            "differences with the same weights, on one batch",
            f"  logits, greatest {same_weights.logits:.1e}",
            f"  loss, relative   {same_weights.loss:.1e}",
            f"  gradient, norm   {same_weights.gradient:.1e}",
            "loss in nats per token",
            "before update  jaxformer  reference",
            *rows,
            f"greatest relative difference of the loss {largest:.1e}",
            f"final weights differ by {training.weights:.1e} of their movement",
        ]
    )


def _nats_per_token(metrics: Any) -> float:
    return float(metrics["loss"]) / float(metrics["tokens"])


def _distance(a: Any, b: Any) -> float:
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)))


if __name__ == "__main__":
    cli.start(main, presets(), __doc__)
