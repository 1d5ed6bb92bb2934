"""The models in PyTorch are ours, and so are the runs that it trains. Run with `-m peer`."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.results.comparing import compare as compare_runs
from experiments.language_modelling import load_run as language_run
from experiments.language_modelling import train as language_train
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.torch_reference import train, weights
from experiments.translation import load_run as translation_run
from experiments.translation import train as translation_train
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
from jaxformer.errors import ConfigError, DataError, MissingExtra
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.text.data import PairBatch, Stream, Tokens
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import causal_loss, seq2seq_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import init_train_state, make_train_step
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import changed, translation_config

pytestmark = pytest.mark.peer
pytest.importorskip("torch", reason="the peer tests need torch==2.13.0")
from experiments.torch_reference.gpt import GPT  # noqa: E402
from experiments.torch_reference.trainer import Trainer  # noqa: E402
from experiments.torch_reference.transformer import Transformer  # noqa: E402

SIZES = {"vocab_size": 23, "d_model": 20, "d_ff": 28, "num_heads": 5, "max_len": 11}
CONFIG = TransformerConfig(**SIZES, num_encoder_layers=2, num_decoder_layers=1)
GPT_CONFIG = TransformerConfig(
    **SIZES,
    num_decoder_layers=2,
    norm=NormOptions(placement="pre", eps=1e-5),
    feed_forward=FeedForwardOptions("gelu"),
    embeddings=EmbeddingOptions(tied="output", scale=False),
    positions=Learned(),
    use_bias=False,
    initializer="scaled_normal",
)
LEARNING = OptimizerConfig(
    schedule="cosine", learning_rate=1e-2, warmup_steps=4, total_steps=13, b2=0.99, eps=1e-8
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


TOKENS = Tokens.from_lists([np.random.default_rng(3).integers(0, GPT_CONFIG.vocab_size, 331)])
STREAM = Stream(TOKENS, batch_size=3, seq_len=11, isolate_documents=False, seed=7)


class Side(NamedTuple):
    """A model of ours and the reference's; `inputs(batch)` are those of ours."""

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


def assert_trees_equal(given, expected, assert_equal, tolerance=1e-4):
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: assert_equal(a, b, tolerance), given, expected)


GELU, GELU_TANH, SILU = (FeedForwardOptions(name) for name in ("gelu", "gelu_tanh", "silu"))
CASES = [
    ("transformer", {}),
    (
        "transformer",
        {"norm": NormOptions(placement="pre"), "feed_forward": GELU, "use_bias": False},
    ),
    ("transformer", {"norm": NormOptions(eps=1e-5), "feed_forward": SILU, "d_model": 15}),
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
    assert_trees_equal(weights.params_of(reference, config), params, assert_equal, 0.0)

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
    assert_trees_equal(weights.gradients_of(reference, config), grads, assert_equal)


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES)
def test_ten_updates_are_the_references(side, random_params, assert_equal):
    # A key's bias has a gradient of rounding alone: with a large eps Adam does not follow it.
    learning = replace(LEARNING, grad_clip_norm=1.0, weight_decay=0.1, eps=1e-3)
    model, params, reference = side.pair(random_params, side.config)
    trainer = Trainer(reference, learning)
    optimizer = make_optimizer(learning, axes=parameter_axes(model))
    step = jax.jit(make_train_step(side.loss(model), optimizer))
    state = init_train_state(jax.tree.map(jnp.asarray, params), optimizer, jax.random.key(0))
    for number in range(10):
        theirs = trainer.step(side.batch(number))
        state, ours = step(state, side.batch(number))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_equal(ours[name], theirs[name], 1e-4)
    trained = weights.params_of(reference, side.config)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), trained, params)
    assert max(jax.tree.leaves(moved)) > 4e-2
    assert_trees_equal(trained, state.params, assert_equal)


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


def test_dropout_of_the_reference_acts_at_our_rates_when_it_trains(torch):
    positions = Transformer(replace(CONFIG, dropout_rate=0.5)).positions
    x = torch.ones(200, 11, 20)
    assert (positions(x) != 0).float().mean() == pytest.approx(0.5, abs=0.02)
    assert torch.equal(positions.eval()(x), x + positions.table)


