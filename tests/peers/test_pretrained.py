"""Models of `transformers` with their weights here. Run with `-m peer`; needs torch."""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    NormOptions,
    TransformerConfig,
)
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import EncoderOnly
from jaxformer.pretrained import Loaded, load_pretrained, save_pretrained
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import canonical_names
from jaxformer.pretrained.model_specs import spec_of
from jaxformer.pretrained.weight_map import to_hf
from jaxformer.text import tokenizers
from tests.peers.pairs import weigh_ours, weigh_theirs

safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs the extra peers")
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
    ("Qwen2ForCausalLM", {**GROUPED, **TIED, **ROPE}),
    ("Qwen2ForSequenceClassification", {"num_labels": 3}),
    ("Qwen3ForCausalLM", {"head_dim": 4, **GROUPED, **BIASED, **EPS, **TIED}),
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
]
SIZES = {"gpt2": GPT2, "bert": BERT, "distilbert": DISTILBERT, "roberta": BERT}
SIZES |= {"xlm-roberta": BERT, "opt": OPT, "gpt_neox": NEOX}
SIZES |= dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), LLAMA)


@pytest.fixture(scope="module")
def make(torch, transformers):
    """A model of theirs with random weights, attending as their equations say."""

    def build(name, **changes):
        kind = getattr(transformers, name)
        sizes = SIZES[kind.config_class.model_type]
        given = {"vocab_size": 23, "bos_token_id": 1, "eos_token_id": 2, **sizes, **changes}
        config = kind.config_class(**deepcopy(given))  # it writes into the dicts of `given`
        config._attn_implementation = "eager"
        torch.manual_seed(3)
        model = kind(config).eval()
        with torch.no_grad():
            for weights in model.parameters():
                weights += 0.3 * torch.randn(weights.shape)
        return model

    return build


def inputs_of(torch, model):
    """The arguments of their model and of ours."""
    name, ids = type(model).__name__, IDS
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
    bare += ("GPTNeoXModel", "OPTModel")
    return "hidden" if type(model).__name__ in bare else None


class Pair(NamedTuple):
    """A model of theirs and the same of ours, and what both said of the same text."""

    theirs: Any
    ours: Loaded
    folder: Path
    inputs: dict  # theirs
    expected: Any  # their outputs
    found: list  # ours
    state: dict  # what our modules recorded
    grads: dict  # ours, of a random weighting of the outputs; theirs are in their parameters


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def pair(request, torch, make, tmp_path_factory):
    name, changes = request.param
    theirs, folder = make(name, **changes), tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    ours = load_pretrained(folder)
    theirs_in, ours_in = inputs_of(torch, theirs)
    expected = theirs(**theirs_in, output_hidden_states=True, output_attentions=True)
    weights = weigh_theirs(torch, outputs(expected))
    grads, found, state = weigh_ours(
        ours.model, ours.params, weights, *ours_in, method=method_of(theirs)
    )
    return Pair(theirs, ours, folder, theirs_in, expected, found, state, grads)


def test_each_vector_and_weight_is_theirs(pair, assert_equal):
    expected = pair.expected
    for given, wanted in zip(pair.found, outputs(expected), strict=True):
        assert_equal(given, wanted.detach())
    for given, wanted in zip(seen(pair, "weights"), expected.attentions, strict=True):
        assert_equal(given, wanted.detach())
    final, *blocks = seen(pair, "__call__")
    for given, wanted in zip([*blocks[:-1], final], expected.hidden_states[1:], strict=True):
        assert_equal(given, wanted.detach())


