"""Pictures of runs and of attention: what is drawn is what was given."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments import runs
from experiments.harness.results import attention_views, plots
from experiments.harness.results.groups import group_runs
from experiments.translation.page import attend
from jaxformer.errors import ConfigError
from jaxformer.pretrained import Loaded
from jaxformer.text import tokenizers
from tests.configs import small

pytestmark = pytest.mark.long

SIZES = small(vocab_size=19, num_encoder_layers=2, num_decoder_layers=2, max_len=29)


@pytest.fixture
def translator(random_params):
    tokenizer = tokenizers.train_characters(["the dog sees a bird"])
    model = jf.EncoderDecoder(SIZES)
    ids = jnp.ones((2, 5), jnp.int32)
    params, settings = random_params(model, ids, ids), (jf.SearchConfig(), jf.TranslationOptions())
    return Loaded(model, params, tokenizer, tokenizer, settings)


def test_attention_of_each_kind_has_its_tokens_and_rows_that_sum_to_1(translator):
    _, (cross, encoder, decoder) = attend(translator, "a bird")
    assert list(encoder.key_tokens) == ["a", "␣", "b", "i", "r", "d", "<eos>"]
    assert len(cross.query_tokens) == len(decoder.query_tokens)
    for view in (cross, encoder, decoder):
        sizes = len(view.query_tokens), len(view.key_tokens)
        assert view.weights.shape == (2, 3, *sizes)
        np.testing.assert_allclose(view.weights.sum(axis=-1), 1.0, rtol=1e-5)
    lower = np.tril(np.ones(decoder.weights.shape[2:]))
    assert not decoder.weights[..., lower == 0].any()
    assert not np.allclose(cross.weights[0], cross.weights[1])


def test_blocks_are_stacked_in_the_order_of_their_numbers():
    values = {f"encoder/blocks_{i}/attention/weights": np.full((1, 2, 3, 3), i) for i in (10, 2, 0)}
    weights = attention_views.stacked(values)["encoder/attention"]
    assert weights[:, 0, 0, 0, 0].tolist() == [0, 2, 10]


@pytest.fixture
def folders(tmp_path):
    """Two runs that differ in the seed alone, and one of another width."""
    made = []
    for name, seed, width, loss in (("a", 0, 7, 6.0), ("b", 1, 7, 12.0), ("c", 0, 8, 1.0)):
        made.append(tmp_path / name)
        made[-1].mkdir()
        settings = {"name": name, "training": {"seed": seed, "log_every": 1}, "width": width}
        (made[-1] / "config.json").write_text(json.dumps(settings))
        lines = ({"step": s, "loss": loss / 10 ** (s - 1), "padding": 0.0} for s in (1, 2, 3))
        (made[-1] / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return made


def test_runs_that_differ_in_seed_and_name_alone_are_one_line_with_a_band(folders):
    curves = plots.logged_curves(group_runs(folders))
    assert list(curves) == ["loss"], "padding is always 0"
    assert list(curves["loss"]) == ["width=7", "width=8"]
    figure = plots.learning_curves(curves)
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [9.0, 0.9, 0.09])
    assert axes.get_yscale() == "log" and axes.get_title("left").endswith("token, log scale)")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["width=7 (2 runs)", "width=8"]
    band = axes.collections[0].get_paths()[0].vertices
    assert {6.0, 12.0} <= set(band[:, 1])


def test_losses_per_token_have_a_panel_for_each_kind_of_tokens():
    curve = [((1, 2), (3.0, 2.0))]
    curves = {"loss": {"a": curve, "b": curve, "c": curve}, "grad_norm": {"a": curve, "b": curve}}
    figure = plots.learning_curves(curves, {"a": "A", "b": "B", "c": "A"})
    drawn = [(x.get_title("left"), [line.get_label() for line in x.lines]) for x in figure.axes]
    assert drawn == [
        ("loss (nats per token, tokens A)", ["a", "c"]),
        ("loss (nats per token, tokens B)", ["b"]),
        ("gradient norm", ["a", "b"]),
    ]


def test_a_long_curve_is_thinned_keeps_its_last_value_and_has_no_dots():
    steps = range(1, 9974)
    named = {"a": [(steps, np.linspace(9, 1, 9973))], "b": [((5,), (0.5,))]}
    long, single = plots.learning_curves({"validation_exact": named}).axes[0].lines
    assert 100 < len(long.get_xdata()) <= 400 and long.get_xdata()[-1] == 9973
    assert (long.get_marker(), single.get_marker()) == ("", ".")
    np.testing.assert_allclose([long.get_ydata()[-1], *single.get_ydata()], [100.0, 50.0])


def test_the_command_writes_a_picture_and_refuses_other_endings_and_metrics(folders, tmp_path):
    output = tmp_path / "curves.svg"
    runs.main(["plot", str(tmp_path / "a"), "--output", str(output)])
    assert output.read_text().count("<svg") == 1
    with pytest.raises(ConfigError, match="x"):
        runs.main(["plot", str(folders[0]), "--metrics", "x"])
    with pytest.raises(ConfigError, match="output='c.xyz'.*.png, .*.svg"):
        runs.main(["plot", str(folders[0]), "--output", "c.xyz"])
