"""The texts and attention of a run, for its page (`experiments.runs page`)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.harness.results.attention_views import AttentionView, label, read_weights
from experiments.harness.results.groups import sample_texts
from experiments.harness.results.pages import Contents, Sentence
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.language_modelling.evaluate import continued_prompts
from experiments.language_modelling.load_run import load_run
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderOnly
from jaxformer.pipelines.batching import bos_eos
from jaxformer.pretrained import Loaded, is_pretrained, load_eos
from jaxformer.text.tokenizers import Tokenizer

_NEW_TOKENS = 50
"""Tokens that continue a text, where the run has no samples."""


def page_contents(folder: Path, options: RunOptions, texts: Sequence[str] = ()) -> Contents:
    """The samples of the run, and `texts`, or its prompts, with their attention.

    The folder may also be a language model of `transformers`, which needs `texts`.
    """
    loaded = load_run(folder, options)
    texts = texts or loaded.config.prompts
    if not texts and is_pretrained(folder):
        raise ConfigError(f"{folder} is a folder of transformers, without prompts: give --text")
    sentences = [Sentence(text, [attend(loaded, text)]) for text in texts if text.strip()]
    samples = sample_texts(folder) or _answers(folder, loaded, texts)
    return Contents(loaded.params, sentences, samples)


def _answers(folder: Path, loaded: Loaded, texts: Sequence[str]) -> dict[str, Sequence[str]]:
    """The columns of texts and answers; none without a head, or without a mask to fill."""
    sampling = replace(loaded.config.sampling, max_new_tokens=_NEW_TOKENS)
    completion = replace(loaded.config.completion, overflow="slide")
    if is_pretrained(folder):
        completion = replace(completion, eos=load_eos(folder))
    if loaded.config.objective == "masked":
        texts = [text for text in texts if has_mask(text, loaded.tokenizer)]
    if not texts or isinstance(loaded.model, EncoderOnly):
        return {}
    config = replace(loaded.config, prompts=tuple(texts), sampling=sampling, completion=completion)
    return {"prompts and what follows": continued_prompts(replace(loaded, config=config))}


def attend(loaded: Loaded, text: str) -> AttentionView:
    """The self-attention of the model in `text`, which is cut at the model's context."""
    if not text.strip():
        raise ConfigError("the text is blank: give a text with tokens")
    tokenizer, masked = loaded.tokenizer, loaded.config.objective == "masked"
    ids = _masked_ids(text, loaded) if masked else tokenizer.encode(text)
    ids = ids[: loaded.model.config.max_len]
    (weights,) = read_weights(loaded.model, loaded.params, np.array([ids])).values()
    tokens = [label(tokenizer, index) for index in ids]
    return AttentionView("self-attention", tokens, tokens, weights)


def _masked_ids(text: str, loaded: Loaded) -> list[int]:
    """The ids of a text, in which masks may stand, between BOS and EOS."""
    return loaded.tokenizer.encode_inputs([text], bos_eos(loaded.tokenizer))[0]


def has_mask(text: str, tokenizer: Tokenizer) -> bool:
    """True where a mask token stands in `text`."""
    mask = tokenizer.special.mask
    return mask is not None and tokenizer.token(mask) in text
