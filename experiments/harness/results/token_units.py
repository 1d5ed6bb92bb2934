"""The tokens that a loss is a mean over; losses of different tokens are not compared."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from experiments.harness.results.groups import Group
from experiments.harness.results.run_settings import settings_of
from jaxformer.records import Record
from jaxformer.text.tokenizers import digest


class TokenUnit(NamedTuple):
    """The tokens that a score per token is a mean over; empty for any other score."""

    tokens: str = ""
    """The number of tokens of the text, or the digest of the vocabularies where it says nothing."""
    hidden: str = ""
    """The share of the tokens that a masked model predicts, as JSON."""


def token_unit(folder: Path, metric: str) -> TokenUnit:
    """The tokens that `metric` of the run in `folder` is a mean over.

    A causal model's are counted. The number of hidden tokens of a masked model says nothing, since
    rows of another length hide others, and a translator's are not counted: their vocabularies tell.
    """
    if metric.removeprefix("validation_") not in ("loss", "perplexity"):
        return TokenUnit()
    settings = settings_of(folder)
    if settings.get("objective") == '"masked"':
        return TokenUnit(digest(folder / "tokenizer"), settings.get("data.mask_prob", ""))
    if "data.target_language" in settings:
        return TokenUnit(digest(folder / "tokenizer"))
    return TokenUnit(str(Record(folder / "scores.json").read_if_intact().get("tokens", "")))


def letters_of_tokens(groups: Iterable[Group]) -> dict[str, str]:
    """A letter for the tokens of each group's losses, by its name; {} where all have the same.

    Losses per token can be compared among groups of one letter. They have one vocabulary, and hide
    one share of the tokens if they are masked models. A group without a tokenizer has no letter.
    """
    units = {}
    for group in groups:
        folder = group.folders[0]  # the others differ in the seed alone
        if any((folder / "tokenizer").glob("*.json")):
            units[group.name] = _trained_unit(folder)
    different = list(dict.fromkeys(units.values()))
    if len(different) < 2:
        return {}
    return {name: chr(ord("A") + different.index(unit)) for name, unit in units.items()}


def _trained_unit(folder: Path) -> TokenUnit:
    """The tokens that the losses in the log of the run in `folder` are means over."""
    settings = settings_of(folder)
    if settings.get("task.kind", '"chat"') not in ('"chat"', '"preference"'):
        return TokenUnit()  # a loss per example
    is_masked = settings.get("objective") == '"masked"'
    hidden = settings.get("data.mask_prob", "") if is_masked else ""
    return TokenUnit(digest(folder / "tokenizer"), hidden)
