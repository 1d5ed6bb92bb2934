"""A model in a folder as `transformers` writes it: model, parameters, tokenizers and settings."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.config import TransformerConfig
from jaxformer.decoding import CompletionOptions, SamplingConfig, SearchConfig, TranslationOptions
from jaxformer.distributed import Strategy
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, Model
from jaxformer.ops.attention import AttentionFn, auto_attention
from jaxformer.pretrained import families
from jaxformer.pretrained.config_keys import parse_number
from jaxformer.pretrained.family import Family, canonical_names, read_config
from jaxformer.pretrained.generation_config import load_generation_config, load_sampling_config
from jaxformer.pretrained.hf_folder import Tensors
from jaxformer.pretrained.loaded import Setting, Unsupported
from jaxformer.pretrained.model_specs import Kind, ModelSpec, make_model, param_shapes
from jaxformer.pretrained.peft_adapters import AdaptedTensors, Adapter
from jaxformer.pretrained.sentence_modules import SentenceOptions, load_sentence_options
from jaxformer.pretrained.vocabulary_sizes import check_vocabularies
from jaxformer.pretrained.weight_map import Shape, WeightMap, check_names, check_shapes, to_jax
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import Tokenizer


class _Layout(NamedTuple):
    """The architecture of a folder's model, and where its weights are."""

    spec: ModelSpec
    weight_map: WeightMap
    names: dict[str, str]
    """The weight map's name of each tensor -> the folder's."""