def seen(pair, name):
    """The values that our modules recorded under `name`, in the order of their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(pair.state)
    return [leaf for path, leaf in leaves if f"'{name}'" in jax.tree_util.keystr(path)]


def test_the_gradient_is_theirs(pair, assert_equal):
    config = json.loads((pair.folder / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    rows = [row for row in family.weight_map(spec_of(pair.ours.model), config) if row.hf]
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(pair.grads, sep="/").items()}
    zeros = dict(to_hf(rows, lambda path: np.zeros_like(leaves[path])))
    given = {name: x - zeros[name] for name, x in to_hf(rows, leaves.__getitem__)}
    wanted = {name: x.grad for name, x in pair.theirs.named_parameters() if x.grad is not None}
    written = {name: row.hf[0] for row in rows for name in row.hf}
    for canonical, name in canonical_names(family, wanted).items():
        gradient = wanted[name]
        most = max(1.0, abs(gradient).max().item())  # a sum's rounding is that of its terms
        assert_equal(given.pop(written[canonical]) / most, gradient / most, 1e-4)
    assert len(wanted) > 8
    assert all(not np.any(rest) for rest in given.values())


def test_transformers_loads_what_we_save(pair, torch, tmp_path, assert_equal):
    theirs, ours = pair.theirs, pair.ours
    save_pretrained(
        tmp_path / "ours",
        ours.model,
        ours.params,
        family=theirs.config.model_type,
        token_ids={"pad_token_id": theirs.config.pad_token_id},
    )
    back, said = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not said["missing_keys"] and not said["mismatched_keys"]
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_read_as_float32(torch, make, tmp_path, dtype):
    model = make("GPT2LMHeadModel").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    table = load_pretrained(tmp_path).params["embedding"]["table"]
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, model.transformer.wte.weight.detach().float())


def test_a_switch_that_we_lack_is_refused_before_its_weights_mislead(make, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    make("LlamaForCausalLM", rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match='rope_type="dynamic" is not supported: only "default", "li'
    ):
        load_pretrained(tmp_path)


@pytest.fixture
def tiny(tmp_path, real_data):
    """A copy of one of the small checkpoints, which may be written to."""

    def copy(name):
        source = real_data / TINY / name
        return shutil.copytree(source, tmp_path / name, copy_function=shutil.copyfile)

    return copy


def test_the_published_bert_is_converted_and_classifies(torch, transformers, tiny, assert_equal):
    folder = tiny("BertForSequenceClassification")
    with pytest.raises(DataError, match="can run code"):
        load_pretrained(folder)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    ours = load_pretrained(folder)
    theirs = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    rows = ours.tokenizer.encode_batch(["a short text", "another one, and a little longer"])
    ids = np.zeros((2, max(map(len, rows))), np.int64)
    for row, given in zip(ids, rows, strict=True):
        row[: len(given)] = given
    present = np.arange(ids.shape[1]) < np.array([[len(row)] for row in rows])
    with torch.no_grad():
        found = theirs(torch.tensor(ids), torch.tensor(present.astype(np.int64))).logits
    assert_equal(jax.jit(ours.model.apply)({"params": ours.params}, ids, present), found)


def test_the_published_gpt2_gives_the_same_vectors(torch, transformers, tiny, assert_equal):
    folder = tiny("gpt2")
    ours = load_pretrained(folder)
    theirs = transformers.GPT2Model.from_pretrained(folder).eval()
    ids = np.random.default_rng(0).integers(0, 21, (2, 11))
    with torch.no_grad():
        found = theirs(torch.tensor(ids)).last_hidden_state
    assert_equal(ours.model.apply({"params": ours.params}, ids, method="hidden"), found)
    assert ours.tokenizer.vocab_size == 21


def test_a_word_list_of_bert_is_saved_as_they_read_it(torch, transformers, random_params, tmp_path):
    """With what stands around a text, which ours leaves to the models."""
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] a ##b c ecole".split()
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    tokenizer = tokenizers.load(tmp_path)
    config = replace(
        TransformerConfig(vocab_size=9, d_model=8, d_ff=9, num_heads=2, max_len=7),
        num_encoder_layers=1,
        num_decoder_layers=0,
        norm=NormOptions(eps=1e-5),
        embeddings=EmbeddingOptions(norm=True, scale=False, num_types=2),
        feed_forward=FeedForwardOptions("gelu"),
        positions=Learned(),
    )
    model = EncoderOnly(config)
    params = random_params(model, np.ones((2, 3), int))
    save_pretrained(tmp_path / "saved", model, params, tokenizer, family="bert")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    published = transformers.BertTokenizer.from_pretrained(tmp_path)
    for text in ("ab", "École c", "", "x [MASK]"):
        assert theirs(text).input_ids == published(text).input_ids
        assert len(theirs(text).input_ids) >= 2
