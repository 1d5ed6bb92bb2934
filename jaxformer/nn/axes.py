"""The axes of each parameter of a model by their meaning: embed, heads, mlp, vocab, layers.

Weight decay, Muon, LoRA and sharding read them, so a module gets all of these whatever its
parameters are called. A module class may name the axes of its parameters in
`AXES`, from a path relative to the module to "inputs -> outputs":

    class FeedForward(nn.Module):
        AXES: ClassVar[Mapping[str, str]] = {"up/kernel": "embed -> mlp", "up/bias": "mlp"}

The outermost module that names a parameter decides. Without a name, the axes of `nn.Dense`,
`nn.DenseGeneral`, `nn.Conv` and `nn.Embed` follow from their features. Of any other parameter with
two or more axes the first is the input. One axis, or none, has no input.
"""

import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxformer.errors import ConfigError
from jaxformer.nn.heads import Classifier, SpanPredictor, TokenClassifier
from jaxformer.nn.stack import Stack
from jaxformer.ops.attention import reference
from jaxformer.ops.dense import Dense

INPUT, OUTPUT = "input", "output"
"""The names of axes that no `AXES` names."""

FEATURES = {"embed", "heads", "kv_heads", "head_dim", "mlp"}
"""The names of axes inside blocks."""

_IDS = {"vocab", "position", "type", "bucket"}


class Axes(NamedTuple):
    """The axes of one parameter: first `layers` stacked layers, then inputs, then outputs.

    >>> Axes(("embed",), ("heads", "head_dim")).matrix_shape((5, 2, 3))
    (5, 6)
    """

    inputs: tuple[str, ...] = ()
    """Names of the axes that a product sums over; () for biases, scales and other vectors."""
    outputs: tuple[str, ...] = ()
    """Names of the other axes."""
    layers: int = 0
    """Number of leading axes that stack layers, as `nn.scan` and `nn.vmap` do."""
    is_hidden: bool = False
    """Whether it is a matrix from features to features, in a block of a `Stack` or named so.

    Embeddings, positions, task heads and the pooler are not: Muon leaves them to Adam.
    """
    module: type[nn.Module] | None = None
    """The class of the module that has the parameter."""

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of inputs and of outputs of a parameter of `shape`, without layers."""
        shape = shape[self.layers :]
        return math.prod(shape[: len(self.inputs)]), math.prod(shape[len(self.inputs) :])


def parameter_axes(model: nn.Module, *inputs: Any) -> dict[str, Axes]:
    """{"path/of/leaf": its `Axes`} for every parameter of `model`, from one abstract trace.

    `inputs` are arrays or shapes that `model.init` takes; by default those of `example_inputs`.
    Raises `ConfigError` where a name in `AXES` has another number of axes than its parameter.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> axes = jf.parameter_axes(jf.DecoderOnly(config))
    >>> axes["decoder/blocks_0/attention/out/kernel"][:2]
    (('heads', 'head_dim'), ('embed',))
    """
    axes: dict[str, Axes] = {}
    ranks: dict[str, int] = {}  # without stacked layers: inner modules return first
    kinds: dict[str, type] = {}
    if hasattr(model, "attention_fn"):  # it has no parameters, and may not support the call
        model = model.clone(attention_fn=reference)

    def record(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        result, module = call(*args, **kwargs), context.module
        path = "/".join(module.path)
        kinds[path] = type(module)
        params: Any = nn.unbox(module.variables.get("params", {}))
        leaves: dict[str, Any] = flatten_dict(params, sep="/")
        for name, leaf in leaves.items():
            full = f"{path}/{name}".lstrip("/")
            if full not in axes:
                ranks[full] = jnp.ndim(leaf)
                axes[full] = _axes_of(module, name, ranks[full])
            if named := _named(module, name, ranks[full]):  # outer modules come later and decide
                axes[full] = axes[full]._replace(inputs=named[0], outputs=named[1])
        return result

    def init(*inputs: Any) -> Any:
        return nn.unbox(model.init(jax.random.key(0), *inputs)["params"])

    with nn.intercept_methods(record):
        params = jax.eval_shape(init, *(inputs or example_inputs(model)))
    leaves: dict[str, Any] = flatten_dict(params, sep="/")
    blocks = tuple(
        f"{path}/"
        for path in kinds
        if path and issubclass(kinds.get(path.rpartition("/")[0], object), Stack)
    )
    for path in leaves:
        names = {*axes[path].inputs, *axes[path].outputs}
        is_inside = path.startswith(blocks) or names <= FEATURES
        axes[path] = axes[path]._replace(
            layers=leaves[path].ndim - ranks[path],
            is_hidden=bool(axes[path].inputs) and not names & _IDS and is_inside,
        )
    return {path: axes[path] for path in leaves}


def example_inputs(model: nn.Module) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the smallest inputs of a model whose required arguments are token ids."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    if isinstance(model, Classifier | TokenClassifier | SpanPredictor):
        return ids, jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    arguments = inspect.signature(model.__call__).parameters.values()
    required = [x for x in arguments if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    return (ids,) * len(required)


def _named(
    module: nn.Module, name: str, rank: int
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The inputs and outputs of the parameter `name` in the `AXES` of a module's class, if any."""
    for kind in type(module).__mro__:
        text = vars(kind).get("AXES", {}).get(name)
        if text is None:
            continue
        before, _, after = text.rpartition("->")
        inputs, outputs = tuple(before.split()), tuple(after.split())
        if len(inputs) + len(outputs) != rank:
            raise ConfigError(
                f"{kind.__name__}.AXES says {text!r} of {name}, which has {rank} axes: name {rank} "
                "axes, as in 'embed -> mlp'"
            )
        return inputs, outputs
    return None


def _axes_of(module: nn.Module, name: str, rank: int) -> Axes:
    """The axes of a parameter of `module` that no `AXES` names."""
    name = name.rpartition("/")[2]
    if isinstance(module, nn.Embed):
        return Axes(("vocab",), ("embed",), module=type(module))
    is_dense = isinstance(module, Dense | nn.Dense | nn.DenseGeneral | nn.Conv)
    features: Any = getattr(module, "features", 1) if is_dense else 1
    num_outputs = len(features) if isinstance(features, tuple) else 1
    num_inputs = rank - num_outputs if is_dense and name == "kernel" else min(rank - 1, 1)
    if is_dense and name == "bias":
        num_inputs = 0
    return Axes((INPUT,) * num_inputs, (OUTPUT,) * (rank - num_inputs), module=type(module))
