import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.config.positions import positional_encoding
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.nn.remat import REMAT
from jaxformer.ops.dropout import DropoutRng
from tests.configs import small

B, S, T, V = 2, 5, 7, 17

TINY = small(num_encoder_layers=1, num_decoder_layers=1)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def parameters(model: Any, inputs: int) -> Any:
    """The shapes of a model's parameters, without their memory."""
    return jax.eval_shape(model.init, jax.random.key(0), *[ids(B, 3)] * inputs)["params"]


def count(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


# Sizes.


@pytest.mark.parametrize(
    ("config", "expected"),
    [(jf.TRANSFORMER_BASE, 63_082_496), (jf.TRANSFORMER_BIG, 214_245_376)],
    ids=["base", "big"],
)
def test_the_named_sizes_have_exactly_as_many_parameters(config, expected):
    # A loop over layers has the parameters of all layers and is traced once.
    assert count(parameters(EncoderDecoder(replace(config, scan_layers=True)), 2)) == expected


@pytest.mark.parametrize(
    ("row", "changes", "millions"),
    [
        ("A32", {"num_heads": 32, "head_dim": 16}, 65),
        ("B16", {"head_dim": 16, "value_head_dim": 64}, 58),
        ("C2", {"num_encoder_layers": 2, "num_decoder_layers": 2}, 36),
        ("C256", {"d_model": 256, "head_dim": 32}, 28),
        ("C1024 ff", {"d_ff": 1024}, 53),
        ("E", {"positions": jf.Learned()}, 65),
    ],
)
def test_rows_of_table_3_are_changes_of_the_base_model(row, changes, millions):
    # Every size the paper prints is that of 41,000 embedding rows ("about 37000" in section 5.1).
    config = replace(jf.TRANSFORMER_BASE, vocab_size=41_000, scan_layers=True, **changes)
    assert abs(count(parameters(EncoderDecoder(config), 2)) / 1e6 - millions) < 0.7, row


# Names.


@pytest.mark.parametrize(
    ("tied", "more"),
    [
        ("all", {}),
        ("output", {"source_embedding/table": (19, 12)}),
        ("inputs", {"output/kernel": (12, 17)}),
        ("none", {"source_embedding/table": (19, 12), "output/kernel": (12, 17)}),
    ],
)
def test_tying_leaves_out_what_is_shared(tied, more, leaf_shapes):
    one = "source_embedding/table" in more
    config = replace(
        TINY, embeddings=jf.EmbeddingOptions(tied=tied), source_vocab_size=19 if one else None
    )
    shapes = leaf_shapes(parameters(EncoderDecoder(config), 2))
    outside = {name: shape for name, shape in shapes.items() if "blocks" not in name}
    assert outside == {"embedding/table": (17, 12)} | more
    shapes = leaf_shapes(parameters(DecoderOnly(config), 1))
    assert ("output/kernel" in shapes) == ("output/kernel" in more)
    assert "source_embedding/table" not in shapes


def test_relative_positions_have_one_table_a_stack_and_none_for_the_memory(leaf_shapes):
    config = replace(TINY, positions=jf.Relative(), num_decoder_layers=2)
    shapes = leaf_shapes(parameters(EncoderDecoder(config), 2))
    tables = {name: shape for name, shape in shapes.items() if "relative" in name}
    assert tables == {
        "encoder/positions/relative_bias": (32, 3),
        "decoder/positions/relative_bias": (32, 3),
    }


@pytest.mark.parametrize("model", [EncoderDecoder, DecoderOnly, EncoderOnly])
def test_a_model_without_layers_is_refused(model):
    config = replace(TINY, num_encoder_layers=0, num_decoder_layers=0)
    with pytest.raises(ConfigError, match="coder_layers=0"):
        parameters(model(config), 2 if model is EncoderDecoder else 1)


# The equations of the paper, again, in float64.


@dataclass
class Paper:
    """Vaswani et al. 2017 read aloud: one encoder and one decoder block, post-norm, ReLU.

    `keep` holds the dropout masks by site; without it, `sites` collects what is asked for.
    """

    params: Any
    rates: dict[str, float]
    keep: dict[str, np.ndarray] | None = None
    sites: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def drop(self, site, x):
        self.sites[site] = x.shape
        rate = self.rates.get(site.rpartition("/")[2], self.rates["elsewhere"])
        return x if self.keep is None else x * self.keep[site] / (1 - rate)

    def embed(self, tokens, path):
        x = self.params["embedding"]["table"][tokens].astype(np.float64) * math.sqrt(12)
        return self.drop(f"{path}/input", x + positional_encoding(tokens.shape[1], 12))

    def attention(self, x, memory, allowed, p, path):
        out = p["out"]["bias"].astype(np.float64)
        heads = []
        for head in range(3):
            q, k, v = (
                y @ p[name]["kernel"][:, head].astype(np.float64) + p[name]["bias"][head]
                for name, y in [("query", x), ("key", memory), ("value", memory)]
            )
            logits = np.where(allowed, q @ k.transpose(0, 2, 1) / math.sqrt(4), -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            heads.append((weights / weights.sum(-1, keepdims=True), v))
        weights = self.drop(f"{path}/weights", np.stack([w for w, _ in heads], axis=1))
        for head, (_, v) in enumerate(heads):
            out = out + weights[:, head] @ v @ p["out"]["kernel"][head]
        return out

    def feed_forward(self, x, p, path):
        hidden = np.maximum(0, x @ p["up"]["kernel"] + p["up"]["bias"])
        return self.drop(f"{path}/hidden", hidden) @ p["down"]["kernel"] + p["down"]["bias"]

    def add_and_norm(self, x, y, p, path):
        x = x + self.drop(path, y)
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def sublayer(self, x, memory, allowed, path, name):
        side, block = path.split("/")
        p = self.params[side][block]
        if name == "feed_forward":
            y = self.feed_forward(x, p[name], f"{path}/{name}")
        else:
            y = self.attention(
                x, x if memory is None else memory, allowed, p[name], f"{path}/{name}"
            )
        return self.add_and_norm(x, y, p[f"{name}_norm"], f"{path}/{name}_norm")

    def logits(self, source, target, padding_mask):
        keys = padding_mask[:, None, :]
        memory = self.embed(source, "encoder")
        memory = self.sublayer(memory, None, keys, "encoder/blocks_0", "attention")
        memory = self.sublayer(memory, None, None, "encoder/blocks_0", "feed_forward")
        causal = np.tril(np.ones((target.shape[1],) * 2, bool))
        x = self.embed(target, "decoder")
        x = self.sublayer(x, None, causal, "decoder/blocks_0", "attention")
        x = self.sublayer(x, memory, keys, "decoder/blocks_0", "cross_attention")
        x = self.sublayer(x, None, None, "decoder/blocks_0", "feed_forward")
        return x @ self.params["embedding"]["table"].T


RATES = {"weights": 0.3, "hidden": 0.2, "elsewhere": 0.1}


@dataclass
class Sentences:
    """A tiny encoder-decoder with random parameters and two ragged sentences."""

    model: EncoderDecoder
    params: Any
    source: np.ndarray
    target: np.ndarray
    padding_mask: np.ndarray
    apply: Any


@pytest.fixture(scope="module")
def sentences(random_params) -> Sentences:
    rng = np.random.default_rng(1)
    model = EncoderDecoder(
        replace(
            TINY,
            dropout_rate=0.1,
            attention=jf.AttentionOptions(dropout_rate=0.3),
            feed_forward=jf.FeedForwardOptions(dropout_rate=0.2),
        )
    )
    source, target = rng.integers(0, V, (B, S)), rng.integers(0, V, (B, T))
    params = random_params(model, source, target)

    @jax.jit
    def apply(params, source, target, valid, dropout_rng):
        return model.apply({"params": params}, source, target, valid, dropout_rng=dropout_rng)

    valid = np.arange(S) < np.array([[5], [3]])
    return Sentences(model, params, source, target, valid, apply)


def test_the_model_is_the_paper(sentences, assert_equal):
    s = sentences
    expected = Paper(s.params, RATES).logits(s.source, s.target, s.padding_mask)
    assert_equal(s.apply(s.params, s.source, s.target, s.padding_mask, None), expected)


def test_dropout_acts_where_the_paper_says(sentences, assert_equal):
    """On each sub-layer's output before it is added, on embeddings plus positions (5.4)."""
    s = sentences
    dropout_rng = DropoutRng(jax.random.key(9), np.array([8, 5]))
    paper = Paper(s.params, RATES)
    without = paper.logits(s.source, s.target, s.padding_mask)
    assert len(paper.sites) == 12

    @jax.jit
    def masks(dropout_rng):
        rates = {site: RATES.get(site.rpartition("/")[2], 0.1) for site in paper.sites}
        return {site: dropout_rng.keep_mask(site, paper.sites[site], rates[site]) for site in rates}

    paper.keep = jax.tree.map(np.asarray, masks(dropout_rng))
    expected = paper.logits(s.source, s.target, s.padding_mask)
    given = s.apply(s.params, s.source, s.target, s.padding_mask, dropout_rng)
    assert_equal(given, expected)
    assert np.abs(given - without).max() > 0.1


# The three families.


def test_a_bfloat16_model_keeps_float32_parameters_and_stays_near(random_params, assert_equal):
    config = replace(
        TINY,
        norm=jf.NormOptions("rms", placement="pre"),
        feed_forward=jf.FeedForwardOptions("silu", gated=True),
    )
    low, ids = replace(config, dtype="bfloat16"), np.arange(B * T).reshape(B, T) % V
    params = random_params(EncoderDecoder(low), ids, ids)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    logits = [jax.jit(EncoderDecoder(c).apply)({"params": params}, ids, ids) for c in (low, config)]
    assert [leaf.dtype.name for leaf in logits] == ["float32", "float32"]
    assert_equal(logits[0], logits[1], 0.15)
    assert np.abs(logits[1]).max() > 1.0


def test_a_decoding_step_computes_nothing_twice():
    """The source's keys and values are not projected again at every step for every beam."""
    model = EncoderDecoder(replace(jf.TRANSFORMER_BASE, num_encoder_layers=1, num_decoder_layers=1))
    batch, width = 2, 4
    params = parameters(model, 2)

    def start(params, source, valid):
        settings = {"max_length": 306, "num_beams": width, "method": "init_cache"}
        return model.apply({"params": params}, source, valid, **settings)

    def step(params, tokens, cache):
        return model.apply({"params": params}, tokens, cache, method="decode_step")

    valid = jax.ShapeDtypeStruct((batch, 256), bool)
    cache = jax.eval_shape(start, params, ids(batch, 256), valid)
    work = jax.jit(step).lower(params, ids(batch, width, 1), cache).cost_analysis()
    assert work["flops"] / (batch * width) < 52e6  # 48: the vocabulary's 38 and a layer's 10


# What is refused.


def fitted(family, random_params, **changes):
    """A model, its parameters, and inputs of ragged lengths."""
    model, ids = family(replace(TINY, **changes)), np.arange(B * T).reshape(B, T)
    inputs = (ids[:, :S], ids) if family is EncoderDecoder else (ids,)
    return model, random_params(model, *inputs), inputs


@pytest.mark.parametrize(("family", "wrong"), [(EncoderDecoder, V), (MaskedLanguageModel, -1)])
def test_an_id_outside_the_vocabulary_is_refused_unless_traced(family, wrong, random_params):
    model, params, (first, *others) = fitted(family, random_params)
    first[1, 3] = wrong
    with pytest.raises(ValueError, match=f"id {wrong} "):
        model.apply({"params": params}, first, *others)
    jax.eval_shape(model.apply, {"params": params}, first, *others)


def test_parameters_without_their_collection_are_refused_with_what_to_write(random_params):
    model, params, inputs = fitted(DecoderOnly, random_params)
    with pytest.raises(
        ValueError, match=r'no parameter .*table: .* model.apply\({"params": params}'
    ):
        model.apply(params, *inputs)


def test_the_name_of_an_attention_function_is_refused():
    with pytest.raises(ConfigError, match="attention_fn=.cudnn."):
        parameters(DecoderOnly(TINY, "cudnn"), 1)


@pytest.mark.long
@pytest.mark.parametrize("family", [EncoderDecoder, DecoderOnly])
def test_each_remat_needs_less_memory_and_changes_nothing_else(family, random_params, assert_equal):
    config = replace(TINY, num_encoder_layers=2, num_decoder_layers=2, dropout_rate=0.3)
    config = replace(config, max_len=64, d_ff=48, feed_forward=jf.FeedForwardOptions("gelu"))
    inputs = [np.arange(B * 64).reshape(B, 64) % V] * (2 if family is EncoderDecoder else 1)
    params = random_params(family(config), *inputs)
    dropout_rng = DropoutRng(jax.random.key(5), jnp.arange(B))
    # Without the barriers a CPU's compiler merges what is computed twice.
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    slopes, temporary = [], []
    for block in [REMAT[name] for name in ("none", "attention", "matmuls", "blocks")]:
        model = family(config, block=block)

        def loss(params, model=model):
            return model.apply({"params": params}, *inputs, dropout_rng=dropout_rng).var()

        compiled = jax.jit(jax.grad(loss), compiler_options=options).lower(params).compile()
        slopes.append(compiled(params))
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    for other in slopes[1:]:
        jax.tree.map(lambda *leaves: assert_equal(*leaves, 1e-6), other, slopes[0])
    assert temporary == sorted(set(temporary), reverse=True)


def test_gpt2_starts_with_small_residual_projections():
    config = replace(jf.GPT2, vocab_size=V, d_model=60, num_heads=3, d_ff=240, num_decoder_layers=2)
    places = ("attention", "out"), ("feed_forward", "down"), ("feed_forward", "up")

    @jax.jit  # compiles the initializers of three matrices alone
    def deviations():
        params = DecoderOnly(config).init(jax.random.key(0), np.zeros((B, T), int))["params"]
        block = params["decoder"]["blocks_1"]
        return [block[part][name]["kernel"].std() for part, name in places]

    np.testing.assert_allclose(deviations(), [0.01, 0.01, 0.02], rtol=0.05)


@pytest.mark.parametrize("family", [EncoderDecoder, DecoderOnly, EncoderOnly, MaskedLanguageModel])
def test_a_model_takes_vectors_in_place_of_ids(family, random_params, assert_equal):
    config = replace(TINY, embeddings=jf.EmbeddingOptions(num_types=2))
    config = config if family in (EncoderOnly, MaskedLanguageModel) else TINY
    tokens = np.random.default_rng(2).integers(0, V, (B, T))
    model, inputs = family(config), (tokens,) * (1 + (family is EncoderDecoder))
    params = random_params(model, *inputs)
    body = params["encoder"] if family is MaskedLanguageModel else params
    embedding = jf.Embedding(V, config.d_model)
    vectors = embedding.apply({"params": body["embedding"]}, tokens)

    @jax.jit
    def run(params, *inputs):
        return model.apply({"params": params}, *inputs)

    expected = jax.tree.leaves(run(params, *inputs))
    for found, wanted in zip(
        jax.tree.leaves(run(params, *[vectors] * len(inputs))), expected, strict=True
    ):
        assert_equal(found, wanted, 1e-6)


@pytest.mark.parametrize("family", [EncoderDecoder, DecoderOnly])
def test_a_step_of_decoding_takes_vectors_in_place_of_ids(family, random_params, assert_equal):
    tokens, model = np.random.default_rng(3).integers(0, V, (B, 3, 2)), family(TINY)
    source = np.ones((B, S), int)
    params = random_params(model, *[source] * (1 + (family is EncoderDecoder)))
    start = source if family is EncoderDecoder else B
    vectors = jf.Embedding(V, 12).apply({"params": params["embedding"]}, tokens)

    @jax.jit
    def step(params, tokens):
        apply = partial(model.apply, {"params": params})
        cache = apply(start, max_length=5, num_beams=3, method="init_cache")
        return apply(tokens, cache, method="decode_step")[0]

    found = step(params, vectors)
    assert found.shape == (B, 3, 2, V)
    assert_equal(found, step(params, tokens), 1e-6)
