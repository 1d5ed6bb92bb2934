"""Lines translated by a folder of someone else's, with its special ids and its way of searching."""

import json
import shutil

import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.runs.decoding_options import DecodingOptions
from experiments.harness.runs.run_options import RunOptions
from experiments.translation import evaluate, page
from experiments.translation import translate as command
from experiments.translation.load_run import load_decoding, load_run
from jaxformer import load_pretrained, save_pretrained
from jaxformer.errors import ConfigError
from jaxformer.pipelines import encode_sources, score_pairs, translate, translate_with_details
from jaxformer.pretrained import load_generation_config
from jaxformer.text import metrics
from tests.pretrained.models import MODELS, T5, inputs_of, model_of, word_tokenizer

pytest.importorskip("safetensors", reason="needs the extra experiments")

WORDS = ["<pad>", "</s>", "<unk>", *"abcdefgh"]
MODEL = model_of(T5, {"vocab_size": 13, "max_len": 12, "embeddings.tied": "inputs"})
ASKED = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 3, "num_beams": 3}


@pytest.fixture(scope="module")
def folder(random_params, tmp_path_factory):
    """A T5 that never writes a token without a word, with its tokenizer."""
    path = tmp_path_factory.mktemp("made") / "t5"
    params = random_params(MODEL, *inputs_of(MODEL))
    save_pretrained(path, MODEL, params, word_tokenizer(WORDS), token_ids=ASKED)
    said = json.loads((path / "config.json").read_text())
    said |= {"suppress_tokens": [0, 2, 11, 12], "length_penalty": 0.5}
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


def test_the_commands_name_the_languages_of_a_folder_of_many(folder, tmp_path, capsys):
    path = shutil.copytree(folder, tmp_path / "nllb")
    words = word_tokenizer(WORDS).library_tokenizer
    words.add_special_tokens(["eng_Latn", "deu_Latn"])
    words.save(str(path / "tokenizer.json"))
    said = {"eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "NllbTokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    loaded, lines = jf.load(path), ["a b c", "h", "e d a b"]
    languages = {"source_language": "deu_Latn", "target_language": "eng_Latn"}
    ids = encode_sources(loaded.model, ["a"], loaded.tokenizer, *load_generation_config(path))
    assert ids == [[11, 3, 1]], "of a source for which no language is given"
    wanted = translate_with_details(loaded, lines, **languages)
    assert {best[0].ids[0] for best in wanted} == {11}
    others = translate_with_details(loaded, lines, target_language="eng_Latn")
    assert others[0][0].log_probs != wanted[0][0].log_probs, "the encoder reads the language"
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    (tmp_path / "out").write_text("\n".join(best[0].text for best in wanted) + "\n")
    given = {"run": str(path), **languages}
    source = {"input": str(tmp_path / "in")}
    command.main(command.TranslateOptions(**given, **source))
    assert capsys.readouterr().out == (tmp_path / "out").read_text()
    files = {"source": str(tmp_path / "in"), "target": str(tmp_path / "out")}
    with (tmp_path / "in").open("a") as more_in, (tmp_path / "out").open("a") as more_out:
        print("b", file=more_in)
        print("another translation", file=more_out)
    evaluate.main(evaluate.EvaluateOptions(**given, **files))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exact"] == 3 / 4
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    (tmp_path / "out").write_text("b\na h\nc\n")
    evaluate.main(evaluate.EvaluateOptions(**given, **files, forced=True))
    sums = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    scores = score_pairs(loaded, zip(lines, ["b", "a h", "c"], strict=True), **languages)
    np.testing.assert_allclose(sums, [sum(x) for x in scores], atol=1e-3)
    with pytest.raises(ConfigError, match="'deu_Latin' .*deu_Latn"):
        command.main(command.TranslateOptions(**given | source | {"source_language": "deu_Latin"}))


def test_a_folder_is_scored_with_its_own_ids_and_the_words_of_the_language(
    folder, tmp_path, capsys
):
    lines, right = ["a b c", "h", "e d a b"], ["今天去银行", "a b", "b c d"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    (tmp_path / "right").write_text("\n".join(right) + "\n")
    files = {"source": str(tmp_path / "in"), "target": str(tmp_path / "right")}
    evaluate.main(evaluate.EvaluateOptions(run=str(folder), language="zh", **files))
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    made = translate(load_run(folder), lines)
    expected = metrics.score_translations(made, right, "zh")
    assert record["bleu"] == expected.bleu and "|tok:zh|" in record["bleu_signature"]
    assert record["translation"]["bos"] == 3 and record["search"]["length_penalty"] == 0.5

    evaluate.main(evaluate.EvaluateOptions(run=str(folder), forced=True, **files))
    sums = [float(line.split("\t")[0]) for line in capsys.readouterr().out.splitlines()]
    pairs = list(zip(lines, right, strict=True))
    found = score_pairs(load_pretrained(folder), pairs, load_generation_config(folder)[1], eos=(1,))
    assert sums == pytest.approx([sum(row) for row in found], abs=1e-3)
    with pytest.raises(ConfigError, match="test text.*--source"):
        evaluate.main(evaluate.EvaluateOptions(run=str(folder)))


def test_a_wider_search_than_the_folders_can_be_asked_for(folder):
    by_option = load_decoding(folder, DecodingOptions(beam_size=5))
    by_count = load_decoding(folder, DecodingOptions(), n_best=4)
    assert [loaded.settings[0].beam_size for loaded in (by_option, by_count)] == [5, 4]


def test_a_folder_without_a_tokenizer_or_with_another_model_is_refused(tmp_path, random_params):
    gpt = MODELS["gpt2"][1]
    save_pretrained(
        tmp_path / "bare", MODEL, random_params(MODEL, *inputs_of(MODEL)), token_ids=ASKED
    )
    with pytest.raises(ConfigError, match="bare .*tokenizer.json"):
        load_run(tmp_path / "bare")
    params = random_params(gpt, *inputs_of(gpt))
    save_pretrained(tmp_path / "gpt", gpt, params, word_tokenizer(WORDS))
    with pytest.raises(ConfigError, match="gpt .*DecoderOnly"):
        load_run(tmp_path / "gpt")


def test_a_page_shows_attention_between_the_ids_that_the_folder_asks_for(folder):
    contents = page.page_contents(folder, RunOptions(), ("a b c",))
    (sentence,) = contents.sentences
    cross, encoder, decoder = sentence.views
    assert encoder.query_tokens == cross.key_tokens == ["a", "b", "c", "</s>"]
    assert decoder.query_tokens[0] == "a"  # their decoder_start_token_id is 3
    assert decoder.query_tokens[1:] == cross.query_tokens[:-1]
    best = translate(load_run(folder), "a b c")
    assert sentence.text == f"a b c = {best}" and contents.samples["model"] == [best]
    with pytest.raises(ConfigError, match="without samples.*--text"):
        page.page_contents(folder, RunOptions())
