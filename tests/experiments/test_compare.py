"""Runs are compared as sacreBLEU compares systems, over seeds as Student did."""

import json
import math
import re
import shutil
from typing import get_args

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from scipy import stats

from experiments.harness.results import tables
from experiments.harness.results.comparing import compare as compare_runs
from experiments.harness.results.find_runs import find_runs
from experiments.harness.results.groups import group_runs
from experiments.harness.results.run_facts import facts_of_sweep
from experiments.harness.runs import bootstrap, intervals, rounding
from experiments.harness.runs.sample_tables import read_table
from experiments.translation.score_report import describe_scores
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.metrics import score_lowercased, score_translations
from tests.experiments.finished_runs import sentences, worse, write_language_run, write_run


@pytest.fixture(scope="module")
def text():
    return sentences(83, seed=1)


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    """Two variants of two seeds."""
    folder = tmp_path_factory.mktemp("runs") / "somewhere"
    comparison = [
        (seed, width, worse(text, share, seed=10 * width + seed))
        for width, share in ((7, 0.30), (11, 0.42))
        for seed in (0, 1)
    ]
    return [write_run(folder / f"w{w}-{s}", h, text, seed=s, width=w) for s, w, h in comparison]


@pytest.fixture(scope="module")
def compared(runs):
    return compare_runs(runs)


def hypotheses(run):
    lines = (run / "samples" / "test.tsv").read_text().splitlines()[1:]
    return [line.split("\t")[1] for line in lines]


@pytest.mark.parametrize("metric, scorer, key", [("bleu", BLEU, "BLEU"), ("chrf", CHRF, "chrF2")])
def test_two_runs_are_tested_to_the_digit_as_sacrebleu_does(
    runs, text, tmp_path, metric, scorer, key
):
    other = write_run(tmp_path / "other", worse(text, 0.34, seed=77), text, width=13)
    comparison = compare_runs([runs[0], other], metric)
    (difference,) = comparison.differences
    assert difference.warning.startswith("width=7 and width=13 have one seed, so the noise")
    systems = [(run.name, hypotheses(run)) for run in (runs[0], other)]
    results = PairedTest(systems, {"": scorer(references=[text])}, None, "bs")()[1][key]
    assert results[1].p_value == difference.p_value > 0.001
    for result, group in zip(results, comparison.groups, strict=True):
        assert result.score == pytest.approx(group.mean, abs=1e-9)
        assert result.ci == pytest.approx(group.items, rel=1e-5)


def test_groups_of_one_seed_each_are_warned_of_once(text, tmp_path):
    folders = [
        write_run(tmp_path / f"w{width}", worse(text, share, seed=width), text, width=width)
        for width, share in ((7, 0.3), (11, 0.4), (13, 0.3))
    ]
    folders.append(write_run(tmp_path / "equal", hypotheses(folders[0]), text, width=17))
    assert tables.warnings(compare_runs(folders)) == [
        "each group has one seed, so the noise of seeds is not known: train at least 3",
        "width=17: the scores are equal",
    ]


def test_items_that_are_all_alike_have_no_interval(text, tmp_path):
    run = write_run(tmp_path / "right", text, text)
    group = compare_runs([run], "exact").groups[0]
    assert group.mean == 1.0 and math.isnan(group.items)
    scores = score_translations(text, text)._asdict() | {"exact": 1.0}
    shares = re.findall(r"100.*", describe_scores("test", scores, text, text))
    assert [share.split("  ")[0] for share in shares] == [
        "100.0% exactly right",
        "100.00",
        "100.00",
    ]


def test_groups_with_long_settings_are_called_as_their_runs_without_seeds(text, tmp_path):
    cells = {"wide,seed=0": 10**40, "wide,seed=1": 10**40, "seed=0": 7}
    folders = [
        write_run(tmp_path / cell, text, text, seed=number % 2, width=width)
        for number, (cell, width) in enumerate(cells.items())
    ]
    groups = group_runs(folders)
    assert [(group.name, group.seeds) for group in groups] == [("wide", [0, 1]), ("unchanged", [0])]
    other = write_run(tmp_path / "other" / "wide,seed=0", text, text, width=11)
    assert [group.name for group in group_runs([folders[0], other])] == ["wide,seed=0"] * 2


def test_a_lowercased_score_has_an_interval_too(text, tmp_path):
    made = worse([line.upper() for line in text], 0.3, seed=8)
    lower = score_lowercased(made, text, "de")._asdict()
    run = write_run(tmp_path / "upper", made, text, lowercased=lower)
    comparison = compare_runs([run], "lowercased.bleu")
    assert comparison.groups[0].mean == lower["bleu"] > 2 * compare_runs([run]).groups[0].mean
    assert comparison.groups[0].items > 1 and comparison.signature.startswith("lc.norm.moses:de|")


