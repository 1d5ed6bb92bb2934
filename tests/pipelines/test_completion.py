"""Completing: what a tiny model promises of each text, and a script that stands for a model."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import struct

from jaxformer.config import (
    Alibi,
    Learned,
    Relative,
    TransformerConfig,
    WindowOptions,
)
from jaxformer.decoding import CompletionOptions, SamplingConfig
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.blocks import Block
from jaxformer.nn.inspection import Patched
from jaxformer.nn.models import DecoderOnly
from jaxformer.nn.stacked_blocks import unstack_blocks
from jaxformer.ops.attention import reference
from jaxformer.pipelines import complete, complete_with_details, stream
from jaxformer.pipelines.decoding_weights import prepare
from jaxformer.pipelines.ensemble import Ensemble, stack_members
from jaxformer.pipelines.partial_text import PartialText
from jaxformer.pretrained import Loaded
from jaxformer.text.tokenizers import EOS, train_bpe, train_characters, train_words
from jaxformer.training.parameters import flatten
from tests.configs import small

LETTERS = "abcdefghijk "
PROMPTS = ["abcab", "ka", "hgf edc bak jihg", "ab", "  cabcd", "fee"]
SHORT = ["", "k", "a"]  # of one id, the last: another program reads nothing before it
FREE = SamplingConfig(max_new_tokens=13, temperature=1.5)
SEED = CompletionOptions(seed=3)
GREEDY = SamplingConfig(max_new_tokens=13, temperature=0.0)
WINDOW = WindowOptions(5)
CONFIG = small(
    vocab_size=19,
    d_model=14,
    num_heads=2,
    head_dim=6,
    num_decoder_layers=1,
    max_len=37,
    norm__placement="pre",
    embeddings__tied="none",
    positions=Learned(),
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_characters([LETTERS])


@pytest.fixture(scope="module")
def loaded(random_params, tokenizer):
    """A random model with 3 ids more than the tokenizer."""
    assert tokenizer.vocab_size == 16
    model = DecoderOnly(CONFIG)
    params = random_params(model, jnp.ones((2, 3), jnp.int32))
    # Feature 0 is constant, and speaks against an early end.
    norm, kernel = params["decoder"]["final_norm"], params["output"]["kernel"]
    norm["scale"][0], norm["bias"][0] = 0.0, 10.0
    kernel[0], kernel[0, EOS] = 0.0, -0.15
    return Loaded(model, params, tokenizer)


completions = complete_with_details


@partial(jax.jit, static_argnames="model")
def forward(model, params, tokens):
    return model.apply({"params": params}, tokens)


def next_logits(loaded, ids):
    """The whole forward pass, padded at the end to one shape."""
    padded = np.zeros((1, loaded.model.config.max_len), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(forward(loaded.model, loaded.params, padded))[0, len(ids) - 1]


def ids_of(prompt, tokenizer):
    return tokenizer.encode(prompt) or [tokenizer.special.bos]


def test_the_log_probabilities_are_those_of_the_whole_forward_pass(loaded, tokenizer, assert_equal):
    prompts = [*PROMPTS[:4], *SHORT]
    found = completions(loaded, prompts, FREE)
    for prompt, completion in zip(prompts, found, strict=True):
        ids = ids_of(prompt, tokenizer)
        expected = []
        for token in completion.ids:
            logits = next_logits(loaded, ids).astype(np.float64)
            expected.append(logits[token] - np.log(np.exp(logits).sum()))
            ids.append(token)
        assert_equal(completion.log_probs, expected)


@pytest.mark.parametrize(
    "changes",
    [{}, {"positions": Relative(5, 13)}, {"positions": Alibi(), "window": WINDOW}],
    ids=str,
)
def test_a_text_is_the_same_in_any_row_and_at_any_time(loaded, changes, assert_equal, monkeypatch):
    model = DecoderOnly(dataclasses.replace(CONFIG, **changes))
    loaded = dataclasses.replace(loaded, model=model, params=with_bias(loaded.params, changes))
    prompts = 3 * PROMPTS
    whole = completions(loaded, prompts, FREE)
    monkeypatch.setattr("jaxformer.pipelines.completion.BATCH_SIZE", 4)
    few_rows = completions(loaded, prompts, FREE)
    same(few_rows, whole, assert_equal)
    assert len({len(text.ids) for text in whole}) > 2, "mixed lengths"
    for number, prompt in enumerate(prompts[:3]):
        alone = completions(loaded, [prompt], FREE, first_example_id=number)
        same(alone, whole[number : number + 1], assert_equal)


def with_bias(params, changes):
    """`params` with a relative bias where the positions of `changes` need one."""
    if not isinstance(changes.get("positions"), Relative):
        return params
    bias = np.random.default_rng(5).standard_normal((5, 2), np.float32)
    return params | {"decoder": params["decoder"] | {"positions": {"relative_bias": bias}}}


def repeats(ids, token, size):
    """True if `token` after `ids` makes a run of `size` ids that is there already."""
    runs = [ids[i : i + size] for i in range(len(ids) - size + 1)]
    return size > 0 and [*ids[len(ids) - size + 1 :], token] in runs


def by_hand(loaded, prompt, sampling, keep):
    """Greedy and uncached, of the last `keep` ids every max_len // 2."""
    window, made, eos = [], [], loaded.tokenizer.special.eos
    ids = ids_of(prompt, loaded.tokenizer)
    for index in range(sampling.max_new_tokens):
        if index % (loaded.model.config.max_len // 2) == 0:
            window = (ids + made)[-keep:]
        logits = next_logits(loaded, window)[: loaded.tokenizer.vocab_size]
        seen, p = np.isin(np.arange(len(logits)), ids + made), sampling.repetition_penalty
        lower = np.where(logits > 0, logits / p, logits * p)
        scores, size = np.where(seen, lower, logits), sampling.no_repeat_ngram_size
        out = [repeats(ids + made, token, size) for token in range(len(logits))]
        out[eos] |= len(made) < sampling.min_new_tokens
        made.append(int(np.argmax(np.where(out, -np.inf, scores))))
        window = [*window, made[-1]]
        if made[-1] == eos:
            break
    return made


def same(found, expected, assert_equal):
    assert [x._replace(log_probs=0) for x in found] == [x._replace(log_probs=0) for x in expected]
    for one, other in zip(found, expected, strict=True):
        assert_equal(one.log_probs, other.log_probs)


def test_a_text_depends_on_its_seed_and_number_and_not_on_its_batch(loaded, assert_equal):
    def texts(prompts, first, options=SEED):
        return completions(loaded, prompts, FREE, options, first_example_id=first)

    whole = texts(PROMPTS, 11)
    same(texts(PROMPTS, 11), whole, assert_equal)
    for i in (0, 4):
        same(texts(PROMPTS[i : i + 1], 11 + i), whole[i : i + 1], assert_equal)
    same(texts(PROMPTS[1:], 12), whole[1:], assert_equal)
    assert len({tuple(text.ids) for text in texts(["abcab"] * 7, 0)}) > 5
    assert texts(PROMPTS, 11, CompletionOptions(seed=4)) != whole


def test_a_prompt_may_be_given_as_ids_and_be_made_on_the_way(loaded, tokenizer):
    ids = (tokenizer.encode(prompt) if i % 2 else prompt for i, prompt in enumerate(PROMPTS))
    assert completions(loaded, ids, FREE) == completions(loaded, PROMPTS, FREE)


@struct.dataclass
class Place:
    """The cache of a script: where the next token stands in the text."""

    position: jax.Array

    def reorder_beams(self, parents):
        return self

    def truncate(self, lengths):
        return Place(jnp.broadcast_to(lengths, self.position.shape))


class Script(nn.Module):
    """A model of which every text is an end of the one script: token t is followed by t + 1."""

    config: TransformerConfig

    @nn.compact
    def init_cache(self, batch_size, *, max_length):
        return Place(jnp.zeros(batch_size, jnp.int32))

    @nn.compact
    def decode_step(self, tokens, cache):
        shape = (self.config.max_len,)
        script = self.param("script", nn.initializers.zeros, shape, jnp.int32)
        position = cache.position[:, None] + 1 + jnp.arange(tokens.shape[-1])[None]
        logits = 9.0 * jax.nn.one_hot(script[position], self.config.vocab_size)
        return logits[:, None], Place(cache.position + tokens.shape[-1])


def scripted(tokenizer, text, *, max_len=101, after=(), extra=0):
    """A script of `text` and the ids `after` it as a loaded model, and its ids."""
    ids = tokenizer.encode(text) + list(after)
    size = tokenizer.vocab_size + extra
    model = Script(dataclasses.replace(CONFIG, vocab_size=size, max_len=max_len))
    params = {"script": np.array(ids + [ids[-1]] * (max_len - len(ids)), np.int32)}
    return Loaded(model, params, tokenizer), ids


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """Nearly a token a byte: most characters below are made of several."""
    return train_bpe(["the cat sat on the mat"] * 3, 268, prefix="")


STORY = "the cät sat on 日本 mats 🙂🙂, the cat"


def join(pieces, count):
    texts = [""] * count
    for number, piece in pieces:
        assert piece and "\ufffd" not in piece
        texts[number] += piece
    return texts


def test_streamed_pieces_joined_are_the_text_and_never_half_a_character(bytes_tokenizer):
    loaded, ids = scripted(bytes_tokenizer, STORY)
    prompts = ["the ", "the cä", "the"]
    rest = len(ids) - len(bytes_tokenizer.encode("the cä"))
    sampling = dataclasses.replace(GREEDY, max_new_tokens=rest)
    pieces = list(stream(loaded, prompts, sampling))
    assert len(pieces) == 12 and max(len(piece) for _, piece in pieces) <= 8 * len(" the")
    assert {number for number, _ in pieces[:3]} == {0, 1, 2}, "the texts are made side by side"
    found = completions(loaded, prompts, sampling)
    assert join(pieces, 3) == [completion.text for completion in found]
    assert found[1].text == STORY[len("the cä") :]


def scripted_text(tokenizer, prompt, text, stop=(), after=()):
    """The pieces that a `PartialText` makes of the ids of `text`, and itself."""
    ids = tokenizer.encode(prompt + text)[len(tokenizer.encode(prompt)) :] + list(after)
    made = PartialText(
        0,
        tokenizer.encode(prompt),
        tokenizer,
        max_new_tokens=len(ids),
        eos=(tokenizer.special.eos,),
        stop=stop,
    )
    pieces = []
    while not made.done:
        pieces.append(made.add(ids[len(made.ids)]))
    return pieces, made


@pytest.mark.parametrize(
    "make",
    [
        partial(train_bpe, vocab_size=300),
        partial(train_bpe, vocab_size=300, prefix=""),
        partial(train_words, vocab_size=100),
        train_characters,
    ],
)
def test_a_text_goes_on_from_its_prompt_as_the_tokenizer_joins_them(make):
    tokenizer = make(["the cat sat on the mat and then the cat sat on the other mat"])
    for prompt, text in [("the cat", " sat on the mat"), ("the", " cat"), ("on the mat", "")]:
        pieces, made = scripted_text(tokenizer, prompt, text, after=[tokenizer.special.eos])
        assert "".join(pieces) == made.text == text
        assert made.ended and made.done


def test_a_special_token_within_a_text_gives_nothing_and_takes_nothing():
    tokenizer = train_words(["the cat sat"], 100)
    made = PartialText(0, tokenizer.encode("the"), tokenizer, max_new_tokens=3, eos=(), stop=())
    cat, sat = tokenizer.encode("cat sat")
    assert [made.add(x) for x in (cat, tokenizer.special.bos, sat)] == [" cat", "", " sat"]


@pytest.mark.parametrize(
    "stop, text, size",
    [
        (("sat on",), "the cät ", 16),
        (("on 日", " mats"), "the cät sat ", None),
        # The one that is whole first, whatever the order; of those the longest.
        (("sat on 日", "at"), "the cät s", None),
        (("on", "sat on", "t on"), "the cät ", None),
        (("t",), "", 1),
        (("satt", "mate", "the cow", "🙂🙂🙂"), STORY, None),
        (("cat",), STORY[:-3], None),
    ],
)
def test_a_stop_string_ends_a_text_before_it_wherever_tokens_begin(
    bytes_tokenizer, stop, text, size
):
    loaded, ids = scripted(bytes_tokenizer, "x" + STORY, after=[2])
    settings = (
        SamplingConfig(max_new_tokens=100 - 1, temperature=0.0),
        CompletionOptions(stop=stop),
    )
    [found] = completions(loaded, ["x"], *settings)
    assert found.text == text and found.ended
    assert join(stream(loaded, ["x"], *settings), 1) == [text]
    assert found.ids == ids[1 : 1 + len(found.ids)]
    if found.ids[-1] != bytes_tokenizer.special.eos:
        before, after = (bytes_tokenizer.decode(found.ids[:n]) for n in (-1, None))
        assert any(end in after for end in stop), "nothing is made after it"
        assert not any(end in before for end in stop)
    assert len(found.log_probs) == len(found.ids) and max(found.log_probs) < 0.0
    if size:
        assert len(found.ids) <= size


def test_a_text_cut_within_a_character_is_without_it(bytes_tokenizer):
    prompt = bytes_tokenizer.encode("the cä")
    ids = bytes_tokenizer.encode(STORY)[len(prompt) :]
    cuts = 0
    for size in range(1, len(ids) + 1):
        made = PartialText(0, prompt, bytes_tokenizer, max_new_tokens=size, eos=(), stop=())
        pieces = [made.add(token) for token in ids[:size]]
        expected = bytes_tokenizer.decode(prompt + ids[:size]).rstrip("\ufffd")
        assert made.done and made.text == "".join(pieces) == expected[len("the cä") :]
        cuts += not expected.endswith(bytes_tokenizer.decode(ids[size - 1 : size]))
    assert cuts > 7


def test_what_may_become_a_stop_string_is_held_back_and_given_when_it_does_not():
    stop = ("abab!", "abac!")
    pieces, made = scripted_text(train_characters(["abcx!"]), "x", "aababaabac", stop=stop)
    assert pieces == ["", "a", "", "", "", "ab", "aba", "", "", "abac"]
    assert made.text == "aababaabac" and made.done and not made.ended


def test_an_end_token_ends_a_text_and_stands_in_its_ids(bytes_tokenizer):
    loaded, ids = scripted(bytes_tokenizer, "the cat", after=[2])
    long, cut = (
        completions(loaded, ["the"], max_new_tokens=count, temperature=0.0)[0]
        for count in (29, len(ids) - 2)
    )
    assert long.text == cut.text == " cat"
    assert long.ids == ids[1:] and long.ended
    assert cut.ids == ids[1:-1] and not cut.ended


def test_bytes_that_are_no_character_do_not_stop_the_text(bytes_tokenizer):
    lone = bytes_tokenizer.id_of("Ģ")
    after = [lone, lone, *bytes_tokenizer.encode("so"), lone]
    pieces, made = scripted_text(bytes_tokenizer, "x", "a", after=after)
    assert made.text == "a\ufffd\ufffdso" == "".join(pieces)


def test_an_id_that_the_tokenizer_does_not_have_is_never_made(tokenizer):
    loaded, _ = scripted(tokenizer, "abc", after=[16, 17, 18] * 5, extra=3)
    [found] = completions(loaded, ["ab"], max_new_tokens=7, temperature=0.0)
    assert found.ids == [tokenizer.id_of("c"), 0, 0, 0, 0, 0, 0] and found.text == "c"


SLIDES = CompletionOptions(overflow="slide")
RULES = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 3, "min_new_tokens": 23}
SLIDE = dataclasses.replace(GREEDY, max_new_tokens=53, **RULES)


