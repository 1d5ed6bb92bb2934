"""Models of ours as folders that `transformers` loads."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn

from jaxformer import extras
from jaxformer.config import ConfigError
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import Family, write_config
from jaxformer.pretrained.models import flat, shapes_of, subject_of
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.table import to_theirs
from jaxformer.tokenizers import Tokenizer

_ROLES = ("pad", "bos", "eos")
_CLASSIFIERS = ("encoder_classifier", "decoder_classifier")


def save_pretrained(
    folder: str | os.PathLike[str],
    model: nn.Module,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    *,
    family: str | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> None:
    """Writes `folder` as `transformers` loads it: config.json, model.safetensors, tokenizer.json.

    `family` is a `model_type` such as "gpt2"; None takes the first that can say the model. The ids
    of special tokens in config.json are the tokenizer's, and `token_ids` (such as
    {"decoder_start_token_id": 0}) over them. The folder appears whole or not at all.

    Raises `ConfigError` for a model that the family cannot say, naming the fields, for parameters
    that are not the model's, and for a folder that holds something already.
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is there already: give the name of a new folder")
    subject = subject_of(model)
    leaves = {name: np.asarray(leaf, np.float32) for name, leaf in flat(dict(params)).items()}
    _check_params(leaves, shapes_of(model))
    chosen, theirs = _choose(family, subject)
    tensors = to_theirs(chosen.table(subject, theirs), leaves)
    theirs |= {"torch_dtype": "float32", **_token_ids(tokenizer), **(token_ids or {})}
    if subject.kind in _CLASSIFIERS:
        theirs |= _labels(subject.classes)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        _write(unfinished, theirs, tensors, tokenizer)
        os.replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _choose(name: str | None, subject: Subject) -> tuple[Family, dict[str, Any]]:
    """The family `name`, or the first that can say `subject`, and its config.json."""
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"family={name!r} is not known: only {', '.join(FAMILIES)}")
    refused = []
    for family in FAMILIES.values() if name is None else (FAMILIES[name],):
        try:
            return family, write_config(family, subject)
        except ConfigError as error:
            refused.append(f"{family.model_type}: {error}")
    raise ConfigError(f"the model cannot be said as others say it. {'. '.join(refused)}")


def _check_params(leaves: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]) -> None:
    given = {path: leaf.shape for path, leaf in leaves.items()}
    for path in sorted(given.keys() | shapes.keys()):
        if given.get(path) != shapes.get(path):
            raise ConfigError(
                f"{path} is {given.get(path, 'absent')} in params, but {shapes.get(path, 'absent')}"
                " in the model: give the params of this model"
            )


def _token_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The ids of special tokens; null where there is none, lest the family's default count."""
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
    theirs: dict[str, Any],
    tensors: dict[str, np.ndarray],
    tokenizer: Tokenizer | None,
) -> None:
    """Writes the files, each on disk when this returns."""
    library = extras.load("safetensors.numpy")
    _write_json(folder / "config.json", theirs)
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
