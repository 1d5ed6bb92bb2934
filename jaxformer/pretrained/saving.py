"""Models of this package as folders that `transformers` loads."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError
from jaxformer.nn.stacking import unstack_blocks
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import Family, read_config, write_config
from jaxformer.pretrained.model_specs import ModelSpec, check_params, spec_of
from jaxformer.pretrained.weight_map import to_hf
from jaxformer.text.tokenizers import Tokenizer

_ROLES = ("pad", "bos", "eos")
_CLASSIFIERS = ("encoder_classifier", "decoder_classifier", "token_classifier")


def save_pretrained(
    folder: str | os.PathLike[str],
    model: nn.Module,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    *,
    family: str | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> None:
    """Writes a folder that `transformers` loads: config.json, model.safetensors, tokenizer.json.

    `family` is a `model_type` such as "gpt2"; None means the first one that supports the model.
    The ids of special tokens in config.json are those of the tokenizer; `token_ids`, such as
    {"decoder_start_token_id": 0}, replaces them. The folder is written completely or not at all.

    Raises `ConfigError` for a model that the family does not support, naming the fields, for
    parameters that are not the model's, and for a folder that is not empty.

    >>> from dataclasses import replace
    >>> from pathlib import Path
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jaxformer as jf
    >>> small = {"vocab_size": 11, "d_model": 8, "d_ff": 32, "num_heads": 2}
    >>> model = jf.DecoderOnly(replace(jf.GPT2, **small, num_decoder_layers=1))
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> jf.save_pretrained("model", model, params, family="gpt2")
    >>> sorted(path.name for path in Path("model").iterdir())
    ['config.json', 'model.safetensors']
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is there already: give the name of a new folder")
    spec = spec_of(model)
    check_params(model, params)
    flat = flatten_dict(unstack_blocks(params), sep="/")
    leaves = {path: np.asarray(leaf, np.float32) for path, leaf in flat.items()}
    chosen, hf = _choose(family, spec)
    tensors = to_hf(chosen.weight_map(spec, hf), leaves)
    hf = {"torch_dtype": "float32", **_token_ids(None), **hf}
    hf |= {} if tokenizer is None else _token_ids(tokenizer)
    hf |= token_ids or {}
    read_config(chosen, hf)  # refuses ids that the family does not support
    if spec.kind in _CLASSIFIERS:
        hf |= _labels(spec.classes)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        _write(unfinished, hf, tensors, tokenizer)
        os.replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _choose(name: str | None, spec: ModelSpec) -> tuple[Family, dict[str, Any]]:
    """The family `name`, or the first that supports `spec`, and its config.json."""
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"family={name!r} is not supported: only {', '.join(FAMILIES)}")
    refused = []
    for family in FAMILIES.values() if name is None else (FAMILIES[name],):
        try:
            return family, write_config(family, spec)
        except ConfigError as error:
            refused.append(f"{family.model_type}: {error}")
    raise ConfigError(f"no family supports the model. {'. '.join(refused)}")


def _token_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The ids of special tokens; null for a role without a token, so that no default is used."""
    special = None if tokenizer is None else tokenizer.special
    return {f"{role}_token_id": getattr(special, role, None) for role in _ROLES}


def _labels(classes: int) -> dict[str, Any]:
    names = [f"LABEL_{number}" for number in range(classes)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _write(
    folder: Path,
    hf: dict[str, Any],
    tensors: dict[str, np.ndarray],
    tokenizer: Tokenizer | None,
) -> None:
    """Writes the files, each on disk when this returns."""
    library = optional_dependencies.load("safetensors.numpy")
    _write_json(folder / "config.json", hf)
    library.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, str]:
    special = tokenizer.special._asdict()
    names = {
        f"{role}_token": tokenizer.token(index)
        for role, index in special.items()
        if index is not None
    }
    return {"tokenizer_class": "PreTrainedTokenizerFast", **names}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
