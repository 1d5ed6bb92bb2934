"""Metrics, loggers and an optimizer of a user, from Python and from the command line."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import cli
from experiments.harness.results.comparing import compare as compare_runs
from experiments.harness.runs.loggers import Loggers
from experiments.harness.training import build
from experiments.harness.training.early_stopping import stopping_metric
from experiments.language_modelling.presets import PRESETS
from experiments.language_modelling.train import train
from jaxformer.errors import ConfigError
from tests.experiments import own_parts
from tests.experiments.tiny_runs import WORDS

pytestmark = pytest.mark.long

HERE = "tests.experiments.own_parts"
OPTIONS = """--model.vocab_size 283 --model.d_model 16 --model.d_ff 22 --model.num_heads 2
    --model.num_decoder_layers 1 --model.max_len 23 --data.seq_len 19 --data.batch_size 3
    --optimizer.warmup_steps 1 --optimizer.total_steps 5 --training.save_every 5
    --training.evaluate_every 3 --training.log_every 1 --training.average_checkpoints 1
    --optimizer.name adam"""


class Collect:
    """A logger that keeps what it gets."""

    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append({"step": step, **metrics})
        metrics.clear()  # its own copy


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The options of a tiny run on a text of its own."""
    folder = tmp_path_factory.mktemp("own")
    lines = (f"{a} {b} {c}\n" for a in WORDS for b in WORDS for c in WORDS[:3])
    (folder / "a.txt").write_text("".join(lines))
    return [*OPTIONS.split(), "--runs", str(folder / "runs"), "--data.train", f"{folder}/a.txt"]


@pytest.fixture(scope="module")
def from_python(words):
    """A run that was given its metric and loggers from Python."""
    config = cli.parse(PRESETS, [*words, "--name", "python"])
    collected = Collect()
    result = train(config, metrics=[own_parts.lengths], loggers=[collected])
    return result, collected.lines


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_metric_of_ones_own_is_logged_scored_recorded_and_compared(from_python):
    result, _ = from_python
    (line,) = [line for line in logged(result.folder) if "validation_half" in line]
    assert line["step"] == 3 and line["validation_half"] == line["validation_loss"] / 2
    assert line["validation_ids"] <= 283
    assert result.scores["half"] == result.scores["loss"] / 2
    record = json.loads((result.folder / "config.json").read_text())
    assert record["training"]["metrics"] == [f"{HERE}:lengths"]
    assert compare_runs([result.folder], "half").groups[0].mean == result.scores["half"]


def test_a_logger_gets_every_line_of_the_metrics(from_python):
    result, lines = from_python
    assert lines == logged(result.folder) and len(lines) == 6


def test_a_logger_that_fails_is_named_once_and_training_goes_on(words, capsys):
    more = f"--name shell --training.metrics {HERE}:lengths --training.loggers {HERE}:OwnLogger"
    more += " --training.evaluate_every 1"
    config = cli.parse(PRESETS, [*words, *more.split()])
    folder = train(config).folder
    said = capsys.readouterr().err
    assert said.count("warning: the logger OwnLogger failed: ValueError: no room; training") == 1
    steps = [line for line in logged(folder) if "loss" in line]
    expected = [f"{line['step']} {line['loss']}" for line in steps]
    assert (folder / "own.log").read_text().splitlines() == [*expected, "closed"]
    assert "validation_half" in logged(folder)[0] | logged(folder)[1]


def test_errors_of_closing_and_of_logging_are_one_warning_each_logger(capsys):
    class Broken:
        def log(self, step, metrics):
            raise RuntimeError("away")

        close = log

    loggers = Loggers([Broken(), Broken()])
    for step in (1, 2):
        loggers.log(step, {"loss": 1.0})
    loggers.close()
    assert capsys.readouterr().err.count("the logger Broken failed: RuntimeError: away") == 2


def test_a_metric_that_returns_no_numbers_or_a_taken_name_is_refused():
    training = cli.parse(PRESETS, ["--training.metrics", f"{HERE}:lengths"]).training
    taken = build.Evaluation(None, None, {"half": 1.0, "loss": 2.0})
    with pytest.raises(AttributeError):
        build.own_metrics(training, taken)
    tokenizer = type("Tokenizer", (), {"vocab_size": 7})
    loaded = type("Loaded", (), {"tokenizer": tokenizer})
    with pytest.raises(ConfigError, match="returned 'half': this name is taken"):
        build.own_metrics(training, taken._replace(loaded=loaded))
    training = replace(training, metrics=(f"{HERE}:halving",))
    with pytest.raises(AttributeError):
        build.own_metrics(training, taken)
    with pytest.raises(TypeError, match="returned a str, but it must return a dict of numbers"):
        build.own_metrics(replace(training, metrics=("builtins:repr",)), taken)


def test_early_stopping_may_watch_a_metric_of_ones_own():
    words = f"--training.metrics {HERE}:lengths --training.early_stopping_metric validation_half"
    words += " --training.early_stopping_mode max"
    training = cli.parse(PRESETS, words.split()).training
    watched = stopping_metric(training, ("validation_loss",))
    assert watched.of({"validation_loss": 1.0, "validation_half": 0.5}) == -0.5
    with pytest.raises(ConfigError, match="'validation_half' is unknown"):
        stopping_metric(replace(training, metrics=()), ("validation_loss",))


def test_metrics_and_loggers_may_change_when_a_run_resumes(from_python, words):
    free = cli.parse(PRESETS, words).free_fields()
    assert {"training.metrics", "training.loggers"} <= set(free)


def test_an_optimizer_of_ones_own_makes_the_updates(words):
    more = "--optimizer.total_steps 3 --optimizer.schedule constant"
    words = [*words, *more.split()]
    named = ["--name", "shell-descent", "--optimizer.name", f"{HERE}:plain_descent"]
    shell = train(cli.parse(PRESETS, [*words, *named]))
    python = train(
        cli.parse(PRESETS, [*words, "--name", "python-descent"]), optimizer=own_parts.plain_descent
    )
    losses = [line["loss"] for line in logged(shell.folder) if "loss" in line]
    assert losses == [line["loss"] for line in logged(python.folder) if "loss" in line]
    record = json.loads((python.folder / "config.json").read_text())
    assert record["optimizer"]["name"] == f"{HERE}:plain_descent"
    with pytest.raises(ConfigError, match="name='adan' is unknown: give one of adam, muon"):
        replace(PRESETS["python_stdlib"].optimizer, name="adan")


def test_an_optimizer_of_ones_own_leaves_frozen_parameters_alone():
    config = replace(
        PRESETS["python_stdlib"].optimizer, name=f"{HERE}:plain_descent", freeze="frozen/"
    )
    params = {name: {"kernel": jnp.ones((2, 3))} for name in ("frozen", "trained")}
    rule = build.build_optimizer(config)
    updates, _ = rule.update(params, rule.init(params), params)
    assert np.all(updates["frozen"]["kernel"] == 0) and np.all(updates["trained"]["kernel"] != 0)
