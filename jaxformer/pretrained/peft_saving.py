"""LoRA adapters of this package as folders that `peft` loads."""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxformer import optional_dependencies, storage
from jaxformer.errors import ConfigError
from jaxformer.nn.stacked_blocks import unstack_blocks
from jaxformer.pretrained import families
from jaxformer.pretrained.family import Family
from jaxformer.pretrained.model_specs import Kind, param_shapes, spec_of
from jaxformer.pretrained.peft_adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NAME_PREFIX
from jaxformer.pretrained.published_model import PublishedModel
from jaxformer.pretrained.weight_map import Entry, Shape, check_zero, entry_params, entry_tensor
from jaxformer.records import write_json
from jaxformer.storage import to_local_path
from jaxformer.training.lora import Adapter, adapters_of, without_adapters

_TASKS: dict[Kind, str] = {
    "decoder": "CAUSAL_LM",
    "encoder": "FEATURE_EXTRACTION",
    "encoder_decoder": "SEQ_2_SEQ_LM",
    "encoder_classifier": "SEQ_CLS",
    "decoder_classifier": "SEQ_CLS",
    "token_classifier": "TOKEN_CLS",
    "spans": "QUESTION_ANS",
}
"""The `task_type` of each kind of model that has one."""

_ROUNDING = 1e-5
"""The largest difference of a product in the other layout, relative to its largest number."""


class _Written(NamedTuple):
    """An adapter in the layout of peft."""

    module: str
    tensors: dict[str, np.ndarray]
    rank: int
    alpha: float


def save_adapter(
    folder: str | os.PathLike[str],
    model: nn.Module,
    params: Mapping[str, Any],
    base: PublishedModel,
) -> None:
    """Writes the adapters in `params` into the new folder `folder`, as `peft` loads them.

    `params` are of `model` with adapters (see `add_adapters`), trained from the weights of `base`,
    which is read to compare: a layer with other weights, such as a new head, is written
    whole, in `modules_to_save`. Raises `ConfigError` for parameters without adapters, for a model
    of another family, and for an adapter or a layer that the layout of peft cannot hold.

    >>> from dataclasses import replace
    >>> small = {"vocab_size": 11, "d_model": 8, "d_ff": 32, "num_heads": 2}
    >>> model = jf.DecoderOnly(replace(jf.GPT2, **small, num_decoder_layers=1))
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> jf.save_pretrained("model", model, params)
    >>> options = {"rank": 2, "alpha": 4.0, "targets": "up/kernel"}
    >>> axes = jf.parameter_axes(model)
    >>> params = jf.add_adapters(params, jax.random.key(1), axes=axes, **options)
    >>> save_adapter("adapter", model, params, jf.open_folder("model"))
    >>> sorted(path.name for path in Path("adapter").iterdir())
    ['adapter_config.json', 'adapter_model.safetensors']
    """
    path = to_local_path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is there already: give the name of a new folder")
    arrays = unstack_blocks(jax.tree.map(np.asarray, nn.unbox(dict(params))))
    leaves: dict[str, Any] = flatten_dict(without_adapters(arrays), sep="/")
    adapters = adapters_of(arrays)
    if not adapters:
        raise ConfigError(
            "the parameters have no adapters: give the ones that a training with lora_rank made, "
            "not merged"
        )
    family, _ = families.find(base.config)
    spec, shapes = spec_of(model), param_shapes(model)
    weight_map = family.weight_map(spec, base.config)
    written: list[_Written] = []
    changed: set[str] = set()
    for entry in weight_map:
        adapters_of_entry = {path: adapters[path] for path in entry.paths if path in adapters}
        if adapters_of_entry:
            written.append(_write(entry, adapters_of_entry, shapes, family))
        if _is_changed(entry, leaves, shapes, base):
            changed.add(_module_of(entry))
    in_both = sorted(changed & {adapter.module for adapter in written})
    if in_both:
        raise ConfigError(
            f"{in_both[0]} has an adapter and other weights than {base.folder}, which peft "
            "cannot hold in one layer: export the whole model"
        )
    tensors = {name: array for adapter in written for name, array in adapter.tensors.items()}
    for entry in weight_map:
        if entry.names and _module_of(entry) in changed:
            tensors[entry.names[0]] = entry_tensor(entry, leaves.__getitem__)
    above = ""
    if spec.kind == "encoder":  # the class of a model without a head has no name above its layers
        above = family.prefix
    content = {
        f"{NAME_PREFIX}{name.removeprefix(above)}": np.ascontiguousarray(array, np.float32)
        for name, array in tensors.items()
    }
    config = _config(written, sorted(changed), above) | {
        "task_type": _TASKS.get(spec.kind),
        "base_model_name_or_path": str(base.folder.resolve()),
        "fan_in_fan_out": any(
            re.search(family.inputs_first, f"{adapter.module}.weight") for adapter in written
        ),
    }
    if jax.process_index() == 0:
        path.mkdir(parents=True, exist_ok=True)
        save = optional_dependencies.load("safetensors.numpy").save
        storage.write(path / ADAPTER_WEIGHTS, save(content, metadata={"format": "pt"}))
        write_json(path / ADAPTER_CONFIG, config)


