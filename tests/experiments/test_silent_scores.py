"""A score that a text gives to every translation alike chooses nothing."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import runs as runs_command
from experiments.harness.results.comparing import compare
from experiments.harness.results.pages import runs_page
from experiments.harness.results.scored_runs import main_metric
from experiments.harness.results.tables import by_length, render
from experiments.harness.runs.run_folder import read_result
from experiments.harness.runs.sample_tables import read_table
from experiments.translation import scoring, train
from experiments.translation.corpus import Text
from experiments.translation.language_codes import describe_word_counting
from experiments.translation.presets import PRESETS
from experiments.translation.scoring import score_summaries
from experiments.translation.telling_scores import telling_scores, validation_scores
from jaxformer.errors import CheckpointError, ConfigError, DataError
from jaxformer.pipelines.translation import Translation
from tests.experiments.commands import call
from tests.experiments.finished_runs import WORDS, sentences, worse, write_run
from tests.experiments.tiny_runs import translation_config
from tests.experiments.trained_runs import shared_step

ONE_WORD = [WORDS[i % len(WORDS)] for i in range(83)]
TEXTS = {
    "one-word targets": (ONE_WORD, ONE_WORD[1:] + ONE_WORD[:1]),
    "empty references": ([""] * 83, ["Haus"] * 41 + [""] * 42),
    "one short line": (["ein altes Haus"], ["ein altes Dach"]),
    "one line": (["ein altes Haus steht dort"], ["ein altes Dach steht dort"]),
}
"""References, and the translations of a worse model; those of the better one are all right."""


@pytest.mark.parametrize("language", ["jp", "chinese", "d"])
def test_a_language_that_bleu_does_not_know_is_named_with_the_tokenizer_that_counts(language):
    said = describe_word_counting(language)
    assert repr(language) in said and "13a" in said and "zh, ja or ko" in said
    assert describe_word_counting(language, "char") == ""


@pytest.mark.parametrize("language", ["", "de", "zh_CN", "deu_Latn", "DE", "pt-br"])
def test_a_language_with_a_code_needs_no_word(language):
    assert describe_word_counting(language) == ""


def test_a_training_says_that_its_target_language_is_unknown(tmp_path, monkeypatch):
    def build_model(*_, **__):
        raise ConfigError("that is enough")

    monkeypatch.setattr(train.training, "build_model", build_model)
    done = call(train, translation_config(tmp_path, data__target_language="jp"))
    assert done.code == 2 and "warning: data.target_language='jp' is no code" in done.out


@pytest.mark.parametrize(
    ("references", "language", "expected"),
    [
        (["Haus", "Fluss"], "de", ("chrf", "exact")),
        (["", "  "], "de", ("exact",)),
        (["", "ein altes Haus"], "de", ("chrf", "exact")),
        (["Haus", "ein altes Haus."], "de", ("bleu", "chrf", "exact")),
        (["我爱你们"], "zh", ("bleu", "chrf", "exact")),
        (["我爱你"], "zh", ("chrf", "exact")),
    ],
)
def test_bleu_tells_something_of_a_text_with_four_words_in_a_line(references, language, expected):
    assert telling_scores(references, language) == expected


def test_a_score_of_a_text_without_four_words_in_a_line_would_put_the_worse_model_first():
    """The smoothed BLEU of long lines is larger than the 0 of the right ones."""
    references = ["ein altes Haus", "die Sonne scheint"]
    long = ["ein altes Haus und noch viel mehr", "die Sonne scheint und es regnet"]
    assert scoring.metrics.score_translations(long, references).bleu > 3.0
    assert scoring.metrics.score_translations(references, references).bleu == 0.0
    good, bad = (scoring.score_hypotheses(lines, references) for lines in (references, long))
    assert good["chrf"] == 100.0 > bad["chrf"] and not any("bleu" in name for name in good | bad)


@pytest.fixture
def sweep(tmp_path, request):
    """A sweep of a model that is all right, width 8, and of worse ones, on the text named."""
    references, wrong = TEXTS[request.param]
    folder = tmp_path / "sweeps" / "widths"
    for width, lines in ((7, wrong), (8, references), (9, wrong)):
        write_run(folder / "translation" / f"width={width}", lines, references, width=width)
    (folder / "sweep.json").write_text('{"cells": {"a": 1, "b": 2, "c": 3}}')
    return folder


@pytest.mark.parametrize("sweep", TEXTS, indirect=True)
def test_the_right_setting_is_the_best_in_list_comparison_and_page(sweep, capsys):
    runs_command.main(["list", str(sweep.parent)])
    assert re.search(r"best \w+ [\d.]+ (% )?\(width=8\)", capsys.readouterr().out)
    comparison = compare([sweep])
    first, best, third = comparison.groups
    assert best.mean > first.mean == third.mean
    assert "BLEU" not in render(comparison) or comparison.metric == "bleu"
    labels = re.findall(r"(width=\d): [^<]*, best mean<", runs_page([sweep]))
    assert labels == ["width=8"]


def test_a_metric_that_is_alike_for_all_runs_is_passed_over_and_a_tie_has_no_best(tmp_path, capsys):
    text, folder = sentences(29, seed=1), tmp_path / "sweep"
    for width, share in ((7, 0.5), (8, 0.3), (9, 0.3)):
        write_run(folder / f"w{width}", worse(text, share, 3), text, width=width)
        path = folder / f"w{width}" / "scores.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bleu": 0.0}))
    comparison = compare([folder])
    assert (comparison.metric, comparison.passed_over) == ("chrf", "bleu")
    assert "BLEU is the same for all runs, so chrF compares them" in render(comparison)
    assert "best mean" not in runs_page([folder]), "widths 8 and 9 share the best mean"
    (folder / "sweep.json").write_text('{"cells": {}}')
    runs_command.main(["list", str(tmp_path)])
    assert "best" not in capsys.readouterr().out


def test_runs_that_are_alike_by_all_metrics_are_compared_by_the_first():
    alike = {"bleu": 31.0, "chrf": 57.0, "exact": 0.25}
    assert main_metric(alike, alike) == main_metric(alike) == "bleu"
    assert main_metric({"bleu": 0.0, "chrf": 3.0}, {"chrf": 5.0}) == "chrf"
    assert main_metric({"bleu": 1.0}, {"f1": 2.0}) == "bleu" and main_metric({}) == "loss"


def test_a_length_of_which_bleu_says_nothing_has_no_number(tmp_path):
    references = ["Haus", "ein altes Haus", "ein altes Haus steht am Fluss"]
    run = write_run(tmp_path / "run", references, references)  # the sources are in reverse
    (row,) = by_length(compare([run], "bleu"), (3,)).rows
    assert row[1:] == ["100.00", "-"]


def test_rouge_of_a_text_without_latin_letters_is_refused():
    with pytest.raises(DataError, match="letters.*validation_chrf"):
        score_summaries(["дом"], ["дом"])


def one_word_config(folder, **changes):
    """A run whose target lines are the last words of the sources."""
    config = translation_config(folder, training__evaluate_every=1, **changes)
    for files in (config.data.train, config.data.validation, config.data.test):
        lines = Path(files.source).read_text().splitlines()
        Path(files.target).write_text("".join(f"{line.split()[-1]}\n" for line in lines))
    return config


def test_the_weights_of_a_run_with_one_word_targets_are_the_better_ones(
    tmp_path, monkeypatch, capsys
):
    config, first = one_word_config(tmp_path), []
    answers = dict(zip(*read_pairs(config), strict=True))

    def scripted(loaded, lines, search, **named):
        """The first weights that are evaluated translate all lines right, all others none."""
        leaf = np.asarray(jax.tree.leaves(loaded.params)[0])
        if not first:
            first.append(leaf)
        right = np.array_equal(leaf, first[0])
        return [[Translation(answers[line] if right else "nichts", 0.0, [], [])] for line in lines]

    monkeypatch.setattr(scoring, "translate_with_details", scripted)
    result = shared_step(train).train.train(config)
    out = capsys.readouterr().out
    assert result.steps == [1] and result.validation == {"validation_chrf": 100.0}
    assert result.scores["chrf"] == 100.0 and "bleu" not in result.scores
    assert "no target line has four words" in out and "chrF chooses the weights" in out
    assert "The model has learned to translate" in out
    logged = (result.folder / "metrics.jsonl").read_text()
    assert "validation_chrf" in logged and "bleu" not in logged
    assert read_result(result.folder).steps == [1]
    assert read_table(result.folder / "samples" / "test.tsv")["model"][0] != "nichts"

    for path in (config.data.validation.source, config.data.validation.target):
        Path(path).write_text("sun moon star rain\n")
    more = replace(config, optimizer=replace(config.optimizer, total_steps=3))
    with pytest.raises(CheckpointError, match="validation_chrf.*validation_bleu"):
        train.train(more)


def read_pairs(config):
    """The sources and targets of validation and test."""
    sides = []
    for side in ("source", "target"):
        paths = [getattr(x, side) for x in (config.data.validation, config.data.test)]
        sides.append([line for path in paths for line in Path(path).read_text().splitlines()])
    return sides


def test_early_stopping_by_a_score_that_says_nothing_is_refused():
    text = Text(["a b"], ["Haus"])
    config = PRESETS["grammar"]
    named = replace(
        config, training=replace(config.training, early_stopping_metric="validation_bleu")
    )
    with pytest.raises(ConfigError, match="validation_bleu.*four words.*validation_chrf"):
        validation_scores(named, text)
    assert validation_scores(config, text)[0] == "validation_chrf"
