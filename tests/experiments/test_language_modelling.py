"""The language-modelling experiment, end to end on tiny models that are trained here."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.training import utilization
from experiments.harness.training.flops import causal_flops
from experiments.language_modelling import (
    corpus,
    evaluate,
    export,
    generate,
    load_run,
    prepare,
    train,
)
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.presets import PRESETS, DataConfig
from jaxformer import pipelines
from jaxformer.checkpoint import Checkpoints
from jaxformer.pretrained import load_pretrained
from jaxformer.text import tokenizers
from jaxformer.text.data import open_tokens, write_tokens
from jaxformer.training.optimizer import make_schedule
from tests.experiments.commands import bytes_of, call, metrics_of, options, refused
from tests.experiments.tiny_runs import WORDS

CAUSAL = """
    --name tiny --model.vocab_size 280 --model.d_model 16 --model.d_ff 22 --model.num_heads 2
    --model.num_decoder_layers 1 --model.max_len 23 --data.batch_size 4 --data.seq_len 19
    --optimizer.name adam --optimizer.schedule constant --optimizer.warmup_steps 3
    --optimizer.total_steps 17 --training.log_every 2 --training.save_every 5
    --training.evaluate_every 5 --training.average_checkpoints 2 --training.grad_accumulation 2
    --training.ema_decay 0.5 --model.dropout_rate 0.1 --sampling.max_new_tokens 7
    --completion.overflow refuse
"""
MASKED = """
    --preset bert_tiny --name masked --model.vocab_size 280 --model.d_model 16 --model.d_ff 22
    --model.num_heads 2 --model.num_encoder_layers 1 --model.max_len 23 --data.batch_size 3
    --data.seq_len 19 --optimizer.warmup_steps 2 --optimizer.total_steps 5
    --training.evaluate_every 3 --training.save_every 3 --training.remat blocks
    --data.next_sentence True --model.pooler tanh --model.embeddings.num_types 2
