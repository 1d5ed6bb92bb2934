"""torch's own layers convert to ours and back. Run with `-m peer`; needs torch."""

import jax
import numpy as np
import pytest

from experiments.torch_reference import torch_modules
from experiments.torch_reference.torch_modules import (
    encoder_layer,
    multihead_attention,
    transformer,
)
from experiments.torch_reference.weights import to_jax, to_torch
from jaxformer.config import FeedForwardOptions, NoPositions, NormOptions, TransformerConfig
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.blocks import Block
from jaxformer.nn.inspection import read_taps
from jaxformer.ops.masks import AttentionMask

pytestmark = pytest.mark.peer

WIDTH, HEADS, HIDDEN = 20, 5, 28
LENGTHS = (7, 4, 5)
VALID = np.arange(7)[None, :] < np.array(LENGTHS)[:, None]
MASKS = {
    "none": AttentionMask(),
    "causal": AttentionMask(causal=True),
    "padding": AttentionMask(padding_mask=VALID),
    "both": AttentionMask(causal=True, padding_mask=VALID),
}


def vectors(seed, length=7, width=WIDTH):
    return np.random.default_rng(seed).normal(size=(3, length, width)).astype(np.float32)


def randomized(torch, module):
    """`module`, with no parameter left as torch starts it."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def state_of(module):
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def theirs_of(torch, mask, length=7):
    """A mask of ours as torch's (attn_mask, key_padding_mask), in which True forbids."""
    future = torch.ones(length, length, dtype=torch.bool).triu(1) if mask.causal else None
    return future, None if mask.padding_mask is None else torch.tensor(~VALID)


def params_like(module, *args, method=None, **kwargs):
    """The shapes of the parameters of our `module`, called with these arguments."""
    variables = jax.eval_shape(
        lambda: module.init(jax.random.key(0), *args, method=method, **kwargs)
    )
    return variables["params"]


def assert_back_and_forth(params, entries, state):
    back = to_torch(params, entries)
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_is_ours(torch, assert_equal, name, bias):
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=name != "both")
    state = state_of(randomized(torch, module))
    entries, model = (
        multihead_attention(state),
        MultiHeadAttention(HEADS, qkv_bias=bias, use_bias=bias),
    )
    x, mask = vectors(0), MASKS[name]
    params = to_jax(state, entries, params_like(model, x))
    assert_back_and_forth(params, entries, state)
    future, padding = theirs_of(torch, mask)
    given = torch.tensor(x if module.batch_first else x.swapaxes(0, 1))
    expected, weights = module(
        given,
        given,
        given,
        attn_mask=future,
        key_padding_mask=padding,
        average_attn_weights=False,
    )
    expected = expected.detach().numpy()
    expected = expected if module.batch_first else expected.swapaxes(0, 1)

    def attend(module, x):
        return module(x, module.keys_values(x), mask)

    found, values = read_taps(model, params, x, names=["weights"], method=attend)
    assert_equal(found, expected)
    assert_equal(values["weights"], weights.detach())


def test_a_float_mask_of_torch_is_our_bias(torch, assert_equal):
    module = randomized(torch, torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    state = state_of(module)
    x, added, model = vectors(0), vectors(1, 7, 7)[0], MultiHeadAttention(HEADS)
    params = to_jax(state, multihead_attention(state), params_like(model, x))
    given = torch.tensor(x)
    expected, _ = module(given, given, given, attn_mask=torch.tensor(added))

    def attend(module, x):
        return module(x, module.keys_values(x), AttentionMask(), bias=added[None, None])

    found = model.apply({"params": params}, x, method=attend)
    assert_equal(found, expected.detach())


def test_keys_and_values_of_another_size_convert(torch, assert_equal):
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, kdim=13, vdim=13, batch_first=True)
    state = state_of(randomized(torch, module))
    x, memory, model = vectors(0), vectors(1, 4, 13), MultiHeadAttention(HEADS, head_dim=4)
    expected, _ = module(*map(torch.tensor, (x, memory, memory)))

    def attend(module, x):
        return module(x, module.keys_values(memory), AttentionMask())

    entries = multihead_attention(state)
    params = to_jax(state, entries, params_like(model, x, method=attend))
    assert_back_and_forth(params, entries, state)
    found = model.apply({"params": params}, x, method=attend)
    assert_equal(found, expected.detach())


