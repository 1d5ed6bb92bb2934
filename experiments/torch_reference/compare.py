"""Compares jaxformer's Transformer with PyTorch's: `python -m experiments.torch_reference.compare`.

Both start from the same weights and get the same batches. Prints the differences of outputs,
gradients and training; writes runs/torch_reference/NAME. `experiments.benchmarks.train` times both.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.harness import cli
from experiments.harness.runs import run_folder
from experiments.harness.training.build import build_attention
from experiments.translation.load_run import build_model
from experiments.translation.prepare import Prepared, describe, prepare
from experiments.translation.presets import PRESETS, TranslationConfig
from experiments.translation.train import make_init_and_step
from jaxformer import optional_dependencies
from jaxformer.config import Sinusoidal, check_at_least
from jaxformer.distributed import CompiledStep, single
from jaxformer.nn.models import EncoderDecoder
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import seq2seq_loss
from jaxformer.training.train_step import TrainState


@dataclass(frozen=True)
class Comparison(TranslationConfig):
    """A preset of translation, and the length of the comparison."""

    steps: int = 100
    """Number of updates of which the losses are compared."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 1, "steps")


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


class JaxSide(NamedTuple):
    """Our configuration, text, initial state (`make_state()`) and compiled step."""

    config: TranslationConfig
    prepared: Prepared
    make_state: Callable[[], TrainState]
    step: CompiledStep

    def reference(self, params: Any) -> Any:
        """The reference model with the weights `params`."""
        from experiments.torch_reference import weights
        from experiments.torch_reference.transformer import Transformer

        model = Transformer(self.prepared.model, self.config.training.label_smoothing)
        weights.load_params(params, model, self.prepared.model)
        return model


def presets() -> dict[str, Comparison]:
    """The presets that the PyTorch reference supports.

    `grammar` is made smaller, with the positions of the paper and one batch shape, so that the
    comparison takes about a minute.
    """
    grammar, tiny = PRESETS["grammar"], PRESETS["multi30k_tiny"]
    sizes = replace(grammar.model, d_model=64, d_ff=128, vocab_size=1_000, positions=Sinusoidal())
    data = replace(grammar.data, buckets=1, batch_tokens=1_024)
    grammar = replace(grammar, model=sizes, data=data)
    return cli.with_options({preset.name: preset for preset in (grammar, tiny)}, Comparison)


def main(config: Comparison) -> None:
    """Prints the comparison; writes comparison.json."""
    torch = optional_dependencies.load("torch")
    folder = run_folder.open_run(config.runs, "torch_reference", config.name, config).folder
    prepared = prepare(config, folder)
    print(describe(prepared))
    side = assemble_jax(config, prepared)
    same_weights, training = agreement(side), trajectory(side, config.steps)
    numbers = {
        "agreement": same_weights._asdict(),
        "trajectory": training._asdict(),
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
    }
    text = json.dumps(numbers, indent=2) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    print("\n".join(report(same_weights, training)))
    print(f"all numbers: {folder / 'comparison.json'}")


def assemble_jax(config: TranslationConfig, prepared: Prepared) -> JaxSide:
    """Jaxformer's side on one device.

    Dropout draws different random numbers in the two libraries, so it is switched off.
    """
    sizes = prepared.model
    parts = {
        name: replace(getattr(sizes, name), dropout_rate=0.0)
        for name in ("attention", "feed_forward", "embeddings")
    }
    prepared = prepared._replace(model=replace(sizes, dropout_rate=0.0, **parts))
    devices = single()
    config = replace(config, model=prepared.model)
    model = build_model(config)
    make_state, step = make_init_and_step(config, model, prepared.batches.batch(0), devices)
    return JaxSide(config, prepared, lambda: devices.init(make_state), step)


def agreement(side: JaxSide) -> Agreement:
    """Compares both models on the first batch, with our initial weights."""
    import torch

    from experiments.torch_reference import weights

    training, sizes = side.config.training, side.prepared.model
    batch, params = side.prepared.batches.batch(0), side.make_state().params
    model, reference = EncoderDecoder(sizes, build_attention(training)), side.reference(params)
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
        gradient=_distance(gradient, weights.gradients_of(reference, sizes))
        / float(optax.tree.norm(gradient)),
    )


def trajectory(side: JaxSide, steps: int) -> Trajectory:
    """Trains both for `steps` updates from the same weights on the same batches."""
    from experiments.torch_reference import weights
    from experiments.torch_reference.trainer import Trainer

    batches = [side.prepared.batches.batch(number) for number in range(steps)]
    start = jax.tree.map(np.array, side.make_state().params)
    trainer = Trainer(side.reference(start), side.config.optimizer)
    reference = [_nats_per_token(trainer.step(batch)) for batch in batches]
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


def report(same_weights: Agreement, training: Trajectory) -> list[str]:
    """The lines of the table that `main` prints."""
    differences = _relative(training.jaxformer, training.reference)
    rounding = _relative(training.jaxformer, training.rounding)
    steps = len(differences)
    lines = [
        "same weights, one batch                  reference against jaxformer",
        f"  logits, greatest difference                 {same_weights.logits:.1e}",
        f"  loss, relative                              {same_weights.loss:.1e}",
        f"  gradient, norm of the difference, relative  {same_weights.gradient:.1e}",
        "",
        "training, loss in nats per token   jaxformer reference  difference  control, difference",
    ]
    for number in sorted({1, 2, 5, 10, 20, 50, steps}):
        if number <= steps:
            i = number - 1
            pair = f"{training.jaxformer[i]:14.4f} {training.reference[i]:9.4f}"
            errors = f"{differences[i]:11.1e} {rounding[i]:20.1e}"
            lines.append(f"  before update {number:<12} {pair} {errors}")
    return [
        *lines,
        f"  greatest of {steps} updates {'':>29}{max(differences):11.1e} {max(rounding):20.1e}",
        f"  final weights, relative to their movement {training.weights:17.1e} "
        f"{training.rounding_weights:20.1e}",
    ]


def _relative(values: list[float], others: list[float]) -> list[float]:
    return [abs(a - b) / abs(a) for a, b in zip(values, others, strict=True)]


def _nats_per_token(metrics: Any) -> float:
    return float(metrics["loss"]) / float(metrics["tokens"])


def _trained(side: JaxSide, batches: Iterable[PairBatch], start: Any) -> tuple[Any, list[float]]:
    """Trains from `start` on `batches`; returns our parameters and the losses."""
    state = replace(side.make_state(), params=jax.tree.map(jnp.array, start))
    losses = []
    for batch in batches:
        state, metrics = side.step(state, batch)
        losses.append(_nats_per_token(metrics))
    return jax.tree.map(np.asarray, state.params), losses


def _neighbours(tree: Any) -> Any:
    """Moves each number to the next float32 above or below, at random."""
    rng = np.random.default_rng(0)

    def move(x: np.ndarray) -> np.ndarray:
        return np.nextafter(x, rng.choice(np.array([-np.inf, np.inf], np.float32), x.shape))

    return jax.tree.map(move, tree)


def _distance(a: Any, b: Any) -> float:
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)))


if __name__ == "__main__":
    cli.start(main, presets(), __doc__)
