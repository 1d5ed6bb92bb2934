"""What the translation experiment alone does: pairs, BLEU, samples, lines in and out.

What it shares with the others is in test_contract.py.
"""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments import runs
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.runs.sample_tables import read_table
from experiments.translation import evaluate, export, load_run, prepare, scoring, train, translate
from experiments.translation.presets import Files
from jaxformer.checkpoint import Checkpoints
from jaxformer.nn.int8 import quantize
from jaxformer.ops.dense import QuantizedMatrix
from jaxformer.text import tokenizers
from tests.experiments.commands import call, options, refused
from tests.experiments.events import events
from tests.experiments.tiny_runs import TOO_LONG, changed, translation_config
from tests.experiments.trained_runs import copied, loaded_once
from tests.stored import stored

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(translation_run):
    """The finished run, which all commands of this module load once."""
    with loaded_once(load_run, export, runs=(translation_run,)):
        yield translation_run


@pytest.fixture
def loaded(run):
    return load_run.load_run(run.folder)


@pytest.fixture
def pairs(run):
    """The options that name the run and its validation files, of six pairs."""
    files = run.config.data.validation
    return {"--run": run.folder, "--source": files.source, "--target": files.target}


def write(path, lines):
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return str(path)


def read(path):
    return Path(path).read_text("utf-8").split("\n")[:-1]


# Training


