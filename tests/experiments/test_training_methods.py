"""Training methods together, as options of an experiment: what is logged, kept and resumed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.harness.runs import checkpoint_selection
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.translation.presets import PRESETS, Files, TranslationConfig
from experiments.translation.train import train
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import EmbeddingOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.stack import STACKED
from jaxformer.training.parameters import flatten
from tests.experiments import own_parts

pytestmark = pytest.mark.long

WORDS = "sun moon star rain snow wind hill lake tree bird fish sand".split()
FROZEN = "feed_forward"
KEYS = ("loss", "kl", "grad_norm", "learning_rate")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TranslationConfig:
    folder = tmp_path_factory.mktemp("methods")
    rng = np.random.default_rng(5)
    files = {}
    for part, count in (("train", 61), ("validation", 3)):
        lines = [" ".join(rng.choice(WORDS, rng.integers(2, 5))) for _ in range(count)]
        for side, texts in (("source", lines), ("target", [line[::-1] for line in lines])):
            (folder / f"{part}.{side}").write_text("\n".join(texts) + "\n")
        files[part] = Files(*(str(folder / f"{part}.{side}") for side in ("source", "target")))
    preset = PRESETS["grammar"]
    sizes = {"vocab_size": 283, "d_model": 14, "d_ff": 22, "num_heads": 1, "max_len": 41}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 2, "scan_layers": True}
    return replace(
        preset,
        runs=str(folder / "runs"),
        compilation_cache_dir="",
        model=replace(
            preset.model,
            **sizes,
            **layers,
            dropout_rate=0.2,
            embeddings=EmbeddingOptions(dropout_rate=0.1),
        ),
        data=replace(preset.data, **files, batch_tokens=256, buckets=1),
        optimizer=replace(
            preset.optimizer,
            schedule="constant",
            warmup_steps=2,
            total_steps=7,
            freeze=FROZEN,
        ),
        training=replace(
            preset.training,
            z_loss=1e-3,
            r_drop=1.5,
            ema_decay=0.5,
            grad_accumulation=2,
            early_stopping_metric="validation_chrf",
            log_every=1,
            save_every=3,
            average_checkpoints=2,
            evaluate_every=7,
        ),
    )


@pytest.fixture(scope="module")
def result(config):
    return train(replace(config, name="whole"))


def state_of(folder, step, tree):
    return flatten(Checkpoints(folder / "checkpoints").restore_params(step, tree=tree))


def same(one, other):
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[path])


@pytest.mark.slow
def test_a_run_with_all_methods_resumes_to_the_bit(config, result):
    stopped = replace(config.optimizer, total_steps=4)
    training = replace(config.training, evaluate_every=0)
    train(replace(config, name="parts", optimizer=stopped, training=training))
    parts = train(replace(config, name="parts"))
    for tree in ("params", "ema", "opt_state"):
        same(state_of(parts.folder, 7, tree), state_of(result.folder, 7, tree))
    logged = [
        [line for line in lines_of(folder) if line["step"] > 4 and "kl" in line]
        for folder in (parts.folder, result.folder)
    ]
    for one, other in zip(*logged, strict=True):
        assert [one[key] for key in KEYS] == [other[key] for key in KEYS]


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_line_of_metrics_has_the_divergence_and_the_rate_of_the_schedule(result):
    lines = [line for line in lines_of(result.folder) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert all(line["kl"] > 0 for line in lines)
    assert lines[-1]["learning_rate"] == pytest.approx(2 * lines[0]["learning_rate"])


def test_frozen_parameters_are_the_first_ones_and_have_no_state(result, config):
    first, last = (state_of(result.folder, step, "params") for step in (3, 7))
    frozen = [path for path in first if FROZEN in path]
    assert frozen and any(STACKED in path for path in frozen)
    for path, leaf in first.items():
        assert np.array_equal(leaf, last[path]) == (path in frozen), path
    assert not any(FROZEN in path for path in state_of(result.folder, 7, "opt_state"))


def test_the_moving_average_and_the_parameters_are_chosen_by_name(result, config):
    for option, tree in (("ema", "ema"), ("last", "params")):
        found = checkpoint_selection.load(
            result.folder, config.training, RunOptions(checkpoint=option)
        )
        same(flatten(found), state_of(result.folder, 7, tree))


def test_a_best_checkpoint_is_that_of_the_metric_named(result):
    metadata = Checkpoints(result.folder / "checkpoints").metadata()
    (chrf,) = (x["validation_chrf"] for x in lines_of(result.folder) if "validation_chrf" in x)
    assert metadata["early_stopping"]["metric"] == -chrf


def test_a_loss_of_ones_own_that_does_not_take_a_weight_is_refused(config):
    changed = replace(config, name="own", training=replace(config.training, r_drop=0.0))
    with pytest.raises(ConfigError, match="z_loss=0.001 was given, but the loss rigid has no"):
        train(changed, loss=own_parts.rigid)
