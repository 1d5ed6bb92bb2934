"""Figures as functions of arrays (matplotlib, extra `experiments`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float

from jaxformer import optional_dependencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[float]]
"""Steps and values."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's colours, which people with colour blindness can tell apart."""
DASHES = ("-", "--", "-.", ":")


def learning_curves(groups: Mapping[str, Mapping[str, Sequence[Curve]]]) -> "Figure":
    """One panel for each metric; `groups[metric][name]` are the curves of runs that differ in seed.

    A group is the mean of its curves at the steps that all have, with a band from the least to the
    largest value.
    """
    figure = _figure(6.4 * min(len(groups), 2), 3.6 * ((len(groups) + 1) // 2))
    panels = figure.subplots((len(groups) + 1) // 2, min(len(groups), 2), squeeze=False).flat
    for axes, (metric, lines) in zip(panels, groups.items(), strict=False):
        for number, (name, curves) in enumerate(lines.items()):
            steps, values = aligned(curves)
            color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
            told = f"{name} ({len(curves)} seeds)" if len(curves) > 1 else name
            marker = "." if len(steps) < 20 else ""  # one point alone draws no line
            axes.plot(steps, values.mean(axis=0), dash, color=color, label=told, marker=marker)
            if len(curves) > 1:
                band = values.min(axis=0), values.max(axis=0)
                axes.fill_between(steps, *band, color=color, alpha=0.2, linewidth=0)
        axes.set(title=metric.replace("_", " "), xlabel="step")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    for axes in list(panels)[len(groups) :]:
        axes.remove()
    return figure


def attention_grid(
    weights: Float[np.ndarray, "layers heads T S"],
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
    first_layer: int = 0,
    first_head: int = 0,
) -> "Figure":
    """Heat maps of attention weights, one panel for each head of each layer.

    `first_layer` and `first_head` are the numbers of the first ones given. Queries are rows, keys
    are columns. A row of a panel sums to 1: dark means near 1.
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
            axes.set_title(f"layer {first_layer + layer}, head {first_head + head}", fontsize=8)
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


def entropy_over_training(
    steps: Sequence[int], entropies: Mapping[str, Float[np.ndarray, "steps layers heads"]]
) -> "Figure":
    """The entropy of attention in bits, one panel for each kind.

    A layer is the mean of its heads, with a band from the least to the largest.
    """
    figure = _figure(4.2 * len(entropies) + 0.6, 3.4)
    panels = figure.subplots(1, len(entropies), squeeze=False, sharey=True)[0]
    for axes, (kind, found) in zip(panels, entropies.items(), strict=True):
        for layer, heads in enumerate(found.swapaxes(0, 1)):
            color, dash = COLORS[layer % len(COLORS)], DASHES[layer // len(COLORS) % len(DASHES)]
            axes.plot(steps, heads.mean(-1), dash, color=color, label=f"layer {layer}", marker=".")
            band = heads.min(axis=-1), heads.max(axis=-1)
            axes.fill_between(steps, *band, color=color, alpha=0.15, linewidth=0)
        axes.set(title=kind.replace("_", "-").replace("/", ": "), xlabel="step")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="entropy of attention (bits)")
    panels[0].legend(fontsize=8)
    return figure


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


def mask_grid(masks: Mapping[str, Bool[np.ndarray, "T S"]]) -> "Figure":
    """The pairs that may attend, dark, with queries as rows and keys as columns."""
    figure = _figure(2.8 * len(masks), 3.2)
    panels = figure.subplots(1, len(masks), squeeze=False)[0]
    for axes, (name, mask) in zip(panels, masks.items(), strict=True):
        axes.imshow(mask, cmap="Blues", vmin=0, vmax=1)
        axes.set(title=name, xlabel="key", ylabel="query")
        axes.set_xticks(np.arange(-0.5, mask.shape[1]), minor=True)
        axes.set_yticks(np.arange(-0.5, mask.shape[0]), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.5)
        axes.tick_params(which="minor", length=0)
    return figure


def aligned(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all `curves` have, and their values there, a row for each curve."""
    tables = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    return np.array(steps), np.array([[table[step] for step in steps] for table in tables])


def _figure(width: float, height: float) -> "Figure":
    module = optional_dependencies.load("matplotlib.figure")
    return module.Figure(figsize=(width, height), layout="constrained")
