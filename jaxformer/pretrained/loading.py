"""Trained models from folders: of `transformers`, of a run, or of the hub."""

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    TransformerConfig,
    check_trusted,
    from_plain,
    import_by_name,
    import_module_class,
    trusting,
)
from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.distributed import Strategy
from jaxformer.errors import CheckpointError, ConfigError, DataError
from jaxformer.nn.blocks import Block
from jaxformer.nn.heads import Classifier, SpanPredictor
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, Model
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn, reference
from jaxformer.pretrained import families
from jaxformer.pretrained.config_keys import parse_number
from jaxformer.pretrained.family import Family, canonical_names, read_config
from jaxformer.pretrained.generation_config import load_generation_config, load_sampling_config
from jaxformer.pretrained.hf_folder import Tensors, locate
from jaxformer.pretrained.loaded import Loaded, Setting, Unsupported
from jaxformer.pretrained.model_specs import (
    Kind,
    ModelSpec,
    check_params,
    make_model,
    model_class,
    param_shapes,
)
from jaxformer.pretrained.run_weights import CheckpointName, RunWeights, select_weights
from jaxformer.pretrained.sentence_modules import SentenceOptions, load_sentence_options
from jaxformer.pretrained.weight_map import Shape, WeightMap, check_names, check_shapes, to_jax
from jaxformer.storage import read_json, to_local_path, to_path
from jaxformer.text import tokenizers

# The tokenizers of a run.
_TOKENIZER = Path("tokenizer", "tokenizer.json")
_SOURCE, _TARGET = Path("tokenizer", "source.json"), Path("tokenizer", "target.json")

# The names of its settings in its config.json.
_RUN_SETTINGS: dict[str, type[Setting]] = {
    "search": SearchConfig,
    "translation": TranslationOptions,
    "sampling": SamplingConfig,
    "completion": CompletionOptions,
}


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    attention_fn: AttentionFn = reference,
    dtype: Literal["float32", "bfloat16"] = "float32",
    strategy: Strategy | None = None,
) -> Loaded:
    """The model, parameters and tokenizers in `folder`, as `transformers` writes them.

    Reads config.json, model.safetensors (also in several files with an index) and the tokenizer's
    files (those of SentencePiece need the extra `subwords`). `architectures` in config.json decides
    the model: a `DecoderOnly`, `EncoderOnly`, `EncoderDecoder`, `MaskedLanguageModel`,
    `Classifier`, `TokenClassifier` or `SpanPredictor`. Weights may be stored as F16, BF16 or F32;
    `params` are float32. `dtype` is that of the computation. A decoder without an output layer gets
    the transpose of its embedding. With a `strategy`, such as `sharded(mesh)`, `params` are JAX
    arrays of the stored type, and each device reads only its parts from the files. The model
    "hf:owner/model" of the hub is downloaded (needs `huggingface_hub`).

    Pad texts at their ends, as the pipelines do: in transformers RoBERTa, XLM-R and M2M100 count
    positions from the first token that is no padding, here from the first column.

    Raises `ConfigError`, naming the key and its value, for what is not supported, and `DataError`
    for files that are damaged, lead out of the folder, or do not have exactly the tensors that the
    model needs.

    >>> from dataclasses import replace
    >>> small = {"vocab_size": 11, "d_model": 8, "d_ff": 32, "num_heads": 2}
    >>> model = jf.DecoderOnly(replace(jf.GPT2, **small, num_decoder_layers=1))
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> jf.save_pretrained("model", model, params)
    >>> loaded = jf.load_pretrained("model")
    >>> loaded.model.config.d_ff, loaded.tokenizer
    (32, None)
    >>> equal = jax.tree.map(lambda a, b: bool((a == b).all()), loaded.params, params)
    >>> all(jax.tree.leaves(equal))
    True
    """
    return _load(folder, attention_fn, dtype, functools.partial(_read_params, strategy=strategy))


