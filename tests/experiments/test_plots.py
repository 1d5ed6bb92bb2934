"""Pictures of runs and of attention: what is drawn is what was given."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from experiments import figures
from experiments.harness.results import attention_views, plot, plots
from experiments.harness.results.attention_views import AttentionView
from experiments.translation.attend import attend
from experiments.translation.load_run import Translator
from jaxformer.config.positions import positional_encoding
from jaxformer.decoding import SearchConfig
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.text import tokenizers

SIZES = jf.TransformerConfig(
    vocab_size=19,
    d_model=12,
    d_ff=14,
    num_heads=3,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_len=29,
)


@pytest.fixture
def translator(random_params):
    tokenizer = tokenizers.train_characters(["the dog sees a bird"])
    model = jf.EncoderDecoder(SIZES)
    ids = jnp.ones((2, 5), jnp.int32)
    return Translator(model, random_params(model, ids, ids), tokenizer, tokenizer, SearchConfig())


def test_attention_of_each_kind_has_its_tokens_and_rows_that_sum_to_1(translator):
    text, views = attend(translator, "a bird")
    source = ["a", "▁", "b", "i", "r", "d", "<eos>"]
    assert len(views["encoder"].key_tokens) == len(source)
    assert views["encoder"].key_tokens[2:] == source[2:]
    assert len(views["cross"].query_tokens) == len(views["decoder"].query_tokens)
    for view in views.values():
        sizes = len(view.query_tokens), len(view.key_tokens)
        assert view.weights.shape == (2, 3, *sizes)
        np.testing.assert_allclose(view.weights.sum(axis=-1), 1.0, rtol=1e-5)
    lower = np.tril(np.ones(views["decoder"].weights.shape[2:]))
    assert not views["decoder"].weights[..., lower == 0].any()
    assert not np.allclose(views["cross"].weights[0], views["cross"].weights[1])


def test_a_layer_or_a_head_that_is_not_there_is_refused():
    weights = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    view = AttentionView("cross", list("abcd"), list("vwxyz"), weights)
    one = attention_views.chosen(view, 1, 2).weights
    np.testing.assert_array_equal(one, weights[1:, 2:])
    with pytest.raises(ConfigError, match="--head 3 does not exist: the model has 3, numbered 0"):
        attention_views.chosen(view, None, 3)


def test_panels_are_titled_by_the_layers_and_heads_that_were_asked_for():
    view = AttentionView("cross", list("abcd"), list("vwxyz"), np.zeros((5, 3, 4, 5)))
    for layer, head, expected in (
        (4, 2, ["layer 4, head 2"]),
        (3, None, ["layer 3, head 0", "layer 3, head 1", "layer 3, head 2"]),
        (None, 1, [f"layer {layer}, head 1" for layer in range(5)]),
    ):
        figure = attention_views.draw(attention_views.chosen(view, layer, head))
        assert [axes.get_title() for axes in figure.axes] == expected


def test_uniform_weights_have_the_most_entropy_and_one_weight_none():
    layers = np.full((2, 3, 5, 8), 1 / 8), np.broadcast_to(np.eye(8)[:5], (2, 3, 5, 8)).copy()
    layers[1][1, :, 4] = 1 / 8  # a query that is padding
    real = np.array([[True] * 5, [True] * 4 + [False]])
    found = attention_views.entropy(np.stack(layers), real)
    np.testing.assert_allclose(found, [[3.0] * 3, [0.0] * 3])


def test_blocks_are_stacked_in_the_order_of_their_numbers():
    values = {f"encoder/blocks_{i}/attention/weights": np.full((1, 2, 3, 3), i) for i in (10, 2, 0)}
    found = attention_views.stacked(values)["encoder/attention"]
    assert found[:, 0, 0, 0, 0].tolist() == [0, 2, 10]


def write_run(folder, metrics, **settings):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder


def test_runs_that_differ_in_seed_and_name_alone_are_one_group(tmp_path):
    runs = [
        write_run(
            tmp_path / name,
            [{"step": step, "loss": loss / step} for step in (1, 2, 3)],
            name=name,
            training={"seed": seed, "log_every": 1},
            width=width,
        )
        for name, seed, width, loss in (("a", 0, 7, 6.0), ("b", 1, 7, 12.0), ("c", 0, 8, 1.0))
    ]
    groups = plot.grouped(runs, ["loss", "absent"])
    assert list(groups) == ["loss"] and list(groups["loss"]) == ["width=7", "width=8"]
    assert groups["loss"]["width=7"] == [
        ((1, 2, 3), (6.0, 3.0, 2.0)),
        ((1, 2, 3), (12.0, 6.0, 4.0)),
    ]
    axes = plots.learning_curves(groups).axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [9.0, 4.5, 3.0])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "width=7 (2 seeds)",
        "width=8",
    ]
    band = axes.collections[0].get_paths()[0].vertices
    assert {6.0, 12.0, 2.0, 4.0} <= set(band[:, 1])


def test_a_metric_that_was_logged_once_is_drawn_as_a_point():
    figure = plots.learning_curves({"x": {"a": [((5,), (2.0,))], "b": [(range(30), range(30))]}})
    assert [line.get_marker() for line in figure.axes[0].lines] == [".", ""]


def test_the_command_writes_the_picture_and_refuses_runs_without_the_metric(tmp_path):
    run = write_run(tmp_path / "a", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], name="a")
    output = tmp_path / "curves.svg"
    plot.main(plot.PlotOptions(runs=(str(run),), output=str(output)))
    assert output.read_text().count("<svg") == 1
    with pytest.raises(ConfigError, match="no run has logged one of x: give --metrics"):
        plot.main(plot.PlotOptions(runs=(str(run),), metrics=("x",), output=str(output)))
    with pytest.raises(ConfigError, match="has no config.json"):
        plot.main(plot.PlotOptions(runs=(str(tmp_path),)))


def test_a_grid_has_a_panel_for_each_head_that_shows_its_weights(rng):
    weights = rng.dirichlet(np.ones(5), (2, 3, 4))
    figure = plots.attention_grid(weights, list("abcd"), list("vwxyz"))
    assert len(figure.axes) == 6
    np.testing.assert_array_equal(figure.axes[4].images[0].get_array(), weights[1, 1])
    assert [text.get_text() for text in figure.axes[5].get_xticklabels()] == list("vwxyz")


def test_positions_and_their_similarities_are_drawn():
    table = np.asarray(positional_encoding(17, 12))
    left, right = plots.position_table(table).axes[:2]
    np.testing.assert_array_equal(left.images[0].get_array(), table)
    similarity = right.images[0].get_array()
    np.testing.assert_allclose(np.diag(similarity), 1.0, rtol=1e-5)
    assert similarity[0, 1] > similarity[0, 5]


def test_masks_are_drawn_as_matrices():
    masks = figures.masks()
    for axes, mask in zip(plots.mask_grid(masks).axes, masks.values(), strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), mask)
    assert np.array_equal(masks["decoder: causal"], np.tril(np.ones((8, 8))))
    assert masks["two packed documents"].sum() == 3 * 4 / 2 + 5 * 6 / 2


def test_the_entropy_of_a_layer_is_the_mean_of_its_heads(rng):
    entropies = {name: rng.random((3, 2, 5)) for name in ("encoder/attention", "decoder/attention")}
    first, second = plots.entropy_over_training([10, 20, 30], entropies).axes
    assert second.get_title() == "decoder: attention"
    lines = {line.get_label(): line for line in first.lines}
    given = entropies["encoder/attention"][:, 1]
    np.testing.assert_allclose(lines["layer 1"].get_ydata(), given.mean(axis=-1))
    band = first.collections[1].get_paths()[0].vertices
    assert {given[0].min(), given[2].max()} <= set(band[:, 1])


@pytest.mark.parametrize("kind", ["positions", "masks"])
def test_a_figure_without_a_run_is_written(kind, tmp_path, capsys):
    output = tmp_path / "figure.svg"
    figures.main(figures.FigureOptions(kind=kind, output=str(output), d_model=12, length=7))
    assert output.read_text().count("<svg") == 1
    assert capsys.readouterr().out == f"see {output}\n"


def test_the_entropy_of_a_folder_that_is_no_trained_run_is_refused(tmp_path):
    for run, said in (("", "give --run"), (str(tmp_path / "a"), "is not a folder")):
        with pytest.raises(ConfigError, match=said):
            figures.main(figures.FigureOptions(kind="entropy", run=run))
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        figures.main(figures.FigureOptions(kind="entropy", run=str(tmp_path)))
