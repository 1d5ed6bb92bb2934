"""T5 and Marian of `transformers` say the same here, and ours say the same there."""

import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxformer import load_pretrained, save_pretrained
from jaxformer.config.positions import relative_buckets
from jaxformer.nn.models import EncoderDecoder, EncoderOnly
from jaxformer.ops import attention
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.model_specs import param_shapes, spec_of
from jaxformer.pretrained.weight_map import to_jax
from tests.peers.pairs import SIZES, V, build, weigh_ours, weigh_theirs

pytestmark = pytest.mark.peer
B, S, T = 3, 7, 5

UNLIKE = dict.fromkeys(SIZES, {"decoder_layers": 2})
UNLIKE["MT5"] = {"num_layers": 2, "num_decoder_layers": 1}
UNLIKE["T5"] = UNLIKE["MT5"] | {"tie_word_embeddings": True}
"""Encoder and decoder have unlike numbers of layers."""
CASES = {
    "bart": ("Bart", {"activation_function": "relu", "scale_embedding": True}),
    "m2m_100": ("M2M100", {"activation_function": "relu"}),
    "mbart": ("MBart", {"activation_function": "gelu", "scale_embedding": True}),
    "mt5": ("MT5", {"feed_forward_proj": "gated-gelu"}),
    "t5": ("T5", {}),
    "t5, silu without a gate, of other widths": (
        "T5",
        {
            "num_decoder_layers": 2,
            "d_kv": 5,
            "relative_attention_num_buckets": 4,
            "feed_forward_proj": "silu",
            "layer_norm_epsilon": 0.1,
        },
    ),
    "t5 1.1": ("T5", {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    "t5, relu with a gate": ("T5", {"feed_forward_proj": "gated-relu"}),
    "marian": ("Marian", {}),
    "marian of two vocabularies": (
        "Marian",
        {
            "decoder_vocab_size": 17,
            "share_encoder_decoder_embeddings": False,
            "activation_function": "gelu",
            "scale_embedding": False,
        },
    ),
    "marian of three tables": (
        "Marian",
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "d_model": 14},
    ),
}


class Pair(NamedTuple):
    """A model of theirs, the same one here, and all that both say of the sentences."""

    theirs: Any
    model: EncoderDecoder
    params: Any
    expected: Any  # their outputs; their gradients are in their parameters
    weights: np.ndarray  # of the logits, in the sum whose gradient it is
    grads: Any
    logits: Any
    seen: Any  # what our modules recorded


SOURCE = np.random.default_rng(0).integers(2, V - 1, (B, S))
TARGET = np.random.default_rng(1).integers(2, V - 1, (B, T))
VALID = np.arange(S) < np.array([[S], [4], [2]])


def say(torch: Any, model: Any, **options: Any) -> Any:
    """Their outputs of the sentences."""
    ids = {"input_ids": torch.tensor(SOURCE), "decoder_input_ids": torch.tensor(TARGET)}
    return model(**ids, attention_mask=torch.tensor(VALID), **options)


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


@pytest.fixture(scope="module", params=CASES)
def pair(request, torch, transformers, tmp_path_factory):
    kind, changes = CASES[request.param]
    theirs = build(torch, transformers, kind, **UNLIKE[kind] | changes)
    theirs.set_attn_implementation("eager")
    randomized(torch, theirs)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    ours = load_pretrained(folder, attention_fn=attention.reference)
    assert isinstance(ours.model, EncoderDecoder) and ours.tokenizer is None
    expected = say(torch, theirs, output_hidden_states=True, output_attentions=True)
    (weights,) = weigh_theirs(torch, [expected.logits])
    grads, (logits,), seen = weigh_ours(ours.model, ours.params, [weights], SOURCE, TARGET, VALID)
    return Pair(theirs, ours.model, ours.params, expected, weights, grads, logits, seen)


def scaled(pair: Pair) -> bool:
    """True if the decoder's last vectors are theirs times d_model^-0.5."""
    return getattr(pair.theirs.config, "scale_decoder_outputs", False)


def test_each_vector_and_weight_is_theirs(pair, assert_equal):
    expected = pair.expected
    assert expected.logits.std() > 0.1
    assert_equal(pair.logits, expected.logits.detach())
    everywhere = np.ones((B, T), bool)
    for stack, there, vectors, attentions in (
        (
            "encoder",
            VALID,
            expected.encoder_hidden_states,
            {"attention": expected.encoder_attentions},
        ),
        (
            "decoder",
            everywhere,
            expected.decoder_hidden_states,
            {
                "attention": expected.decoder_attentions,
                "cross_attention": expected.cross_attentions,
            },
        ),
    ):
        seen = pair.seen[stack]
        ours = [seen[f"blocks_{i}"]["__call__"][0][0] for i in range(len(vectors) - 1)]
        if pair.model.config.norm.placement == "pre":
            ours.pop()  # the last of T5's is given after the norm that follows it
        factor = pair.model.config.d_model**0.5 if scaled(pair) and stack == "decoder" else 1.0
        ours_and_theirs = [*zip(ours, vectors[1:], strict=False)]
        ours_and_theirs.append((seen["__call__"][0] * factor, vectors[-1]))
        for given, wanted in ours_and_theirs:
            assert_equal(np.asarray(given)[there], wanted.detach().numpy()[there])
        for part, theirs in attentions.items():
            for i, wanted in enumerate(theirs):
                given = np.asarray(seen[f"blocks_{i}"][part]["weights"][0])
                queries = np.broadcast_to(there[:, None], given.shape[:3])
                assert_equal(given[queries], wanted.detach().numpy()[queries])


def test_the_gradient_is_theirs(pair, assert_equal):
    """Where ours is theirs times c, the slope is theirs over c."""
    config = pair.model.config
    grads = {
        name: np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy()
        for name, leaf in pair.theirs.named_parameters()
        if leaf.requires_grad
    }
    # A buffer there, which has no gradient.
    grads["final_logits_bias"] = pair.weights.sum((0, 1))[None]
    family = FAMILIES[pair.theirs.config.model_type]
    rows = family.weight_map(spec_of(pair.model), pair.theirs.config.to_dict())
    expected = to_jax(rows, param_shapes(pair.model), grads, grads.__getitem__)
    t5 = family.model_type in ("t5", "mt5")
    for path, leaf in flatten_dict(pair.grads, sep="/").items():
        square = 1.0
        if t5 and path.endswith("query/kernel"):
            square = config.key_size
        elif t5 and path == "decoder/final_norm/scale" and scaled(pair):
            square = 1 / config.d_model
        given, wanted = np.asarray(leaf), expected[path] / square
        if path.endswith("embedding/table") and not t5:
            pad = pair.theirs.config.pad_token_id  # theirs never learns its row
            given, wanted = np.delete(given, pad, 0), np.delete(wanted, pad, 0)
        most = max(1.0, abs(wanted).max())  # a sum's rounding is that of its terms
        assert_equal(given / most, wanted / most, 1e-4)


def test_an_exported_folder_says_the_same_there(pair, torch, tmp_path, assert_equal):
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    ids |= {"pad_token_id": 1} if pair.theirs.config.model_type == "m2m_100" else {}
    family = pair.theirs.config.model_type
    save_pretrained(tmp_path / "ours", pair.model, pair.params, family=family, token_ids=ids)
    back, report = type(pair.theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        assert_equal(say(torch, back.eval()).logits, pair.expected.logits.detach())


def test_the_encoder_of_t5_says_the_same_alone(torch, transformers, tmp_path, assert_equal):
    theirs = randomized(torch, transformers.T5EncoderModel(transformers.T5Config(**SIZES["T5"])))
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_pretrained(tmp_path / "theirs")
    assert isinstance(loaded.model, EncoderOnly)
    ours = jax.jit(loaded.model.apply)({"params": loaded.params}, SOURCE, VALID).hidden
    save_pretrained(tmp_path / "ours", loaded.model, loaded.params)
    back = transformers.T5EncoderModel.from_pretrained(tmp_path / "ours").eval()
    for model in (theirs, back):
        with torch.no_grad():
            expected = model(torch.tensor(SOURCE), torch.tensor(VALID)).last_hidden_state.numpy()
        assert_equal(np.asarray(ours)[VALID], expected[VALID])


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


def test_the_tiny_t5_of_the_hub_says_the_same_here(
    torch, transformers, real_data, tmp_path, assert_equal
):
    published = real_data / "tokenizers/checkpoints/hf-tiny/T5ForConditionalGeneration"
    for path in published.glob("*.json"):
        shutil.copy(path, tmp_path)
    tensors = torch.load(published / "pytorch_model.bin", weights_only=True)
    tensors = {name: leaf.numpy() for name, leaf in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    ours = load_pretrained(tmp_path)
    assert ours.tokenizer.decode(ours.tokenizer.encode("a tiny model")) == "a tiny model"
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = say(torch, theirs).logits
    found = jax.jit(ours.model.apply)({"params": ours.params}, SOURCE, TARGET, VALID)
    assert_equal(found, expected)
