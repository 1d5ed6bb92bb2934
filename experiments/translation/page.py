"""The translations and attention of a run, for its page (`experiments.runs page`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.harness.results.attention_views import AttentionView, label, read_weights
from experiments.harness.results.pages import Contents, Sentence
from experiments.harness.runs.run_options import RunOptions
from experiments.translation.load_run import load_run
from experiments.translation.samples import read_samples
from experiments.translation.scoring import prepare_sources, search_of
from jaxformer.errors import ConfigError
from jaxformer.pipelines import encode_sources, translate_with_details
from jaxformer.pretrained import Loaded, is_pretrained

_SENTENCES = 5
"""Samples that are shown with their attention."""


def page_contents(folder: Path, options: RunOptions, texts: Sequence[str] = ()) -> Contents:
    """The samples of the run, and `texts`, or the first samples, with their attention.

    The folder may also be an encoder-decoder of `transformers`, which needs `texts`.
    """
    loaded = load_run(folder, options=options)
    samples = read_samples(folder)
    if not texts:
        texts, _ = prepare_sources(loaded, samples.get("source", [])[:_SENTENCES])
    if not texts and is_pretrained(folder):
        raise ConfigError(f"{folder} is a folder of transformers, without samples: give --text")
    attended = [(text, *attend(loaded, text)) for text in texts if text.strip()]
    sentences = [Sentence(f"{text} = {best}", views) for text, best, views in attended]
    if not samples:
        samples["source"] = [text for text, _, _ in attended]
        samples["model"] = [best for _, best, _ in attended]
    return Contents(loaded.params, sentences, samples)


def attend(loaded: Loaded, text: str) -> tuple[str, list[AttentionView]]:
    """The best translation of `text`, and its attention: cross, of the encoder, of the decoder."""
    tokenizer, target_tokenizer = loaded.require_tokenizer(), loaded.require_target_tokenizer()
    (source,) = encode_sources(loaded.model, [text], tokenizer, *search_of(loaded))
    best = translate_with_details(loaded, text)[0]
    inputs = np.array([source]), np.array([[search_of(loaded)[1].bos, *best.ids[:-1]]])
    weights = read_weights(loaded.model, loaded.params, *inputs)
    read = [label(tokenizer, i) for i in source]
    given = [label(target_tokenizer, i) for i in inputs[1][0].tolist()]
    written = [label(target_tokenizer, i) for i in best.ids]
    return best.text, [
        AttentionView("cross-attention", written, read, weights["decoder/cross_attention"]),
        AttentionView("encoder self-attention", read, read, weights["encoder/attention"]),
        AttentionView("decoder self-attention", given, given, weights["decoder/attention"]),
    ]
