"""Weights of others: tables, settings and folders, without anything of theirs installed."""

import json
import sys
import types
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import jaxformer as jf
from jaxformer.config import Alibi, Learned
from jaxformer.distributed import single
from jaxformer.errors import ConfigError, DataError, MissingExtra
from jaxformer.nn.blocks import Block
from jaxformer.nn.heads import Classifier, MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderOnly
from jaxformer.nn.remat import REMAT
from jaxformer.ops.attention import auto_attention, blockwise, reference
from jaxformer.pretrained import load_pretrained, save_pretrained
from jaxformer.pretrained.config_keys import ACTIVATIONS
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import read_config, write_config
from jaxformer.pretrained.model_specs import param_shapes, spec_of
from jaxformer.text import tokenizers
from tests.pretrained.models import BERT, GPT2, MODELS, inputs_of


def same(given, expected, atol=0.0):
    """Both trees have the same leaves."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), given, expected)


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_has_one_place_in_a_folder_and_is_loaded_from_it(filled, saved, name):
    family, (model, params) = MODELS[name][0], filled(name)
    spec, paths = spec_of(model), flatten_dict(params, sep="/")
    table = FAMILIES[family].weight_map(spec, write_config(FAMILIES[family], spec))
    stored = [name for row in table for name in row.names]
    places = [(path, row.matrix) for row in table for path in row.paths]
    assert {path for path, _ in places} == set(paths)
    for path, leaf in paths.items():
        indices = [index for place, index in places if place == path]
        assert indices in ([None], [*range(len(leaf))]), path
    assert len(set(stored)) == len(stored)
    loaded = load_pretrained(saved(name))
    assert json.loads((saved(name) / "config.json").read_text())["model_type"] == family
    assert type(loaded.model) is type(model)
    after = spec_of(loaded.model)
    assert after.effective_fields() == spec.effective_fields()
    assert (after.kind, after.classes) == (spec.kind, spec.classes)
    assert loaded.tokenizer is None
    rounding = 1e-6 if family.startswith("gemma") else 0  # norms store their scale less one
    same(loaded.params, params, atol=rounding)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {np.dtype(np.float32)}


class Unhashable:
    """A user's attention function that cannot be the key of a cache."""

    __hash__ = None

    def __call__(self, *args, **kwargs):
        return reference(*args, **kwargs)


@pytest.mark.parametrize("name", ["gpt2", "bert, classes", "marian, two vocabularies"])
def test_shapes_are_those_of_init_also_where_a_part_has_no_hash(random_params, leaf_shapes, name):
    _, model = MODELS[name]
    expected = leaf_shapes(random_params(model, *inputs_of(model)))
    part = model.backbone if isinstance(model, Classifier) else model
    part = part.clone(attention_fn=Unhashable())
    unhashable = model.clone(backbone=part) if isinstance(model, Classifier) else part
    assert param_shapes(model) == param_shapes(unhashable) == expected
    param_shapes(model).clear()
    assert param_shapes(model) == expected, "the caller's dict is its own"


def test_attention_function_and_dtype_are_the_callers(folder):
    path = folder("gpt2")
    for read in (load_pretrained, jf.load):
        loaded = read(path, attention_fn=blockwise, dtype="bfloat16")
        assert loaded.model.attention_fn is blockwise
        assert loaded.model.config.dtype == "bfloat16"
    assert loaded.params["embedding"]["table"].dtype == np.float32


def test_each_call_of_a_published_model_is_computed_by_the_first_kernel_that_can(folder):
    path = folder("gpt2")
    models = [load_pretrained(path).model, jf.load(path).model, jf.open_folder(path).model()]
    assert [model.attention_fn for model in models] == [auto_attention] * 3


