"""Lines translated by a folder of someone else's, with its special ids and its way of searching."""

import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.runs.decoding_options import DecodingOptions
from experiments.harness.runs.run_folder import RunOptions
from experiments.translation import evaluate, page
from experiments.translation import translate as command
from experiments.translation.load_run import load_decoding, load_run
from jaxformer import load_pretrained, save_pretrained
from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    NormOptions,
    Relative,
    TransformerConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.pipelines import encode_sources, score_pairs, translate, translate_ids
from jaxformer.pretrained import load_generation_config
from jaxformer.text import metrics
from jaxformer.text.tokenizers import Tokenizer

library = pytest.importorskip("tokenizers", reason="needs the extra experiments")
pytest.importorskip("safetensors", reason="needs the extra experiments")

WORDS = ["<pad>", "</s>", "<unk>", *"abcdefgh"]
SIZE = 13
CONFIG = TransformerConfig(
    vocab_size=SIZE,
    d_model=10,
    d_ff=14,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_len=12,
    norm=NormOptions("rms", placement="pre"),
    embeddings=EmbeddingOptions(scale=False, tied="inputs"),
    positions=Relative(buckets=6, max_distance=8),
    use_bias=False,
)
ASKED = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 3, "num_beams": 3}


@pytest.fixture(scope="module")
def tokenizer():
    words = library.Tokenizer(
        library.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.add_special_tokens(WORDS[:3])
    return Tokenizer(words)


@pytest.fixture(scope="module")
def folder(tokenizer, random_params, tmp_path_factory):
    """A T5 that never writes a token without a word, with its tokenizer."""
    ids = jnp.ones((2, 3), jnp.int32)
    model = EncoderDecoder(CONFIG)
    params = random_params(model, ids, ids)
    path = tmp_path_factory.mktemp("made") / "t5"
    save_pretrained(path, model, params, tokenizer, token_ids=ASKED)
    said = json.loads((path / "config.json").read_text())
    said |= {"suppress_tokens": [0, 2, 11, 12], "length_penalty": 0.5}
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


def test_the_commands_name_the_languages_of_a_folder_of_many(folder, tokenizer, tmp_path, capsys):
    path = shutil.copytree(folder, tmp_path / "nllb")
    words = library.Tokenizer.from_str(tokenizer.library_tokenizer.to_str())
    words.add_special_tokens(["eng_Latn", "deu_Latn"])
    words.save(str(path / "tokenizer.json"))
    said = {"eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "NllbTokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    loaded, lines = jf.load(path), ["a b c", "h", "e d a b"]
    languages = {"source_language": "deu_Latn", "target_language": "eng_Latn"}
    ids = encode_sources(loaded.model, ["a"], loaded.tokenizer, *load_generation_config(path))
    assert ids == [[11, 3, 1]], "of a source for which no language is given"
    wanted = translate(loaded, lines, **languages, details=True)
    assert {best[0].ids[0] for best in wanted} == {11}
    others = translate(loaded, lines, target_language="eng_Latn", details=True)
    assert others[0][0].log_probs != wanted[0][0].log_probs, "the encoder reads the language"
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    (tmp_path / "out").write_text("\n".join(best[0].text for best in wanted) + "\n")
    given = {"run": str(path), **languages}
    source = {"input": str(tmp_path / "in")}
    command.main(command.TranslateOptions(**given, **source))
    assert capsys.readouterr().out == (tmp_path / "out").read_text()
    files = {"source": str(tmp_path / "in"), "target": str(tmp_path / "out")}
    evaluate.main(evaluate.EvaluateOptions(**given, **files))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exact"] == 1.0
    (tmp_path / "out").write_text("b\na h\nc\n")
    evaluate.main(evaluate.EvaluateOptions(**given, **files, forced=True))
    sums = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    scores = score_pairs(loaded, zip(lines, ["b", "a h", "c"], strict=True), **languages)
    np.testing.assert_allclose(sums, [sum(x) for x in scores], atol=1e-3)
    with pytest.raises(ConfigError, match="'deu_Latin' is no language of this folder: give deu_La"):
        command.main(command.TranslateOptions(**given | source | {"source_language": "deu_Latin"}))


def test_lines_are_translated_with_the_ids_and_the_search_that_the_folder_asks_for(
    folder, tokenizer, tmp_path
):
    lines = ["a b c", "", "h", "e d a b"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    files = {"input": str(tmp_path / "in"), "output": str(tmp_path / "out")}
    command.main(command.TranslateOptions(run=str(folder), n_best=3, **files))
    rows = [line.split("\t") for line in (tmp_path / "out").read_text().splitlines()]
    assert [row[0] for row in rows] == list("1112333444")
    assert rows[3] == ["2", "0.0000", ""]

    search, options = load_generation_config(folder)
    assert (search.beam_size, search.length_penalty) == (3, 0.5)
    assert (options.bos, search.eos) == (3, (1,))
    source = np.zeros((4, 12), np.int32)
    for row, line in enumerate(lines):
        if line:
            ids = [*tokenizer.encode(line), 1]
            source[row, : len(ids)] = ids
    theirs, limits = load_pretrained(folder), np.array([54, 1, 52, 55])
    search = replace(search, max_new_tokens=62)
    ids = {"bos": options.bos, "pad": options.pad}
    found = translate_ids(theirs.model, theirs.params, source, limits, search, **ids)
    for number in (0, 2, 3):
        mine = [row for row in rows if row[0] == str(number + 1)]
        assert [row[1] for row in mine] == [f"{score:.4f}" for score in found.scores[number]]
        texts = [tokenizer.decode(row[row > 0]) for row in np.asarray(found.tokens[number])]
        assert [row[2] for row in mine] == texts
    assert len({row[2] for row in rows}) > 4
    written = np.asarray(found.tokens)[[0, 2, 3]]
    assert not np.isin(written, [2, 11, 12]).any()


def test_a_translation_is_as_long_as_the_folder_says_at_most(folder, tmp_path):
    """A `max_length` counts the token at the start; what has not ended by then is cut."""
    short = shutil.copytree(folder, tmp_path / "short")
    said = json.loads((folder / "generation_config.json").read_text())
    for most, value, longest in (("max_new_tokens", 60, 60), ("max_length", 5, 4)):
        asked = said | {most: value, "min_length": value}
        (short / "generation_config.json").write_text(json.dumps(asked))
        assert load_generation_config(short)[0].max_new_tokens == longest
    found = translate(load_run(short), ["a b c", "h", "e d a b"], details=True)
    assert {len(text.ids) for texts in found for text in texts} == {4}
    assert all(0 not in text.ids for texts in found for text in texts)


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
    with pytest.raises(ConfigError, match="has no test text: give --source and --target"):
        evaluate.main(evaluate.EvaluateOptions(run=str(folder)))


def test_a_wider_search_than_the_folders_can_be_asked_for(folder):
    by_option = load_decoding(folder, DecodingOptions(beam_size=5))
    by_count = load_decoding(folder, DecodingOptions(), n_best=4)
    assert [loaded.settings[0].beam_size for loaded in (by_option, by_count)] == [5, 4]


def test_a_folder_without_a_tokenizer_or_with_another_model_is_refused(
    tmp_path, tokenizer, random_params
):
    ids = jnp.ones((2, 3), jnp.int32)
    model = EncoderDecoder(CONFIG)
    save_pretrained(tmp_path / "bare", model, random_params(model, ids, ids), token_ids=ASKED)
    with pytest.raises(ConfigError, match="bare has no tokenizer.json: write one there"):
        load_run(tmp_path / "bare")
    config = TransformerConfig(
        vocab_size=SIZE,
        d_model=8,
        d_ff=9,
        num_heads=2,
        num_decoder_layers=1,
        norm=NormOptions(placement="pre"),
        feed_forward=FeedForwardOptions("gelu_tanh"),
        embeddings=EmbeddingOptions(tied="output", scale=False),
        positions=Learned(),
    )
    gpt = DecoderOnly(config)
    save_pretrained(tmp_path / "gpt", gpt, random_params(gpt, ids), tokenizer, family="gpt2")
    with pytest.raises(ConfigError, match="gpt holds a DecoderOnly, which does not translate"):
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
    with pytest.raises(ConfigError, match="without samples: give --text"):
        page.page_contents(folder, RunOptions())
