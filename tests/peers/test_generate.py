"""`generate` of `transformers` with all its settings writes the tokens that ours writes."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import load, load_pretrained
from jaxformer.pipelines import complete_with_details, translate_ids
from jaxformer.pretrained import load_generation_config
from jaxformer.text.tokenizers import train_characters
from tests.peers.pairs import V, build

pytestmark = pytest.mark.peer
B, S, LONGEST = 5, 6, 9
GPT2 = {"vocab_size": V, "n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 20}
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
    rng, ended = np.random.default_rng(0), 0
    for seed in range(3):
        folder = folder_of(kind, seed)
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
    assert ended > 2


def filled(tokens: np.ndarray, ends: int | tuple[int, ...], pad: int) -> np.ndarray:
    """`tokens` with `pad` after each first one of `ends`."""
    ended = np.isin(tokens, ends)
    before = np.cumsum(ended, axis=-1) - ended
    return np.where(before > 0, pad, tokens)


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
    config = transformers.GPT2Config(**GPT2, eos_token_id=1, pad_token_id=0)
    theirs = randomize(torch, transformers.GPT2LMHeadModel(config), 3, 4)
    theirs.generation_config.update(**settings)
    theirs.save_pretrained(tmp_path)
    tokenizer = train_characters(["".join(map(chr, range(97, 97 + V - 4)))])
    assert tokenizer.vocab_size == V
    loaded = replace(load(tmp_path), tokenizer=tokenizer)
    prompts = [np.random.default_rng(n).integers(2, V, 2 + n % 5) for n in range(10)]
    found = complete_with_details(loaded, prompts)
    for prompt, ours in zip(prompts, found, strict=True):
        said = theirs.generate(
            torch.tensor(prompt)[None], attention_mask=torch.ones(1, len(prompt))
        )
        assert ours.ids == said[0, len(prompt) :].tolist()
    assert len({tuple(each.ids) for each in found}) > 2
