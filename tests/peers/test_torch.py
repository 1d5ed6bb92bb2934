"""The same equations in PyTorch give the same numbers. Run with `-m peer`; needs torch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.config import FeedForwardOptions, NormOptions, TransformerConfig
from jaxformer.config.positions import positional_encoding
from jaxformer.nn.models import EncoderDecoder
from jaxformer.ops.cross_entropy import cross_entropy
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer

pytestmark = pytest.mark.peer
LAYERS, WIDTH, HEADS, HIDDEN, VOCAB = 2, 20, 5, 28, 23


@pytest.fixture(scope="module")
def source():
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, VOCAB, (3, 7))
    for row, length in enumerate((7, 4, 5)):
        tokens[row, length:] = 0
    return tokens


@pytest.fixture(scope="module")
def target():
    return np.random.default_rng(1).integers(4, VOCAB, (3, 5))


def _attention(module) -> dict:
    """torch's stacked projections [3D, D] as our query, key, value [D, N, H] and out [N, H, D]."""
    weights = np.split(module.in_proj_weight.detach().numpy(), 3)
    biases = np.split(module.in_proj_bias.detach().numpy(), 3)
    params = {
        name: {"kernel": w.T.reshape(WIDTH, HEADS, -1), "bias": b.reshape(HEADS, -1)}
        for name, w, b in zip(("query", "key", "value"), weights, biases, strict=True)
    }
    out = module.out_proj.weight.detach().numpy().T.reshape(HEADS, -1, WIDTH)
    return params | {"out": {"kernel": out, "bias": module.out_proj.bias.detach().numpy()}}


def _linear(module) -> dict:
    return {"kernel": module.weight.detach().numpy().T, "bias": module.bias.detach().numpy()}


def _norm(module) -> dict:
    return {"scale": module.weight.detach().numpy(), "bias": module.bias.detach().numpy()}


def _block(layer) -> dict:
    cross = hasattr(layer, "multihead_attn")
    params = {
        "attention": _attention(layer.self_attn),
        "attention_norm": _norm(layer.norm1),
        "feed_forward": {"up": _linear(layer.linear1), "down": _linear(layer.linear2)},
        "feed_forward_norm": _norm(layer.norm3 if cross else layer.norm2),
    }
    if cross:
        params["cross_attention"] = _attention(layer.multihead_attn)
        params["cross_attention_norm"] = _norm(layer.norm2)
    return params


def _stack(stack) -> dict:
    params = {f"blocks_{i}": _block(layer) for i, layer in enumerate(stack.layers)}
    return params | ({"final_norm": _norm(stack.norm)} if stack.norm is not None else {})


def _pair(torch, placement: str, activation: str):
    """A random nn.Transformer with an embedding table, and our model with the same weights."""
    torch.manual_seed(0)
    pre = placement == "pre"
    kinds = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    stacks = (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)
    peers = [
        stack(
            kind(WIDTH, HEADS, HIDDEN, 0.0, activation, 1e-6, batch_first=True, norm_first=pre),
            LAYERS,
            norm=torch.nn.LayerNorm(WIDTH, 1e-6) if pre else None,
        )
        for kind, stack in zip(kinds, stacks, strict=True)
    ]
    for peer in peers:
        for parameter in peer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    table = torch.nn.init.normal_(torch.empty(VOCAB, WIDTH)).requires_grad_()
    config = TransformerConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_ff=HIDDEN,
        num_heads=HEADS,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        norm=NormOptions(placement=placement),
        feed_forward=FeedForwardOptions(activation),
    )
    params = {
        "embedding": {"table": table.detach().numpy()},
        "encoder": _stack(peers[0]),
        "decoder": _stack(peers[1]),
    }
    return peers, table, EncoderDecoder(config), jax.tree.map(jnp.asarray, params)


def _torch_logits(torch, peers, table, source, target):
    def embed(tokens):
        positions = torch.tensor(positional_encoding(tokens.shape[1], WIDTH))
        return table[torch.tensor(tokens)] * WIDTH**0.5 + positions

    padding = torch.tensor(source == 0)
    length = target.shape[1]
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
    memory = peers[0](embed(source), src_key_padding_mask=padding)
    out = peers[1](embed(target), memory, tgt_mask=future, memory_key_padding_mask=padding)
    return out @ table.T


@pytest.mark.parametrize(("placement", "activation"), [("post", "relu"), ("pre", "gelu")])
def test_logits_and_gradients_equal_those_of_torch(torch, source, target, placement, activation):
    peers, table, model, params = _pair(torch, placement, activation)
    labels = np.roll(target, -1, axis=1)
    theirs = _torch_logits(torch, peers, table, source, target)
    loss = torch.nn.functional.cross_entropy(
        theirs.flatten(0, 1), torch.tensor(labels).flatten(), reduction="sum", label_smoothing=0.1
    )
    loss.backward()

    def ours(params):
        logits = model.apply({"params": params}, source, target, source != 0)
        total, _ = cross_entropy(logits, jnp.asarray(labels), jnp.ones(labels.shape, bool), 0.1)
        return total, logits

    (total, logits), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    np.testing.assert_allclose(logits, theirs.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(
        grads["embedding"]["table"], table.grad.numpy(), rtol=1e-4, atol=1e-4
    )
    up = grads["encoder"]["blocks_0"]["feed_forward"]["up"]["kernel"]
    np.testing.assert_allclose(
        up, peers[0].layers[0].linear1.weight.grad.numpy().T, rtol=1e-4, atol=1e-4
    )


def test_clipped_adam_takes_the_same_steps_as_torch(torch):
    rng = np.random.default_rng(2)
    start = rng.normal(size=(7, 3)).astype(np.float32)
    gradients = rng.normal(size=(5, 7, 3)).astype(np.float32) * 3
    config = OptimizerConfig(
        schedule="constant",
        learning_rate=1e-2,
        warmup_steps=0,
        b1=0.9,
        b2=0.98,
        eps=1e-9,
        grad_clip_norm=1.0,
    )
    optimizer = make_optimizer(config)
    params = jnp.asarray(start)
    state = optimizer.init(params)
    theirs = torch.nn.Parameter(torch.tensor(start))
    adam = torch.optim.Adam([theirs], lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
    for gradient in gradients:
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
        theirs.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        adam.step()
    np.testing.assert_allclose(params, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
