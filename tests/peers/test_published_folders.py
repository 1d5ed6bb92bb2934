"""Folders as they are published: ids in and text out are those of `transformers`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxformer as jf
from experiments.translation.grammar import sample_pair
from jaxformer.errors import ConfigError
from jaxformer.pipelines import score_pairs
from jaxformer.pipelines.inputs import bos_eos
from jaxformer.text import tokenizers
from tests.peers.published_styles import STYLES

pytestmark = pytest.mark.peer

ODD = [
    " a",
    "a ",
    "  two  spaces  ",
    "\ttab\t\t",
    "a\r\nb",
    "🙂👩‍👩‍👧",
    "e\u0301 é",
    "<s",
    "▁▁a ▁b",
]
ODD += ["it's 1,000 they'll", "Ａｂｃ ｶﾅ", "한국어 हिन्दी", "字か,字", "=====aaaaa"]
SIGNS = ["It isn't so , is it ? No !", "a 's b ' c 're d .", "Ärger ÉCOLE"]
TEXTS = [*ODD, *(sample_pair(np.random.default_rng(i)).source for i in range(6))]
LANGUAGES = {"nllb": ("fra_Latn", "deu_Latn"), "mbart": ("ro_RO", "de_DE"), "m2m_100": ("fr", "de")}
DEFAULT = {"nllb": "eng_Latn", "mbart": "en_XX", "m2m_100": "en"}
SMALL = {
    **{"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 64, "dim": 12, "hidden_dim": 16},
    **{"n_heads": 3, "n_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "ffn_dim": 16},
    **{"num_hidden_layers": 2, "intermediate_size": 16, "max_position_embeddings": 66, "d_ff": 16},
    **{"num_key_value_heads": 3, "head_dim": 8, "word_embed_proj_dim": 24, "d_model": 12},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "num_layers": 2},
    **{"decoder_attention_heads": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_heads": 3},
    **{"d_kv": 4, "query_pre_attn_scalar": 4, "sliding_window": 8, "scale_embedding": True},
}


TRANSLATORS = [x for x in STYLES if STYLES[x][0].endswith(("ConditionalGeneration", "MTModel"))]


class Pair(NamedTuple):
    """A folder's model and tokenizer in both libraries."""

    name: str
    folder: Path
    model: Any
    tokenizer: Any
    ours: jf.Loaded


@pytest.fixture(scope="module", params=STYLES)
def pair(request, torch, transformers, train_pieces, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp("published")
    kind, write_tokenizer = getattr(transformers, STYLES[name][0]), STYLES[name][1]
    lines = [sample_pair(np.random.default_rng(i)).source for i in range(200)]
    kind.config_class().save_pretrained(folder)  # AutoTokenizer reads it
    write_tokenizer(folder, [*lines, *ODD], train_pieces)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    known = vars(kind.config_class())
    sizes = {key: value for key, value in SMALL.items() if key in known}
    ids = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("bos", "eos", "pad")}
    ids["eos_token_id"] = ids["eos_token_id"] or tokenizer.sep_token_id or 0
    starts = {"t5": "pad", "mt5": "pad", "marian": "pad"}.get(kind.config_class.model_type, "eos")
    if kind.config_class().is_encoder_decoder:
        ids |= {"decoder_start_token_id": ids[f"{starts}_token_id"]}
        ids |= {"forced_eos_token_id": ids["eos_token_id"]} if starts == "eos" else {}
    torch.manual_seed(len(name))
    model = kind(kind.config_class(vocab_size=len(tokenizer), **sizes, **ids)).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:  # Marian's sines stay sines
                weights += 0.3 * torch.randn(weights.shape)
    if name == "bart":
        model.generation_config.forced_bos_token_id = ids["bos_token_id"]  # as published
    model.save_pretrained(folder)
    return Pair(name, folder, model, tokenizer, jf.load(folder))


def test_ids_in_and_text_out_are_theirs(pair, torch, assert_equal):
    name, _, model, tokenizer, ours = pair
    rows = [tokenizer(text).input_ids for text in TEXTS]
    given = (torch.tensor([row]) for row in rows)
    if isinstance(ours.model, jf.EncoderDecoder):
        assert ours.tokenizer.encode_inputs(TEXTS) == rows
        source, target = LANGUAGES.get(name, (None, None))
        changes, theirs = {"source_language": source, "target_language": target}, {}
        if source is not None:
            tokenizer.src_lang = source
            mark = "__{}__" if name == "m2m_100" else "{}"
            index = tokenizer.convert_tokens_to_ids(mark.format(target))
            theirs["decoder_start_token_id" if name == "mbart" else "forced_bos_token_id"] = index
            given = [torch.tensor([tokenizer(text).input_ids]) for text in TEXTS]
            tokenizer.src_lang = DEFAULT[name]
        theirs |= {"num_beams": 2, "max_new_tokens": 7, "do_sample": False}
        found = jf.translate(ours, TEXTS, beam_size=2, max_new_tokens=7, **changes)
        wanted = [model.generate(each, **theirs)[0] for each in given]
        assert found == [tokenizer.decode(row, skip_special_tokens=True) for row in wanted]
        if source is None:  # else a tokenizer asks for the language of the target, too
            pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
            for pair, nats in zip(pairs, score_pairs(ours, pairs), strict=True):
                both = tokenizer(pair[0], text_target=pair[1], return_tensors="pt")
                assert_equal(-np.mean(nats), model(**both).loss.detach())
                assert len(nats) == both["labels"].shape[1]
    elif isinstance(ours.model, jf.DecoderOnly):
        assert ours.tokenizer.encode_inputs(TEXTS) == rows
        found = jf.complete(ours, TEXTS, max_new_tokens=5, temperature=0.0)
        wanted = [
            model.generate(x, max_new_tokens=5, do_sample=False)[0, x.shape[1] :] for x in given
        ]
        bos = [] if ours.tokenizer.template else [*bos_eos(ours.tokenizer).first]
        for row, score in zip(rows, jf.score(ours, TEXTS), strict=True):
            ids = torch.tensor([[*bos, *row]])
            log_probs = model(ids).logits.log_softmax(-1)[0, :-1]
            chosen = log_probs.gather(1, ids[0, 1:, None]).sum().item()
            assert_equal(score, chosen)
    else:
        assert ours.tokenizer.encode_inputs(TEXTS) == rows
        mask = tokenizer.mask_token
        texts = [f"{mask}{TEXTS[-1]}", f"a  {mask}", f"a\n{mask}\t b", f"字 {mask} {mask}"]
        rows = [tokenizer(text).input_ids for text in texts]
        assert ours.tokenizer.encode_inputs(texts) == rows
        for row, masks in zip(rows, jf.fill_mask_with_details(ours, texts), strict=True):
            logits = model(torch.tensor([row])).logits[0][np.array(row) == tokenizer.mask_token_id]
            best = [tokenizer.convert_ids_to_tokens(i) for i in logits.argmax(-1).tolist()]
            assert [candidates[0].token for candidates in masks] == best
    if not isinstance(ours.model, jf.EncoderDecoder):
        for row, vector in zip(
            [tokenizer(text).input_ids for text in TEXTS], jf.embed(ours, TEXTS), strict=True
        ):
            states = model.base_model(torch.tensor([row])).last_hidden_state
            assert_equal(vector, states.mean(1)[0].detach())


