"""A translation model in the layout of Marian's folders, which CTranslate2 converts.

Marian has no BOS: its padding, the last row of the table, is zero and starts each target text.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.decoding import SearchConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.nn.stacking import unstack_blocks
from jaxformer.text.pipeline_options import TranslationOptions
from jaxformer.text.tokenizers import Tokenizer, renumber

_NEVER = -1e4
"""The bias of padding: as a probability 0, also in 16 bits."""


class MarianLayout(NamedTuple):
    """A model whose ids are EOS, the unknown token, all other tokens, and padding.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2)
    >>> settings = jf.SearchConfig(eos=(0,)), jf.TranslationOptions(bos=10, pad=10)
    >>> layout = MarianLayout(jf.EncoderDecoder(config), {}, jf.train_bpe(["a"], 260), *settings)
    >>> layout.options.bos == layout.options.pad
    True
    """

    model: EncoderDecoder
    params: dict[str, Any]
    tokenizer: Tokenizer
    search: SearchConfig
    options: TranslationOptions


def marian_layout(
    model: EncoderDecoder, params: Mapping[str, Any], tokenizer: Tokenizer, search: SearchConfig
) -> MarianLayout:
    """The model, tokenizer and search with Marian's ids; those of `tokenizer` are replaced.

    The translations are the same where `search` suppresses padding and BOS and renormalizes, since
    neither has a probability in the result. Raises `ConfigError` unless the model reads BOS as a
    zero vector, has an output bias, and one vocabulary with one table for all.

    >>> tokenizer = jf.train_bpe(["a rose is a rose"], 264)
    >>> sizes = {"d_model": 8, "d_ff": 12, "num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> rest = {"num_heads": 2, "output_bias": True, "zero_embedding_id": jf.BOS}
    >>> model = jf.EncoderDecoder(jf.TransformerConfig(264, **sizes, **rest))
    >>> ids = jnp.ones((1, 3), int)
    >>> params = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]
    >>> found = marian_layout(model, params, tokenizer, jf.SearchConfig())
    >>> found.model.config.vocab_size, found.tokenizer.token(262)
    (263, '<pad>')
    """
    config, special = model.config, tokenizer.special
    if config.zero_embedding_id is None or config.zero_embedding_id != special.bos:
        raise ConfigError(
            f"zero_embedding_id={config.zero_embedding_id}, but Marian starts each text with a "
            f"zero vector: train with --model.zero_embedding_id {special.bos}, the id of BOS"
        )
    if config.tied_embeddings != "all" or not config.output_bias:
        raise ConfigError(
            f"tied_embeddings={config.tied_embeddings!r} and output_bias={config.output_bias}, but "
            "Marian's layout needs one table for source, target and output, and an output bias: "
            "train with --model.tied_embeddings all and --model.output_bias"
        )
    first = [special.eos, special.unk]
    moved = {special.pad, special.bos, *first}
    rest = [index for index in range(config.vocab_size) if index not in moved]
    order = np.array([*first, *rest, special.pad])
    new_ids = {old: new for new, old in enumerate(order.tolist())}
    new_ids[config.zero_embedding_id] = new_ids[special.pad]
    flat = flatten_dict(unstack_blocks(params), sep="/")
    leaves = {path: np.asarray(leaf) for path, leaf in flat.items()}
    for path, last in (("embedding/table", 0.0), ("output/bias", _NEVER)):
        leaves[path] = leaves[path][order]
        leaves[path][-1] = last
    sizes = replace(config, vocab_size=len(order), zero_embedding_id=None, scan_layers=False)
    return MarianLayout(
        model.clone(config=sizes),
        unflatten_dict(leaves, sep="/"),
        renumber(tokenizer, order.tolist()),
        _with_ids(search, new_ids),
        TranslationOptions(bos=new_ids[special.bos], pad=new_ids[special.pad], source_bos=True),
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
