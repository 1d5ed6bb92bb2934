"""Weights of torch's own layers as parameters of ours, in both directions by one map.

`multihead_attention`, `encoder_layer` and `decoder_layer` are the weight maps of
`torch.nn.MultiheadAttention`, `TransformerEncoderLayer` and `TransformerDecoderLayer`. A state dict
is {name: numpy array}, so nothing in this file imports torch:

    state = torch_state(module)
    like = jax.eval_shape(ours.init, jax.random.key(0), x)["params"]
    params = to_jax(state, multihead_attention(state), like)

Nothing here depends on `batch_first`, which is about activations: our order is [B, T, D].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.errors import ConfigError
from jaxformer.pretrained import weight_map as maps
from jaxformer.pretrained.weight_map import Entry, WeightMap

State = Mapping[str, np.ndarray]


def torch_state(module: Any) -> dict[str, np.ndarray]:
    """The state dict of a module of torch as numpy arrays.

    Raises `ConfigError` for `add_zero_attn=True` of a `MultiheadAttention` in it, which leaves no
    trace in a state dict and makes another function of it. Our modules get the other arguments that
    a state dict does not hold (heads, activation, `norm_first`, `layer_norm_eps`) from you.
    """
    for name, part in module.named_modules():
        if getattr(part, "add_zero_attn", False):
            raise ConfigError(
                f"{name or type(part).__name__} has add_zero_attn=True, a key that belongs to no "
                "token, which our attention does not have: give a module made without it"
            )
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def to_torch(params: Any, weight_map: WeightMap) -> dict[str, np.ndarray]:
    """The state dict of the tree `params`.

    Raises `ConfigError` that lists the leaves that are missing or have no entry.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(params, sep="/").items()}
    known = {path for entry in weight_map for path in entry.paths}
    wrong = [f"{path} is missing" for path in sorted(known - leaves.keys())]
    wrong += [f"{path} is unknown" for path in sorted(leaves.keys() - known)]
    if wrong:
        raise ConfigError(
            f"the parameters do not fit the weight map: {'; '.join(wrong)}: give the parameters of "
            "the module that the map was made for"
        )
    return {
        name: np.ascontiguousarray(tensor)
        for name, tensor in maps.to_hf(weight_map, leaves.__getitem__)
    }


def to_jax(state: State, weight_map: WeightMap, like: Any) -> dict[str, Any]:
    """The parameters of `state`, a tree with the shapes of the tree `like`.

    Raises `DataError` that lists the names that are missing or have no entry, and arrays of another
    shape; `ConfigError` for a map of another module than `like` is of.
    """
    leaves: dict[str, Any] = flatten_dict(like, sep="/")
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    unknown = sorted({path for entry in weight_map for path in entry.paths} - shapes.keys())
    if unknown:
        raise ConfigError(
            f"the weight map has {', '.join(unknown)}, but the module has no such parameters: make "
            "the map and the module with the same options, such as norm_first"
        )
    maps.check_names(weight_map, state)
    maps.check_shapes(weight_map, shapes, {name: x.shape for name, x in state.items()})
    return unflatten_dict(maps.to_jax(weight_map, shapes, state, state.__getitem__), sep="/")


def multihead_attention(state: State, *, prefix: str = "", scope: str = "") -> list[Entry]:
    """The entries of the `MultiheadAttention` under `prefix` in `state`.

    They make the parameters of `jaxformer.MultiHeadAttention` under the path `scope`. Keys and
    values may be of another size than queries (`kdim` = `vdim`), as long as they are of one.
    Raises `ConfigError` where they are not, and for the extra key of `add_bias_kv`. The extra key
    of `add_zero_attn` has no parameters: `torch_state` refuses it.
    """
    _check_attention(state, prefix)
    bias, weight = f"{prefix}in_proj_bias", f"{prefix}in_proj_weight"
    bias = bias if bias in state else ""
    paths = [f"{scope}{part}" for part in ("query", "key", "value")]
    if weight in state:
        entries = [joined_kernels(paths, weight)]
    else:
        entries = [
            maps.entry(f"{path}/kernel", f"{prefix}{letter}_proj_weight", maps.linear())
            for path, letter in zip(paths, "qkv", strict=True)
        ]
    if bias:
        entries.append(joined_biases(paths, bias))
    out = maps.linear(inputs=2)
    return entries + maps.dense(f"{scope}out", f"{prefix}out_proj", bias=bool(bias), kernel=out)


def encoder_layer(state: State, *, prefix: str = "", scope: str = "") -> list[Entry]:
    """The entries of a `TransformerEncoderLayer`, as the parameters of a `Block`."""
    norms = {"attention": "norm1", "feed_forward": "norm2"}
    return _layer(state, {"attention": "self_attn"}, norms, prefix=prefix, scope=scope)


def decoder_layer(state: State, *, prefix: str = "", scope: str = "") -> list[Entry]:
    """The entries of a `TransformerDecoderLayer`, as a `Block` with `cross`."""
    names = {"attention": "self_attn", "cross_attention": "multihead_attn"}
    norms = {"attention": "norm1", "cross_attention": "norm2", "feed_forward": "norm3"}
    return _layer(state, names, norms, prefix=prefix, scope=scope)


def joined_kernels(paths: Sequence[str], weight: str) -> Entry:
    """The entry of the kernels of projections at `paths`, which torch stores as one `weight`."""
    kernels = tuple(f"{path}/kernel" for path in paths)
    return Entry(kernels, (weight,), maps.conv1d(), maps.linear())


def joined_biases(paths: Sequence[str], bias: str) -> Entry:
    """The entry of the biases of projections at `paths`, which torch stores as one `bias`."""
    return Entry(tuple(f"{path}/bias" for path in paths), (bias,), maps.FLAT)


def _layer(
    state: State, attentions: dict[str, str], norms: dict[str, str], *, prefix: str, scope: str
) -> list[Entry]:
    entries = []
    for name, module in attentions.items():
        entries += multihead_attention(state, prefix=f"{prefix}{module}.", scope=f"{scope}{name}/")
    for name, module in norms.items():
        bias = f"{prefix}{module}.bias" in state
        entries += maps.norm(f"{scope}{name}_norm", f"{prefix}{module}", bias=bias)
    for name, module in (("up", "linear1"), ("down", "linear2")):
        bias = f"{prefix}{module}.bias" in state
        entries += maps.dense(f"{scope}feed_forward/{name}", f"{prefix}{module}", bias=bias)
    return entries


def _check_attention(state: State, prefix: str) -> None:
    if f"{prefix}bias_k" in state:
        raise ConfigError(
            f"{prefix}bias_k adds a key that belongs to no token, which our attention does not "
            "have: give a module made without add_bias_kv"
        )
    apart = [f"{prefix}{letter}_proj_weight" for letter in "kv"]
    sizes = [state[name].shape[-1] for name in apart if name in state]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"kdim={sizes[0]} and vdim={sizes[1]}, but our keys and values are both made of one "
            "memory: give a module in which they are equal"
        )
