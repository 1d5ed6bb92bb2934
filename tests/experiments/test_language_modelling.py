"""What the language-modelling experiment alone does: nats, strides, samples, masks, texts.

What it shares with the others is in test_contract.py.
"""

import json
import math
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.training.flops import causal_flops
from experiments.language_modelling import (
    corpus,
    evaluate,
    export,
    generate,
    load_run,
    prepare,
    prompts,
)
from experiments.language_modelling.objectives import objective_of
from experiments.language_modelling.presets import PRESETS, DataConfig
from experiments.language_modelling.scoring import Measured, describe_scores
from jaxformer import pipelines
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained import load_pretrained
from jaxformer.text import tokenizers
from jaxformer.text.data import open_tokens, write_tokens
from jaxformer.text.metrics import Likelihood
from tests.experiments.commands import call, metrics_of, refused
from tests.experiments.tiny_runs import WORDS, changed
from tests.experiments.trained_runs import copied, loaded_once
from tests.stored import stored


@pytest.fixture(scope="module")
def run(causal_run):
    """The finished causal run, which all commands of this module load once."""
    with loaded_once(load_run, evaluate, generate, export, runs=(causal_run,)):
        yield causal_run


@pytest.fixture(scope="module")
def masked(masked_run):
    """The finished masked run, which all commands of this module load once."""
    with loaded_once(load_run, evaluate, generate, export, runs=(masked_run,)):
        yield masked_run


@pytest.fixture
def fresh(causal_run, tmp_path):
    """The settings of a causal run that is not there yet."""
    return changed(causal_run.config, runs=str(tmp_path))


def last_json(done):
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def part_of(run, name):
    """The content of a text of `run`."""
    return (run.text / f"{name}.txt").read_text()


# Training


def test_the_scores_and_samples_are_printed_and_kept(run):
    assert "train: 2 documents" in run.out and "test: 1 documents, " in run.out
    scores = json.loads((run.folder / "scores.json").read_text())
    assert scores["text"] == "test" and scores["stride"] == 19
    assert math.isclose(scores["perplexity"], math.exp(scores["loss"]))
    assert re.search(rf"loss {scores['loss']:.4f}( ± [\d.]+)? nats a token", run.out)
    sample_text = (run.folder / "samples" / "prompts.txt").read_text()
    assert sample_text.startswith("sun") and sample_text in run.out


def test_the_metrics_hold_the_validation_loss_in_nats_and_bits_per_byte(run):
    judged = metrics_of(run.folder, "validation_loss")
    assert [line["step"] for line in judged] == [3, 6]
    tokens = len(open_tokens(run.folder / "data" / "validation.tokens").ids) - 1
    size = len(part_of(run, "validation").encode())
    for line in judged:
        bits = line["validation_loss"] * tokens / (size * math.log(2))
        assert math.isclose(line["validation_bits_per_byte"], bits, rel_tol=1e-6)


def test_the_share_of_peak_is_in_the_log_and_its_formula_at_the_start(run):
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    each = causal_flops(load_run.load_run(run.folder).model.config, 4, 19) / (4 * 19)
    logged = [line for line in lines if "mfu" in line]
    assert len(logged) >= 5
    for line in logged:  # of the 76 positions of a batch not all count as tokens
        assert 0.999 * each <= line["mfu"] * 60e12 / line["tokens_per_second"] < 1.5 * each
    environment = json.loads((run.folder / "env.json").read_text())
    assert environment["utilization"].startswith("mfu = 3 x FLOPs of the forward pass")
    assert "(1 x 60 TFLOP/s, cpu, float32)" in environment["utilization"]


def test_the_weights_are_the_mean_of_the_last_moving_averages_or_the_best_one(run, assert_equal):
    steps = json.loads((run.folder / "weights.json").read_text())["steps"]
    checkpoints = Checkpoints(run.folder / "checkpoints")
    assert steps in ([6, 7], [checkpoints.best_step()])
    averages = [stored(checkpoints, step, tree="ema") for step in steps]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *averages)
    jax.tree.map(assert_equal, load_run.load_run(run.folder).params, mean)