def test_on_a_cpu_a_published_model_computes_the_program_of_reference(folder):
    path = folder("gpt2")
    loaded = jf.load(path)
    plain = jf.load(path, attention_fn=reference)
    ids = np.ones((2, 5), np.int32)
    programs = [
        jax.jit(partial(each.model.apply, {"params": each.params})).lower(ids).as_text()
        for each in (loaded, plain)
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_numbers_become_float32_but_on_devices_stay_half(folder, dtype, rewrite):
    path = folder("gpt2")
    table = load_pretrained(path).params["embedding"]["table"]
    rewrite(path, lambda tensors: {name: x.astype(dtype) for name, x in tensors.items()})
    halved = load_pretrained(path).params["embedding"]["table"]
    placed = load_pretrained(path, strategy=single()).params["embedding"]["table"]
    np.testing.assert_array_equal(placed, table.astype(dtype))
    assert placed.dtype == dtype
    assert halved.dtype == np.float32
    np.testing.assert_array_equal(halved, table.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("theirs", ACTIVATIONS)
def test_every_name_of_an_activation_is_known(folder, theirs, change):
    path = folder("bert")
    change(path, hidden_act=theirs)
    assert load_pretrained(path).model.config.feed_forward.activation == ACTIVATIONS[theirs]


REFUSED = [
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "add_cross_attention", True),
    ("gpt2", "activation_function", "tanh"),
    ("gpt2", "tie_word_embeddings", "yes"),
    ("gpt2", "n_layer", 1.5),
    ("gpt2", "n_embd", 10**400),
    ("gpt2", "layer_norm_epsilon", float("nan")),
    ("gpt2", "quantization_config", {"bits": 4}),
    ("bert", "position_embedding_type", "relative_key"),
    ("bert", "is_decoder", True),
    ("bert", "type_vocab_size", 0),
    ("distilbert", "tie_word_embeddings", False),
    ("llama", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ("llama", "rope_parameters", {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 2.0}),
    ("llama", "rope_parameters", [1]),
    ("gemma2", "layer_types", ["full_attention", "sliding_attention"]),
    ("gemma2", "use_bidirectional_attention", True),
    ("gemma3", "layer_types", ["full_attention", "sliding_attention"]),
    ("gemma3", "rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
    ("gemma3", "rope_parameters", {"sliding_attention": {"type": "linear", "factor": 3.0}}),
    ("gemma3", "rope_scaling", [1]),
    ("opt", "enable_bias", False),
    ("llama", "mlp_bias", "yes"),
    ("gpt2", "model_type", "bloom"),
    ("gpt2", "architectures", ["GPT2DoubleHeadsModel"]),
    ("distilbert", "architectures", ["DistilBertForMultipleChoice"]),
]


@pytest.mark.parametrize(("name", "key", "value"), REFUSED)
def test_what_is_not_supported_is_refused_with_key_and_value(folder, name, key, value, change):
    path = folder(name)
    change(path, **{key: value})
    said = json.dumps(value).strip('"') if isinstance(value, bool | str) else ""
    with pytest.raises(ConfigError, match=rf"config\.json: {key}.*{said}"):
        load_pretrained(path)


@pytest.mark.parametrize(
    ("name", "key"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts_per_tok")]
)
def test_the_least_number_of_experts_is_named(name, key):
    with pytest.raises(ConfigError, match=f"{key}=0, but it must be a whole number from 1 to"):
        read_config(FAMILIES[name], {"model_type": name, key: 0})


@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window", None), ("use_bfloat16", False), ("pruned_heads", {}), ("pad_token_id", 0)],
)
def test_what_is_switched_off_or_changes_nothing_is_passed_over(folder, key, value):
    path = folder("llama")
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(said | {key: value}))
    load_pretrained(path)


def test_biases_of_one_kind_alone_leave_the_others_zero(folder, change, rewrite):
    path = folder("llama, biases")
    change(path, mlp_bias=False)
    rewrite(path, lambda x: {k: v for k, v in x.items() if "mlp" not in k or "bias" not in k})
    block = load_pretrained(path).params["decoder"]["blocks_0"]
    assert not block["feed_forward"]["gate"]["bias"].any()
    assert block["attention"]["query"]["bias"].all()


def test_names_of_older_files_are_known(folder, change, rewrite):
    path = folder("bert, masked and next")
    before = load_pretrained(path).params
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def age(tensors):
        found = {"bert.embeddings.position_ids": np.arange(11)[None]}
        for name, tensor in tensors.items():
            new = next((name.replace(a, b) for a, b in old.items() if name.endswith(a)), name)
            found[new] = tensor
        return found

    rewrite(path, age)
    # the published BERT says BertForMaskedLM and has the head of the next sentence too
    change(path, architectures=["BertForMaskedLM"])
    loaded = load_pretrained(path)
    assert isinstance(loaded.model, MaskedLanguageModel) and loaded.model.config.pooler == "tanh"
    same(loaded.params, before)


def test_a_model_without_a_head_has_names_without_a_prefix(folder, change, rewrite):
    path = folder("gpt2")
    before = load_pretrained(path).params
    rewrite(path, lambda x: {k.removeprefix("transformer."): v for k, v in x.items()})
    change(path, architectures=["GPT2Model"])
    same(load_pretrained(path).params, before)


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


WRONG = [
    (without("transformer.ln_f.bias"), "transformer.ln_f.bias"),
    (lambda x: x | {"transformer.extra": x["transformer.ln_f.bias"]}, "extra"),
    (
        lambda x: x | {"transformer.wpe.weight": x["transformer.wpe.weight"][:10]},
        "transformer.wpe.weight",
    ),
    (
        lambda x: x | {"lm_head.weight": x["transformer.wte.weight"] * 2},
        "lm_head.weight and transformer.wte.weight are one tensor.* but differ",
    ),
    (
        lambda x: x | {"transformer.ln_f.gamma": x["transformer.ln_f.bias"]},
        "transformer.ln_f.gamma",
    ),
    (
        lambda x: (
            x | {"transformer.ln_f.bias": np.where(np.arange(10) == 7, np.nan, np.float32(1))}
        ),
        "transformer.ln_f.bias",
    ),
    (
        lambda x: x | {"transformer.ln_f.bias": np.zeros(10, np.int64)},
        "transformer.ln_f.bias",
    ),
    (
        lambda x: {name: np.zeros(1, np.float32) for name in x},
        r"the tensors do not fit: (.* is \[1\], but .* is needed; ){4}.*; and \d+ more",
    ),
]


@pytest.mark.parametrize(("edit", "reason"), WRONG)
def test_tensors_that_are_not_the_models_are_refused_with_their_names(
    folder, edit, reason, rewrite
):
    path = folder("gpt2")
    rewrite(path, edit)
    with pytest.raises(DataError, match=rf"{path}: .*{reason}"):
        load_pretrained(path)


def test_an_equal_copy_of_a_tied_tensor_is_read(folder, rewrite):
    path = folder("gpt2")
    before = load_pretrained(path).params
    rewrite(path, lambda x: x | {"lm_head.weight": x["transformer.wte.weight"]})
    same(load_pretrained(path).params, before)


def test_two_names_of_one_tensor_are_refused(folder, rewrite):
    path = folder("bert")
    name = "bert.embeddings.LayerNorm"
    rewrite(path, lambda x: x | {f"{name}.gamma": x[f"{name}.weight"]})
    with pytest.raises(DataError, match="LayerNorm"):
        load_pretrained(path)


class DoubledBlock(Block):
    """A block of another function with the parameters of the usual one."""

    def after_attention(self, *inputs):
        return 2.0 * super().after_attention(*inputs)


class DerivedPositions(Learned):
    """Positions that may be added in another way."""


class DerivedDecoder(DecoderOnly):
    """A decoder that may have methods of its own."""


def doubled_attention(*args, **kwargs):
    return 2.0 * reference(*args, **kwargs)


def test_a_model_that_nobody_has_is_refused_with_what_each_family_lacks(filled, tmp_path):
    model = DecoderOnly(replace(GPT2, positions=Alibi()))
    _, params = filled("gpt2")
    del params["decoder"]["positions"]
    with pytest.raises(ConfigError, match=r"positions=Alibi\(\)"):
        save_pretrained(tmp_path / "new", model, params)
    with pytest.raises(ConfigError, match="bert: "):
        save_pretrained(tmp_path / "new", model, params, family="bert")
    with pytest.raises(ConfigError, match="family='bloom'"):
        save_pretrained(tmp_path / "new", model, params, family="bloom")
    with pytest.raises(ConfigError, match="Dense"):
        save_pretrained(tmp_path / "new", nn.Dense(3), params)
    with pytest.raises(ConfigError, match="DoubledBlock"):
        save_pretrained(tmp_path / "new", DecoderOnly(GPT2, block=DoubledBlock), params)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (DecoderOnly(GPT2, block=DoubledBlock), "DoubledBlock"),
        (DecoderOnly(GPT2, doubled_attention), "doubled_attention"),
        (Classifier(DecoderOnly(GPT2, doubled_attention), 3), "the attention_fn doubled_attention"),
        (DecoderOnly(replace(GPT2, positions=DerivedPositions())), "gpt2: positions=DerivedPos"),
        (DerivedDecoder(GPT2), "DerivedDecoder"),
        (Classifier(DecoderOnly(GPT2), 3, "mean"), "pooling='token'"),
    ],
)
def test_what_may_compute_something_else_is_never_exported(model, reason, random_params, tmp_path):
    params = random_params(model, *inputs_of(model))
    with pytest.raises(ConfigError, match=reason):
        save_pretrained(tmp_path / "new", model, params)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("part", [{"block": REMAT["matmuls"]}, {"attention_fn": auto_attention}])
