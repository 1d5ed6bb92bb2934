"""Metrics and losses of the user's own, which get a `MetricInputs` in an evaluation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.harness.training.held_out_loss import loss_sums
from experiments.harness.training.loss_options import nonzero_options
from experiments.harness.training.training_config import TrainingConfig
from jaxformer.config import import_by_name
from jaxformer.errors import ConfigError
from jaxformer.pretrained import Loaded


class MetricInputs(NamedTuple):
    """The input of a metric of your own."""

    loaded: Loaded
    """The run: config, model, params and tokenizers."""
    text: Any
    """The text as the experiment has it: `Text` of translation, `Encoded` of language modelling."""
    scores: Mapping[str, float]
    """The experiment's own scores of the text."""
    hypotheses: Sequence[str] = ()
    """The translations of the text."""


def user_metrics(training: TrainingConfig, evaluation: MetricInputs) -> dict[str, float]:
    """The results of the metrics that `training` names: a dict of numbers each.

    Raises `TypeError` for anything else, `ConfigError` for a name that is taken.
    """
    found: dict[str, float] = {}
    for name in training.metrics:
        given = import_by_name(name, "metrics")(evaluation)
        if not isinstance(given, Mapping):
            raise TypeError(
                f"the metric {name} returned a {type(given).__name__}, but it must return a dict "
                "of numbers"
            )
        taken = given.keys() & (found.keys() | evaluation.scores.keys())
        if taken:
            raise ConfigError(f"the metric {name} returned {min(taken)!r}: this name is taken")
        found |= {key: float(value) for key, value in given.items()}
    return found


def user_loss_metrics(
    loaded: Loaded,
    batches: Iterable[Any],
    *,
    label_smoothing: float = 0.0,
    arguments: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Your own loss of held-out `batches`, per token; {} for the experiment's own loss.

    `validation_custom_loss`, and `validation_NAME` for each auxiliary sum NAME. Every
    loss of the experiment is made with `arguments`, such as `pad`.
    """
    training = loaded.config.training
    if not training.loss:
        return {}
    make_loss = import_by_name(training.loss, "loss")
    options = {"loss_chunk": training.loss_chunk, "label_smoothing": label_smoothing}
    options = nonzero_options(make_loss, options)
    sums = loss_sums(make_loss, loaded, batches, **(arguments or {}), **options)
    tokens = max(sums.pop("tokens"), 1.0)
    sums["custom_loss"] = sums.pop("loss")
    return {f"validation_{name}": value / tokens for name, value in sums.items()}