def test_runs_that_differ_in_the_seed_are_one_row_with_the_interval_of_student(
    compared, runs, text
):
    assert [group.name for group in compared.groups] == ["width=7", "width=11"]
    for group, folders in zip(compared.groups, (runs[:2], runs[2:]), strict=True):
        values = [score_translations(hypotheses(run), text).bleu for run in folders]
        assert group.mean == pytest.approx(np.mean(values))
        assert group.deviation == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
        assert group.seeds == pytest.approx(12.7062047 * group.deviation / math.sqrt(2))
        assert group.items > 0
    assert compared.differences[0].value == compared.groups[1].mean - compared.groups[0].mean


def test_runs_of_the_same_seed_are_paired(compared, runs, tmp_path, text):
    (difference,) = compared.differences
    values = [run.value for group in compared.groups for run in group.runs]
    gaps = np.array(values[2:]) - values[:2]
    assert difference.paired
    assert difference.seeds == pytest.approx(12.7062047 * gaps.std(ddof=1) / math.sqrt(2))
    third = write_run(tmp_path / "third", worse(text, 0.42, 5), text, seed=5, width=11)
    (difference,) = compare_runs([*runs[:2], runs[2], third]).differences
    assert not difference.paired
    assert difference.p_value < 0.05


def test_intervals_have_the_size_that_theory_gives():
    a, b = np.array([3.0, 5.0, 10.0]), np.array([1.0, 2.0])
    errors = np.array([13 / 3, 0.5 / 2])  # of a and b; 2.2 degrees of freedom by Welch
    welch = stats.t.ppf(0.975, errors.sum() ** 2 / (errors[0] ** 2 / 2 + errors[1] ** 2))
    assert intervals.welch_half_width(a, b) == pytest.approx(welch * np.sqrt(errors.sum()))
    assert intervals.welch_half_width(b[:1].repeat(2), b[:1].repeat(3)) == 0.0
    draws = np.random.default_rng(0).normal(7.0, 2.0, (1009, 1))
    items = np.concatenate([draws, np.ones_like(draws)], axis=-1)
    half = bootstrap.item_half_width(items, lambda sums: sums[:, 0] / sums[:, 1])
    assert half == pytest.approx(1.96 * 2.0 / math.sqrt(1009), rel=0.06)


def test_language_models_are_paired_over_batches_of_windows(tmp_path):
    rng = np.random.default_rng(2)
    tokens, hard = [64] * 30 + [17], rng.normal(3.0, 0.5, 31)
    a = write_language_run(tmp_path / "a", hard, tokens)
    b = write_language_run(tmp_path / "b", hard - 0.05 + rng.normal(0, 0.02, 31), tokens)
    comparison = compare_runs([a, b])
    assert comparison.metric == "bits_per_byte" and comparison.differences[0].p_value == 1 / 1001
    assert (
        comparison.differences[0].items < comparison.groups[0].items / 5
    )  # the hard ones are so for both
    loss = compare_runs([a, b], "loss").differences[0]
    ratio = 3 * math.log(2)
    assert loss.value == pytest.approx(ratio * comparison.differences[0].value)
    assert loss.items == pytest.approx(ratio * comparison.differences[0].items)
    perplexity = compare_runs([a], "perplexity").groups[0]
    assert perplexity.items == pytest.approx(
        perplexity.mean * compare_runs([a], "loss").groups[0].items, rel=0.05
    )


def test_other_tokens_are_compared_by_bytes_only_and_not_paired(tmp_path):
    a = write_language_run(tmp_path / "a", [3.0] * 12, [64] * 12, bytes=2_000)
    b = write_language_run(tmp_path / "b", [3.1] * 11, [67] * 11, bytes=2_000)
    comparison = compare_runs([a, b])
    assert math.isnan(comparison.differences[0].p_value)
    with pytest.raises(DataError, match="different tokens.*bits_per_byte"):
        compare_runs([a, b], "loss")
    with pytest.raises(DataError, match="different tokens.*validation_loss"):
        compare_runs([a, b], "validation_loss")