def test_a_sliding_window_is_a_new_prefill_and_a_penalty_counts_the_whole_text(loaded):
    prompts = [*PROMPTS, "", "kjihg" * 11]
    found = completions(loaded, prompts, SLIDE, SLIDES)
    expected = [by_hand(loaded, prompt, SLIDE, keep=37 - 18) for prompt in prompts]
    assert [text.ids for text in found] == expected
    assert [len(text.log_probs) for text in found] == [len(ids) for ids in expected]
    assert sum(len(ids) == 53 for ids in expected) > 2
    free = dataclasses.replace(SLIDE, repetition_penalty=1.0)
    assert expected != [by_hand(loaded, prompt, free, keep=37 - 18) for prompt in prompts]
    pieces = stream(loaded, prompts, SLIDE, SLIDES)
    assert join(pieces, len(prompts)) == [text.text for text in found]


def test_a_long_prompt_is_read_in_parts_and_its_last_part_begins_where_it_fits(random_params):
    """Of 4 x 71 ids, those of one width after those of another, in a table of 299 positions."""
    config = dataclasses.replace(CONFIG, max_len=299)
    model, tokenizer = DecoderOnly(config), train_characters([LETTERS])
    params = random_params(model, jnp.ones((2, 3), jnp.int32))
    loaded = Loaded(model, params, tokenizer)
    prompts = [PROMPTS[2] * 4 + "a" * n for n in (0, 200, 232)]
    found = completions(loaded, prompts, max_new_tokens=3, temperature=0.0)
    keep = {"keep": 299}
    sampling = SamplingConfig(max_new_tokens=3, temperature=0.0)
    assert [x.ids for x in found] == [by_hand(loaded, x, sampling, **keep) for x in prompts]


