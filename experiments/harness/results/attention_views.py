"""The attention weights of a sentence, with the tokens at both sides."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.harness.cli import heat_map
from experiments.harness.results import plots
from jaxformer.errors import ConfigError
from jaxformer.nn.inspection import read_taps, tap_names, with_attention_weights
from jaxformer.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLACE = re.compile(r"(\w+)/blocks_(\d+)/(\w+)/weights$")


class AttentionView(NamedTuple):
    """Attention of one kind in one sentence: query t attends to key s with weight [.., t, s]."""

    kind: str
    query_tokens: Sequence[str]
    key_tokens: Sequence[str]
    weights: Float[np.ndarray, "layers heads T S"]
    first_layer: int = 0
    first_head: int = 0


def read_weights(
    model: Any, params: Any, *inputs: Int[np.ndarray, "B T"] | Bool[np.ndarray, "B T"]
) -> dict[str, Float[np.ndarray, "layers heads T S"]]:
    """The attention weights of the first row of a batch, named as those of `batch_weights`."""
    found = batch_weights(model, params, *inputs)
    return {name: weights[:, 0] for name, weights in found.items()}


def batch_weights(
    model: Any, params: Any, *inputs: Int[np.ndarray, "B T"] | Bool[np.ndarray, "B T"]
) -> dict[str, Float[np.ndarray, "layers B heads T S"]]:
    """The attention weights of a batch, by stack and kind.

    The names are "encoder/attention", "decoder/attention" and "decoder/cross_attention".
    """
    _, values = _reader(model)(params, *inputs)
    return stacked(values)


@lru_cache(maxsize=2)
def _reader(model: Any) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """The compiled `read_taps` of the attention weights; evaluations of a training share it."""
    model = with_attention_weights(model)
    names = [name for name in tap_names(model) if _PLACE.search(name)]
    if not names:
        raise ConfigError(
            "the model's blocks are not named blocks_0, blocks_1, ..., or have no attention "
            "weights: attention can be drawn for the library's own block only"
        )
    return jax.jit(partial(read_taps, model, names=names))


def stacked(
    values: Mapping[str, Float[np.ndarray, "B heads T S"]],
) -> dict[str, Float[np.ndarray, "layers B heads T S"]]:
    """The attention weights among `values`, in the order of their layers."""
    found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, value in values.items():
        if place := _PLACE.search(name):
            stack, layer, kind = place.groups()
            found[f"{stack}/{kind}"][int(layer)] = np.asarray(value)
    return {
        name: np.stack([weights for _, weights in sorted(layers.items())])
        for name, layers in found.items()
    }


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
    return view._replace(weights=weights, first_layer=layer or 0, first_head=head or 0)


def draw(view: AttentionView) -> "Figure":
    """A panel for each layer and head."""
    first = view.first_layer, view.first_head
    return plots.attention_grid(view.weights, view.query_tokens, view.key_tokens, *first)


def last_layer(view: AttentionView) -> "Figure":
    """The heads of the last layer, a panel each."""
    return draw(chosen(view, len(view.weights) - 1, None))


def entropy(
    weights: Float[np.ndarray, "layers B heads T S"], queries: Bool[np.ndarray, "B T"]
) -> Float[np.ndarray, "layers heads"]:
    """The mean over `queries` of the entropy of their weights, in bits."""
    logs = np.log2(np.where(weights > 0.0, weights, 1.0))
    entropies = -np.sum(weights * logs, axis=-1).swapaxes(1, 2)
    return entropies[:, :, queries].mean(axis=-1)


def as_text(view: AttentionView) -> str:
    """The mean over layers and heads as a heat map in characters."""
    mean = view.weights.mean(axis=(0, 1))
    return "\n".join(heat_map(mean, view.query_tokens, view.key_tokens))
