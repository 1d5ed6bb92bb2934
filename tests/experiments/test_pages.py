"""Pages of runs show what the runs hold, and need no network."""

import base64
import json
from html.parser import HTMLParser
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.results import statistics
from experiments.harness.results.attention_views import AttentionView
from experiments.harness.results.comparing import compare
from experiments.harness.results.pages import Contents, Sentence, run_page
from experiments.language_modelling.page import attend
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS
from tests.experiments.finished_runs import sentences, worse, write_run

VOID = {"meta", "link", "img"}


class Page(HTMLParser):
    """The tags, texts and data of a page; each tag that opens must close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.text, self.data = [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script" and data.startswith("["):
            self.data = data
        self.text.append(data)


def picture(page):
    """The curves of a page, whose picture is in the page."""
    (address,) = (value for name, value in page.attributes if name == "src")
    return base64.b64decode(address.removeprefix("data:image/svg+xml;base64,")).decode()


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "translation" / "tiny"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"model": {"d_model": 13}}))
    (run / "env.json").write_text(json.dumps({"jax": "0.10.2"}))
    scores = {"bleu": 12.5, "bleu_signature": "nrefs:1|case:mixed", "search": {"beam_size": 3}}
    (run / "scores.json").write_text(json.dumps(scores))
    lines = [{"step": step, "loss": 6.0 / step} for step in (2, 4, 7)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def sentence(weights=None):
    weights = np.array([[[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]]]) if weights is None else weights
    view = AttentionView("cross-attention", ["<b>", "Hund", "."], ["dog", "</script>"], weights)
    return Sentence("dog </script> = Hund", [view])


def percents(text):
    """The numbers that the page's program reads in the text of a head."""
    return [ord(x) - (97 if x > "~" else 63) for x in text]


PARAMS = {"embedding": {"table": np.ones((29, 13))}, "norm": {"scale": np.ones(1013)}}
SAMPLES = {"source": ["a <i> b"], "model": ["x"], "reference": ["y"]}


def test_the_page_shows_settings_scores_curves_samples_and_attention(folder):
    page = Page(run_page(folder, Contents(PARAMS, [sentence()], SAMPLES)))
    shown = ("translation: tiny", "model.d_model", "13", "nrefs:1|case:mixed", "a <i> b", "1,390")
    for text in (*shown, "12.5", "search.beam_size"):
        assert text in page.text, text
    assert ">loss<" in picture(page)
    (one,) = json.loads(page.data)
    assert one["views"][0]["keys"] == ["dog", "</script>"]
    assert percents(one["views"][0]["weights"][0][0]) == [25, 75, 100, 0, 50, 50]


def test_a_score_of_samples_has_its_interval(tmp_path):
    text = sentences(83, seed=1)
    run = write_run(tmp_path / "a", worse(text, 0.3, seed=2), text)
    group = compare([run]).groups[0]
    assert statistics.rounded(group.mean, group.items) in Page(run_page(run)).text


def test_nothing_on_the_page_is_fetched(folder):
    text = run_page(folder, Contents(PARAMS, [sentence()], SAMPLES))
    page = Page(text)
    fetched = [value for name, value in page.attributes if name in ("src", "href", "data")]
    assert len(fetched) == 2 and all(address.startswith("data:") for address in fetched)
    assert not any(word in text for word in ("http:", "https:", "@import", "url(", "fetch("))


def test_a_run_with_little_gives_what_it_can_and_says_what_is_missing(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "scores.json").write_text('{"bleu": 1')
    text = "".join(Page(run_page(folder)).text)
    assert "metrics.jsonl is missing or damaged." in text
    assert "scores.json is missing or damaged." in text
    assert "The run has not been scored." in text and "config.json is missing" not in text


def test_a_page_of_large_attention_stays_below_80_kilobytes(folder):
    large = sentence(np.full((8, 8, 20, 20), 1 / 20))
    text = run_page(folder, Contents(PARAMS, [large] * 9, {}))
    assert 1 <= len(json.loads(Page(text).data)) < 9 and len(text.encode()) < 80_000
    larger = sentence(np.full((12, 8, 40, 40), 1 / 40))
    text = run_page(folder, Contents(PARAMS, [larger], {}))
    (view,) = json.loads(Page(text).data)[0]["views"]
    assert 1 <= len(view["weights"]) == 12 - view["first_layer"] < 12
    assert len(text.encode()) < 80_000


@pytest.mark.parametrize("objective, text", [("causal", "a dog"), ("masked", "a <mask> dog")])
def test_language_models_show_their_own_attention(objective, text, random_params):
    masked = objective == "masked"
    special = {"special_tokens": MASKED_SPECIAL_TOKENS} if masked else {}
    tokenizer = tokenizers.train_characters(["a dog sees"], **special)
    layers = {"num_encoder_layers": 2 * masked, "num_decoder_layers": 2 * (not masked)}
    sizes = jf.TransformerConfig(
        vocab_size=tokenizer.vocab_size, d_model=12, d_ff=14, num_heads=3, max_len=29, **layers
    )
    model = (MaskedLanguageModel if masked else jf.DecoderOnly)(sizes)
    params = random_params(model, jnp.ones((2, 5), jnp.int32))
    config = SimpleNamespace(objective=objective)
    view = attend(SimpleNamespace(**locals()), text)
    count = len(view.query_tokens)
    assert view.weights.shape == (2, 3, count, count) and count == (9 if masked else 5)
    np.testing.assert_allclose(view.weights.sum(axis=-1), 1.0, rtol=1e-5)
    above = view.weights[..., np.triu_indices(count, 1)[0], np.triu_indices(count, 1)[1]]
    assert above.any() == masked
