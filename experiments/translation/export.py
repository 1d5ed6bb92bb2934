"""Export a run: `python -m experiments.translation.export --run RUN --format F --out FOLDER`.

transformers: a folder for AutoModelForSeq2SeqLM and for ct2-transformers-converter, of a run of a
preset such as grammar_marian. ctranslate2: that folder, converted.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results import exporting
from experiments.translation.load_run import load_run
from experiments.translation.marian_layout import marian_layout
from jaxformer.errors import ConfigError

_PRESETS = ("grammar_marian", "wmt14_base_marian")


@dataclass(frozen=True)
class ExportOptions(exporting.ExportOptions):
    """The run to export, what for, and where to."""

    run: str = "runs/translation/grammar"
    """The folder of the run."""


def exportable(options: ExportOptions) -> exporting.Exportable:
    """The run that `options` name, in Marian's layout."""
    loaded = load_run(Path(options.run), options)

    def published() -> exporting.Published:
        if loaded.source_tokenizer is not loaded.target_tokenizer:
            raise ConfigError(
                "source and target have a vocabulary each, but a tokenizer.json has one: train "
                "without --model.source_vocab_size"
            )
        search = loaded.config.search
        layout = marian_layout(loaded.model, loaded.params, loaded.source_tokenizer, search)
        return exporting.Published(*layout[:4])

    return exporting.Exportable(loaded.config, "translation", published, _PRESETS)


def main(options: ExportOptions) -> None:
    """Writes the folder."""
    exporting.export(options, lambda: exportable(options))


if __name__ == "__main__":
    cli.start(main, {"default": ExportOptions()}, __doc__)
