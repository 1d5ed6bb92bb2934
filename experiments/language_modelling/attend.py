"""Draw attention: `python -m experiments.language_modelling.attend --run RUN --text "..."`.

The attention weights of a text are drawn, one panel for each layer and head. Rows are the tokens
that attend, columns the tokens they attend to. On a terminal the mean over the drawn heads is shown
as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.harness import cli
from experiments.harness.results import attention_views
from experiments.harness.results.attention_views import AttentionView, label, read_weights
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.language_modelling.load_run import LoadedRun, load_run
from jaxformer.errors import ConfigError
from jaxformer.pipelines.batching import add_special_tokens
from jaxformer.pipelines.fill_mask import encode_masked
from jaxformer.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AttendOptions(RunOptions):
    """Which run, which text, and where the picture goes."""

    run: str = "runs/language_modelling/python_stdlib"
    """Folder of a run, or of a language model of transformers."""
    text: str = "for i in range(10):"
    """The text; a masked model may have masks in it."""
    output: str = "attention.svg"
    """File of the picture; its ending chooses the format (.svg, .png, .pdf)."""
    layer: int | None = None
    """Draw only this layer (from 0); all layers by default."""
    head: int | None = None
    """Draw only this head (from 0); all heads by default."""


def main(options: AttendOptions) -> None:
    """Writes the picture, and shows the mean of the drawn heads."""
    view = attend(load_run(Path(options.run), options), options.text)
    view = attention_views.chosen(view, options.layer, options.head)
    attention_views.draw(view).savefig(options.output)
    print(attention_views.as_text(view))
    print(f"see {options.output}")


def draw_attention(loaded: LoadedRun, texts: Sequence[str]) -> "Figure":
    """The attention of the last layer in the first of `texts`; `ConfigError` if there is none."""
    return attention_views.last_layer(attend(loaded, next(iter(texts), "")))


def attend(loaded: LoadedRun, text: str) -> AttentionView:
    """The self-attention of the model in `text`, which is cut at the model's context."""
    if not text.strip():
        raise ConfigError("--text is blank: give a text")
    tokenizer, masked = loaded.tokenizer, loaded.config.objective == "masked"
    ids = _masked_ids(text, loaded) if masked else tokenizer.encode(text)
    ids = ids[: loaded.model.config.max_len]
    (weights,) = read_weights(loaded.model, loaded.params, np.array([ids])).values()
    tokens = [label(tokenizer, index) for index in ids]
    return AttentionView("self-attention", tokens, tokens, weights)


def _masked_ids(text: str, loaded: LoadedRun) -> list[int]:
    """The ids of a text, in which masks may stand, between BOS and EOS."""
    tokenizer = loaded.tokenizer
    masks = has_mask(text, tokenizer)
    ids = encode_masked(text, 0, tokenizer) if masks else tokenizer.encode(text)
    return add_special_tokens(ids, tokenizer)


def has_mask(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a mask token stands in `text`."""
    mask = tokenizer.special.mask
    return mask is not None and tokenizer.token(mask) in text


if __name__ == "__main__":
    cli.start(main, {"default": AttendOptions()}, __doc__)
