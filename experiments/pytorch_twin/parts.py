"""What both models of the twin share: norms, activations, and how they refuse a config."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional as F

from jaxformer.config import ConfigError, TransformerConfig

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def norm(config: TransformerConfig) -> nn.LayerNorm:
    """A LayerNorm over d_model, with a bias where the config's maps have one."""
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.use_bias)


def check(config: TransformerConfig, fixed: Mapping[str, Any], preset: str) -> None:
    """Raises `ConfigError` for a field that is not as `fixed`; `preset` names one that is."""
    for name, needed in fixed.items():
        value = getattr(config, name)
        if value != needed:
            raise ConfigError(
                f"{name}={value!r}, but the twin has {name}={needed!r} only: "
                f"give that, or a preset that has it, such as {preset}"
            )
