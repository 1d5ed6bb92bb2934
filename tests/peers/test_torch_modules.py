"""torch's own layers convert to ours and back. Run with `-m peer`; needs torch."""

from functools import partial

import jax
import numpy as np
import pytest

from experiments.torch_reference import torch_modules
from experiments.torch_reference.torch_modules import transformer
from jaxformer.config import FeedForwardOptions, NoPositions, NormOptions, TransformerConfig
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.blocks import Block
from jaxformer.nn.inspection import read_taps
from jaxformer.ops.masks import AttentionMask
from jaxformer.pretrained.torch_layers import (
    encoder_layer,
    multihead_attention,
    to_jax,
    to_torch,
    torch_state,
)

pytestmark = pytest.mark.peer

WIDTH, HEADS, HIDDEN = 20, 5, 28
VALID = np.arange(7)[None, :] < np.array([[7], [4], [5]])
FUTURE = np.triu(np.ones((7, 7), bool), 1)
ADDED = np.random.default_rng(1).normal(size=(7, 7)).astype(np.float32)
BOTH = AttentionMask(causal=True, padding_mask=VALID)
MASKS = {  # ours and torch's, in which True forbids
    "none": (AttentionMask(), {}),
    "causal": (AttentionMask(causal=True), {"attn_mask": FUTURE}),
    "padding": (AttentionMask(padding_mask=VALID), {"key_padding_mask": ~VALID}),
    "both": (BOTH, {"attn_mask": FUTURE, "key_padding_mask": ~VALID}),
    "numbers": (AttentionMask(), {"attn_mask": ADDED}),
}


def vectors(seed, length=7, width=WIDTH):
    return np.random.default_rng(seed).normal(size=(3, length, width)).astype(np.float32)


def state_of(module):
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def params_like(module, *args, method=None, **kwargs):
    """The shapes of the parameters of our `module`, called with these arguments."""
    variables = jax.eval_shape(
        lambda: module.init(jax.random.key(0), *args, method=method, **kwargs)
    )
    return variables["params"]


@pytest.fixture
def converted(torch):
    """The parameters for ours of a layer of torch, made random, which come back bit for bit."""

    def convert(module, entries_of, ours, *args, **kwargs):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        state = state_of(module)
        entries = entries_of(state)
        params = to_jax(state, entries, params_like(ours, *args, **kwargs))
        back = to_torch(params, entries)
        assert back.keys() == state.keys()
        assert all(np.array_equal(back[name], state[name]) for name in state)
        return params

    return convert


@pytest.mark.parametrize("name", MASKS)
def test_multihead_attention_is_ours(torch, converted, assert_equal, name):
    """Also where time comes first, without biases, and with numbers that are added to scores."""
    mask, theirs = MASKS[name]
    bias, batch_first = name not in ("causal", "both"), name != "both"
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first)
    model = MultiHeadAttention(HEADS, qkv_bias=bias, use_bias=bias)
    x = vectors(0)
    params = converted(module, multihead_attention, model, x)
    given = torch.tensor(x if batch_first else x.swapaxes(0, 1))
    theirs = {key: torch.tensor(value) for key, value in theirs.items()}
    expected, weights = module(given, given, given, **theirs, average_attn_weights=False)

    def attend(module, x):
        added = ADDED[None, None] if name == "numbers" else None
        return module(x, module.keys_values(x), mask, bias=added)

    read = jax.jit(partial(read_taps, model, names=["weights"], method=attend))
    found, values = read(params, x)
    assert_equal(found if batch_first else found.swapaxes(0, 1), expected.detach())
    assert_equal(values["weights"], weights.detach())


def test_keys_and_values_of_another_size_convert(torch, converted, assert_equal):
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, kdim=13, vdim=13, batch_first=True)
    x, memory, model = vectors(0), vectors(1, 4, 13), MultiHeadAttention(HEADS, head_dim=4)

    def attend(module, x):
        return module(x, module.keys_values(memory), AttentionMask())

    params = converted(module, multihead_attention, model, x, method=attend)
    expected, _ = module(*map(torch.tensor, (x, memory, memory)))
    found = jax.jit(partial(model.apply, method=attend))({"params": params}, x)
    assert_equal(found, expected.detach())


