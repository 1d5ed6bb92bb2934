"""Runs of a folder: found, grouped where only the seed differs, and scored by a metric."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.harness.cli import config_files, display
from experiments.harness.runs.bootstrap import Score, exp_ratio, ratio
from experiments.harness.runs.run_folder import read_result
from experiments.harness.runs.sample_tables import read_table
from experiments.harness.runs.translation_items import translation_items
from jaxformer import storage
from jaxformer.errors import ConfigError, DataError
from jaxformer.records import Record
from jaxformer.text.tokenizers import digest

SWEEP = "sweep.json"
"""The file in a sweep's folder that says what its cells are."""
FAILED = "failed"
"""The folder in a sweep's folder with a record of each cell that failed."""
_FREE = (
    "name",
    "runs",
    "sweep",
    "training.seed",
    "verbose",
    "profile",
    "text_cache_dir",
    "coordinator",
    "process_id",
    "training.log_every",
    "training.metrics",
    "training.loggers",
    "training.prefetch",
)
"""Settings that runs of one group may differ in: the seed, folders, and what is only logged."""
_LONGEST = 40
"""Characters of a name that is made of settings; a longer one is the first run's name."""
_DEFAULTS = ("rougeLsum", "bleu", "chrf", "bits_per_byte", "f1", "loss", "accuracy", "exact")
"""The metric of a comparison: the first that the runs have, and that is not alike for all."""
_LIKELIHOODS = {
    "loss": ("tokens", 1.0),
    "perplexity": ("tokens", 1.0),
    "bits_per_byte": ("bytes", log(2.0)),
    "word_perplexity": ("words", 1.0),
}
"""The unit that the nats of a text are divided by, and a factor."""


class Group(NamedTuple):
    """Runs of equal settings, and what tells them from the other groups."""

    name: str
    folders: list[Path]
    values: Mapping[str, str] = {}
    """The settings in which groups differ, as JSON."""

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [seed_of(folder) for folder in self.folders]

    @property
    def label(self) -> str:
        """The name, with the number of seeds; of runs that share seeds, with the number of runs."""
        runs, seeds = len(self.folders), len(set(self.seeds))
        if runs == 1:
            return self.name
        if runs == seeds:
            return f"{self.name} ({runs} seeds)"
        shared = f"of seed {self.seeds[0]}" if seeds == 1 else f"of {seeds} seeds"
        return f"{self.name} ({runs} runs {shared})"


def find_runs(folders: Iterable[str | Path]) -> Iterator[Path]:
    """The folders in or below `folders` that hold a run; numbers in names are in their order."""
    for folder in folders:
        paths = storage.to_path(folder).rglob("env.json")
        yield from sorted((path.parent for path in paths), key=_in_order)


def _in_order(folder: Path) -> str:
    return re.sub(r"(?<![.\d])\d+", lambda number: number[0].zfill(9), str(folder))


class FailedCell(NamedTuple):
    """A cell of a sweep that failed."""

    sweep: Path
    name: str
    error: str
    label: str
    """The name; of several sweeps with its sweep before it."""

    def has_run(self, folder: Path) -> bool:
        """Whether the run in `folder` is this cell."""
        return folder.name == self.name and self.sweep in folder.parents