def test_parts_that_compute_the_same_are_exported(part, random_params, tmp_path):
    model = DecoderOnly(GPT2, **part)
    params = random_params(model, *inputs_of(model))
    save_pretrained(tmp_path / "new", model, params)
    same(load_pretrained(tmp_path / "new").params, params)


def test_a_model_without_biases_is_written_with_biases_of_zero(random_params, tmp_path):
    model = DecoderOnly(replace(GPT2, use_bias=False))
    params = random_params(model, *inputs_of(model))
    save_pretrained(tmp_path / "new", model, params)
    loaded = load_pretrained(tmp_path / "new")
    assert loaded.model.config.use_bias
    for path, leaf in flatten_dict(loaded.params, sep="/").items():
        expected = flatten_dict(params, sep="/").get(path, np.zeros(leaf.shape))
        np.testing.assert_array_equal(leaf, expected)


def test_a_bert_without_token_types_is_refused_by_bert(filled, tmp_path):
    with pytest.raises(ConfigError, match="bert: type_vocab_size=0"):
        save_pretrained(tmp_path / "new", *filled("distilbert"), family="bert")


@pytest.mark.parametrize("name", ["bert, token classes", "bert, spans", "roberta, token classes"])
def test_a_pooler_that_a_head_does_not_use_is_passed_over(filled, folder, name, rewrite):
    path, prefix = folder(name), MODELS[name][0]
    pooler = {f"{prefix}.pooler.dense.weight": np.ones((10, 10), np.float32)}
    rewrite(path, lambda tensors: tensors | pooler)
    same(load_pretrained(path).params, filled(name)[1])


