"""The attention weights of a sentence, with the tokens at both sides."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.harness.terminal_drawing import heat_map
from jaxformer.errors import ConfigError
from jaxformer.text.tokenizers import Tokenizer


class AttentionView(NamedTuple):
    """Attention of one kind in one sentence: query t attends to key s with weight [.., t, s]."""

    kind: str
    query_tokens: Sequence[str]
    key_tokens: Sequence[str]
    weights: Float[np.ndarray, "layers heads T S"]


def stacked(part: Mapping[str, Any], name: str) -> Float[np.ndarray, "layers heads T S"]:
    """The weights of the first row of a batch in each block of `part`.

    `part` holds the blocks of one stack among the intermediates of `model.apply`; `name` is
    "attention" or "cross_attention".
    """
    blocks = _blocks(part)
    if not blocks:
        raise ConfigError(
            "the model's blocks are not named blocks_0, blocks_1, ..., or record no attention "
            "weights: attention can be drawn for the library's own block only"
        )
    numbers = sorted(blocks, key=lambda block: int(block.removeprefix("blocks_")))
    return np.stack([np.asarray(blocks[i][name]["attention_weights"][0][0]) for i in numbers])


def _blocks(part: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks in `part`, or in the first of its parts that has some."""
    found = {key: value for key, value in part.items() if key.startswith("blocks_")}
    inner = (_blocks(value) for value in part.values() if isinstance(value, Mapping))
    return found or next(filter(None, inner), {})


def label(tokenizer: Tokenizer, index: int) -> str:
    """The text of a token, or its name where it has none."""
    return tokenizer.decode([index]).strip() or tokenizer.token(index)


def chosen(view: AttentionView, layer: int | None, head: int | None) -> AttentionView:
    """The view of one layer, one head, or both. Raises `ConfigError` for one that is not there."""
    weights = view.weights
    for axis, (name, number) in enumerate((("layer", layer), ("head", head))):
        if number is None:
            continue
        if not 0 <= number < weights.shape[axis]:
            raise ConfigError(
                f"--{name} {number} does not exist: the model has {weights.shape[axis]}, "
                f"numbered 0 to {weights.shape[axis] - 1}"
            )
        weights = weights.take([number], axis=axis)
    return view._replace(weights=weights)


def entropy(weights: Float[np.ndarray, "layers heads T S"]) -> Float[np.ndarray, "layers heads"]:
    """The mean over the queries of the entropy of their weights, in bits."""
    logs = np.log2(np.where(weights > 0.0, weights, 1.0))
    return -(weights * logs).sum(axis=-1).mean(axis=-1)


def as_text(view: AttentionView) -> str:
    """The mean over layers and heads as a heat map in characters."""
    mean = view.weights.mean(axis=(0, 1))
    return "\n".join(heat_map(mean, view.query_tokens, view.key_tokens))
