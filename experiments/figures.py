"""Draw how a Transformer works: `python -m experiments.figures --kind entropy --run RUN`.

positions: the positional encodings and how similar they are. masks: which query may attend to which
key. entropy: how the attention of each layer spreads, at each checkpoint that a run has kept.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.results import attention_views, plots
from experiments.harness.runs import checkpoint_selection
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.language_modelling import load_run as language_run
from experiments.translation import load_run as translation_run
from experiments.translation.evaluate import pair_batch, scored_text
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import check_at_least
from jaxformer.config.positions import positional_encoding
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.ops.masks import AttentionMask
from jaxformer.pipelines.batching import add_special_tokens, pad_with_mask
from jaxformer.text.tokenizers import PAD


@dataclass(frozen=True)
class FigureOptions:
    """What is drawn, and where the picture goes."""

    kind: Literal["positions", "masks", "entropy"] = "positions"
    """The figure: positions, masks, or entropy over training (of --run)."""
    output: str = "figure.svg"
    """File of the picture; its ending chooses the format (.svg, .png, .pdf)."""
    run: str = ""
    """entropy: folder of a run. A run trained with a larger average_checkpoints keeps more."""
    text: tuple[str, ...] = ()
    """entropy of a language model: texts to read; without them the run's prompts."""
    pairs: int = 16
    """entropy of a translation model: number of pairs, of those that the run was scored on."""
    length: int = 64
    """positions: number of positions."""
    d_model: int = 64
    """positions: size of a vector."""

    def __post_init__(self):
        check_at_least(self, 1, "pairs", "length", "d_model")


def main(options: FigureOptions) -> None:
    """Writes the picture."""
    if options.kind == "positions":
        table = positional_encoding(options.length, options.d_model)
        figure = plots.position_table(np.asarray(table))
    elif options.kind == "masks":
        figure = plots.mask_grid(masks())
    else:
        steps, entropies = entropy_over_training(options)
        print("\n".join(table_of(steps, entropies)))
        figure = plots.entropy_over_training(steps, entropies)
    figure.savefig(options.output)
    print(f"see {options.output}")


def masks() -> dict[str, Bool[np.ndarray, "T S"]]:
    """The masks that the models use, of eight tokens."""
    documents = np.array([[1, 1, 1, 2, 2, 2, 2, 2]])
    packed = AttentionMask(causal=True, query_segments=documents, key_segments=documents)
    found = {
        "encoder: padding": AttentionMask(padding_mask=np.arange(8)[None] < 6),
        "decoder: causal": AttentionMask(causal=True),
        "window of 3": AttentionMask(causal=True, window=3),
        "two packed documents": packed,
    }
    size = (8, 8)
    matrices = {name: mask.materialize(*size) for name, mask in found.items()}
    return {
        name: np.broadcast_to(np.asarray(matrix), (1, 1, *size))[0, 0]
        for name, matrix in matrices.items()
    }


def entropy_over_training(
    options: FigureOptions,
) -> tuple[list[int], dict[str, Float[np.ndarray, "steps layers heads"]]]:
    """The steps of the checkpoints, and the entropy of attention at each, by stack and kind."""
    if not options.run:
        raise ConfigError("no run was given: give --run the folder of a run")
    folder = Path(options.run)
    checkpoint_selection.check_folder(folder)
    steps = Checkpoints(folder / "checkpoints").steps()
    if not steps:
        raise CheckpointError(f"{folder} holds no complete checkpoint: train first")
    of_language = "objective" in config_files.read_object(folder / "config.json")
    found = [
        (_language_model if of_language else _translator)(options, RunOptions(step=step))
        for step in steps
    ]
    return steps, {name: np.stack([one[name] for one in found]) for name in found[0]}


def _translator(options: FigureOptions, chosen: RunOptions) -> dict[str, np.ndarray]:
    folder = Path(options.run)
    loaded = translation_run.load_run(folder, chosen)
    batch = pair_batch(loaded, scored_text(folder), options.pairs)
    inputs = batch.source, batch.target[:, :-1], batch.source != PAD
    queries = {"encoder": batch.source != PAD, "decoder": batch.target[:, :-1] != PAD}
    return _entropies(loaded.model, loaded.params, inputs, queries)


def _language_model(options: FigureOptions, chosen: RunOptions) -> dict[str, np.ndarray]:
    loaded = language_run.load_run(Path(options.run), chosen)
    causal, longest = loaded.config.objective == "causal", loaded.model.config.max_len
    rows = loaded.tokenizer.encode_batch(options.text or loaded.config.prompts)
    if not causal:
        rows = [add_special_tokens(row, loaded.tokenizer) for row in rows]
    longest = min(longest, max(map(len, rows)))
    tokens, real = pad_with_mask([row[:longest] for row in rows], len(rows), longest)
    inputs = (tokens,) if causal else (tokens, real)
    return _entropies(loaded.model, loaded.params, inputs, {"encoder": real, "decoder": real})


def _entropies(
    model: Any, params: Any, inputs: tuple[Any, ...], queries: dict[str, Any]
) -> dict[str, Float[np.ndarray, "layers heads"]]:
    """The entropy of each head at the queries of its stack that are tokens and not padding."""
    weights = attention_views.batch_weights(model, params, *inputs)
    return {
        name: attention_views.entropy(found, queries[name.partition("/")[0]])
        for name, found in weights.items()
    }


def table_of(
    steps: list[int], entropies: dict[str, Float[np.ndarray, "steps layers heads"]]
) -> list[str]:
    """A line for each checkpoint and kind: the mean over the heads of each layer, in bits."""
    lines = ["bits by layer"]
    for name, found in entropies.items():
        for step, layers in zip(steps, found.mean(axis=-1), strict=True):
            lines.append(f"{name:24} step {step:>7,}  " + " ".join(f"{x:5.2f}" for x in layers))
    return lines


if __name__ == "__main__":
    cli.start(main, {"default": FigureOptions()}, __doc__)