@pytest.mark.parametrize("name", ["bert, token classes", "bert, spans"])
def test_a_pooler_that_no_output_depends_on_is_not_written(filled, tmp_path, name):
    model, params = filled(name)
    pooled = model.copy(backbone=EncoderOnly(BERT))
    pooler = {"kernel": np.ones((10, 10), np.float32), "bias": np.ones(10, np.float32)}
    backbone = params["backbone"] | {"pooler": pooler}
    save_pretrained(tmp_path / "new", pooled, params | {"backbone": backbone})
    loaded = load_pretrained(tmp_path / "new")
    same(loaded.params, params)
    assert type(loaded.model) is type(model)


def test_parameters_of_another_model_are_refused(filled, tmp_path):
    model, params = filled("gpt2")
    del params["decoder"]["final_norm"]["bias"]
    with pytest.raises(ConfigError, match="decoder/final_norm/bias"):
        save_pretrained(tmp_path / "new", model, params)


def test_a_parameter_that_they_lack_must_be_zero(filled, tmp_path):
    model, params = filled("gpt2, classes")
    params["head"]["bias"] = params["head"]["bias"] + 1
    with pytest.raises(ConfigError, match="head/bias "):
        save_pretrained(tmp_path / "new", model, params)


def test_a_folder_that_holds_something_is_left_alone(filled, tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        save_pretrained(tmp_path, *filled("gpt2"))
    with pytest.raises(ConfigError, match=f"{tmp_path}/note"):
        save_pretrained(tmp_path / "note", *filled("gpt2"))
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_a_folder_appears_whole_or_not_at_all(filled, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(tmp_path / "new", *filled("gpt2"))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gpt2", "t5 1.1", "marian, two vocabularies"])
def test_the_weights_are_those_that_safetensors_writes_to_the_byte(saved, tmp_path, name):
    path = saved(name) / "model.safetensors"
    save_file(load_file(path), tmp_path / "theirs", metadata={"format": "pt"})
    assert path.read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.fixture(scope="module")
def words():
    return tokenizers.train_words(["a b c d e f g h i j k l m n o p q r"], 22)


def test_the_tokenizer_and_the_ids_of_its_special_tokens_go_along(filled, tmp_path, words):
    model, params = filled("gpt2")
    path = tmp_path / "new"
    save_pretrained(path, model, params, words, token_ids={"eos_token_id": 5})
    assert load_pretrained(path).tokenizer.fingerprint == words.fingerprint
    said = json.loads((path / "config.json").read_text())
    assert (said["pad_token_id"], said["bos_token_id"], said["eos_token_id"]) == (0, 1, 5)
    said = json.loads((path / "tokenizer_config.json").read_text())
    assert said["eos_token"] == "<eos>" and "mask_token" not in said


def test_what_was_not_trained_is_kept_where_it_was_trained_from(folder, change, tmp_path, words):
    path = folder("llama")
    words.save(path / "tokenizer.json")
    change(path, eos_token_id=5, finetuning_task="us", rope_theta=77.0)
    said = {"bos_token": None, "eos_token": {"content": "<bos>"}, "chat_template": "{{ x }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 1], "max_new_tokens": 3}')
    loaded = jf.load(path)
    assert loaded.tokenizer.special[1:3] == (None, 1)
    save_pretrained(tmp_path / "new", loaded.model, loaded.params, loaded.tokenizer, like=path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (path / name).read_bytes()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["eos_token_id"], config["finetuning_task"]) == (5, "us")
    save_pretrained(tmp_path / "alone", loaded.model, loaded.params, loaded.tokenizer)
    again = load_pretrained(tmp_path / "alone").tokenizer
    assert again.special == loaded.tokenizer.special, "roles stay without the folder, too"
    save_pretrained(
        tmp_path / "other",
        loaded.model,
        loaded.params,
        tokenizers.train_words(["a b"], 6),
        like=path,
    )
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["eos_token_id"] == 2, "of another tokenizer"


def test_other_programs_read_the_special_tokens_and_encode_does_not(filled, tmp_path, words):
    ids = words.encode("a b")
    for name, expected in (("distilbert", [1, *ids, 2]), ("t5", [*ids, 2]), ("gpt2", ids)):
        save_pretrained(tmp_path / name, *filled(name), words)
        tokenizer = load_pretrained(tmp_path / name).tokenizer
        assert tokenizer.library_tokenizer.encode("a b").ids == expected
        assert tokenizer.encode("a b") == ids


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(folder):
    path = folder("gpt2")
    large = tokenizers.train_words(["a b c d e f g h i j k l m n o p q r s t u v w x y z"], 30)
    large.save(path / "tokenizer.json")
    with pytest.raises(ConfigError, match="30 ids"):
        load_pretrained(path)


def test_a_name_of_a_hub_is_downloaded(folder, monkeypatch):
    asked = []

    def download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        if name == "nobody/nothing":
            raise OSError("404: no such model")
        return str(path)

    path = folder("gpt2")
    fake = types.SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert load_pretrained("hf:someone/tiny-gpt2").model.config.d_model == 10
    ((name, patterns),) = asked
    assert name == "someone/tiny-gpt2"
    assert "*.safetensors" in patterns and "*.bin" not in patterns
    with pytest.raises(ConfigError, match="hf:nobody/nothing .*404"):
        load_pretrained("hf:nobody/nothing")


def test_a_name_of_a_hub_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match="huggingface-hub.*'experiments'"):
        load_pretrained("hf:someone/gpt")
    with pytest.raises(ConfigError, match="hf:../gpt "):
        load_pretrained("hf:../gpt")


@pytest.mark.parametrize("name", ["/absent/folder", "runs/gpt2x", "gpt2x", "./gpt2x", "-"])
def test_a_folder_that_is_not_there_is_named_with_the_nearest_and_no_hub_is_asked(
    name, folder, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    folder("gpt2")
    message = "is not a folder: give one with a config.json"
    with pytest.raises(ConfigError, match=message) as said:
        load_pretrained(name)
    assert ("such as" in str(said.value)) == (not name.startswith("/"))
    assert ("hf:runs/gpt2x" in str(said.value)) == (name == "runs/gpt2x")


def test_fine_tuned_parameters_may_be_on_a_device(filled, tmp_path):
    model, params = filled("gpt2")
    save_pretrained(tmp_path / "new", model, jax.tree.map(jnp.asarray, params))
    same(load_pretrained(tmp_path / "new").params, params)
