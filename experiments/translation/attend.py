"""The attention of a translation model in a sentence and its translation."""

from typing import TYPE_CHECKING, Literal

import numpy as np

from experiments.harness.results import attention_views
from experiments.harness.results.attention_views import AttentionView, label, read_weights
from experiments.translation.load_run import LoadedRun, Translator
from jaxformer.pipelines import encode_sources
from jaxformer.text.tokenizers import BOS, EOS, PAD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["cross", "encoder", "decoder"]
_LENGTH = 32


def attend(translator: Translator, text: str) -> tuple[str, dict[Kind, AttentionView]]:
    """The best translation of `text`, and its attention of each kind."""
    settings = translator.search, translator.options
    (source,) = encode_sources(translator.model, [text], translator.source_tokenizer, *settings)
    best = translator([text])[0][0]
    inputs = np.array([source]), np.array([[translator.options.bos, *best.ids[:-1]]])
    weights = read_weights(translator.model, translator.params, *inputs)
    source_tokens = [label(translator.source_tokenizer, i) for i in source]
    input_tokens = [label(translator.target_tokenizer, i) for i in inputs[1][0].tolist()]
    output_tokens = [label(translator.target_tokenizer, i) for i in best.ids]
    return best.text, {
        "cross": AttentionView(
            "cross-attention", output_tokens, source_tokens, weights["decoder/cross_attention"]
        ),
        "encoder": AttentionView(
            "encoder self-attention", source_tokens, source_tokens, weights["encoder/attention"]
        ),
        "decoder": AttentionView(
            "decoder self-attention", input_tokens, input_tokens, weights["decoder/attention"]
        ),
    }


def draw_attention(loaded: LoadedRun, source: str, translation: str) -> "Figure":
    """The `cross_attention` of the last layer."""
    return attention_views.last_layer(cross_attention(loaded, source, translation))


def cross_attention(loaded: LoadedRun, source: str, translation: str) -> AttentionView:
    """The attention of the tokens of `translation` to those of `source`, at most 32 of each.

    Arrays have one shape for all texts, so that a training compiles one program.
    """
    source_ids = [*loaded.source_tokenizer.encode(source), EOS][:_LENGTH]
    target_ids = [BOS, *loaded.target_tokenizer.encode(translation), EOS]
    output_ids = target_ids[1 : _LENGTH + 1]
    inputs = np.full((2, 1, _LENGTH), PAD)
    inputs[0, 0, : len(source_ids)] = source_ids
    inputs[1, 0, : len(output_ids)] = target_ids[: len(output_ids)]
    weights = read_weights(loaded.model, loaded.params, *inputs, inputs[0] != PAD)
    return AttentionView(
        "cross-attention",
        [label(loaded.target_tokenizer, i) for i in output_ids],
        [label(loaded.source_tokenizer, i) for i in source_ids],
        weights["decoder/cross_attention"][:, :, : len(output_ids), : len(source_ids)],
    )
