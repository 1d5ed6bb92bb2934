"""`load`: a run's folder and a folder of `transformers` give model, weights and tokenizers."""

import json
from dataclasses import asdict, dataclass, replace

import jax
import numpy as np
import pytest

from jaxformer import TransformerConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    Llama3,
    NormOptions,
    PositionScheme,
    Rotary,
)
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.nn.blocks import Block
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.ops.attention import blockwise, reference
from jaxformer.pretrained import load, save_pretrained
from jaxformer.text.tokenizers import train_characters, train_words

SIZES = TransformerConfig(vocab_size=97, d_model=6, d_ff=7, num_heads=2, max_len=13)
GPT = replace(
    SIZES, num_decoder_layers=1, norm=NormOptions(placement="pre"), positions=Rotary(), head_dim=4
)
TOKENS = np.array([[4, 5, 6, 2, 0], [5, 4, 2, 0, 0]])


class NamedBlock(Block):
    """A block with a name of its own."""


@dataclass(frozen=True)
class NamedPositions(PositionScheme):
    """A position scheme with a name of its own."""

    period: int = 1


def named_attention(*args, **kwargs):
    return reference(*args, **kwargs)


def times(factor, params):
    return jax.tree.map(lambda leaf: leaf * np.float32(factor), params)


@pytest.fixture
def make_run(tmp_path, random_params):
    """Writes the folder of a run with two checkpoints; gives it and the newer parameters."""

    def make(model, config, tokenizers, *inputs, training=None, positions=None):
        params = random_params(model, *(inputs or (TOKENS,)))
        folder = tmp_path / "run"
        (folder / "tokenizer").mkdir(parents=True)
        for name, tokenizer in tokenizers.items():
            tokenizer.save(folder / "tokenizer" / f"{name}.json")
        # what is asked for; the tokenizer has fewer ids
        written = {"model": asdict(replace(config, vocab_size=97)), "training": training or {}}
        name = type(config.positions).__name__.lower()
        written["model"]["positions"] = positions or {"type": name}
        (folder / "config.json").write_text(json.dumps(written))
        half, twice = times(0.5, params), times(2.0, params)
        with Checkpoints(folder / "checkpoints") as checkpoints:
            checkpoints.save(3, {"params": half, "ema": twice}, {})
            checkpoints.save(5, {"params": params, "ema": half}, {})
        return folder, params

    return make


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_run_of_a_causal_model_is_its_newest_weights_with_the_tokenizers_vocabulary(make_run):
    words = train_words(["ab cd ef"], 7)
    config = replace(GPT, vocab_size=words.vocab_size)
    folder, params = make_run(DecoderOnly(config), config, {"tokenizer": words})
    found = load(folder)
    assert found.model == DecoderOnly(config)
    assert found.tokenizer is found.target_tokenizer
    assert found.tokenizer.encode("cd ab") == words.encode("cd ab")
    same(found.params, params)
    assert load(folder, attention_fn=blockwise, dtype="bfloat16").model == DecoderOnly(
        replace(config, dtype="bfloat16"), blockwise
    )


def test_a_finished_run_gives_the_mean_of_the_tree_and_steps_that_its_record_names(make_run):
    config = replace(GPT, vocab_size=7)
    folder, params = make_run(DecoderOnly(config), config, {})
    (folder / "weights.json").write_text('{"steps": [3, 5], "tree": "ema"}')
    found = load(folder)
    assert found.tokenizer is None
    same(found.params, times(1.25, params))
    (folder / "weights.json").write_text('{"steps": [3, 5], "tree": "params"}')
    same(load(folder).params, times(0.75, params))


