"""Finds the heads that align words: `python -m experiments.examples.alignment_heads --run RUN`.

Each head of the cross-attention of a translation model is changed in three ways, one head at a
time, and the loss of the reference translations is compared. Where its weights are set to zero, the
head says nothing; where they are uniform, it looks at all words alike; where they are one-hot, it
looks only at the word with the largest weight. A head aligns words if the second costs much and the
third little: then it matters which word it looks at, and that word is enough.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.harness import cli
from experiments.harness.results.attention_views import label
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.translation.evaluate import pair_batch, scored_text
from experiments.translation.load_run import LoadedRun, load_run
from jaxformer.config import check_at_least
from jaxformer.nn.inspection import Patched, read_taps, with_attention_weights
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import EOS, PAD
from jaxformer.training.losses import seq2seq_loss

Weights = Float[Array, "B N T S"]


@dataclass(frozen=True)
class AlignmentOptions(RunOptions):
    """The run and the pairs."""

    run: str = "runs/translation/grammar"
    """Folder of a translation run."""
    pairs: int = 64
    """Number of pairs whose loss is measured, of the text that the run was scored on."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 1, "pairs")


class Effects(NamedTuple):
    """Rise of the loss in nats per token when one head of a layer is changed."""

    zero: Float[np.ndarray, "layers heads"]
    uniform: Float[np.ndarray, "layers heads"]
    one_hot: Float[np.ndarray, "layers heads"]

    @property
    def aligning(self) -> np.ndarray:
        """Heads that align: uniform weights cost much, one-hot weights at most a fifth of it."""
        much = max(0.02, 0.1 * float(self.uniform.max()))
        return (self.uniform > much) & (self.one_hot < 0.2 * self.uniform)


def main(options: AlignmentOptions) -> None:
    """Prints a table of heads, and the words that the strongest one aligns in the first pair."""
    loaded = load_run(Path(options.run), options)
    loaded = loaded._replace(model=with_attention_weights(loaded.model))
    batch = pair_batch(loaded, scored_text(Path(options.run)), options.pairs)
    loss, effects = measure(loaded.model, loaded.params, batch)
    print(f"loss of {len(batch.source)} pairs: {loss:.3f} nats per token; it rises by")
    print("\n".join(table(effects)))
    layer, head = np.unravel_index(effects.uniform.argmax(), effects.uniform.shape)
    words = aligned(loaded, batch, int(layer), int(head))
    print(textwrap.fill(f"layer {layer}, head {head} looks at: {words}", 80))


def measure(model: Any, params: Any, batch: PairBatch) -> tuple[float, Effects]:
    """The loss per token, and what each change of one head adds to it.

    One program measures all heads: which of them is changed is an argument [layers, heads].
    """
    config = model.config
    heads = config.num_decoder_layers, config.num_heads
    real = jnp.asarray(batch.source != PAD)[:, None, None]
    edits: dict[str, Callable[[Weights], Weights]] = {
        "zero": jnp.zeros_like,
        "uniform": lambda w: jnp.broadcast_to(real / real.sum(axis=-1, keepdims=True), w.shape),
        "one_hot": lambda w: jax.nn.one_hot(w.argmax(axis=-1), w.shape[-1]),
    }

    @partial(jax.jit, static_argnums=1)
    def losses(params: Any, edit: Callable[[Weights], Weights]) -> Array:
        def loss(changed: Array) -> Array:
            patched: Any = Patched(
                model,
                {
                    f"decoder/blocks_{i}/cross_attention/weights": partial(_where, changed[i], edit)
                    for i in range(heads[0])
                },
            )
            total, tokens, *_ = seq2seq_loss(patched, pad=PAD)(params, batch, None)
            return total / tokens

        each = jnp.eye(heads[0] * heads[1]).reshape(-1, *heads)
        return jax.lax.map(loss, jnp.concatenate([jnp.zeros_like(each[:1]), each]))

    measured = {name: np.asarray(losses(params, edit)) for name, edit in edits.items()}
    unchanged = float(measured["zero"][0])
    return unchanged, Effects(*(x[1:].reshape(heads) - unchanged for x in measured.values()))


def _where(changed: Array, edit: Callable[[Weights], Weights], weights: Weights) -> Weights:
    """`weights`, edited in the heads in which `changed` [N] is 1."""
    return jnp.where(changed[None, :, None, None] > 0, edit(weights), weights)


def table(effects: Effects) -> list[str]:
    """A line for each head, the one that needs its weights most first."""
    lines = ["layer  head   zeroed  uniform  one-hot"]
    for index in np.argsort(-effects.uniform, axis=None):
        layer, head = np.unravel_index(index, effects.uniform.shape)
        numbers = "".join(f"{values[layer, head]:9.3f}" for values in effects)
        mark = "  aligns words" if effects.aligning[layer, head] else ""
        lines.append(f"{layer:5} {head:5} {numbers[1:]}{mark}")
    return lines


def aligned(loaded: LoadedRun, batch: PairBatch, layer: int, head: int) -> str:
    """Each token of the first pair's target, with the source token that the head looks at."""
    name = f"decoder/blocks_{layer}/cross_attention/weights"
    source, target = batch.source[:1], batch.target[:1]
    read = jax.jit(partial(read_taps, loaded.model, names=[name]))
    _, taps = read(loaded.params, source, target[:, :-1], source != PAD)
    positions = np.asarray(taps[name][0, head].argmax(axis=-1))
    return ", ".join(
        f"{label(loaded.target_tokenizer, int(token))} = "
        f"{label(loaded.source_tokenizer, int(source[0, position]))}"
        for token, position in zip(target[0, 1:], positions, strict=True)
        if token not in (EOS, PAD)
    )


if __name__ == "__main__":
    cli.start(main, {"default": AlignmentOptions()}, __doc__)