def test_decoding_reads_the_layers_of_a_scanned_model_one_by_one(random_params, monkeypatch):
    config = dataclasses.replace(CONFIG, num_decoder_layers=2)
    scanned = DecoderOnly(dataclasses.replace(config, scan_layers=True))
    params = random_params(scanned, jnp.ones((2, 3), jnp.int32))
    model, plain = prepare(scanned, params)
    assert model == DecoderOnly(config)
    same_leaves = jax.tree.map(np.array_equal, plain, unstack_blocks(params))
    assert all(jax.tree.leaves(same_leaves))


def test_matrices_are_rounded_to_the_models_type_once_and_nothing_else_is(loaded, random_params):
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    _, params = prepare(DecoderOnly(config), loaded.params)
    dtypes = {path.rpartition("/")[2]: str(leaf.dtype) for path, leaf in flatten(params).items()}
    assert dtypes == {"table": "bfloat16", "kernel": "bfloat16"} | dict.fromkeys(
        ("bias", "scale"), "float32"
    )


class Routed(nn.Module):
    """Each token's vector goes through the matrix that a router in float32 chooses for it."""

    dtype: str

    @nn.compact
    def __call__(self, x, dropout_rng=None):
        size = x.shape[-1]
        weight = self.param("weight", nn.initializers.lecun_normal(), (3, size, size))
        router = self.param("table", nn.initializers.normal(1.0), (size, 3))
        scores = nn.Dense(3, name="router")(x.astype(jnp.float32)) + x.astype(jnp.float32) @ router
        chosen = jax.nn.one_hot(jnp.argmax(scores, -1), 3, dtype=x.dtype)
        return jnp.einsum("bte,btd,edf->btf", chosen, x, weight.astype(self.dtype))