def load_without_weights(folder: str | os.PathLike[str]) -> Loaded:
    """As `load`, without `params`: of the weights only the shapes are read.

    A run without a checkpoint has the sizes that its config.json says.
    """
    source = locate(folder)
    config = _read_config(source)
    if "model_type" in config:
        return _load(folder, reference, "float32", lambda *_: {})
    begun = Checkpoints(source / "checkpoints").newest_step() is not None
    weights = select_weights(source) if begun else None
    return _load_run(source, config, weights, None, None, lambda _: {})


def _load(
    folder: str | os.PathLike[str],
    attention_fn: AttentionFn,
    dtype: Literal["float32", "bfloat16"],
    read_params: Callable[[WeightMap, nn.Module, Tensors, dict[str, str]], dict[str, Any]],
) -> Loaded:
    source = to_local_path(locate(folder))
    hf = read_json(source / "config.json")
    try:
        family, kind = families.find(hf)
        tensors = Tensors(source)
        spec, names = _read_spec(family, kind, hf, tensors, dtype)
        model = make_model(spec, attention_fn)
        params = read_params(family.weight_map(spec, hf), model, tensors, names)
    except ConfigError as error:
        raise ConfigError(f"{source / 'config.json'}: {error}") from error
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    loaded = Loaded(model, params, settings=_folder_settings(source, model))
    if tokenizers.has_tokenizer(source):
        reader, writer = tokenizers.load_pair(source)
        loaded = replace(loaded, tokenizer=reader, target_tokenizer=writer)
    return _check_tokenizers(source, loaded, spec.config)


def _folder_settings(folder: Path, model: nn.Module) -> tuple[Setting | Unsupported, ...]:
    """The settings in `folder` of the pipelines that take `model`."""
    settings: tuple[Setting | Unsupported, ...] = ()
    if isinstance(model, EncoderDecoder):
        try:
            settings += load_generation_config(folder)
        except (ConfigError, DataError) as error:
            settings += (Unsupported((SearchConfig, TranslationOptions), error),)
    elif isinstance(model, Model):
        try:
            settings += (load_sentence_options(folder, model.config.max_len),)
        except (ConfigError, DataError) as error:
            settings += (Unsupported((SentenceOptions,), error),)
    if isinstance(model, DecoderOnly):
        try:
            settings += load_sampling_config(folder, model.config.max_len)
        except (ConfigError, DataError) as error:
            settings += (Unsupported((SamplingConfig, CompletionOptions), error),)
    return settings