def test_what_the_reference_lacks_is_refused(torch, random_params):
    for make, changes, message in (
        (Transformer, {"positions": Rotary()}, r"positions=Rotary\(.*\) is not .* give .*=Sinu"),
        (Transformer, {"positions": Sinusoidal(layout="halves")}, "layout='halves'.* is not supp"),
        (Transformer, {"output": OutputOptions(bias=True)}, "output.bias=True is .*bias=None"),
        (GPT, {"positions": Rotary()}, r"positions=Rotary\(.*\) is not .* positions=Learned\(\)"),
    ):
        config = replace(CONFIG if make is Transformer else GPT_CONFIG, num_heads=10)
        with pytest.raises(ConfigError, match=message):
            make(replace(config, **changes))
    with pytest.raises(ConfigError, match="name='lion'"):
        Trainer(GPT(GPT_CONFIG), replace(LEARNING, name="lion"))
    tokens = torch.ones(2, 12, dtype=torch.long)
    with pytest.raises(ValueError, match="12 tokens"):
        Transformer(CONFIG)(tokens, tokens[:, :3])
    _, params, reference = SIDES["transformer"].pair(random_params, CONFIG)
    with pytest.raises(ConfigError, match="decoder/blocks_1/attention/query/kernel"):
        weights.load_params(params, reference, replace(CONFIG, num_decoder_layers=2))
    state = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    with pytest.raises(DataError, match="decoder.final_norm.weight"):
        more = {"decoder.final_norm.weight": np.zeros(3)}
        weights.to_jax(state | more, weights.weight_map_of(CONFIG), params)


def test_an_update_that_is_not_finite_is_skipped(torch):
    trainer, batch = Trainer(GPT(GPT_CONFIG), LEARNING), SIDES["gpt"].batch
    with torch.no_grad():
        trainer.model.final_norm.weight *= np.inf
        before = [weights.clone() for weights in trainer.model.parameters()]
    assert [trainer.step(batch(0))["consecutive_skips"] for _ in range(2)] == [1, 2]
    assert all(map(torch.equal, before, trainer.model.parameters()))
    with torch.no_grad():
        trainer.model.final_norm.weight.fill_(1.0)
    metrics = trainer.step(batch(1))
    assert (metrics["skipped"], metrics["consecutive_skips"]) == (2, 0)
    assert trainer.schedule.get_last_lr()[0] == pytest.approx(1e-2 * 2 / 4)


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """A short run on a text of one's own, 4,009 characters long."""
    folder = tmp_path_factory.mktemp("characters")
    text = folder / "text.txt"
    text.write_text("to be or not to be\n" * 211, encoding="utf-8")
    return changed(
        LANGUAGE_PRESETS["shakespeare_char_cpu"],
        model__d_model=32,
        model__d_ff=52,
        model__num_decoder_layers=1,
        data__train=(str(text),),
        data__batch_size=7,
        data__seq_len=19,
        optimizer__learning_rate=1e-2,
        optimizer__warmup_steps=3,
        optimizer__total_steps=17,
        training__log_every=1,
        training__evaluate_every=0,
        sampling__max_new_tokens=5,
        runs=str(folder / "runs"),
    )


@pytest.fixture(scope="module")
def reversed_words(tmp_path_factory):
    """A short translation of lines in reverse."""
    return translation_config(
        tmp_path_factory.mktemp("pairs"),
        model__positions=Sinusoidal(),
        model__dropout_rate=0.1,
        optimizer__warmup_steps=3,
        optimizer__total_steps=13,
        training__evaluate_every=7,
        training__save_every=5,
        training__average_checkpoints=2,
    )


@pytest.mark.parametrize("experiment", ["language_modelling", "translation"])
def test_a_run_of_pytorch_is_measured_and_compared_as_one_of_jaxformer(experiment, request):
    ours, load_run, kind, config, metric = {
        "language_modelling": (
            *(language_train, language_run.load_run, DecoderOnly, "characters", "loss"),
        ),
        "translation": (
            *(translation_train, translation_run.load_run, EncoderDecoder),
            *("reversed_words", "chrf"),
        ),
    }[experiment]
    config = request.getfixturevalue(config)
    train.main(config)
    ours = ours.train(config).folder
    folder = ours.parents[1] / "torch_reference" / experiment / ours.name
    assert isinstance(load_run(folder).model, kind)
    losses = [line["loss"] for line in metrics_of(folder, "loss")]
    assert len(losses) == len(metrics_of(ours, "loss")) == config.optimizer.total_steps
    assert losses[-1] < losses[0] - 0.1, "or nothing was learned"
    compared = compare_runs([ours, folder], metric)
    assert [group.runs[0].folder for group in compared.groups] == [ours, folder]
    assert compared.differences[0].paired
    if experiment == "language_modelling":
        return  # one checkpoint, at its end
    (folder / "checkpoints" / f"{len(losses)}").rename(folder / "gone")
    with pytest.raises(ConfigError, match="has been trained"):
        train.main(config)


def test_options_that_only_jaxformer_has_and_a_missing_torch_are_named(
    characters, reversed_words, monkeypatch
):
    own = replace(characters.data, isolate_documents=True)
    with pytest.raises(ConfigError, match="data.isolate_documents=True"):
        train.main(replace(characters, data=own))
    z_loss = replace(reversed_words.training, z_loss=0.5)
    with pytest.raises(ConfigError, match="training.z_loss=0.5"):
        train.main(replace(reversed_words, training=z_loss))
    monkeypatch.setitem(sys.modules, "torch", None)
    for config in (characters, reversed_words):
        with pytest.raises(MissingExtra, match="torch"):
            train.main(config)
