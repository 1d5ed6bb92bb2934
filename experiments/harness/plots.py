"""Figures as functions of arrays (matplotlib, extra `experiments`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxformer import optional_dependencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def attention_grid(
    weights: np.ndarray, query_tokens: Sequence[str], key_tokens: Sequence[str]
) -> "Figure":
    """Heat maps of attention weights [layers, heads, T, S], one panel for each head.

    Queries are rows, keys are columns. A row of a panel sums to 1: dark means near 1.
    """
    layers, heads = weights.shape[:2]
    figure_module = optional_dependencies.load("matplotlib.figure")
    width = max(2.4, 0.28 * len(key_tokens)) * heads + 1.2
    height = max(1.8, 0.26 * len(query_tokens)) * layers + 1.2
    figure = figure_module.Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for layer in range(layers):
        for head in range(heads):
            axes = panels[layer, head]
            attention_map(axes, weights[layer, head], query_tokens, key_tokens)
            axes.set_title(f"layer {layer}, head {head}", fontsize=8)
            axes.tick_params(labelbottom=layer == layers - 1, labelleft=head == 0)
    return figure


def attention_map(
    axes: "Axes", weights: np.ndarray, query_tokens: Sequence[str], key_tokens: Sequence[str]
) -> None:
    """Draws the weights [T, S] of one head on `axes`, with its tokens."""
    axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(key_tokens)), key_tokens, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(query_tokens)), query_tokens, fontsize=8)
