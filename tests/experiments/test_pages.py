"""Pages of runs show what the runs hold, and need no network."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments.harness.results import statistics
from experiments.harness.results.attention_views import AttentionView
from experiments.harness.results.charts import chart, quantity
from experiments.harness.results.comparing import compare
from experiments.harness.results.pages import Contents, Sentence, html, run_page, runs_page
from experiments.language_modelling.page import attend
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS
from tests.experiments.finished_runs import sentences, worse, write_run

VOID = {"meta", "link", "path", "polyline", "polygon", "circle"}
"""Tags of which the page closes none, or by a slash."""


class Page(HTMLParser):
    """The tags, texts and data of a page; each tag that opens must close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.text, self.data = [], [], [], ""
        self.feed(text)
        assert not self.open
        self.hovers = [json.loads(value) for name, value in self.attributes if name == "data-hover"]

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
        self.text.append(data.strip())


def written(folder, contents=None):
    """The text of a run's page."""
    return html(run_page(folder, contents))


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
    page = Page(written(folder, Contents(PARAMS, [sentence()], SAMPLES)))
    shown = ("translation: tiny", "model.d_model", "13", "nrefs:1|case:mixed", "a <i> b", "1,390")
    for text in (*shown, "12.5", "search.beam_size"):
        assert text in page.text, text
    (hover,) = page.hovers
    assert hover["steps"] == ["2", "4", "7"] and hover["values"] == [["3", "1.5", "0.8571"]]
    (one,) = json.loads(page.data)
    assert one["views"][0]["keys"] == ["dog", "</script>"]
    assert percents(one["views"][0]["weights"][0][0]) == [25, 75, 100, 0, 50, 50]


def test_a_score_of_samples_has_its_interval(tmp_path):
    text = sentences(83, seed=1)
    run = write_run(tmp_path / "a", worse(text, 0.3, seed=2), text)
    group = compare([run]).groups[0]
    assert statistics.rounded(group.mean, group.items) in Page(written(run)).text


def test_nothing_on_the_page_is_fetched(folder):
    text = written(folder, Contents(PARAMS, [sentence()], SAMPLES))
    page = Page(text)
    fetched = [value for name, value in page.attributes if name in ("src", "href", "data")]
    assert fetched == ["data:,"]
    assert not any(word in text for word in ("http:", "https:", "@import", "url(", "fetch("))


def test_a_run_with_little_gives_what_it_can_and_says_what_is_missing(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "scores.json").write_text('{"bleu": 1')
    text = "".join(Page(written(folder)).text)
    assert "metrics.jsonl is missing or damaged." in text
    assert "scores.json is missing or damaged." in text
    assert "Not scored yet." in text and "config.json is missing" not in text


def test_a_page_of_large_attention_stays_below_80_kilobytes(folder):
    large = sentence(np.full((8, 8, 20, 20), 1 / 20))
    text = written(folder, Contents(PARAMS, [large] * 9, {}))
    assert 1 <= len(json.loads(Page(text).data)) < 9 and len(text.encode()) < 80_000
    larger = sentence(np.full((12, 8, 40, 40), 1 / 40))
    text = written(folder, Contents(PARAMS, [larger], {}))
    (view,) = json.loads(Page(text).data)[0]["views"]
    assert 1 <= len(view["weights"]) == 12 - view["first_layer"] < 12
    assert len(text.encode()) < 80_000


def log(run, lines, **environment):
    """Gives `run` a log and facts of its environment."""
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "env.json").write_text(json.dumps(environment))


def test_what_one_looks_for_first_is_what_the_run_holds(tmp_path):
    text = sentences(83, seed=1)
    hypotheses = worse(text, 0.3, seed=2)
    run = write_run(tmp_path / "a", hypotheses, text)
    lines = [{"step": 50 * x, "loss": 7.0 / x, "tokens_per_second": 16140.47} for x in range(1, 8)]
    log(
        run,
        [*lines, {"step": 350, "validation_loss": 1.23456789}],
        command="python -m experiments.translation.train --name 'a b'",
        devices=["gpu:NVIDIA H100"] * 8,
        time="2026-11-22T10:00:00+00:00",
        finished="2026-11-22T11:02:03+00:00",
        earlier=[{"seconds": 60}],
    )
    page = run_page(run)
    group = compare([run]).groups[0]
    assert page.score == statistics.rounded(group.mean, group.items)
    assert page.score_name.startswith("BLEU on the test text (83 sentences)")
    shown = {"steps": "350", "weights": "of step 40", "time": "1 h 03 min"}
    shown |= {
        "device": "8 x NVIDIA H100",
        "speed": "16,140 tokens/s",
        "started": "2026-11-22 10:00",
    }
    assert shown.items() <= page.facts.items() and "chrF" in page.facts
    assert page.command == "python -m experiments.translation.train --name 'a b'"
    loss, speed = page.charts[0], page.more_charts[0]
    assert [line.name for line in loss.lines] == ["training", "validation"]
    assert loss.last == ["1", "1.235"] and speed.unit == "tokens/s"
    samples = run_page(run, Contents({}, [], {"source": text, "model": hypotheses})).samples
    assert samples.rows == list(zip(text, hypotheses, strict=True))[:3]
    seen = re.sub(
        r"<script.*?</script>|<svg.*?</svg>|<style.*?</style>", "", html(page), flags=re.S
    )
    assert not re.search(r"\d\.\d{5}", seen)