def _check_tokenizers(folder: Path, loaded: Loaded, sizes: TransformerConfig) -> Loaded:
    """`loaded`; `ConfigError` for a tokenizer with more ids than the model."""
    tokenizers = loaded.tokenizer, loaded.target_tokenizer
    vocab_sizes = sizes.source_vocab_size or sizes.vocab_size, sizes.vocab_size
    try:
        for tokenizer, vocab_size in zip(tokenizers, vocab_sizes, strict=True):
            if tokenizer is not None:
                tokenizer.check_fits(vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    return loaded


def is_pretrained(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` holds a model as `transformers` writes it, and not a run."""
    try:
        return "model_type" in read_json(to_path(folder) / "config.json")
    except DataError:
        return False


def _read_spec(
    family: Family,
    kind: Kind,
    hf: dict[str, Any],
    tensors: Tensors,
    dtype: Literal["float32", "bfloat16"],
) -> tuple[ModelSpec, dict[str, str]]:
    """The spec, and the weight map's name -> the folder's of each tensor."""
    config = replace(read_config(family, hf), dtype=dtype)
    layers = config.num_encoder_layers + config.num_decoder_layers
    if layers > len(tensors.shapes):  # before anything of this size is built
        raise ConfigError(
            f"config.json asks for {layers:,} layers, but the weights have {len(tensors.shapes)} "
            "tensors"
        )
    names = canonical_names(family, tensors.shapes)
    unused = family.unused_tensors.get(kind, r"(?!)")
    names = {name: stored for name, stored in names.items() if not re.search(unused, name)}
    heads = [(x, tensors.shapes[names[x]]) for x in family.classifier_tensors if x in names]
    classes = parse_number(heads[0][0], heads[0][1][0], int) if heads and heads[0][1] else 0
    spec = ModelSpec(kind, config, classes).completed()
    return family.adapt(spec, names), names


def _read_params(
    weight_map: WeightMap,
    model: nn.Module,
    tensors: Tensors,
    names: dict[str, str],
    strategy: Strategy | None,
) -> dict[str, Any]:
    """The model's parameters; no tensor is read before all names and shapes fit."""
    check_names(weight_map, names)
    shapes = param_shapes(model)
    check_shapes(weight_map, shapes, {name: tensors.shapes[names[name]] for name in names})

    def read(name: str) -> np.ndarray:
        tensor = tensors.read(names[name])
        return tensor if strategy else tensor.astype(np.float32, copy=False)

    places = (_place_on(strategy.for_model(model), shapes),) if strategy else ()
    return unflatten_dict(to_jax(weight_map, shapes, names, read, *places), sep="/")


def _place_on(
    strategy: Strategy, shapes: Mapping[str, Shape]
) -> Callable[[str, np.ndarray], jax.Array]:
    """put(path, array) -> the array on the devices of `strategy`; only parts are copied."""
    leaves = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in shapes.items()}
    tree = strategy.shardings(unflatten_dict(leaves, sep="/"))
    shardings: dict[str, Any] = flatten_dict(tree, sep="/")

    def put(path: str, value: np.ndarray) -> jax.Array:
        sharding = shardings[path]
        indices = sharding.addressable_devices_indices_map(value.shape)
        parts = [
            jax.block_until_ready(
                jax.device_put(np.array(value[index], order="C"), device, may_alias=False)
            )
            for device, index in indices.items()
        ]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)

    return put


def load(
    folder: str | os.PathLike[str],
    *,
    checkpoint: CheckpointName = "final",
    step: int | None = None,
    attention_fn: AttentionFn | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    strategy: Strategy | None = None,
    trust_code: bool = False,
) -> Loaded:
    """The model in `folder`: a run of `experiments`, or what `load_pretrained` reads.

    Of a run, these are the weights chosen at its end or, before its end, the newest ones, with the
    block, attention function and position scheme that it was trained with. `checkpoint` asks for
    others: best (of the best validation), last (of the newest step), average (the mean of the last
    steps) or ema (the moving average); `step` for those of a step that is kept. It may be in a
    bucket (gs://bucket/path). A run's config.json may name Python functions and classes
    of its author: these are imported with `trust_code`, if this user trained the run, or if
    jaxformer defines them. `attention_fn` and `dtype` replace those of the run;
    None means `reference` and "float32" for other folders. `strategy` puts the parameters on its
    devices, tensor by tensor as `load_pretrained` does. The pipelines take the result, and by
    default use the folder's settings: generation_config.json, or the search or sampling of the run.

    Raises `ConfigError` for a folder of neither kind, for names that are not trusted, for weights
    that the folder cannot have and for a tokenizer that is not the run's, `CheckpointError` for a
    run without a complete checkpoint, without that of `step`, or with weights that do not fit,
    `DataError` for damaged files, and what `load_pretrained` raises.

    >>> from dataclasses import replace
    >>> tokenizer = jf.train_bpe(["a rose is a rose"], 264)
    >>> small = {"vocab_size": 264, "d_model": 8, "d_ff": 32, "num_heads": 2}
    >>> model = jf.DecoderOnly(replace(jf.GPT2, **small, num_decoder_layers=1))
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> jf.save_pretrained("model", model, params, tokenizer)
    >>> loaded = jf.load("model")
    >>> loaded.tokenizer.encode("a rose") == tokenizer.encode("a rose")
    True
    """
    source = locate(folder)
    config = _read_config(source)
    if "model_type" in config:
        if checkpoint != "final" or step is not None:
            raise ConfigError(
                f"{folder} is a folder of transformers, which has one set of weights: leave out "
                "checkpoint and step"
            )
        return load_pretrained(
            folder,
            attention_fn=attention_fn or reference,
            dtype=dtype or "float32",
            strategy=strategy,
        )

    def read(model: nn.Module) -> dict[str, Any]:
        return weights.read(strategy.for_model(model) if strategy else None)

    weights = select_weights(source, checkpoint, step)
    with trusting(trust_code):
        return _load_run(source, config, weights, attention_fn, dtype, read)


def _read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json; `ConfigError` for a folder of neither kind."""
    config = read_json(folder / "config.json", default={})
    if "model_type" in config or isinstance(config.get("model"), dict):
        return config
    raise ConfigError(
        f"{folder} is neither a run nor a folder of transformers: "
        + ("its config.json has no 'model' and no 'model_type'" if config else "no config.json")
    )


def _load_run(
    folder: Path,
    config: dict[str, Any],
    weights: RunWeights | None,
    attention_fn: AttentionFn | None,
    dtype: Literal["float32", "bfloat16"] | None,
    read_params: Callable[[nn.Module], dict[str, Any]],
) -> Loaded:
    """The run in `folder`; without `weights` nothing but its settings is known."""
    training = config.get("training", {})
    named = ("block", "model") if attention_fn else ("block", "model", "attention_fn")
    parts = {name: training[name] for name in named if name in training}
    check_trusted({"model": config["model"], "training": parts}, folder / "config.json")
    shapes = weights.shapes() if weights else {}
    try:
        sizes = _with_vocabularies(from_plain(TransformerConfig, config["model"], "model"), shapes)
        attend = attention_fn or _attention_fn(parts.get("attention_fn", "reference"))
        block = import_module_class(parts["block"], "block") if parts.get("block") else Block
        own_model = parts.get("model") and import_module_class(parts["model"], "model")
        settings = tuple(
            from_plain(kind, config[name], name)
            for name, kind in _RUN_SETTINGS.items()
            if config.get(name)
        )
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error
    sizes = replace(sizes, dtype=dtype or sizes.dtype)
    make = own_model or model_class(sizes, has_head="backbone" in shapes)
    model = _with_head(make(sizes, attend, block), config.get("task", {}), shapes)
    if weights:
        _check_tokenizer(weights)
        try:
            check_params(model, shapes)
        except ConfigError as error:
            raise CheckpointError(f"{folder / 'checkpoints'}: {error}") from error
    loaded = Loaded(model, read_params(model), settings=settings, config=config)
    paths = (folder / _TARGET, folder / _TOKENIZER)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return loaded
    target = tokenizers.load(path)
    source = tokenizers.load(folder / _SOURCE) if (folder / _SOURCE).exists() else target
    return _check_tokenizers(
        folder, replace(loaded, tokenizer=source, target_tokenizer=target), sizes
    )


def _with_head(model: nn.Module, task: Mapping[str, Any], shapes: Mapping[str, Any]) -> nn.Module:
    """`model` below the head that a fine-tuning has given it, if any."""
    if "backbone" not in shapes:
        return model
    if task.get("kind") == "spans":
        return SpanPredictor(model)
    classes = shapes["head"]["kernel"].shape[-1]
    return Classifier(model, classes, task.get("pooling", "own"))


def _check_tokenizer(weights: RunWeights) -> None:
    """Raises `ConfigError` for another tokenizer than that which the checkpoints were made with."""
    folder = weights.folder
    stored = Checkpoints(folder / "checkpoints").metadata(weights.steps[-1]).get("tokenizer")
    if stored not in (None, tokenizers.digest(folder / "tokenizer")):
        raise ConfigError(
            f"{folder / 'tokenizer'} is not the tokenizer that the run was trained with, and does "
            "not fit its weights: put the run's own back"
        )


def _with_vocabularies(sizes: TransformerConfig, shapes: Mapping[str, Any]) -> TransformerConfig:
    """`sizes` with the vocabularies of `shapes`; tokenizers may have fewer ids than asked for."""
    bodies = (shapes, shapes.get("encoder", {}), shapes.get("backbone", {}))
    body = next((body for body in bodies if "embedding" in body), {})
    if "embedding" in body:
        sizes = replace(sizes, vocab_size=body["embedding"]["table"].shape[0])
    if "source_embedding" in shapes:
        sizes = replace(sizes, source_vocab_size=shapes["source_embedding"]["table"].shape[0])
    return sizes


def _attention_fn(name: str) -> AttentionFn:
    return ATTENTION_FNS[name] if name in ATTENTION_FNS else import_by_name(name, "attention_fn")
