"""The axes of each parameter of a model by their meaning: embed, heads, mlp, experts, layers.

Weight decay, Muon, LoRA and sharding read them, so a module gets all of these whatever its
parameters are called. A module class may name the axes of its parameters in
`AXES`, from a path relative to the module to "inputs -> outputs":

    class FeedForward(nn.Module):
        AXES: ClassVar[Mapping[str, str]] = {"up/kernel": "embed -> mlp", "up/bias": "mlp"}

The outermost module that names a parameter decides. "experts" as the first name stacks matrices,
each of them a matrix of its own: "experts embed -> mlp" are E matrices [D, F], also where `nn.vmap`
stacks them. Without a name, the axes of `nn.Dense`,
`nn.DenseGeneral`, `nn.Conv` and `nn.Embed` follow from their features. The first axis of any other
parameter with two or more axes is its input. One axis, or none, has no input.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxformer.errors import ConfigError
from jaxformer.nn.dense import Dense
from jaxformer.nn.heads import Classifier, SpanPredictor, TokenClassifier
from jaxformer.nn.linen_models import check_linen
from jaxformer.nn.stack import Stack
from jaxformer.ops.attention import reference
from jaxformer.ops.dense import QuantizedMatrix

INPUT, OUTPUT = "input", "output"
"""The names of axes that no `AXES` names."""

FEATURES = {"embed", "heads", "kv_heads", "head_dim", "mlp"}
"""The names of axes inside blocks."""

EXPERTS = "experts"
"""The name of an axis that stacks the matrices or vectors of experts; it comes first."""

_IDS = {"vocab", "position", "type", "bucket"}


class Axes(NamedTuple):
    """The axes of one parameter: `layers` stacked layers, then `stacks`, then inputs, then outputs.

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
    stacks: tuple[str, ...] = ()
    """Names of further axes that stack matrices, such as the experts."""

    @property
    def num_stacked(self) -> int:
        """The number of leading axes that stack matrices or vectors: layers and `stacks`."""
        return self.layers + len(self.stacks)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all axes after the layers."""
        return (*self.stacks, *self.inputs, *self.outputs)

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of inputs and of outputs of each matrix of a parameter of `shape`."""
        shape = shape[self.num_stacked :]
        return math.prod(shape[: len(self.inputs)]), math.prod(shape[len(self.inputs) :])


def parameter_axes(
    model: nn.Module, *inputs: Any, method: Callable[..., Any] | str | None = None
) -> dict[str, Axes]:
    """{"path/of/leaf": its `Axes`} for every parameter of `model`, from one abstract trace.

    `inputs` are arrays or shapes that `model.init` takes; by default `example_inputs(model)`.
    `method` is the method that takes them, for a module without `__call__`.
    Raises `ConfigError` where a name in `AXES` has another number of axes than its parameter.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> axes = jf.parameter_axes(jf.DecoderOnly(config))
    >>> axes["decoder/blocks_0/attention/out/kernel"][:2]
    (('heads', 'head_dim'), ('embed',))
    """
    check_linen(model)
    if hasattr(model, "attention_fn"):  # it has no parameters, and may not support the call
        model = model.clone(attention_fn=reference)
    recorder = AxesRecorder()

    def init(*inputs: Any) -> Any:
        return nn.unbox(model.init(jax.random.key(0), *inputs, method=method)["params"])

    with nn.intercept_methods(recorder.record):
        params = jax.eval_shape(init, *(inputs or example_inputs(model)))
    return recorder.axes_of(flatten_dict(params, sep="/"))


class _Owner(NamedTuple):
    """The innermost module that has a parameter."""

    depth: int
    rank: int
    """The number of axes of the parameter, without stacked layers."""
    axes: Axes
    """The axes that follow from the class of the module."""


class _Naming(NamedTuple):
    """The outermost module whose class names the axes of a parameter."""

    depth: int
    kind: type[nn.Module]
    name: str
    """The key of `kind.AXES`."""
    rank: int
    """The number of axes of the parameter as the module sees it."""


class AxesRecorder:
    """The interceptor that records the axes of the parameters of each module that is called."""

    def __init__(self) -> None:
        self.owners: dict[str, _Owner] = {}
        self.namings: dict[str, _Naming] = {}
        self.kinds: dict[str, type[nn.Module]] = {}
        """The class of each module by its path."""

    def record(
        self, call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        """The result of a module's method: the argument of `nn.intercept_methods`."""
        result, module = call(*args, **kwargs), context.module
        path, depth = "/".join(module.path), len(module.path)
        self.kinds[path] = type(module)
        params: Any = nn.unbox(module.variables.get("params", {}))
        leaves: dict[str, Any] = flatten_dict(params, sep="/")
        for name, leaf in leaves.items():
            full = f"{path}/{name}".lstrip("/")
            if isinstance(leaf, QuantizedMatrix):
                continue
            if full not in self.owners or depth > self.owners[full].depth:
                rank = len(leaf.shape)
                self.owners[full] = _Owner(depth, rank, _axes_of(module, name, rank))
            kind = _naming_class(module, name)
            if kind and (full not in self.namings or depth < self.namings[full].depth):
                self.namings[full] = _Naming(depth, kind, name, len(leaf.shape))
        return result

    def named_axes(self, path: str) -> Axes:
        """The names of the axes of the parameter at `path`, without layers."""
        _, rank, axes = self.owners[path]
        if path not in self.namings:
            return axes
        _, kind, name, rank_of_naming = self.namings[path]
        text: str = vars(kind)["AXES"][name]
        before, _, after = text.rpartition("->")
        inputs, outputs = before.split(), after.split()
        if len(inputs) + len(outputs) not in (rank, rank_of_naming):
            raise ConfigError(
                f"{kind.__name__}.AXES says {text!r} of {name}, which has {rank} axes: name {rank} "
                "axes, as in 'embed -> mlp'"
            )
        first = inputs or outputs
        stacks = (first.pop(0),) if first[:1] == [EXPERTS] else ()
        return axes._replace(inputs=tuple(inputs), outputs=tuple(outputs), stacks=stacks)

    def axes_of(self, leaves: Mapping[str, Any]) -> dict[str, Axes]:
        """{path: axes} of the parameters `leaves`, whose layers may be stacked."""
        blocks = tuple(
            f"{path}/"
            for path in self.kinds
            if path and issubclass(self.kinds.get(path.rpartition("/")[0], object), Stack)
        )
        axes = {}
        for path, leaf in leaves.items():
            named = self.named_axes(path)
            names = {*named.inputs, *named.outputs}
            is_inside = path.startswith(blocks) or names <= FEATURES
            axes[path] = named._replace(
                layers=len(leaf.shape) - len(named.names),
                is_hidden=bool(named.inputs) and not names & _IDS and is_inside,
            )
        return axes


def example_inputs(model: nn.Module) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the smallest inputs of a model whose required arguments are token ids."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    if isinstance(model, Classifier | TokenClassifier | SpanPredictor):
        return ids, jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    arguments = inspect.signature(model.__call__).parameters.values()
    required = [x for x in arguments if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    return (ids,) * len(required)


def _naming_class(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The first class of `module` and its bases whose `AXES` name the parameter `name`, if any."""
    for kind in type(module).__mro__:
        if name in vars(kind).get("AXES", {}):
            return kind
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
