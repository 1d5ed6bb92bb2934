"""Models of this package as folders that `transformers` loads."""

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxformer import optional_dependencies, storage
from jaxformer.config import with_fields
from jaxformer.decoding import SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.distributed.processes import agreed, to_numpy
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.nn.remat import REMAT
from jaxformer.nn.stacked_blocks import unstack_blocks
from jaxformer.ops.attention import ATTENTION_FNS, reference
from jaxformer.pretrained.families import FAMILIES
from jaxformer.pretrained.family import Family, read_config, write_config
from jaxformer.pretrained.generation_config import generation_json
from jaxformer.pretrained.model_specs import (
    ModelSpec,
    check_params,
    make_model,
    param_shapes,
    spec_of,
)
from jaxformer.pretrained.peft_adapters import locate_model
from jaxformer.pretrained.weight_map import Shape, to_hf
from jaxformer.storage import read_json, to_local_path
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import Tokenizer

_JSON: dict[str, Any] = {"indent": 2, "sort_keys": True}
_ROLES = ("pad", "bos", "eos")
_PIECE = 2**20  # bytes of a tensor that are written at once
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
    kept = _Kept(like, tokenizer)
    chosen, spec, hf = _choose(family or kept.config.get("model_type"), spec)
    unstacked = spec._replace(config=replace(spec.config, scan_layers=False))
    shapes = param_shapes(make_model(unstacked, reference))
    leaves: dict[str, Any] = flatten_dict(
        unstack_blocks(jax.tree.map(_Leaf, dict(params))), sep="/"
    )
    weight_map = chosen.weight_map(spec, hf)
    sizes = {entry.names[0]: entry.tensor_shape(shapes) for entry in weight_map if entry.names}

    def read(path: str) -> np.ndarray:
        return leaves[path].read() if path in leaves else np.zeros(shapes[path], np.float32)

    hf = _with_ids(hf, tokenizer, generation) if like is None else kept.with_keys(chosen, hf)
    if tokenizer is not None and not kept.has_tokenizer:
        hf |= _token_ids(tokenizer)
    hf |= token_ids or {}
    read_config(chosen, hf)  # refuses ids that the family does not support
    if spec.kind in _CLASSIFIERS:
        hf |= _labels(labels or [f"LABEL_{number}" for number in range(spec.classes)])
    files: dict[str, Any] = {"config.json": hf, "README.md": card}
    if generation is not None:
        ids = {key: value for key, value in hf.items() if key.endswith("_token_id")}
        files["generation_config.json"] = generation_json(generation, spec.config.max_len, ids)
    if kept.has_tokenizer:
        tokenizer = None
    if tokenizer is not None:
        files["tokenizer_config.json"] = _tokenizer_config(tokenizer, spec)
        tokenizer = _with_template(tokenizer, spec)
    tensors = to_hf(weight_map, read)
    if jax.process_index() == 0:
        _write_folder(path, {**kept.files, **files}, sizes, tensors, tokenizer)
    else:
        for _ in tensors:  # each is gathered by all processes that hold a part of it
            pass


# What a folder has beside its weights and config.json, and what of that is the tokenizer's.
_TOKENIZER_FILES = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|target_vocab)\.json|"
    r"(merges|vocab)\.txt|chat_template\.(jinja|json)|.*\.(spm|model)"
)
_KEPT_FILES = ("generation_config.json", "modules.json")


class _Kept:
    """What a folder has that its model was trained from: nothing without a folder.

    Attributes: `config`, its config.json; `files`, what is copied; `has_tokenizer`, whether these
    are also the tokenizer's.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, tokenizer: Tokenizer | None) -> None:
        self.config: dict[str, Any] = {}
        self.files: dict[str, Any] = {}
        self.has_tokenizer = False
        if folder is None:
            return
        source = to_local_path(locate_model(folder))
        self.config = read_json(source / "config.json")
        if tokenizers.has_tokenizer(source):
            same = tokenizer is None or tokenizers.load(source).fingerprint == tokenizer.fingerprint
            self.has_tokenizer = same
        for path in source.iterdir():
            of_tokenizer = self.has_tokenizer and _TOKENIZER_FILES.fullmatch(path.name)
            if path.is_file() and (of_tokenizer or path.name in _KEPT_FILES):
                self.files[path.name] = path.read_bytes()

    def with_keys(self, family: Family, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json `hf`, with what the folder's says beside the family's own settings."""
        known = {name for key in family.keys for name in key.names} | {*family.aliases}
        known |= {"dtype", "num_labels", "id2label", "label2id", "problem_type"}
        unread = {key: value for key, value in self.config.items() if key not in known}
        return {**unread, **hf, "torch_dtype": "float32"}


