"""Options of the commands that decode: the search, and the members of an ensemble."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.harness.cli import display
from experiments.harness.runs.run_options import RunOptions
from jaxformer import storage
from jaxformer.config import Natural, Positive, dotted_fields
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.int8 import quantize
from jaxformer.pipelines.ensemble import Ensemble, stack_members
from jaxformer.pretrained import Loaded
from jaxformer.pretrained.model_specs import TRAINING_ONLY


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(RunOptions):
    """A run and settings of its decoding; None, and a beam size of 0, are the run's own."""

    beam_size: Natural = 0
    """Beam size; 0: the run's."""
    length_penalty: float | None = None
    """Exponent of the length penalty of beam search; None: the run's."""
    no_repeat_ngram_size: Natural | None = None
    """No run of so many tokens occurs twice in a text; 0: any may; None: as the run says."""
    repetition_penalty: Positive | None = None
    """Above 1, tokens that a text already holds become less likely; None: as the run says."""
    source_language: str | None = None
    """The language of the sources, for a folder of many languages, such as eng_Latn; None: the
    folder's."""
    target_language: str | None = None
    """The language of the translations, for a folder of many languages; None: the folder's."""

    def settings(
        self, search: SearchConfig, translation: TranslationOptions
    ) -> tuple[SearchConfig, TranslationOptions]:
        """The settings of a run or a folder with the values of these options."""
        if self.source_language:
            translation = replace(translation, source_language=self.source_language)
        if self.target_language:
            translation = replace(translation, target_language=self.target_language)
        return self.search(search), translation

    def search(self, config: SearchConfig) -> SearchConfig:
        """The run's `config` with the values of these options."""
        options = {
            "beam_size": self.beam_size or None,
            "length_penalty": self.length_penalty,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "repetition_penalty": self.repetition_penalty,
        }
        given: dict[str, Any] = {
            name: value for name, value in options.items() if value is not None
        }
        return replace(config, **given)


def run_folders(run: str) -> list[Path]:
    """The folders that `run` names, separated by commas."""
    whole = storage.to_path(run)
    names = [name.strip() for name in run.split(",") if name.strip()]
    return [whole] if whole.is_dir() or not names else [storage.to_path(name) for name in names]


def load_members(load: Callable[[Path], Loaded], run: str, *, int8: bool = False) -> Loaded:
    """The result of `load` for the folder `run`; of several folders, the first with their ensemble.

    Raises `ConfigError` for runs whose models or tokenizers differ.
    """
    folders = run_folders(run)
    with display.waiting(f"reading {run}"):
        members = [load(folder) for folder in folders]
    if int8:
        members = [replace(each, params=quantize(each.model, each.params)) for each in members]
    first = members[0]
    if len(members) == 1:
        return first
    for folder, member in zip(folders, members, strict=True):
        _check_member(folders[0], first, folder, member)
    params = stack_members([member.params for member in members])
    return replace(first, model=Ensemble(first.model), params=params)


def _check_member(first_folder: Path, first: Loaded, folder: Path, member: Loaded) -> None:
    end = f", but the models of an ensemble must agree: leave out {folder}"
    fields = dotted_fields(member.model.config)
    for name, value in dotted_fields(first.model.config).items():
        if name not in TRAINING_ONLY and value != fields[name]:
            values = f"{value!r} in {first_folder} and {fields[name]!r} in {folder}"
            raise ConfigError(f"model.{name} is {values}{end}")
    if type(first.model) is not type(member.model):
        raise ConfigError(f"{first_folder} and {folder} differ in their model{end}")
    if getattr(first.model, "block", None) != getattr(member.model, "block", None):
        raise ConfigError(f"{first_folder} and {folder} differ in their block{end}")
    if _vocabularies(first) != _vocabularies(member):
        raise ConfigError(f"{first_folder} and {folder} have different tokenizers{end}")


def _vocabularies(loaded: Loaded) -> list[str | None]:
    tokenizers = loaded.tokenizer, loaded.target_tokenizer
    return [None if tokenizer is None else tokenizer.fingerprint for tokenizer in tokenizers]
