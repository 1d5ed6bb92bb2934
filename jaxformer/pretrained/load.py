"""Any trained model: the folder of a run, a folder of `transformers`, or a name on the hub."""

import functools
import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flax import linen as nn

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import TransformerConfig
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.nn.blocks import Block
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn, AutoAttention, reference
from jaxformer.pretrained.hf_folder import HFFolder, locate
from jaxformer.pretrained.loading import (
    check_tokenizer,
    load_pretrained,
    load_target_tokenizer,
)
from jaxformer.pretrained.model_specs import check_params
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import Tokenizer

_TOKENIZER = Path("tokenizer", "tokenizer.json")
_SOURCE, _TARGET = Path("tokenizer", "source.json"), Path("tokenizer", "target.json")


class Loaded(NamedTuple):
    """A trained model, ready for use."""

    model: nn.Module
    params: dict[str, Any]
    """Numpy arrays in nested dicts."""
    tokenizer: Tokenizer | None
    """The tokenizer of the (source) text; None where the folder has none."""
    target_tokenizer: Tokenizer | None
    """The tokenizer of the target text; the same object where there is one vocabulary."""


def load(
    folder: str | os.PathLike[str],
    *,
    attention_fn: AttentionFn | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> Loaded:
    """The model in `folder`: a run of `experiments`, or what `load_pretrained` reads.

    Of a run, these are the weights chosen at its end or, before its end, the newest ones, with the
    block and the attention function that it was trained with. A run's config.json may name Python
    modules, which are imported: load only runs that you trust. `attention_fn` and `dtype` replace
    those of the run; None means `reference` and "float32" for other folders.

    Raises `ConfigError` for a folder of neither kind, `CheckpointError` for a run without a
    complete checkpoint or with weights that do not fit, and what `load_pretrained` raises.
    """
    source = HFFolder(locate(folder))
    config = source.json("config.json")
    if "model_type" in config:
        found = load_pretrained(
            folder, attention_fn=attention_fn or reference, dtype=dtype or "float32"
        )
        target = load_target_tokenizer(folder) if isinstance(found.model, EncoderDecoder) else None
        return Loaded(*found, target or found.tokenizer)
    if not isinstance(config.get("model"), dict):
        raise ConfigError(
            f"{source.path} is neither a run nor a folder of transformers: its config.json has "
            "no 'model' and no 'model_type'"
        )
    return _load_run(source.path, config, attention_fn, dtype)


def _load_run(
    folder: Path,
    config: dict[str, Any],
    attention_fn: AttentionFn | None,
    dtype: Literal["float32", "bfloat16"] | None,
) -> Loaded:
    training = config.get("training", {})
    params = _run_params(folder, training)
    try:
        sizes = _with_vocabularies(TransformerConfig(**config["model"]), params)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{folder / 'config.json'}: model: {error}") from error
    sizes = replace(sizes, dtype=dtype or sizes.dtype)
    attend = attention_fn or _attention_fn(training.get("attention_fn", "reference"))
    named = training.get("block")
    block = _import_named(named, "block") if named else Block
    if sizes.num_encoder_layers and sizes.num_decoder_layers:
        model: nn.Module = EncoderDecoder(sizes, attend, block)
    elif sizes.num_decoder_layers:
        model = DecoderOnly(sizes, attend, block)
    else:
        model = MaskedLanguageModel(sizes, attend, block)
    try:
        check_params(model, params)
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'checkpoints'}: {error}") from error
    return Loaded(model, params, *_run_tokenizers(folder, sizes))


def _run_params(folder: Path, training: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of the checkpoints chosen at the end of the run, or the newest checkpoint."""
    checkpoints = Checkpoints(folder / "checkpoints")
    newest = checkpoints.newest_step()
    if newest is None:
        raise CheckpointError(f"{folder} has no complete checkpoint: train first")
    source = HFFolder(folder)
    chosen = source.json("weights.json").get("steps") if source.has("weights.json") else None
    if not chosen or not set(chosen) <= set(checkpoints.steps()):
        chosen = [newest]
    averaged = training.get("ema_decay", 0) > 0
    return checkpoints.average_params(chosen, tree="ema" if averaged else "params")


def _with_vocabularies(sizes: TransformerConfig, params: Mapping[str, Any]) -> TransformerConfig:
    """`sizes` with the vocabularies of `params`; tokenizers may have fewer ids than asked for."""
    body = params if "embedding" in params else params.get("encoder", {})
    if "embedding" in body:
        sizes = replace(sizes, vocab_size=len(body["embedding"]["table"]))
    if "source_embedding" in params:
        sizes = replace(sizes, source_vocab_size=len(params["source_embedding"]["table"]))
    return sizes


def _run_tokenizers(
    folder: Path, sizes: TransformerConfig
) -> tuple[Tokenizer | None, Tokenizer | None]:
    """The tokenizers of source and target, one object where there is one vocabulary."""
    target = next((name for name in (_TARGET, _TOKENIZER) if (folder / name).exists()), None)
    if target is None:
        return None, None
    found = tokenizers.load(folder / target)
    source = tokenizers.load(folder / _SOURCE) if (folder / _SOURCE).exists() else found
    check_tokenizer(folder, found, sizes.vocab_size)
    check_tokenizer(folder, source, sizes.source_vocab_size or sizes.vocab_size)
    return source, found


def _attention_fn(name: str) -> AttentionFn:
    if name == "auto":
        return AutoAttention()
    return ATTENTION_FNS[name] if name in ATTENTION_FNS else _import_named(name, "attention_fn")


def _import_named(name: str, option: str) -> Any:
    """What `package.module:name` names."""
    module, _, attributes = name.partition(":")
    try:
        return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the run was trained with {option}={name!r}, which cannot be imported ({error}): "
            "start Python in the folder that contains it, or put that folder on PYTHONPATH"
        ) from error