class _Leaf:
    """A parameter, or one layer of it, that comes to the host when it is read."""

    def __init__(self, stored: Any, index: tuple[int, ...] = ()) -> None:
        self._stored, self._index = stored, index

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, layer: int) -> "_Leaf":
        return _Leaf(self._stored, (layer,))

    def read(self) -> np.ndarray:
        leaf = self._stored[self._index] if self._index else self._stored
        if not isinstance(leaf, jax.Array):
            return np.asarray(leaf, np.float32)
        if not leaf.is_fully_addressable:
            return np.asarray(to_numpy(leaf), np.float32)
        whole = np.empty(leaf.shape, np.float32)
        for shard in leaf.addressable_shards:
            part = whole[shard.index]
            for rows in _pieces(part):  # JAX's array keeps a copy of what numpy reads of it
                part[rows] = shard.data[rows]
        return whole


def _pieces(array: np.ndarray) -> Iterator[slice]:
    """Slices of the first axis that are about `_PIECE` bytes each."""
    rows = max(_PIECE * len(array) // max(array.nbytes, 1), 1)
    return (slice(first, first + rows) for first in range(0, len(array), rows))


def _write_folder(
    path: Path,
    files: Mapping[str, Any],
    sizes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, np.ndarray]],
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
                if isinstance(content, bytes):
                    (unfinished / name).write_bytes(content)
                elif content:
                    is_text = isinstance(content, str)
                    text = content if is_text else json.dumps(content, **_JSON) + "\n"
                    (unfinished / name).write_text(text, encoding="utf-8")
            _write_tensors(unfinished / "model.safetensors", sizes, tensors)
            for written in unfinished.iterdir():
                with written.open("rb") as file:
                    storage.flush(file.fileno())
            os.replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


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


def _with_ids(
    hf: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    generation: SearchConfig | SamplingConfig | None,
) -> dict[str, Any]:
    """The config.json `hf` with the ids of special tokens."""
    with_ids = {"torch_dtype": "float32", **_token_ids(None), **hf}
    if tokenizer is not None:
        with_ids |= _token_ids(tokenizer)
    if isinstance(generation, SearchConfig):  # without BOS, padding starts each text
        start = (with_ids["bos_token_id"], with_ids["pad_token_id"], TranslationOptions.bos)
        with_ids["decoder_start_token_id"] = next(x for x in start if x is not None)
    return with_ids


def _token_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """The ids of special tokens; null for a role without a token, so that no default is used."""
    special = None if tokenizer is None else tokenizer.special
    return {f"{role}_token_id": getattr(special, role, None) for role in _ROLES}


def _labels(names: Sequence[str]) -> dict[str, Any]:
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _write_tensors(
    path: Path, sizes: Mapping[str, Shape], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes `tensors` in float32 one by one; they come in the order of their names.

    The file is, to the byte, what the library `safetensors` writes, which takes all at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(sizes):
        start, end = end, end + 4 * math.prod(sizes[name])
        header[name] = {"dtype": "F32", "shape": sizes[name], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            for rows in _pieces(tensor):  # a transposed one is copied in pieces
                file.write(np.ascontiguousarray(tensor[rows]).data)
            del tensor  # before the next one is read


def _with_template(tokenizer: Tokenizer, spec: ModelSpec) -> Tokenizer:
    """`tokenizer` that, in other programs, adds the special tokens that the model reads.

    They stand around each text. `encode` here gives the same ids as before.
    """
    decoder = spec.kind in ("decoder", "bare_decoder", "decoder_classifier")
    if decoder or tokenizer.library_tokenizer.post_processor is not None:
        return tokenizer
    library = optional_dependencies.load("tokenizers")
    special = tokenizer.special
    changed = tokenizer.to_library()
    bos = None if spec.kind == "encoder_decoder" else special.bos
    first, last = ([] if i is None else [tokenizer.token(i)] for i in (bos, special.eos))
    changed.post_processor = library.processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, "$B:1", *(f"{name}:1" for name in last)],
        special_tokens=[(name, tokenizer.id_of(name)) for name in dict.fromkeys((*first, *last))],
    )
    return Tokenizer(changed)


def _tokenizer_config(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, Any]:
    special = tokenizer.special._asdict()
    names = {
        f"{role}_token": tokenizer.token(index)
        for role, index in special.items()
        if index is not None
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.config.max_len,
        "clean_up_tokenization_spaces": False,
        # Otherwise the names of special tokens in a text would be read, as here they are not.
        "split_special_tokens": special["mask"] is None and tokenizer.roles is None,
        **names,
    }
