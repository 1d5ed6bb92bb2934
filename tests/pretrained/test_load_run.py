"""`load`: a run's folder and a folder of `transformers` give model, weights and tokenizers."""

import json
import shutil
from dataclasses import asdict, dataclass, replace

import jax
import numpy as np
import pytest

from jaxformer import TransformerConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    EmbeddingOptions,
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
from jaxformer.pretrained import load
from jaxformer.text.tokenizers import train_characters, train_words

SIZES = TransformerConfig(vocab_size=7, d_model=6, d_ff=7, num_heads=2, max_len=13)
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


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, random_params):
    """Writes the folder of a run with two checkpoints; gives it and the newer parameters."""

    def make(model, tokenizers, *inputs):
        config, params = model.config, random_params(model, *(inputs or (TOKENS,)))
        folder = tmp_path_factory.mktemp("runs") / "run"
        (folder / "tokenizer").mkdir(parents=True)
        for name, tokenizer in tokenizers.items():
            tokenizer.save(folder / "tokenizer" / f"{name}.json")
        # what is asked for; the tokenizer has fewer ids
        written = {"model": asdict(replace(config, vocab_size=97)), "training": {}}
        written["model"]["positions"] = {"type": type(config.positions).__name__.lower()}
        (folder / "config.json").write_text(json.dumps(written))
        half, twice = times(0.5, params), times(2.0, params)
        with Checkpoints(folder / "checkpoints") as checkpoints:
            checkpoints.save(3, {"params": half, "ema": twice}, {})
            checkpoints.save(5, {"params": params, "ema": half}, {})
        return folder, params

    return make


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def gpt_run(make_run):
    """A run of `DecoderOnly(GPT)` without a tokenizer, and its parameters."""
    return make_run(DecoderOnly(GPT), {})


@pytest.fixture
def run(gpt_run, tmp_path):
    """A copy of that run, to be changed, and its parameters."""
    return shutil.copytree(gpt_run[0], tmp_path / "run"), gpt_run[1]


def change(folder, part, **settings):
    """Changes `settings` of a part of the run's config.json."""
    path = folder / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {part: written[part] | settings}))


def test_a_run_of_a_causal_model_is_its_newest_weights_with_the_tokenizers_vocabulary(run):
    words, (folder, params) = train_words(["ab cd ef"], 7), run
    words.save(folder / "tokenizer" / "tokenizer.json")
    found = load(folder)
    assert found.model == DecoderOnly(GPT)
    assert found.tokenizer is found.target_tokenizer
    assert found.tokenizer.encode("cd ab") == words.encode("cd ab")
    same(found.params, params)
    assert load(folder, attention_fn=blockwise, dtype="bfloat16").model == DecoderOnly(
        replace(GPT, dtype="bfloat16"), blockwise
    )


def test_a_finished_run_gives_the_mean_of_the_tree_and_steps_that_its_record_names(run):
    folder, params = run
    (folder / "weights.json").write_text('{"steps": [3, 5], "tree": "ema"}')
    found = load(folder)
    assert found.tokenizer is None
    same(found.params, times(1.25, params))
    (folder / "weights.json").write_text('{"steps": [3, 5], "tree": "params"}')
    same(load(folder).params, times(0.75, params))
    (folder / "weights.json").write_text('{"steps": [4], "tree": "params"}')
    with pytest.raises(CheckpointError, match="step 4"):
        load(folder)


def test_an_unfinished_run_gives_the_newest_of_the_tree_that_becomes_its_result(run):
    folder, params = run
    same(load(folder).params, params)
    change(folder, "training", ema_decay=0.9)
    same(load(folder).params, times(0.5, params))


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
    model, tokenizers = EncoderDecoder(config), {"source": source, "target": target}
    folder, params = make_run(model, tokenizers, TOKENS, TOKENS)
    found = load(folder)
    assert found.model == model
    assert found.tokenizer.decode([4, 5]) == "ab" and found.target_tokenizer.decode([4, 5]) == "de"
    same(found.params, params)


def test_a_run_of_a_masked_model_has_its_head(make_run):
    words = train_words(["ab cd ef"], 7)
    config = replace(SIZES, num_encoder_layers=1)
    folder, params = make_run(MaskedLanguageModel(config), {"tokenizer": words})
    found = load(folder)
    assert found.model == MaskedLanguageModel(config)
    same(found.params, params)


def test_a_run_keeps_the_parts_that_it_was_trained_with(run):
    folder, _ = run
    block, attention_fn = f"{__name__}:NamedBlock", f"{__name__}:named_attention"
    change(folder, "training", block=block, attention_fn=attention_fn)
    change(folder, "model", positions={"type": f"{__name__}:NamedPositions", "period": 3})
    config = replace(GPT, positions=NamedPositions(period=3))
    loaded = load(folder, trust_code=True)
    assert loaded.model == DecoderOnly(config, named_attention, NamedBlock)


LONG = {"type": "rotary", "base": 1e6, "scaling": {"type": "llama3", "factor": 8.0}}


@pytest.mark.parametrize(
    ("positions", "expected"),
    [(LONG, Rotary(base=1e6, scaling=Llama3(factor=8.0))), ("rotary", Rotary())],
)
def test_positions_of_a_run_are_an_object_with_a_type_or_a_name(run, positions, expected):
    change(run[0], "model", positions=positions)
    assert load(run[0]).model.config == replace(GPT, positions=expected)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (
            "model",
            {"positions": {"type": "spiral"}},
            "model.positions='spiral'",
        ),
        (
            "model",
            {"positions": {"base": 1e6}},
            "config.json: model.positions",
        ),
        (
            "model",
            {"positions": {"type": "rotary", "angle": 3}},
            "model.positions.angle",
        ),
        (
            "model",
            {"embeddings": {"dropout_rate": 0.1}},  # word dropout, which is gone
            "model.embeddings.dropout_rate",
        ),
        ("model", {"positions": [1]}, "model.positions"),
        (
            "model",
            {"positions": {"type": "absent:X"}},
            "model.positions='absent:X'",
        ),
        ("training", {"block": "absent:X"}, "block='absent:X'"),
        ("training", {"block": "Block"}, "block='Block' is not a name of the form"),
        ("training", {"attention_fn": f"{__name__}:X"}, f"the module '{__name__}' has no 'X'"),
    ],
)
def test_parts_that_are_unknown_or_cannot_be_imported_are_named(run, part, settings, message):
    change(run[0], part, **settings)
    with pytest.raises(ConfigError, match=message):
        load(run[0], trust_code=True)


def test_weights_that_are_not_the_models_are_refused(run):
    change(run[0], "model", d_ff=11)
    with pytest.raises(CheckpointError, match="feed_forward/down/kernel"):
        load(run[0])


def test_a_tokenizer_of_another_run_is_refused(run):
    train_words(["ab cd ef gh ij"], 11).save(run[0] / "tokenizer" / "tokenizer.json")
    with pytest.raises(ConfigError, match="run: .* 9 ids"):
        load(run[0])


def test_a_folder_of_neither_kind_and_a_run_without_checkpoint_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither a run nor a folder of transformers"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model": asdict(GPT)}))
    with pytest.raises(CheckpointError, match="checkpoint"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        load(tmp_path / "absent")