def failed_cells(paths: Iterable[str | Path]) -> list[FailedCell]:
    """The cells that failed of the sweeps in or below `paths`; a run's folder has none below it."""
    sweeps: dict[Path, None] = {}
    for path in map(storage.to_path, paths):
        if not (path / "config.json").is_file():
            sweeps |= dict.fromkeys(record.parent for record in path.rglob(SWEEP))
    return [
        FailedCell(sweep, name, error, name if len(sweeps) == 1 else f"{called}/{name}")
        for sweep, called in zip(sweeps, short_names([*sweeps]), strict=True)
        for name, error in failures_of(sweep).items()
    ]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many folders before it as tell the paths apart.

    >>> short_names([Path("runs/a/seed=0"), Path("runs/b/seed=0"), Path("runs/a/seed=1")])
    ['a/seed=0', 'b/seed=0', 'seed=1']
    """
    names = [path.name for path in paths]
    for length in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        uses = Counter(names)
        names = [
            name if uses[name] == 1 else "/".join(path.parts[-length:])
            for name, path in zip(names, paths, strict=True)
        ]
    return names


def failures_of(sweep: Path) -> dict[str, str]:
    """The errors of the cells that failed in the folder of a sweep, by their names.

    Such a cell may have no folder, where its settings were refused.
    """
    return {
        record.stem: Record(record).read_if_intact().get("error", "see its record")
        for record in sorted((sweep / FAILED).glob("*.json"))
    }


def expand(paths: Iterable[str | Path], *, finished: bool = False) -> list[Path]:
    """The runs that `paths` name: each a run's folder, or one with runs below it, as of a sweep.

    With `finished` those below a folder count only if they have been scored. Raises `ConfigError`
    for a path without a run, and for no path at all.
    """
    runs: dict[Path, None] = {}
    for path in map(storage.to_path, paths):
        below = [path] if (path / "config.json").is_file() else list(find_runs([path]))
        if finished and below != [path]:
            below = [run for run in below if (run / "scores.json").is_file()]
        if not below:
            raise ConfigError(
                f"{path} is not the folder of a run: it has no config.json, and there is no "
                f"{'finished ' if finished else ''}run below it"
            )
        runs.update(dict.fromkeys(below))
    if not runs:
        raise ConfigError("no runs were given: give their folders, RUN RUN, or a sweep's")
    return list(runs)


def group_runs(folders: Sequence[Path], baseline: str = "") -> list[Group]:
    """Groups in the order of their first runs; the runs of a group are in the order of seeds.

    A group is called by the settings in which it differs from others, or as its first run without
    the seed; the group of a sweep's runs that change nothing is then called unchanged. The group of
    the run `baseline` is the first; `ConfigError` where it is in none.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Path]] = {}
    for folder in folders:
        key = tuple(sorted(shared_settings(settings_of(folder)).items()))
        groups.setdefault(key, []).append(folder)
    settings = [dict(key) for key in groups]
    fields = sorted({field for values in settings for field in values})
    differing = [f for f in fields if len({values.get(f) for values in settings}) > 1]
    different = [{f: values.get(f, "absent") for f in differing} for values in settings]
    names = _names(different, [runs[0].name for runs in groups.values()])
    made = [
        Group(name, sorted(runs, key=seed_of), values)
        for name, runs, values in zip(names, groups.values(), different, strict=True)
    ]
    if not baseline:
        return made
    path = storage.to_path(baseline).resolve()
    first = [group for group in made if path in [folder.resolve() for folder in group.folders]]
    if not first:
        raise ConfigError(f"baseline={baseline!r} is none of the runs that are compared")
    return first + [group for group in made if group not in first]


def _names(values: Sequence[dict[str, str]], runs: Sequence[str]) -> list[str]:
    """A name for each group, all different."""
    names = [", ".join(f"{f.split('.')[-1]}={x}" for f, x in each.items()) for each in values]
    names = [name.replace('"', "") for name in names]
    shortened = [re.sub(r"(^|,)seed=\d+$", "", run) or "unchanged" for run in runs]
    if all(0 < len(name) <= _LONGEST for name in names) and len(set(names)) == len(names):
        return names
    return shortened if len(set(shortened)) == len(runs) else list(runs)


def settings_of(path: Path) -> dict[str, str]:
    """Dotted names and JSON texts of the settings of a run's folder, or in a settings file."""
    return config_files.flat(config_files.read_object(path))


def shared_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """The part of a run's `settings` that its group shares, and that its scores depend on."""
    return {name: text for name, text in settings.items() if name not in _FREE}


def experiment_of(folder: Path) -> str:
    """The experiment of the run in `folder`, RUNS/EXPERIMENT/NAME."""
    return folder.absolute().parent.name


def seed_of(folder: Path) -> int:
    """The seed of the run in `folder`."""
    return int(json.loads(settings_of(folder).get("training.seed", "0")))


class TokenUnit(NamedTuple):
    """The tokens that a score per token is a mean over; empty for any other score."""

    tokens: str = ""
    """The number of tokens of the text, or the digest of the vocabularies where it says nothing."""
    hidden: str = ""
    """The share of the tokens that a masked model predicts, as JSON."""


class ScoredRun(NamedTuple):
    """A run, its score, and the score as a function of sums over the items of the test text.

    `items` is None for a metric that is known of the whole text only. `text` names what was scored,
    `digest` is its SHA-256, and `signature` says how a translation was scored.
    """

    folder: Path
    seed: int
    value: float
    items: Float[np.ndarray, "items statistics"] | None
    score: Score | None
    text: str
    digest: str
    signature: str
    unit: TokenUnit


def main_metric(*scores: Mapping[str, Any]) -> str:
    """The metric that says most of runs with `scores`.

    One that is alike for all of several runs cannot compare them, as BLEU where it is 0: the next
    one does, if it differs.
    """
    shared = [name for name in _DEFAULTS if all(name in each for each in scores)]
    for name in shared:
        if len(scores) == 1 or len({each[name] for each in scores}) > 1:
            return name
    if shared:
        return shared[0]
    return next((name for each in scores for name in _DEFAULTS if name in each), "loss")


