"""The modules with which sentence-transformers makes one vector of a text."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained.config_keys import as_text
from jaxformer.pretrained.hf_folder import Tensors
from jaxformer.storage import read_json, to_path

POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""The ways to make one vector of a text's token vectors, with sentence-transformers' names."""

# Their older names in a config.json; several are concatenated in this order.
_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "torch.nn.modules.activation.Tanh": jnp.tanh,
    "torch.nn.modules.activation.ReLU": jax.nn.relu,
    "torch.nn.modules.activation.GELU": partial(jax.nn.gelu, approximate=False),
    "torch.nn.modules.activation.SiLU": jax.nn.silu,
    "torch.nn.modules.activation.Sigmoid": jax.nn.sigmoid,
    "torch.nn.modules.linear.Identity": lambda x: x,
}

Layer = Callable[[Float[np.ndarray, "N D"]], Float[np.ndarray, "N D_out"]]


@dataclass(frozen=True, eq=False)
class SentenceOptions:
    """The steps by which `embed` makes one vector of a text.

    >>> SentenceOptions(pooling=("cls", "mean")).pooling  # their concatenation, [2 D]
    ('cls', 'mean')
    """

    pooling: tuple[str, ...] = ("mean",)
    """One of `POOLING`, or several whose results are concatenated."""
    layers: tuple[Layer, ...] = ()
    """Functions of the pooled vectors, such as a dense layer or the division by the length."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name, what is written before a text."""
    prompt: str | None = None
    """The name of the prompt that is used where none is asked for."""
    pools_prompt: bool = True
    """Whether the tokens of the prompt count in the pooling."""
    lowercase: bool = False
    """Whether texts are read in lower case."""
    max_tokens: int | None = None
    """Longer texts are cut, special tokens included; None: they are refused."""

    def __post_init__(self) -> None:
        for mode in self.pooling:
            if mode not in POOLING:
                raise ConfigError(f"pooling={mode!r}, but it must be one of {', '.join(POOLING)}")
        if not self.pooling:
            raise ConfigError(f"pooling is empty: give one of {', '.join(POOLING)}")


def load_sentence_options(folder: str | os.PathLike[str], max_len: int) -> SentenceOptions:
    """The modules in `folder`, as sentence-transformers (version 5) computes them.

    `max_len` is the longest text of the model. A folder without modules.json has the defaults.
    Raises `ConfigError` for a module that is not supported, naming it.
    """
    path = to_path(folder)
    if not (path / "modules.json").exists():
        return SentenceOptions()
    try:
        return _read(path, max_len)
    except (ConfigError, DataError) as error:
        raise type(error)(f"{path / 'modules.json'}: {error}") from error


def _read(path: Path, max_len: int) -> SentenceOptions:
    """The options of the folder `path`, which has a modules.json."""
    modules = [(_kind(each), path / each.get("path", "")) for each in _modules(path)]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or modules[0][1] != path:
        raise ConfigError(
            f"the modules are {', '.join(kinds)}, but the first must be a Transformer in the "
            "folder itself and the second its Pooling"
        )
    pooling_folder = modules[1][1]
    layers = []
    for kind, place in modules[2:]:
        if kind not in _LAYERS:
            raise ConfigError(f"the module {kind} is not supported: use {', '.join(_LAYERS)}")
        layers.append(_LAYERS[kind](place))
    pooling = read_json(pooling_folder / "config.json")
    transformer = read_json(path / "sentence_bert_config.json", default={})
    whole = read_json(path / "config_sentence_transformers.json", default={})
    tokenizer = read_json(path / "tokenizer_config.json", default={})
    limit = transformer.get("max_seq_length") or tokenizer.get("model_max_length") or max_len
    return SentenceOptions(
        pooling=_pooling(pooling),
        layers=tuple(layers),
        prompts={name: text or "" for name, text in (whole.get("prompts") or {}).items()},
        prompt=whole.get("default_prompt_name"),
        pools_prompt=pooling.get("include_prompt", True),
        lowercase=bool(transformer.get("do_lower_case")),
        max_tokens=int(min(limit, max_len)),
    )


def _modules(path: Path) -> list[dict[str, Any]]:
    """The modules that modules.json lists: the class and the folder of each."""
    modules = read_json(path / "modules.json", list)
    if not all(isinstance(each, dict) and isinstance(each.get("type"), str) for each in modules):
        raise DataError("it must list modules, each with its type")
    for each in modules:
        inside = each.get("path", "")
        if not isinstance(inside, str) or Path(inside).name != inside:
            raise DataError(f"the path {inside!r} of a module must be a folder's name")
    return modules


def _kind(module: Mapping[str, Any]) -> str:
    """The class's name; a class of another package is named whole, so that it is refused."""
    package, _, kind = module["type"].rpartition(".")
    return kind if package.split(".")[0] == "sentence_transformers" else module["type"]


def _pooling(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The ways of pooling that the config.json of a Pooling names, by a new key or by old ones."""
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_NAMES.items() if config.get(key)] or ["mean"]
    return (modes,) if isinstance(modes, str) else tuple(modes)


def _check_place(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a module that reads or writes something else than the vector."""
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ConfigError(f"{key}={as_text(config[key])}, but only the text's vector is read")


def _dense(folder: Path) -> Layer:
    config = read_json(folder / "config.json")
    tensors = Tensors(folder)
    _check_place(config)
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"activation_function={as_text(name)}, but it must be one of {', '.join(_ACTIVATIONS)}"
        )

    def read(name: str) -> np.ndarray:
        return tensors.read(name).astype(np.float32)

    kernel = read("linear.weight").T
    bias = read("linear.bias") if config.get("bias", True) else 0.0
    residual: np.ndarray | None = None
    if config.get("use_residual"):
        is_square = kernel.shape[0] == kernel.shape[1]
        residual = np.eye(len(kernel), dtype=np.float32) if is_square else read("residual.weight").T

    def dense(x: np.ndarray) -> np.ndarray:
        if x.shape[1] != len(kernel):
            raise ConfigError(
                f"the pooled vectors have {x.shape[1]} numbers, but {folder.name} reads "
                f"{len(kernel)}: use the folder's pooling"
            )
        out = np.asarray(_ACTIVATIONS[name](x @ kernel + bias))
        return out if residual is None else out + x @ residual

    return dense


def _layer_norm(folder: Path) -> Layer:
    tensors = Tensors(folder)
    scale, bias = (tensors.read(f"norm.{name}").astype(np.float32) for name in ("weight", "bias"))

    def norm(x: np.ndarray) -> np.ndarray:
        centered = x - x.mean(axis=1, keepdims=True)
        return centered / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * scale + bias

    return norm


def _normalize(folder: Path) -> Layer:
    _check_place(read_json(folder / "config.json", default={}))
    return lambda x: x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


_LAYERS: dict[str, Callable[[Path], Layer]] = {
    "Normalize": _normalize,
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Dropout": lambda folder: lambda x: x,
}