@dataclass(frozen=True, eq=False)
class PublishedModel:
    """The published model in a local folder.

    Each part can be read alone. The headers of the weights are read once, when a part needs them.
    All parts raise `ConfigError`, naming the key and its value, for what is not supported, and
    `DataError` for files that are damaged or do not fit together.
    """

    folder: Path
    """The folder, on this machine."""
    config: dict[str, Any]
    """The content of its config.json."""
    adapter: Adapter | None = None
    """The LoRA adapter whose product is added to the weights; its folder may be another one."""

    def model(
        self,
        attention_fn: AttentionFn = auto_attention,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> nn.Module:
        """The model of the class that `architectures` in config.json names."""
        with self._naming_the_folder():
            spec = self._layout.spec
            spec = spec._replace(config=replace(spec.config, dtype=dtype))
            return make_model(spec, attention_fn)

    def params(self, model: nn.Module, strategy: Strategy | None = None) -> dict[str, Any]:
        """The parameters of `model`: float32 arrays of numpy.

        With a `strategy` they are JAX arrays of the stored type on its devices. No tensor is read
        before all names and shapes fit.
        """
        with self._naming_the_folder():
            _, weight_map, names = self._layout
            check_names(weight_map, names)
            shapes = param_shapes(model)
            stored = {name: self._tensors.shapes[names[name]] for name in names}
            check_shapes(weight_map, shapes, stored)
            if isinstance(self._tensors, AdaptedTensors):
                self._tensors.check_copies(weight_map)
            if strategy is None:
                leaves = to_jax(weight_map, shapes, names, self._read_float32)
            else:
                put = _place_on(strategy.for_model(model), shapes)
                leaves = to_jax(weight_map, shapes, names, self._read_stored, put)
            return unflatten_dict(leaves, sep="/")

    def tokenizers(self) -> tuple[Tokenizer | None, Tokenizer | None]:
        """The tokenizers of source and target; None for a folder without their files.

        They are one object, except in Marian's folders. The tokenizer beside an adapter counts more
        than its base's. Raises `ConfigError` for a tokenizer with more ids than the model.
        """
        folder = self.tokenizer_folder
        if folder is None:
            return None, None
        source, target = tokenizers.load_pair(folder)
        with self._naming_the_folder():
            sizes = self._layout.spec.config
        check_vocabularies(folder, source, target, sizes)
        return source, target

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder with the tokenizer's files: the adapter's, else the model's; None: neither."""
        if self.adapter is not None and tokenizers.has_tokenizer(self.adapter.folder):
            return self.adapter.folder
        return self.folder if tokenizers.has_tokenizer(self.folder) else None

    def settings(self) -> tuple[Setting | Unsupported, ...]:
        """The folder's defaults for the pipelines that take its model."""
        model, max_len = self.model(), self._layout.spec.config.max_len
        settings: list[Setting | Unsupported] = []
        if isinstance(model, EncoderDecoder):
            try:
                settings += load_generation_config(self.folder, self.config)
            except (ConfigError, DataError) as error:
                settings.append(Unsupported((SearchConfig, TranslationOptions), error))
        elif isinstance(model, Model):
            try:
                settings.append(load_sentence_options(self.folder, max_len))
            except (ConfigError, DataError) as error:
                settings.append(Unsupported((SentenceOptions,), error))
        if isinstance(model, DecoderOnly):
            try:
                settings += load_sampling_config(self.folder, max_len, self.config)
            except (ConfigError, DataError) as error:
                settings.append(Unsupported((SamplingConfig, CompletionOptions), error))
        return tuple(settings)

    def has_tensor(self, name: str) -> bool:
        """Whether the folder has the tensor with this name in weight maps."""
        return name in self._layout.names

    def read_tensor(self, name: str) -> np.ndarray:
        """The tensor with this name in weight maps, in float32."""
        return self._read_float32(name)

    @cached_property
    def _tensors(self) -> Tensors | AdaptedTensors:
        tensors = Tensors(self.folder)
        if self.adapter is None:
            return tensors
        family, _ = families.find(self.config)
        return self.adapter.on(tensors, family)

    @cached_property
    def _layout(self) -> _Layout:
        family, base_kind = families.find(self.config)
        kind = base_kind
        if self.adapter is not None:
            kind = self.adapter.kind_on(family, base_kind, self.config.get("architectures"))
        spec, names = _read_spec(family, kind, self.config, self._tensors)
        weight_map = family.weight_map(spec, self.config)
        if kind != base_kind:
            names = _without_other_heads(names, weight_map, family)
        return _Layout(spec, weight_map, names)

    def _read_stored(self, name: str) -> np.ndarray:
        return self._tensors.read(self._layout.names[name])

    def _read_float32(self, name: str) -> np.ndarray:
        return self._read_stored(name).astype(np.float32, copy=False)

    @contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        """Errors within it begin with the file or the folder that they are about."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.folder / 'config.json'}: {error}") from error
        except DataError as error:
            raise DataError(f"{self.folder}: {error}") from error


def _read_spec(
    family: Family, kind: Kind, hf: dict[str, Any], tensors: Tensors | AdaptedTensors
) -> tuple[ModelSpec, dict[str, str]]:
    """The spec, and the weight map's name -> the folder's of each tensor."""
    config = read_config(family, hf)
    _check_size(config, len(tensors.shapes))
    names = canonical_names(family, tensors.shapes)
    unused = family.unused_tensors.get(kind, r"(?!)")
    names = {name: stored for name, stored in names.items() if not re.search(unused, name)}
    shapes = {name: tensors.shapes[stored] for name, stored in names.items()}
    spec = ModelSpec(kind, config, _count_classes(family, shapes)).completed()
    return family.adapt(spec, names), names


def _check_size(config: TransformerConfig, num_tensors: int) -> None:
    """Raises `ConfigError` for more layers than tensors, before anything of this size is built."""
    layers = config.num_encoder_layers + config.num_decoder_layers
    asked = f"{layers:,} layers"
    networks = layers
    experts = config.feed_forward.experts
    if experts is not None:
        asked = f"{layers:,} layers of {experts.num_experts:,} experts"
        networks = layers * experts.num_experts
    if networks > num_tensors:
        raise ConfigError(
            f"config.json asks for {asked}, but the weights have {num_tensors} tensors"
        )


def _count_classes(family: Family, shapes: Mapping[str, Shape]) -> int:
    """The number of classes by the first tensor of a classifier that is there; 0 without one."""
    for name in family.classifier_tensors:
        if name in shapes:
            return parse_number(name, shapes[name][0], int) if shapes[name] else 0
    return 0


def _without_other_heads(
    names: Mapping[str, str], weight_map: WeightMap, family: Family
) -> dict[str, str]:
    """`names` without the tensors of heads that `weight_map` lacks."""
    used = {name for entry in weight_map for name in entry.names}
    return {
        name: stored
        for name, stored in names.items()
        if name in used or not name.startswith(family.head_prefixes)
    }


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
