"""Export a run: `python -m experiments.translation.export --run RUN --format F --out FOLDER`.

transformers: a folder for AutoModelForSeq2SeqLM and for ct2-transformers-converter, of a run of a
preset such as grammar_marian. ctranslate2: that folder, converted. stablehlo: the run's search as
one function with its weights, of any run; this folder's README has the lines that load it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from experiments.harness import cli
from experiments.harness.results import exporting
from experiments.harness.runs.decoding_options import DecodingOptions, load_members
from experiments.translation.load_run import LoadedRun, load_run
from experiments.translation.marian_layout import marian_layout
from jaxformer.decoding import SearchConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import max_target_length, translate_ids
from jaxformer.text.tokenizers import PAD

_PRESETS = ("grammar_marian", "wmt14_base_marian")


@dataclass(frozen=True)
class ExportOptions(DecodingOptions, exporting.ExportOptions):
    """The run to export, what for, and where to."""

    run: str = "runs/translation/grammar"
    """The folder of the run; several folders, separated by commas, are one ensemble (stablehlo)."""
    source_length: int = 32
    """Ids of each sentence, padding included, with --format stablehlo."""

    def __post_init__(self):
        super().__post_init__()
        exporting.ExportOptions.__post_init__(self)
        if self.decoding != "beam":
            raise ConfigError(
                f"decoding={self.decoding!r} cannot be exported, only beam search: leave it out"
            )


def search_function(
    loaded: LoadedRun, search: SearchConfig, source_length: int
) -> Callable[[Int[Array, "B S"]], dict[str, Any]]:
    """The run's beam search as a function of source ids [B, S], S = `source_length`.

    Each sentence ends with EOS. The function returns {"tokens" [B, W, L], "scores" [B, W],
    "log_probs" [B, W, L]}.
    """

    def translate(source: Int[Array, "B S"]) -> dict[str, Any]:
        more = loaded.config.translation.max_extra_tokens
        limits = jnp.sum(source != PAD, axis=1, dtype=jnp.int32) + more
        if search.max_new_tokens is not None:
            limits = jnp.full_like(limits, search.max_new_tokens)
        settings = search, loaded.config.translation
        size = max_target_length(loaded.model.config, source_length, *settings)
        sized = replace(search, max_new_tokens=size)
        return translate_ids(loaded.model, loaded.params, source, limits, sized)._asdict()

    return translate


def published(loaded: LoadedRun, search: SearchConfig) -> exporting.Published:
    """The run in Marian's layout; `ConfigError` for a model that does not fit."""
    model, tokenizer = loaded.model, loaded.source_tokenizer
    if not isinstance(model, EncoderDecoder):
        raise ConfigError("an ensemble is several models: give one run")
    if tokenizer is not loaded.target_tokenizer:
        raise ConfigError(
            "source and target have a vocabulary each, but a tokenizer.json has one: train "
            "without --model.source_vocab_size"
        )
    layout = marian_layout(model, loaded.params, tokenizer, search)
    return exporting.Published(*layout[:4])


def exportable(options: ExportOptions) -> exporting.Exportable:
    """The run that `options` name, with its search."""
    loaded = load_members(lambda folder: load_run(folder, options), options.run, options.ensemble)
    search = options.search(loaded.config.search)
    joint = loaded.source_tokenizer is loaded.target_tokenizer
    files = {"tokenizer.json": loaded.target_tokenizer}
    files |= {} if joint else {"source_tokenizer.json": loaded.source_tokenizer}
    return exporting.Exportable(
        config=loaded.config,
        task="translation",
        published=lambda: published(loaded, search),
        presets=_PRESETS,
        function=search_function(loaded, search, options.source_length),
        length=("source_length", options.source_length),
        tokenizers=files,
    )


def main(options: ExportOptions) -> None:
    """Writes the folder."""
    exporting.export(options, lambda: exportable(options))


if __name__ == "__main__":
    cli.start(main, {"default": ExportOptions()}, __doc__)