AVERAGES = {
    "none": ({}, 1.0),
    "one": ({"ema_decay": 0.9}, 0.5),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_unfinished_run_gives_the_newest_of_the_tree_that_becomes_its_result(make_run, name):
    training, factor = AVERAGES[name]
    config = replace(GPT, vocab_size=7)
    folder, params = make_run(DecoderOnly(config), config, {}, training=training)
    same(load(folder).params, times(factor, params))


def test_a_run_of_a_translator_gives_both_tokenizers_and_vocabularies(make_run):
    source, target = train_characters(["abc"]), train_characters(["defgh"])
    config = replace(
        SIZES,
        num_encoder_layers=1,
        num_decoder_layers=1,
        vocab_size=target.vocab_size,
        source_vocab_size=source.vocab_size,
        embeddings=EmbeddingOptions(tied="output"),
    )
    model = EncoderDecoder(config)
    folder, params = make_run(model, config, {"source": source, "target": target}, TOKENS, TOKENS)
    found = load(folder)
    assert found.model == model
    assert found.tokenizer.decode([4, 5]) == "ab" and found.target_tokenizer.decode([4, 5]) == "de"
    same(found.params, params)


def test_a_run_of_a_masked_model_has_its_head(make_run):
    words = train_words(["ab cd ef"], 7)
    config = replace(SIZES, num_encoder_layers=1, vocab_size=words.vocab_size)
    folder, params = make_run(MaskedLanguageModel(config), config, {"tokenizer": words})
    found = load(folder)
    assert found.model == MaskedLanguageModel(config)
    same(found.params, params)


def test_a_run_keeps_the_parts_that_it_was_trained_with(make_run):
    config = replace(GPT, vocab_size=7)
    training = {"block": f"{__name__}:NamedBlock", "attention_fn": f"{__name__}:named_attention"}
    positions = {"type": f"{__name__}:NamedPositions", "period": 3}
    folder, _ = make_run(DecoderOnly(config), config, {}, training=training, positions=positions)
    config = replace(config, positions=NamedPositions(period=3))
    assert load(folder).model == DecoderOnly(config, named_attention, NamedBlock)


def test_positions_of_a_run_are_an_object_with_a_type_or_a_name(make_run):
    config = replace(GPT, vocab_size=7)
    llama3 = {"type": "llama3", "factor": 8.0}
    positions = {"type": "rotary", "base": 1e6, "scaling": llama3}
    folder, _ = make_run(DecoderOnly(config), config, {}, positions=positions)
    long = Rotary(base=1e6, scaling=Llama3(factor=8.0))
    assert load(folder).model.config == replace(config, positions=long)
    written = json.loads((folder / "config.json").read_text())

    def load_with(positions):
        model = written["model"] | {"positions": positions}
        (folder / "config.json").write_text(json.dumps(written | {"model": model}))
        return load(folder).model.config.positions

    assert load_with("rotary") == Rotary()
    for wrong, message in (
        ({"type": "spiral"}, "type='spiral' is not supported: only no_positions, sinusoidal, "),
        ({"type": "no.such.module:Scheme"}, "trained with positions='no.such.module:Scheme', whi"),
        ({"base": 1e6}, "type='' is not supported"),
        ({"type": "rotary", "angle": 3}, "unexpected keyword argument 'angle'"),
        ([1], r"config.json: model: \[1\] must be an object, or the name of a class"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_with(wrong)


@pytest.mark.parametrize(
    "training",
    [{"block": "no.such.module:Block"}, {"attention_fn": f"{__name__}:absent"}, {"block": "Block"}],
)
def test_a_block_that_cannot_be_imported_is_named(make_run, training):
    config = replace(GPT, vocab_size=7)
    folder, _ = make_run(DecoderOnly(config), config, {}, training=training)
    ((option, name),) = training.items()
    with pytest.raises(ConfigError, match=f"trained with {option}='{name}', which cannot be imp"):
        load(folder)


def test_weights_that_are_not_the_models_are_refused(make_run):
    config = replace(GPT, vocab_size=7)
    folder, _ = make_run(DecoderOnly(config), replace(config, d_ff=11), {})
    with pytest.raises(CheckpointError, match=r"feed_forward/down/kernel is \(7, 6\) in params"):
        load(folder)


def test_a_tokenizer_of_another_run_is_refused(make_run):
    config = replace(GPT, vocab_size=7)
    words = train_words(["ab cd ef gh ij"], 11)
    folder, _ = make_run(DecoderOnly(config), config, {"tokenizer": words})
    with pytest.raises(ConfigError, match="run: the tokenizer has 9 ids, but the model has only 7"):
        load(folder)


def test_a_folder_of_transformers_is_loaded_too(tmp_path, random_params):
    words = train_words(["ab cd ef"], 7)
    config = replace(
        GPT,
        vocab_size=words.vocab_size,
        norm=NormOptions("rms", placement="pre", eps=1e-6),
        feed_forward=FeedForwardOptions("silu", gated=True),
        embeddings=EmbeddingOptions(scale=False, tied="none"),
        use_bias=False,
    )
    model = DecoderOnly(config)
    params = random_params(model, TOKENS)
    save_pretrained(tmp_path / "llama", model, params, words)
    found = load(tmp_path / "llama")
    same(found.params, params)
    assert isinstance(found.model, DecoderOnly) and found.tokenizer is found.target_tokenizer


def test_a_folder_of_neither_kind_and_a_run_without_checkpoint_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither a run nor a folder of transformers"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model": asdict(GPT)}))
    with pytest.raises(CheckpointError, match="has no complete checkpoint: train first"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        load(tmp_path / "absent")
