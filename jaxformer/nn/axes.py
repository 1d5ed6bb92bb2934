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
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import Encoder
from jaxformer.nn.heads import Classifier, SpanPredictor, TokenClassifier
from jaxformer.nn.layers import Dense, Norm
from jaxformer.nn.stack import Positions, Stack
from jaxformer.ops.attention import reference

INPUT, OUTPUT = "input", "output"
"""The names of axes that no `AXES` names."""

FEATURES = {"embed", "heads", "kv_heads", "head_dim", "mlp"}
"""The names of axes inside blocks."""

_IDS = {"vocab", "position", "type"}
_STACKS = (Stack, Encoder)


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
    return axes_in(trace_modules(model, *inputs))


def axes_in(trace: "Trace") -> dict[str, Axes]:
    """The axes of the parameters that `trace` has seen."""
    blocks = _blocks(trace)
    axes = {}
    for path, shape in trace.shapes.items():
        rank = trace.ranks[path]
        named_inputs, outputs = _named(trace, path, rank) or _of_module(trace, path, rank)
        names = {*named_inputs, *outputs}
        in_block = any(path.startswith(f"{block}/") for block in blocks)
        axes[path] = Axes(
            named_inputs,
            outputs,
            layers=len(shape) - rank,
            is_hidden=bool(named_inputs) and not names & _IDS and (in_block or names <= FEATURES),
        )
    return axes


class Trace(NamedTuple):
    """The modules and parameters that a call of `model.init` uses."""

    modules: dict[str, nn.Module]
    """Every module by path, in the order in which they are called first."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of each parameter."""
    ranks: dict[str, int]
    """The number of axes of each parameter as its module sees it, without stacked layers."""

    def owner(self, path: str) -> str:
        """The path of the module that has the parameter at `path`."""
        return next(parent for parent in _parents(path) if parent in self.modules)


def trace_modules(model: nn.Module, *inputs: Any) -> Trace:
    """The modules and the shapes of the parameters of `model`; nothing is computed."""
    modules: dict[str, nn.Module] = {}
    ranks: dict[str, int] = {}
    called: set[str] = set()
    if hasattr(model, "attention_fn"):  # it has no parameters, and may not support the call
        model = model.clone(attention_fn=reference)

    def record(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        path = "/".join(module.path)
        if context.method_name == "__call__" and path not in called:
            modules.pop(path, None)
            called.add(path)
        modules.setdefault(path, module)
        result = call(*args, **kwargs)
        params: Any = nn.unbox(module.variables.get("params", {}))
        leaves: dict[str, Any] = flatten_dict(params, sep="/")
        for name, leaf in leaves.items():  # inner modules come first
            ranks.setdefault(f"{path}/{name}".lstrip("/"), jnp.ndim(leaf))
        return result

    def init(*inputs: Any) -> Any:
        return nn.unbox(model.init(jax.random.key(0), *inputs)["params"])

    with nn.intercept_methods(record):
        params = jax.eval_shape(init, *(inputs or example_inputs(model)))
    leaves: dict[str, Any] = flatten_dict(params, sep="/")
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    return Trace(modules, shapes, ranks)


def example_inputs(model: nn.Module) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the smallest inputs of a model whose required arguments are token ids."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    if isinstance(model, Classifier | TokenClassifier | SpanPredictor):
        return ids, jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    arguments = inspect.signature(model.__call__).parameters.values()
    required = [x for x in arguments if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    return (ids,) * len(required)


def _parents(path: str) -> Iterator[str]:
    """The paths of the modules around the parameter at `path`, the innermost first."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def _named(trace: Trace, path: str, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The names that the outermost module with an `AXES` for `path` gives; None without one."""
    for parent in reversed([parent for parent in _parents(path) if parent in trace.modules]):
        relative = path.removeprefix(parent).removeprefix("/")
        for kind in type(trace.modules[parent]).__mro__:
            if relative in vars(kind).get("AXES", {}):
                text = vars(kind)["AXES"][relative]
                before, _, after = text.rpartition("->")
                inputs, outputs = tuple(before.split()), tuple(after.split())
                if len(inputs) + len(outputs) != rank:
                    raise ConfigError(
                        f"{kind.__name__}.AXES says {text!r} of {relative}, which has {rank} axes: "
                        f"name {rank} axes, as in 'embed -> mlp'"
                    )
                return inputs, outputs
    return None


def _of_module(trace: Trace, path: str, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of a parameter that no `AXES` names."""
    module, name = trace.modules[trace.owner(path)], path.rpartition("/")[2]
    if isinstance(module, nn.Embed):
        return ("vocab",), ("embed",)
    features = 1
    if isinstance(module, Dense | nn.DenseGeneral) and isinstance(module.features, tuple):
        features = len(module.features)
    num_inputs = rank - features if _is_dense(module) and name == "kernel" else min(rank - 1, 1)
    if _is_dense(module) and name == "bias":
        num_inputs = 0
    return (INPUT,) * num_inputs, (OUTPUT,) * (rank - num_inputs)


def _is_dense(module: nn.Module) -> bool:
    return isinstance(module, Dense | nn.Dense | nn.DenseGeneral | nn.Conv)


def _blocks(trace: Trace) -> list[str]:
    """The paths of the children of each `Stack` or `Encoder` other than norms and positions."""
    return [
        path
        for path, module in trace.modules.items()
        if isinstance(trace.modules.get(path.rpartition("/")[0]), _STACKS)
        and not isinstance(module, Positions | Norm)
    ]
