"""`generate` of `transformers`, greedy and by beams, writes the tokens that ours writes."""

import json
import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import beam_search, load, load_pretrained
from jaxformer.decoding import SearchConfig
from jaxformer.pipelines import complete, make_step_fn, score_pairs, translate, translate_ids
from jaxformer.pretrained import load_generation_config
from jaxformer.text.tokenizers import train_bpe, train_characters
from tests.peers.pairs import MARIAN, SIZES, V, build

pytestmark = pytest.mark.peer
B, S, LONGEST = 5, 6, 9
LINES = ["a cat sat", "the dog and the cat", "dogs", "a mat on which the cat sat"]
DECODER = {"vocab_size": V, "eos_token_id": 1, "pad_token_id": 0, "hidden_size": 12}
DECODER |= {"num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 20}
LLAMA = DECODER | {"intermediate_size": 17, "num_key_value_heads": 1, "head_dim": 6}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0}
YARN |= {"original_max_position_embeddings": 9}
CAPS = {"sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}
DECODERS = {
    "GPT2": {"vocab_size": V, "n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 20},
    "OPT": DECODER | {"ffn_dim": 17, "word_embed_proj_dim": 12},
    "GPTNeoX": DECODER | {"intermediate_size": 17, "hidden_size": 16},
    "Llama": LLAMA | {"rope_parameters": YARN},
    "Gemma2": LLAMA | CAPS,
}
PLAIN = {
    "max_length": LONGEST + 1,
    "max_new_tokens": None,
    "early_stopping": False,
    "length_penalty": 1.0,
    "forced_bos_token_id": None,
    "suppress_tokens": None,
    "renormalize_logits": False,
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": None,
}
# Settings in config.json, which do not count beside generation_config.json.
UNUSED = {"forced_eos_token_id": 1, "min_length": 8, "bad_words_ids": [[2], [4]], "num_beams": 5}
ASKED = {
    "marian, greedy": ("Marian", {"num_beams": 1}),
    "marian": ("Marian", {"num_beams": 4}),
    "marian, forced and hasty": (
        "Marian",
        {"num_beams": 4, "forced_bos_token_id": 5, "early_stopping": True, "length_penalty": 0.6},
    ),
    "marian, both lengths": ("Marian", {"num_beams": 4, "min_length": 7, "min_new_tokens": 2}),
    "marian, its end among bad words": (
        "Marian",
        {"num_beams": 4, "bad_words_ids": [[0], [V - 1], [3]], "forced_eos_token_id": None},
    ),
    "t5, greedy": ("T5", {"num_beams": 1}),
    "t5": ("T5", {"num_beams": 4, "suppress_tokens": [3, 7], "renormalize_logits": True}),
    "marian, greedy, without repeats": (
        "Marian",
        {"num_beams": 1, "repetition_penalty": 1.7, "min_length": 4, "no_repeat_ngram_size": 2},
    ),
    "marian, without repeats": (
        "Marian",
        {"num_beams": 4, "repetition_penalty": 1.3, "min_new_tokens": 3, "no_repeat_ngram_size": 2},
    ),
    "t5, greedy, several ends": (
        "T5",
        {"num_beams": 1, "eos_token_id": [1, 4, 6], "no_repeat_ngram_size": 3},
    ),
    "t5, several ends": ("T5", {"num_beams": 4, "eos_token_id": [1, 4], "min_length": 3}),
    "t5, to the end": ("T5", {"num_beams": 3, "early_stopping": "never", "length_penalty": 1.5}),
    "mbart": ("MBart", {"num_beams": 4, "forced_bos_token_id": 4}),
    "m2m_100": (
        "M2M100",
        {"num_beams": 4, "forced_bos_token_id": 5, "forced_eos_token_id": 2},
    ),
    "mt5": ("MT5", {"num_beams": 4, "repetition_penalty": 0.8, "min_new_tokens": 2}),
    "t5, short ones": ("T5", {"num_beams": 4, "length_penalty": -0.5}),
}


def randomize(torch: Any, model: Any, seed: int, end: int) -> Any:
    """`model` with random numbers, large enough for texts that differ and end."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "embed_positions" not in name:
                noise = 0.5 * torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise + (1.0 if "norm" in name and "weight" in name else 0.0))
        if "final_logits_bias" in model.state_dict():
            model.final_logits_bias[0, end] += 2.0
        elif "lm_head.weight" in model.state_dict():
            model.get_input_embeddings().weight *= 4.0
            model.lm_head.weight[end] *= 2.0
    return model.eval()


@pytest.fixture(scope="module")
def folder_of(torch, transformers, tmp_path_factory):
    """folder_of("T5", 3) -> the folder of the fourth model of that family."""

    @cache
    def make(kind: str, seed: int) -> Path:
        model = build(torch, transformers, kind)
        randomize(torch, model, seed, model.config.eos_token_id)
        if kind == "Marian":
            model.generation_config.bad_words_ids = [[V - 1]]
        folder = tmp_path_factory.mktemp("folder")
        model.save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | UNUSED))
        return folder

    return make


@pytest.mark.parametrize("asked", ASKED)
def test_a_translation_has_their_tokens_and_their_score(
    asked, torch, transformers, folder_of, assert_equal
):
    """Three models translate ragged sources; some texts end, others are as long as they may be."""
    kind, changes = ASKED[asked]
    folders = [folder_of(kind, seed) for seed in range(3)]
    assert same_translations(torch, transformers, folders, changes, assert_equal) > 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(300))
def test_drawn_settings_give_their_translations(
    number, torch, transformers, folder_of, tmp_path, assert_equal
):
    """300 draws of all settings together, each with one model."""
    kind, seed, changes = drawn(number)
    folder = shutil.copytree(folder_of(kind, seed), tmp_path / "folder")  # settings are kept in it
    same_translations(torch, transformers, [folder], changes, assert_equal)
    jax.clear_caches()  # a process with the programs of all draws would crash


def drawn(number: int) -> tuple[str, int, dict[str, Any]]:
    """A family, the number of one of its models, and settings: the draw `number`."""
    rng = np.random.default_rng([number, 7])

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    kind = one_of("Marian", "T5", "MBart", "M2M100")
    end = SIZES[kind].get("eos_token_id", 1)
    beams = one_of(1, 2, 3, 4)
    found = {
        "num_beams": beams,
        "early_stopping": one_of(False, True, "never") if beams > 1 else False,
        "length_penalty": one_of(1.0, 0.0, 0.6, 1.5, -0.5) if beams > 1 else 1.0,
        "no_repeat_ngram_size": one_of(0, 0, 1, 2, 3),
        "repetition_penalty": one_of(1.0, 1.0, 1.3, 0.8),
        "min_length": one_of(0, 0, 3, 7),
        "min_new_tokens": one_of(None, None, 2, 5),
        "forced_bos_token_id": one_of(None, None, 5),
        "forced_eos_token_id": one_of(None, end),
        "suppress_tokens": one_of(None, None, [3, 7]),
        "bad_words_ids": one_of(None, [[3]], [[4], [8]], [[end], [9]]),
        "renormalize_logits": one_of(False, True),
    }
    if kind == "T5":
        found["eos_token_id"] = one_of(1, [1, 4], [1, 4, 6])
        if found["eos_token_id"] != 1:
            found["forced_eos_token_id"] = None
    if found["no_repeat_ngram_size"] == 1:
        found["suppress_tokens"] = None  # else no token is left to a text of 9 tokens
    # Theirs give padding that a model writes as text no position in M2M100, ours the next one.
    if kind in ("Marian", "M2M100"):
        pad = SIZES[kind]["pad_token_id"]
        found["bad_words_ids"] = [[pad], *(found["bad_words_ids"] or [])]
    return kind, int(rng.integers(4)), found


def same_translations(
    torch: Any, transformers: Any, folders: Any, changes: dict[str, Any], assert_equal: Any
) -> int:
    """Asserts that the models in `folders` translate as theirs; how many texts have an end."""
    rng, ended = np.random.default_rng(0), 0
    for folder in folders:
        theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        for key, value in (PLAIN | changes).items():
            setattr(theirs.generation_config, key, value)
        theirs.generation_config.save_pretrained(folder)
        config, options = load_generation_config(folder)
        source = rng.integers(2, V - 1, (B, S))
        lengths = np.array([S, 3, 4, 1, 5])
        source[np.arange(S) >= lengths[:, None]] = options.pad
        source[np.arange(B), lengths - 1] = config.eos[0]
        said = theirs.generate(
            torch.tensor(source),
            attention_mask=torch.tensor(source != options.pad),
            num_return_sequences=config.beam_size,
            return_dict_in_generate=True,
            output_scores=True,
        )
        loaded = load_pretrained(folder)
        run = partial(
            translate_ids,
            loaded.model,
            max_new_tokens=jnp.full(B, LONGEST),
            search=replace(config, max_new_tokens=LONGEST),
            bos=options.bos,
            pad=options.pad,
        )
        found = run(loaded.params, jnp.asarray(source))
        expected = said.sequences.numpy()[:, 1:].reshape(B, config.beam_size, -1)
        # Their beams are filled up with the end token where padding's id is 0.
        expected = filled(expected, config.eos, options.pad)
        given = filled(np.asarray(found.tokens), config.eos, options.pad)
        ended += np.any(np.isin(expected, config.eos), axis=-1).sum()
        assert np.array_equal(given[..., : expected.shape[-1]], expected)
        assert np.all(given[..., expected.shape[-1] :] == options.pad)
        if config.beam_size > 1:
            scores = said.sequences_scores.numpy().reshape(B, -1)
            assert_equal(found.scores, scores)
    return ended


def filled(tokens: np.ndarray, ends: int | tuple[int, ...], pad: int) -> np.ndarray:
    """`tokens` with `pad` after each first one of `ends`."""
    ended = np.isin(tokens, ends)
    before = np.cumsum(ended, axis=-1) - ended
    return np.where(before > 0, pad, tokens)


def test_bart_reads_writes_and_scores_texts_as_theirs(torch, transformers, tmp_path, assert_equal):
    names = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    train_bpe(LINES, 290, prefix="", special_tokens=names).save(tmp_path / "tokenizer.json")
    said = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(said["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in said["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{x}\n" for x in merges))
    (tmp_path / "tokenizer.json").unlink()
    tokenizer = transformers.BartTokenizer.from_pretrained(tmp_path)
    sizes = {key: value for key, value in MARIAN.items() if not key.endswith("token_id")}
    config = transformers.BartConfig(**sizes | {"vocab_size": 290, "max_position_embeddings": 40})
    theirs = randomize(torch, transformers.BartForConditionalGeneration(config), 3, 2)
    settings = {"num_beams": 3, "max_length": 12, "forced_bos_token_id": 0, "min_length": 4}
    theirs.generation_config.update(**settings)
    theirs.save_pretrained(tmp_path)
    inputs = tokenizer(LINES, padding=True, return_tensors="pt")
    written = theirs.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    expected = tokenizer.batch_decode(written, skip_special_tokens=True)
    ours = load_pretrained(tmp_path)
    assert translate(ours, LINES) == expected
    assert len(set(expected)) == len(LINES)
    pairs = list(zip(LINES, LINES[::-1], strict=True))
    for pair, found in zip(pairs, score_pairs(ours, pairs), strict=True):
        both = tokenizer(pair[0], text_target=pair[1], return_tensors="pt")
        assert_equal(-np.mean(found), theirs(**both).loss.detach())
        assert len(found) == both["labels"].shape[1]


@partial(jax.jit, static_argnums=(0, 3))
def search(model, params, prompts, settings):
    """The results of beam search after `prompts`."""
    cache = model.apply({"params": params}, B, max_length=4 + LONGEST, method="init_cache")
    start = prompts[:, None, :-1]
    _, cache = model.apply({"params": params}, start, cache, method="decode_step")
    return beam_search(
        make_step_fn(model, params),
        cache.reorder_beams(jnp.zeros((B, settings.beam_size), jnp.int32)),
        prompts[:, -1],
        jnp.full(B, LONGEST),
        settings,
    )


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_goes_on_as_theirs_does(kind, torch, transformers, tmp_path):
    """After 10 prompts, greedily and with 4 beams."""
    sizes = {"eos_token_id": 1, "pad_token_id": 0, **DECODERS[kind]}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    make = getattr(transformers, kind + ("LMHeadModel" if kind == "GPT2" else "ForCausalLM"))
    for seed in range(2):
        theirs = randomize(torch, make(config), seed, 1)
        theirs.save_pretrained(tmp_path / str(seed))
        loaded = load_pretrained(tmp_path / str(seed))
        prompts = np.random.default_rng(seed).integers(2, V, (B, 4))
        for width in (1, 4):
            said = theirs.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones(B, 4),
                max_new_tokens=LONGEST,
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
            )
            settings = SearchConfig(
                beam_size=width,
                length_penalty=1.0,
                length_penalty_kind="power",
                early_stopping="heuristic",
                at_max_length="cut",
                extra_candidates=1,
                max_new_tokens=LONGEST,
                eos=(1,),
            )
            expected = filled(said.numpy()[:, 4:].reshape(B, width, -1), 1, 0)
            found = search(loaded.model, loaded.params, jnp.asarray(prompts), settings)
            given = filled(np.asarray(found.tokens), 1, 0)
            assert np.array_equal(given[..., : expected.shape[-1]], expected)


DECODER_SETTINGS = [
    {"max_length": 11, "min_length": 8},
    {"max_length": 20},
    {"max_new_tokens": 6, "bad_words_ids": [[3], [5], [1]], "min_new_tokens": 2},
    {"max_new_tokens": 7, "suppress_tokens": [2, 7], "repetition_penalty": 1.4, "min_length": 5},
    {"max_new_tokens": 8, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("settings", DECODER_SETTINGS, ids=str)
def test_settings_of_a_decoders_folder_mean_what_they_mean_to_them(
    settings, torch, transformers, tmp_path
):
    config = transformers.GPT2Config(**DECODERS["GPT2"], eos_token_id=1, pad_token_id=0)
    theirs = randomize(torch, transformers.GPT2LMHeadModel(config), 3, 4)
    theirs.generation_config.update(**settings)
    theirs.save_pretrained(tmp_path)
    tokenizer = train_characters(["".join(map(chr, range(97, 97 + V - 4)))])
    assert tokenizer.vocab_size == V
    loaded = replace(load(tmp_path), tokenizer=tokenizer)
    prompts = [np.random.default_rng(n).integers(2, V, 2 + n % 5) for n in range(10)]
    found = complete(loaded, prompts, details=True)
    for prompt, ours in zip(prompts, found, strict=True):
        said = theirs.generate(
            torch.tensor(prompt)[None], attention_mask=torch.ones(1, len(prompt))
        )
        assert ours.ids == said[0, len(prompt) :].tolist()
    assert len({tuple(each.ids) for each in found}) > 2
