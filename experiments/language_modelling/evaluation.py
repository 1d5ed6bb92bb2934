"""How good a language model is, and which weights to keep."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import linen as nn

from experiments import commands, machines, weights
from experiments.language_modelling import showing
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.prepare import Encoded, Prepared
from experiments.language_modelling.presets import LanguageConfig
from experiments.language_modelling.trained import Trained, with_weights
from experiments.runs import Run
from experiments.standing import Standing
from jaxformer.checkpoint import Checkpoints
from jaxformer.losses import Head, Loss
from jaxformer.metrics import Likelihood
from jaxformer.parallel import Devices
from jaxformer.training import TrainState


def measure(trained: Trained, text: Encoded, *, stride: int | None = None) -> Likelihood:
    """The likelihood of the whole of `text`, in rows `stride` (default: their length) apart.

    Of a causal model that is every token but the first of each document (of the whole text,
    where documents are not separate); of a masked one the tokens hidden in a fixed way. Raises
    `ConfigError` for a stride outside 1 to length.
    """
    config, judged = trained.config, objective(trained.config)
    head = config.training.head
    stride = stride or config.data.length
    nats = tokens = 0.0
    for batch in judged.cover(text.tokens, trained.tokenizer, config, stride):
        total, count = _sums(
            trained.params, batch, loss=judged.measure, model=trained.model, head=head
        )
        nats, tokens = nats + float(total), tokens + float(count)
    return Likelihood(nats, int(tokens), *text.amount)


@partial(jax.jit, static_argnames=("loss", "model", "head"))
def _sums(params: Any, batch: Any, *, loss: Callable[..., Loss], model: nn.Module, head: Head):
    return loss(model, head=head)(params, batch, None)


def validate(
    config: LanguageConfig,
    prepared: Prepared,
    devices: Devices,
    state: TrainState,
    standing: Standing,
    run: Run,
) -> Standing:
    """The standing after measuring the validation text with the weights of now."""
    params = machines.local(devices, state.params if state.ema is None else state.ema)
    found = measure(with_weights(config, prepared, params), prepared.validation)
    step, numbers = int(state.step), {"validation_loss": found.loss}
    if config.objective == "causal":
        numbers["validation_bits_per_byte"] = found.bits_per_byte
    run.log(step, **numbers)
    standing = standing.after(machines.agreed(found.loss), step)
    said = "  ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in numbers.items())
    commands.say(f"step {step}  {said}  (best loss {standing.best:.4f})")
    return standing


def finish(
    config: LanguageConfig, prepared: Prepared, checkpoints: Checkpoints, folder: Path
) -> None:
    """Chooses the weights, measures them on the test text, shows and writes what they do."""

    def metric(params: Any, steps: list[int]) -> float:
        found = measure(with_weights(config, prepared, params), prepared.validation)
        print(f"steps {', '.join(map(str, steps))}: validation loss {found.loss:.4f}")
        return found.loss

    chosen = weights.choose(checkpoints, config.training, metric)
    if machines.is_first():
        weights.note(folder, chosen.steps, validation_loss=chosen.metric)
    trained = with_weights(config, prepared, chosen.params)
    text = showing.of_prompts(trained)
    if text and machines.is_first():
        (folder / "samples").mkdir(exist_ok=True)
        (folder / "samples" / "prompts.txt").write_text(text, encoding="utf-8")
        print(text)
    name = "validation" if prepared.test is None else "test"
    found = measure(trained, prepared.test or prepared.validation)
    note = {"text": name, "stride": config.data.length, **scores_of(config, found)}
    if machines.is_first():
        text = json.dumps(note, indent=2) + "\n"
        (folder / "scores.json").write_text(text, encoding="utf-8")
    print(describe_scores(name, config, found))


def scores_of(config: LanguageConfig, found: Likelihood) -> dict[str, float]:
    """The sums and what they say; a masked model's say nothing of words and bytes."""
    scores = {"nats": found.nats, "tokens": found.tokens}
    scores |= {"loss": found.loss, "perplexity": found.perplexity}
    if config.objective == "masked":
        return scores
    scores |= {"words": found.words, "bytes": found.bytes}
    return scores | {
        "word_perplexity": found.word_perplexity,
        "bits_per_byte": found.bits_per_byte,
    }


def describe_scores(name: str, config: LanguageConfig, found: Likelihood) -> str:
    """The scores, a line each, with what they are divided by."""
    what = "hidden tokens" if config.objective == "masked" else "tokens"
    lines = [
        f"{name}: {found.tokens:,} {what}",
        f"  loss {found.loss:.4f} nats a token, perplexity {found.perplexity:.2f}",
    ]
    if config.objective == "causal":
        lines += [
            f"  word perplexity {found.word_perplexity:.2f} (nats / {found.words:,} words, the "
            "end of each line one of them)",
            f"  bits per byte {found.bits_per_byte:.4f} ({found.bytes:,} bytes)",
        ]
    return "\n".join(lines)
