"""The score that stops a training early, and its direction."""

import json
import math
from dataclasses import replace

import pytest

from experiments.harness.runs.quantities import described_score
from experiments.harness.training.early_stopping import (
    EarlyStopping,
    StoppingMetric,
    stopping_metric,
)
from experiments.harness.training.training_config import TrainingConfig
from jaxformer.errors import ConfigError

KNOWN = ("validation_bleu", "validation_loss", "validation_other")
SCORES = {"validation_bleu": 31.7, "validation_loss": 2.5, "validation_perplexity": 0.3}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("validation_bleu", -1.0)),
        ({"early_stopping_metric": "validation_loss"}, ("validation_loss", 1.0)),
        ({"early_stopping_mode": "min"}, ("validation_bleu", 1.0)),
        (
            {"early_stopping_metric": "validation_other", "early_stopping_mode": "max"},
            ("validation_other", -1.0),
        ),
        (
            {"early_stopping_metric": "validation_perplexity", "loss": "a:b"},
            ("validation_perplexity", 1.0),
        ),
        ({"early_stopping_metric": "own_loss", "metrics": ("a:b",)}, ("own_loss", 1.0)),
    ],
)
def test_the_name_tells_whether_less_or_more_is_better_unless_it_is_given(changes, expected):
    assert stopping_metric(replace(TrainingConfig(), **changes), KNOWN) == expected


def test_a_score_whose_name_does_not_tell_its_direction_is_refused_before_training():
    said = "does not tell .* give --training.early_stopping_mode min or max"
    with pytest.raises(ConfigError, match=said):
        stopping_metric(TrainingConfig(early_stopping_metric="validation_other"), KNOWN)


def test_a_score_of_ones_own_loss_that_is_not_there_is_refused_at_the_evaluation():
    metric = stopping_metric(TrainingConfig(early_stopping_metric="x_loss", loss="a:b"), KNOWN)
    with pytest.raises(ConfigError, match="x_loss"):
        metric.of(SCORES)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("validation_loss", 1.23456, "loss 1.2346"),
        ("validation_bleu", 31.415, "BLEU 31.41"),
        ("validation_exact", 0.9824, "exact 98.2%"),
        ("bits_per_byte", 1.44719, "bits per byte 1.4472"),
        ("validation_custom_loss", 2.5, "custom loss 2.5000"),
    ],
)
def test_the_screen_says_a_score_with_its_name_and_as_many_digits_as_matter(name, value, said):
    assert described_score(name, value) == said


def test_training_stops_when_the_score_has_not_improved_for_so_many_evaluations():
    for metric, scores in (
        (StoppingMetric("validation_bleu", -1.0), (17.0, 31.0, 30.5, 29.0)),
        (StoppingMetric("validation_bleu", -1.0), (0.0, 0.0, 0.0, 0.0, 31.0, 30.5, 29.0)),
        (StoppingMetric("validation_loss", 1.0), (3.0, 2.5, 2.75, 2.6)),
    ):
        stopping = EarlyStopping()
        for step, score in enumerate(scores):
            assert not stopping.should_stop(2)
            stopping = stopping.update(metric.of({metric.name: score}), step)
        assert stopping.should_stop(2) and stopping.best == metric.sign * scores[-3]
    assert metric.describe_best(stopping) == "best loss 2.5000"


def test_a_score_that_is_not_finite_is_never_the_best_and_counts_as_no_improvement():
    metric, stopping = StoppingMetric("validation_loss", 1.0), EarlyStopping()
    for step, score in enumerate((float("nan"), 3.0, float("-inf"), 2.5, float("nan"), math.inf)):
        stopping = stopping.update(score, step)
        assert stopping.metric_at(step) == (score if math.isfinite(score) else None)
        assert stopping.is_best(step) == (score in (3.0, 2.5))
        assert step or metric.describe_best(stopping) == "no finite loss yet"
    assert stopping.best == 2.5 and stopping.should_stop(2) and not stopping.should_stop(3)
    json.dumps(stopping._asdict(), allow_nan=False)