def test_control_tokens_of_a_text_are_text_and_marks_that_are_typed_are_tokens(pair):
    name, _, _, tokenizer, ours = pair
    special = ours.tokenizer.special
    marks = [tokenizer.mask_token] if special.mask is not None else []
    marks += ["<extra_id_1>"] if "t5" in name else []
    control = sorted({*tokenizer.all_special_tokens} - {*marks, tokenizer.unk_token})
    control = [x for x in control if "extra_id" not in x][:3]
    assert control or name in ("gpt2", "gpt_neox")
    controls = {tokenizer.convert_tokens_to_ids(x) for x in control}
    (around,) = ours.tokenizer.encode_inputs([""])
    texts = [f"a {control[i % len(control)]} b" for i in range(5)] if control else []
    for row in ours.tokenizer.encode_inputs(texts):
        assert [i for i in row if i in controls] == [i for i in around if i in controls]
    for mark in marks:
        (row,) = ours.tokenizer.encode_inputs([f"The dog {mark} sees."])
        assert row == tokenizer(f"The dog {mark} sees.").input_ids
        assert tokenizer.convert_tokens_to_ids(mark) in row


def test_a_folder_that_is_saved_again_reads_and_stops_as_before(pair, transformers, tmp_path):
    _, folder, _, tokenizer, ours = pair
    new = tmp_path / "new"
    jf.save_pretrained(new, ours.model, ours.params, ours.tokenizer, like=folder)
    again = transformers.AutoTokenizer.from_pretrained(new)
    assert [again(text).input_ids for text in TEXTS] == [tokenizer(x).input_ids for x in TEXTS]
    assert again.special_tokens_map == tokenizer.special_tokens_map
    files = [path / "generation_config.json" for path in (folder, new)]
    before, after = (path.exists() and path.read_text() for path in files)
    assert after == before
    before, after = (transformers.AutoConfig.from_pretrained(x) for x in (folder, new))
    changed = {"dtype", "rope_parameters", "_name_or_path", "transformers_version"}
    changed |= {"n_inner", "use_bidirectional_attention"}  # null means the same
    before, after = before.to_dict(), after.to_dict()
    assert {k: after.get(k) for k in before if k not in changed} == {
        key: value for key, value in before.items() if key not in changed
    }


@pytest.mark.parametrize("pair", TRANSLATORS, indirect=True)
def test_an_unknown_language_is_refused_with_the_nearest(pair):
    name, _, _, _, ours = pair
    source, target = LANGUAGES.get(name, ("fr", "de"))
    message = f"is no language of this folder: give .*{source}" if name in LANGUAGES else "language"
    with pytest.raises(ConfigError, match=message):
        jf.translate(ours, "a", source_language=f"{source}x", target_language=target)
    with pytest.raises(ConfigError, match="language"):
        jf.translate(ours, "a", target_language=f"{target}x")


@pytest.mark.parametrize(
    ("style", "said"),
    [
        ("bert", {"do_lower_case": False}),
        ("bert", {"strip_accents": False, "tokenize_chinese_chars": False}),
        ("bert", {"clean_up_tokenization_spaces": True}),
        ("xlm-roberta", {"clean_up_tokenization_spaces": True}),
        ("roberta", {"add_prefix_space": True, "clean_up_tokenization_spaces": True}),
        ("gpt2", {"add_prefix_space": True}),
    ],
    ids=str,
)
def test_what_tokenizer_config_says_beside_tokenizer_json_is_followed(
    style, said, transformers, tmp_path
):
    kind, write_tokenizer = STYLES[style]
    getattr(transformers, kind).config_class().save_pretrained(tmp_path)
    write_tokenizer(tmp_path, [*TEXTS, *SIGNS], None)
    if style == "bert":  # whose tokenizer.json has the letters of the first tokenizer_config.json
        tokenizers.load(tmp_path).save(tmp_path / "tokenizer.json")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizers.load(tmp_path)
    rows = theirs([*TEXTS, *SIGNS])["input_ids"]
    assert ours.encode_inputs([*TEXTS, *SIGNS]) == rows
    assert ours.decode_batch(rows) == theirs.batch_decode(rows, skip_special_tokens=True)
