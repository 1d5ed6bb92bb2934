"""Training methods together, as options of an experiment: what is logged and kept."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.harness.training import build
from experiments.translation import train as translation
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import STACKED
from jaxformer.training.losses import seq2seq_loss
from jaxformer.training.parameters import flatten
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import translation_config
from tests.experiments.trained_runs import trained_once

pytestmark = pytest.mark.long

FROZEN = "feed_forward"


def all_methods(folder):
    return translation_config(
        folder,
        name="whole",
        model__num_decoder_layers=2,
        model__scan_layers=True,
        model__dropout_rate=0.2,
        data__batch_tokens=256,
        optimizer__warmup_steps=2,
        optimizer__total_steps=7,
        optimizer__freeze=FROZEN,
        training__z_loss=1e-3,
        training__ema_decay=0.5,
        training__grad_accumulation=2,
        training__early_stopping_metric="validation_chrf",
        training__save_every=3,
        training__average_checkpoints=2,
        training__evaluate_every=7,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory, worker_id):
    """The run of `all_methods`."""
    return trained_once(tmp_path_factory, worker_id, translation, all_methods)


def state_of(folder, step, tree):
    return flatten(Checkpoints(folder / "checkpoints").restore_params(step, tree=tree))


def test_each_line_of_metrics_has_the_rate_of_the_schedule(result):
    lines = metrics_of(result.folder, "loss")
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert lines[-1]["learning_rate"] == pytest.approx(2 * lines[0]["learning_rate"])


def test_frozen_parameters_are_the_first_ones_and_have_no_state(result):
    first, last = (state_of(result.folder, step, "params") for step in (3, 7))
    frozen = [path for path in first if FROZEN in path]
    assert frozen and any(STACKED in path for path in frozen)
    for path, leaf in first.items():
        assert np.array_equal(leaf, last[path]) == (path in frozen), path
    assert not any(FROZEN in path for path in state_of(result.folder, 7, "opt_state"))


def test_a_best_checkpoint_is_that_of_the_metric_named(result):
    metadata = Checkpoints(result.folder / "checkpoints").metadata()
    (validation,) = metrics_of(result.folder, "validation_chrf")
    assert metadata["early_stopping"]["metric"] == -validation["validation_chrf"]


def test_a_loss_of_ones_own_that_does_not_take_a_weight_is_refused(result):
    training = replace(result.config.training, loss="tests.experiments.own_parts:rigid")
    with pytest.raises(ConfigError, match="z_loss=0.001 was given, but the loss rigid has no"):
        build.build_loss(training, seq2seq_loss)
