"""Groups of runs compared by one metric: means, intervals, and tests against a baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.harness.results.find_runs import expand
from experiments.harness.results.groups import Group, group_runs
from experiments.harness.results.scored_runs import ScoredRun, main_metric, read_scored
from experiments.harness.results.sweep_failures import failed_cells
from experiments.harness.runs import bootstrap, intervals
from experiments.harness.runs.run_folder import read_result
from jaxformer import storage
from jaxformer.errors import ConfigError, DataError

_UNKNOWN = float("nan")


class GroupScore(NamedTuple):
    """The mean score of a group and halves of its 95 % intervals; NaN where one is not known."""

    name: str
    runs: list[ScoredRun]
    mean: float
    deviation: float
    """The deviation of the scores of the seeds (n - 1)."""
    seeds: float
    """Over other seeds: Student's t."""
    items: float
    """Over other texts: bootstrap over the items of the test text."""


class Difference(NamedTuple):
    """A group's mean score minus the baseline's, with intervals as in `GroupScore`."""

    name: str
    value: float
    seeds: float
    items: float
    p_value: float
    """Interval of the paired bootstrap over items."""
    paired: bool
    """True where both groups have the same seeds, so that runs of one seed are compared."""
    warning: str
    """The reason why the difference may be noise; "" if it is larger than that."""


class Comparison(NamedTuple):
    """Groups of runs by one metric, and their differences from the first one, the baseline."""

    metric: str
    text: str
    signature: str
    groups: list[GroupScore]
    differences: list[Difference]
    passed_over: str = ""
    """The metric that usually compares such runs, but is alike for all of these; "": none."""
    left_out: Sequence[str] = ()
    """A line for the runs of a folder that cannot be compared, with the reason."""


def compare(paths: Sequence[str | Path], metric: str = "", baseline: str = "") -> Comparison:
    """Compares the runs in `paths`, folders of runs or of sweeps, by `metric`.

    Runs whose settings differ in the seed alone are a group. `baseline` is a run of the group that
    the others are compared with; "" is the first run. Raises `ConfigError` and `DataError` for runs
    that cannot be compared: not finished, without the metric, of the same settings and seed, or
    scored on different texts. Those that `paths` do not name, but that lie below a folder, are left
    out instead, unless no other run is left; so are a sweep's cells that failed.
    """
    groups = group_runs(expand(paths, finished=True), baseline)
    comparison = compare_groups(groups, paths, metric)
    failed = [f"left out, {cell.label} failed: {cell.error}" for cell in failed_cells(paths)]
    return comparison._replace(left_out=[*failed, *comparison.left_out])


def compare_groups(
    groups: Sequence[Group], paths: Sequence[str | Path], metric: str = ""
) -> Comparison:
    """Compares `groups` of the runs in `paths`, with the first one, as `compare` does."""
    named = {storage.to_path(path) for path in paths}
    passed_over = ""
    left_out = _LeftOut(named)
    if not metric:
        metric, passed_over = _default_metric(groups, left_out)
    scored = [(group, _scored_runs(group, metric, left_out)) for group in groups]
    all_runs = [run for _, runs in scored for run in runs]
    if not all_runs:
        raise left_out.first
    kept = _of_one_text(all_runs, metric, left_out)
    scores = [
        _group_score(group.name, runs)
        for group, runs in ((group, [x for x in runs if x in kept]) for group, runs in scored)
        if runs
    ]
    return Comparison(
        metric,
        kept[0].text,
        kept[0].signature,
        scores,
        [_difference(score, scores[0]) for score in scores[1:]],
        passed_over,
        left_out.lines(),
    )


class _LeftOut:
    """The runs of a folder that are left out of a comparison; a run that is `named` never is."""

    def __init__(self, named: set[Path]):
        self._named = named
        self._reasons: dict[Path, ConfigError | DataError] = {}

    def add(self, folder: Path, reason: ConfigError | DataError) -> None:
        """Leaves the run in `folder` out; raises the `reason` where it was named."""
        if folder in self._named:
            raise reason
        self._reasons.setdefault(folder, reason)

    @property
    def first(self) -> ConfigError | DataError:
        """The reason why the first run is left out."""
        return next(iter(self._reasons.values()))

    def lines(self) -> list[str]:
        """A line for each reason but of duplicates, which are one line."""
        again = [x for x, why in self._reasons.items() if isinstance(why, _SameRun)]
        lines = [str(why) for x, why in self._reasons.items() if x not in again]
        if again:
            names = ", ".join(folder.name for folder in again)
            lines.append(f"left out, with settings and seed of another run: {names}")
        return lines


class _SameRun(ConfigError):
    """A run has the settings and the seed of another one."""


def _default_metric(groups: Sequence[Group], left_out: _LeftOut) -> tuple[str, str]:
    """The metric that compares the runs of `groups`, and the usual one if it is alike for all."""
    scores = []
    for group in groups:
        for folder in group.folders:
            try:
                scores.append(read_result(folder).scores)
            except (ConfigError, DataError) as error:
                left_out.add(folder, error)
    if not scores:
        raise left_out.first
    metric, usual = main_metric(*scores), main_metric(scores[0])
    return metric, usual if usual != metric else ""