def test_the_scores_and_samples_are_those_of_the_test_text(run):
    test = run.config.data.test
    scores = json.loads((run.folder / "scores.json").read_text())
    assert scores["text"] == "test" and scores["sentences"] == 4
    assert scores["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert f"BLEU {scores['bleu']:.2f}" in run.out and scores["bleu_signature"] in run.out
    table = read_table(run.folder / "samples" / "test.tsv")
    right = [a == b for a, b in zip(table["model"], table["reference"], strict=True)]
    assert scores["exact"] == sum(right) / 4
    assert list(table) == ["source", "model", "reference"]
    assert (table["source"], table["reference"]) == (read(test.source), read(test.target))
    samples = sorted(path.name for path in (run.folder / "samples").iterdir())
    assert samples == ["test.tsv", "validation-3.tsv", "validation-6.tsv"]


def test_pairs_left_out_and_padding_are_reported(run):
    assert "training pairs 147 (left out: 1 empty, 1 too_long), validation 6, test 4" in run.out
    assert re.search(r"\d+\.\d% padding", run.out)


def test_held_out_pairs_that_are_trained_on_are_counted(run):
    """Three lines of the validation text, and one more that reads the same in reverse."""
    data = run.config.data
    train, validation, test = (
        list(zip(read(files.source), read(files.target), strict=True))
        for files in (data.train, data.validation, data.test)
    )
    assert [pair in train for pair in validation] == [True] * 3 + [False, True, False]
    assert [pair in train for pair in test] == [True, True, False, True]
    assert "validation: 4 of 6 pairs are trained on, too" in run.out
    assert "test: 3 of 4 pairs are trained on, too" in run.out
    assert "test: 2 of 4 pairs are validated on, too" in run.out


def test_a_run_whose_text_is_gone_asks_for_another_to_be_scored_on(run, tmp_path):
    run = copied(run, tmp_path / "copy")
    Path(run.config.data.train.source).unlink()
    refused(call(evaluate, {"--run": run.folder}), 65, "give these, or bring it back")


def test_a_text_whose_translations_are_its_sources_is_named(tmp_path):
    config = translation_config(tmp_path)
    copies = Files(*(config.data.train.source,) * 2)
    config = changed(config, data__train=copies)
    said = prepare.describe(prepare.prepare(config, tmp_path / "run"))
    assert "147 of 147 training pairs have the same text on both sides" in said


def test_a_test_line_that_is_too_long_is_reported_and_scored_as_an_empty_translation(run):
    assert "warning: 1 of the lines have more than the model's max_len=23 tokens" in run.err
    assert "(line 4)" in run.err
    assert read_table(run.folder / "samples" / "test.tsv")["model"][3] == ""


def test_tensorboard_shows_samples(run):
    shown = [(e.step, v) for e in events(run.folder) for v in e.summary.value]
    texts = {step: v.tensor.string_val[0].decode() for step, v in shown if "text" in v.tag}
    assert texts.keys() == {3, 6}
    table = read_table(run.folder / "samples" / "validation-6.tsv")
    shown = re.findall(r"source +(.*)\n +model +(.*)\n", texts[6])
    assert len(shown) == 3 and set(shown) <= set(zip(table["source"], table["model"], strict=True))


def test_other_validation_and_test_files_do_not_touch_what_was_prepared(run, tmp_path):
    run = copied(run, tmp_path / "copy")

    def prepared():
        paths = [*run.folder.glob("data/*"), *run.folder.glob("tokenizer/*")]
        return {path: path.read_bytes() for path in paths}

    before = prepared()
    other = replace(run.config, data=replace(run.config.data, test=run.config.data.validation))
    done = call(prepare, other)
    assert done.code == 0 and "test 6" in done.out
    assert call(prepare, run.config).code == 0
    assert prepared() == before


def test_rows_divide_by_the_accumulation(run, tmp_path):
    config = changed(run.config, runs=str(tmp_path), training__grad_accumulation=3)
    prepared = prepare.prepare(config, tmp_path / "run")
    assert all(bucket.batch_size % 24 == 0 for bucket in prepared.batches.buckets)


# Translating


def translated(run, tmp_path, content, more=""):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(content)
    args = {"--run": run.folder, "--input": source, "--output": target}
    done = call(translate, args | options(more))
    done.lines = target.read_bytes().decode().split("\n") if target.exists() else None
    return done


ODD = [
    "sun rain",
    "",
    "m\u2028a\u0085b\x0bc\x0c",
    "\u2028",
    "<pad> <eos>",
    "  \t",
    "hill\r",
    "<bos>",
]


def test_one_line_comes_out_for_each_line_that_goes_in(run, tmp_path):
    done = translated(run, tmp_path, "\n".join(ODD).encode())
    assert done.code == 0 and done.err == ""
    assert len(done.lines) == len(ODD) + 1 and done.lines[-1] == ""
    assert [line == "" for line in done.lines[:2]] == [False, True]
    assert done.lines[3] == done.lines[5] == ""
    without_return = translated(run, tmp_path, b"hill\n")
    assert without_return.lines == [done.lines[6], ""]
    marked = translated(run, tmp_path, b"\xef\xbb\xbfsun rain")
    assert marked.lines == [done.lines[0], ""], "a byte order mark is no text"
    in_parts = translated(run, tmp_path, "\n".join(ODD).encode(), "--lines_at_once 3")
    assert in_parts.lines == done.lines


def test_n_best_lines_hold_number_score_text_and_log_probabilities(run, tmp_path):
    content = b"sun rain\n\nhill\n"
    done = translated(run, tmp_path, content, "--n_best 2 --scores True")
    rows = [line.split("\t") for line in done.lines[:-1]]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert rows[2] == ["2", "0.0000", "", ""]
    for number in ("1", "3"):
        scores = [float(row[1]) for row in rows if row[0] == number]
        assert scores == sorted(scores, reverse=True)
    for row in rows[:2]:
        log_probs = list(map(float, row[3].split()))
        assert abs(float(row[1]) - sum(log_probs) / ((5 + len(log_probs)) / 6) ** 0.6) < 1e-3
    assert translated(run, tmp_path, content).lines == [rows[0][2], "", rows[3][2], ""]


def test_a_line_that_is_too_long_gives_an_empty_one_and_is_named(run, tmp_path):
    content = f"sun rain\n{TOO_LONG}\nhill\n{TOO_LONG}".encode()
    done = translated(run, tmp_path, content, "--lines_at_once 3")
    assert done.code == 65
    assert done.err == (
        f"error: {tmp_path}/in.txt: 2 of the lines have more than the model's max_len=23 tokens "
        "and were given empty translations (line 2, 4): split them\n"
    )
    assert done.lines == translated(run, tmp_path, b"sun rain\n\nhill\n\n").lines
    assert done.lines[0] and done.lines[2]


def test_a_line_that_is_not_utf8_is_named_and_those_before_are_not_lost(run, tmp_path):
    content = b"sun rain\nhill\nking \xff\nship\n"
    done = translated(run, tmp_path, content)
    refused(done, 65, f"error: {tmp_path}/in.txt:3: byte 6 of the line (0xff) is not UTF-8")
    assert done.lines == translated(run, tmp_path, b"sun rain\nhill\n").lines
    done = translated(run, tmp_path, TOO_LONG.encode() + b"\n" + content)
    assert "in.txt:4: byte 6" in done.err and "(line 1)" in done.err and len(done.lines) == 4


def test_an_input_that_cannot_be_read_is_named_and_the_output_left_alone(run, tmp_path):
    target = tmp_path / "out.txt"
    write(target, ["precious"])
    args = {"--run": run.folder, "--output": target}
    for source, code, why in (
        (tmp_path, 65, f"error: {tmp_path}: cannot read the file: Is a directory"),
        (tmp_path / "no.txt", 65, "no.txt: cannot read the file: No such file"),
        (target, 2, "out.txt is the input: give the output another name"),
    ):
        refused(call(translate, args | {"--input": source}), code, why)
        assert target.read_text() == "precious\n"
    assert translated(run, tmp_path, b"").lines == [""]
    nowhere = tmp_path / "none" / "out.txt"
    done = call(translate, args | {"--input": tmp_path / "in.txt", "--output": nowhere})
    refused(done, 74, f"error: {nowhere}: No such file or directory")


def test_an_ensemble_of_a_run_with_itself_translates_as_the_run(run, tmp_path):
    content = b"sun rain\nhill\n"
    alone = translated(run, tmp_path, content)
    twice = {"--run": f"{run.folder},{run.folder}", "--input": tmp_path / "in.txt"}
    done = call(translate, twice | {"--output": tmp_path / "twice"})
    assert done.code == 0, done.err
    assert (tmp_path / "twice").read_text().split("\n") == alone.lines


# Runs that cannot translate


def test_the_weights_of_a_step_are_those_of_its_checkpoint(run, pairs):
    found = load_run.load_run(run.folder, RunOptions(step=3)).params
    saved = stored(Checkpoints(run.folder / "checkpoints"), 3)
    jax.tree.map(np.testing.assert_array_equal, found, saved)
    forced = pairs | {"--forced": True}
    printed = [
        call(evaluate, forced | more) for more in ({"--step": 3}, {"--checkpoint": "last"}, {})
    ]
    assert [done.code for done in printed] == [0, 0, 0]
    assert len({done.out for done in printed}) == 3
    refused(call(evaluate, pairs | {"--step": 4}), 66, "no checkpoint of step 4: it keeps 3, 6, 7")


def test_runs_that_cannot_decode_together_are_refused(run, tmp_path):
    other = tmp_path / "translation" / "other"
    shutil.copytree(run.folder, other)
    config = (other / "config.json").read_text()
    both = {"--run": f"{run.folder},{other}"}
    (other / "config.json").write_text(config.replace('"max_len": 23', '"max_len": 22'))
    said = f"model.max_len is 23 in {run.folder} and 22 in {other}, but the models of an"
    refused(call(evaluate, both), 2, said)
    (other / "config.json").write_text(config)
    tokenizer = other / "tokenizer" / "target.json"
    content = json.loads(tokenizer.read_text())
    vocab = content["model"]["vocab"]
    vocab["d"], vocab["e"] = vocab["e"], vocab["d"]
    tokenizer.write_text(json.dumps(content))
    refused(call(evaluate, both), 2, "is not the tokenizer that the run was trained with")
    with Checkpoints(other / "checkpoints") as checkpoints:
        for step in checkpoints.steps():
            checkpoints.annotate(step, {"tokenizer": tokenizers.digest(tokenizer.parent)})
    refused(call(evaluate, both), 2, "have different tokenizers, but the models of an")
    nowhere = {"--run": f"{run.folder}, nowhere,"}
    refused(call(evaluate, nowhere), 2, "nowhere is not a folder: give one with")


# Scoring


@pytest.mark.long
def test_8_bits_translate_and_score_as_the_model_in_8_bits_does(run, loaded, pairs, tmp_path):
    done = call(evaluate, pairs | {"--output": tmp_path / "out.txt", "--int8": True})
    assert done.code == 0, done.err
    found = replace(loaded, params=quantize(loaded.model, loaded.params))
    assert isinstance(found.params["embedding"]["table"], QuantizedMatrix)
    lines = read(pairs["--source"])
    expected = [best[0].text for best in jf.translate_with_details(found, lines)]
    assert (tmp_path / "out.txt").read_text().splitlines() == expected


def test_decoding_options_reach_the_search_and_the_record(run, pairs, monkeypatch):
    searches = []

    def translations(loaded, lines, search, **more):
        searches.append(search)
        return jf.translate_with_details(loaded, lines)

    monkeypatch.setattr(scoring, "translate_with_details", translations)
    rules = {"beam_size": 3, "length_penalty": 0.3, "no_repeat_ngram_size": 1}
    done = call(evaluate, pairs | {f"--{name}": value for name, value in rules.items()})
    assert searches == [replace(run.config.search, **rules)]
    record = json.loads(done.out.splitlines()[-1])
    assert {name: record["search"][name] for name in rules} == rules
    assert record["translation"]["batch_size"] == 1


def test_a_text_of_ones_own_is_scored_and_its_translations_written(run, pairs, tmp_path):
    output = tmp_path / "out.txt"
    done = call(evaluate, pairs | {"--output": output, "--lowercased": True})
    assert done.code == 0, done.err
    assert f"{pairs['--source']}: 6 sentences" in done.out
    assert "lc.norm.moses:de|nrefs:1" in done.out
    assert output.read_bytes().count(b"\n") == 6


def test_forced_scores_are_a_line_for_each_pair_whose_sum_stands_first(run, tmp_path):
    source = write(tmp_path / "a.en", ["sun rain", "", "hill", "moon"])
    target = write(tmp_path / "a.de", ["rain sun", "leer", " ", "sun"])
    args = {"--run": run.folder, "--source": source, "--target": target}
    done = call(evaluate, args | {"--forced": True})
    assert done.code == 0, done.err
    lines = done.out.split("\n")
    assert len(lines) == 5 and lines[1] == lines[2] == lines[4] == ""
    for i in (0, 3):
        total, numbers = lines[i].split("\t")
        log_probs = list(map(float, numbers.split()))
        assert max(log_probs) < 0.0 and abs(float(total) - sum(log_probs)) < 1e-3


def test_pairs_that_cannot_be_scored_are_refused(run, pairs):
    test = run.config.data.test
    for forced in ("--no_forced", "--forced"):
        done = call(evaluate, pairs | {"--target": test.target, forced: True})
        refused(done, 65, "validation.source has 6 lines and")
        assert "test.target has 4" in done.err
    long = {"--source": test.source, "--target": test.target, "--forced": True}
    refused(call(evaluate, pairs | long), 65, f"error: {test.source}:4: the line has more than")
    refused(call(evaluate, pairs | {"--target": ""}), 2, "parallel text needs both files")
    assert call(evaluate, pairs | {"--beam_size": -1}).code == 2


# Exporting


def test_an_export_that_cannot_be_is_refused(run, tmp_path):
    base = {"--run": run.folder, "--out": tmp_path / "new"}
    done = call(export, base | {"--out": ROOT / "tests"})
    refused(done, 2, "is there already: give --out the name of a new folder")
    done = call(export, base)
    refused(done, 2, "train with --model.embeddings.zero_id 1")
    assert "Runs of the presets grammar_marian" in done.err
    assert not any(tmp_path.iterdir())


# Bad input to prepare and train: one sentence, a code, and nothing lost


@pytest.fixture
def fresh(run, tmp_path):
    """The settings of a run that is not there yet."""
    return changed(run.config, runs=str(tmp_path / "runs"))


def with_files(config, source, target):
    return changed(config, data__train=Files(str(source), str(target)))


def test_a_file_that_is_missing_is_named_and_the_right_one_may_follow(fresh, tmp_path):
    path = tmp_path / "train.en"
    done = call(train, with_files(fresh, path, fresh.data.train.target))
    refused(done, 65, f"error: {path}: cannot read the file: No such file or directory\n")
    assert call(prepare, fresh).code == 0, "a misspelt name must not spoil the run's name"


def test_preparing_anew_with_one_vocabulary_leaves_no_second_tokenizer(fresh, tmp_path):
    two = {"source_vocab_size": 9, "vocab_size": 10, "embeddings.tied": "output"}
    two = changed(fresh, data__tokenizer="words", **{f"model.{k}": v for k, v in two.items()})
    folder = tmp_path / "run"
    prepared = prepare.prepare(two, folder)
    assert {path.name for path in (folder / "tokenizer").iterdir()} == {
        "source.json",
        "target.json",
    }
    assert (prepared.model.source_vocab_size, prepared.model.vocab_size) == (9, 10)
    assert len(prepared.source_tokenizer.encode("sun rain sun")) == 3
    prepare.prepare(fresh, folder)
    assert {path.name for path in (folder / "tokenizer").iterdir()} == {"target.json"}


@pytest.mark.parametrize(
    "module, command", [("tokenizers", prepare), ("sacrebleu", train), ("jinja2", export)]
)
def test_a_missing_extra_is_named_before_anything_is_done(
    module, command, fresh, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    done = call(command, {} if command is export else fresh)
    refused(done, 2, f"error: {module} is needed but not installed: pip install ")
    assert "'jaxformer[" not in done.err and {"tokenizers", "jinja2"} <= set(
        done.err.replace(",", "").split()
    )
    assert not list(tmp_path.rglob("metrics.jsonl")) + list(tmp_path.rglob("checkpoints"))


def test_a_run_has_a_page_with_its_scores_and_the_attention_in_its_samples(run, tmp_path):
    output = tmp_path / "page.html"
    runs.main(["page", str(run.folder), "--output", str(output)])
    text = output.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    samples = read_table(run.folder / "samples" / "test.tsv")
    shown = [sentence["text"].partition(" = ")[0] for sentence in json.loads(data)]
    assert shown == samples["source"][:3], "line 4 is too long"
    kinds = [view["kind"].partition(" ")[0] for view in json.loads(data)[0]["views"]]
    assert kinds == ["cross-attention", "encoder", "decoder"]
    assert 'aria-label="loss by step"' in text and "<dt>exact</dt>" in text
