"""Draw attention: `python -m experiments.translation.attend --run RUN --text "..."`.

The text is translated, and the attention weights are drawn, one panel for each layer and head. Rows
are the tokens that attend, columns the tokens they attend to. On a terminal the mean over the drawn
heads is shown as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from experiments.harness import cli
from experiments.harness.results import attention_views
from experiments.harness.results.attention_views import AttentionView, label, read_weights
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.translation.load_run import LoadedRun, Translator, load_translator
from jaxformer.errors import ConfigError
from jaxformer.pipelines import encode_sources
from jaxformer.text.tokenizers import BOS, EOS, PAD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["cross", "encoder", "decoder"]
_LENGTH = 32


@dataclass(frozen=True)
class AttendOptions(RunOptions):
    """Which run, which text, and where the picture goes."""

    run: str = "runs/translation/grammar"
    """Folder of a translation run."""
    text: str = "The teacher has lent the old woman a new book."
    """Sentence to translate."""
    output: str = "attention.svg"
    """File of the picture; its ending chooses the format (.svg, .png, .pdf)."""
    kind: Kind = "cross"
    """Attention of the translation to the source, or within the encoder or the decoder."""
    layer: int | None = None
    """Draw only this layer (from 0); all layers by default."""
    head: int | None = None
    """Draw only this head (from 0); all heads by default."""


def main(options: AttendOptions) -> None:
    """Translates the text, writes the picture, and shows the mean of the drawn heads."""
    translator = load_translator(Path(options.run), options=options)
    translation, views = attend(translator, options.text)
    view = attention_views.chosen(views[options.kind], options.layer, options.head)
    attention_views.draw(view).savefig(options.output)
    print(f"{options.text} = {translation}")
    print(attention_views.as_text(view))
    print(f"see {options.output}")


def attend(translator: Translator, text: str) -> tuple[str, dict[Kind, AttentionView]]:
    """The best translation of `text`, and its attention of each kind."""
    if not text.strip():
        raise ConfigError("--text is blank: give a sentence")
    settings = translator.search, translator.options
    (source,) = encode_sources(translator.model, [text], translator.source_tokenizer, *settings)
    best = translator([text])[0][0]
    target = [translator.options.bos, *best.ids[:-1]]
    weights = read_weights(
        translator.model, translator.params, np.array([source]), np.array([target])
    )
    read: Sequence[str] = [label(translator.source_tokenizer, i) for i in source]
    given = [label(translator.target_tokenizer, i) for i in target]
    written = [label(translator.target_tokenizer, i) for i in best.ids]
    return best.text, {
        "cross": AttentionView(
            "cross-attention", written, read, weights["decoder/cross_attention"]
        ),
        "encoder": AttentionView(
            "encoder self-attention", read, read, weights["encoder/attention"]
        ),
        "decoder": AttentionView(
            "decoder self-attention", given, given, weights["decoder/attention"]
        ),
    }


def draw_attention(loaded: LoadedRun, source: str, translation: str) -> "Figure":
    """The `cross_attention` of the last layer."""
    return attention_views.last_layer(cross_attention(loaded, source, translation))


def cross_attention(loaded: LoadedRun, source: str, translation: str) -> AttentionView:
    """How the tokens of `translation` attend to those of `source`, at most 32 of each.

    Arrays have one shape for all texts, so that a training compiles one program.
    """
    read = [*loaded.source_tokenizer.encode(source), EOS][:_LENGTH]
    target = [BOS, *loaded.target_tokenizer.encode(translation), EOS]
    written = target[1 : _LENGTH + 1]
    inputs = np.full((2, 1, _LENGTH), PAD)
    inputs[0, 0, : len(read)] = read
    inputs[1, 0, : len(written)] = target[: len(written)]
    weights = read_weights(loaded.model, loaded.params, *inputs, inputs[0] != PAD)
    return AttentionView(
        "cross-attention",
        [label(loaded.target_tokenizer, i) for i in written],
        [label(loaded.source_tokenizer, i) for i in read],
        weights["decoder/cross_attention"][:, :, : len(written), : len(read)],
    )


if __name__ == "__main__":
    cli.start(main, {"default": AttendOptions()}, __doc__)
