"""A model in Marian's layout: other ids, one row for padding and BOS, the same translations."""

from functools import partial

import jax
import numpy as np
import pytest

import jaxformer as jf
from experiments.translation.export import marian_layout, renumber
from jaxformer.config import with_fields
from jaxformer.errors import ConfigError
from jaxformer.pretrained import load_generation_config, load_pretrained
from jaxformer.text.tokenizers import load, train_bpe, train_characters, train_words
from tests.pretrained.models import MARIAN, inputs_of, model_of

SEARCH = jf.SearchConfig(
    beam_size=3,
    length_penalty_kind="power",
    early_stopping="beam_full",
    at_max_length="cut",
    max_new_tokens=7,
    extra_candidates=1,
    suppress_tokens=(jf.PAD, jf.BOS),
    renormalize_logits=True,
)
LINES = ["a b c d", "d", "", "c c b <pad>", "b a"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_characters(["abcd <pad>"])


@pytest.fixture(scope="module")
def system(tokenizer, random_params):
    """A model whose BOS and padding are likely, and whose BOS has a row that is not zero."""
    changes = {"vocab_size": tokenizer.vocab_size, "max_len": 23, "embeddings.zero_id": jf.BOS}
    model = model_of(MARIAN, changes)
    params = random_params(model, *inputs_of(model))
    params["output"]["bias"][:2] = 1.5, 1.0
    return model, params


def test_the_folder_gives_the_translations_of_the_model(system, tokenizer, tmp_path, assert_equal):
    expected = jf.translate_with_details(jf.Loaded(*system, tokenizer), LINES, SEARCH)
    layout = marian_layout(*system, tokenizer, SEARCH)
    jf.save_pretrained(tmp_path / "m", *layout[:3], generation=layout.search, card="# A card\n")
    loaded = load_pretrained(tmp_path / "m")
    params = loaded.params
    search, options = load_generation_config(tmp_path / "m")
    assert (search, options) == (layout.search, layout.options)
    last = tokenizer.vocab_size - 2
    assert (options.bos, options.pad, search.eos, search.suppress_tokens) == (
        last,
        last,
        (0,),
        (last,),
    )
    assert not params["embedding"]["table"][-1].any() and params["output"]["bias"][-1] < -1e3
    found = jf.translate_with_details(loaded, LINES)
    assert [[x.text for x in each] for each in found] == [
        [x.text for x in each] for each in expected
    ]
    assert_equal(
        [x.score for each in found for x in each], [x.score for each in expected for x in each]
    )
    assert (tmp_path / "m" / "README.md").read_text() == "# A card\n"


def test_the_start_token_is_read_as_zero_whatever_its_row(system):
    model, params = system
    ids = np.array([[1, 4, 5], [1, 6, 1]])
    changed = {**params, "embedding": {"table": params["embedding"]["table"].copy()}}
    changed["embedding"]["table"][1] += 7.0

    plain = model.clone(config=with_fields(model.config, {"embeddings.zero_id": None}))
    zeroed = {**params, "embedding": {"table": changed["embedding"]["table"].copy()}}
    zeroed["embedding"]["table"][1] = 0.0

    @partial(jax.jit, static_argnums=0)
    def hidden(model, params):
        return model.apply({"params": params}, ids, ids, method="hidden")

    expected = hidden(model, params)
    np.testing.assert_array_equal(hidden(model, changed), expected)
    np.testing.assert_allclose(hidden(plain, zeroed), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"embeddings.zero_id": None}, "embeddings.zero_id=None.*train with .*_id 1"),
        ({"output.bias": False}, "output.bias=False"),
        ({"embeddings.tied": "none"}, "embeddings.tied='none' and"),
    ],
)
def test_another_model_is_refused_with_the_option_that_it_needs(
    changes, message, system, tokenizer
):
    model, params = system
    other = model.clone(config=with_fields(model.config, changes))
    with pytest.raises(ConfigError, match=message):
        marian_layout(other, params, tokenizer, SEARCH)


def test_an_id_outside_the_vocabulary_is_refused(system):
    with pytest.raises(ConfigError, match="zero_id=97.*vocab_size="):
        with_fields(system[0].config, {"embeddings.zero_id": 97})


TEXT = ["ein Haus steht am Fluss", "die Sonne scheint <pad> hell"]
TOKENIZERS = {
    "bpe": train_bpe(TEXT, 277),
    "words": train_words(TEXT, 13),
    "characters": train_characters(TEXT),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_renumbered_tokenizer_gives_the_same_tokens_and_text_by_other_ids(kind, tmp_path):
    tokenizer = TOKENIZERS[kind]
    order = [2, 3, *range(4, tokenizer.vocab_size), 0]
    renumber(tokenizer, order).save(tmp_path / "tokenizer.json")
    found = load(tmp_path / "tokenizer.json")
    assert found.special[:4] == (len(order) - 1, None, 0, 1)
    assert found.vocab_size == len(order) == tokenizer.vocab_size - 1
    for ids, expected in zip(*(x.encode_batch(TEXT) for x in (found, tokenizer)), strict=True):
        assert [order[i] for i in ids] == expected
        assert found.decode(ids) == tokenizer.decode(expected)


def test_a_token_that_is_not_special_is_never_left_out():
    with pytest.raises(ConfigError, match="no id of "):
        renumber(TOKENIZERS["words"], [0, 1, 2, 3, 4])