def test_what_our_attention_lacks_is_refused(torch):
    make = torch.nn.MultiheadAttention
    with pytest.raises(ConfigError, match="bias_k adds a key that belongs to no token"):
        multihead_attention(state_of(make(WIDTH, HEADS, add_bias_kv=True)))
    with pytest.raises(ConfigError, match="kdim=13 and vdim=11, but our keys and values"):
        multihead_attention(state_of(make(WIDTH, HEADS, kdim=13, vdim=11)))
    state = state_of(make(WIDTH, HEADS))
    entries = multihead_attention(state)
    wider = params_like(MultiHeadAttention(HEADS), vectors(0, width=25))
    with pytest.raises(DataError, match=r"in_proj_weight is \[60, 20\], but \[75, 25\] is needed"):
        to_jax(state, entries, wider)
    like = params_like(MultiHeadAttention(HEADS), vectors(0))
    del state["out_proj.weight"]
    with pytest.raises(DataError, match="out_proj.weight is missing; other is unknown"):
        to_jax(state | {"other": np.zeros(1)}, entries, like)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["none", "both"])
def test_encoder_layer_is_our_block(torch, assert_equal, placement, bias, name):
    module = torch.nn.TransformerEncoderLayer(
        WIDTH,
        HEADS,
        HIDDEN,
        dropout=0.0,
        activation="gelu" if bias else "relu",
        batch_first=True,
        norm_first=placement == "pre",
        bias=bias,
    )
    state = state_of(randomized(torch, module))
    entries, x, mask = encoder_layer(state), vectors(0), MASKS[name]
    future, padding = theirs_of(torch, mask)
    expected = module(torch.tensor(x), src_mask=future, src_key_padding_mask=padding)
    block = Block(
        HEADS,
        HIDDEN,
        norm_options=NormOptions(placement=placement, eps=1e-5),
        feed_forward_options=FeedForwardOptions("gelu" if bias else "relu"),
        use_bias=bias,
    )
    params = to_jax(state, entries, params_like(block, x, mask))
    assert_back_and_forth(params, entries, state)
    found, _ = block.apply({"params": params}, x, mask)
    assert_equal(found, expected.detach())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_whole_transformer_of_torch_is_ours(torch, assert_equal, norm_first, bias):
    module = torch.nn.Transformer(
        WIDTH,
        HEADS,
        num_encoder_layers=2,
        num_decoder_layers=1,
        dim_feedforward=HIDDEN,
        dropout=0.0,
        batch_first=True,
        norm_first=norm_first,
        bias=bias,
    )
    state = state_of(randomized(torch, module))
    entries = transformer(state, norm_first=norm_first)
    source, target = vectors(0), vectors(1, 6)
    future, _ = theirs_of(torch, AttentionMask(causal=True), 6)
    padding = torch.tensor(~VALID)
    expected = module(
        torch.tensor(source),
        torch.tensor(target),
        tgt_mask=future,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    sizes = TransformerConfig(
        vocab_size=1,
        d_model=WIDTH,
        d_ff=HIDDEN,
        num_heads=HEADS,
        num_encoder_layers=2,
        num_decoder_layers=1,
        positions=NoPositions(),
        norm=NormOptions(placement="pre" if norm_first else "post", eps=1e-5),
        use_bias=bias,
    )
    seen = AttentionMask(padding_mask=VALID)
    masks = {"source_mask": seen, "target_mask": AttentionMask(causal=True), "encoder_mask": seen}
    model = torch_modules.Transformer(sizes)
    params = to_jax(state, entries, params_like(model, source, target, **masks))
    assert_back_and_forth(params, entries, state)
    found = jax.jit(model.apply)({"params": params}, source, target, **masks)
    assert_equal(found, expected.detach())
