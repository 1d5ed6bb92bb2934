"""T5 and Marian of `transformers` say the same here, and ours say the same there."""

import shutil
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxformer import load_pretrained, save_pretrained
from jaxformer.config.positions import relative_buckets
from jaxformer.nn.blocks import Block
from jaxformer.nn.inspection import tapping
from jaxformer.nn.models import EncoderDecoder, EncoderOnly
from jaxformer.nn.stack import Stack
from jaxformer.ops import attention
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.model_specs import param_shapes, spec_of
from jaxformer.pretrained.weight_map import to_jax

pytestmark = pytest.mark.peer
B, S, T, V = 3, 7, 5, 29

# Half the time to compile; each program runs once.
QUICK = {"xla_backend_optimization_level": 0}

T5 = {
    "vocab_size": V,
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 28,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 3,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 8,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
MARIAN = {
    "vocab_size": V,
    "d_model": 18,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 16,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": V - 1,
    "decoder_start_token_id": V - 1,
    "eos_token_id": 0,
    "dropout": 0.0,
}
BART = {key: value for key, value in MARIAN.items() if key != "scale_embedding"}
M2M100 = MARIAN | {"pad_token_id": 1, "decoder_start_token_id": 2}
CASES = {
    "bart": ("Bart", {"activation_function": "gelu"}),
    "bart, relu": ("Bart", {"activation_function": "relu", "scale_embedding": True}),
    "m2m_100": ("M2M100", {"activation_function": "relu"}),
    "m2m_100, gelu": ("M2M100", {"activation_function": "gelu", "scale_embedding": False}),
    "mbart": ("MBart", {"activation_function": "gelu", "scale_embedding": True}),
    "mbart of two widths": (
        "MBart",
        {"encoder_attention_heads": 2, "encoder_ffn_dim": 19, "activation_function": "relu"},
    ),
    "mt5": ("MT5", {"feed_forward_proj": "gated-gelu"}),
    "t5": ("T5", {}),
    "t5, one layer more, of other widths": (
        "T5",
        {"num_decoder_layers": 2, "d_kv": 5, "relative_attention_num_buckets": 4},
    ),
    "t5 1.1": ("T5", {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    "t5, silu without a gate": ("T5", {"feed_forward_proj": "silu", "layer_norm_epsilon": 0.1}),
    "t5, relu with a gate": ("T5", {"feed_forward_proj": "gated-relu"}),
    "marian": ("Marian", {}),
    "marian, gelu": ("Marian", {"activation_function": "gelu", "scale_embedding": False}),
    "marian of two vocabularies": (
        "Marian",
        {"decoder_vocab_size": 31, "share_encoder_decoder_embeddings": False},
    ),
    "marian of three tables": (
        "Marian",
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "d_model": 15},
    ),
}


class Pair(NamedTuple):
    """A model of theirs, its folder, and what was loaded from there."""

    theirs: Any
    folder: Any
    model: EncoderDecoder
    params: Any


@pytest.fixture(scope="module")
def source():
    return np.random.default_rng(0).integers(2, V - 1, (B, S))


@pytest.fixture(scope="module")
def target():
    return np.random.default_rng(1).integers(2, V - 1, (B, T))


@pytest.fixture(scope="module")
def valid():
    return np.arange(S) < np.array([[S], [4], [2]])


def randomized(torch: Any, model: Any) -> Any:
    """`model` with every number random, biases and scales too."""
    generator = torch.Generator().manual_seed(0)
    fixed = {name for name, leaf in model.named_parameters() if not leaf.requires_grad}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name not in fixed:
                noise = 0.2 * torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise + (1.0 if "norm" in name and "weight" in name else 0.0))
    return model.eval()


def build(torch: Any, transformers: Any, name: str) -> Any:
    kind, changes = CASES[name]
    ending = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
    sizes = {"T5": T5, "MT5": T5, "Marian": MARIAN, "M2M100": M2M100}.get(kind, BART)
    config = getattr(transformers, f"{kind}Config")(**(sizes | changes))
    model = getattr(transformers, kind + ending)(config)
    if kind == "MT5" or (kind == "T5" and not config.scale_decoder_outputs):
        # Today's versions tie whatever the config says.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.set_attn_implementation("eager")
    return randomized(torch, model)


@pytest.fixture(scope="module", params=CASES)
def pair(request, torch, transformers, tmp_path_factory):
    theirs = build(torch, transformers, request.param)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    ours = load_pretrained(folder, attention_fn=attention.reference)
    assert isinstance(ours.model, EncoderDecoder) and ours.tokenizer is None
    return Pair(theirs, folder, ours.model, ours.params)


@pytest.fixture(scope="module")
def said(pair, torch, source, target, valid):
    """All that their model says of the sentences."""
    with torch.no_grad():
        return pair.theirs(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor(valid),
            decoder_input_ids=torch.tensor(target),
            output_hidden_states=True,
            output_attentions=True,
        )


@pytest.fixture(scope="module")
def heard(pair, source, target, valid):
    """Ours of the same sentences: logits and intermediates."""

    @partial(jax.jit, compiler_options=QUICK)
    def run(params):
        with tapping():  # also of attention weights
            return pair.model.apply(
                {"params": params},
                source,
                target,
                valid,
                mutable=["intermediates"],
                capture_intermediates=lambda module, method: isinstance(module, Block | Stack),
            )

    logits, variables = run(pair.params)
    return logits, variables["intermediates"]


def test_logits_are_theirs(said, heard, assert_equal):
    logits = said.logits.numpy()
    assert logits.std() > 0.1
    assert_equal(heard[0], logits)


def scaled(pair: Pair) -> bool:
    """True if the decoder's last vectors are theirs times d_model^-0.5."""
    return getattr(pair.theirs.config, "scale_decoder_outputs", False)


def test_hidden_states_are_theirs(pair, said, heard, valid, assert_equal):
    for stack, theirs in (
        ("encoder", said.encoder_hidden_states),
        ("decoder", said.decoder_hidden_states),
    ):
        blocks = heard[1][stack]
        there = valid if stack == "encoder" else np.ones((B, T), bool)
        last = sum(name.startswith("blocks_") for name in blocks) - 1
        # The last of T5's is given after the norm that follows it.
        for i in range(last if pair.model.config.norm.placement == "pre" else last + 1):
            ours = np.asarray(blocks[f"blocks_{i}"]["__call__"][0][0])
            assert_equal(ours[there], theirs[i + 1].numpy()[there])
        factor = pair.model.config.d_model**0.5 if scaled(pair) and stack == "decoder" else 1.0
        ours = np.asarray(blocks["__call__"][0][0]) * factor
        assert_equal(ours[there], theirs[-1].numpy()[there])


def test_attention_weights_are_theirs(said, heard, valid, assert_equal):
    for stack, part, theirs in (
        ("encoder", "attention", said.encoder_attentions),
        ("decoder", "attention", said.decoder_attentions),
        ("decoder", "cross_attention", said.cross_attentions),
    ):
        for i, weights in enumerate(theirs):
            ours = np.asarray(heard[1][stack][f"blocks_{i}"][part]["weights"][0])
            there = valid if stack == "encoder" else np.ones((B, T), bool)
            here = np.broadcast_to(there[:, None], ours.shape[:3])
            assert_equal(ours[here], weights.numpy()[here])


def test_gradients_are_theirs(pair, torch, source, target, valid, assert_equal):
    """The loss depends on every logit; where ours is theirs times c, the slope is theirs over c."""
    config = pair.model.config
    weights = np.random.default_rng(2).standard_normal((B, T, config.vocab_size), np.float32)

    @partial(jax.jit, compiler_options=QUICK)
    @jax.grad
    def ours(params):
        logits = pair.model.apply({"params": params}, source, target, valid)
        return jnp.sum(weights * jnp.tanh(logits))

    pair.theirs.zero_grad()
    logits = pair.theirs(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor(valid),
        decoder_input_ids=torch.tensor(target),
    ).logits
    (torch.tensor(weights) * torch.tanh(logits)).sum().backward()
    named = dict(pair.theirs.named_parameters())
    grads = {
        name: np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy()
        for name, leaf in named.items()
        if leaf.requires_grad
    }
    if config.output.bias:  # a buffer there, which has no gradient
        slope = (torch.tensor(weights) * (1 - torch.tanh(logits) ** 2)).sum((0, 1))[None]
        grads["final_logits_bias"] = slope.detach().numpy()
    family = FAMILIES[pair.theirs.config.model_type]
    rows = family.weight_map(spec_of(pair.model), pair.theirs.config.to_dict())
    expected = to_jax(rows, param_shapes(pair.model), grads, grads.__getitem__)
    t5 = family.model_type in ("t5", "mt5")
    for path, leaf in flatten_dict(ours(pair.params), sep="/").items():
        square = 1.0
        if t5 and path.endswith("query/kernel"):
            square = config.key_size
        elif t5 and path == "decoder/final_norm/scale" and scaled(pair):
            square = 1 / config.d_model
        given, wanted = np.asarray(leaf), expected[path] / square
        if path.endswith("embedding/table") and not t5:
            pad = pair.theirs.config.pad_token_id  # theirs never learns its row
            given, wanted = np.delete(given, pad, 0), np.delete(wanted, pad, 0)
        assert_equal(given, wanted, 1e-4)


def test_an_exported_folder_says_the_same_there(
    pair, torch, transformers, said, source, target, valid, tmp_path, assert_equal
):
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    ids |= {"pad_token_id": 1} if pair.theirs.config.model_type == "m2m_100" else {}
    folder = tmp_path / "ours"
    family = pair.theirs.config.model_type
    save_pretrained(folder, pair.model, pair.params, family=family, token_ids=ids)
    back, report = type(pair.theirs).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        logits = back.eval()(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor(valid),
            decoder_input_ids=torch.tensor(target),
        ).logits
    assert_equal(logits.numpy(), said.logits.numpy())


def test_the_encoder_of_t5_says_the_same_alone(
    torch, transformers, source, valid, tmp_path, assert_equal
):
    theirs = randomized(torch, transformers.T5EncoderModel(transformers.T5Config(**T5)))
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_pretrained(tmp_path / "theirs")
    model, params = loaded.model, loaded.params
    assert isinstance(model, EncoderOnly)
    run = partial(jax.jit, compiler_options=QUICK)
    ours = run(lambda: model.apply({"params": params}, source, valid).hidden)()
    with torch.no_grad():
        expected = theirs(torch.tensor(source), torch.tensor(valid)).last_hidden_state.numpy()
    assert_equal(np.asarray(ours)[valid], expected[valid])
    save_pretrained(tmp_path / "ours", model, params)
    back = transformers.T5EncoderModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        again = back(torch.tensor(source), torch.tensor(valid)).last_hidden_state.numpy()
    assert_equal(again[valid], expected[valid])


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_theirs_up_to_a_thousand(torch, transformers, causal):
    from transformers.models.t5.modeling_t5 import T5Attention

    queries, keys = np.arange(0, 1100, 7), np.arange(1100)
    for buckets, farthest in ((4, 3), (6, 8), (8, 128), (31, 100), (32, 128), (64, 1000)):
        theirs = T5Attention._relative_position_bucket(
            torch.tensor(keys[None] - queries[:, None]), not causal, buckets, farthest
        )
        distances = queries[:, None] - keys[None]
        ours = relative_buckets(distances, buckets, farthest, causal)
        assert np.array_equal(ours, theirs.numpy())


@pytest.fixture(scope="module")
def tiny(torch, tmp_path_factory, real_data):
    """The hub's tiny T5 with its weights as safetensors."""
    folder = tmp_path_factory.mktemp("tiny")
    published = real_data / "tokenizers/checkpoints/hf-tiny/T5ForConditionalGeneration"
    for path in published.glob("*.json"):
        shutil.copy(path, folder)
    tensors = torch.load(published / "pytorch_model.bin", weights_only=True)
    save_file({name: leaf.numpy() for name, leaf in tensors.items()}, folder / "model.safetensors")
    return folder


def test_the_tiny_t5_of_the_hub_says_the_same_here(
    torch, transformers, tiny, source, target, assert_equal
):
    folder = tiny
    loaded = load_pretrained(folder)
    model, params, tokenizer = loaded.model, loaded.params, loaded.tokenizer
    assert tokenizer.decode(tokenizer.encode("a tiny model")) == "a tiny model"
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target)
        ).logits.numpy()
    run = jax.jit(lambda params: model.apply({"params": params}, source, target))
    assert_equal(run(params), expected)
