"""The translation experiment, end to end on a tiny model that is trained here, in this process."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments import runs
from experiments.harness import cli
from experiments.harness.runs import checkpoint_selection
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.run_files import read_table
from experiments.translation import (
    evaluate,
    export,
    load_run,
    prepare,
    train,
    translate,
)
from experiments.translation.presets import PRESETS
from jaxformer.checkpoint import Checkpoints
from jaxformer.nn.int8 import Int8
from tests.experiments.commands import bytes_of, call, metrics_of, options, parsed
from tests.experiments.events import events

ROOT = Path(__file__).parents[2]
NOUNS = {"dog": "Hund", "bird": "Vogel", "tree": "Baum", "king": "Prinz", "ship": "Kahn"}
VERBS = {"sees": "sieht", "likes": "mag", "finds": "findet", "draws": "malt", "hears": "hört"}
TOO_LONG = "dog " * 47
SETTINGS = """
    --name tiny --model.vocab_size 400 --model.d_model 16 --model.d_ff 22 --model.num_heads 2
    --model.num_encoder_layers 1 --model.num_decoder_layers 1 --model.max_len 31
    --model.dropout_rate 0.1 --data.batch_tokens 128 --data.buckets 1
    --optimizer.schedule inverse_square_root --optimizer.warmup_steps 3
    --optimizer.total_steps 17 --training.log_every 2 --training.save_every 5
    --training.evaluate_every 5 --training.average_checkpoints 3
    --search.beam_size 2 --translation.max_extra_tokens 3 --translation.batch_size 1
"""


def write(path, lines):
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def read(path):
    return Path(path).read_text("utf-8").split("\n")[:-1]


def text_pairs(rng, count):
    """Sentences of 2 to 6 words, and their translations word by word, from right to left."""
    pairs = []
    for _ in range(count):
        words = rng.choice([*NOUNS, *VERBS], rng.integers(2, 7)).tolist()
        pairs.append((" ".join(words), " ".join((NOUNS | VERBS)[word] for word in words[::-1])))
    return pairs


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with train, validation and test files; the train files have two odd pairs."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(7)
    odd = {"train": [("", "leer"), (TOO_LONG, "Hund")], "val": [], "test": [(TOO_LONG, "Baum")]}
    for part, count in (("train", 97), ("val", 5), ("test", 3)):
        pairs = text_pairs(rng, count) + odd[part]
        for side, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            write(folder / f"{part}.{side}", lines)
    return folder


def settings(text, runs, more=""):
    """The options of a tiny run of `text`, with those of `more` over them."""
    found = options(SETTINGS) | {"--runs": runs}
    for part, name in (("train", "train"), ("validation", "val"), ("test", "test")):
        for side, suffix in (("source", "en"), ("target", "de")):
            found[f"--data.{part}.{side}"] = text / f"{name}.{suffix}"
    return found | options(more)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """The finished run: its folder, its config, its training's arguments and output."""
    root = tmp_path_factory.mktemp("runs")
    args = settings(text, root)
    done = call(train, args)
    assert done.code == 0, done.err
    folder = root / "translation" / "tiny"
    config = load_run.load_run(folder).config
    return SimpleNamespace(folder=folder, args=args, config=config, out=done.out, err=done.err)


