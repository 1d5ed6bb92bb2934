"""Training and pipelines under JAX's settings give what they give without."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.training import first_contact
from jaxformer.text.data import MaskedStream, Tokens
from jaxformer.text.tokenizers import SpecialTokens, train_characters
from jaxformer.training.optimizer import OptimizerConfig

pytestmark = pytest.mark.long

SIZES = jf.TransformerConfig(10, d_model=8, d_ff=14, num_heads=2, dropout_rate=0.1)
GPT = replace(SIZES, num_decoder_layers=1, positions=jf.Rotary())
BERT = replace(SIZES, vocab_size=11, num_encoder_layers=1, positions=jf.Learned())
SEQ2SEQ = replace(SIZES, num_encoder_layers=1, num_decoder_layers=1)
IDS = np.random.default_rng(0).integers(4, 10, (3, 7)).astype(np.int32)
SPECIAL = SpecialTokens(bos=1, eos=2, mask=3)
TOKENIZER = train_characters(["abcdef"])
SETTINGS = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": jax.disable_jit,
}


def masked_batch():
    sizes = {"batch_size": 3, "seq_len": 13, "vocab_size": 11}
    return MaskedStream(
        Tokens.from_lists([[5, 6, 7] * 17]), seed=0, special=SPECIAL, **sizes
    ).batch(0)


def trained(model, loss, batch, *inputs, **settings):
    """The loss and the parameters after a step."""
    params = model.init(jax.random.key(0), *inputs)["params"]
    config = OptimizerConfig(warmup_steps=2, grad_clip_norm=1.0, weight_decay=0.1, **settings)
    optimizer = jf.make_optimizer(config, axes=jf.parameter_axes(model, *inputs))
    state = jf.init_train_state(params, optimizer, jax.random.key(1), ema=True)
    step = jf.make_train_step(loss, optimizer, ema_decay=0.9)
    state, metrics = jax.jit(step)(state, batch)
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.ema))
    assert {leaf.dtype for _, leaf in leaves} == {np.dtype("float32")}
    # The gradient of a key's bias is zero but for rounding, which Adam makes as large as any.
    kept = [leaf for path, leaf in leaves if "'key'" not in str(path[-2:])]
    return [metrics["loss"], *kept]


def loaded(kind, config, *inputs):
    model = kind(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(3)
    draw = lambda leaf: rng.standard_normal(leaf.shape, np.float32)  # noqa: E731
    return jf.Loaded(model, jax.tree.map(draw, shapes), TOKENIZER)


def gpt(**changes):
    model = jf.DecoderOnly(replace(GPT, **changes))
    return model, jf.causal_loss(model), jf.StreamBatch.create(IDS, vocab_size=10), IDS


def bert():
    model, batch = jf.MaskedLanguageModel(BERT), masked_batch()
    return model, jf.masked_loss(model), batch, batch.tokens, batch.padding_mask


def seq2seq():
    model = jf.EncoderDecoder(SEQ2SEQ)
    batch = jf.PairBatch(IDS, IDS[:, :5], np.arange(3, dtype=np.int32))
    loss = jf.seq2seq_loss(model, pad=0, label_smoothing=0.1)
    return model, loss, batch, IDS, IDS[:, :4]


WORK = {
    "gpt": lambda: trained(*gpt()),
    "gpt in bfloat16, muon": lambda: trained(*gpt(dtype="bfloat16"), name="muon")[:1],
    "bert": lambda: trained(*bert()),
    "encoder-decoder": lambda: trained(*seq2seq()),
    "pipelines": lambda: pipelines(),
}


def pipelines():
    decoder = loaded(jf.DecoderOnly, GPT, IDS)
    translator = loaded(jf.EncoderDecoder, SEQ2SEQ, IDS, IDS)
    options = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    texts = jf.complete(decoder, ["ab", "c"], max_new_tokens=3, **options)
    texts += jf.translate(translator, ["ab", "c"], beam_size=2, max_new_tokens=4)
    scores = jf.score(decoder, ["ab", "cde"])
    return [np.array([hash(text) % 2**31 for text in texts]), scores, jf.embed(decoder, ["ab"])]


@pytest.fixture(scope="module", params=WORK.values(), ids=WORK)
def work(request):
    return request.param, request.param()


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_of_jax_changes_no_result(setting, work):
    compute, expected = work
    with setting():
        found = compute()
    for given, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(given), np.asarray(wanted), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("tied", ["all", "none"])
def test_the_gradient_of_a_bfloat16_translator_is_computed_on_a_cpu(tied):
    """Its products of 16-bit numbers with float32 results were not all there in XLA."""
    config = replace(SEQ2SEQ, dtype="bfloat16", embeddings=jf.EmbeddingOptions(tied=tied))
    model = jf.EncoderDecoder(config)
    params = jax.jit(model.init)(jax.random.key(0), IDS, IDS)["params"]
    batch = jf.PairBatch(IDS, IDS, np.arange(3, dtype=np.int32))

    def gradient(model):
        loss = jf.seq2seq_loss(model, pad=0, label_smoothing=0.1)
        return jax.jit(jax.grad(lambda params: loss(params, batch, jax.random.key(1))[0]))(params)

    found = gradient(model)
    exact = gradient(model.clone(config=replace(config, dtype="float32")))
    norms = [float(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree))) for tree in (found, exact)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


def test_equal_attention_functions_share_what_jax_has_traced():
    traces = []

    def logits(params, model):
        traces.append(model)
        return model.apply({"params": params}, IDS)

    params = jf.DecoderOnly(GPT).init(jax.random.key(0), IDS)["params"]
    compiled = jax.jit(logits, static_argnames="model")
    for _ in range(2):
        compiled(params, jf.DecoderOnly(GPT, first_contact.AutoAttention()))
    assert len(traces) == 1
