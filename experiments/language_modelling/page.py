"""The texts and attention of a run, for its page (`experiments.runs page`)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.harness.results.attention_views import AttentionView, label, read_weights
from experiments.harness.results.pages import Contents, Sentence
from experiments.harness.results.run_samples import prompted, sample_texts
from experiments.harness.runs.run_options import RunOptions
from experiments.language_modelling.load_run import load_run
from experiments.language_modelling.prompts import continued_prompts
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderOnly
from jaxformer.pipelines.inputs import bos_eos
from jaxformer.pretrained import Loaded, is_pretrained, load_eos
from jaxformer.text.tokenizers import Tokenizer

_NEW_TOKENS = 50
"""Tokens that continue a text, where the run has no samples."""
_ATTENDED = 48
"""Tokens of a text whose attention is shown."""


def page_contents(folder: Path, options: RunOptions, texts: Sequence[str] = ()) -> Contents:
    """`texts`, or the run's samples or prompts, with what the model writes and its attention there.

    The folder may also be a language model of `transformers`, which needs `texts`.
    """
    loaded = load_run(folder, options)
    samples: dict[str, list[str]] = {}
    if not texts:
        samples = sample_texts(folder)
        texts = loaded.config.prompts or ()
    texts = [text for text in texts if text.strip()]
    if not texts and is_pretrained(folder):
        raise ConfigError(f"{folder} is a folder of transformers, without prompts: give --text")
    samples = samples or _answers(folder, loaded, texts)
    read = texts
    if samples and loaded.config.objective != "masked":  # a model that fills masks writes nothing
        texts, written = samples.values()
        read = [text + added for text, added in zip(texts, written, strict=True)]
    sentences = [
        Sentence(text or whole, [attend(loaded, whole)])
        for text, whole in zip(texts, read, strict=True)
        if whole.strip()
    ]
    return Contents(loaded.params, sentences, samples)


def _answers(folder: Path, loaded: Loaded, texts: Sequence[str]) -> dict[str, list[str]]:
    """The columns prompt and model; none without a head, or without a mask to fill."""
    sampling = replace(loaded.config.sampling, max_new_tokens=_NEW_TOKENS)
    completion = replace(loaded.config.completion, overflow="slide")
    if is_pretrained(folder):
        completion = replace(completion, eos=load_eos(folder))
    if loaded.config.objective == "masked":
        tokenizer = loaded.require_tokenizer()
        texts = [text for text in texts if has_mask(text, tokenizer)]
    if not texts or isinstance(loaded.model, EncoderOnly):
        return {}
    config = replace(loaded.config, sampling=sampling, completion=completion)
    return prompted(continued_prompts(replace(loaded, config=config), texts), texts)


def attend(loaded: Loaded, text: str) -> AttentionView:
    """The self-attention of the model in the first tokens of `text`."""
    if not text.strip():
        raise ConfigError("the text is blank: give a text with tokens")
    tokenizer = loaded.require_tokenizer()
    if loaded.config.objective == "masked":
        ids = _masked_ids(text, tokenizer)
    else:
        ids = tokenizer.encode(text)
    ids = ids[: min(_ATTENDED, loaded.model.config.max_len)]
    (weights,) = read_weights(loaded.model, loaded.params, np.array([ids])).values()
    tokens = [label(tokenizer, index) for index in ids]
    return AttentionView("self-attention", tokens, tokens, weights)


def _masked_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text, in which masks may stand, between BOS and EOS."""
    return tokenizer.encode_inputs([text], bos_eos(tokenizer))[0]


def has_mask(text: str, tokenizer: Tokenizer) -> bool:
    """True where a mask token stands in `text`."""
    mask = tokenizer.special.mask
    return mask is not None and tokenizer.token(mask) in text