def routed_block(**fields):
    return Block(make_feed_forward=lambda *, dtype, **_: Routed(dtype), **fields)


def test_the_type_in_which_a_module_reads_a_matrix_decides_and_not_its_name(random_params):
    """A router in float32 chooses the same experts as before."""
    model = DecoderOnly(dataclasses.replace(CONFIG, dtype="bfloat16"), block=routed_block)
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 19, (5, 37)))
    params = random_params(model, tokens)
    same_model, laid_out = prepare(model, params)
    feed_forward = laid_out["decoder"]["blocks_0"]["feed_forward"]
    types = {path: str(leaf.dtype) for path, leaf in flatten(feed_forward).items()}
    expected = {"router/kernel": "float32", "router/bias": "float32", "table": "float32"}
    assert types == expected | {"weight": "bfloat16"}
    before = forward(model, params, tokens)
    np.testing.assert_array_equal(forward(same_model, laid_out, tokens), before)


def test_members_of_an_ensemble_and_a_patched_model_are_rounded_as_the_model_is(random_params):
    model = DecoderOnly(dataclasses.replace(CONFIG, dtype="bfloat16"))
    params = random_params(model, jnp.ones((2, 3), jnp.int32))
    patched = Patched(model, {"decoder/output": lambda x: x[:, :1] + x})
    types = [
        {path: leaf.dtype for path, leaf in flatten(prepare(*pair)[1]).items()}
        for pair in (
            (model, params),
            (Ensemble(model), stack_members([params, params])),
            (patched, params),
        )
    ]
    assert types[0] == types[1] == types[2]
    assert types[0]["decoder/blocks_0/attention/query/kernel"] == jnp.bfloat16