"""


def document(rng, lines):
    return "".join(" ".join(rng.choice(WORDS, rng.integers(3, 9))) + ".\n" for _ in range(lines))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with two train documents, one for validation and one for test."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(7)
    for name, lines in (("a", 41), ("b", 37), ("validation", 11), ("test", 13)):
        (folder / f"{name}.txt").write_text(document(rng, lines), encoding="utf-8")
    return folder


def settings(text, runs, base=CAUSAL, more=""):
    """The options of a tiny run of `text`, with those of `more` over them."""
    found = options(base) | {"--runs": runs, "--prompts": "sun"}
    found["--data.train"] = [text / "a.txt", text / "b.txt"]
    found |= {f"--data.{part}": text / f"{part}.txt" for part in ("validation", "test")}
    return found | options(more)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """The finished causal run: its folder, its training's arguments and its output.

    The processor called itself an L4.
    """
    root = tmp_path_factory.mktemp("runs")
    args = settings(text, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(utilization.DEVICE_KINDS, "cpu", "l4")
        done = call(train, args)
    assert done.code == 0, done.err
    folder = root / "language_modelling" / "tiny"
    return SimpleNamespace(folder=folder, args=args, out=done.out, err=done.err)


@pytest.fixture(scope="module")
def masked(text, tmp_path_factory):
    """The finished masked run."""
    root = tmp_path_factory.mktemp("runs")
    args = settings(text, root, MASKED) | {"--prompts": "sun <mask> rain."}
    done = call(train, args)
    assert done.code == 0, done.err
    return SimpleNamespace(folder=root / "language_modelling" / "masked", args=args, out=done.out)


def last_json(done):
    return json.loads(done.out.splitlines()[-1])


# Training


def test_a_run_from_ones_own_files_leaves_everything_in_its_folder(run):
    names = {path.name for path in run.folder.iterdir()}
    assert names >= {"config.json", "env.json", "metrics.jsonl", "tokenizer", "checkpoints"}
    assert names >= {"data", "samples", "scores.json", "weights.json"}
    assert "train: 2 documents" in run.out and "test: 1 documents, " in run.out
    scores = json.loads((run.folder / "scores.json").read_text())
    assert scores["text"] == "test" and scores["stride"] == 19
    assert math.isclose(scores["perplexity"], math.exp(scores["loss"]))
    assert re.search(rf"loss {scores['loss']:.4f}( ± [\d.]+)? nats a token", run.out)
    sample_text = (run.folder / "samples" / "prompts.txt").read_text()
    assert sample_text.startswith("sun") and sample_text in run.out


def test_the_metrics_hold_the_loss_and_the_validation_loss_in_nats_and_bits_per_byte(run, text):
    lines = metrics_of(run.folder)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert sorted(losses) == [2, 4, 6, 8, 10, 12, 14, 16, 17]
    assert losses[17] < losses[2] < 6.5
    judged = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in judged] == [5, 10, 15]
    tokens = len(open_tokens(run.folder / "data" / "validation.tokens").ids) - 1
    size = len((text / "validation.txt").read_bytes())
    for line in judged:
        bits = line["validation_loss"] * tokens / (size * math.log(2))
        assert math.isclose(line["validation_bits_per_byte"], bits, rel_tol=1e-6)


def test_the_metrics_hold_the_learning_rate_of_the_schedule(run):
    schedule = make_schedule(load_run.load_run(run.folder).config.optimizer)
    rates = {x["step"]: x["learning_rate"] for x in metrics_of(run.folder) if "loss" in x}
    assert rates == pytest.approx({step: float(schedule(step - 1)) for step in rates}, rel=1e-6)
    assert rates[2] < rates[4], "the warm-up has three updates"


def test_the_share_of_peak_is_in_the_log_and_its_formula_at_the_start(run):
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    model = load_run.load_run(run.folder).model.config
    each = causal_flops(model, 4, 19) / (4 * 19)
    logged = [line for line in lines if "mfu" in line]
    assert len(logged) >= 8
    for line in logged:  # of the 76 positions of a batch not all count as tokens
        assert 0.999 * each <= line["mfu"] * 60e12 / line["tokens_per_second"] < 1.5 * each
    environment = json.loads((run.folder / "env.json").read_text())
    assert environment["utilization"].startswith("mfu = 3 x FLOPs of the forward pass")
    assert "(1 x 60 TFLOP/s, cpu, float32)" in environment["utilization"]


def test_a_stopped_and_resumed_run_is_the_uninterrupted_one_to_the_bit(run, text, tmp_path):
    args = settings(text, tmp_path) | {"--training.loggers": "tests.experiments.own_parts:StopAt12"}
    first = call(train, args)
    args.pop("--training.loggers")
    folder = tmp_path / "language_modelling" / "tiny"
    assert first.code == 143 and "SIGTERM: saving after" in first.err
    assert Checkpoints(folder / "checkpoints").steps() == [5, 10, 13]
    second = call(train, args)
    assert second.code == 0 and "from step 13 to 17" in second.out
    steps = [set(Checkpoints(x / "checkpoints").steps()) for x in (run.folder, folder)]
    assert steps[0] & steps[1] >= {15, 17}
    for step in steps[0] & steps[1]:
        assert bytes_of(run.folder, step) == bytes_of(folder, step)
    assert metrics_of(run.folder) == metrics_of(folder)
    for name in ("scores.json", "weights.json", "samples/prompts.txt"):
        assert (run.folder / name).read_bytes() == (folder / name).read_bytes()


def test_a_run_made_with_another_config_is_refused_and_what_only_shows_may_differ(run):
    for command in (train, prepare):
        done = call(command, run.args | {"--model.d_ff": 23, "--data.batch_size": 8})
        said = "was made with another configuration: data.batch_size is 4 there but 8 here"
        refused(done, 2, said)
        assert "model.d_ff is 22 there but 23 here" in done.err
    free = {"--prompts": "moon", "--completion.seed": 3, "--training.remat": "matmuls"}
    assert call(prepare, run.args | free).code == 0
    assert call(prepare, run.args).code == 0


def test_a_run_whose_training_text_has_changed_is_refused(run, text):
    path = text / "b.txt"
    content = path.read_bytes()
    try:
        path.write_bytes(content.replace(b"sun", b"fog"))
        refused(call(train, run.args), 66, "tiny was trained on other text than this")
        path.write_bytes(content)
        os.utime(path, ns=(0, 0))
        assert call(prepare, run.args).code == 0, "the same text at another time is the same"
    finally:
        path.write_bytes(content)


def test_the_weights_are_the_mean_of_the_last_moving_averages_or_the_best_one(run, assert_equal):
    steps = json.loads((run.folder / "weights.json").read_text())["steps"]
    checkpoints = Checkpoints(run.folder / "checkpoints")
    assert steps in ([15, 17], [checkpoints.best_step()])
    averages = [checkpoints.restore_params(step, tree="ema") for step in steps]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *averages)
    jax.tree.map(assert_equal, load_run.load_run(run.folder).params, mean)


# Measuring


def test_evaluating_a_run_gives_its_scores_json_again(run):
    done = call(evaluate, {"--run": run.folder})
    assert done.code == 0, done.err
    stored = json.loads((run.folder / "scores.json").read_text())
    found = last_json(done)
    for name, value in stored.items():
        assert found[name] == value if isinstance(value, str) else math.isclose(found[name], value)


def test_every_word_and_every_line_feed_counts_in_the_word_perplexity(run, text):
    content = (text / "test.txt").read_text()
    words = len(content.split()) + content.count("\n")
    found = last_json(call(evaluate, {"--run": run.folder}))
    assert found["words"] == words and found["bytes"] == len(content.encode())
    assert math.isclose(found["word_perplexity"], math.exp(found["nats"] / words))
    assert math.isclose(found["bits_per_byte"], found["nats"] / found["bytes"] / math.log(2))


def test_files_are_measured_as_the_part_that_they_are(run, text):
    own = last_json(call(evaluate, {"--run": run.folder, "--part": "validation"}))
    given = last_json(call(evaluate, {"--run": run.folder, "--files": text / "validation.txt"}))
    assert given.pop("text") == str(text / "validation.txt") and own.pop("text") == "validation"
    assert len(own.pop("text_sha256")) == 64  # files are named, parts are not
    assert own == given


def test_a_smaller_stride_counts_the_same_tokens_with_more_before_them(run):
    whole = last_json(call(evaluate, {"--run": run.folder}))
    slid = last_json(call(evaluate, {"--run": run.folder, "--stride": 5}))
    assert slid["tokens"] == whole["tokens"] and slid["stride"] == 5
    assert slid["nats"] != whole["nats"] and abs(slid["loss"] / whole["loss"] - 1) < 0.05
    refused(call(evaluate, {"--run": run.folder, "--stride": 20}), 2, "stride must be 1 to seq_len")


# Sampling


def test_three_lines_lead_from_a_run_to_a_completion_a_score_vectors_and_filled_masks(run, masked):
    loaded = jf.load(run.folder)
    assert "sun" + jf.complete(loaded, "sun") == (run.folder / "samples/prompts.txt").read_text()
    assert jf.score(loaded, "sun and rain") < 0.0
    assert jf.embed(loaded, ["sun", "rain", "sun"]).shape == (3, loaded.model.config.d_model)
    filled = jf.fill_mask(jf.load(masked.folder), "sun <mask> rain.")
    assert filled.startswith("sun ") and filled.endswith("rain.") and "<mask>" not in filled


def test_a_sample_goes_on_from_the_prompt_as_complete_does(run):
    found = load_run.load_run(run.folder)
    sampling = replace(found.config.sampling, temperature=0.5)
    options = replace(found.config.completion, seed=3)
    best = pipelines.complete(found, "sun ", sampling, options, details=True)
    args = {"--run": run.folder, "--text": "sun ", "--temperature": 0.5, "--seed": 3}
    done = call(generate, args)
    assert done.code == 0 and done.out == f"sun {best.text}\n"
    assert len(best.ids) <= 7, "the length is the run's own"
    assert call(generate, args).out == done.out
    assert call(generate, args | {"--seed": 4}).out != done.out


def test_a_file_or_standard_input_is_one_prompt(run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"sun moon\nrain ")
    base = {"--run": run.folder, "--temperature": 0}
    done = call(generate, base | {"--input": path})
    assert done.code == 0 and done.out.startswith("sun moon\nrain ")
    assert call(generate, base | {"--input": "-"}, given=path.read_bytes()).out == done.out
    assert call(generate, base | {"--text": "sun moon\nrain "}).out == done.out


def test_several_texts_come_one_after_the_other_with_a_rule_between(run):
    args = {"--run": run.folder, "--text": ["sun ", "rain "], "--count": 2}
    texts = call(generate, args).out.split("\n" + "-" * 20 + "\n")
    assert [text.split(" ")[0] for text in texts] == ["sun", "sun", "rain", "rain"]
    alone = call(generate, {"--run": run.folder, "--text": "sun "}).out
    assert texts[0] + "\n" == alone, "a text depends on no other"


def test_the_first_text_is_printed_while_it_is_made(monkeypatch, capsys):
    def pieces():
        yield 0, "b"
        assert capsys.readouterr().out == "ab"
        yield 1, "d"
        yield 0, "e"
        assert capsys.readouterr().out == "e"

    generate.print_texts(["a", "c"], pieces())
    assert capsys.readouterr().out == "\n" + "-" * 20 + "\ncd\n"


# Masked models


@pytest.mark.long
def test_a_masked_run_measures_hidden_tokens_and_fills_its_prompts(masked):
    scores = json.loads((masked.folder / "scores.json").read_text())
    assert "bits_per_byte" not in scores and scores["loss"] < 6.5
    tokens = len(open_tokens(masked.folder / "data" / "test.tokens").ids)
    assert 0.1 < scores["tokens"] / tokens < 0.25
    assert [line["step"] for line in metrics_of(masked.folder) if "validation_loss" in line] == [3]
    assert "sun <mask> rain.\n  1: " in masked.out


def test_fill_mask_gives_the_best_tokens_for_every_mask(masked, tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("sun <mask> <mask>.\n\nrain <mask>\n", encoding="utf-8")
    done = call(generate, {"--run": masked.folder, "--input": path, "--count": 3})
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "sun <mask> <mask>." and lines[3] == "rain <mask>" and len(lines) == 5
    shares = [float(word[:-1]) for word in lines[1].split() if word.endswith("%")]
    assert len(shares) == 3 and shares == sorted(shares, reverse=True) and sum(shares) <= 100.1


def test_a_token_is_shown_as_text_and_a_part_of_a_character_by_its_name():
    tokenizer = tokenizers.train_bpe(["sun moon"] * 7, 280)
    names = [tokenizer.token(index) for index in tokenizer.encode("a moonü")]
    assert names == ["Ġ", "a", "Ġmoon", "Ã", "¼"]
    shown = [evaluate.token_text(name, tokenizer) for name in names]
    assert shown == [" ", "a", " moon", "Ã", "¼"], "ü has two bytes"


def test_rows_of_a_masked_model_do_not_overlap(masked):
    refused(call(evaluate, {"--run": masked.folder, "--stride": 3}), 2, "leave out --stride")


def test_pairs_of_pieces_are_learned_with_a_head_of_their_own(masked, text, tmp_path):
    steps = [Checkpoints(masked.folder / "checkpoints").restore_params(n) for n in (3, 5)]
    kernels = [params["next_sentence"]["kernel"] for params in steps]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4
    alone = settings(text, tmp_path, MASKED, "--model.pooler none")
    refused(call(prepare, alone), 2, "next_sentence=True needs objective='masked', a pooler")


# The text


def test_what_is_set_aside_for_validation_is_the_end_of_the_training_text(text):
    whole = "".join((text / f"{name}.txt").read_text() for name in "ab")
    config = DataConfig(train=(str(text / "a.txt"), str(text / "b.txt")))
    parts = corpus.load_corpus(config)
    found = ["".join(b for d in part.documents() for b in d) for part in parts[:2]]
    assert found[0] + found[1] == whole and len(found[1]) == len(whole) // 20
    assert parts.test is None


def test_a_part_begins_and_ends_at_its_characters_whatever_the_documents(tmp_path):
    names = []
    for name, content in (("a", "abcde"), ("b", "fgh"), ("c", "ijklmnopqrs")):
        names.append(tmp_path / name)
        names[-1].write_text(content, encoding="utf-8")
    for start, stop, expected in (
        (2, 7, ["cde", "fg"]),
        (5, 8, ["fgh"]),
        (6, None, ["gh", "ijklmnopqrs"]),
        (0, 3, ["abc"]),
        (9, 12, ["jkl"]),
    ):
        part = corpus.Part(tuple(names), start=start, stop=stop)
        assert ["".join(document) for document in part.documents()] == expected
    names[0].write_text("a line\n" * 50_000, encoding="utf-8")  # in several blocks
    part = corpus.Part(tuple(names), start=0, stop=350_001)
    first, second = (next(document) for document in part.documents())
    assert len(first) < 350_000 and second == "f", "what is left unread counts too"


def test_documents_that_are_not_kept_apart_need_no_special_tokens(text, tmp_path):
    more = "--data.isolate_documents False --data.tokenizer characters --name plain"
    done = call(prepare, settings(text, tmp_path, more=more))
    assert done.code == 0, done.err
    folder = tmp_path / "language_modelling" / "plain"
    characters = set((text / "a.txt").read_text() + (text / "b.txt").read_text())
    assert f"vocabulary {len(characters)}, " in done.out
    tokens = open_tokens(folder / "data" / "train.tokens")
    assert len(tokens.ids) == sum(len((text / f"{name}.txt").read_text()) for name in "ab")


def test_preparing_again_with_other_settings_replaces_what_was_prepared(text, tmp_path):
    first = call(prepare, settings(text, tmp_path))
    words = call(prepare, settings(text, tmp_path, more="--data.tokenizer words"))
    assert first.code == words.code == 0
    assert f"vocabulary {len(WORDS) * 2 + 4}, " in words.out
    again = call(prepare, settings(text, tmp_path))
    assert without_phases(again.out) == without_phases(first.out)


def test_other_training_text_makes_another_tokenizer_for_all_parts(text, tmp_path):
    assert call(prepare, settings(text, tmp_path)).code == 0
    other = settings(text, tmp_path) | {"--data.train": text / "b.txt"}
    done = call(prepare, other)
    assert done.code == 0 and "train: 1 documents" in done.out
    alone = call(prepare, other | {"--name": "alone"}).out
    assert without_phases(alone).replace("alone", "tiny") == without_phases(done.out)


def test_wikitext_has_the_published_number_of_words(real_data):
    parts = corpus.load_corpus(PRESETS["wikitext2"].data)
    words = [corpus.metadata_of(part).amount.words for part in parts]
    assert words == [2_088_628, 217_646, 245_569]


def test_shakespeare_is_split_and_cut_into_characters_as_is_customary(real_data, tmp_path):
    args = {"--preset": "shakespeare_char_cpu", "--runs": tmp_path}
    done = call(prepare, args)
    assert done.code == 0, done.err
    assert "1,003,854 tokens" in done.out and "111,540 tokens" in done.out
    assert "vocabulary 65, 1,308 batches an epoch" in done.out


@pytest.mark.parametrize("name, size", [("gpt2", 50_257), ("bert-base-uncased", 30_522)])
def test_published_vocabularies_are_found_and_kept_with_the_run(
    real_data, text, tmp_path, name, size
):
    base = MASKED if name.startswith("bert") else CAUSAL
    args = settings(text, tmp_path, base) | {"--data.tokenizer": name}
    done = call(prepare, args)
    assert done.code == 0 and f"vocabulary {size:,}, " in done.out
    said = without_phases(done.out)
    own = settings(text, tmp_path, base, "--name own")
    own["--data.tokenizer"] = tmp_path / "language_modelling" / args["--name"] / "tokenizer"
    assert without_phases(call(prepare, own).out).replace("own", args["--name"]) == said


def without_phases(out: str) -> str:
    """`out` without the lines that name a phase and the seconds that it took."""
    return re.sub(r"^[a-z ]+: [0-9.]+ s\n", "", out, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "name, count",
    [
        ("shakespeare_char_cpu", 804_096),
        ("shakespeare_char", 10_745_088),
        ("gpt2_124m", 124_439_808),
        ("llama3_8b", 8_030_261_248),
        ("bert_base", 109_482_240 + (768 + 1) * 768 + 2 * 768 + 30_522 + 2 * (768 + 1)),
    ],
)
def test_a_preset_has_the_parameters_of_its_original(name, count):
    """That of BERT has the encoder with its pooler, and the heads of both pretraining tasks."""
    config = PRESETS[name]
    model = objective(config).model(config.model)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.ones((2, 5), np.int32))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


# Bad input: one sentence, a code, and nothing lost


def test_a_corpus_smaller_than_one_context_is_refused_with_both_numbers(text, tmp_path):
    small = tmp_path / "small.txt"
    small.write_text("sun moon\n", encoding="utf-8")
    args = settings(text, tmp_path) | {"--data.train": small}
    refused(call(train, args), 65, "ids is smaller than one context: 20 are needed")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"sun\nK\xe4se\n", ":2: "),
        (b"", "there is no text"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_text_is_named(content, said, text, tmp_path, run):
    path = tmp_path / "odd.txt"
    if content is not None:
        path.write_bytes(content)
    done = call(train, settings(text, tmp_path) | {"--data.train": path})
    refused(done, 65, said)
    assert str(path) in done.err
    refused(call(evaluate, {"--run": run.folder, "--files": path}), 65, said)


@pytest.mark.parametrize(
    "more, said",
    [
        ("--data.seq_len 24", "seq_len=24 tokens a row, but the model's positions end at"),
        ("--objective masked", "objective='masked' needs encoder layers and no decoder layers"),
        ("--data.tokenizer bep", "tokenizer='bep' is neither one of bpe, words, characters, gpt2"),
        (
            "--training.attention_fn fast",
            "attention_fn='fast' is unknown: give one of",
        ),
    ],
)
def test_options_that_cannot_be_get_one_sentence_and_code_2(more, said, text, tmp_path):
    refused(call(prepare, settings(text, tmp_path, more=more)), 2, said)


def test_the_corpus_files_needs_files(tmp_path):
    done = call(prepare, {"--preset": "gpt2_124m", "--runs": tmp_path})
    refused(done, 2, "corpus='files' comes from files: give --data.train FILE")


def test_a_tokenizer_that_is_not_the_runs_is_refused_everywhere(run, text, tmp_path):
    folder = tmp_path / "language_modelling" / "tiny"
    shutil.copytree(run.folder, folder)
    path = folder / "tokenizer" / "tokenizer.json"
    vocabulary = json.loads(path.read_text())
    table = vocabulary["model"]["vocab"]
    last = sorted(table, key=table.get)[-2:]
    table[last[0]], table[last[1]] = table[last[1]], table[last[0]]
    path.write_text(json.dumps(vocabulary))
    for command in (generate, evaluate):
        done = call(command, {"--run": folder})
        refused(done, 2, "is not the tokenizer that the run was trained with")
    refused(call(train, run.args | {"--runs": tmp_path}), 2, "was not encoded by")


def test_ids_beyond_the_vocabulary_are_refused(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    write_tokens(folder / "data" / "test.tokens", [[3, 9_999]], vocab_size=10_000)
    done = call(evaluate, {"--run": folder})
    refused(done, 65, "test.tokens was written for ids up to 9999, but the vocabulary ends at 279")


def test_a_prompt_that_cannot_be_continued_is_refused(run, text, tmp_path):
    refused(
        call(generate, {"--run": run.folder, "--text": " ".join(["sun"] * 40)}),
        2,
        "max_len=23: shorten it, give a smaller max_new_tokens, or give overflow='slide'",
    )
    slid = {"--run": run.folder, "--text": " ".join(["sun"] * 40), "--overflow": "slide"}
    assert call(generate, slid).code == 0
    empty = {"--run": run.folder, "--text": ""}
    assert call(generate, empty).code == 0, "this vocabulary has a token to begin with"
    refused(call(generate, empty | {"--input": "x"}), 2, "give --text or --input, not both")
    refused(call(generate, {"--run": run.folder, "--input": tmp_path}), 65, "cannot read the file")
    refused(
        call(generate, {"--run": run.folder, "--input": "-"}, given=b"a\n\xff"),
        65,
        "standard input:2: the byte 0xff is not UTF-8",
    )


def test_a_text_without_a_mask_is_refused(masked):
    done = call(generate, {"--run": masked.folder, "--text": "sun"})
    refused(done, 65, "mask")


def test_a_part_that_a_run_does_not_have_is_refused(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    for suffix in ("json", "tokens"):
        (folder / "data" / f"test.{suffix}").unlink()
    refused(call(evaluate, {"--run": folder}), 65, "has no test text: prepare the run, or give")


def test_text_outside_the_characters_of_a_vocabulary_is_named(text, tmp_path):
    odd = tmp_path / "odd.txt"
    odd.write_text("sun æ moon\n", encoding="utf-8")
    more = "--data.isolate_documents False --data.tokenizer characters"
    args = settings(text, tmp_path, more=more) | {"--data.validation": odd}
    refused(call(prepare, args), 65, "the tokenizer cannot read this text")


def test_too_little_text_to_set_some_aside_or_to_judge_by_is_refused(text, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("s", encoding="utf-8")
    args = settings(text, tmp_path, more="--data.isolate_documents False")
    refused(call(prepare, args | {"--data.validation": path}), 65, "has 1 tokens, but 2 are needed")
    args |= {"--data.train": path}
    args.pop("--data.validation")
    refused(call(prepare, args), 65, "1 characters are too few to set some aside for validation")


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_an_exported_run_is_read_as_one_of_transformers(objective, request, tmp_path):
    folder = request.getfixturevalue("run" if objective == "causal" else "masked").folder
    options = {"--run": folder, "--out": tmp_path / "out"}
    done = call(export, options)
    assert done.code == 0 and f"{tmp_path}/out/model.safetensors: " in done.out, done.err
    expected, found = load_run.load_run(folder), load_pretrained(tmp_path / "out")
    (ids,) = expected.tokenizer.encode_batch(["sun rain sun"])
    assert found.tokenizer.encode("sun rain sun") == ids
    around = [1, *ids, 2] if objective == "masked" else ids
    assert found.tokenizer.library_tokenizer.encode("sun rain sun").ids == around
    logits = [
        jax.tree.leaves(x.model.apply({"params": x.params}, np.array([ids])))[0]
        for x in (found, expected)
    ]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"text_sha256"' in card and "step" in card and "licence of the training" in card
    refused(call(export, options), 2, "is there already")
    again = {"--run": tmp_path / "out", "--out": tmp_path / "again"}
    refused(call(export, again), 2, "of transformers already")
