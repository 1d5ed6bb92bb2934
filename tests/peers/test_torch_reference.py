"""The Transformer in PyTorch is ours, weight for weight. Run with `-m peer`; needs torch."""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.torch_reference import compare
from experiments.translation.presets import DataConfig, Files
from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
    OutputOptions,
    Rotary,
    Sinusoidal,
    TransformerConfig,
)
from jaxformer.errors import ConfigError, MissingExtra
from jaxformer.nn.models import EncoderDecoder
from jaxformer.text.data import PairBatch
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import seq2seq_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.parameters import flatten
from jaxformer.training.train_step import init_train_state, make_eval_step, make_train_step

pytestmark = pytest.mark.peer

CONFIG = TransformerConfig(
    vocab_size=23,
    d_model=20,
    d_ff=28,
    num_heads=5,
    num_encoder_layers=2,
    num_decoder_layers=1,
    max_len=11,
)
LEARNING = OptimizerConfig(
    schedule="cosine", learning_rate=1e-2, warmup_steps=4, total_steps=13, grad_clip_norm=1.0
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


@pytest.fixture(scope="module")
def batch():
    return pairs(0)


@pytest.fixture
def make_reference(torch, batch, random_params):
    """Our parameters of a config, all random, and the reference with the same weights."""
    from experiments.torch_reference import weights
    from experiments.torch_reference.transformer import Transformer

    def make(config=CONFIG):
        params = random_params(EncoderDecoder(config), batch.source, batch.target)
        reference = Transformer(config, SMOOTHING)
        weights.load_params(params, reference, config)
        return params, reference

    return make


def assert_trees_equal(given, expected, assert_equal, tolerance=1e-5):
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: assert_equal(a, b, tolerance), given, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "norm": NormOptions(placement="pre"),
            "feed_forward": FeedForwardOptions("gelu"),
            "use_bias": False,
        },
        {"d_model": 15, "feed_forward": FeedForwardOptions("silu"), "norm": NormOptions(eps=1e-5)},
    ],
)
def test_logits_loss_and_gradients_are_the_references(
    torch, batch, make_reference, assert_equal, changes
):
    from experiments.torch_reference import weights

    config = replace(CONFIG, **changes)
    params, reference = make_reference(config)
    model = EncoderDecoder(config)
    inputs = batch.target[:, :-1]
    ours = jax.jit(model.apply)({"params": params}, batch.source, inputs, batch.source != PAD)
    theirs = reference(*map(torch.tensor, (batch.source, inputs, batch.source != PAD)))
    # The last row is no pair: ours attends to nothing there, the reference to padding.
    assert_equal(ours[:3], theirs.detach()[:3])

    nats, count = reference.loss(batch)
    nats.backward()
    loss = seq2seq_loss(model, pad=PAD, label_smoothing=SMOOTHING)
    (total, tokens), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, None)
    assert tokens == count.item() == 11
    assert_equal(total, nats.item())
    assert_trees_equal(weights.gradients_of(reference, config), grads, assert_equal, 1e-4)


def test_weights_come_back_bit_for_bit(make_reference):
    from experiments.torch_reference import weights

    for config in (CONFIG, replace(CONFIG, norm=NormOptions(placement="pre"), use_bias=False)):
        params, reference = make_reference(config)
        back = weights.params_of(reference, config)
        assert jax.tree.structure(back) == jax.tree.structure(params)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, params)))


def test_weights_of_another_size_are_refused_by_name(make_reference):
    from experiments.torch_reference import weights

    params, reference = make_reference()
    deeper = replace(CONFIG, num_decoder_layers=2)
    with pytest.raises(ConfigError, match="decoder/blocks_1/attention/query/kernel is missing"):
        weights.load_params(params, reference, deeper)
    from experiments.torch_reference.weight_map import to_jax

    state = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    with pytest.raises(ConfigError, match="decoder.final_norm.weight is unknown"):
        to_jax(state | {"decoder.final_norm.weight": np.zeros(3)}, weights.entries_of(CONFIG))


