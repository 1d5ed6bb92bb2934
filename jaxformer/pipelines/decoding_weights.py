"""Parameters as each step of decoding reads them: on the devices, in the model's type."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.distributed import strategy_of
from jaxformer.nn.inspection import Patched
from jaxformer.nn.models import DecodingModel
from jaxformer.nn.rounded_parameters import rounded_matrices
from jaxformer.nn.stacked_blocks import unstack_blocks
from jaxformer.pipelines.ensemble import Ensemble
from jaxformer.pipelines.pieces import only_on, place_params
from jaxformer.training.parameters import flatten, map_with_path


def prepare(model: Any, params: Any) -> tuple[Any, Any]:
    """The model and parameters as each step reads them: on the devices, in the model's type.

    Layers that `scan_layers` has stacked are apart: a step of decoding then reads weights and cache
    of a layer where they are, and a scan would copy them out of its stacked arrays for each token.
    """
    plain, params = _unstacked(model), place_params(params)
    devices = strategy_of(params)
    if plain == model and not _lower(model, params):
        return model, params
    with only_on(devices):
        return plain, _jitted_lay_out(model, params)


def lay_out(model: Any, params: Any) -> tuple[Any, Any]:
    """`prepare` as a pure function."""
    plain, dtypes = _unstacked(model), _lower(model, params)
    params = map_with_path(lambda path, leaf: leaf.astype(dtypes.get(path, leaf.dtype)), params)
    return plain, params if plain == model else unstack_blocks(params)


@partial(jax.jit, static_argnames="model")
def _jitted_lay_out(model: Any, params: Any) -> Any:
    return lay_out(model, params)[1]


def _lower(model: Any, params: Any) -> dict[str, Any]:
    """The type of each float32 matrix that the model rounds to it wherever it reads the matrix."""
    if jnp.dtype(model.config.dtype) == jnp.float32:
        return {}
    while isinstance(model, Ensemble | Patched):
        if isinstance(model, Ensemble):  # each member rounds its own
            params = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), params)
        model = model.model
    types = rounded_matrices(model, params)
    return {
        path: types[path]
        for path, leaf in flatten(params).items()
        if path in types and leaf.dtype == jnp.float32
    }


def _unstacked(model: Any) -> Any:
    """`model` without `scan_layers`."""
    if not isinstance(model, DecodingModel) or not model.config.scan_layers:
        return model
    return model.clone(config=replace(model.config, scan_layers=False))