# Measuring


def test_files_are_measured_as_the_part_that_they_are(run):
    path = str(run.text / "validation.txt")
    own = last_json(call(evaluate, {"--run": run.folder, "--part": "validation"}))
    given = last_json(call(evaluate, {"--run": run.folder, "--files": path}))
    assert given.pop("text") == path and own.pop("text") == "validation"
    assert len(own.pop("text_sha256")) == 64  # files are named, parts are not
    assert own == given


def test_a_smaller_stride_counts_the_same_tokens_with_more_before_them(run):
    whole = json.loads((run.folder / "scores.json").read_text())
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
    best = pipelines.complete_with_details(found, "sun ", sampling, options)
    args = {"--run": run.folder, "--text": "sun ", "--temperature": 0.5, "--seed": 3}
    done = call(generate, args)
    assert done.code == 0 and done.out == f"sun {best.text}\n"
    assert len(best.ids) <= 7, "the length is the run's own"
    assert call(generate, args).out == done.out
    assert call(generate, args | {"--seed": 4}).out != done.out


def test_a_file_or_standard_input_is_one_prompt(run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"sun moon\nrain ")
    base = {"--run": run.folder, "--temperature": 0.5}
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


# Prompts that nobody gave


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_run_without_prompts_continues_or_fills_in_lines_of_its_own_validation_text(
    kind, request, tmp_path
):
    run = request.getfixturevalue(f"{kind}_run")
    config = changed(run.config, runs=str(tmp_path), name="own", prompts=None)
    text = "sun moon star rain\nwind rain hill moon\n" * 9
    (tmp_path / "own.txt").write_text(text)
    config = changed(config, data__validation=(str(tmp_path / "own.txt"),))
    prepared = prepare.prepare(config, tmp_path / "own")
    begun = prompts.begun_lines(prepared, config)
    assert 1 <= len(begun) <= 3
    lines = text.split("\n")
    for prompt in begun:
        before, mask, after = prompt.partition("<mask>")
        assert bool(mask) == (kind == "masked") and before and bool(after) == bool(mask)
        assert any(line.startswith(before) and after in line for line in lines), prompt


# Masked models


def test_a_masked_run_measures_hidden_tokens_and_fills_its_prompts(masked):
    scores = json.loads((masked.folder / "scores.json").read_text())
    assert "bits_per_byte" not in scores and scores["loss"] < 6.5
    tokens = len(open_tokens(masked.folder / "data" / "test.tokens").ids)
    assert 0.1 < scores["tokens"] / tokens < 0.25
    assert [line["step"] for line in metrics_of(masked.folder, "validation_loss")] == [3]
    prompts = json.loads((masked.folder / "config.json").read_text())["prompts"]  # of its text
    assert prompts and all("<mask>" in x and f"{x}\n  1: " in masked.out for x in prompts)


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
    shown = [prompts.token_text(name, tokenizer) for name in names]
    assert shown == [" ", "a", " moon", "Ã", "¼"], "ü has two bytes"


def test_a_masked_model_sees_no_rows_that_overlap_and_no_text_without_a_mask(masked):
    refused(call(evaluate, {"--run": masked.folder, "--stride": 3}), 2, "leave out --stride")
    refused(call(generate, {"--run": masked.folder, "--text": "sun"}), 65, "mask")


def test_pairs_of_pieces_are_learned_with_a_head_of_their_own(masked):
    steps = [stored(Checkpoints(masked.folder / "checkpoints"), n) for n in (3, 5)]
    kernels = [params["next_sentence"]["kernel"] for params in steps]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4
    with pytest.raises(ConfigError, match="next_sentence=True .*objective='masked'"):
        changed(masked.config, model__pooler="none")


# The text


def test_what_is_set_aside_for_validation_is_the_end_of_the_training_text(run):
    whole = part_of(run, "a") + part_of(run, "b")
    parts = corpus.load_corpus(DataConfig(train=run.config.data.train))
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