def test_a_text_that_fits_does_not_slide_and_its_neighbours_do_not_matter(loaded, assert_equal):
    sampling = dataclasses.replace(SLIDE, max_new_tokens=25)
    slides = ["fee" * 13, "abc " * 4, "k" * 41, "ij" * 7, "a b" * 5]
    fits = ["abcdefghijk", "kjihgfedcba"]
    found = completions(loaded, [fits[0], *slides, fits[1]], sampling, SLIDES)
    fit = completions(loaded, 4 * fits, sampling)[:2]
    same(fit, [found[0], found[-1]], assert_equal)
    turned = completions(loaded, slides[::-1], sampling, SLIDES)
    same(turned, found[-2:0:-1], assert_equal)


def test_a_text_made_in_rounds_is_drawn_as_one_made_at_once(tokenizer):
    """Where nothing depends on the context, it does not matter how much of it is seen."""
    even = dataclasses.replace(FREE, max_new_tokens=61, temperature=1e6, suppress_tokens=(EOS,))
    settings = even, dataclasses.replace(SLIDES, seed=3)
    prompts = ["abc", "ab", "a"]
    short, long = (scripted(tokenizer, LETTERS, max_len=n)[0] for n in (37, 101))
    rounds, whole = (completions(loaded, prompts, *settings) for loaded in (short, long))
    assert [text.ids for text in rounds] == [text.ids for text in whole]
    assert min(len(text.ids) for text in rounds) == 61 > 2 * 18


