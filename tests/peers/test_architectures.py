"""Models of `transformers` and ours with their weights: values, slopes, and back again."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxformer.config.positions import relative_buckets
from jaxformer.errors import DataError
from jaxformer.nn.models import EncoderOnly
from jaxformer.ops import attention
from jaxformer.pretrained import Loaded, load_pretrained, save_pretrained
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import canonical_names
from jaxformer.pretrained.model_specs import param_shapes, spec_of
from jaxformer.pretrained.weight_map import to_jax
from tests.peers.pairs import SIZES as TRANSLATORS
from tests.peers.pairs import V, weigh_ours, weigh_theirs
from tests.peers.pairs import build as build_translator

pytestmark = pytest.mark.peer

TINY = "tokenizers/checkpoints/hf-tiny"
IDS = np.random.default_rng(5).integers(1, 23, (2, 7))
LENGTHS = np.array([7, 5])
PRESENT = np.arange(7) < LENGTHS[:, None]

GPT2 = {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 13, "pad_token_id": 0}
BERT = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
BERT |= {"intermediate_size": 17, "max_position_embeddings": 13}
DISTILBERT = {"dim": 12, "n_heads": 3, "n_layers": 2, "hidden_dim": 17}
DISTILBERT |= {"max_position_embeddings": 13}
LLAMA = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "pad_token_id": 0}
LLAMA |= {"intermediate_size": 17, "max_position_embeddings": 13, "num_key_value_heads": 3}
GROUPED, WIDE = {"num_key_value_heads": 1}, {"head_dim": 6}
BIASED, UP = {"attention_bias": True}, {"mlp_bias": True}
TIED, RELU = {"tie_word_embeddings": True}, {"hidden_act": "relu"}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 3}
QWEN3_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 11}
EPS, SHALLOW = {"rms_norm_eps": 1e-2}, {"num_hidden_layers": 1}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}}
OPT = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "pad_token_id": 0}
OPT |= {"ffn_dim": 17, "max_position_embeddings": 13, "word_embed_proj_dim": 12}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 0.5}
LLAMA3 |= {"high_freq_factor": 2.0, "original_max_position_embeddings": 9}
LLAMA3 = {"rope_parameters": LLAMA3}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0, "beta_fast": 2.0}
YARN |= {"original_max_position_embeddings": 13}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
NEOX |= {"hidden_size": 24}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
HALF["rope_parameters"] |= {"partial_rotary_factor": 0.5}

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
THREE = {"num_hidden_layers": 3, "layer_types": WINDOWS}
BY_LAYER = {"full_attention": LINEAR["rope_parameters"]}
BY_LAYER |= {"sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}
BY_LAYER = {"rope_parameters": BY_LAYER}
LINEAR_ALONE = {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}

SILU = {"feed_forward_proj": "silu", "layer_norm_epsilon": 0.1}
UNSHARED = {"share_encoder_decoder_embeddings": False}
UNSCALED = {"activation_function": "gelu", "scale_embedding": False}

# Each kind of head, and each switch of a family in each of its positions.
CASES = [
    ("GPT2LMHeadModel", {}),
    ("GPT2LMHeadModel", {"activation_function": "relu", "n_inner": 17, "n_layer": 1}),
    ("GPT2LMHeadModel", {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-2}),
    ("GPT2Model", {"n_inner": 17, "activation_function": "gelu"}),
    ("GPT2ForSequenceClassification", {"num_labels": 3, "activation_function": "silu"}),
    ("BertModel", {}),
    ("BertForMaskedLM", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2, **SHALLOW}),
    ("BertForPreTraining", {"hidden_act": "silu", "type_vocab_size": 3}),
    ("BertForSequenceClassification", {"num_labels": 3, "type_vocab_size": 1}),
    ("BertForTokenClassification", {"num_labels": 3, **RELU}),
    ("BertForQuestionAnswering", {"type_vocab_size": 3, "layer_norm_eps": 1e-2}),
    ("DistilBertModel", {"activation": "relu", "sinusoidal_pos_embds": True}),
    ("DistilBertForMaskedLM", {}),
    ("DistilBertForSequenceClassification", {"num_labels": 3}),
    ("DistilBertForTokenClassification", {"num_labels": 3, "n_layers": 1}),
    ("DistilBertForQuestionAnswering", {"activation": "relu"}),
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {**GROUPED, **WIDE, **UP, **TIED, **RELU, **EPS, **SHALLOW, **ROPE}),
    ("LlamaForCausalLM", {**GROUPED, **BIASED, **UP, **RELU, **SHALLOW}),
    ("LlamaForCausalLM", {**WIDE, **BIASED, **TIED, **RELU, **EPS, **ROPE}),
    ("LlamaModel", GROUPED),
    ("LlamaForSequenceClassification", {"num_labels": 3, **BIASED, **WIDE}),
    ("LlamaForCausalLM", {**LLAMA3, "head_dim": 8}),
    ("LlamaForCausalLM", {**LINEAR, **GROUPED}),
    ("LlamaForCausalLM", {"rope_parameters": YARN, "head_dim": 8}),
    ("LlamaForCausalLM", {"rope_parameters": {**YARN, "attention_factor": 1.5}, **WIDE}),
    ("MistralForCausalLM", {"sliding_window": 3, **TIED}),
    ("MistralModel", {"sliding_window": 5, **GROUPED, **WIDE, **LLAMA3}),
    ("MixtralForCausalLM", {**GROUPED, **MIXTRAL, **TIED, **ROPE}),
    ("MixtralModel", {**MIXTRAL, **WIDE, "num_local_experts": 3, "sliding_window": 4, **RELU}),
    ("MixtralForSequenceClassification", {"num_labels": 3, **MIXTRAL, **SHALLOW}),
    ("Qwen3MoeForCausalLM", {**GROUPED, **QWEN3_MOE, **EPS}),
    ("Qwen3MoeForCausalLM", {**QWEN3_MOE, **WIDE, **BIASED, **TIED, "norm_topk_prob": True}),
    ("Qwen3MoeModel", {**QWEN3_MOE, "num_experts_per_tok": 1, **SHALLOW, **RELU}),
    ("Qwen2ForCausalLM", {**GROUPED, **TIED, **ROPE}),
    ("Qwen2ForSequenceClassification", {"num_labels": 3}),
    ("Qwen3ForCausalLM", {"head_dim": 4, **GROUPED, **BIASED, **EPS, **TIED}),
    ("Olmo2ForCausalLM", {**GROUPED, **BIASED, **EPS, **TIED}),
    ("Olmo2Model", {**LLAMA3}),
    ("Olmo2ForSequenceClassification", {"num_labels": 3, **GROUPED}),
    ("GemmaForCausalLM", WIDE),
    ("GemmaModel", {"head_dim": 4, **GROUPED, **BIASED, **RELU, **EPS}),
    (
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 4, "sliding_window": 2, "query_pre_attn_scalar": 24, **CAPS},
    ),
    ("Gemma2Model", {**WIDE, "layer_types": ["sliding_attention"] * 2, "sliding_window": 4}),
    (
        "Gemma2ForSequenceClassification",
        {**WIDE, "num_labels": 3, "attn_logit_softcapping": None, "num_hidden_layers": 3},
    ),
    (
        "Gemma3ForCausalLM",
        {**GROUPED, **WIDE, "sliding_window": 3, "query_pre_attn_scalar": 24, **BY_LAYER, **THREE},
    ),
    ("Gemma3ForCausalLM", {**WIDE, **LINEAR_ALONE, "layer_types": ["full_attention"] * 2}),
    ("Gemma3TextModel", {**WIDE, **BIASED, "sliding_window_pattern": 2, **EPS, **CAPS}),
    (
        "Gemma3TextForSequenceClassification",
        {**WIDE, "num_labels": 3, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
    ),
    ("RobertaModel", {"type_vocab_size": 1}),
    ("RobertaForMaskedLM", {"layer_norm_eps": 1e-2}),
    ("RobertaForSequenceClassification", {"num_labels": 3}),
    ("RobertaForTokenClassification", {"num_labels": 3}),
    ("XLMRobertaForQuestionAnswering", {}),
    ("GPTNeoXForCausalLM", {**HALF, "use_parallel_residual": False, "hidden_act": "gelu_fast"}),
    ("GPTNeoXForCausalLM", {**TIED, **SHALLOW, "rope_parameters": YARN, "layer_norm_eps": 1e-2}),
    ("GPTNeoXModel", {}),
    ("GPTNeoXForSequenceClassification", {"num_labels": 3}),
    ("OPTForCausalLM", {"do_layer_norm_before": False, "activation_function": "gelu"}),
    ("OPTForCausalLM", {"tie_word_embeddings": False, **SHALLOW}),
    ("OPTModel", {}),
    ("OPTForSequenceClassification", {"num_labels": 3}),
    ("Bart", {"activation_function": "relu", "scale_embedding": True}),
    ("M2M100", {"activation_function": "relu"}),
    ("MBart", {"activation_function": "gelu", "scale_embedding": True}),
    ("MT5", {"feed_forward_proj": "gated-gelu"}),
    ("T5", {}),
    ("T5", {"num_decoder_layers": 2, "d_kv": 5, "relative_attention_num_buckets": 4, **SILU}),
    ("T5", {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    ("T5", {"feed_forward_proj": "gated-relu"}),
    ("Marian", {}),
    ("Marian", {**UNSHARED, "decoder_vocab_size": 17, **UNSCALED}),
    ("Marian", {**UNSHARED, "tie_word_embeddings": False, "d_model": 14}),
]
SIZES = {"gpt2": GPT2, "bert": BERT, "distilbert": DISTILBERT, "roberta": BERT}
SIZES |= {"xlm-roberta": BERT, "opt": OPT, "gpt_neox": NEOX}
SIZES |= dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "gemma2", "gemma3_text"), LLAMA
)
SIZES |= dict.fromkeys(("mixtral", "qwen3_moe"), LLAMA)


UNLIKE = dict.fromkeys(TRANSLATORS, {"decoder_layers": 2})
UNLIKE["MT5"] = {"num_layers": 2, "num_decoder_layers": 1}
UNLIKE["T5"] = UNLIKE["MT5"] | {"tie_word_embeddings": True}
"""Encoder and decoder have unlike numbers of layers."""

SOURCE = np.random.default_rng(0).integers(2, V - 1, (3, 7))
TARGET = np.random.default_rng(1).integers(2, V - 1, (3, 5))
VALID = np.arange(7) < np.array([[7], [4], [2]])
SEQ2SEQ_IN = {"input_ids": SOURCE, "decoder_input_ids": TARGET, "attention_mask": VALID}


@pytest.fixture(scope="module")
def make(torch, transformers):
    """A model of theirs with random weights, attending as their equations say."""

    def build(name, **changes):
        torch.manual_seed(3)
        if name in TRANSLATORS:
            model = build_translator(torch, transformers, name, **UNLIKE[name] | changes)
        else:
            kind = getattr(transformers, name)
            sizes = SIZES[kind.config_class.model_type]
            given = {"vocab_size": 23, "bos_token_id": 1, "eos_token_id": 2, **sizes, **changes}
            model = kind(kind.config_class(**deepcopy(given)))  # which changes its dicts
        _use_equations(model)
        weights = [x for x in model.parameters() if x.requires_grad]  # Marian's sines stay sines
        weights += [model.final_logits_bias] if hasattr(model, "final_logits_bias") else []
        with torch.no_grad():
            for each in weights:
                each += 0.3 * torch.randn(each.shape)
        return model.eval()

    return build


def _use_equations(model):
    """Attention and experts as their equations say; grouped products need sizes of 16 bytes."""
    model.set_attn_implementation("eager")
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")


def _of_each_expert(model_type, slopes):
    """Slopes by the names of their folder, which has the matrices of each expert apart."""
    module, gate, up, down = {
        "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
        "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    }.get(model_type, ("mlp", "", "", ""))
    for name, slope in slopes.items():
        name = name.replace(".mlp.", f".{module}.")
        stem, found, part = name.partition(".experts.")
        if not found:
            yield name, slope
            continue
        for i, of_expert in enumerate(slope):
            if part == "gate_up_proj":
                first, second = np.split(of_expert, 2)
                yield f"{stem}.experts.{i}.{gate}.weight", first
                yield f"{stem}.experts.{i}.{up}.weight", second
            else:
                yield f"{stem}.experts.{i}.{down}.weight", of_expert


def inputs_of(torch, model):
    """The arguments of their model and of ours."""
    name, ids = type(model).__name__, IDS
    if model.config.is_encoder_decoder:
        theirs = {name: torch.tensor(value) for name, value in SEQ2SEQ_IN.items()}
        return theirs, (SOURCE, TARGET, VALID)
    if "Roberta" in name:
        ids = np.maximum(IDS, 2)  # 1 is padding, at which its vectors are others
        return {"input_ids": torch.tensor(ids)}, (ids, np.ones_like(PRESENT))
    if name.endswith("SequenceClassification"):
        ids = np.where(PRESENT, IDS, 0)  # by which a GPT finds the end of a text
    theirs = {"input_ids": torch.tensor(ids)}
    if "Bert" in name:
        theirs["attention_mask"] = torch.tensor(PRESENT.astype(np.int64))
    if name.startswith("Bert"):
        types = np.broadcast_to(np.arange(7) > 3, IDS.shape) * (model.config.type_vocab_size - 1)
        theirs["token_type_ids"] = torch.tensor(types)
        return theirs, (ids, PRESENT, types)
    if "attention_mask" in theirs or "Sequence" in name:
        return theirs, (ids, PRESENT)
    return theirs, (ids,)


def outputs(found):
    """The tensors of their output that ours has too: scores, or vectors."""
    names = ("prediction_logits", "seq_relationship_logits", "logits")
    names += ("last_hidden_state", "pooler_output", "start_logits", "end_logits")
    return [found[name] for name in names if found.get(name) is not None]


def method_of(model):
    bare = ("GPT2Model", "LlamaModel", "MistralModel", "GemmaModel", "Gemma2Model")
    bare += (
        "MixtralModel",
        "Qwen3MoeModel",
        "Gemma3TextModel",
        "Olmo2Model",
        "GPTNeoXModel",
        "OPTModel",
    )
    return "hidden" if type(model).__name__ in bare else None


class Pair(NamedTuple):
    """A model of theirs and the same of ours, and what both said of the same text."""

    theirs: Any
    ours: Loaded
    folder: Path
    inputs: dict  # theirs
    expected: Any  # their outputs
    weights: list  # of the outputs, in the sum that has the gradients
    found: list  # ours
    state: dict  # what our modules recorded
    grads: dict  # ours, of a random weighting of the outputs; theirs are in their parameters


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def pair(request, torch, make, tmp_path_factory):
    name, changes = request.param
    theirs, folder = make(name, **changes), tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    ours = load_pretrained(folder, attention_fn=attention.reference)
    theirs_in, ours_in = inputs_of(torch, theirs)
    expected = theirs(**theirs_in, output_hidden_states=True, output_attentions=True)
    assert outputs(expected)[0].std() > 0.1
    weights = weigh_theirs(torch, outputs(expected))
    method = method_of(theirs)
    grads, found, state = weigh_ours(ours.model, ours.params, weights, *ours_in, method=method)
    return Pair(theirs, ours, folder, theirs_in, expected, weights, found, state, grads)


def test_each_vector_and_weight_is_theirs(pair, assert_equal):
    expected = pair.expected
    for given, wanted in zip(pair.found, outputs(expected), strict=True):
        assert_equal(given, wanted.detach())
    for stack, there, vectors, attentions in stacks(pair):
        final, *blocks = seen(pair, *stack, "__call__")
        # The last vectors of T5's decoder are theirs times d_model^-0.5.
        factor = pair.ours.model.config.d_model**0.5 if stack == ["decoder"] and scaled(pair) else 1
        for given, wanted in zip([*blocks[:-1], final * factor], vectors[1:], strict=True):
            assert_equal(np.asarray(given)[there], wanted.detach().numpy()[there])
        for part, weights in attentions.items():
            for given, wanted in zip(seen(pair, *stack, part, "weights"), weights, strict=True):
                queries = np.broadcast_to(there[:, None], given.shape[:3])
                assert_equal(np.asarray(given)[queries], wanted.detach().numpy()[queries])


def stacks(pair):
    """Names on the paths of a stack's values, where a token is, and their vectors and weights."""
    said = pair.expected
    if not pair.theirs.config.is_encoder_decoder:
        there = np.ones(IDS.shape, bool)
        yield [], there, said.hidden_states, {"attention": said.attentions}
        return
    yield ["encoder"], VALID, said.encoder_hidden_states, {"attention": said.encoder_attentions}
    both = {"attention": said.decoder_attentions, "cross_attention": said.cross_attentions}
    yield ["decoder"], np.ones(TARGET.shape, bool), said.decoder_hidden_states, both


