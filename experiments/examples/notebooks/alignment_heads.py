"""The heads of a translation model's cross-attention that align words.

Each head is changed in three ways, one head at a time, and the loss of the reference translations
is compared. Where its weights are set to zero, the head says nothing; where they are uniform, it
looks at all words alike; where they are one-hot, it looks only at the word with the largest weight.
A head aligns words if the second costs much and the third little: then it matters which word it
looks at, and that word is enough.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.nn.inspection import Patched
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import seq2seq_loss

Weights = Float[Array, "B N T S"]


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
