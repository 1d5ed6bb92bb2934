"""Draw cross-attention: `python -m experiments.translation.attend --run RUN --text "..."`.

The text is translated, and the attention weights of the translation are drawn, one panel for each
layer and head: rows are the tokens being written, columns the source tokens they attend to.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import cli, plots
from experiments.harness.checkpoint_selection import RunOptions
from experiments.translation.load_run import Translator, load_translator
from jaxformer.errors import ConfigError
from jaxformer.text.tokenizers import BOS, EOS, PAD, Tokenizer


@dataclass(frozen=True)
class AttendOptions(RunOptions):
    """Which run, which text, and where the picture goes."""

    run: str = "runs/translation/grammar"
    """Folder of a translation run."""
    text: str = "The teacher has lent the old woman a new book."
    """Sentence to translate."""
    output: str = "attention.svg"
    """File of the picture; its ending chooses the format (.svg, .png, .pdf)."""
    layer: int | None = None
    """Draw only this decoder layer (from 0); all layers by default."""
    head: int | None = None
    """Draw only this head (from 0); all heads by default."""


def main(options: AttendOptions) -> None:
    """Translates the text and writes the picture."""
    translator = load_translator(Path(options.run), options=options)
    weights, target_tokens, source_tokens = cross_attention(translator, options.text)
    weights = chosen(weights, options.layer, options.head)
    figure = plots.attention_grid(weights, target_tokens, source_tokens)
    figure.savefig(options.output)
    print(f"{options.text} = {translator([options.text])[0][0].text}\nsee {options.output}")


def cross_attention(translator: Translator, text: str) -> tuple[np.ndarray, list[str], list[str]]:
    """The weights [layers, heads, T, S] of the best translation; its tokens; the source tokens."""
    if not text.strip():
        raise ConfigError("--text is blank: give a sentence")
    source = [*translator.source_tokenizer.encode(text), EOS]
    target = translator([text])[0][0].ids
    state: Any
    _, state = translator.model.apply(
        {"params": translator.params},
        np.array([source]),
        np.array([[BOS, *target[:-1]]]),
        np.array([source]) != PAD,
        mutable=["intermediates"],
    )
    blocks = state["intermediates"]["decoder"]
    layers = translator.model.config.num_decoder_layers
    weights = [
        blocks[f"blocks_{i}"]["cross_attention"]["attention_weights"][0][0] for i in range(layers)
    ]
    return (
        np.stack(weights),
        [label(translator.target_tokenizer, i) for i in target],
        [label(translator.source_tokenizer, i) for i in source],
    )


def label(tokenizer: Tokenizer, index: int) -> str:
    """The text of a token, or its name where it has none."""
    return tokenizer.decode([index]).strip() or tokenizer.token(index)


def chosen(weights: np.ndarray, layer: int | None, head: int | None) -> np.ndarray:
    """Those of `weights` [layers, heads, T, S] that the options name."""
    for axis, (name, number) in enumerate((("layer", layer), ("head", head))):
        if number is None:
            continue
        if not 0 <= number < weights.shape[axis]:
            raise ConfigError(
                f"--{name} {number} does not exist: the model has {weights.shape[axis]}, "
                f"numbered 0 to {weights.shape[axis] - 1}"
            )
        weights = weights.take([number], axis=axis)
    return weights


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(cli.parse({"default": AttendOptions()}, description=__doc__))))
