"""The Transformer and the GPT in PyTorch are ours, weight for weight. Run with `-m peer`."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.torch_reference import compare, weights
from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    NormOptions,
    OutputOptions,
    Rotary,
    Sinusoidal,
    TransformerConfig,
)
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.text.data import PairBatch, Stream, Tokens, iterate_once
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import causal_loss, seq2seq_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import init_train_state, make_eval_step, make_train_step
from tests.experiments.tiny_runs import translation_config

pytestmark = pytest.mark.peer
pytest.importorskip("torch", reason="the peer tests need torch==2.13.0")
from experiments.torch_reference.gpt import GPT  # noqa: E402
from experiments.torch_reference.trainer import Trainer  # noqa: E402
from experiments.torch_reference.transformer import Transformer  # noqa: E402

CONFIG = TransformerConfig(
    vocab_size=23,
    d_model=20,
    d_ff=28,
    num_heads=5,
    num_encoder_layers=2,
    num_decoder_layers=1,
    max_len=11,
)
GPT_CONFIG = TransformerConfig(
    vocab_size=23,
    d_model=20,
    d_ff=28,
    num_heads=5,
    num_decoder_layers=2,
    max_len=11,
    norm=NormOptions(placement="pre", eps=1e-5),
    feed_forward=FeedForwardOptions("gelu"),
    embeddings=EmbeddingOptions(tied="output", scale=False),
    positions=Learned(),
    use_bias=False,
    initializer="scaled_normal",
)
LEARNING = OptimizerConfig(
    schedule="cosine",
    learning_rate=1e-2,
    warmup_steps=4,
    total_steps=13,
    b2=0.99,
    eps=1e-8,
    grad_clip_norm=1.0,
    weight_decay=0.1,
)
SMOOTHING = 0.1


def pairs(seed: int) -> PairBatch:
    """Three pairs and a row without one."""
    rng = np.random.default_rng(seed)
    source, target = np.full((4, 7), PAD, np.int32), np.full((4, 6), PAD, np.int32)
    for side, lengths in ((source, (7, 4, 5)), (target, (3, 6, 5))):
        for row, length in enumerate(lengths):
            side[row, :length] = rng.integers(4, CONFIG.vocab_size, length)
    return PairBatch(source, target, np.arange(4, dtype=np.int32))


class Side(NamedTuple):
    """A model of ours and the reference's: `reference(config)` makes it, with random weights.

    `inputs(batch)` are those of ours.
    """

    config: TransformerConfig
    model: Callable[[TransformerConfig], Any]
    loss: Callable[[Any], Any]
    batch: Callable[[int], Any]
    inputs: Callable[[Any], tuple]
    reference: Callable[[TransformerConfig], Any]

    def pair(self, random_params: Any, config: TransformerConfig) -> tuple[Any, Any, Any]:
        """Our model, its parameters, all random, and the reference with the same weights."""
        model, reference = self.model(config), self.reference(config)
        params = random_params(model, *self.inputs(self.batch(0)))
        weights.load_params(params, reference, config)
        return model, params, reference


ROWS = {"batch_size": 3, "seq_len": 11, "isolate_documents": False}
TOKENS = Tokens.from_lists([np.random.default_rng(3).integers(0, GPT_CONFIG.vocab_size, 331)])
STREAM = Stream(TOKENS, seed=7, **ROWS)
SIDES = {
    "transformer": Side(
        config=CONFIG,
        model=EncoderDecoder,
        loss=lambda model: seq2seq_loss(model, pad=PAD, label_smoothing=SMOOTHING),
        batch=pairs,
        inputs=lambda batch: (batch.source, batch.target[:, :-1], batch.source != PAD),
        reference=lambda config: Transformer(config, SMOOTHING),
    ),
    "gpt": Side(
        config=GPT_CONFIG,
        model=DecoderOnly,
        loss=causal_loss,
        # The first is the last of an epoch, which is not full: some labels do not count.
        batch=lambda number: STREAM.batch(STREAM.steps_per_epoch - 1 + number),
        inputs=lambda batch: (batch.tokens[:, :-1],),
        reference=GPT,
    ),
}


def assert_trees_equal(given, expected, assert_equal, tolerance=1e-5):
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: assert_equal(a, b, tolerance), given, expected)


PRE, WIDE_EPS = NormOptions(placement="pre"), NormOptions(eps=1e-5)
GELU, GELU_TANH, SILU = (FeedForwardOptions(name) for name in ("gelu", "gelu_tanh", "silu"))
CASES = [
    ("transformer", {}),
    ("transformer", {"norm": PRE, "feed_forward": GELU, "use_bias": False}),
    ("transformer", {"norm": WIDE_EPS, "feed_forward": SILU, "d_model": 15}),
    ("gpt", {}),
    ("gpt", {"feed_forward": GELU_TANH, "use_bias": True}),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_logits_loss_and_gradients_are_the_references_and_weights_come_back(
    torch, random_params, assert_equal, name, changes
):
    side = SIDES[name]
    config, batch = replace(side.config, **changes), side.batch(0)
    model, params, reference = side.pair(random_params, config)
    back = weights.params_of(reference, config)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, params)))

    @jax.jit
    def run(params):
        logits = model.apply({"params": params}, *side.inputs(batch))
        return logits, jax.value_and_grad(side.loss(model), has_aux=True)(params, batch, None)

    ours, ((total, tokens), grads) = run(params)
    theirs = reference(*map(torch.tensor, side.inputs(batch))).detach()
    # The fourth row is no pair: ours attends to nothing there, the reference to padding.
    assert_equal(ours[:3], theirs[:3])
    nats, count = reference.loss(batch)
    nats.backward()
    assert 0 < tokens == count.item() < np.prod(ours.shape[:2])
    assert_equal(total, nats.item())
    assert_trees_equal(weights.gradients_of(reference, config), grads, assert_equal, 1e-4)


def test_weights_of_another_size_are_refused_by_name(random_params):
    _, params, reference = SIDES["transformer"].pair(random_params, CONFIG)
    deeper = replace(CONFIG, num_decoder_layers=2)
    with pytest.raises(ConfigError, match="decoder/blocks_1/attention/query/kernel is missing"):
        weights.load_params(params, reference, deeper)
    state = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    state |= {"decoder.final_norm.weight": np.zeros(3)}
    with pytest.raises(DataError, match="decoder.final_norm.weight is unknown"):
        weights.to_jax(state, weights.weight_map_of(CONFIG), params)


def test_ten_updates_are_the_references(random_params, assert_equal):
    """Of the GPT: those of the Transformer are what the comparison below compares."""
    side = SIDES["gpt"]
    model, params, reference = side.pair(random_params, side.config)
    trainer = Trainer(reference, LEARNING)
    optimizer = make_optimizer(LEARNING, axes=parameter_axes(model))
    step = jax.jit(make_train_step(side.loss(model), optimizer))
    state = init_train_state(jax.tree.map(jnp.asarray, params), optimizer, jax.random.key(0))
    for number in range(10):
        theirs = trainer.step(side.batch(number))
        state, ours = step(state, side.batch(number))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_equal(ours[name], theirs[name], 1e-4)
    evaluate = jax.jit(make_eval_step(side.loss(model)))
    held_out = list(iterate_once(TOKENS, **ROWS))
    sums = [evaluate(state.params, batch) for batch in held_out]
    reference.eval()
    theirs = [reference.loss(batch) for batch in held_out]
    tokens = sum(count.item() for _, count in theirs)
    assert tokens == sum(metrics["tokens"] for metrics in sums) == 330
    nats = sum(total.item() for total, _ in theirs)
    assert_equal(sum(metrics["loss"] for metrics in sums), nats, 1e-4)

    trained = weights.params_of(reference, side.config)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), trained, params)
    assert max(jax.tree.leaves(moved)) > 4e-2
    assert_trees_equal(trained, state.params, assert_equal, 1e-4)


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES)
def test_the_reference_starts_as_our_model_does(side):
    config = replace(side.config, d_model=120, d_ff=90, vocab_size=101)
    theirs = flatten(weights.params_of(side.reference(config), config))
    model, inputs = side.model(config), side.inputs(side.batch(0))
    ours = flatten(jax.jit(model.init)(jax.random.key(0), *inputs)["params"])
    assert jax.tree.map(np.shape, theirs) == jax.tree.map(np.shape, ours)
    for path, leaf in ours.items():
        assert theirs[path].mean() == pytest.approx(float(leaf.mean()), abs=0.03), path
        assert theirs[path].std() == pytest.approx(float(leaf.std()), rel=0.1), path


def test_dropout_of_the_reference_acts_at_our_rates(torch):
    reference = SIDES["transformer"].reference(replace(CONFIG, dropout_rate=0.5))
    x = torch.ones(200, 11, 20)
    reference.train()
    kept = reference.positions(x) != 0
    assert kept.float().mean() == pytest.approx(0.5, abs=0.02)
    reference.eval()
    assert torch.equal(reference.positions(x), x + reference.positions.table)


def test_what_the_reference_lacks_is_refused(torch):
    transformer, gpt = (SIDES[name].reference for name in ("transformer", "gpt"))
    for make, changes, message in (
        (transformer, {"positions": Rotary()}, r"positions=Rotary\(.*\) is not .* give .*=Sinu"),
        (transformer, {"positions": Sinusoidal(layout="halves")}, "layout='halves'.* is not supp"),
        (transformer, {"output": OutputOptions(bias=True)}, "output.bias=True is .*bias=None"),
        (transformer, {"embeddings": EmbeddingOptions(zero_id=1)}, "embeddings.zero_id=1 is not"),
        (gpt, {"positions": Rotary()}, r"positions=Rotary\(.*\) is not .* positions=Learned\(\)"),
    ):
        config = replace(CONFIG if make is transformer else GPT_CONFIG, num_heads=10)
        with pytest.raises(ConfigError, match=message):
            make(replace(config, **changes))
    with pytest.raises(ConfigError, match="name='lion' is not supported by the PyTorch ref"):
        Trainer(gpt(GPT_CONFIG), replace(LEARNING, name="lion"))
    tokens = torch.ones(2, 12, dtype=torch.long)
    with pytest.raises(ValueError, match="12 tokens was given, but the positions end at max_len"):
        transformer(CONFIG)(tokens, tokens[:, :3])


def test_an_update_that_is_not_finite_is_skipped(torch):
    gpt = SIDES["gpt"]
    trainer = Trainer(gpt.reference(GPT_CONFIG), LEARNING)
    with torch.no_grad():
        trainer.model.final_norm.weight *= np.inf
        before = [weights.clone() for weights in trainer.model.parameters()]
    skipped = [trainer.step(gpt.batch(0))["consecutive_skips"] for _ in range(2)]
    assert skipped == [1, 2]
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)
    with torch.no_grad():
        trainer.model.final_norm.weight.fill_(1.0)
    metrics = trainer.step(gpt.batch(1))
    assert (metrics["skipped"], metrics["consecutive_skips"]) == (2, 0)
    assert trainer.schedule.get_last_lr()[0] == pytest.approx(1e-2 * 2 / 4)


@pytest.fixture
def small(tmp_path):
    """A comparison on pairs of one's own, with dropout."""
    config = translation_config(tmp_path, model__dropout_rate=0.3)
    return replace(
        compare.presets()["grammar"],
        model=replace(config.model, positions=Sinusoidal()),
        data=config.data,
        steps=4,
        runs=config.runs,
    )


def test_the_comparison_prints_and_keeps_that_the_two_are_one(torch, small, tmp_path, capsys):
    compare.main(small)
    folder = tmp_path / "runs" / "torch_reference" / "grammar"
    found = json.loads((folder / "comparison.json").read_text())
    assert found["agreement"]["logits"] < 1e-5
    assert 0.0 < found["agreement"]["gradient"] < 1e-4
    course = found["trajectory"]
    assert len(course["jaxformer"]) == len(course["reference"]) == 4
    np.testing.assert_allclose(course["jaxformer"], course["reference"], rtol=1e-4)
    assert course["jaxformer"] != course["rounding"]
    # What rounding alone moves: Adam follows gradients that are nothing but rounding, too.
    assert course["weights"] < 5 * course["rounding_weights"]
    said = capsys.readouterr().out
    assert f"{course['jaxformer'][0]:.4f}" in said


def test_a_comparison_of_no_steps_is_refused(small):
    with pytest.raises(ConfigError, match="steps=0, but it must be at least 1"):
        replace(small, steps=0)
