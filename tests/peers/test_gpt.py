"""A GPT in PyTorch with our weights gives and learns the same. Run with `-m peer`; needs torch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    NormOptions,
    Rotary,
    TransformerConfig,
)
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly
from jaxformer.text.data import Stream, Tokens, iterate_once
from jaxformer.training.losses import causal_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from jaxformer.training.train_step import init_train_state, make_eval_step, make_train_step

pytestmark = pytest.mark.peer

CONFIG = TransformerConfig(
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


@pytest.fixture(scope="module")
def stream():
    ids = np.random.default_rng(3).integers(0, CONFIG.vocab_size, 331)
    return Stream(
        Tokens.from_lists([ids]), batch_size=3, seq_len=11, seed=7, isolate_documents=False
    )


def pair(torch, params, config=CONFIG):
    """The reference of `config` with the weights `params`."""
    from experiments.torch_reference.gpt import GPT

    gpt = GPT(config)
    with torch.no_grad():
        for name, weights in gpt.named_parameters():
            weights.copy_(torch.tensor(np.array(leaf(params, name))))
    return gpt


def leaf(params, name):
    """What our tree `params` holds under the reference's `name`, in its shape."""
    name, kind = name.rsplit(".", 1)
    if name == "embedding":
        return params["embedding"]["table"]
    tree = params["decoder"]
    if name == "positions":
        return tree["positions"]["table"]
    for part in name.replace("blocks.", "blocks_").split("."):
        tree = tree if part == "query_key_value" else tree[part]
    if "norm" in name:
        return tree["scale" if kind == "weight" else "bias"]
    if name.endswith("query_key_value"):
        parts = [_linear(tree[part], kind, 1) for part in ("query", "key", "value")]
        return np.concatenate(parts, axis=0)
    return _linear(tree, kind, -1)


def _linear(tree, kind, inputs):
    if kind == "bias":
        return tree["bias"].reshape(-1)
    kernel = np.asarray(tree["kernel"])
    return kernel.reshape(np.prod(kernel.shape[:inputs]), -1).T


@pytest.mark.parametrize(
    "changes", [{}, {"use_bias": True, "feed_forward": FeedForwardOptions("gelu_tanh")}]
)
def test_logits_loss_and_gradients_are_those_of_the_reference(
    torch, stream, random_params, assert_equal, changes
):
    config = replace(CONFIG, **changes)
    model = DecoderOnly(config)
    # The last batch of the epoch is not full: labels that do not count are among them.
    batch = stream.batch(stream.steps_per_epoch - 1)
    assert not batch.loss_mask.all()
    params = random_params(model, batch.tokens[:, :-1])
    gpt = pair(torch, params, config)
    logits = jax.jit(model.apply)({"params": params}, batch.tokens[:, :-1])
    assert_equal(logits, gpt(torch.tensor(batch.tokens[:, :-1])).detach())

    nats, count = gpt.loss(batch)
    nats.backward()
    differentiate = jax.jit(jax.value_and_grad(causal_loss(model), has_aux=True))
    (total, tokens), grads = differentiate(params, batch, None)
    assert tokens == count.item()
    assert_equal(total, nats.item())
    for name, weights in gpt.named_parameters():
        assert_equal(leaf(grads, name), weights.grad, 1e-4)


def test_ten_updates_are_those_of_the_reference(torch, stream, random_params, assert_equal):
    from experiments.torch_reference.trainer import Trainer

    model = DecoderOnly(CONFIG)
    params = random_params(model, stream.batch(0).tokens[:, :-1])
    trainer = Trainer(pair(torch, params), LEARNING)
    optimizer = make_optimizer(LEARNING)
    step = jax.jit(make_train_step(causal_loss(model), optimizer))
    state = init_train_state(jax.tree.map(jnp.asarray, params), optimizer, jax.random.key(0))
    for number in range(10):
        theirs = trainer.step(stream.batch(number))
        state, ours = step(state, stream.batch(number))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_equal(ours[name], theirs[name])
    moved = 0.0
    for name, weights in trainer.model.named_parameters():
        assert_equal(leaf(state.params, name), weights.detach())
        moved = max(moved, np.abs(leaf(params, name) - weights.detach().numpy()).max())
    assert moved > 4e-2

    evaluate = jax.jit(make_eval_step(causal_loss(model)))
    batches = list(iterate_once(stream.tokens, batch_size=3, seq_len=11, isolate_documents=False))
    sums = [evaluate(state.params, batch) for batch in batches]
    nats, tokens = trainer.evaluate(batches)
    assert tokens == sum(metrics["tokens"] for metrics in sums) == 330
    assert_equal(sum(metrics["loss"] for metrics in sums), nats, 1e-4)


def test_the_reference_starts_as_our_model_does(torch, leaf_shapes):
    from experiments.torch_reference.gpt import GPT

    config = replace(CONFIG, vocab_size=65, d_model=128, d_ff=512, num_heads=4, max_len=64)
    config = replace(config, num_decoder_layers=4)
    torch.manual_seed(0)
    gpt = GPT(config)
    assert sum(weights.numel() for weights in gpt.parameters()) == 804_096
    tokens = jnp.ones((2, 3), jnp.int32)
    params = jax.jit(DecoderOnly(config).init)(jax.random.key(0), tokens)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 804_096
    for name, weights in gpt.named_parameters():
        ours, theirs = np.asarray(leaf(params, name)), weights.detach().numpy()
        assert ours.shape == theirs.shape
        if "norm" not in name:
            residual = name.endswith(("attention.out.weight", "down.weight"))
            deviation = 0.02 / 8**0.5 if residual else 0.02
            assert ours.std() == pytest.approx(deviation, rel=0.03)
            assert theirs.std() == pytest.approx(deviation, rel=0.03)


@pytest.mark.parametrize("schedule", ["inverse_square_root", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_references_rate_is_that_of_our_schedule(torch, schedule, warmup):
    from experiments.torch_reference.trainer import rate_share

    config = replace(LEARNING, schedule=schedule, warmup_steps=warmup, total_steps=17)
    ours = jax.vmap(make_schedule(config))(jnp.arange(20))
    theirs = [1e-2 * rate_share(config, number) for number in range(1, 21)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_what_the_reference_lacks_is_refused(torch):
    from experiments.torch_reference.gpt import GPT
    from experiments.torch_reference.trainer import Trainer

    with pytest.raises(
        ConfigError, match=r"positions=Rotary\(.*\) is not supported .* give positions=Learned\(\)"
    ):
        GPT(replace(CONFIG, positions=Rotary()))
    with pytest.raises(ConfigError, match="name='lion' is not supported by the PyTorch ref"):
        Trainer(GPT(CONFIG), replace(LEARNING, name="lion"))


def test_an_update_that_is_not_finite_is_skipped(torch, stream):
    from experiments.torch_reference.gpt import GPT
    from experiments.torch_reference.trainer import Trainer

    trainer = Trainer(GPT(CONFIG), LEARNING)
    broken, whole = stream.batch(0), stream.batch(1)
    with torch.no_grad():
        trainer.model.final_norm.weight *= np.inf
        before = [weights.clone() for weights in trainer.model.parameters()]
    skipped = [trainer.step(broken)["consecutive_skips"] for _ in range(2)]
    assert skipped == [1, 2]
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)
    with torch.no_grad():
        trainer.model.final_norm.weight.fill_(1.0)
    metrics = trainer.step(whole)
    assert (metrics["skipped"], metrics["consecutive_skips"]) == (2, 0)
    assert trainer.schedule.get_last_lr()[0] == pytest.approx(1e-2 * 2 / 4)