def test_documents_that_are_not_kept_apart_need_no_special_tokens(run, fresh, tmp_path):
    config = changed(fresh, data__isolate_documents=False, data__tokenizer="characters")
    prepared = prepare.prepare(config, tmp_path / "run")
    text = part_of(run, "a") + part_of(run, "b")
    assert prepared.tokenizer.vocab_size == len(set(text))
    assert len(prepared.train.tokens.ids) == len(text)


def test_preparing_again_with_other_settings_or_text_replaces_what_was_prepared(fresh, tmp_path):
    def prepared(name, config):
        return prepare.describe(prepare.prepare(config, tmp_path / name), config)

    first = prepared("run", fresh)
    words = prepared("run", changed(fresh, data__tokenizer="words"))
    assert f"vocabulary {len(WORDS) + 4}, " in words and "<unk>" not in words
    (tmp_path / "zebras.txt").write_text("sun zebra moon zebra lion")
    strange = changed(fresh, data__tokenizer="words", data__test=(str(tmp_path / "zebras.txt"),))
    said = re.findall(r"(\w+): ([\d.]+)% of the tokens are <unk>", prepared("strange", strange))
    assert said == [("test", "42.9")]  # 3 of 7, with a <bos> and an <eos>
    assert prepared("run", fresh) == first
    other = changed(fresh, data__train=fresh.data.train[1:])
    second = prepared("run", other)
    assert "train: 1 documents" in second and prepared("alone", other) == second


def test_a_text_to_test_on_that_is_trained_on_is_named(fresh, tmp_path):
    name, copy = fresh.data.train[0], str(tmp_path / "copy.txt")
    shutil.copy(name, copy)
    for file in (name, copy):
        config = changed(fresh, data__test=(file,))
        said = prepare.describe(prepare.prepare(config, tmp_path / "run"), config)
        assert f"test: {file} is trained on, too" in said and "validation: " + file not in said
    alike = changed(fresh, data__test=fresh.data.validation)
    said = prepare.describe(prepare.prepare(alike, tmp_path / "run"), alike)
    assert f"test: {alike.data.validation[0]} is validated on, too" in said


def test_many_passes_over_a_text_without_dropout_are_named_with_what_to_do(fresh, tmp_path):
    def said(**changes):
        config = changed(fresh, optimizer__total_steps=900, **changes)
        return prepare.describe(prepare.prepare(config, tmp_path / "run"), config)

    assert re.search(
        r"\d\d passes over the text without dropout: .* --model.dropout_rate",
        said(model__dropout_rate=0.0),
    )
    assert "passes" not in said(model__dropout_rate=0.1)


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
    name, size, real_data, causal_run, masked_run, tmp_path
):
    run = masked_run if name.startswith("bert") else causal_run
    config = changed(run.config, runs=str(tmp_path), data__tokenizer=name)
    said = prepare.describe(prepare.prepare(config, tmp_path / "run"), config)
    assert f"vocabulary {size:,}, " in said
    own = changed(config, data__tokenizer=str(tmp_path / "run" / "tokenizer"))
    assert prepare.describe(prepare.prepare(own, tmp_path / "own"), own) == said


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
    model = objective_of(config).model(config.model)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.ones((2, 5), np.int32))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


# Bad input: one sentence, a code, and nothing lost


SHORT = {"data__isolate_documents": False, "data__validation": ()}


@pytest.mark.parametrize(
    "part, content, changes, said",
    [
        ("train", b"sun moon\n", {}, "ids is smaller than one context: 20 are needed"),
        ("validation", b"s", SHORT, "has 1 tokens"),
        (
            "validation",
            "sun æ".encode(),
            SHORT | {"data__tokenizer": "characters"},
            "the tokenizer cannot read this text",
        ),
    ],
)
def test_a_text_that_cannot_be_trained_on_or_judged_by_is_refused(
    part, content, changes, said, fresh, tmp_path
):
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    config = changed(fresh, **changes | {f"data__{part}": (str(path),)})
    with pytest.raises(DataError, match=re.escape(said)):
        prepare.prepare(config, tmp_path / "run")


