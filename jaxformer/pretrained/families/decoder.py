"""Shared by the families of decoders: the tensors outside their blocks, their classes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxformer.config import TransformerConfig
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.config_keys import Key
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.model_specs import ModelSpec
from jaxformer.pretrained.weight_map import SAME, Entry, Transform, WeightMap

BlockEntries = Callable[[str, str, TransformerConfig, Mapping[str, Any]], list[Entry]]
"""Our path and their name of a block, our config and config.json -> the entries of the block."""


class Names(NamedTuple):
    """The names of tensors outside the blocks, and the entries of a block."""

    embedding: str
    """The embedding, without the ending ".weight", as all names here."""
    blocks: str
    """The blocks, each followed by its number."""
    block: BlockEntries
    final_norm: str
    positions: str = ""
    """The table of learned positions."""
    table: Transform = SAME
    """The change of form of that table."""
    output: str = "lm_head"
    norm: Mapping[str, Any] = {}
    """Arguments of `norm` for the final norm."""


def _weight_map(names: Names, spec: ModelSpec, hf: Mapping[str, Any]) -> WeightMap:
    """The entries of a decoder with its output layer or a classifier."""
    body, config = spec.body, spec.config
    table, embedding = f"{spec.body}embedding/table", f"{names.embedding}.weight"
    output = f"{names.output}.weight"
    entries = [maps.entry(table, embedding)]
    if spec.kind == "decoder_classifier":
        entries += [maps.entry("head/kernel", "score.weight", maps.linear())]
        entries += [maps.zero_entry("head/bias")]
    elif config.ties_output:
        entries = [Entry((table,), (embedding, output))]
    else:
        entries += [maps.entry("output/kernel", output, maps.linear())]
    if names.positions:
        path = f"{body}decoder/positions/table"
        entries += [maps.entry(path, f"{names.positions}.weight", names.table)]
    for i in range(config.num_decoder_layers):
        path = f"{body}decoder/blocks_{i}"
        entries += names.block(path, f"{names.blocks}.{i}", config, hf)
    if config.norm.placement != "post":
        entries += maps.norm(f"{body}decoder/final_norm", names.final_norm, **names.norm)
    return entries


def decoder(
    model_type: str,
    name: str,
    names: Names,
    keys: Sequence[Key],
    *,
    constants: Mapping[str, Any],
    language_model: str = "ForCausalLM",
    renamed_endings: Mapping[str, str] = {},
    ignored_tensors: str = r"(?!)",
    aliases: Mapping[str, str] = {},
    ignored_keys: frozenset[str] = frozenset(),
    inputs_first: str = r"(?!)",
) -> Family:
    """A family of classes `name`; the name of its language model ends in `language_model`.

    The last five are fields of `Family`.
    """
    return Family(
        model_type=model_type,
        architectures={
            f"{name}{language_model}": "decoder",
            f"{name}Model": "bare_decoder",
            f"{name}ForSequenceClassification": "decoder_classifier",
        },
        constants={"embeddings.scale": False, "initializer": "normal", **constants},
        keys=keys,
        weight_map=partial(_weight_map, names),
        prefix=names.embedding.partition(".")[0] + ".",
        head_prefixes=(f"{names.output}.", "score."),
        classifier_tensors=("score.weight",),
        renamed_endings=renamed_endings,
        ignored_tensors=ignored_tensors,
        aliases=aliases,
        ignored_keys=ignored_keys,
        inputs_first=inputs_first,
    )