def test_conversations_in_other_tokens_are_not_compared_by_nats_a_token(tmp_path):
    runs = [
        write_language_run(tmp_path / name, [3.0] * 12, [length] * 12)
        for name, length in (("a", 64), ("b", 67))
    ]
    for run in runs:  # the likelihood of answers is known per token only
        scores = json.loads((run / "scores.json").read_text())
        kept = ("text", "text_sha256", "tokens", "loss")
        (run / "scores.json").write_text(json.dumps({name: scores[name] for name in kept}))
    with pytest.raises(DataError, match="loss"):
        compare_runs(runs)


@pytest.fixture
def masked_runs(tmp_path):
    """Two masked models whose rows have other lengths, and so hide other tokens of a text."""
    runs = [
        write_language_run(tmp_path / "cells" / name, [3.0] * 12, [length] * 12)
        for name, length in (("a", 64), ("b", 67))
    ]
    for run in runs:
        scores = json.loads((run / "scores.json").read_text())
        kept = ("text", "text_sha256", "tokens", "loss", "perplexity")
        (run / "scores.json").write_text(json.dumps({name: scores[name] for name in kept}))
        with_settings(run, objective="masked", data={"mask_prob": 0.15})
        (run / "env.json").write_text("{}")
        with_vocabulary(run, "same")
    return runs


def with_settings(run, **settings):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | settings))


def with_vocabulary(run, text):
    (run / "tokenizer").mkdir(exist_ok=True)
    (run / "tokenizer" / "tokenizer.json").write_text(text)


@pytest.mark.parametrize("metric", ["loss", "perplexity", "validation_loss"])
def test_masked_models_are_compared_where_they_have_one_vocabulary(masked_runs, metric):
    assert len(compare_runs(masked_runs, metric).groups) == 2
    with_vocabulary(masked_runs[1], "other")
    with pytest.raises(DataError, match=f"different tokens, so {metric} .*one tokenizer"):
        compare_runs(masked_runs, metric)
    with_vocabulary(masked_runs[1], "same")
    with_settings(masked_runs[1], data={"mask_prob": 0.4})
    with pytest.raises(DataError, match=f"0.15 of the tokens .* 0.4, so {metric} .*mask_prob"):
        compare_runs(masked_runs, metric)


def test_a_sweep_of_masked_models_with_other_vocabularies_has_no_best(masked_runs):
    sweep = masked_runs[0].parent
    (sweep / "sweep.json").write_text(json.dumps({"cells": {"a": {}, "b": {}}}))
    assert facts_of_sweep(sweep)["score"] == "loss 3.0 in all"
    with_vocabulary(masked_runs[1], "other")
    assert facts_of_sweep(sweep)["score"] == "loss of different tokens"
    left_out = compare_runs([sweep]).left_out
    assert len(left_out) == 1 and "different tokens" in left_out[0]


def test_translators_with_other_vocabularies_are_compared_by_their_text_alone(tmp_path):
    lines = sentences(40, 1)
    runs = [
        write_run(tmp_path / name, worse(lines, 0.2, 2), lines, width=width)
        for width, name in enumerate(("a", "b"))
    ]
    for run in runs:
        (run / "weights.json").write_text(json.dumps({"steps": [7], "validation_loss": 1.5}))
        with_vocabulary(run, "same")
    assert len(compare_runs(runs, "validation_loss").groups) == 2
    with_vocabulary(runs[1], "other")
    with pytest.raises(DataError, match="different tokens, so validation_loss .*--metric bleu"):
        compare_runs(runs, "validation_loss")
    assert len(compare_runs(runs).groups) == 2


def test_scores_of_the_validation_text_come_with_a_warning(tmp_path):
    run = write_language_run(tmp_path / "a", [3.0] * 12, [64] * 12)
    assert "also chose the weights" not in tables.render(compare_runs([run]))
    scores = json.loads((run / "scores.json").read_text())
    (run / "scores.json").write_text(json.dumps(scores | {"text": "validation"}))
    assert "also chose the weights" in tables.render(compare_runs([run]))
    with pytest.raises(ConfigError, match="'bleu'"):
        compare_runs([run], "bleu")


def test_settings_are_chosen_by_the_validation_that_chose_the_weights(runs, text, tmp_path):
    better = write_run(tmp_path / "better", worse(text, 0.5, seed=7), text, width=13)
    (better / "weights.json").write_text(json.dumps({"steps": [7], "validation_bleu": 37.25}))
    compared = compare_runs([better, runs[0], runs[1]], "validation_bleu")
    assert [group.mean for group in compared.groups] == [37.25, 31.5]
    assert compared.differences[0].value == -5.75
    shown = tables.render(compared)
    assert shown.startswith("validation_bleu") and "validation text, SHA-256 unknown" in shown
    assert "also chose the weights" in shown