def scaled(pair):
    """True if the decoder's last vectors are theirs times d_model^-0.5."""
    return getattr(pair.theirs.config, "scale_decoder_outputs", False)


def seen(pair, *names):
    """The values that our modules recorded at paths with all `names`, in the order of paths."""
    leaves = jax.tree_util.tree_leaves_with_path(pair.state)
    paths = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    return [leaf for path, leaf in paths if all(f"'{name}'" in path for name in names)]


def test_the_gradient_is_theirs(pair, assert_equal):
    """Where ours is theirs times c, the slope is theirs over c.

    Both compute in float32. With float64 in its place on both sides (`jax_enable_x64`, and the
    names `jnp.float32` and `torch.float32` replaced), gradients of experts were equal to 4e-7 of
    the largest, and to 4e-6 without: what differs is rounding.
    """
    theirs, model = pair.theirs, pair.ours.model
    has_experts = theirs.config.model_type in ("mixtral", "qwen3_moe")
    tolerance = 1e-5 if has_experts else 1e-4
    family = FAMILIES[theirs.config.model_type]
    config = json.loads((pair.folder / "config.json").read_text())
    rows = family.weight_map(spec_of(model), config)
    leaves = {name: x for name, x in theirs.named_parameters() if x.requires_grad}
    slopes = {n: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for n, x in leaves.items()}
    if hasattr(theirs, "final_logits_bias"):  # a buffer there, which has no gradient
        slopes["final_logits_bias"] = pair.weights[0].sum((0, 1))[None]
    slopes = dict(_of_each_expert(theirs.config.model_type, slopes))
    names = canonical_names(family, slopes)
    shapes = param_shapes(model)
    expected = to_jax(rows, shapes, names, lambda name: slopes[names[name]])
    zero = to_jax(rows, shapes, names, lambda name: np.zeros_like(slopes[names[name]]))
    t5 = theirs.config.model_type in ("t5", "mt5")
    stored = {path for row in rows if row.names for path in row.paths}
    for path, leaf in flatten_dict(pair.grads, sep="/").items():
        if path not in stored:
            continue
        square = 1.0
        if t5 and path.endswith("query/kernel"):
            square = model.config.key_size
        elif path == "decoder/final_norm/scale" and scaled(pair):
            square = 1 / model.config.d_model
        given, wanted = np.asarray(leaf), (expected[path] - zero[path]) / square
        if path.endswith("embedding/table") and theirs.config.is_encoder_decoder and not t5:
            pad = theirs.config.pad_token_id  # theirs never learns its row
            given, wanted = np.delete(given, pad, 0), np.delete(wanted, pad, 0)
        most = max(1.0, abs(wanted).max())  # a sum's rounding is that of its terms
        assert_equal(given / most, wanted / most, tolerance)
    assert sum(np.any(x) for x in slopes.values()) > 8