def snapshot(folder):
    """Every file of a run but the log of its surroundings."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "env.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# Training


def test_a_run_from_ones_own_files_leaves_everything_in_its_folder(run):
    names = {path.name for path in run.folder.iterdir()}
    assert names >= {"config.json", "env.json", "metrics.jsonl", "tokenizer", "checkpoints"}
    assert names >= {"samples", "scores.json", "tensorboard"}
    assert run.config.data.train.source.endswith("train.en")
    scores = json.loads((run.folder / "scores.json").read_text())
    assert scores["text"] == "test" and scores["sentences"] == 4
    assert scores["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    table = read_table(run.folder / "samples" / "test.tsv")
    right = [a == b for a, b in zip(table["model"], table["reference"], strict=True)]
    assert scores["exact"] == sum(right) / 4
    assert list(table) == ["source", "model", "reference"]
    text = (read(run.config.data.test.source), read(run.config.data.test.target))
    assert (table["source"], table["reference"]) == text and len(table["model"]) == 4
    samples = sorted(path.name for path in (run.folder / "samples").iterdir())
    assert samples == ["test.tsv", *(f"validation-{n}.tsv" for n in (10, 15, 5))]


def test_the_metrics_hold_the_loss_the_padding_and_the_validation_scores(run):
    lines = metrics_of(run.folder)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert sorted(losses) == [2, 4, 6, 8, 10, 12, 14, 16, 17]
    assert losses[17] < losses[2]
    assert all(0.0 < line["padding"] < 1.0 for line in lines if "loss" in line)
    assert [line["step"] for line in lines if "validation_bleu" in line] == [5, 10, 15]


def test_pairs_left_out_and_padding_are_reported(run):
    assert "training pairs 97 (left out: 1 empty, 1 too_long), validation 5, test 4" in run.out
    assert re.search(r"\d+\.\d% of target positions are padding", run.out)


def test_a_test_line_that_is_too_long_is_reported_and_scored_as_an_empty_translation(run):
    assert "warning: 1 of the lines have more than the model's max_len=31 tokens" in run.err
    assert "(line 4)" in run.err
    assert read_table(run.folder / "samples" / "test.tsv")["model"][3] == ""


def test_tensorboard_shows_samples(run):
    shown = [(e.step, v) for e in events(run.folder) for v in e.summary.value]
    texts = {step: v.tensor.string_val[0].decode() for step, v in shown if "text" in v.tag}
    assert texts.keys() == {5, 10, 15}
    table = read_table(run.folder / "samples" / "validation-15.tsv")
    pairs = re.findall(r"source +(.*)\n +model +(.*)\n", texts[15])
    assert len(pairs) == 3 and set(pairs) <= set(zip(table["source"], table["model"], strict=True))


@pytest.fixture(scope="module")
def stopped(run, text, tmp_path_factory):
    """The same run, stopped by a signal after step 13 and started again."""
    root = tmp_path_factory.mktemp("stopped")
    args = settings(text, root) | {"--training.loggers": "tests.experiments.own_parts:StopAt12"}
    first = call(train, args)
    args.pop("--training.loggers")
    folder = root / "translation" / "tiny"
    steps = Checkpoints(folder / "checkpoints").steps()
    second = call(train, args)
    return SimpleNamespace(first=first, steps=steps, second=second, folder=folder)


def test_a_signal_saves_the_step_and_ends_with_its_code(stopped):
    assert stopped.first.code == 143
    assert "SIGTERM: saving after" in stopped.first.err
    assert stopped.steps == [5, 10, 13]
    assert stopped.second.code == 0 and "from step 13 to 17" in stopped.second.out


def test_a_stopped_and_resumed_run_is_the_uninterrupted_one_to_the_bit(run, stopped):
    steps = [set(Checkpoints(x.folder / "checkpoints").steps()) for x in (run, stopped)]
    assert steps[0] & steps[1] >= {10, 15, 17}
    for step in steps[0] & steps[1]:
        assert bytes_of(run.folder, step) == bytes_of(stopped.folder, step)
    assert metrics_of(run.folder) == metrics_of(stopped.folder)
    for name in ("scores.json", "weights.json", "samples/test.tsv"):
        assert (run.folder / name).read_bytes() == (stopped.folder / name).read_bytes()


def test_a_run_whose_training_text_has_changed_is_refused_and_untouched(run, text):
    before, path = snapshot(run.folder), text / "train.de"
    content = path.read_bytes()
    try:
        path.write_bytes(content.replace(b"Hund", b"Katze"))
        done = call(train, run.args)
    finally:
        path.write_bytes(content)
    assert done.code == 66 and "tiny was trained on other text than this" in done.err
    assert snapshot(run.folder) == before


def test_other_validation_and_test_files_do_not_touch_what_was_prepared(run, text):
    before = snapshot(run.folder)
    other = run.args | {
        "--data.test.source": text / "val.en",
        "--data.test.target": text / "val.de",
    }
    done = call(prepare, other)
    assert done.code == 0 and "test 5" in done.out
    assert call(prepare, run.args).code == 0
    assert snapshot(run.folder) == before


def test_rows_divide_by_the_accumulation(text, tmp_path):
    args = settings(text, tmp_path, "--training.grad_accumulation 3")
    prepared = prepare.prepare(parsed(prepare, args), tmp_path / "run")
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
    "dog sees bird",
    "",
    "king\u2028a\u0085b\x0bc\x0c",
    "\u2028",
    "tree <pad> <eos>",
    "  \t",
    "tree likes dog\r",
    "<bos>",
]


def test_one_line_comes_out_for_each_line_that_goes_in(run, tmp_path):
    done = translated(run, tmp_path, "\n".join(ODD).encode())
    assert done.code == 0 and done.err == ""
    assert len(done.lines) == len(ODD) + 1 and done.lines[-1] == ""
    assert [line == "" for line in done.lines[:2]] == [False, True]
    assert done.lines[3] == done.lines[5] == ""
    without_return = translated(run, tmp_path, b"tree likes dog\n")
    assert without_return.lines == [done.lines[6], ""]
    marked = translated(run, tmp_path, b"\xef\xbb\xbfdog sees bird")
    assert marked.lines == [done.lines[0], ""], "a byte order mark is no text"
    in_parts = translated(run, tmp_path, "\n".join(ODD).encode(), "--lines_at_once 3")
    assert in_parts.lines == done.lines


def test_three_lines_lead_from_a_run_to_the_translations_of_its_command(run, tmp_path):
    loaded = jf.load(run.folder)
    best, *others = jf.translate(loaded, ["dog sees", "tree"])
    assert [best, *others, ""] == translated(run, tmp_path, b"dog sees\ntree\n").lines
    assert jf.translate(loaded, "dog sees") == best


def test_n_best_lines_hold_number_score_text_and_log_probabilities(run, tmp_path):
    done = translated(run, tmp_path, b"dog sees\n\ntree\n", "--n_best 2 --scores True")
    rows = [line.split("\t") for line in done.lines[:-1]]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert rows[2] == ["2", "0.0000", "", ""]
    for number in ("1", "3"):
        scores = [float(row[1]) for row in rows if row[0] == number]
        assert scores == sorted(scores, reverse=True)
    for row in rows[:2]:
        log_probs = list(map(float, row[3].split()))
        assert abs(float(row[1]) - sum(log_probs) / ((5 + len(log_probs)) / 6) ** 0.6) < 1e-3
    best = translated(run, tmp_path, b"dog sees\n\ntree\n").lines
    assert best == [rows[0][2], "", rows[3][2], ""]


def test_a_line_that_is_too_long_gives_an_empty_one_and_is_named(run, tmp_path):
    content = f"dog sees\n{TOO_LONG}\ntree\n{TOO_LONG}".encode()
    done = translated(run, tmp_path, content, "--lines_at_once 3")
    assert done.code == 65
    assert done.err == (
        f"error: {tmp_path}/in.txt: 2 of the lines have more than the model's max_len=31 tokens "
        "and were given empty translations (line 2, 4): split them\n"
    )
    assert done.lines == translated(run, tmp_path, b"dog sees\n\ntree\n\n").lines
    assert done.lines[0] and done.lines[2]


def test_a_line_that_is_not_utf8_is_named_and_those_before_are_not_lost(run, tmp_path):
    content = b"dog sees\ntree\nking \xff\nship\n"
    done = translated(run, tmp_path, content)
    assert done.code == 65
    assert f"error: {tmp_path}/in.txt:3: byte 6 of the line (0xff) is not UTF-8" in done.err
    done = translated(run, tmp_path, TOO_LONG.encode() + b"\n" + content)
    assert "in.txt:4: byte 6" in done.err and "(line 1)" in done.err and len(done.lines) == 4
    done = translated(run, tmp_path, content)
    assert done.lines == translated(run, tmp_path, b"dog sees\ntree\n").lines


def test_an_input_that_cannot_be_read_is_named_and_the_output_left_alone(run, tmp_path):
    target = write(tmp_path / "out.txt", ["precious"])
    args = {"--run": run.folder, "--output": target}
    for source, code, why in (
        (tmp_path, 65, f"error: {tmp_path}: cannot read the file: Is a directory"),
        (tmp_path / "no.txt", 65, "no.txt: cannot read the file: No such file"),
        (target, 2, "out.txt is the input: write the translations elsewhere"),
    ):
        done = call(translate, args | {"--input": source})
        assert done.code == code and why in done.err and target.read_text() == "precious\n"
    assert translated(run, tmp_path, b"").lines == [""]
    nowhere = tmp_path / "none" / "out.txt"
    done = call(translate, args | {"--input": tmp_path / "in.txt", "--output": nowhere})
    assert done.code == 74 and done.err == f"error: {nowhere}: No such file or directory\n"


def test_standard_input_and_output_in_a_process_of_their_own(run, tmp_path):
    command = [sys.executable, "-m", "experiments.translation.translate", "--run", run.folder]
    given = "\n".join(ODD[:3]).encode() + b"\nking \xff"
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, timeout=300)
    assert done.returncode == 65
    assert done.stderr.startswith(b"error: standard input:4: byte 6 of the line (0xff) is not UTF")
    expected = translated(run, tmp_path, "\n".join(ODD[:3]).encode()).lines
    assert done.stdout.decode().split("\n") == expected


# Runs that cannot translate


@pytest.mark.parametrize("command", [translate, evaluate, export])
def test_a_folder_without_a_trained_run_is_refused(command, run, tmp_path):
    done = call(command, {"--run": tmp_path / "none"})
    assert done.code == 2 and f"{tmp_path}/none is not a folder: give --run" in done.err
    done = call(command, {"--run": tmp_path})
    assert done.code == 2 and f"{tmp_path} is not the folder of a run" in done.err
    shutil.copy(run.folder / "config.json", tmp_path)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    done = call(command, {"--run": tmp_path})
    assert done.code == 66
    assert done.err == f"error: {tmp_path} holds no complete checkpoint: train first\n"


def test_chosen_weights_that_are_gone_give_way_to_the_newest(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    (folder / "weights.json").write_text('{"steps": [5, 999]}')
    newest = Checkpoints(folder / "checkpoints").restore_params(17)
    found = load_run.load_run(folder).params
    jax.tree.map(np.testing.assert_array_equal, found, newest)


def test_the_weights_of_a_step_are_those_of_its_checkpoint(run, text):
    found = load_run.load_run(run.folder, RunOptions(step=10)).params
    stored = Checkpoints(run.folder / "checkpoints").restore_params(10)
    jax.tree.map(np.testing.assert_array_equal, found, stored)
    args = {"--run": run.folder, "--source": text / "val.en", "--target": text / "val.de"}
    forced = args | {"--forced": True}
    early, last, final = (
        call(evaluate, forced | more) for more in ({"--step": 5}, {"--checkpoint": "last"}, {})
    )
    assert early.code == last.code == final.code == 0
    assert len({early.out, last.out, final.out}) == 3
    done = call(evaluate, args | {"--step": 4})
    assert done.code == 66 and "no checkpoint of step 4: it keeps 5, 10, 15, 17" in done.err


@pytest.mark.long
def test_a_run_is_resumed_by_its_folder_alone(run, tmp_path):
    folder = tmp_path / "translation" / "copy"
    shutil.copytree(run.folder, folder)
    words = ["--resume", str(folder), "--optimizer.total_steps", "19"]
    train.main(cli.parse(PRESETS, words, experiment="translation"))
    assert Checkpoints(folder / "checkpoints").newest_step() == 19
    assert [path.name for path in folder.parent.iterdir()] == ["copy"]
    assert metrics_of(folder)[:5] == metrics_of(run.folder)[:5]


# Scoring


def test_the_score_of_a_run_without_files_is_that_of_its_scores_json(run):
    done = call(evaluate, {"--run": run.folder})
    assert done.code == 0
    found = json.loads(done.out.splitlines()[-1])
    stored = json.loads((run.folder / "scores.json").read_text())
    assert {name: found[name] for name in stored if name != "text"} == {
        name: value for name, value in stored.items() if name != "text"
    }
    said = rf"BLEU {stored['bleu']:.2f}( ± [\d.]+)?  {re.escape(stored['bleu_signature'])}"
    assert re.search(said, done.out)


def test_8_bits_translate_and_score_as_the_model_in_8_bits_does(run, text, tmp_path):
    args = {"--run": run.folder, "--source": text / "val.en", "--target": text / "val.de"}
    done = call(evaluate, args | {"--output": tmp_path / "out.txt", "--int8": True})
    assert done.code == 0, done.err
    found = checkpoint_selection.in_int8(load_run.load_translator(run.folder))
    assert isinstance(found.model, Int8)
    lines = (text / "val.en").read_text().splitlines()
    expected = [best[0].text for best in jf.translate(found, lines, details=True)]
    assert (tmp_path / "out.txt").read_text().splitlines() == expected


def test_an_ensemble_of_a_run_with_itself_translates_and_scores_as_the_run(run, text, tmp_path):
    content = (text / "val.en").read_bytes()
    twice = {"--run": f"{run.folder},{run.folder}"}
    lists = [translated(run, tmp_path, content, "--n_best 2").lines]
    done = call(translate, {"--input": tmp_path / "in.txt", "--output": tmp_path / "b"} | twice)
    assert done.code == 0, done.err
    lists.append((tmp_path / "b").read_text().split("\n"))
    assert [line.split("\t")[2] for line in lists[0][:-1:2]] == lists[1][:-1]


def test_runs_that_cannot_decode_together_are_refused(run, tmp_path):
    other = tmp_path / "translation" / "other"
    shutil.copytree(run.folder, other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"max_len": 31', '"max_len": 30'))
    done = call(evaluate, {"--run": f"{run.folder},{other}"})
    said = f"model.max_len is 31 in {run.folder} and 30 in {other}, but the models of an"
    assert done.code == 2 and said in done.err
    (other / "config.json").write_text(config)
    (other / "data" / "prepared.json").unlink()
    tokenizer = other / "tokenizer" / "target.json"
    content = json.loads(tokenizer.read_text())
    vocab = content["model"]["vocab"]
    vocab["d"], vocab["e"] = vocab["e"], vocab["d"]
    tokenizer.write_text(json.dumps(content))
    done = call(evaluate, {"--run": f"{run.folder},{other}"})
    assert done.code == 2 and "have different tokenizers, but the models of an" in done.err
    done = call(evaluate, {"--run": f"{run.folder},nowhere"})
    assert done.code == 2 and "nowhere is not a folder: give --run" in done.err


def test_decoding_options_reach_the_search_and_the_record(run, text):
    files = {"--run": run.folder, "--source": text / "val.en", "--target": text / "val.de"}
    rules = {"--beam_size": 3, "--length_penalty": 0.3, "--no_repeat_ngram_size": 1}
    done = call(evaluate, files | rules)
    record = json.loads(done.out.splitlines()[-1])
    search = record["search"]
    assert {f"--{name}": search[name] for name in ("beam_size", "length_penalty")} == {
        name: rules[name] for name in ("--beam_size", "--length_penalty")
    }
    assert search["no_repeat_ngram_size"] == 1 and record["translation"]["max_extra_tokens"] == 3


def test_a_text_of_ones_own_is_scored_and_its_translations_written(run, text, tmp_path):
    source, output = text / "val.en", tmp_path / "out.txt"
    args = {"--run": run.folder, "--source": source, "--target": text / "val.de"}
    done = call(evaluate, args | {"--output": output, "--lowercased": True})
    assert done.code == 0, done.err
    assert f"{source}: 5 sentences" in done.out
    assert "lc.norm.moses:de|nrefs:1" in done.out
    assert output.read_bytes().count(b"\n") == 5


def test_forced_scores_are_a_line_for_each_pair_whose_sum_stands_first(run, tmp_path):
    source = write(tmp_path / "a.en", ["dog sees", "", "tree", "king"])
    target = write(tmp_path / "a.de", ["sieht Hund", "leer", " ", "Prinz"])
    args = {"--run": run.folder, "--source": source, "--target": target}
    done = call(evaluate, args | {"--forced": True})
    assert done.code == 0, done.err
    lines = done.out.split("\n")
    assert len(lines) == 5 and lines[1] == lines[2] == lines[4] == ""
    for i in (0, 3):
        total, numbers = lines[i].split("\t")
        log_probs = list(map(float, numbers.split()))
        assert max(log_probs) < 0.0 and abs(float(total) - sum(log_probs)) < 1e-3


def test_pairs_that_cannot_be_scored_are_refused(run, text, tmp_path):
    base = {"--run": run.folder, "--source": text / "val.en"}
    for forced in ("--no_forced", "--forced"):
        done = call(evaluate, base | {"--target": text / "test.de", forced: True})
        assert done.code == 65
        assert "val.en has 5 lines and" in done.err and "test.de has 4" in done.err
    done = call(evaluate, base)
    assert done.code == 2 and "parallel text needs both files" in done.err
    long = {"--source": text / "test.en", "--target": text / "test.de", "--forced": True}
    done = call(evaluate, base | long)
    assert done.code == 65 and f"error: {text}/test.en:4: the line has more than" in done.err
    assert call(evaluate, base | {"--beam_size": -1}).code == 2


# Exporting


def test_an_export_that_cannot_be_is_refused(run, tmp_path):
    base = {"--run": run.folder, "--out": tmp_path / "new"}
    done = call(export, base | {"--out": ROOT / "tests"})
    assert done.code == 2 and "is there already: give --out the name of a new folder" in done.err
    done = call(export, base)
    assert done.code == 2 and "train with --model.embeddings.zero_id 1" in done.err
    assert "Runs of the presets grammar_marian" in done.err and done.err.count("\n") == 1
    assert not any(tmp_path.iterdir())


# Bad input to prepare and train: one sentence, a code, and nothing lost


def test_sides_of_different_length_are_refused_with_both_counts(text, tmp_path):
    short = write(tmp_path / "short.de", ["Hund"] * 83)
    done = call(prepare, settings(text, tmp_path) | {"--data.train.target": short})
    assert done.code == 65
    assert done.err == (
        f"error: {text}/train.en has 99 lines and {short} has 83: line i of one must translate "
        "line i of the other\n"
    )


def test_a_file_that_is_missing_is_named_and_the_right_one_may_follow(text, tmp_path):
    path, right = tmp_path / "train.en", settings(text, tmp_path / "runs")
    done = call(train, right | {"--data.train.source": path})
    said = f"error: {path}: cannot read the file: No such file or directory\n"
    assert done.code == 65 and done.err == said
    assert call(prepare, right).code == 0, "a misspelt name must not spoil the run's name"


def test_preparing_anew_with_one_vocabulary_leaves_no_second_tokenizer(text, tmp_path):
    two = "--model.source_vocab_size 13 --model.vocab_size 11 --model.embeddings.tied output"
    args = settings(text, tmp_path, f"{two} --data.tokenizer words")
    assert call(prepare, args).code == 0
    folder = tmp_path / "translation" / "tiny" / "tokenizer"
    assert {path.name for path in folder.iterdir()} == {"source.json", "target.json"}
    prepared = prepare.prepare(parsed(prepare, args), folder.parent)
    assert (prepared.model.source_vocab_size, prepared.model.vocab_size) == (13, 11)
    assert len(prepared.source_tokenizer.encode("dog sees dog")) == 3
    assert call(prepare, settings(text, tmp_path)).code == 0
    assert {path.name for path in folder.iterdir()} == {"target.json"}


def test_a_side_without_the_other_and_too_few_pairs_are_refused(text, tmp_path):
    few = [write(tmp_path / f"few.{side}", ["Hund"] * 3) for side in ("en", "de")]
    runs = {"--runs": tmp_path}
    one, other = {"--data.train.source": few[0]}, {"--data.train.target": few[1]}
    for side in (one, other):
        done = call(prepare, runs | side)
        assert done.code == 2 and "parallel text needs both files" in done.err
    done = call(prepare, runs | one | other)
    assert done.code == 65
    assert f"error: {few[0]}: 3 pairs are too few to set some aside for validation" in done.err
    done = call(prepare, runs | {"--preset": "wmt14_base"})
    assert done.code == 2 and "give --data.train.source FILE" in done.err


@pytest.mark.parametrize(
    "module, command", [("tokenizers", prepare), ("sacrebleu", train), ("jinja2", export)]
)
def test_a_missing_extra_is_named_before_anything_is_done(
    module, command, text, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    options = {} if command is export else settings(text, tmp_path)
    done = call(command, options)
    assert done.code == 2
    assert done.err == (
        f"error: {module} is needed but not installed: pip install 'jaxformer[experiments]'\n"
    )
    assert not list(tmp_path.rglob("metrics.jsonl")) + list(tmp_path.rglob("checkpoints"))


def test_a_run_has_a_page_with_its_scores_and_the_attention_in_its_samples(run, tmp_path):
    output = tmp_path / "page.html"
    runs.main(["page", str(run.folder), "--output", str(output)])
    text = output.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    samples = read_table(run.folder / "samples" / "test.tsv")
    shown = [sentence["text"].partition(" = ")[0] for sentence in json.loads(data)]
    assert shown == samples["source"][:3] + samples["source"][4:5]  # line 4 is too long
    kinds = [view["kind"].partition(" ")[0] for view in json.loads(data)[0]["views"]]
    assert kinds == ["cross-attention", "encoder", "decoder"]
    assert "data-hover=" in text and "<dt>exact</dt>" in text


# All of it, on the embedded default


@pytest.mark.slow
def test_the_default_preset_learns_something_in_a_few_steps(tmp_path):
    more = options("--optimizer.total_steps 150 --training.log_every 10")
    done = call(train, {"--runs": tmp_path} | more)
    assert done.code == 0, done.err
    folder = tmp_path / "translation" / "grammar"
    losses = [line["loss"] for line in metrics_of(folder) if "loss" in line]
    assert losses[-1] < 0.6 * losses[0]
    assert json.loads((folder / "scores.json").read_text())["sentences"] == 1_000
