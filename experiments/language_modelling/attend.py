"""The attention of a language model in a text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.harness.results import attention_views
from experiments.harness.results.attention_views import AttentionView, label, read_weights
from experiments.language_modelling.load_run import LoadedRun
from jaxformer.errors import ConfigError
from jaxformer.pipelines.batching import add_special_tokens
from jaxformer.pipelines.fill_mask import encode_masked
from jaxformer.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_attention(loaded: LoadedRun, texts: Sequence[str]) -> "Figure":
    """The attention of the last layer in the first of `texts`; `ConfigError` if there is none."""
    return attention_views.last_layer(attend(loaded, next(iter(texts), "")))


def attend(loaded: LoadedRun, text: str) -> AttentionView:
    """The self-attention of the model in `text`, which is cut at the model's context."""
    if not text.strip():
        raise ConfigError("the text is blank: give a text with tokens")
    tokenizer, masked = loaded.tokenizer, loaded.config.objective == "masked"
    ids = _masked_ids(text, loaded) if masked else tokenizer.encode(text)
    ids = ids[: loaded.model.config.max_len]
    (weights,) = read_weights(loaded.model, loaded.params, np.array([ids])).values()
    tokens = [label(tokenizer, index) for index in ids]
    return AttentionView("self-attention", tokens, tokens, weights)


def _masked_ids(text: str, loaded: LoadedRun) -> list[int]:
    """The ids of a text, in which masks may stand, between BOS and EOS."""
    tokenizer = loaded.tokenizer
    masks = has_mask(text, tokenizer)
    ids = encode_masked(text, 0, tokenizer) if masks else tokenizer.encode(text)
    return add_special_tokens(ids, tokenizer)


def has_mask(text: str, tokenizer: Tokenizer) -> bool:
    """True where a mask token stands in `text`."""
    mask = tokenizer.special.mask
    return mask is not None and tokenizer.token(mask) in text