def test_an_axis_has_round_ticks_within_it_and_is_logarithmic_where_that_helps():
    linear = chart(quantity("validation_exact"), {"a": [((10, 20), (0.41, 0.93))]})
    assert [tick.text for tick in linear.y_ticks] == ["40", "60", "80"] and linear.unit == "%"
    assert [tick.text for tick in linear.x_ticks] == ["0", "5", "10", "15", "20"]
    falling = chart(quantity("loss"), {"a": [((10, 20, 30), (10.0, 1.0, 0.1))]})
    assert falling.unit == "nats per token, log scale"
    points = [tuple(map(float, x.split(","))) for x in falling.lines[0].points.split()]
    assert points[1][1] - points[0][1] == pytest.approx(points[2][1] - points[1][1], abs=0.2)
    one = next(tick for tick in falling.y_ticks if tick.text == "1")
    assert one.at == points[1][1] and 10 <= min(tick.at for tick in falling.y_ticks)
    narrow = chart(quantity("loss"), {"a": [((10, 20), (4.0, 3.0))]})
    assert narrow.unit == "nats per token"


def test_a_long_curve_is_thinned_and_keeps_its_last_value():
    curves = {name: [(range(1, 9974), np.linspace(9, 1, 9973) + i)] for i, name in enumerate("ab")}
    drawn = chart(quantity("loss"), curves)
    assert drawn.hover["steps"][-1] == "9,973" and drawn.last == ["1", "2"]
    assert 100 < len(drawn.hover["at"]) <= 200


def test_several_runs_share_colours_and_seeds_are_one_curve(tmp_path):
    text = sentences(83, seed=1)
    for name, seed, width in (("a0", 0, 7), ("a1", 1, 7), ("b0", 0, 8), ("b1", 1, 8)):
        worsened = worse(text, 0.3 if width == 7 else 0.1, seed)
        run = write_run(tmp_path / "runs" / name, worsened, text, seed=seed, width=width)
        lines = [{"step": x, "loss": width / x, "validation_bleu": width * x} for x in (2, 5, 11)]
        log(run, lines, command=f"python -m x --seed {seed}")
    page = runs_page([tmp_path / "runs"])
    comparison = compare([tmp_path / "runs"])
    styles = {each.name: each.style for each in page.ranges}
    assert list(styles) == ["width=7", "width=8"] and len(set(styles.values())) == 2
    for drawn in page.charts:
        drawn_styles = {line.name.removesuffix(" (2 seeds)"): line.style for line in drawn.lines}
        assert drawn_styles == styles
        assert all(line.band for line in drawn.lines)
    first = comparison.groups[0]
    widest = np.nanmax([first.seeds, first.items, first.both])
    assert page.ranges[0].text == statistics.rounded(first.mean, widest)
    assert page.ranges[0].at < page.ranges[1].at
    assert list(page.tables) == ["Scores", "Differences"] and len(page.runs.rows) == 4
    assert page.samples.titles == ["source", "reference", "width=7", "width=8"]
    assert page.command == "python -m x --seed 0\npython -m x --seed 1"
    assert Page(html(page)).hovers[0]["steps"] == ["2", "5", "11"]
    (tmp_path / "runs" / "b0" / "weights.json").unlink()
    unfinished = runs_page([tmp_path / "runs"])
    assert "b0 has no weights.json" in unfinished.warnings[0] and unfinished.charts


IN_BROWSER = """
const th = (title) => [...document.querySelectorAll(".numbers button")]
  .find((x) => x.textContent === title);
const rows = th("mean").closest("table").tBodies[0].rows;
const column = () => [...rows].map((row) => row.cells[2].textContent);
th("mean").click(); const up = column(); th("mean").click(); const down = column();
const svg = document.querySelector("[data-hover]"), box = svg.getBoundingClientRect();
const output = () => [...svg.parentNode.querySelectorAll("output")].map((x) => x.textContent);
const last = output();
svg.onpointermove({clientX: box.left + box.width * (56 + 414 * 5 / 11) / 480});
const pointed = output(); svg.onkeydown({key: "ArrowLeft"});
const result = JSON.stringify({up, down, last, pointed, left: output()});
document.body.textContent = "RESULT" + result + "END";
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_in_a_browser_tables_sort_and_pointing_at_a_chart_shows_its_values(tmp_path):
    text = sentences(83, seed=1)
    for name, width in (("a", 7), ("b", 8), ("c", 9)):
        run = write_run(
            tmp_path / "runs" / name, worse(text, (width - 6) / 4, 0), text, width=width
        )
        log(run, [{"step": x, "loss": width / x} for x in (2, 5, 11)])
    script = f"<script>{IN_BROWSER}</script></body>"
    (tmp_path / "x.html").write_text(
        html(runs_page([tmp_path / "runs"])).replace("</body>", script)
    )
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --dump-dom"
    command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path}", f"{tmp_path}/x.html"]
    command[-1] = f"file://{command[-1]}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    result = json.loads(re.search("RESULT({.*})END", done.stdout)[1])
    assert sorted(result["up"], key=float) == result["up"] == result["down"][::-1]
    assert result["last"] == ["11", "0.6364", "0.7273", "0.8182"]
    assert result["pointed"] == ["5", "1.4", "1.6", "1.8"]
    assert result["left"] == ["2", "3.5", "4", "4.5"]


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
