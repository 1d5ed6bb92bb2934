"""Linen models, whose parameters are an argument, told from modules of NNX, which hold theirs."""

from typing import Any

from flax import nnx

from jaxformer.errors import ConfigError


def check_linen(model: Any) -> None:
    """Raises `ConfigError` for a module of NNX where a model and its parameters are apart."""
    if isinstance(model, nnx.Module):
        raise ConfigError(
            f"the {type(model).__name__} of NNX holds its parameters, but this takes a Linen model "
            "and its parameters: call linen, params = jf.from_nnx(model), and give these"
        )
