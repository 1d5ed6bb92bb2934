"""The texts and attention on the page of a language model (`experiments.runs page`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.harness.results.pages import Contents, Sentence
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.language_modelling.attend import attend, has_mask
from experiments.language_modelling.evaluate import answer_prompts, split_samples
from experiments.language_modelling.load_run import LoadedRun, load_run
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderOnly
from jaxformer.pretrained import is_pretrained, load_eos

_NEW_TOKENS = 50
"""Tokens that continue a text, where the run has no samples."""


def contents(folder: Path, options: RunOptions, texts: Sequence[str] = ()) -> Contents:
    """The samples of the run, and `texts`, or its prompts, with their attention.

    The folder may also be a language model of `transformers`, which needs `texts`.
    """
    loaded = load_run(folder, options)
    texts = texts or loaded.config.prompts
    if not texts and is_pretrained(folder):
        raise ConfigError(f"{folder} is a folder of transformers, without prompts: give --text")
    sentences = [Sentence(text, [attend(loaded, text)]) for text in texts if text.strip()]
    path = folder / "samples" / "prompts.txt"
    if path.is_file():
        samples = _samples(path, loaded.config.prompts)
    else:
        samples = _answers(folder, loaded, texts)
    return Contents(loaded.params, sentences, samples)


def _answers(folder: Path, loaded: LoadedRun, texts: Sequence[str]) -> dict[str, Sequence[str]]:
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
    return {"prompt": texts, "what follows": answer_prompts(loaded._replace(config=config))}


def _samples(path: Path, prompts: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """The columns of the run's samples; one, if they were made of other prompts."""
    text = path.read_text(encoding="utf-8")
    answers = split_samples(text, prompts)
    if answers is None:
        return {"prompts and what follows": [text]}
    return {"prompt": prompts, "what follows": answers}
