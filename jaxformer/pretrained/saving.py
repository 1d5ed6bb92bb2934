"""Models of this package as folders that `transformers` loads."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxformer import storage
from jaxformer.config import with_fields
from jaxformer.decoding import SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.distributed.processes import agreed
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.nn.remat import REMAT
from jaxformer.nn.stacked_blocks import unstack_blocks
from jaxformer.ops.attention import ATTENTION_FNS, reference
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import Family, read_config, write_config
from jaxformer.pretrained.generation_config import generation_json
from jaxformer.pretrained.kept_files import KeptFiles, read_kept_files
from jaxformer.pretrained.model_specs import (
    ModelSpec,
    check_params,
    make_model,
    param_shapes,
    spec_of,
)
from jaxformer.pretrained.saved_tensors import LazyLeaf, write_tensors
from jaxformer.pretrained.saved_tokenizer import (
    NO_TOKEN_IDS,
    token_ids_of,
    tokenizer_config,
    with_template,
)
from jaxformer.pretrained.weight_map import Shape, WeightMap, to_hf
from jaxformer.storage import to_local_path
from jaxformer.text.tokenizers import Tokenizer

_CLASSIFIERS = ("encoder_classifier", "decoder_classifier", "token_classifier")


def save_pretrained(
    folder: str | os.PathLike[str],
    model: nn.Module,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    family: str | None = None,
    token_ids: Mapping[str, int] | None = None,
    generation: SearchConfig | SamplingConfig | None = None,
    labels: Sequence[str] = (),
    card: str = "",
) -> None:
    """Writes a folder that `transformers` loads: config.json, model.safetensors, tokenizer.json.

    `family` is a `model_type` such as "gpt2"; None means the first one that supports the model.
    The ids of special tokens in config.json are the tokenizer's; `token_ids`, such as
    {"decoder_start_token_id": 0}, replaces them. `generation` is written to
    generation_config.json, and `card` to README.md. A model that was trained from the folder `like`
    keeps what was not trained: the files of the tokenizer (if `tokenizer` is None or that one), its
    chat template, generation_config.json, and the ids and other keys of config.json. The folder is
    written completely or not at all, with one tensor at a time on the host. Every process calls it,
    and the first writes.
    A model without biases is written to a family with biases, which are zero. `labels` are the
    names of a classifier's classes.

    Raises `ConfigError` for a model that the family does not support, naming the fields, for a
    block, attention function or position scheme of your own, for parameters that are not the
    model's, and for a folder that is not empty.

    >>> from dataclasses import replace
    >>> small = {"vocab_size": 11, "d_model": 8, "d_ff": 32, "num_heads": 2}
    >>> model = jf.DecoderOnly(replace(jf.GPT2, **small, num_decoder_layers=1))
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> jf.save_pretrained("model", model, params, family="gpt2")
    >>> sorted(path.name for path in Path("model").iterdir())
    ['config.json', 'model.safetensors']
    """
    path = to_local_path(folder)
    # The first process says it, which may have written the folder when a later one looks.
    if agreed(path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise ConfigError(f"{path} is there already: give the name of a new folder")
    spec = spec_of(model)
    _refuse_own_parts(model)
    check_params(model, params)
    kept = None if like is None else read_kept_files(like, tokenizer)
    if kept is not None and not family:
        family = kept.config.get("model_type")
    chosen, spec, settings = _choose(family or None, spec)
    new_tokenizer = tokenizer
    if kept is not None and kept.has_tokenizer:
        new_tokenizer = None
    config_json = _config_json(chosen, settings, kept, new_tokenizer, generation)
    config_json |= token_ids or {}
    read_config(chosen, config_json)  # refuses ids that the family does not support
    if spec.kind in _CLASSIFIERS:
        names = labels or [f"LABEL_{number}" for number in range(spec.classes)]
        config_json |= _label_keys(names)
    files: dict[str, Any] = {} if kept is None else dict(kept.files)
    files["config.json"] = config_json
    files["README.md"] = card
    if generation is not None:
        ids = {key: value for key, value in config_json.items() if key.endswith("_token_id")}
        files["generation_config.json"] = generation_json(generation, spec.config.max_len, ids)
    if new_tokenizer is not None:
        files["tokenizer_config.json"] = tokenizer_config(new_tokenizer, spec)
        new_tokenizer = with_template(new_tokenizer, spec)
    tensors = _tensors(spec, params, chosen.weight_map(spec, settings))
    if jax.process_index() == 0:
        _write_folder(path, files, tensors, new_tokenizer)
    else:
        for _ in tensors.read():  # each is gathered by all processes that hold a part of it
            pass


class _Tensors(NamedTuple):
    """The tensors of a model file."""

    shapes: Mapping[str, Shape]
    """The shape of each, by its name."""
    read: Callable[[], Iterator[tuple[str, np.ndarray]]]
    """The function that gives each name and tensor, in the order of names."""


def _tensors(spec: ModelSpec, params: Mapping[str, Any], weight_map: WeightMap) -> _Tensors:
    """The tensors that store `params`; biases that the model of `params` lacks are zero."""
    unstacked = spec._replace(config=replace(spec.config, scan_layers=False))
    shapes = param_shapes(make_model(unstacked, reference))
    leaves: dict[str, Any] = flatten_dict(
        unstack_blocks(jax.tree.map(LazyLeaf, dict(params))), sep="/"
    )

    def read(path: str) -> np.ndarray:
        return leaves[path].read() if path in leaves else np.zeros(shapes[path], np.float32)

    stored = {entry.names[0]: entry.tensor_shape(shapes) for entry in weight_map if entry.names}
    return _Tensors(stored, lambda: to_hf(weight_map, read))


def _config_json(
    family: Family,
    settings: Mapping[str, Any],
    kept: KeptFiles | None,
    tokenizer: Tokenizer | None,
    generation: SearchConfig | SamplingConfig | None,
) -> dict[str, Any]:
    """The content of config.json: the family's `settings`, and the ids of special tokens.

    `tokenizer` is the one that is written. A key that is no setting has the value that is `kept`.
    """
    content: dict[str, Any] = {}
    content |= NO_TOKEN_IDS if kept is None else kept.keys_beside(family)
    content |= settings
    content["torch_dtype"] = "float32"
    if tokenizer is not None:
        content |= token_ids_of(tokenizer)
    if kept is None and isinstance(generation, SearchConfig):
        content["decoder_start_token_id"] = _start_id(content)
    return content


def _start_id(config_json: Mapping[str, Any]) -> int:
    """The id before a translation: BOS, or else padding."""
    for key in ("bos_token_id", "pad_token_id"):
        if config_json[key] is not None:
            return config_json[key]
    return TranslationOptions.bos


def _label_keys(names: Sequence[str]) -> dict[str, Any]:
    """The keys of config.json for the names of classes."""
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _write_folder(
    path: Path,
    files: Mapping[str, Any],
    tensors: _Tensors,
    tokenizer: Tokenizer | None,
) -> None:
    """Writes the folder `path` with the `files` that are not empty, completely or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        with storage.naming(path):
            if tokenizer is not None:
                tokenizer.save(unfinished / "tokenizer.json")
            for name, content in files.items():
                if content:
                    (unfinished / name).write_bytes(_bytes_of(content))
            write_tensors(unfinished / "model.safetensors", tensors.shapes, tensors.read())
            for written in unfinished.iterdir():
                with written.open("rb") as file:
                    storage.flush(file.fileno())
            os.replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _bytes_of(content: bytes | str | dict[str, Any]) -> bytes:
    """The content of a file: bytes as they are, a text in UTF-8, a dict as JSON."""
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _refuse_own_parts(model: Any) -> None:
    """Raises `ConfigError` for a part of the model that no other program has."""
    body = getattr(model, "backbone", model)
    if type(body) not in (DecoderOnly, EncoderOnly, EncoderDecoder, MaskedLanguageModel):
        raise ConfigError(
            f"a {type(body).__name__} may compute something else than the model that it derives "
            "from, so no family has it: train the library's own class"
        )
    known: dict[str, tuple[Any, ...]] = {
        "block": tuple(REMAT.values()),
        "attention_fn": tuple(ATTENTION_FNS.values()),
    }
    for name, values in known.items():
        value = getattr(body, name)
        if not any(value is known_value for known_value in values):
            called = getattr(value, "__name__", repr(value))
            raise ConfigError(
                f"the model has the {name} {called}, which no family has, so the folder would "
                f"compute something else: train without it, or, if it computes what the usual one "
                f"does, give model.clone({name}=...) with that"
            )


def _choose(name: str | None, spec: ModelSpec) -> tuple[Family, ModelSpec, dict[str, Any]]:
    """The family `name`, or the first that supports `spec`; what it stores; its config.json."""
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"family={name!r} is not supported: only {', '.join(FAMILIES)}")
    families = FAMILIES.values() if name is None else (FAMILIES[name],)
    refused: dict[str, str] = {}
    for stored in (spec, _with_biases(spec)):
        for family in families:
            try:
                return family, stored, write_config(family, stored)
            except ConfigError as error:
                refused.setdefault(family.model_type, str(error))
    of_kind = [x.model_type for x in families if spec.kind in x.architectures.values()]
    reasons = (f"{name}: {refused[name]}" for name in of_kind or refused)
    raise ConfigError(f"no family supports the model. {'. '.join(reasons)}")


def _with_biases(spec: ModelSpec) -> ModelSpec:
    """The spec of the same model with biases of zero; RMSNorm has none."""
    config = spec.config
    if config.norm.kind == "layer" and not config.use_bias:
        config = with_fields(config, {"use_bias": True, "attention.qkv_bias": None})
    return spec._replace(config=config)
