"""The attention weights of a sentence, with the tokens at both sides."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxformer.distributed import strategy_of
from jaxformer.errors import ConfigError
from jaxformer.nn.inspection import read_taps, tap_names, with_attention_weights
from jaxformer.text.tokenizers import Tokenizer

_TAP = re.compile(r"(\w+)/blocks_(\d+)/(\w+)/weights$")

_SIGNS = str.maketrans({" ": "␣", "▁": "␣", "Ġ": "␣", "\n": "↵", "Ċ": "↵", "\t": "⇥", "ĉ": "⇥"})
"""Signs for blanks, also as tokenizers spell them."""


class AttentionView(NamedTuple):
    """Attention of one kind in one sentence: query t attends to key s with weight [.., t, s]."""

    kind: str
    query_tokens: Sequence[str]
    key_tokens: Sequence[str]
    weights: Float[np.ndarray, "layers heads T S"]


def read_weights(
    model: Any, params: Any, *inputs: Int[np.ndarray, "B T"] | Bool[np.ndarray, "B T"]
) -> dict[str, Float[np.ndarray, "layers heads T S"]]:
    """The attention weights of the first row of a batch, by stack and kind.

    The names are "encoder/attention", "decoder/attention" and "decoder/cross_attention". Raises
    `ConfigError` for a model whose blocks have no attention weights. They are computed on the
    devices that have `params`: of several processes, all have to call this.
    """
    devices, read = strategy_of(params), _reader(model)
    with devices.active():
        _, values = read(params, *inputs)
    return {name: weights[:, 0] for name, weights in stacked(devices.gather(values)).items()}


@lru_cache(maxsize=2)
def _reader(model: Any) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """The compiled `read_taps` of the attention weights; evaluations of a training share it."""
    model = with_attention_weights(model)
    names = [name for name in tap_names(model) if _TAP.search(name)]
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
    kinds: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, value in values.items():
        if tap := _TAP.search(name):
            stack, layer, kind = tap.groups()
            kinds[f"{stack}/{kind}"][int(layer)] = np.asarray(value)
    return {
        name: np.stack([weights for _, weights in sorted(layers.items())])
        for name, layers in kinds.items()
    }


def label(tokenizer: Tokenizer, index: int) -> str:
    """The text of a token, with a sign for what is only blank, or its name where it has no text."""
    name, text = tokenizer.token(index), tokenizer.decode([index])
    if text.strip() and "\ufffd" not in text:
        return text.strip()
    signs = (text if text.isspace() else name).translate(_SIGNS)
    return signs if len(signs) <= 4 or not text.isspace() else f"{signs[:3]}…"
