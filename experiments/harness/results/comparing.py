"""Groups of runs compared by one metric: means, intervals, and tests against a baseline."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.harness.results.groups import (
    Group,
    ScoredRun,
    expand,
    group_runs,
    main_metric,
    read_scored,
)
from experiments.harness.runs import bootstrap, intervals
from experiments.harness.runs.run_folder import read_result
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


def compare(paths: Sequence[str | Path], metric: str = "", baseline: str = "") -> Comparison:
    """Compares the runs in `paths`, folders of runs or of sweeps, by `metric`.

    Runs whose settings differ in the seed alone are a group. `baseline` is a run of the group that
    the others are compared with; "" is the first run. Raises `ConfigError` and `DataError` for runs
    that cannot be compared: not finished, without the metric, or scored on different texts.
    """
    folders = expand(paths, finished=True)
    passed_over = ""
    if not metric:
        scores = [read_result(folder).scores for folder in folders]
        metric, usual = main_metric(*scores), main_metric(scores[0])
        passed_over = usual if usual != metric else ""
    groups = [_scored(group, metric) for group in group_runs(folders, baseline)]
    runs = [run for group in groups for run in group.runs]
    _check_texts(runs, metric)
    return Comparison(
        metric,
        runs[0].text,
        runs[0].signature,
        groups,
        [_difference(group, groups[0]) for group in groups[1:]],
        passed_over,
    )


def _scored(group: Group, metric: str) -> GroupScore:
    runs = [read_scored(folder, metric) for folder in group.folders]
    for before, after in zip(runs, runs[1:], strict=False):
        if before.seed == after.seed:
            raise ConfigError(
                f"{before.folder} and {after.folder} have the same settings and seed: give one"
            )
    values = np.array([run.value for run in runs])
    resampled = _resampled(runs)
    return GroupScore(
        group.name,
        runs,
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


def _check_texts(runs: Sequence[ScoredRun], metric: str) -> None:
    """Raises `DataError` unless all runs were scored on the text of the first one, in one way."""
    first = runs[0]
    for run in runs[1:]:
        if run.digest != first.digest:
            raise DataError(
                f"{first.folder} was scored on the {first.text} text {first.digest[:12] or '?'}, "
                f"{run.folder} on the {run.text} text {run.digest[:12] or '?'}: score all runs on "
                "one text (--data.test)"
            )
        if run.signature != first.signature:
            raise DataError(
                f"{metric} of {first.folder} has the signature {first.signature}, that of "
                f"{run.folder} {run.signature}: score one of them again"
            )
        if run.unit != first.unit:
            raise DataError(
                f"{first.folder} and {run.folder} cut the text into different tokens, so {metric} "
                "cannot be compared: give --metric bits_per_byte"
            )