def test_a_prompt_that_just_fits_is_taken(loaded):
    stream(loaded, ["a" * 24], GREEDY)  # refuses at once what does not fit


def test_a_hundred_calls_of_mixed_settings_and_lengths_compile_few_programs(loaded, compiled):
    rng = np.random.default_rng(7)
    for number in range(100):
        prompts = ["abcdefghijk"[: rng.integers(1, 12)] for _ in range(rng.integers(1, 8))]
        settings = {
            "max_new_tokens": int(rng.integers(1, 25)),
            "temperature": float(rng.choice([0.0, 0.7, 1.3])),
            "top_k": int(rng.choice([0, 3, 50])),
            "top_p": float(rng.choice([0.9, 1.0])),
            "min_p": float(rng.choice([0.0, 0.1])),
            "repetition_penalty": float(rng.choice([1.0, 1.2])),
            "seed": number,
        }
        texts = complete(loaded, prompts, **settings)
        assert len(texts) == len(prompts)
    assert compiled[0] <= 12
    list(stream(loaded, ["ab", "abc"], max_new_tokens=7))
    complete(loaded, ["ab", "abc"], max_new_tokens=7, stop=("zz",))
    assert compiled[0] <= 12, "streams and stop strings are the same programs"


def test_a_prompt_is_read_by_calls_that_a_flash_attention_can_compute(loaded):
    """The offset of a first part is known while tracing, and no key is after its last query."""
    noted = set()

    def attend(q, k, v, mask, **options):
        if q.shape[1] > 1:
            noted.add((q.shape[1], k.shape[1], mask.offset if type(mask.offset) is int else None))
        return reference(q, k, v, mask, **options)

    model = loaded.model.clone(attention_fn=attend)
    prompts = ["abcdefghijk" * 2, "abc"]
    texts = complete(Loaded(model, loaded.params, loaded.tokenizer), prompts, GREEDY)
    assert texts == complete(loaded, prompts, GREEDY)
    room = CONFIG.max_len
    assert noted == {(16, 16, 0), (16, room, None)}


def test_a_logits_processor_of_the_callers_decides_what_is_written(loaded):
    def no_id_twice(logits, history):
        return jnp.where(history.token_counts > 0, -jnp.inf, logits)

    options = {"logits_processors": [no_id_twice], "max_new_tokens": 8, "temperature": 1.5}
    plain = complete_with_details(loaded, ["ab", "abc"], max_new_tokens=8, temperature=1.5)
    texts = complete_with_details(loaded, ["ab", "abc"], **options)
    for prompt, text in zip(["ab", "abc"], texts, strict=True):
        ids = [*loaded.tokenizer.encode(prompt), *text.ids]
        assert len(set(ids)) == len(ids) > len(prompt) + 1
    assert any(len(set(text.ids)) < len(text.ids) for text in plain)
    assert join(stream(loaded, ["ab", "abc"], **options), 2) == [text.text for text in texts]