def _scored_runs(group: Group, metric: str, left_out: _LeftOut) -> list[ScoredRun]:
    """The runs of `group` that have the metric, one of each seed."""
    runs: dict[int, ScoredRun] = {}
    for folder in group.folders:
        try:
            run = read_scored(folder, metric)
        except (ConfigError, DataError) as error:
            left_out.add(folder, error)
            continue
        if run.seed in runs:
            before = runs[run.seed].folder
            same = f"{before} and {folder} have the same settings and seed: give one"
            left_out.add(folder, _SameRun(same))
        else:
            runs[run.seed] = run
    return list(runs.values())


def _group_score(name: str, runs: Sequence[ScoredRun]) -> GroupScore:
    values = np.array([run.value for run in runs])
    resampled = _resampled(runs)
    return GroupScore(
        name,
        [*runs],
        float(values.mean()),
        float(values.std(ddof=1)) if len(values) > 1 else _UNKNOWN,
        intervals.t_half_width(values),
        _UNKNOWN if resampled is None else bootstrap.percentile_half_width(resampled.mean(axis=1)),
    )


def _difference(group: GroupScore, base: GroupScore) -> Difference:
    values, base_values = (np.array([run.value for run in g.runs]) for g in (group, base))
    paired = [run.seed for run in group.runs] == [run.seed for run in base.runs]
    value = group.mean - base.mean
    seeds = (
        intervals.t_half_width(values - base_values)
        if paired
        else intervals.welch_half_width(values, base_values)
    )
    items = p_value = _UNKNOWN
    resampled = _resampled([*group.runs, *base.runs])
    if resampled is not None and value != 0.0:
        a, b = np.split(resampled, [len(group.runs)], axis=1)
        items = bootstrap.percentile_half_width(a.mean(axis=1) - b.mean(axis=1))
        p_value = bootstrap.bootstrap_p_value(a, b, value)
    few = [each.name for each in (base, group) if len(each.runs) < 2]
    warning = _warning(value, seeds, items, few)
    return Difference(group.name, value, seeds, items, p_value, paired, warning)


def _warning(value: float, seeds: float, items: float, few: Sequence[str]) -> str:
    """The reason why a difference may be noise; "" where the intervals say that it is not."""
    if value == 0.0:
        return "the scores are equal"
    if few:
        named = f"{' and '.join(few)} {'have' if few[1:] else 'has'} one seed"
        return f"{named}, so the noise of seeds is not known: train at least 3"
    if abs(value) <= seeds:
        return "lies within the noise of seeds"
    return "lies within the noise of the test text" if abs(value) <= items else ""


def _resampled(runs: Sequence[ScoredRun]) -> Float[np.ndarray, "resamples runs"] | None:
    """The scores of all runs on resampled texts; None unless they have the same items."""
    first, score = runs[0].items, runs[0].score
    items = [run.items for run in runs if run.items is not None]
    if first is None or score is None or [x.shape for x in items] != [first.shape] * len(runs):
        return None
    # The last of a language model's sums counts tokens: other batches have other counts.
    if first.shape[1] == 2 and not all(np.allclose(x[:, 1], first[:, 1]) for x in items):
        return None
    return bootstrap.resampled_scores(np.stack(items), score)


def _of_one_text(runs: Sequence[ScoredRun], metric: str, left_out: _LeftOut) -> list[ScoredRun]:
    """The runs that were scored on the text of the first one, in one way."""
    kept = [runs[0]]
    for run in runs[1:]:
        difference = _difference_in_text(runs[0], run, metric)
        if difference:
            left_out.add(run.folder, DataError(difference))
        else:
            kept.append(run)
    return kept


def _difference_in_text(first: ScoredRun, run: ScoredRun, metric: str) -> str:
    """The reason why the scores of two runs cannot be compared; "" where they can."""
    if run.digest != first.digest:
        return (
            f"{first.folder} was scored on the {first.text} text {first.digest[:12] or '?'}, "
            f"{run.folder} on the {run.text} text {run.digest[:12] or '?'}: score all runs on "
            "one text (--data.test)"
        )
    if run.signature != first.signature:
        return (
            f"{metric} of {first.folder} has the signature {first.signature}, and of {run.folder} "
            f"{run.signature}: score one of them again"
        )
    if run.unit.tokens != first.unit.tokens:
        return (
            f"{first.folder} and {run.folder} cut the text into different tokens, so {metric} "
            f"cannot be compared: {_comparable(run)}"
        )
    if run.unit.hidden != first.unit.hidden:
        return (
            f"{first.folder} predicts {first.unit.hidden} of the tokens and {run.folder} "
            f"{run.unit.hidden}, so {metric} cannot be compared: give them one --data.mask_prob"
        )
    return ""


def _comparable(run: ScoredRun) -> str:
    """The advice where a run's score per token cannot be compared."""
    scores = read_result(run.folder).scores
    metric = next((x for x in ("bits_per_byte", "bleu", "chrf", "exact") if x in scores), "")
    if metric:
        return f"give --metric {metric}"
    if run.unit.hidden:
        return "give them one tokenizer, or compare them by a task that they learn (finetune)"
    return "give them one start and one length"
