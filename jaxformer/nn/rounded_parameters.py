"""The matrices that a model rounds to a lower type wherever it reads them.

They can be laid out in that type before the first step of decoding: all results stay the same. A
matrix that a module reads in float32, such as a router's, is not one of them, whatever its name is.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxformer.nn.axes import AxesRecorder, example_inputs
from jaxformer.ops.attention import reference

_MOVES_NUMBERS = {
    "broadcast_in_dim",
    "concatenate",
    "copy",
    "copy_p",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "optimization_barrier",
    "reshape",
    "rev",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "transpose",
}
"""The primitives whose result is the same, whether its numbers are rounded before or after it."""

Paths = frozenset[str]
"""The parameters of which an array consists."""


def rounded_matrices(model: nn.Module, params: Any, *inputs: Any) -> dict[str, np.dtype]:
    """{"path/of/leaf": type} of each matrix of `params` that `model` rounds wherever it reads it.

    `params` are arrays or shapes, `inputs` are what `model` is called with, by default
    `example_inputs(model)`. Nothing is computed, and the result is remembered.

    >>> sizes = {"d_model": 8, "d_ff": 12, "num_heads": 2, "num_decoder_layers": 1}
    >>> model = jf.DecoderOnly(jf.TransformerConfig(11, **sizes, dtype="bfloat16"))
    >>> params = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> rounded_matrices(model, params)["decoder/blocks_0/feed_forward/up/kernel"]
    dtype(bfloat16)
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    arrays = tuple(
        (jax.tree_util.keystr(path, simple=True, separator="/"), jnp.shape(leaf), leaf.dtype)
        for path, leaf in leaves
    )
    return dict(_rounded_matrices(model, structure, arrays, inputs or example_inputs(model)))


@lru_cache(maxsize=32)
def _rounded_matrices(
    model: nn.Module,
    structure: Any,
    arrays: tuple[tuple[str, tuple[int, ...], np.dtype], ...],
    inputs: tuple[Any, ...],
) -> dict[str, np.dtype]:
    if hasattr(model, "attention_fn"):  # it has no parameters, and may not support the call
        model = model.clone(attention_fn=reference)
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in arrays]
    recorder, reads = AxesRecorder(), _Reads()

    def apply(leaves: list[Any], *inputs: Any) -> Any:
        return model.apply({"params": jax.tree.unflatten(structure, leaves)}, *inputs)

    with nn.intercept_methods(recorder.record):
        program = jax.make_jaxpr(apply)(leaves, *inputs).jaxpr
    paths = [Paths({path}) for path, *_ in arrays]
    no_paths = [Paths()] * (len(program.invars) - len(paths))
    for results in reads.follow(program, paths + no_paths):
        reads.note(results, None)
    types: dict[str, np.dtype] = {}
    for path, read_as in reads.types.items():
        is_matrix = path in recorder.owners and recorder.named_axes(path).inputs
        if is_matrix and len(read_as) == 1:
            (dtype,) = read_as
            if dtype is not None:
                types[path] = dtype
    return types


class _Reads:
    """The types in which a program reads its parameters."""

    def __init__(self) -> None:
        self.types: dict[str, set[np.dtype | None]] = defaultdict(set)
        """The types to which it rounds each parameter; None: it reads it as it is stored."""

    def note(self, paths: Paths, dtype: np.dtype | None) -> None:
        """Notes that the program reads the parameters `paths` in the type `dtype`."""
        for path in paths:
            self.types[path].add(dtype)

    def follow(self, jaxpr: Jaxpr, inputs: Sequence[Paths]) -> list[Paths]:
        """The parameters of which each result of `jaxpr` consists; notes what it reads.

        `inputs` are the parameters of which its inputs consist.
        """
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def paths_of(variable: Any) -> Paths:
            return Paths() if isinstance(variable, Literal) else known.get(variable, Paths())

        for equation in jaxpr.eqns:
            results = self._follow_equation(equation, [paths_of(x) for x in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [paths_of(variable) for variable in jaxpr.outvars]

    def _follow_equation(self, equation: JaxprEqn, inputs: list[Paths]) -> list[Paths]:
        """The parameters of which each result of `equation` consists; notes what it reads."""
        name, count = equation.primitive.name, len(equation.outvars)
        nothing = [Paths()] * count
        everything = Paths().union(*inputs)
        if not everything:
            return nothing
        if name in _MOVES_NUMBERS:
            return inputs if name == "optimization_barrier" else [everything] * count
        if name == "convert_element_type":
            dtype = jnp.dtype(equation.params["new_dtype"])
            self.note(everything, dtype if dtype.itemsize < 4 else None)
            return nothing
        branches = equation.params.get("branches")
        if name == "cond" and branches is not None:
            self.note(inputs[0], None)
            of_branches = [self.follow(branch.jaxpr, inputs[1:]) for branch in branches]
            return [Paths().union(*each) for each in zip(*of_branches, strict=True)]
        for part in equation.params.values():
            jaxpr = part.jaxpr if isinstance(part, ClosedJaxpr) else part
            if isinstance(jaxpr, Jaxpr) and len(jaxpr.invars) == len(inputs):
                results = self.follow(jaxpr, inputs)
                if len(results) == count and name != "scan":
                    return results
                for paths in results:
                    self.note(paths, None)
                return nothing
        self.note(everything, None)
        return nothing