def test_transformers_loads_what_we_save(pair, torch, tmp_path, assert_equal):
    theirs, ours, config = pair.theirs, pair.ours, pair.theirs.config
    ids = {name: getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")}
    ids["decoder_start_token_id"] = getattr(config, "decoder_start_token_id", None)
    ids = {name: value for name, value in ids.items() if value is not None}
    family = config.model_type
    save_pretrained(tmp_path / "ours", ours.model, ours.params, family=family, token_ids=ids)
    back, said = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(said.values()), said
    _use_equations(back)
    with torch.no_grad():
        given = outputs(back.eval()(**pair.inputs))
    for part, wanted in zip(given, outputs(pair.expected), strict=True):
        assert_equal(part, wanted.detach())


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForPreTraining", "LlamaForCausalLM"])
def test_a_folder_in_parts_is_one_model(make, tmp_path, name):
    model = make(name)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    whole, parts = (load_pretrained(tmp_path / part) for part in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "gpt2", "T5ForConditionalGeneration"]
)
def test_a_published_checkpoint_says_the_same_here(
    name, torch, transformers, real_data, tmp_path, assert_equal
):
    folder = tmp_path / name
    shutil.copytree(real_data / TINY / name, folder, copy_function=shutil.copyfile)
    if not (folder / "model.safetensors").exists():
        with pytest.raises(DataError, match="can run code"):
            load_pretrained(folder)
        tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        save_file(arrays, folder / "model.safetensors")  # torch's function refuses tied tensors
    ours = load_pretrained(folder)
    (text,) = ours.tokenizer.decode_batch(ours.tokenizer.encode_batch(["a short text"]))
    assert text == "a short text" or name == "gpt2"
    theirs = getattr(transformers, "GPT2Model" if name == "gpt2" else name).from_pretrained(folder)
    names = [*SEQ2SEQ_IN] if "T5" in name else ["input_ids", "attention_mask"]
    inputs = {key: SEQ2SEQ_IN[key] for key in (names[:1] if name == "gpt2" else names)}
    with torch.no_grad():
        (found, *_) = outputs(theirs.eval()(**{key: torch.tensor(x) for key, x in inputs.items()}))
    method = "hidden" if name == "gpt2" else None
    assert_equal(ours.model.apply({"params": ours.params}, *inputs.values(), method=method), found)


def test_the_encoder_of_t5_says_the_same_alone(torch, transformers, tmp_path, assert_equal):
    theirs = transformers.T5EncoderModel(transformers.T5Config(**TRANSLATORS["T5"])).eval()
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
