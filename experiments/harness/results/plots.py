"""Figures as functions of arrays (matplotlib, extra `experiments`)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from experiments.harness.results.groups import Group
from experiments.harness.runs.run_folder import Run
from jaxformer import optional_dependencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[float]]
"""Steps and values."""
Curves = dict[str, dict[str, list[Curve]]]
"""The curves of each metric and group; those of one group differ in the seed."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's colours, which people with colour blindness can tell apart."""
DASHES = ("-", "--", "-.", ":")


def logged_curves(groups: Iterable[Group]) -> Curves:
    """The curves of all numbers that the runs of `groups` have logged."""
    curves: Curves = {}
    for group in groups:
        for folder in group.folders:
            lines = Run(folder).metrics()
            for metric in dict.fromkeys(name for line in lines for name in line if name != "step"):
                points = [(line["step"], line[metric]) for line in lines if metric in line]
                steps, values = zip(*points, strict=True)
                curves.setdefault(metric, {}).setdefault(group.name, []).append((steps, values))
    return curves


def aligned(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all `curves` have, and their values there, a row for each curve."""
    tables = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    return np.array(steps), np.array([[table[step] for step in steps] for table in tables])


def learning_curves(metrics: Mapping[str, Mapping[str, Sequence[Curve]]]) -> "Figure":
    """One panel for each metric; `metrics[metric][name]` are the curves of runs differing in seed.

    A group is the mean of its curves at the steps that all have, with a band from the least to the
    largest value. It has one colour in all panels, and one legend explains them.
    """
    figure = _figure(6.4 * min(len(metrics), 2), 3.6 * ((len(metrics) + 1) // 2) + 0.4)
    panels = figure.subplots((len(metrics) + 1) // 2, min(len(metrics), 2), squeeze=False).flat
    names = dict.fromkeys(name for groups in metrics.values() for name in groups)
    styles = dict(zip(names, itertools.cycle(itertools.product(DASHES, COLORS)), strict=False))
    legend = {}
    for axes, (metric, groups) in zip(panels, metrics.items(), strict=False):
        for name, curves in groups.items():
            steps, values = aligned(curves)
            dash, color = styles[name]
            label = f"{name} ({len(curves)} seeds)" if len(curves) > 1 else name
            marker = "." if len(steps) < 20 else ""  # one point alone draws no line
            mean = values.mean(axis=0)
            legend[name] = axes.plot(steps, mean, dash, color=color, marker=marker, label=label)[0]
            if len(curves) > 1:
                band = values.min(axis=0), values.max(axis=0)
                axes.fill_between(steps, *band, color=color, alpha=0.2, linewidth=0)
        axes.set(title=metric.replace("_", " "), xlabel="step")
        axes.grid(alpha=0.3)
    figure.legend(handles=list(legend.values()), loc="outside lower center", ncols=3, fontsize=8)
    for axes in list(panels)[len(metrics) :]:
        axes.remove()
    return figure


def attention_grid(
    weights: Float[np.ndarray, "layers heads T S"],
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
    first_layer: int = 0,
) -> "Figure":
    """Heat maps of attention weights, one panel for each head of each layer.

    Layers are numbered from `first_layer`. Queries are rows, keys are columns. A row of a panel
    sums to 1: dark means near 1.
    """
    layers, heads = weights.shape[:2]
    width = max(2.4, 0.28 * len(key_tokens)) * heads + 1.2
    height = max(1.8, 0.26 * len(query_tokens)) * layers + 1.2
    figure = _figure(width, height)
    panels = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for layer in range(layers):
        for head in range(heads):
            axes = panels[layer, head]
            attention_map(axes, weights[layer, head], query_tokens, key_tokens)
            axes.set_title(f"layer {first_layer + layer}, head {head}", fontsize=8)
            axes.tick_params(labelbottom=layer == layers - 1, labelleft=head == 0)
    return figure


def attention_map(
    axes: "Axes",
    weights: Float[np.ndarray, "T S"],
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
) -> None:
    """Draws the weights of one head on `axes`, with its tokens."""
    axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(key_tokens)), key_tokens, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(query_tokens)), query_tokens, fontsize=8)


def position_table(table: Float[np.ndarray, "T D"]) -> "Figure":
    """The vectors of the positions as rows of a heat map, and beside it their cosines."""
    figure = _figure(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    shown = left.imshow(table, cmap="RdBu", aspect="auto", vmin=-1.0, vmax=1.0)
    left.set(title="positional encodings", xlabel="dimension", ylabel="position")
    figure.colorbar(shown, ax=left)
    unit = table / np.linalg.norm(table, axis=-1, keepdims=True)
    shown = right.imshow(unit @ unit.T, cmap="viridis", vmin=-1.0, vmax=1.0)
    right.set(title="their cosine similarity", xlabel="position", ylabel="position")
    figure.colorbar(shown, ax=right)
    return figure


def _figure(width: float, height: float) -> "Figure":
    module = optional_dependencies.load("matplotlib.figure")
    return module.Figure(figsize=(width, height), layout="constrained")