def test_what_our_attention_lacks_is_refused(torch):
    make = torch.nn.MultiheadAttention
    with pytest.raises(ConfigError, match="bias_k "):
        multihead_attention(state_of(make(WIDTH, HEADS, add_bias_kv=True)))
    with pytest.raises(ConfigError, match="kdim=13 and vdim=11"):
        multihead_attention(state_of(make(WIDTH, HEADS, kdim=13, vdim=11)))
    state = state_of(make(WIDTH, HEADS))
    entries = multihead_attention(state)
    wider = params_like(MultiHeadAttention(HEADS), vectors(0, width=25))
    with pytest.raises(DataError, match="in_proj_weight"):
        to_jax(state, entries, wider)
    like = params_like(MultiHeadAttention(HEADS), vectors(0))
    del state["out_proj.weight"]
    with pytest.raises(DataError, match="out_proj.weight is missing; other is unknown"):
        to_jax(state | {"other": np.zeros(1)}, entries, like)


@pytest.mark.parametrize(("placement", "bias"), [("pre", True), ("pre", False), ("post", True)])
def test_encoder_layer_is_our_block(torch, converted, assert_equal, placement, bias):
    activation = "gelu" if bias else "relu"
    options = {"batch_first": True, "norm_first": placement == "pre", "bias": bias}
    module = torch.nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.0, activation=activation, **options
    )
    block = Block(
        HEADS,
        HIDDEN,
        norm_options=NormOptions(placement=placement, eps=1e-5),
        feed_forward_options=FeedForwardOptions(activation),
        use_bias=bias,
    )
    x, (mask, theirs) = vectors(0), MASKS["none" if placement == "post" else "both"]
    params = converted(module, encoder_layer, block, x, mask)
    seen = {f"src_{key.removeprefix('attn_')}": torch.tensor(y) for key, y in theirs.items()}
    found = jax.jit(block.apply)({"params": params}, x, mask)
    assert_equal(found, module(torch.tensor(x), **seen).detach())


@pytest.mark.parametrize("pre", [True, False])
def test_the_whole_transformer_of_torch_is_ours(torch, converted, assert_equal, pre):
    """Pre-norm with biases, and post-norm without."""
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 1}
    options = {"batch_first": True, "norm_first": pre, "bias": pre, "dropout": 0.0}
    module = torch.nn.Transformer(WIDTH, HEADS, **layers, dim_feedforward=HIDDEN, **options)
    sizes = TransformerConfig(
        vocab_size=1,
        d_model=WIDTH,
        d_ff=HIDDEN,
        num_heads=HEADS,
        **layers,
        positions=NoPositions(),
        norm=NormOptions(placement="pre" if pre else "post", eps=1e-5),
        use_bias=pre,
    )
    source, target, seen = vectors(0), vectors(1, 6), AttentionMask(padding_mask=VALID)
    masks = {"source_mask": seen, "target_mask": AttentionMask(causal=True), "encoder_mask": seen}
    model = torch_modules.Transformer(sizes)
    entries_of = partial(transformer, norm_first=pre)
    params = converted(module, entries_of, model, source, target, **masks)
    padding = torch.tensor(~VALID)
    expected = module(
        torch.tensor(source),
        torch.tensor(target),
        tgt_mask=torch.tensor(FUTURE[:6, :6]),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    found = jax.jit(model.apply)({"params": params}, source, target, **masks)
    assert_equal(found, expected.detach())


def test_arguments_that_a_state_dict_does_not_hold_are_refused_where_they_are_known(torch):
    inside = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True)
    assert sorted(torch_state(inside)) == sorted(inside.state_dict())
    inside.self_attn = torch.nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True)
    with pytest.raises(ConfigError, match="add_zero_attn=True"):
        torch_state(inside)

    theirs = torch.nn.Transformer(WIDTH, HEADS, 1, 1, HIDDEN, batch_first=True)
    sizes = (11, WIDTH, HIDDEN, HEADS, 1, 1)
    config = TransformerConfig(*sizes, positions=NoPositions(), norm=NormOptions(eps=1e-5))
    masks = dict.fromkeys(("source_mask", "target_mask", "encoder_mask"), AttentionMask())
    like = params_like(torch_modules.Transformer(config), vectors(0), vectors(1), **masks)
    state = torch_state(theirs)
    assert to_jax(state, transformer(state, norm_first=False), like)
    with pytest.raises(ConfigError, match="decoder/final_norm/bias.*norm_first"):
        to_jax(state, transformer(state, norm_first=True), like)
