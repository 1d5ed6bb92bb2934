"""LoRA adapters as `peft` writes them: what they make of the tensors of a published model.

A folder has adapter_config.json and adapter_model.safetensors. With them an adapter of the matrix W
[out, in] is A [r, in] and B [out, r], and the model computes with W + scale * B A (Hu et al. 2022).
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.pretrained.family import Family, canonical_names
from jaxformer.pretrained.hf_folder import Tensors, locate
from jaxformer.pretrained.model_specs import Kind
from jaxformer.pretrained.weight_map import Shape, WeightMap
from jaxformer.storage import read_json, to_local_path

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME_PREFIX = "base_model.model."
"""The beginning of all names of tensors in an adapter's file."""

_IGNORED_KEYS = frozenset(
    """peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora
    modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern
    megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size
    ensure_weight_tying runtime_config""".split()
)
"""Keys that are read, or that only say how the adapter was made."""

_SAME_BASE = ("gaussian", "eva", "orthogonal")
"""Names of initialisations that leave the base as it was."""

_KINDS: dict[str, tuple[Kind, ...]] = {
    "CAUSAL_LM": ("decoder", "bare_decoder"),
    "SEQ_2_SEQ_LM": ("encoder_decoder",),
    "SEQ_CLS": ("encoder_classifier", "decoder_classifier"),
    "TOKEN_CLS": ("token_classifier",),
    "QUESTION_ANS": ("spans",),
}
"""The kinds of models that an adapter with a `task_type` belongs to."""

_PART = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")


class _Matrices(NamedTuple):
    """The names of an adapter's two matrices in its file."""

    a: str
    b: str
    scale: float


class Adapter:
    """The adapter in a local folder; of its tensors only the headers are read at first.

    Attributes: `folder`; `config`, the content of adapter_config.json; `base`, its
    base_model_name_or_path, "" without one. Raises `ConfigError`, naming the key, for an adapter
    that cannot be computed, and `DataError` for damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = read_json(folder / ADAPTER_CONFIG)
        self.base = str(self.config.get("base_model_name_or_path") or "")
        _check_config(self.config, folder / ADAPTER_CONFIG)
        self._tensors = Tensors(folder, ADAPTER_WEIGHTS)
        self._parts: dict[str, dict[str, str]] = {}
        self._whole: dict[str, str] = {}
        for stored in self._tensors.shapes:
            name = stored.removeprefix(NAME_PREFIX).replace(".base_layer.", ".")
            part = _PART.fullmatch(name)
            if part is not None:
                self._parts.setdefault(f"{part[1]}.weight", {})[part[2]] = stored
            elif "lora_" in name or name == stored:
                raise DataError(
                    f"{folder / ADAPTER_WEIGHTS}: {stored} is no part of a LoRA adapter"
                )
            else:
                self._whole[name] = stored
        for name, parts in self._parts.items():
            if parts.keys() != {"A", "B"}:
                raise DataError(
                    f"{folder / ADAPTER_WEIGHTS}: {name} has only the matrix {''.join(parts)} of "
                    "A and B"
                )

    def on(self, tensors: Tensors, family: Family) -> "AdaptedTensors":
        """`tensors` of a model of `family` with the adapter's product added."""
        return AdaptedTensors(self, tensors, family)

    def matrices(self, family: Family) -> dict[str, _Matrices]:
        """The name of each adapted tensor in weight maps, and its two matrices."""
        matrices = {}
        for name, stored in canonical_names(family, self._parts).items():
            a, b = self._parts[stored]["A"], self._parts[stored]["B"]
            matrices[name] = _Matrices(a, b, self._scale(stored, a))
        return matrices

    def whole_tensors(self, family: Family) -> dict[str, str]:
        """The name in weight maps of each tensor that replaces the base's, and its own."""
        names = canonical_names(family, self._whole)
        return {name: self._whole[stored] for name, stored in names.items()}

    def shape(self, stored: str) -> Shape:
        """The shape of a tensor of the adapter's file."""
        return self._tensors.shapes[stored]

    def read(self, stored: str) -> np.ndarray:
        """A tensor of the adapter's file in float32."""
        return self._tensors.read(stored).astype(np.float32, copy=False)

    def kind_on(self, family: Family, kind: Kind, architectures: Any) -> Kind:
        """The kind of the model that the adapter makes of a base of `kind`.

        It is another one where the adapter has a new head, as of a classifier on a language model.
        Raises `ConfigError` where the adapter belongs to a model with a head that neither has.
        """
        task = str(self.config.get("task_type") or "")
        kinds = _KINDS.get(task)
        if kinds is None or kind in kinds:
            return kind
        possible: list[Kind] = [each for each in family.architectures.values() if each in kinds]
        new = [name for name in self.whole_tensors(family) if name.startswith(family.head_prefixes)]
        if possible and new:
            return possible[0]
        raise ConfigError(
            f"the adapter's task_type is {task}, but architectures={architectures} has no such "
            "head, nor has the adapter: save the base in its class with the head"
        )

    def _scale(self, name: str, a: str) -> float:
        rank = self.shape(a)[0]
        module = name.removesuffix(".weight")
        alpha = self.config.get("lora_alpha", 8)
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank


class AdaptedTensors:
    """The tensors of a published model with an adapter: `shapes` and `read` as `Tensors` has them.

    Raises `DataError` for an adapter of a tensor that the model lacks, or that has another shape.
    """

    def __init__(self, adapter: Adapter, tensors: Tensors, family: Family) -> None:
        self._adapter, self._tensors = adapter, tensors
        self._inputs_first = re.compile(family.inputs_first)
        self.shapes: dict[str, Shape] = dict(tensors.shapes)
        """The shape of each tensor, by its name in the model's files."""
        self.changed: set[str] = set()
        """The tensors that the adapter changes, by their names in weight maps."""
        self._replacements: dict[str, str] = {}
        """The name in the model's files -> the adapter's tensor that takes its place."""
        self._matrices: dict[str, _Matrices] = {}
        """The name in the model's files -> the adapter's matrices for it."""
        stored_names = canonical_names(family, tensors.shapes)
        for name, replacement in adapter.whole_tensors(family).items():
            stored = stored_names.setdefault(name, name)
            self.changed.add(name)
            self._replacements[stored] = replacement
            self.shapes[stored] = adapter.shape(replacement)
        self._names: dict[str, str] = {stored: name for name, stored in stored_names.items()}
        """The name in the model's files -> the name in weight maps."""
        for name, matrices in adapter.matrices(family).items():
            self.changed.add(name)
            if name not in stored_names:
                raise DataError(
                    f"the adapter in {adapter.folder} is of {name}, which the base lacks: give the "
                    "base that it was trained on"
                )
            self._matrices[stored_names[name]] = matrices
            self._check_shape(stored_names[name], matrices)

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` with the adapter's product; in float32 where the adapter changes it."""
        if name in self._replacements:
            tensor = self._adapter.read(self._replacements[name])
        else:
            tensor = self._tensors.read(name)
        matrices = self._matrices.get(name)
        if matrices is None:
            return tensor
        product = self._adapter.read(matrices.b) @ self._adapter.read(matrices.a)
        if self._is_inputs_first(name, matrices):
            product = product.T
        return tensor.astype(np.float32, copy=False) + np.float32(matrices.scale) * product

    def check_copies(self, weight_map: WeightMap) -> None:
        """Raises `ConfigError` where tensors that are one parameter would differ."""
        for entry in weight_map:
            changed = [name for name in entry.names if name in self.changed]
            has_matrices = any(self._names.get(stored) in entry.names for stored in self._matrices)
            would_differ = has_matrices or len(changed) < len(entry.names)
            if len(entry.names) > 1 and changed and would_differ:
                raise ConfigError(
                    f"the adapter changes {changed[0]}, but {' and '.join(entry.names)} are one "
                    "parameter of this model (tie_word_embeddings), and would differ: save the "
                    "base untied, or train an adapter without it"
                )

    def _is_inputs_first(self, stored: str, matrices: _Matrices) -> bool:
        """Whether the tensor is [in, out]: torch's tables, and GPT-2's layers."""
        is_table = ".lora_embedding_" in matrices.a
        return is_table or self._inputs_first.search(self._names[stored]) is not None

    def _check_shape(self, stored: str, matrices: _Matrices) -> None:
        rows, columns = self._adapter.shape(matrices.b)[0], self._adapter.shape(matrices.a)[1]
        shape = (rows, columns)
        if self._is_inputs_first(stored, matrices):
            shape = (columns, rows)
        if self.shapes[stored] != shape:
            raise DataError(
                f"the adapter's product for {stored} is {list(shape)}, but the tensor is "
                f"{list(self.shapes[stored])}: give the base that it was trained on"
            )


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    """Raises `ConfigError`, naming the key, for an adapter that cannot be computed."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{path}: peft_type={config.get('peft_type')!r} is not supported, only LORA: merge the "
            "adapter with peft (model.merge_and_unload()) and save the whole model"
        )
    init = config.get("init_lora_weights")
    changes_base = isinstance(init, str) and init not in _SAME_BASE
    wrong = {key: value for key, value in config.items() if value and key not in _IGNORED_KEYS}
    if changes_base:
        wrong["init_lora_weights"] = init
    if wrong:
        key, value = min(wrong.items())
        raise ConfigError(
            f"{path}: {key}={shorten(repr(value))} is not supported: merge the adapter with peft "
            "(model.merge_and_unload()) and save the whole model"
        )


def locate_model(name: str | os.PathLike[str]) -> Path:
    """The folder with config.json of the model `name`, as `locate`; of an adapter its base."""
    folder = locate(name)
    if (folder / ADAPTER_CONFIG).is_file():
        return base_folder(Adapter(to_local_path(folder)))
    return folder


def base_folder(adapter: Adapter) -> Path:
    """The folder with the config.json of the model that `adapter` belongs to.

    It is the adapter's own, or the local folder that it names, which stands beside it or where the
    program runs. Raises `ConfigError` where there is none: nothing is downloaded.
    """
    if (adapter.folder / "config.json").is_file():
        return adapter.folder
    for folder in _places(adapter):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"{adapter.folder} is an adapter of {adapter.base!r}, which is no folder here: put the "
        f"base's files beside {ADAPTER_CONFIG}, or write the path of its folder there as "
        "base_model_name_or_path"
    )


def _places(adapter: Adapter) -> Iterable[Path]:
    if adapter.base:
        yield to_local_path(Path(adapter.base))
        yield adapter.folder / adapter.base
