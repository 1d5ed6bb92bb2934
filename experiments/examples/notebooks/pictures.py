"""Figures of the notebooks: attention weights and vectors of positions."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def attention_grid(
    weights: Float[np.ndarray, "layers heads T S"],
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
    first_layer: int = 0,
) -> Figure:
    """Heat maps of attention weights, one panel for each head of each layer.

    Layers are numbered from `first_layer`. Queries are rows, keys are columns. A row of a panel
    sums to 1: dark means near 1.
    """
    layers, heads = weights.shape[:2]
    width = max(2.4, 0.28 * len(key_tokens)) * heads + 1.2
    height = max(1.8, 0.26 * len(query_tokens)) * layers + 1.2
    figure = new_figure(width, height)
    panels = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for layer in range(layers):
        for head in range(heads):
            axes = panels[layer, head]
            attention_map(axes, weights[layer, head], query_tokens, key_tokens)
            axes.set_title(f"layer {first_layer + layer}, head {head}", fontsize=8)
            axes.tick_params(labelbottom=layer == layers - 1, labelleft=head == 0)
    return figure


def attention_map(
    axes: Axes,
    weights: Float[np.ndarray, "T S"],
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
) -> None:
    """Draws the weights of one head on `axes`, with its tokens."""
    axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(key_tokens)), key_tokens, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(query_tokens)), query_tokens, fontsize=8)


def position_table(table: Float[np.ndarray, "T D"]) -> Figure:
    """The vectors of the positions as rows of a heat map, and next to it their cosines."""
    figure = new_figure(10.0, 4.2)
    unit = table / np.linalg.norm(table, axis=-1, keepdims=True)
    left = "positional encodings", "dimension", table, "RdBu"
    right = "their cosine similarity", "position", unit @ unit.T, "viridis"
    for axes, (title, columns, values, colors) in zip(
        figure.subplots(1, 2), (left, right), strict=True
    ):
        picture = axes.imshow(values, cmap=colors, aspect="auto", vmin=-1.0, vmax=1.0)
        axes.set(title=title, xlabel=columns, ylabel="position")
        figure.colorbar(picture, ax=axes)
    return figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")
