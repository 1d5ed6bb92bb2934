"""A model exported as Marian's finds, converted by CTranslate2, the hypotheses it finds here."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import TransformerConfig, save_pretrained
from jaxformer.config import FeedForwardOptions, NormOptions, OutputOptions, Sinusoidal
from jaxformer.decoding import SearchConfig
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import translate_ids

pytestmark = pytest.mark.peer
V, WIDTH, LONGEST = 17, 4, 9
TOKENS = ["</s>", "<unk>", *(f"w{i}" for i in range(2, V - 1))]
LENGTHS = np.array([6, 3, 4, 2, 5, 6])

# CTranslate2 keeps the first `WIDTH` texts that end, and cuts those that do not.
CONFIG = SearchConfig(
    beam_size=WIDTH,
    length_penalty_kind="power",
    early_stopping="beam_full",
    at_max_length="cut",
    extra_candidates=1,
    max_new_tokens=LONGEST,
    eos=(0,),
)


@pytest.fixture(scope="module")
def ctranslate2(torch):
    pytest.importorskip("transformers", reason="the peer tests need transformers")
    return pytest.importorskip("ctranslate2", reason="the peer tests need ctranslate2")


@pytest.fixture(scope="module")
def system(random_params):
    """A model whose padding is what Marian's is: no vector before the first token, no logit."""
    config = TransformerConfig(
        vocab_size=V,
        d_model=12,
        d_ff=16,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        norm=NormOptions(eps=1e-5),
        output=OutputOptions(bias=True),
        feed_forward=FeedForwardOptions("silu"),
        positions=Sinusoidal(layout="halves"),
        max_len=32,
    )
    model = EncoderDecoder(config)
    ids = jnp.ones((2, 3), jnp.int32)
    params = random_params(model, ids, ids)
    params["embedding"]["table"][-1] = 0.0
    params["output"]["bias"][[0, -1]] = 2.0, -1e4
    return model, params


@pytest.fixture(scope="module")
def translator(ctranslate2, system, tmp_path_factory):
    """CTranslate2's, of the exported folder as `transformers` reads it."""
    from ctranslate2.converters.transformers import MarianMTLoader
    from transformers import MarianMTModel

    folder = tmp_path_factory.mktemp("exported")
    ids = {"pad_token_id": V - 1, "eos_token_id": 0, "decoder_start_token_id": V - 1}
    save_pretrained(folder / "marian", *system, family="marian", token_ids=ids)
    loader = MarianMTLoader()
    spec = loader.get_model_spec(MarianMTModel.from_pretrained(folder / "marian").eval())
    loader.set_vocabulary(spec, TOKENS)
    spec.config.bos_token = spec.config.eos_token = spec.config.decoder_start_token = "</s>"
    spec.config.unk_token = "<unk>"
    spec.validate()
    spec.optimize(quantization=None)
    (folder / "converted").mkdir()
    spec.save(str(folder / "converted"))
    return ctranslate2.Translator(
        str(folder / "converted"), compute_type="float32", inter_threads=1, intra_threads=1
    )


@pytest.mark.parametrize("length_penalty", [1.0, 0.6])
def test_four_beams_find_the_same_hypotheses_with_the_same_scores(
    length_penalty, translator, system, assert_equal
):
    rng = np.random.default_rng(0)
    source = rng.integers(2, V - 1, (len(LENGTHS), LENGTHS.max()))
    source[np.arange(LENGTHS.max()) >= LENGTHS[:, None]] = V - 1
    source[np.arange(len(LENGTHS)), LENGTHS - 1] = 0
    said = translator.translate_batch(
        [[TOKENS[i] for i in row if i < V - 1] for row in source],
        beam_size=WIDTH,
        num_hypotheses=WIDTH,
        return_scores=True,
        min_decoding_length=0,
        max_decoding_length=LONGEST,
        length_penalty=length_penalty,
    )
    found = translate_ids(
        *system,
        jnp.asarray(source),
        jnp.full(len(LENGTHS), LONGEST),
        replace(CONFIG, length_penalty=length_penalty),
        bos=V - 1,
        pad=V - 1,
    )
    texts = [[words(row) for row in rows] for rows in np.asarray(found.tokens)]
    assert texts == [result.hypotheses for result in said]
    assert_equal(found.scores, [result.scores for result in said], 1e-4)
    assert len({len(text) for texts in texts for text in texts}) > 2


def words(ids: np.ndarray) -> list[str]:
    """The tokens before the end."""
    ends = np.flatnonzero(ids == 0)
    return [TOKENS[i] for i in (ids[: ends[0]] if ends.size else ids)]