def test_a_tokenizer_that_is_not_the_runs_is_refused_everywhere(run, tmp_path):
    run = copied(run, tmp_path / "copy")
    path = run.folder / "tokenizer" / "tokenizer.json"
    vocabulary = json.loads(path.read_text())
    table = vocabulary["model"]["vocab"]
    last = sorted(table, key=table.get)[-2:]
    table[last[0]], table[last[1]] = table[last[1]], table[last[0]]
    path.write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match="tokenizer"):
        load_run.load_run(run.folder)
    refused(call(run.train, run.config), 2, "was not encoded by")


def test_ids_beyond_the_vocabulary_and_parts_that_are_not_there_are_refused(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run.folder, folder)
    tokenizer = load_run.load_run(run.folder).tokenizer
    write_tokens(folder / "data" / "test.tokens", [[3, 9_999]], vocab_size=10_000)
    with pytest.raises(DataError, match="9999.* 282"):
        prepare.open_encoded(folder, "test", tokenizer)
    for suffix in ("json", "tokens"):
        (folder / "data" / f"test.{suffix}").unlink()
    with pytest.raises(DataError, match="test text"):
        prepare.open_encoded(folder, "test", tokenizer)


def test_a_prompt_that_cannot_be_continued_is_refused(run, tmp_path):
    base = {"--run": run.folder}
    long = base | {"--text": " ".join(["sun"] * 40)}
    said = "max_len=23: shorten it, give a smaller max_new_tokens, or give overflow='slide'"
    refused(call(generate, long), 2, said)
    words = ["--run", str(run.folder), "--overflow", "slide"]
    assert generate.parse(words).settings[1].overflow == "slide"
    empty = base | {"--text": ""}
    assert call(generate, empty).code == 0, "this vocabulary has a token to begin with"
    odd = call(generate, base | {"--input": "-"}, given=b"a\n\xff")
    refused(odd, 65, "standard input:2: the byte 0xff is not UTF-8")


@pytest.fixture(scope="module")
def logits_of():
    return jax.jit(
        lambda model, params, ids: jax.tree.leaves(model.apply({"params": params}, ids))[0],
        static_argnums=0,
    )


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_an_exported_run_is_read_as_one_of_transformers(objective, request, logits_of, tmp_path):
    folder = request.getfixturevalue("run" if objective == "causal" else "masked").folder
    options = {"--run": folder, "--out": tmp_path / "out"}
    done = call(export, options)
    assert done.code == 0 and f"{tmp_path}/out/model.safetensors: " in done.out, done.err
    expected, found = load_run.load_run(folder), load_pretrained(tmp_path / "out")
    (ids,) = expected.tokenizer.encode_batch(["sun rain sun"])
    assert found.tokenizer.encode("sun rain sun") == ids
    around = [1, *ids, 2] if objective == "masked" else ids
    assert found.tokenizer.library_tokenizer.encode("sun rain sun").ids == around
    logits = [logits_of(x.model, x.params, np.array([ids])) for x in (found, expected)]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"text_sha256"' in card and "step" in card and "licence of the training" in card
    assert "- corpus: files\n- train: a.txt, b.txt\n" in card and "python_stdlib" not in card
    refused(call(export, options), 2, "is there already")
    again = {"--run": tmp_path / "out", "--out": tmp_path / "again"}
    refused(call(export, again), 2, "of transformers already")


def test_the_scores_of_a_model_that_knows_nothing_fit_80_columns():
    """The perplexity of a word of many rare tokens has more digits than tell something."""
    likelihood = Likelihood(nats=21_587.0, tokens=1_999, words=383, bytes=4_699)
    config = PRESETS["python_stdlib"]
    measured = Measured(likelihood, [{"loss": 21_587.0, "tokens": 1_999.0}], {})
    lines = describe_scores("validation", config, measured).splitlines()
    assert all(len(line) <= 80 for line in lines), lines
    assert "  word perplexity 3" in lines[2] and "e+24 (nats / 383 words" in lines[2]
    known = measured._replace(likelihood=likelihood._replace(nats=1_500.0))
    assert "  word perplexity 50.22 (nats / 383 words" in describe_scores("test", config, known)