def endless(tokenizer):
    """A text that would take minutes."""
    loaded, _ = scripted(tokenizer, "abcabcabcabc", max_len=300_000)
    return loaded, ["ab", "a"], SamplingConfig(max_new_tokens=200_000, temperature=0.0)


def test_a_stream_gives_its_pieces_at_once_and_may_be_left(tokenizer):
    pieces = stream(*endless(tokenizer))
    assert {next(pieces), next(pieces)} == {(0, "cabcabca"), (1, "bcabcabc")}
    pieces.close()


class Sloppy(Script):
    """It runs only where JAX is told to let shapes of different ranks meet."""

    def decode_step(self, tokens, cache):
        logits, cache = super().decode_step(tokens, cache)
        return logits + jnp.zeros(self.config.vocab_size), cache


def test_both_programs_run_under_their_callers_settings(tokenizer):
    loaded, _ = scripted(tokenizer, "abcdefghijk")
    sloppy = dataclasses.replace(loaded, model=Sloppy(loaded.model.config))
    inputs = sloppy, ["a", "ab"], dataclasses.replace(GREEDY, max_new_tokens=5)
    with pytest.raises(ValueError, match="rank_promotion"):
        complete(*inputs)
    with jax.numpy_rank_promotion("allow"):
        assert complete(*inputs) == ["bcdef", "cdefg"]


def test_more_prompts_than_a_program_takes_keep_their_places(tokenizer):
    loaded, _ = scripted(tokenizer, "abcdefghijk" * 7)
    sampling = dataclasses.replace(GREEDY, max_new_tokens=3)
    prompts = [("abcdefghijk" * 2)[: 1 + i % 13] for i in range(67)]
    expected = [("abcdefghijk" * 2)[1 + i % 13 :][:3] for i in range(67)]
    assert complete(loaded, prompts, sampling) == expected
    assert join(stream(loaded, prompts, sampling), 67) == expected


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("eos", 2, "eos=2"),
        ("stop", ("a", ""), r"stop=\('a', ''\)"),
        ("seed", -1, "seed=-1"),
        ("seed", 2**32, "seed=4294967296"),
    ],
)
def test_options_that_cannot_be_are_refused(name, value, message):
    with pytest.raises(ConfigError, match=message):
        CompletionOptions(**{name: value})


TOO_LONG = (
    "prompt 2 of 2 has 25 tokens, which makes 38 with max_new_tokens=13, but max_len=37: shorten "
    "it, give a smaller max_new_tokens, or give overflow='slide'"
)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        (b"abc", {}, DataError, "bytes"),
        (["a", "b\ud800"], {}, DataError, "text 2 of 2"),
        ([None], {}, DataError, "prompt 1"),
        (["a", b"ab"], {}, DataError, "prompt 2"),
        (["a", [5.7]], {}, DataError, "prompt 2"),
        (["a", [5, 16]], {}, DataError, "prompt 2"),
        (["a", "a" * 25], {}, ConfigError, TOO_LONG),
        (["a"], {"eos": (2, 19)}, ConfigError, "eos=19"),
    ],
)
@pytest.mark.parametrize("use", [complete, stream])
def test_what_cannot_be_continued_is_refused_by_its_place(
    loaded, use, prompts, options, error, message
):
    with pytest.raises(error, match=message):
        use(loaded, prompts, GREEDY, CompletionOptions(**options))


def test_an_empty_prompt_is_refused_where_no_token_begins_a_text(loaded):
    bare = dataclasses.replace(
        loaded, tokenizer=train_characters([LETTERS], special_tokens=()), target_tokenizer=None
    )
    with pytest.raises(DataError, match="prompt 2 of 2"):
        complete(bare, ["a", ""], GREEDY)


def test_a_second_call_of_the_same_sizes_traces_nothing(loaded):
    traced = []

    class Counted(DecoderOnly):
        def init_cache(self, *args, **options):
            traced.append(args)
            return super().init_cache(*args, **options)

    counted = dataclasses.replace(loaded, model=Counted(loaded.model.config))
    first = complete(counted, ["abc", "de"], max_new_tokens=5, seed=0)
    assert traced
    traced.clear()
    assert complete(counted, ["abc", "de"], max_new_tokens=5, seed=0) == first
    assert traced == []
