"""The translations and attention on the page of a translation run (`experiments.runs page`)."""

from collections.abc import Sequence
from pathlib import Path

from experiments.harness.results.pages import Contents, Sentence
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.translation.attend import attend
from experiments.translation.evaluate import read_samples, without_too_long
from experiments.translation.load_run import load_translator
from jaxformer.errors import ConfigError
from jaxformer.pretrained import is_pretrained

_SENTENCES = 5
"""Samples that are shown with their attention."""


def contents(folder: Path, options: RunOptions, texts: Sequence[str] = ()) -> Contents:
    """The samples of the run, and `texts`, or the first samples, with their attention.

    The folder may also be an encoder-decoder of `transformers`, which needs `texts`.
    """
    translator = load_translator(folder, options=options)
    samples = read_samples(folder)
    if not texts:
        lines = samples.get("source", [])[:_SENTENCES]
        texts, _ = without_too_long(translator, lines, translator.search, translator.options)
    if not texts and is_pretrained(folder):
        raise ConfigError(f"{folder} is a folder of transformers, without samples: give --text")
    attended = [(text, *attend(translator, text)) for text in texts if text.strip()]
    if not samples:
        samples = {
            "source": [text for text, *_ in attended],
            "model": [translation for _, translation, _ in attended],
        }
    sentences = [
        Sentence(f"{text} = {translation}", list(views.values()))
        for text, translation, views in attended
    ]
    return Contents(translator.params, sentences, samples)