def read_scored(folder: Path, metric: str) -> ScoredRun:
    """The finished run in `folder`, scored by `metric`.

    A metric is a number of scores.json, by its dotted name, or the validation's that the weights
    were chosen by, such as validation_bleu. Raises `ConfigError` for a run that is not finished or
    has no such number, `DataError` for samples that do not belong to the score.
    """
    result = read_result(folder)
    if not result.steps:
        raise ConfigError(
            f"{folder} has no weights.json, which says how its weights were chosen: finish its "
            "training first"
        )
    scores, known = result.scores, numbers(result.scores)
    seed, unit = seed_of(folder), token_unit(folder, metric)
    if metric in result.validation:
        value = result.validation[metric]
        return ScoredRun(folder, seed, value, None, None, "validation", "", "", unit)
    if metric not in known:
        names = ", ".join([*known, *result.validation])
        raise ConfigError(f"{folder} has no metric {metric!r}: it has {names}")
    items, score = item_sums(folder, metric, scores) or (None, None)
    if items is not None and score is not None:
        sampled = float(score(items.sum(axis=0)[None])[0])
        if abs(sampled - known[metric]) > 1e-3 * max(1.0, abs(known[metric])):
            raise DataError(
                f"{folder / 'samples'} gives {metric} {sampled:.4f}, but scores.json says "
                f"{known[metric]:.4f}: score the run again"
            )
    return ScoredRun(
        folder=folder,
        seed=seed,
        value=known[metric],
        items=items,
        score=score,
        text=scores["text"],
        digest=scores["text_sha256"],
        signature=json.loads(config_files.flat(scores).get(f"{metric}_signature", '""')),
        unit=unit,
    )


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


def item_sums(
    folder: Path, metric: str, scores: dict[str, Any]
) -> tuple[Float[np.ndarray, "items statistics"], Score] | None:
    """The sums of each item of the test text, and the score of their sum; None where unknown."""
    table = _table(folder, scores.get("text", ""))
    if metric in _LIKELIHOODS and "nats" in table:
        unit, factor = _LIKELIHOODS[metric]
        nats, tokens = (np.array(table[name], float) for name in ("nats", "tokens"))
        share = tokens * (factor * scores[unit] / scores["tokens"])
        return np.stack([nats, share], axis=1), exp_ratio if "perpl" in metric else ratio
    if "model" not in table:
        return None
    if metric == "accuracy":
        right = np.array(table["model"]) == np.array(table["reference"])
        return np.stack([right, np.ones_like(right)], axis=1).astype(float), ratio
    language = json.loads(settings_of(folder).get("data.target_language", '""'))
    return translation_items(metric, table["model"], table["reference"], language)


def sample_table(folder: Path) -> dict[str, list[str]]:
    """The samples of the text that the run in `folder` was scored on; {} where it has none."""
    return _table(folder, Record(folder / "scores.json").read_if_intact().get("text", ""))


def sample_texts(folder: Path) -> dict[str, list[str]]:
    """The texts that the run in `folder` has read and written, as columns of equal length.

    They are source, model and reference of translations, or prompt and model; {} where it has none.
    """
    path, table = folder / "samples" / "prompts.txt", sample_table(folder)
    if not path.is_file():
        return table if "model" in table else {}
    texts = path.read_text(encoding="utf-8").split(f"\n{display.RULE}\n")
    return prompted(texts, Record(folder / "config.json").read_if_intact().get("prompts", []))


def prompted(texts: Sequence[str], prompts: Sequence[str]) -> dict[str, list[str]]:
    """The columns prompt and model of `texts`, each of which begins with one of `prompts`."""
    begun = [max((x for x in prompts if text.startswith(x)), key=len, default="") for text in texts]
    written = [text[len(prompt) :] for text, prompt in zip(texts, begun, strict=True)]
    return {"prompt": begun, "model": written}


def _table(folder: Path, text: str) -> dict[str, list[str]]:
    """The columns of the samples of the part `text`; {} where there are none."""
    for name in (text, f"{text}-losses"):
        path = folder / "samples" / f"{name}.tsv"
        if path.is_file():
            return read_table(path)
    return {}


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The numbers of scores.json by their dotted names."""
    values = {name: json.loads(text) for name, text in config_files.flat(scores).items()}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not name.startswith(("search.", "translation."))
    }
