"""Export a run: `python -m experiments.language_modelling.export --run RUN --out FOLDER`.

The folder is for transformers' pipelines "text-generation" and "fill-mask", as GPT-2, Llama,
DistilBERT or BERT.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results import exporting
from experiments.harness.runs import distributed
from experiments.language_modelling.finetune_presets import FACTS, FinetuneConfig
from experiments.language_modelling.load_run import load_run
from experiments.language_modelling.tasks.chat_template import TEMPLATE, load_template
from jaxformer.decoding import SamplingConfig
from jaxformer.errors import ConfigError
from jaxformer.pretrained import (
    PublishedModel,
    is_pretrained,
    load_sampling_config,
    open_folder,
    save_adapter,
)
from jaxformer.records import Record

_TASKS: dict[str, exporting.Task] = {"causal": "text-generation", "masked": "fill-mask"}
_FINETUNED: dict[str, exporting.Task] = {
    "classification": "text-classification",
    "pairs": "text-classification",
    "spans": "question-answering",
    "chat": "text-generation",
    "preference": "text-generation",
}
_PRESETS = (
    "python_stdlib",
    "shakespeare_char",
    "wikitext2",
    "gpt2_124m",
    "bert_tiny",
    "bert_base",
)


@dataclass(frozen=True)
class ExportOptions(exporting.ExportOptions):
    """The run to export, what for, and where to."""

    run: str = "runs/language_modelling/python_stdlib"
    """The folder of the run."""
    adapter: bool = False
    """Writes the LoRA adapters alone, as peft loads them, for the folder that the run started from.
    """


def published(options: ExportOptions) -> exporting.Published:
    """The run that `options` name, with its sampling."""
    folder = options.folder
    if is_pretrained(folder):
        raise ConfigError(f"{folder} is a folder of transformers already: give the folder of a run")
    loaded = load_run(folder, options)
    config = loaded.config
    generation: SamplingConfig | None = config.sampling if config.objective == "causal" else None
    like = exporting.started_from(config)
    if like and generation is not None:
        published, _ = load_sampling_config(like, config.model.max_len)
        if generation in (published, SamplingConfig()):
            generation = None  # the folder's is kept
    labels: list[str] = []
    files: dict[str, str] = {}
    task = _TASKS[config.objective]
    if isinstance(config, FinetuneConfig):
        labels = Record(folder / FACTS).read(labels=list).get("labels", [])
        task = _FINETUNED[config.task.kind]
        if config.task.kind in ("chat", "preference"):
            files = {TEMPLATE: load_template(folder, loaded.require_tokenizer()).source}
        else:
            generation = None
    return exporting.Published(
        config,
        task,
        loaded.model,
        loaded.params,
        loaded.require_tokenizer(),
        generation,
        config.completion,
        labels=labels,
        like=like,
        files=files,
    )


def _export_adapter(options: ExportOptions) -> None:
    """Writes the adapters of the run; `ConfigError` for a run of a run, which has no such base."""
    loaded = load_run(options.folder, options)
    base = exporting.started_from(loaded.config)
    source = None if base is None else open_folder(base)
    if not isinstance(source, PublishedModel):
        raise ConfigError(
            f"{options.run} did not start from a folder of transformers, which peft would add the "
            "adapters to: export the whole model, without --adapter"
        )
    save_adapter(options.out, loaded.model, options.weights.read_unmerged(), source)
    if distributed.is_first():
        for path in sorted(Path(options.out).iterdir()):
            print(f"{path}: {path.stat().st_size:,} bytes")


@distributed.joins
def main(options: ExportOptions) -> None:
    """Writes the folder."""
    if options.adapter:
        _export_adapter(options)
        return
    exporting.export(options, lambda: published(options), _PRESETS)


if __name__ == "__main__":
    cli.start(main, {"default": ExportOptions()}, __doc__)
