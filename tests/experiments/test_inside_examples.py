"""The examples that look inside a model: heads that align words, the logit lens."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.examples import alignment_heads, logit_lens
from experiments.translation.corpus import Text
from experiments.translation.evaluate import pair_batch, scored_text
from experiments.translation.load_run import LoadedRun
from jaxformer.errors import DataError
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import BOS, EOS, PAD
from jaxformer.training.losses import seq2seq_loss

SIZES = {"d_model": 12, "d_ff": 14, "num_heads": 3, "num_decoder_layers": 2, "max_len": 11}


@pytest.fixture(scope="module")
def translator(random_params):
    """A model whose second decoder layer attends to one token alone."""
    tokenizer = tokenizers.train_characters(["the dog sees a bird"])
    config = jf.TransformerConfig(tokenizer.vocab_size, **SIZES, num_encoder_layers=1)
    model, ids = jf.EncoderDecoder(config), jnp.ones((2, 5), jnp.int32)
    params = random_params(model, ids, ids)
    query = params["decoder"]["blocks_1"]["cross_attention"]["query"]
    params["decoder"]["blocks_1"]["cross_attention"]["query"] = jax.tree.map(
        lambda x: 1e4 * x, query
    )
    return LoadedRun(None, model, params, tokenizer, tokenizer)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def batch(translator):
    text = Text(["a bird", "the dog sees a dog", "dogs"], ["the dog", "a bird", "sees"])
    return pair_batch(translator, text, 2)


def test_a_batch_holds_the_first_pairs_cut_at_the_context(translator, batch):
    encode = translator.source_tokenizer.encode
    source = [encode("a bird") + [EOS], encode("the dog sees a dog")[:10] + [EOS]]
    assert batch.source.tolist() == [source[0] + [PAD] * 4, source[1]]
    assert batch.target[0].tolist() == [BOS, *encode("the dog"), EOS]
    assert len(batch.target) == 2 and len(batch.target[1]) == len(batch.target[0])


def test_the_loss_without_a_head_is_that_of_the_model_without_it(translator, batch, assert_equal):
    model, params = translator.model, translator.params
    loss, effects = alignment_heads.measure(model, params, batch)
    total = jax.jit(seq2seq_loss(model, pad=PAD))

    def loss_without(layer, head):
        pruned = jax.tree.map(np.copy, params)
        block = pruned["decoder"][f"blocks_{layer}"]
        block["cross_attention"]["out"]["kernel"][head] = 0.0
        sums = total(pruned, batch, None)
        return sums[0] / sums[1]

    assert effects.zero.shape == (2, 3)
    assert_equal(loss + effects.zero[0, 2], loss_without(0, 2))
    assert_equal(loss + effects.zero[1, 0], loss_without(1, 0))
    assert np.abs(effects.one_hot[1]).max() < 1e-5 < np.abs(effects.one_hot[0]).max()
    assert np.abs(effects.uniform).min() > 1e-5


def test_heads_whose_place_matters_and_suffices_align():
    uniform, one_hot = np.array([[0.3, 0.01, 0.3]]), np.array([[0.01, 0.0, 0.2]])
    effects = alignment_heads.Effects(np.zeros((1, 3)), uniform, one_hot)
    assert effects.aligning.tolist() == [[True, False, False]]
    first, *rows = alignment_heads.table(effects)
    assert first.split() == ["layer", "head", "zeroed", "uniform", "one-hot"]
    assert rows[0].endswith("0.010  aligns words") and rows[-1].split()[:2] == ["0", "1"]


def test_each_token_stands_beside_the_one_that_its_head_looks_at(translator, batch):
    told = alignment_heads.aligned(translator, batch, 1, 2).split(", ")
    targets, sources = zip(*(pair.split(" = ") for pair in told), strict=True)
    assert "".join(targets) == "the dog"
    assert set(sources) <= {"a", " ", "b", "i", "r", "d", "<eos>"}


def test_a_run_without_samples_has_no_text(tmp_path):
    with pytest.raises(DataError, match="no samples.*finish its training"):
        scored_text(tmp_path)


def test_the_lens_at_the_last_layer_is_the_model(random_params, assert_equal):
    tokenizer = tokenizers.train_characters(["the dog sees a bird"])
    config = jf.TransformerConfig(
        tokenizer.vocab_size, **SIZES, norm=jf.NormOptions(placement="pre")
    )
    model, tokens = jf.DecoderOnly(config), np.array([tokenizer.encode("a bird")])
    params = random_params(model, tokens)
    found = logit_lens.lens(model, params, tokens)

    def unread(model):
        x, _, _ = model.decoder.add_positions(
            model.embedding(tokens), jf.AttentionMask(causal=True), None, tokens.shape[1]
        )
        return model.lm_head(model.decoder.final_norm(x))

    assert found.shape == (3, 1, tokens.shape[1], config.vocab_size)
    assert_equal(found[0], model.apply({"params": params}, method=unread))
    assert_equal(found[-1], jax.jit(model.apply)({"params": params}, tokens))
    loaded = SimpleNamespace(tokenizer=tokenizer)
    lines = logit_lens.table(loaded, list(tokens[0]), np.asarray(found[:, 0]), 2)
    assert lines[0].split() == ["token", "input", "layer", "1", "layer", "2"]
    assert len(lines) == 3 and lines[-1].startswith("'d'")