def test_ten_updates_are_the_references(torch, make_reference, assert_equal):
    from experiments.torch_reference import weights
    from experiments.torch_reference.trainer import Trainer

    params, reference = make_reference()
    trainer = Trainer(reference, LEARNING)
    model, optimizer = EncoderDecoder(CONFIG), make_optimizer(LEARNING)
    loss = seq2seq_loss(model, pad=PAD, label_smoothing=SMOOTHING)
    step = jax.jit(make_train_step(loss, optimizer))
    state = init_train_state(jax.tree.map(jnp.asarray, params), optimizer, jax.random.key(0))
    for number in range(10):
        theirs = trainer.step(pairs(number))
        state, ours = step(state, pairs(number))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_equal(ours[name], theirs[name], 1e-4)
    held_out = [pairs(20), pairs(21)]
    evaluate = jax.jit(make_eval_step(loss))
    sums = [evaluate(state.params, batch) for batch in held_out]
    nats, tokens = trainer.evaluate(held_out)
    assert tokens == sum(metrics["tokens"] for metrics in sums) == 22
    assert_equal(sum(metrics["loss"] for metrics in sums), nats, 1e-4)

    moved = weights.params_of(reference, CONFIG)
    far = jax.tree.map(lambda a, b: np.abs(a - b).max(), moved, params)
    assert max(jax.tree.leaves(far)) > 4e-2
    assert_trees_equal(
        without_key_biases(moved), without_key_biases(state.params), assert_equal, 1e-4
    )


def without_key_biases(params):
    """Adam divides their gradients, which are nought but for rounding, by their own size."""
    return {path: x for path, x in flatten(params).items() if not path.endswith("key/bias")}


def test_the_reference_starts_as_our_model_does(torch, batch):
    from experiments.torch_reference import weights
    from experiments.torch_reference.transformer import Transformer

    config = replace(CONFIG, d_model=60, d_ff=90, vocab_size=101)
    torch.manual_seed(0)
    theirs = weights.params_of(Transformer(config), config)
    model = EncoderDecoder(config)
    ours = jax.jit(model.init)(jax.random.key(0), batch.source, batch.target)["params"]
    assert jax.tree.map(np.shape, theirs) == jax.tree.map(np.shape, ours)
    for (path, mine), its in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        assert its.mean() == pytest.approx(float(mine.mean()), abs=0.03), path
        assert its.std() == pytest.approx(float(mine.std()), rel=0.1), path


def test_dropout_of_the_reference_acts_at_our_rates(torch, batch, make_reference):
    config = replace(CONFIG, dropout_rate=0.5)
    _, reference = make_reference(config)
    x = torch.ones(200, 11, 20)
    reference.train()
    kept = reference.positions(x) != 0
    assert kept.float().mean() == pytest.approx(0.5, abs=0.02)
    reference.eval()
    assert torch.equal(reference.positions(x), x + reference.positions.table)


def test_what_the_reference_lacks_is_refused(torch, make_reference):
    from experiments.torch_reference.transformer import Transformer

    with pytest.raises(
        ConfigError, match=r"positions=Rotary\(.*\) is not supported .* give positions=Sinu"
    ):
        Transformer(replace(CONFIG, positions=Rotary(), num_heads=10))
    with pytest.raises(ConfigError, match="layout='halves'.* is not supported by"):
        Transformer(replace(CONFIG, positions=Sinusoidal(layout="halves")))
    with pytest.raises(ConfigError, match="output.bias=True is not supported .* output.bias=False"):
        Transformer(replace(CONFIG, output=OutputOptions(bias=True)))
    with pytest.raises(ConfigError, match="embeddings.zero_id=1 is not supported by"):
        Transformer(replace(CONFIG, embeddings=EmbeddingOptions(zero_id=1)))
    _, reference = make_reference()
    tokens = torch.ones(2, 12, dtype=torch.long)
    with pytest.raises(
        ValueError, match="12 tokens was given, but the positions end at max_len=11"
    ):
        reference(tokens, tokens[:, :3])


@pytest.fixture
def small(tmp_path):
    """A comparison on 60 pairs of one's own, with dropout."""
    sides = []
    for word in ("one", "two"):
        path = tmp_path / f"{word}.txt"
        path.write_text("".join(f"{word} {i % 7} {i % 5} end\n" for i in range(60)), "utf-8")
        sides.append(str(path))
    preset = compare.presets()["grammar"]
    sizes = {"d_model": 16, "d_ff": 24, "num_heads": 2, "vocab_size": 300}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dropout_rate": 0.3}
    data = DataConfig(train=Files(*sides), validation=Files(*sides), batch_tokens=64, buckets=1)
    return replace(
        preset,
        model=replace(preset.model, **sizes, **layers),
        data=data,
        steps=4,
        rounds=2,
        timed_steps=1,
        runs=str(tmp_path / "runs"),
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
    speed = found["speed"]
    assert speed["jaxformer"] == pytest.approx(np.median(speed["rounds_jaxformer"]))
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["reference_loss"] for line in logged] == course["reference"]
    said = capsys.readouterr().out
    assert f"{course['jaxformer'][0]:.4f}" in said and f"{speed['reference']:.1f} ms" in said


def test_a_comparison_of_no_steps_is_refused(small):
    with pytest.raises(ConfigError, match="steps=0, but it must be at least 1"):
        replace(small, steps=0)


def test_the_comparison_without_torch_says_so(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="torch is needed but not installed"):
        compare.main(small)
