"""Log-probabilities of given tokens: of texts, and of continuations whose context is read once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.config import Learned
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.pipelines import token_scores
from jaxformer.text.tokenizers import train_characters
from tests.configs import small

LETTERS = "abcdefghijk "
MAX_LEN = 41
QUESTIONS = [
    ("abc", ["ka", " b", "fed cab", "k"]),
    ("hgf edc bak", ["b", "ak"]),
    ("", ["ab", "cde"]),
    ("k", ["feed"]),
    ("abcdefghij" * 3, ["abcdefghij", "b"]),  # too long for a cache of padded parts
]


@pytest.fixture(scope="module", params=[jf.Rotary(), Learned()], ids=lambda x: type(x).__name__)
def loaded(request, random_params):
    config = small(
        vocab_size=19,
        d_model=14,
        num_heads=2,
        head_dim=6,
        num_decoder_layers=2,
        max_len=MAX_LEN,
        positions=request.param,
    )
    model = DecoderOnly(config)
    params = random_params(model, jnp.ones((2, 3), jnp.int32))
    return jf.Loaded(model, params, train_characters([LETTERS]))


@pytest.mark.parametrize("length", [17, 300, 1304, 2001])
def test_a_long_text_alone_is_padded_by_less_than_a_tenth(length, monkeypatch, random_params):
    """A text of 1,304 tokens was read as one of 2,048."""
    model = DecoderOnly(small(vocab_size=19, num_decoder_layers=1, max_len=2048))
    params = random_params(model, jnp.ones((2, 3), jnp.int32))
    widths = []

    def read(params, function, model, tokens):
        widths.append(tokens.shape[1] - 1)
        return np.zeros((len(tokens), widths[-1])), np.ones((len(tokens), widths[-1]), bool)

    monkeypatch.setattr(token_scores, "run_divided", read)
    scores = jf.score_tokens(jf.Loaded(model, params, train_characters([LETTERS])), "a" * length)
    assert len(scores.ids) == length
    (width,) = widths
    assert length <= width < max(length + 128, 33)


def logits_after(loaded, ids):
    """The logits after each of `ids` but the last, in float64."""
    logits = loaded.model.apply({"params": loaded.params}, np.array([ids[:-1]]))
    return np.asarray(logits[0], np.float64)


def expected(loaded, context, continuation):
    """The log-probability of each id of `continuation`, and whether it is the largest."""
    logits = logits_after(loaded, [*context, *continuation])[len(context) - 1 :]
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(continuation))
    return log_probs[rows, continuation], logits.argmax(axis=1) == continuation


def check(loaded, scores, context, continuation, assert_equal):
    log_probs, most_likely = expected(loaded, context, continuation)
    assert scores.ids == continuation
    assert_equal(scores.log_probs, log_probs)
    assert scores.most_likely == most_likely.tolist()


def test_continuations_have_the_log_probabilities_of_the_whole_forward_pass(loaded, assert_equal):
    found = jf.score_continuations(loaded, QUESTIONS)
    bos = loaded.tokenizer.special.bos
    for (context, continuations), scores in zip(QUESTIONS, found, strict=True):
        ids = [bos, *loaded.tokenizer.encode(context)]
        assert len(scores) == len(continuations)
        for continuation, each in zip(continuations, scores, strict=True):
            check(loaded, each, ids, loaded.tokenizer.encode(continuation), assert_equal)


def test_the_context_of_several_continuations_is_read_once(loaded, monkeypatch):
    read = []
    run = token_scores.run_divided

    def counted(params, jitted, model, *arrays, **static):
        read.append([array.shape for array in arrays])
        return run(params, jitted, model, *arrays, **static)

    monkeypatch.setattr(token_scores, "run_divided", counted)
    jf.score_continuations(loaded, [("abcdefghijk", ["a", "bc", "d"])])
    assert read == [[(1, 16), (1,), (1, 3, 3)]]  # 11 tokens and BOS before 3 x 2 of continuations


def test_ids_are_taken_as_they_are(loaded, assert_equal):
    questions = [([4, 5, 6], [[7, 8], "ab"]), ("ab", [[9]])]
    (one, two), (three,) = jf.score_continuations(loaded, questions)
    check(loaded, one, [4, 5, 6], [7, 8], assert_equal)
    check(loaded, two, [4, 5, 6], loaded.tokenizer.encode("ab"), assert_equal)
    context = [loaded.tokenizer.special.bos, *loaded.tokenizer.encode("ab")]
    check(loaded, three, context, [9], assert_equal)


def test_tokens_of_a_text_add_up_to_its_score(loaded, assert_equal):
    texts = ["abcab", "", "k", "abcdefghijk " * 5]
    found = jf.score_tokens(loaded, texts)
    assert [scores.ids for scores in found] == [loaded.tokenizer.encode(text) for text in texts]
    assert_equal([sum(scores.log_probs) for scores in found], jf.score(loaded, texts))
    context = [loaded.tokenizer.special.bos]
    check(loaded, found[0], context, loaded.tokenizer.encode(texts[0]), assert_equal)
    alone = jf.score_tokens(loaded, texts[0])
    assert_equal(alone.log_probs, found[0].log_probs)


@pytest.mark.parametrize(
    ("question", "culprit"),
    [
        (("ab", [""]), "question 1 of 1 has no tokens"),
        (("ab", ["abcdefgh" * 5]), "max_len"),
        ("ab", "question 1 of 1 must be"),
        (("ab", "cd"), "question 1 of 1 must be"),
        (([4, 99], ["a"]), "the context of question 1 of 1 has ids"),
        (("ab", [3.5]), "a continuation of question 1 of 1"),
    ],
    ids=repr,
)
def test_a_question_that_cannot_be_scored_is_named(loaded, question, culprit):
    with pytest.raises(DataError, match=culprit):
        jf.score_continuations(loaded, [question])


def test_no_question_and_another_model_are_refused(loaded):
    with pytest.raises(DataError, match="empty"):
        jf.score_continuations(loaded, [])
    encoder = jf.EncoderOnly(small(vocab_size=19, num_encoder_layers=1))
    with pytest.raises(ConfigError, match="EncoderOnly"):
        jf.score_continuations(jf.Loaded(encoder, {}, loaded.tokenizer), QUESTIONS)


@pytest.mark.parametrize(
    "use",
    [
        lambda loaded: jf.score(loaded, ["abc", "k"]),
        lambda loaded: jf.score_continuations(loaded, QUESTIONS),
        lambda loaded: jf.complete(loaded, ["abc", "k"], max_new_tokens=5),
        lambda loaded: list(jf.stream(loaded, ["abc", "k"], max_new_tokens=5)),
        lambda loaded: jf.embed(loaded, ["abc", "k"]).tolist(),
    ],
    ids=["score", "score_continuations", "complete", "stream", "embed"],
)
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_arrays_go_to_the_device_explicitly(loaded, use, kind):
    convert = np.asarray if kind == "numpy" else jnp.asarray
    given = jf.Loaded(loaded.model, jax.tree.map(convert, loaded.params), loaded.tokenizer)
    with jax.transfer_guard("disallow"):
        found = use(given)
    assert found == use(loaded)


def test_a_mesh_with_explicit_axes_changes_nothing(loaded):
    mesh = jax.make_mesh((1,), ("data",))
    texts = ["abc", "k", "hgf edc"]
    written = jf.complete(loaded, texts, max_new_tokens=5)
    scores = jf.score(loaded, texts)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jf.Loaded(loaded.model, jax.device_put(loaded.params, whole), loaded.tokenizer)
    with jax.set_mesh(mesh):
        for each in (loaded, placed):
            assert jf.complete(each, texts, max_new_tokens=5) == written
            assert jf.score(each, texts) == scores
    assert jf.complete(placed, texts, max_new_tokens=5) == written