def test_runs_that_cannot_be_compared_are_refused(runs, text, tmp_path):
    other = sentences(83, seed=2)
    with pytest.raises(DataError, match="test text"):
        compare_runs([runs[0], write_run(tmp_path / "other", other, other, seed=3)])
    edited = write_run(tmp_path / "edited", text, text, bleu=12.0)
    with pytest.raises(DataError, match="12.0000"):
        compare_runs([edited])
    with pytest.raises(ConfigError, match="again"):
        compare_runs([runs[0], write_run(tmp_path / "again", text, text)])
    with pytest.raises(ConfigError, match="baseline='x'"):
        compare_runs(runs, baseline="x")
    (runs_without := write_run(tmp_path / "w", text, text)).joinpath("weights.json").unlink()
    with pytest.raises(ConfigError, match="no weights.json"):
        compare_runs([runs_without])
    with pytest.raises(ConfigError, match="no config.json"):
        compare_runs([tmp_path / "nothing"])


def test_a_folder_stands_for_the_finished_runs_below_it(runs, tmp_path):
    root = shutil.copytree(runs[0].parent, tmp_path / "runs")
    unfinished = root / "w13-0"
    unfinished.mkdir()
    for name in ("config.json", "env.json"):
        (unfinished / name).write_text("{}")
    assert [path.name for path in find_runs([root])] == [
        "w7-0", "w7-1", "w11-0", "w11-1", "w13-0"
    ]  # fmt: skip
    comparison = compare_runs([root], baseline=str(root / "w11-1"))
    assert [group.name for group in comparison.groups] == ["width=11", "width=7"]
    assert [len(group.runs) for group in comparison.groups] == [2, 2]


def test_a_difference_within_the_noise_is_said_to_be(runs, text, tmp_path):
    noisy = [
        write_run(tmp_path / f"n{seed}", worse(text, share, seed), text, seed=seed, width=13)
        for seed, share in ((0, 0.2), (1, 0.4))
    ]
    comparison = compare_runs([*runs[:2], *noisy])
    assert comparison.differences[0].warning == "lies within the noise of seeds"
    assert "width=13: lies within the noise of seeds" in tables.render(comparison)


@pytest.mark.parametrize("form", get_args(tables.Format))
def test_every_format_has_all_numbers(compared, form):
    text = tables.render(compared, form)
    numbers = [f"{group.mean:.2f}" for group in compared.groups]
    numbers += [f"{compared.differences[0].value:.2f}"]
    numbers += [f"{compared.differences[0].p_value:.4f}"]
    assert all(number in text for number in numbers)
    assert form == "csv" or "tok:13a" in text.replace("\\", "")
    assert form != "terminal" or max(map(len, text.splitlines())) <= 80


def test_latex_escapes_its_special_characters_and_writes_signs_in_mathematics():
    table = tables.Table(("a_b", "c", "d"), [("50 % & more", "±0.50", "-1.5")])
    text = tables.write(table, "latex")
    assert r"a\_b" in text and r"50 \% \& more & $\pm 0.50$ & $-1.5$ \\" in text


@pytest.mark.parametrize(
    "half, shown",
    [(1.56, "41.4 ± 1.6"), (0.93, "41.4 ± 0.9"), (36.0, "41 ± 36"), (math.nan, "41.38")],
)
def test_a_number_is_rounded_to_the_digits_that_its_interval_leaves_certain(half, shown):
    assert rounding.rounded(41.3798, half) == shown


def test_a_score_by_length_is_that_of_the_sentences_of_this_length(runs, compared):
    table = tables.by_length(compared, [5, 8])
    samples = read_table(runs[0] / "samples" / "test.tsv")
    words = [len(line.split()) for line in samples["source"]]
    bins = ([n <= 5 for n in words], [5 < n <= 8 for n in words], [n > 8 for n in words])
    for rows, title, cell in zip(bins, table.titles[1:], table.rows[0][1:], strict=True):
        scores = []
        for run in runs[:2]:
            kept = {
                side: [line for line, keep in zip(lines, rows, strict=True) if keep]
                for side, lines in read_table(run / "samples" / "test.tsv").items()
            }
            scores.append(score_translations(kept["model"], kept["reference"]).bleu)
        assert title.endswith(f" ({sum(rows)})")
        assert cell == f"{np.mean(scores):.2f} sd {np.std(scores, ddof=1):.2f}"
    with pytest.raises(ConfigError, match="must rise"):
        tables.by_length(compared, [8, 5])
