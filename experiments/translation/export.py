"""Export a run: `python -m experiments.translation.export --run RUN --out FOLDER`.

The folder is for transformers' AutoModelForSeq2SeqLM and for ct2-transformers-converter; the run is
one of a preset such as grammar_marian.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from experiments.harness import cli
from experiments.harness.results import exporting
from experiments.harness.runs import distributed
from experiments.translation.load_run import load_run
from jaxformer import optional_dependencies
from jaxformer.config import with_fields
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.distributed.processes import to_numpy
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.text.tokenizers import BOS, EOS, PAD, SPECIAL_TOKENS, UNK, Tokenizer

_PRESETS = ("grammar_marian", "wmt14_base_marian")
_NEVER = -1e4
"""The bias of padding: as a probability 0, also in 16 bits."""


@dataclass(frozen=True)
class ExportOptions(exporting.ExportOptions):
    """The run to export, what for, and where to."""

    run: str = "runs/translation/grammar"
    """The folder of the run."""


def published(options: ExportOptions) -> exporting.Published:
    """The run that `options` name, in Marian's layout, or in the layout of its tokenizers' folder.

    Raises `ConfigError` for a model that the layout cannot hold.
    """
    loaded = load_run(options.folder, options)
    config, search = loaded.config, loaded.config.search
    tokenizer = loaded.require_tokenizer()
    if tokenizer.special[: len(SPECIAL_TOKENS)] != (PAD, BOS, EOS, UNK):
        return exporting.Published(
            config,
            "translation",
            loaded.model,
            loaded.params,
            tokenizer,
            search,
            token_ids={
                "decoder_start_token_id": config.translation.bos,
                "pad_token_id": config.translation.pad,
                "eos_token_id": search.eos[0],
            },
            like=exporting.started_from(config),
        )
    if tokenizer is not loaded.require_target_tokenizer():
        raise ConfigError(
            "source and target have a vocabulary each, but a tokenizer.json has one: train "
            "without --model.source_vocab_size"
        )
    layout = marian_layout(loaded.model, loaded.params, tokenizer, search)
    return exporting.Published(
        config, "translation", layout.model, layout.params, layout.tokenizer, layout.search
    )


@distributed.joins
def main(options: ExportOptions) -> None:
    """Writes the folder."""
    exporting.export(options, lambda: published(options), _PRESETS)


class MarianLayout(NamedTuple):
    """A model whose ids are EOS, the unknown token, all other tokens, and padding.

    Marian has no BOS: its padding, the last row of the table, is zero and starts each target text.
    """

    model: EncoderDecoder
    params: dict[str, Any]
    tokenizer: Tokenizer
    search: SearchConfig
    options: TranslationOptions


def marian_layout(
    model: EncoderDecoder, params: Mapping[str, Any], tokenizer: Tokenizer, search: SearchConfig
) -> MarianLayout:
    """The model, tokenizer and search with Marian's ids, which replace the ids of `tokenizer`.

    The translations are the same where `search` suppresses padding and BOS and renormalizes, since
    neither has a probability in the result. Raises `ConfigError` unless the model reads BOS as a
    zero vector, has an output bias, and one vocabulary with one table for all.
    """
    config, special = model.config, tokenizer.special
    zero_id, tied, bias = config.embeddings.zero_id, config.embeddings.tied, config.output.bias
    if zero_id is None or zero_id != special.bos:
        raise ConfigError(
            f"embeddings.zero_id={zero_id}, but Marian starts each text with a zero vector: train "
            f"with --model.embeddings.zero_id {special.bos}, the id of BOS"
        )
    if tied != "all" or not bias:
        raise ConfigError(
            f"embeddings.tied={tied!r} and output.bias={bias}, but Marian's layout needs one table "
            "for source, target and output, and an output bias: train with --model.embeddings.tied "
            "all and --model.output.bias"
        )
    first = [special.eos, special.unk]
    moved = {special.pad, special.bos, *first}
    words = [index for index in range(config.vocab_size) if index not in moved]
    order = np.array([*first, *words, special.pad])
    new_ids = {old: new for new, old in enumerate(order.tolist())}
    new_ids[zero_id] = new_ids[special.pad]
    leaves: dict[str, Any] = flatten_dict(dict(params), sep="/")
    for path, last in (("embedding/table", 0.0), ("output/bias", _NEVER)):
        leaves[path] = to_numpy(leaves[path])[order]
        leaves[path][-1] = last
    changes = {"vocab_size": len(order), "embeddings.zero_id": None}
    return MarianLayout(
        model.clone(config=with_fields(config, changes)),
        unflatten_dict(leaves, sep="/"),
        renumber(tokenizer, order.tolist()),
        _with_ids(search, new_ids),
        TranslationOptions(bos=new_ids[special.bos], pad=new_ids[special.pad]),
    )


def _with_ids(search: SearchConfig, new_ids: Mapping[int, int]) -> SearchConfig:
    """`search` with other ids."""
    suppressed = {new_ids[old] for old in search.suppress_tokens}
    return replace(
        search,
        eos=tuple(new_ids[old] for old in search.eos),
        suppress_tokens=tuple(sorted(suppressed)),
        forced_bos=None if search.forced_bos is None else new_ids[search.forced_bos],
    )


def renumber(tokenizer: Tokenizer, ids: Sequence[int]) -> Tokenizer:
    """A tokenizer whose token i is the token `ids[i]` of `tokenizer`; others are left out.

    Only special tokens may be left out. Raises `ConfigError` for another token that is missing,
    and for a vocabulary that is not a table of tokens and ids.

    >>> from jaxformer.text.tokenizers import train_words
    >>> tokenizer = train_words(["a rose"], 6)  # <pad> <bos> <eos> <unk> a rose
    >>> last = renumber(tokenizer, [2, 3, 4, 5, 0])
    >>> last.encode("a rose"), last.token(4), last.special.bos
    ([2, 3], '<pad>', None)
    """
    content = json.loads(tokenizer.library_tokenizer.to_str())
    vocabulary = content["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        raise ConfigError(
            f"the ids of a {content['model']['type']} tokenizer cannot be changed: use one that "
            "train_bpe, train_words or train_characters made"
        )
    new_ids = {old: new for new, old in enumerate(ids)}
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    lost = [name for name, old in vocabulary.items() if old not in new_ids and name not in special]
    if lost:
        raise ConfigError(f"ids has no id of {lost[0]!r}: only special tokens may be left out")
    kept = {name: new_ids[old] for name, old in vocabulary.items() if old in new_ids}
    content["model"]["vocab"] = dict(sorted(kept.items(), key=lambda item: item[1]))
    added = [token for token in content["added_tokens"] if token["id"] in new_ids]
    content["added_tokens"] = [token | {"id": new_ids[token["id"]]} for token in added]
    content["post_processor"] = None  # it may hold ids
    library = optional_dependencies.load("tokenizers")
    return Tokenizer(library.Tokenizer.from_str(json.dumps(content)))


if __name__ == "__main__":
    cli.start(main, {"default": ExportOptions()}, __doc__)
