"""The page of a run: what it shows is what the run holds, and it needs no network."""

import json
from html.parser import HTMLParser
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments import report
from experiments.harness.results.attention_views import AttentionView
from experiments.harness.results.comparing import compare
from experiments.harness.results.comparison_formats import page as several_page
from experiments.harness.results.report import Sentence, page
from experiments.harness.runs.text_io import read_table
from experiments.language_modelling.report import attend
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS
from tests.experiments.finished_runs import sentences, worse, write_run

VOID = {"meta", "link", "line", "path"}


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


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "translation" / "tiny"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"model": {"d_model": 13}}))
    (run / "env.json").write_text(json.dumps({"jax": "0.10.2"}))
    scores = {"bleu": 12.5, "bleu_signature": "nrefs:1|case:mixed", "search": {"beam_size": 3}}
    (run / "scores.json").write_text(json.dumps(scores))
    lines = [{"step": step, "loss": 6.0 / step, "once": 1.0} for step in (2, 4, 7)]
    lines[0].pop("once"), lines[1].pop("once")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def sentence(weights=None):
    weights = np.array([[[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]]]) if weights is None else weights
    view = AttentionView("cross-attention", ["<b>", "Hund", "."], ["dog", "</script>"], weights)
    return Sentence("dog </script> = Hund", [view])


PARAMS = {"embedding": {"table": np.ones((29, 13))}, "norm": {"scale": np.ones(1013)}}
SAMPLES = {"source": ["a <i> b"], "model": ["x"], "reference": ["y"]}


def test_the_page_shows_settings_scores_curves_samples_and_attention(folder):
    found = Page(page(folder, PARAMS, [sentence()], SAMPLES, {"bleu": (11.0, 14.0)}))
    shown = ("translation: tiny", "model.d_model", "13", "nrefs:1|case:mixed", "a <i> b", "1,390")
    for said in shown:
        assert any(said in text for text in found.text), said
    assert any("11.00 to 14.00" in text for text in found.text)
    assert found.text.count("loss by step") == 1 and "once by step" not in found.text
    assert "from 3 at step 2 to 0.8571 at 7" in found.text
    (one,) = json.loads(found.data)
    assert one["views"][0]["weights"] == [[[[25, 75], [100, 0], [50, 50]]]]
    assert one["views"][0]["keys"] == ["dog", "</script>"]


def test_nothing_on_the_page_is_fetched(folder):
    text = page(folder, PARAMS, [sentence()], SAMPLES, {})
    found = Page(text)
    fetched = {name: value for name, value in found.attributes if name in ("src", "href", "data")}
    assert set(fetched.values()) == {"data:,"}  # the icon, which is empty
    assert not any(word in text for word in ("http:", "https:", "@import", "url(", "fetch("))


def test_a_run_with_little_gives_what_it_can_and_says_what_is_missing(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "scores.json").write_text('{"bleu": 1')
    found = "".join(Page(page(folder, PARAMS, [], {}, {})).text)
    assert "metrics.jsonl is missing or damaged." in found
    assert "scores.json is missing or damaged." in found
    assert "The run has not been scored." in found and "config.json is missing" not in found


def test_sentences_beyond_the_size_of_a_page_are_left_out(folder):
    large = sentence(np.full((8, 8, 60, 60), 1 / 60))
    text = page(folder, PARAMS, [large] * 9, {}, {})
    assert 1 <= len(json.loads(Page(text).data)) < 9 and len(text) < 2_000_000


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """Two variants, the first of two seeds, with curves."""
    root, text = tmp_path_factory.mktemp("several"), sentences(23, seed=1)
    for width, seed, share in ((7, 0, 0.2), (7, 1, 0.3), (11, 0, 0.5)):
        made = worse(text, share, seed=10 * width + seed)
        run = write_run(root / f"w{width}-{seed}", made, text, seed=seed, width=width)
        lines = [{"step": step, "loss": (width + seed) / step, "once": 1.0} for step in (2, 4, 7)]
        lines[0].pop("once"), lines[1].pop("once")
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def test_a_page_of_several_runs_has_scores_bands_samples_and_what_differs(variants, tmp_path):
    output = tmp_path / "page.html"
    report.main(
        report.ReportOptions((str(variants),), str(output), baseline=str(variants / "w7-0"))
    )
    text = output.read_text()
    found = Page(text)
    assert any("one seed: the noise of seeds is not known" in said for said in found.text)
    compared = compare([variants], baseline=str(variants / "w7-0"))
    for group in compared.groups:
        assert found.text.count(f"{group.mean:.2f}") == 1 and group.name in found.text
    assert text.count("<figure>") == 1 and text.count('class="line"') == 2
    assert text.count('class="band"') == 1  # of the two seeds
    told = "width=7: from 3.75 at step 2 to 1.071 at 7; width=11: from 5.5 at step 2 to 1.571 at 7"
    assert told in found.text
    model = read_table(variants / "w11-0" / "samples" / "test.tsv")["model"]
    assert model[0] in found.text and model[12] not in found.text
    settings = found.text[found.text.index("setting") :]
    assert settings[:6] == ["setting", "width=7", "width=11", "model.width", "7", "11"]
    assert not any(word in text for word in ("http:", "https:", "@import", "url(", "fetch("))


def test_runs_that_cannot_be_compared_still_have_a_page(variants, tmp_path):
    other = write_run(tmp_path / "other", ["a b"] * 23, sentences(23, seed=2), width=13)
    text = several_page([str(variants), str(other)])
    assert "The scores cannot be compared: " in text and "score all runs on one text" in text
    assert "There are none." in text and 'class="band"' in text  # no samples of one text
    with pytest.raises(ConfigError, match="no runs were given"):
        report.main(report.ReportOptions())


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
