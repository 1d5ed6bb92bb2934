"""Exported runs in transformers and CTranslate2: the texts and scores that the runs give here."""

import json
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxformer as jf
from experiments.harness import cli
from experiments.language_modelling import export as export_language
from experiments.language_modelling import train as train_language
from experiments.language_modelling.load_run import load_run as load_language
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.translation import export, train
from experiments.translation.load_run import load_run
from experiments.translation.presets import PRESETS

pytestmark = pytest.mark.peer
LINES = ["sun rain moon", "wind", "moon moon sun <pad> rain sun", "rain wind sun", "star"] * 2
STEPS = "--optimizer.total_steps 29 --optimizer.warmup_steps 3 --training.save_every 29"
SMALL = "--model.d_model 16 --model.d_ff 22 --model.num_heads 2"


def trained(command, presets, name, more, text, root):
    """The folder of a short run of the preset `name`."""
    has_characters = name == "shakespeare_char_cpu"  # as many as the text has
    size = "" if has_characters else "--model.vocab_size 290"
    words = f"--preset {name} --runs {root} {size} {SMALL} {STEPS} {more}".split()
    command.main(cli.parse(presets, words))
    return next(root.glob("*/*/config.json")).parent


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(3)
    for part, count in (("train", 97), ("val", 5)):
        rows = [rng.choice("sun rain moon star wind".split(), n) for n in rng.integers(1, 6, count)]
        for side, order in (("a", 1), ("b", -1)):
            lines = "".join(" ".join(row[::order]) + "\n" for row in rows)
            (folder / f"{part}.{side}").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def marian(torch, text, tmp_path_factory):
    """A run of `grammar_marian` on other text, its export, and what the command line made of it."""
    for name in ("transformers", "ctranslate2"):
        pytest.importorskip(name, reason="the peer tests need it")
    root = tmp_path_factory.mktemp("runs")
    more = "--model.num_encoder_layers 1 --model.num_decoder_layers 1 --data.corpus files "
    more += "--training.evaluate_every 29 --data.batch_tokens 128 "
    for part, name in (("train", "train"), ("validation", "val")):
        more += f"--data.{part}.source {text}/{name}.a --data.{part}.target {text}/{name}.b "
    run = trained(train, PRESETS, "grammar_marian", more, text, root)
    folder, converted = root / "marian", root / "converted"
    export.main(export.ExportOptions(run=str(run), out=str(folder)))
    program = Path(sysconfig.get_path("scripts")) / "ct2-transformers-converter"
    subprocess.run([program, "--model", folder, "--output_dir", converted], check=True)
    return load_run(run), folder, converted


def lists(loaded, **changes):
    """The translations of each line that the run's own search finds, and their scores."""
    return jf.translate_with_details(loaded, LINES, replace(loaded.config.search, **changes))


@pytest.mark.parametrize("length_penalty", [1.0, 0.6])
def test_the_converter_takes_the_folder_unchanged_and_finds_the_same_lists(length_penalty, marian):
    import ctranslate2
    import transformers

    loaded, folder, converted = marian
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    translator = ctranslate2.Translator(str(converted), compute_type="float32")
    said = translator.translate_batch(
        [tokenizer.convert_ids_to_tokens(tokenizer(line).input_ids) for line in LINES],
        beam_size=4,
        num_hypotheses=4,
        length_penalty=length_penalty,
        max_decoding_length=loaded.config.search.max_new_tokens,
        return_scores=True,
    )
    expected = lists(loaded, length_penalty=length_penalty)
    for one, found in zip(said, expected, strict=True):
        rows = [tokenizer.convert_tokens_to_ids(words) for words in one.hypotheses]
        assert [tokenizer.decode(row) for row in rows] == [each.text for each in found]
        np.testing.assert_allclose(one.scores, [each.score for each in found], atol=1e-5)
    assert len({each.text for found in expected for each in found}) > 9


def test_transformers_finds_the_same_lists(marian):
    import transformers

    loaded, folder, _ = marian
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    inputs = tokenizer(LINES, return_tensors="pt", padding=True)
    said = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        num_return_sequences=4,
        return_dict_in_generate=True,
        output_scores=True,
    )
    expected = lists(loaded)
    texts = tokenizer.batch_decode(said.sequences, skip_special_tokens=True)
    assert texts == [each.text for found in expected for each in found]
    scores = [each.score for found in expected for each in found]
    np.testing.assert_allclose(said.sequences_scores.numpy(), scores, atol=1e-5)


@pytest.mark.parametrize("preset", ["python_stdlib", "shakespeare_char_cpu"])
def test_the_pipeline_continues_a_text_as_the_run_does(preset, torch, text, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the peer tests need it")
    run = language(preset, "--model.num_decoder_layers 1", text, tmp_path)
    out = str(tmp_path / "out")
    export_language.main(export_language.ExportOptions(run=str(run), out=out))
    loaded = load_language(run)
    greedy = replace(jf.SamplingConfig(), temperature=0.0, max_new_tokens=11)
    expected = jf.complete(loaded, "sun ra", greedy)
    write = transformers.pipeline("text-generation", model=out)
    ((found,),) = [write("sun ra", do_sample=False, max_new_tokens=11)]
    assert found["generated_text"] == "sun ra" + expected


def test_the_pipeline_fills_in_as_the_run_does(torch, text, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the peer tests need it")
    run = language("bert_tiny", "--model.num_encoder_layers 1", text, tmp_path)
    out = str(tmp_path / "out")
    export_language.main(export_language.ExportOptions(run=str(run), out=out))
    loaded = load_language(run)
    line = "sun <mask> rain"
    (expected,) = jf.fill_mask_with_details(loaded, line, count=5)
    found = transformers.pipeline("fill-mask", model=out)(line, top_k=5)
    assert [each["token"] for each in found] == [
        loaded.tokenizer.id_of(each.token) for each in expected
    ]
    probabilities = [each.probability for each in expected]
    np.testing.assert_allclose([each["score"] for each in found], probabilities, rtol=1e-4)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "distilbert"


def language(preset, more, text, root):
    """The folder of a short run of a language model."""
    more += f" --data.corpus files --data.train {text}/train.a --data.validation {text}/val.a"
    more += " --data.seq_len 13 --data.batch_size 3 --model.max_len 23 --training.evaluate_every 29"
    more += " --prompts <mask>" if preset == "bert_tiny" else " --prompts sun"
    return trained(train_language, LANGUAGE_PRESETS, preset, more, text, root)
