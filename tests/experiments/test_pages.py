"""Pages of runs show what the runs hold, and need no network."""

import base64
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
from experiments import runs
from experiments.harness.results import pages
from experiments.harness.results.attention_views import AttentionView
from experiments.harness.results.comparing import compare
from experiments.harness.results.pages import Contents, Sentence, run_page, runs_page
from experiments.harness.results.run_facts import RunFacts, facts_of_sweep
from experiments.harness.runs import rounding
from experiments.language_modelling.page import attend
from jaxformer.checkpoint.lock import lock
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS
from tests.experiments.finished_runs import sentences, worse, write_language_run, write_run

VOID = {"meta", "link", "path", "use", "rect"}
PARAMS = {"embedding": {"table": np.ones((29, 13))}, "norm": {"scale": np.ones(1013)}}
TEXT = sentences(83, seed=1)


class Page(HTMLParser):
    """The tags, texts and tables of a page; each tag that opens must close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.text, self.tables, self.data = [], [], [], [], "[]"
        self.source, self.said = text, ""
        self.feed(text)
        assert not self.open
        self.said = " ".join(self.text)
        charts = re.findall(r'<svg role="img" aria-label="(.*?)"(.*?)</svg>', text, re.S)
        self.charts = dict(charts)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.open += [] if tag in VOID else [tag]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th") and self.tables[-1:] != [[]]:
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.data = data if data.startswith("[") else self.data
        elif {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data.strip()
        self.text.append(data.strip())

    def table(self, title):
        """The rows of the tables with this title, as {title: cell}."""
        tables = [table for table in self.tables if title in sum(table[:1], [])]
        return [dict(zip(x[0], row, strict=True)) for x in tables for row in x[1:]]

    def colors(self, chart):
        """The colours of the lines in a chart."""
        return set(re.findall(r"stroke: var\((--c\d)\); stroke-width: 1.5", self.charts[chart]))

    @property
    def legend(self):
        """The colour of each name above the curves."""
        (legend,) = re.findall(r'<p class="legend">(.*?)</p>', self.source, re.S)
        pattern = r'stroke="var\((--c\d)\)".*?</svg> (.*?)</span>'
        return {name: color for color, name in re.findall(pattern, legend)}


def sentence(weights):
    view = AttentionView("cross-attention", ["<b>", "Hund", "."], ["dog", "</script>"], weights)
    return Sentence("dog </script> = Hund", [view])


def logged(folder, steps, **values):
    """Gives a run a log of `values`, each a function of the step."""
    lines = [{"step": x, **{name: value(x) for name, value in values.items()}} for x in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_page_shows_what_its_run_holds_and_fetches_nothing(tmp_path):
    written = worse(TEXT, 0.3, seed=2)
    run = write_run(tmp_path / "translation" / "tiny", written, TEXT)
    steps = range(50, 400, 50)
    logged(run, steps, loss=lambda x: 350 / x, tokens_per_second=lambda _: 16140.47)
    environment = {
        "command": "python -m experiments.translation.train --name 'a b'",
        "devices": ["gpu:NVIDIA H100"] * 8,
        "time": "2026-11-22T10:00:00+00:00",
        "finished": "2026-11-22T11:02:03+00:00",
        "earlier": [{"seconds": 60, "time": "2026-11-21T10:00:00+00:00"}],
    }
    (run / "env.json").write_text(json.dumps(environment))
    weights = np.array([[[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]]])
    samples = {"source": ["a <i> b", "c"], "model": ["x", "z"], "reference": ["x", "y"]}
    page = Page(run_page(run, Contents(PARAMS, [sentence(weights)], samples)))
    group = compare([run]).groups[0]
    for said in (
        *("translation: tiny", rounding.rounded(group.mean, group.items), "1,390", "of step 40"),
        *("BLEU on the test text (83 sentences)", "350", "1 h 03 min", "8 x NVIDIA H100"),
        *("16,140 tokens/s", "2026-11-21 10:00", "python -m experiments.translation.train --name"),
    ):
        assert said in page.said, said
    assert page.table("source") == [
        {"source": "c", "reference": "y", "model": "z"},  # the wrong one first
        {"source": "a <i> b", "reference": "x", "model": "x"},
    ]
    (view,) = json.loads(page.data)[0]["views"]
    assert view["keys"] == ["dog", "</script>"]
    assert list(base64.b64decode(view["weights"][0][0])) == [25, 75, 100, 0, 50, 50]
    fetched = [value for name, value in page.attributes if name in ("src", "href", "data")]
    assert fetched == ["data:,"]
    assert not any(
        word in page.source for word in ("http:", "https:", "@import", "url(h", "fetch(")
    )
    seen = re.sub(r"<(script|style).*?</\1>|<svg.*?</svg>", "", page.source, flags=re.S)
    assert not re.search(r"\d\.\d{5}", seen)


def test_a_single_run_has_one_colour_for_training_and_one_for_validation(tmp_path):
    run = write_run(tmp_path / "a", TEXT, TEXT)
    both = {"loss": lambda x: 350 / x, "validation_loss": lambda x: 400 / x}
    logged(run, range(1, 300), **both, validation_bleu=float, padding=lambda _: 0.0)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {x}, "own": 3.5}}\n' for x in (300, 301))
    page = Page(run_page(run))
    training, validation = page.legend["training"], page.legend["validation"]
    assert page.colors("loss by step") == {training, validation}
    assert page.colors("validation_bleu by step") == {validation}
    assert list(page.charts) == ["loss by step", "validation_bleu by step", "own by step"]
    assert "loss (nats per token, log scale)" in page.charts["loss by step"]
    assert len(page.source) < 30_000, "long curves are thinned"


def test_a_page_says_how_its_run_ended_and_what_is_missing_or_damaged(tmp_path):
    run = write_run(tmp_path / "a", TEXT, TEXT)
    (run / "config.json").write_text(json.dumps({"optimizer": {"total_steps": 1000}}))
    (run / "env.json").write_text('{"time": "2026-11-22T10:00:00+00:00"}')
    assert "metrics.jsonl is missing." in Page(run_page(run)).said
    logged(run, (20, 40), loss=float)
    (run / "scores.json").write_text('{"bleu": 1')
    assert "scores.json is damaged." in Page(run_page(run)).said
    for name in ("scores.json", "weights.json"):
        (run / name).unlink()
    said = Page(run_page(run)).said
    assert "stopped at step 40 of 1,000" in said and "Not scored yet." in said
    assert "damaged" not in said and "missing" not in said
    with lock(run / "checkpoints"):
        assert "running at step 40 of 1,000" in Page(run_page(run)).said
    (run / "env.json").write_text('{"failed": "the disk is full"}')
    assert "failed at step 40 of 1,000: the disk is full" in Page(run_page(run)).said


def test_a_page_of_large_attention_stays_below_80_kilobytes(tmp_path):
    run = write_run(tmp_path / "a", TEXT, TEXT)
    large = sentence(np.full((8, 8, 20, 20), 1 / 20))
    text = run_page(run, Contents(PARAMS, [large] * 9, {}))
    assert 1 <= len(json.loads(Page(text).data)) < 9 and len(text.encode()) < 80_000
    larger = sentence(np.full((12, 8, 40, 40), 1 / 40))
    text = run_page(run, Contents(PARAMS, [larger], {}))
    (view,) = json.loads(Page(text).data)[0]["views"]
    assert 1 <= len(view["weights"]) == 12 - view["first_layer"] < 12
    assert len(text.encode()) < 80_000


def test_the_sharpest_head_tells_its_queries_apart():
    weights = np.full((2, 3, 5, 5), 0.2)
    weights[0, 0] = np.eye(5)[0]  # all attend to the first token
    weights[1, 2] = 0.5 * np.eye(5) + 0.1
    assert pages.sharpest_head(weights) == [1, 2]


@pytest.fixture
def sweep(tmp_path):
    """Three widths of two seeds each, of which the middle one is the best."""
    for width, share in ((7, 0.4), (8, 0.1), (9, 0.3)):
        for seed in (0, 1):
            run = tmp_path / "runs" / f"w{width}-{seed}"
            write_run(run, worse(TEXT, share, 10 * width + seed), TEXT, seed=seed, width=width)
            logged(run, (2, 5, 11), loss=lambda x, w=width: w / x)
            (run / "env.json").write_text(json.dumps({"command": f"python -m x --seed {seed}"}))
    return tmp_path / "runs"


def test_a_group_of_runs_has_one_colour_on_the_whole_page_and_the_best_stands_first(sweep):
    page, compared = Page(runs_page([sweep])), compare([sweep])
    names = ["width=7", "width=8", "width=9"]
    assert list(page.legend) == [f"{name} (2 seeds)" for name in names]
    assert page.colors("loss by step") == set(page.legend.values()) == {"--c0", "--c1", "--c2"}
    strip = page.charts["Scores"]
    (first, *_), shown = (
        re.findall(r"(width=\d): ([^<]*)<", strip),
        re.findall(r"var\((--c\d)", strip),
    )
    group = compared.groups[1]
    widest = np.nanmax([group.seeds, group.items])
    assert first == ("width=8", f"{rounding.rounded(group.mean, widest)}, best mean")
    assert list(dict.fromkeys(shown)) == ["--c1", "--c2", "--c0"], "the best is drawn first"
    assert "BLEU, higher is better" in strip
    marks = re.findall(r'(--c\d)\)" stroke-dasharray=""/></svg> (width=\d)<', page.source)
    assert {(f"--c{'789'.index(name[-1])}", name) for _, name in marks} == set(marks)
    assert "model.width" in page.charts["model.width"], "the score against the varied value"
    assert len(page.table("run")) == 6 and page.said.count("python -m x --seed") == 2


def test_a_cell_that_failed_is_on_the_page_in_the_list_and_in_the_comparison(sweep):
    """Also one whose settings were refused, which has no folder, and one without a step."""
    begun = sweep / "w10-0"
    begun.mkdir()
    (begun / "config.json").write_text(json.dumps({"name": "w10-0", "model": {"width": 10}}))
    (begun / "env.json").write_text(json.dumps({"failed": "the disk is full"}))
    assert "w10-0: failed at step 0: the disk is full" in Page(runs_page([sweep])).said
    cells = {f"w{width}-{seed}": {} for width in (7, 8, 9, 10) for seed in (0, 1)}
    (sweep / "sweep.json").write_text(json.dumps({"cells": cells}))
    (sweep / "failed").mkdir()
    for name, error in (("w10-0", "the disk is full"), ("w10-1", "head_dim is odd")):
        (sweep / "failed" / f"{name}.json").write_text(json.dumps({"error": error}))
    said = Page(runs_page([sweep])).said
    for cell in ("w10-0: failed: the disk is full", "w10-1: failed: head_dim is odd"):
        assert said.count(cell) == 1
    assert facts_of_sweep(sweep)["state"] == "6 of 8 cells done, 2 failed"
    assert any("w10-1 failed: head_dim is odd" in line for line in compare([sweep]).left_out)


def test_cells_of_one_name_in_two_sweeps_are_told_apart(sweep):
    """One failed in the first sweep alone, another in each of the two."""
    begun = sweep / "w10-0"
    begun.mkdir()
    (begun / "config.json").write_text(json.dumps({"name": "w10-0", "model": {"width": 10}}))
    (begun / "env.json").write_text("{}")
    (sweep / "sweep.json").write_text(json.dumps({"cells": {}}))
    (sweep / "failed").mkdir()
    (sweep / "failed" / "w10-1.json").write_text(json.dumps({"error": "head_dim is odd"}))
    other = shutil.copytree(sweep, sweep.with_name("other"))
    (sweep / "failed" / "w10-0.json").write_text(json.dumps({"error": "the disk is full"}))
    said = Page(runs_page([sweep, other])).said
    assert said.count(f"{sweep.name}/w10-0: failed: the disk is full") == 1
    assert said.count(f"other/w10-0: {RunFacts(other / 'w10-0').describe_state()}") == 1
    for folder in (sweep, other):
        assert f"{folder.name}/w10-1: failed: head_dim is odd" in said


def test_many_commands_are_folded(sweep):
    for run in sweep.iterdir():
        (run / "env.json").write_text(json.dumps({"command": f"python -m x --name {run.name}"}))
    folded = '<summary class="soft">The commands that repeat them'
    assert folded in runs_page([sweep]) and folded not in runs_page([sweep / "w7-0"])


def test_losses_of_different_vocabularies_are_never_in_one_panel(sweep, tmp_path):
    for width, vocabulary in ((7, "x"), (8, "y"), (9, "x")):
        for seed in (0, 1):
            run = logged(
                sweep / f"w{width}-{seed}",
                (2, 5, 11),
                **{"loss": lambda x: 9 / x, "validation_loss": lambda x: 8 / x},
                validation_bleu=float,
            )
            (run / "tokenizer").mkdir()
            (run / "tokenizer" / "target.json").write_text(vocabulary)
    page = Page(runs_page([sweep]))
    color = {name.removesuffix(" (2 seeds)"): color for name, color in page.legend.items()}
    same = {color["width=7"], color["width=9"]}
    for metric in ("loss", "validation_loss"):
        assert f"{metric} by step" not in page.charts
        assert page.colors(f"{metric} of tokens A by step") == same
        assert page.colors(f"{metric} of tokens B by step") == {color["width=8"]}
        assert "per token, tokens A" in page.charts[f"{metric} of tokens A by step"]
    assert page.colors("validation_bleu by step") == {*color.values()}
    assert "tokens A: width=7 and width=9; tokens B: width=8" in page.said
    for run in sweep.iterdir():
        (run / "tokenizer" / "target.json").write_text("x")
    alike = Page(runs_page([sweep]))
    assert alike.colors("loss by step") == {*color.values()} and "tokens A" not in alike.said


@pytest.mark.parametrize(
    ("settings", "letters"),
    [
        ({"objective": "causal"}, "AA"),
        ({"objective": "masked"}, "AB"),
        ({"objective": "masked", "task": {"kind": "classification"}}, "AA"),
    ],
)
def test_masked_models_that_hide_other_shares_of_the_tokens_have_panels_of_their_own(
    tmp_path, settings, letters
):
    for name, share in (("a", 0.15), ("b", 0.3)):
        run = logged(write_run(tmp_path / name, TEXT, TEXT), (2, 5), loss=float)
        config = {**settings, "name": name, "data": {"mask_prob": share}}
        (run / "config.json").write_text(json.dumps(config))
        (run / "tokenizer").mkdir()
        (run / "tokenizer" / "tokenizer.json").write_text("x")
    expected = {f"loss of tokens {x} by step" for x in letters} if "B" in letters else set()
    charts = Page(runs_page([tmp_path])).charts
    assert {chart for chart in charts if chart.startswith("loss of")} == expected


def test_a_sample_is_what_the_run_has_written_and_never_the_reference(sweep):
    page = Page(runs_page([sweep]))
    written = {
        (row["source"], name): row[name] for row in page.table("source") for name in list(row)[2:]
    }
    for (source, name), text in written.items():
        lines = (sweep / f"w{name[-1]}-0" / "samples" / "test.tsv").read_text().split("\n")
        assert text == next(x.split("\t")[1] for x in lines if x.startswith(f"{source}\t"))
    first = page.table("source")[0]
    assert first["reference"] not in list(first.values())[2:], "wrong ones first"


def test_runs_of_other_texts_prompts_and_steps_are_on_one_page(tmp_path):
    other = sentences(29, seed=3)
    a = logged(write_run(tmp_path / "a", worse(TEXT, 0.3, 2), TEXT), (2, 5, 11), loss=float)
    b = write_run(tmp_path / "b", worse(other, 0.3, 2), other, width=8)
    c = write_run(tmp_path / "c", worse(other, 0.3, 2), other, width=8, seed=1)
    for run, steps in ((b, (3, 7, 13)), (c, (4, 8, 16))):  # two seeds without a common step
        logged(run, steps, loss=float)
    page = Page(runs_page([a, b, c]))
    assert "The runs are not compared" in page.said
    rows = page.table("source")
    assert {bool(row["width=7"]) for row in rows} == {bool(row["width=8"]) for row in rows}
    assert len({bool(row["width=7"]) for row in rows}) == 2, "rows of both texts"
    assert page.charts["loss by step"].count("stroke-width: 1.5") == 3
    (a / "samples" / "test.tsv").unlink()
    models = [write_language_run(tmp_path / name, [3.0] * 12, [64] * 12) for name in ("d", "e")]
    prompts = (["one", "two"], ["two", "three"])
    for run, texts in zip(models, prompts, strict=True):
        config = json.loads((run / "config.json").read_text()) | {"prompts": texts}
        (run / "config.json").write_text(json.dumps(config))
        continued = [f"{text} by {run.name}" for text in texts]
        (run / "samples" / "prompts.txt").write_text(f"\n{'-' * 20}\n".join(continued))
    rows = {
        row["prompt"]: list(row.values())[1:] for row in Page(runs_page(models)).table("prompt")
    }
    assert rows == {"one": ["by d", ""], "two": ["by d", "by e"], "three": ["", "by e"]}


def test_an_unfinished_and_a_damaged_run_and_a_duplicate_do_not_end_the_overview(sweep, capsys):
    shutil.copytree(sweep / "w7-0", sweep / "again")
    failed = shutil.copytree(sweep / "w8-0", sweep / "w10-0")
    config = json.loads((failed / "config.json").read_text())
    (failed / "config.json").write_text(json.dumps(config | {"model": {"width": 10}}))
    (failed / "env.json").write_text(json.dumps({"failed": "the disk is full"}))
    (failed / "weights.json").unlink()
    (sweep / "w9-1" / "samples" / "test.tsv").write_text("source\tmodel\treference\na\tb\tc\n")
    page, comparison = Page(runs_page([sweep])), compare([sweep])
    assert [(x.name, len(x.runs)) for x in comparison.groups] == [
        ("width=7", 2), ("width=8", 2), ("width=9", 1)
    ]  # fmt: skip
    assert "w10-0: failed at step 11: the disk is full" in page.said
    said = "left out, with settings and seed of another run: "
    assert any(f"{said}{name}" in page.said for name in ("again", "w7-0"))
    assert "gives bleu 0.0000, but scores.json says" in page.said
    assert "width=8: " in page.charts["Scores"] and "not compared" not in page.said
    rows = page.table("model.width")
    assert {row["model.width"] for row in rows} == {"7", "8", "9", "10"}
    runs.main(["compare", str(sweep)])
    assert said in capsys.readouterr().out


def test_runs_of_one_seed_are_no_seeds(tmp_path):
    for number in range(8):
        run = write_run(tmp_path / f"again-{number}", worse(TEXT, 0.2, 3), TEXT)
        logged(run, (3, 7), loss=float)
    page = Page(runs_page([tmp_path]))
    assert list(page.legend) == ["again-0 (8 runs of seed 0)"]
    assert "8 seeds" not in page.said and "again-7" in page.said
    (score,) = compare([tmp_path]).groups
    assert len(score.runs) == 1


@pytest.mark.parametrize("steps", [(7,), (7, 13)])
def test_a_run_of_one_or_two_logged_steps_has_curves(steps, tmp_path):
    run = logged(write_run(tmp_path / "a", TEXT, TEXT), steps, loss=float)
    for page in (Page(run_page(run)), Page(runs_page([run, run]))):
        assert "stroke" in page.charts["loss by step"]
        assert len(re.findall("<use ", page.charts["loss by step"])) >= len(steps), "a dot at each"


def test_a_long_name_stands_above_its_score_and_whole(tmp_path):
    names = [f"a-name-of-{length}-characters".ljust(length, "x") for length in (29, 43)]
    for name, share, width in zip(names, (0.1, 0.3), (7, 8), strict=True):
        write_run(tmp_path / name, worse(TEXT, share, 3), TEXT, width=width, seed=width)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["model"] |= {"first": "x" * 40 + name}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    strip = Page(runs_page([tmp_path])).charts["Scores"]
    assert re.search(f">{names[0]}: [^<]*best mean<", strip) and f">{names[1]}<" in strip


IN_BROWSER = """
const th = [...document.querySelectorAll(".numbers button")].find((x) => x.textContent === "mean");
const rows = th?.closest("table").tBodies[0].rows;
const column = () => [...rows].map((row) => row.cells[2].textContent);
const result = th ? [(th.click(), column()), (th.click(), column())]
  : [byId("layer").value, byId("head").value, byId("heads").children.length];
