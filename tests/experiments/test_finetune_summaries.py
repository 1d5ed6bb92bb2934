"""Fine-tuning of an encoder-decoder of others on pairs of texts: layout of the ids, and scores."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.runs.decoding_options import DecodingOptions
from experiments.harness.training.build import MetricInputs
from experiments.harness.training.training_config import OptimizerConfig
from experiments.translation import finetune
from experiments.translation.corpus import Text
from experiments.translation.evaluate import rouge
from experiments.translation.finetune import FinetuneOptions, encode, score
from experiments.translation.load_run import Translator, load_translator
from experiments.translation.presets import Files
from jaxformer import load_pretrained, save_pretrained
from jaxformer.config import EmbeddingOptions, NormOptions, Relative, TransformerConfig
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.parameters import flatten

library = pytest.importorskip("tokenizers", reason="needs the extra experiments")
pytest.importorskip("safetensors", reason="needs the extra experiments")
pytest.importorskip("rouge_score", reason="needs the extra finetuning")

pytestmark = pytest.mark.long

WORDS = ["<pad>", "</s>", "<unk>", "sun", "moon", "star", "rain", "snow", "short", ":"]
PAD, EOS = 0, 1
MODEL = EncoderDecoder(
    TransformerConfig(
        vocab_size=len(WORDS),
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
)


def words(names: list[str]) -> Tokenizer:
    ids = {word: i for i, word in enumerate(names)}
    model = library.Tokenizer(library.models.WordLevel(ids, unk_token="<unk>"))
    model.pre_tokenizer = library.pre_tokenizers.Whitespace()
    model.add_special_tokens([name for name in names if name.startswith("<")])
    return Tokenizer(model)


@pytest.fixture(scope="module")
def folder(random_params, tmp_path_factory):
    """A T5 with its tokenizer and search settings."""
    ids = jnp.ones((2, 3), jnp.int32)
    path = tmp_path_factory.mktemp("t5") / "model"
    save_pretrained(path, MODEL, random_params(MODEL, ids, ids), words(WORDS), family="t5")
    asked = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    (path / "generation_config.json").write_text(json.dumps(asked | {"max_length": 6}))
    return path


@pytest.fixture(scope="module")
def options(folder, tmp_path_factory) -> FinetuneOptions:
    path = tmp_path_factory.mktemp("text") / "pairs.tsv"
    names = WORDS[3:8]
    lines = [f"{a} {b} {c}\t{a} {c}" for a in names for b in names for c in names[:3]]
    path.write_text("\n".join(lines) + "\n")
    files = Files(str(path))
    return FinetuneOptions(
        run=str(folder),
        train=files,
        test=files,
        num_test=7,
        prefix="short: ",
        batch_size=5,
        source_len=7,
        target_len=5,
        lora_rank=4,
        lora_targets="kernel$|table$",
        runs=str(path.parent / "runs"),
        name="tuned",
        output=str(path.parent / "found.txt"),
        save=str(path.parent / "saved"),
        optimizer=OptimizerConfig(
            schedule="constant", learning_rate=5e-2, warmup_steps=1, total_steps=60
        ),
    )


def test_targets_begin_as_a_search_begins_and_every_text_ends(folder, options):
    translator = load_translator(folder)
    text = Text(["sun moon", "sun " * 9, " "], ["star", "rain " * 8, "sun"])
    found = encode(options, translator, text)
    assert found.tokens.tolist() == [[3, 4, EOS, 0, 0, 0, 0], [3] * 6 + [EOS]]
    assert found.labels.tolist() == [[PAD, 5, EOS, 0, 0, 0], [PAD, 6, 6, 6, 6, EOS]]


@pytest.mark.parametrize(("forced", "second"), [(None, 1), (4, 4)])
def test_texts_of_bart_begin_with_its_own_token(forced, second):
    bart = words(["<pad>", "<s>", "</s>", "<unk>", "sun", "moon", "star"]).library_tokenizer
    bart.post_processor = library.processors.BertProcessing(("</s>", 2), ("<s>", 1))
    tokenizer = Tokenizer(bart)
    search = SearchConfig(eos=(2,), forced_bos=forced)
    settings = TranslationOptions(bos=2, pad=0)
    bart = Translator(MODEL, {}, tokenizer, tokenizer, (search, settings))
    found = encode(FinetuneOptions(), bart, Text(["sun moon"], ["star"]))
    assert found.tokens[0, :5].tolist() == [1, 4, 5, 2, 0]
    assert found.labels[0, :5].tolist() == [2, second, 6, 2, 0]


def test_adapters_learn_to_shorten_and_the_saved_folder_scores_the_same(folder, options, capsys):
    path = finetune.result_folder(options, "translation") / "finetune.json"
    finetune.main(options)
    record = json.loads(path.read_text())
    before, after = record["before"], record["after"]
    assert after["rouge1"] > before["rouge1"] + 10
    said = capsys.readouterr().out
    assert "before: rouge1 " in said and "; 75 pairs" in said
    saved, first = load_pretrained(options.save), load_pretrained(folder)
    base = flatten(first.params)
    for path, leaf in flatten(saved.params).items():
        moved = path.endswith(("kernel", "table"))
        assert np.array_equal(leaf, base[path]) != moved, path
    decoding = DecodingOptions(beam_size=0)
    again = load_translator(Path(options.save), decoding=decoding)
    _, test = finetune.read_texts(options)
    scores, hypotheses = score(options, again, test)
    assert scores == pytest.approx(after)
    assert open(options.output).read().splitlines() == hypotheses
    evaluation = MetricInputs(None, test, {}, hypotheses)
    assert rouge(evaluation) == scores
    with pytest.raises(ConfigError, match="exists already: give the name of a new folder"):
        finetune.main(options)


def test_a_long_source_is_cut_as_in_training(folder, options):
    translator = load_translator(folder)
    long, short = "sun moon star rain snow sun moon", "sun moon star rain snow sun"
    found = [score(options, translator, Text([line], ["sun"]))[1] for line in (long, short)]
    assert found[0] == found[1]


def test_settings_that_do_not_fit_are_refused(folder, options):
    with pytest.raises(ConfigError, match="has no text: give --train.source and --test.source"):
        finetune.read_texts(replace(options, train=Files(), test=Files()))
    with pytest.raises(ConfigError, match="pairs are needed to learn from and to test with"):
        replace(options, test=Files())
    with pytest.raises(ConfigError, match="num_train=99, but there are 75 pairs"):
        finetune.read_texts(replace(options, num_train=99))