def _write(
    entry: Entry, adapters: Mapping[str, Adapter], shapes: Mapping[str, Shape], family: Family
) -> _Written:
    """The `adapters` of the parameters of `entry` as one adapter of their tensor.

    The ranks of parameters that one tensor joins, such as query, key and value, are added: each has
    rows of its own in B.
    """
    _check_can_be_written(entry, adapters)
    name = entry.names[0]
    is_table = entry.paths[0].endswith("/table")
    is_inputs_first = is_table or re.search(family.inputs_first, name) is not None
    scale = float(next(iter(adapters.values())).scale)
    inputs = np.concatenate([adapter.a for adapter in adapters.values()], axis=1)
    rank = inputs.shape[1]
    outputs = entry_tensor(entry, lambda path: _outputs(path, adapters, shapes[path], scale))
    if is_inputs_first:
        outputs = outputs.T
    product = scale * (outputs @ inputs.T)
    if is_inputs_first:
        product = product.T
    expected = entry_tensor(entry, lambda path: _product(path, adapters, shapes[path]))
    if np.abs(product - expected).max() > _ROUNDING * np.abs(expected).max():
        raise ConfigError(
            f"the adapter of {', '.join(adapters)} has no form in the layout of {name}: export the "
            "whole model"
        )
    module = _module_of(entry)
    if is_table:
        tensors = {f"{module}.lora_embedding_A": inputs.T, f"{module}.lora_embedding_B": outputs}
    else:
        tensors = {f"{module}.lora_A.weight": inputs.T, f"{module}.lora_B.weight": outputs}
    return _Written(module, tensors, rank, scale * rank)


def _check_can_be_written(entry: Entry, adapters: Mapping[str, Adapter]) -> None:
    """Raises `ConfigError` for adapters of experts, and of a parameter with several tensors."""
    if entry.matrix is not None:
        raise ConfigError(
            f"{', '.join(adapters)} has adapters of experts, which peft does not name one by one: "
            "give --training.lora_targets without them, or export the whole model"
        )
    if len(entry.names) > 1:
        raise ConfigError(
            f"{' and '.join(entry.names)} are one parameter with an adapter, but peft would add it "
            "to one of them only: export the whole model"
        )


def _outputs(path: str, adapters: Mapping[str, Adapter], shape: Shape, scale: float) -> np.ndarray:
    """B of all `adapters`, in the form of the parameter at `path` with the rank for its inputs.

    The rows of the other parameters' adapters are zero; `scale` is the one that peft applies.
    """
    rank = sum(len(adapter.b) for adapter in adapters.values())
    num_inputs = len(next(iter(adapters.values())).a)
    input_axes = next(n for n in range(1, len(shape)) if math.prod(shape[:n]) == num_inputs)
    rows = np.zeros((rank, math.prod(shape[input_axes:])), np.float32)
    start = 0
    for adapted_path, adapter in adapters.items():
        if adapted_path == path:
            share = float(adapter.scale) / scale
            rows[start : start + len(adapter.b)] = adapter.b * share
        start += len(adapter.b)
    ones = [1] * (input_axes - 1)
    return rows.reshape(rank, *ones, *shape[input_axes:])


def _product(path: str, adapters: Mapping[str, Adapter], shape: Shape) -> np.ndarray:
    """The change of the parameter at `path` by its adapter, zeros where it has none."""
    if path not in adapters:
        return np.zeros(shape, np.float32)
    adapter = adapters[path]
    return (float(adapter.scale) * (adapter.a @ adapter.b)).reshape(shape)


def _is_changed(
    entry: Entry,
    leaves: Mapping[str, np.ndarray],
    shapes: Mapping[str, Shape],
    base: PublishedModel,
) -> bool:
    """Whether the parameters of `entry` differ from the tensor of `base`, or it has none.

    Raises `ConfigError` for parameters without a tensor that are not zero, and for tied ones.
    """
    if not entry.names:
        check_zero(entry, lambda path: leaves.get(path, np.zeros(0)))
        return False
    present = [name for name in entry.names if base.has_tensor(name)]
    if present:
        parts = entry_params(entry, shapes, present[:1], base.read_tensor)
        whole = () if entry.matrix is None else (entry.matrix,)
        if all(np.array_equal(leaves[path][whole], np.float32(array)) for path, array in parts):
            return False
    if len(entry.names) > 1:
        raise ConfigError(
            f"{' and '.join(entry.names)} are one parameter that was trained, but peft would write "
            "it to one of them only: export the whole model"
        )
    return True


def _module_of(entry: Entry) -> str:
    """The layer that has the tensor of `entry`; "" for parameters without one."""
    return entry.names[0].rpartition(".")[0] if entry.names else ""


def _config(written: Sequence[_Written], changed: Sequence[str], above: str) -> dict[str, Any]:
    """The part of adapter_config.json about the adapters; names lack what stands `above`."""
    rank, alpha = Counter((adapter.rank, adapter.alpha) for adapter in written).most_common(1)[0][0]
    ranks, alphas = {}, {}
    for adapter in written:
        module = adapter.module.removeprefix(above)
        if adapter.rank != rank:
            ranks[module] = adapter.rank
        if adapter.alpha != alpha:
            alphas[module] = adapter.alpha
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": [adapter.module.removeprefix(above) for adapter in written],
        "modules_to_save": [name.removeprefix(above) for name in changed] or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "inference_mode": True,
    }
