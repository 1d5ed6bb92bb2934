"""LoRA adapters are those of `peft`: read with their base, and written from adapters of ours."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxformer as jf
from experiments.language_modelling.tasks.chat_template import load_template
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import Classifier, SpanPredictor, TokenClassifier
from jaxformer.pretrained import load_sampling_config, save_adapter
from jaxformer.text.tokenizers import train_words
from jaxformer.training.parameters import map_with_path

pytestmark = pytest.mark.peer
peft = pytest.importorskip("peft", reason="needs the extra peers")
transformers = pytest.importorskip("transformers", reason="needs the extra peers")

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = transformers.LlamaConfig(
    vocab_size=53,
    intermediate_size=37,
    num_key_value_heads=2,
    max_position_embeddings=31,
    attention_bias=True,
    tie_word_embeddings=False,
    **SIZES,
)
GPT2 = transformers.GPT2Config(
    vocab_size=53, n_embd=24, n_layer=2, n_head=4, n_positions=31, bos_token_id=1, eos_token_id=2
)
NEOX = transformers.GPTNeoXConfig(
    vocab_size=53, intermediate_size=37, max_position_embeddings=31, rotary_pct=1.0, **SIZES
)
MIXTRAL = transformers.MixtralConfig(
    vocab_size=53,
    intermediate_size=28,  # torch multiplies groups of rows of 16 bytes
    num_key_value_heads=2,
    max_position_embeddings=31,
    num_local_experts=3,
    num_experts_per_tok=2,
    **SIZES,
)
IDS = np.random.default_rng(0).integers(0, 53, (2, 11))
CONFIGURATIONS = {
    "rank": (
        LLAMA,
        {
            "r": 3,
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 5},
            "alpha_pattern": {"v_proj": 7},
        },
    ),
    "alpha, layers": (
        LLAMA,
        {
            "r": 5,
            "lora_alpha": 17,
            "target_modules": ["k_proj", "up_proj"],
            "layers_to_transform": [1],
        },
    ),
    "rslora": (
        LLAMA,
        {"r": 5, "lora_alpha": 11, "use_rslora": True, "target_modules": "all-linear"},
    ),
    "targets of a GPT-2": (
        GPT2,
        {"r": 3, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj", "wpe"]},
    ),
    "bias": (LLAMA, {"r": 3, "bias": "all", "target_modules": ["q_proj", "down_proj"]}),
    "bias of the targets": (GPT2, {"r": 3, "bias": "lora_only", "target_modules": ["c_fc"]}),
    "modules_to_save": (
        LLAMA,
        {
            "r": 3,
            "target_modules": ["o_proj", "embed_tokens"],
            "modules_to_save": ["lm_head", "norm"],
        },
    ),
    "heads of a GPT-NeoX": (NEOX, {"r": 3, "target_modules": ["query_key_value", "dense"]}),
    "attention beside experts": (MIXTRAL, {"r": 3, "target_modules": ["q_proj", "o_proj"]}),
}


def adapted(torch, folder, config, **options):
    """Their model with a filled adapter, and the folders of base and adapter."""
    base, adapter = folder / "base", folder / "adapter"
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(adapter)
    return made, base, adapter


def their_logits(torch, model):
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits.numpy()


def our_logits(loaded):
    return np.asarray(loaded.model.apply({"params": loaded.params}, IDS))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_an_adapter_alone_and_beside_its_base_computes_what_peft_does(name, torch, tmp_path):
    config, options = CONFIGURATIONS[name]
    model, base, adapter = adapted(torch, tmp_path, config, **options)
    expected = their_logits(torch, model)
    assert np.abs(our_logits(jf.load(base)) - expected).max() > 1e-2
    np.testing.assert_allclose(our_logits(jf.load(adapter)), expected, rtol=0, atol=1e-5)
    for path in adapter.glob("adapter_*"):
        shutil.copy(path, base)
    np.testing.assert_allclose(our_logits(jf.load(base)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices="),
    ],
)
def test_an_adapter_that_is_not_computed_is_refused_with_the_key(options, reason, torch, tmp_path):
    _, _, adapter = adapted(torch, tmp_path, LLAMA, r=3, target_modules=["q_proj"], **options)
    with pytest.raises(ConfigError, match=reason):
        jf.load(adapter)


@pytest.mark.parametrize("parameter", ["experts.gate_up_proj", "experts.down_proj", "gate.weight"])
def test_an_adapter_of_joined_experts_or_their_router_is_refused_with_the_key(
    parameter, torch, tmp_path
):
    options = {"target_modules": ["q_proj"], "target_parameters": [f"mlp.{parameter}"]}
    _, _, adapter = adapted(torch, tmp_path, MIXTRAL, r=3, **options)
    with pytest.raises(ConfigError, match=f"'mlp.{parameter}'"):
        jf.load(adapter)


def test_an_adapter_of_single_experts_adds_its_product_to_their_weights(tmp_path, rng):
    base, merged, adapter = (tmp_path / name for name in ("base", "merged", "adapter"))
    transformers.MixtralForCausalLM(MIXTRAL).save_pretrained(base)
    shutil.copytree(base, merged)
    tensors, written = load_file(base / "model.safetensors"), {}
    for expert, layer in ((0, "w1"), (2, "w2"), (2, "w3")):
        module = f"model.layers.1.block_sparse_moe.experts.{expert}.{layer}"
        rows, columns = tensors[f"{module}.weight"].shape
        a = rng.normal(size=(3, columns)).astype(np.float32)
        b = rng.normal(size=(rows, 3)).astype(np.float32)
        written |= {f"base_model.model.{module}.lora_A.weight": a}
        written |= {f"base_model.model.{module}.lora_B.weight": b}
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + 2.0 * b @ a
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    save_file(written, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6}
    config |= {"target_modules": ["w1", "w2", "w3"], "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    expected = our_logits(jf.load(merged))
    assert np.abs(our_logits(jf.load(base)) - expected).max() > 1e-2
    np.testing.assert_allclose(our_logits(jf.load(adapter)), expected, rtol=0, atol=1e-5)


def test_adapters_of_ours_on_experts_are_refused_by_their_path(torch, tmp_path):
    transformers.MixtralForCausalLM(MIXTRAL).save_pretrained(tmp_path / "base")
    loaded, base = jf.load(tmp_path / "base"), jf.open_folder(tmp_path / "base")
    options = {"rank": 3, "alpha": 5.0, "targets": "blocks_1/feed_forward/down/kernel$"}
    params = with_filled_adapters(loaded.model, loaded.params, options)
    with pytest.raises(ConfigError, match="blocks_1/feed_forward/down/kernel"):
        save_adapter(tmp_path / "adapter", loaded.model, params, base)
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_of_one_of_two_tied_tensors_is_refused(torch, tmp_path):
    targets = ["c_fc", "wte"]
    _, _, adapter = adapted(torch, tmp_path, GPT2, r=3, target_modules=targets)
    with pytest.raises(ConfigError, match="transformer.wte.weight"):
        jf.load(adapter)


BERT = transformers.BertConfig(vocab_size=53, intermediate_size=37, **SIZES)
OURS = {
    "queries": (LLAMA, {"rank": 3, "alpha": 5.0, "targets": "attention/query/kernel$"}),
    "all layers": (LLAMA, {"rank": 2, "alpha": 2.0, "targets": "blocks_.*/kernel$"}),
    "a table": (LLAMA, {"rank": 3, "alpha": 7.0, "targets": "embedding/table$|output/kernel$"}),
    "joined queries and values": (
        GPT2,
        {"rank": 3, "alpha": 5.0, "targets": "attention/(query|value|out)/kernel$"},
    ),
    "a GPT-2's feed-forward": (
        GPT2,
        {"rank": 5, "alpha": 5.0, "targets": "feed_forward/.*kernel$"},
    ),
    "joined heads": (NEOX, {"rank": 2, "alpha": 3.0, "targets": "attention/.*/kernel$"}),
    "attention beside experts": (
        MIXTRAL,
        {"rank": 2, "alpha": 3.0, "targets": "attention/(query|out)/kernel$"},
    ),
}


def with_filled_adapters(model, params, options):
    params = jf.add_adapters(params, jax.random.key(1), axes=jf.parameter_axes(model), **options)
    rng = np.random.default_rng(3)

    def fill(path, leaf):
        is_b = path.endswith("kernel_lora/b") or path.endswith("table_lora/b")
        return 0.1 * rng.standard_normal(leaf.shape).astype(np.float32) if is_b else leaf

    return map_with_path(fill, params)


@pytest.mark.parametrize("name", OURS)
def test_adapters_of_ours_compute_in_peft_what_they_compute_here(name, torch, tmp_path):
    config, options = OURS[name]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    loaded = jf.load(tmp_path / "base")
    params = with_filled_adapters(loaded.model, loaded.params, options)
    merged = jf.merge_adapters(params)
    expected = np.asarray(loaded.model.apply({"params": merged}, IDS))
    assert np.abs(our_logits(loaded) - expected).max() > 1e-3
    save_adapter(tmp_path / "adapter", loaded.model, params, jf.open_folder(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    np.testing.assert_allclose(their_logits(torch, theirs), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        our_logits(jf.load(tmp_path / "adapter")), expected, rtol=0, atol=1e-5
    )


def test_a_new_head_is_written_whole(torch, tmp_path):
    config = transformers.BertConfig(**(BERT.to_dict() | {"num_labels": 3}))
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path / "base")
    loaded = jf.load(tmp_path / "base")
    options = {"rank": 3, "alpha": 5.0, "targets": "attention/(query|value)/kernel$"}
    params = with_filled_adapters(loaded.model, loaded.params, options)
    params["head"] = jax.tree.map(lambda leaf: leaf + 0.5, params["head"])
    merged, mask = jf.merge_adapters(params), np.ones(IDS.shape, bool)
    expected = np.asarray(loaded.model.apply({"params": merged}, IDS, mask))
    save_adapter(tmp_path / "adapter", loaded.model, params, jf.open_folder(tmp_path / "base"))
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["task_type"] == "SEQ_CLS" and said["modules_to_save"] == ["classifier"]
    again = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    np.testing.assert_allclose(their_logits(torch, again), expected, rtol=0, atol=1e-5)


MASKED_LM = transformers.BertForMaskedLM(BERT)
NEW_HEADS = {
    "a classifier on a decoder": (
        transformers.GPT2LMHeadModel(GPT2),
        lambda body: Classifier(body, 3),
        "AutoModelForSequenceClassification",
    ),
    "a classifier on an encoder": (
        MASKED_LM,
        lambda body: Classifier(body.clone(config=replace(body.config, pooler="tanh")), 3),
        "AutoModelForSequenceClassification",
    ),
    "labels of tokens": (
        MASKED_LM,
        lambda body: TokenClassifier(body, 5),
        "AutoModelForTokenClassification",
    ),
    "answers in a text": (MASKED_LM, SpanPredictor, "AutoModelForQuestionAnswering"),
}


@pytest.mark.parametrize("name", NEW_HEADS)
def test_an_adapter_with_a_head_that_its_base_lacks_is_read_back(
    name, torch, tmp_path, random_params
):
    theirs, with_head, auto_class = NEW_HEADS[name]
    theirs.save_pretrained(tmp_path / "base")
    loaded, mask = jf.load(tmp_path / "base"), np.ones(IDS.shape, bool)
    body, body_params = loaded.model, loaded.params
    if isinstance(body, jf.MaskedLanguageModel):
        body = jf.EncoderOnly(body.config, body.attention_fn)
        body_params = loaded.params["encoder"]
    model = with_head(body)
    params = random_params(model, IDS, mask)
    params["backbone"] = {**params["backbone"], **body_params}
    if name == "a classifier on a decoder":  # theirs has no bias
        params["head"]["bias"] = np.zeros_like(params["head"]["bias"])
    options = {"rank": 3, "alpha": 5.0, "targets": "attention/(query|value)/kernel$"}
    params = with_filled_adapters(model, params, options)
    expected = model.apply({"params": jf.merge_adapters(params)}, IDS, mask)
    save_adapter(tmp_path / "adapter", model, params, jf.open_folder(tmp_path / "base"))
    again = jf.load(tmp_path / "adapter")
    assert type(again.model) is type(model)
    found = again.model.apply({"params": again.params}, IDS, mask)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    labels = {} if name == "answers in a text" else {"num_labels": np.shape(expected)[-1]}
    base = getattr(transformers, auto_class).from_pretrained(
        tmp_path / "base", **labels, pad_token_id=0
    )
    made = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        theirs_say = made(torch.tensor(IDS))
    if name == "answers in a text":
        logits = np.stack([theirs_say.start_logits, theirs_say.end_logits], axis=1)
    else:
        logits = theirs_say.logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_what_peft_cannot_hold_is_refused_by_name(torch, tmp_path):
    transformers.GPT2LMHeadModel(GPT2).save_pretrained(tmp_path / "base")
    loaded, base = jf.load(tmp_path / "base"), jf.open_folder(tmp_path / "base")
    path, options = tmp_path / "adapter", {"rank": 3, "alpha": 5.0}
    with pytest.raises(ConfigError, match="adapters"):
        save_adapter(path, loaded.model, loaded.params, base)
    tied = with_filled_adapters(loaded.model, loaded.params, options | {"targets": "table$"})
    with pytest.raises(ConfigError, match="wte.weight and lm_head.weight"):
        save_adapter(path, loaded.model, tied, base)
    up = with_filled_adapters(loaded.model, loaded.params, options | {"targets": "up/kernel$"})
    up["decoder"]["blocks_1"]["feed_forward"]["up"]["bias"] += 1.0
    with pytest.raises(ConfigError, match="h.1.mlp.c_fc"):
        save_adapter(path, loaded.model, up, base)
    assert not path.exists()


def change(adapter, **settings):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_an_adapter_without_its_base_is_refused_with_what_to_do(torch, tmp_path):
    _, base, adapter = adapted(torch, tmp_path, LLAMA, r=3, target_modules=["q_proj"])
    expected = our_logits(jf.load(adapter))
    change(adapter, base_model_name_or_path="../base")
    np.testing.assert_array_equal(our_logits(jf.load(adapter)), expected)
    for name in ("owner/model", None):
        change(adapter, base_model_name_or_path=name)
        with pytest.raises(ConfigError, match="which is no folder here"):
            jf.load(adapter)
    change(adapter, base_model_name_or_path=str(base), task_type="SEQ_CLS")
    with pytest.raises(ConfigError, match="SEQ_CLS.* architectures="):
        jf.load(adapter)
    labels = transformers.BertForTokenClassification(BERT)
    labels.save_pretrained(base)
    with pytest.raises(ConfigError, match="SEQ_CLS.*BertForTokenClassification"):
        jf.load(adapter)
    change(adapter, peft_type="IA3")
    with pytest.raises(ConfigError, match="peft_type='IA3'"):
        jf.load(adapter)


def test_an_adapter_alone_has_the_tokenizer_template_and_sampling_of_its_base(torch, tmp_path):
    _, base, adapter = adapted(torch, tmp_path, LLAMA, r=3, target_modules=["q_proj"])
    train_words(["a rose is a rose"], 11).save(base / "tokenizer.json")
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (base / "generation_config.json").write_text('{"do_sample": true, "top_k": 7}')
    loaded = jf.load(adapter)
    assert loaded.tokenizer is not None
    assert load_template(adapter, loaded.tokenizer).source == "{{ messages[0].content }}"
    assert load_sampling_config(adapter)[0].top_k == 7
    (adapter / "chat_template.jinja").write_text("own")
    assert load_template(adapter, loaded.tokenizer).source == "own"


def test_an_adapter_of_another_base_is_refused_with_the_tensor(torch, tmp_path):
    _, base, adapter = adapted(torch, tmp_path, LLAMA, r=3, target_modules=["q_proj"])
    narrow = transformers.LlamaConfig(**(LLAMA.to_dict() | {"head_dim": 4}))
    transformers.LlamaForCausalLM(narrow).save_pretrained(base)
    with pytest.raises(DataError, match="q_proj.weight"):
        jf.load(adapter)
    transformers.GPT2LMHeadModel(GPT2).save_pretrained(base)
    with pytest.raises(DataError, match="q_proj.weight"):
        jf.load(adapter)