document.body.textContent = "RESULT" + JSON.stringify(result) + "END";
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_in_a_browser_tables_sort_and_attention_opens_at_its_sharpest_head(sweep, tmp_path):
    def in_browser(text):
        path = tmp_path / "x.html"
        path.write_text(text.replace("</body>", f"<script>{IN_BROWSER}</script></body>"))
        flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --dump-dom"
        command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path}", f"file://{path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(re.search(r"RESULT(\[.*\])END", done.stdout)[1])

    up, down = in_browser(runs_page([sweep]))
    assert sorted(up, key=float) == up == down[::-1]
    weights = np.full((2, 3, 3, 2), 0.5)
    weights[1, 2] = [[1, 0], [0, 1], [1, 0]]
    run = sweep / "w7-0"
    assert in_browser(run_page(run, Contents({}, [sentence(weights)], {}))) == ["1", "2", 6]


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
    view = attend(jf.Loaded(model, params, tokenizer, config=config), text)
    count = len(view.query_tokens)
    assert view.weights.shape == (2, 3, count, count) and count == (9 if masked else 5)
    np.testing.assert_allclose(view.weights.sum(axis=-1), 1.0, rtol=1e-5)
    above = view.weights[..., np.triu_indices(count, 1)[0], np.triu_indices(count, 1)[1]]
    assert above.any() == masked
    assert {"a", "␣", "d"} <= set(view.key_tokens)
