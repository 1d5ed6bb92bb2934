"""A run, or a language model of transformers."""

from dataclasses import replace
from pathlib import Path

from experiments.harness.runs.run_options import RunOptions
from experiments.harness.training import build
from experiments.language_modelling.finetune_presets import FinetuneConfig
from experiments.language_modelling.init_from_pretrained import describe
from experiments.language_modelling.presets import LanguageConfig
from jaxformer.distributed import Strategy
from jaxformer.pretrained import Loaded


def load_run(
    folder: Path,
    options: RunOptions = RunOptions(),
    devices: Strategy | None = None,
) -> Loaded:
    """The model in `folder`; `config` describes also one of transformers.

    Raises `ConfigError` as `build.load_run` does, and for a folder of transformers without a
    language model or without a tokenizer.
    """
    loaded = build.load_run(folder, options, LanguageConfig, FinetuneConfig, devices=devices)
    return replace(loaded, config=loaded.config or describe(folder, loaded))
