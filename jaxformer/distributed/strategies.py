"""Strategies: one device, copies of the state, or a state divided over a mesh."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import Partial

from jaxformer.distributed.batches import DividedRows, check_rows, row_spec
from jaxformer.distributed.gathering import (
    BATCH_AXES,
    GatherAt,
    Gathering,
    batch_spec,
    check_gather_at,
    torus_stages,
)
from jaxformer.distributed.memory import check_fits
from jaxformer.distributed.mesh import AXES, CompiledStep, Device
from jaxformer.distributed.processes import to_numpy
from jaxformer.distributed.sharding_rules import RULES, MeshAxes, inherited_specs, partition_specs
from jaxformer.nn.axes import parameter_axes
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import ModelAxes, Params, flatten, map_with_path
from jaxformer.training.train_step import (
    Batch,
    GradientSums,
    Metrics,
    TrainState,
    make_eval_step,
    make_update,
)


class Strategy(DividedRows):
    """A mesh of devices, and how a state is divided over it.

    `single`, `replicated` and `sharded` create one. A state has the same global shapes under each.
    The mesh axes data and fsdp divide the rows of a batch, fsdp, sequence and tensor parameters.

    Attributes:
      mesh: the devices that programs are compiled for.
      rules: the mesh axis of each named axis of a parameter; None copies all parameters.
      paths: specs by a regular expression of the parameter's path, before `rules`.
      axes: the named axes of the parameters, which `rules` need (see `for_model`).
      compiler_options: passed to XLA (see `ProcessSetup.compiler_options`).
      num_shards: into how many parts the rows of a batch are divided.
      local_shards: the indices of the parts that devices of this process hold.

    >>> strategy = jf.single()
    >>> def loss(params, batch, rng):
    ...     return jnp.sum(batch["x"] * params["scale"]), jnp.float32(batch["x"].size)
    >>> batch = strategy.shard_batch({"x": jnp.array([1.0, 2.0, 6.0])})
    >>> params = strategy.shard_state({"scale": jnp.float32(2.0)})
    >>> metrics = strategy.evaluate(loss)(params, batch)
    >>> float(metrics["loss"]), float(metrics["tokens"])
    (18.0, 3.0)
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: Mapping[str, MeshAxes] | None = None,
        *,
        paths: Mapping[str, PartitionSpec] = MappingProxyType({}),
        axes: ModelAxes | None = None,
        compiler_options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(mesh)
        self.rules: Mapping[str, MeshAxes] | None = rules
        self.paths: Mapping[str, PartitionSpec] = paths
        self.axes: ModelAxes | None = axes
        self.compiler_options: Mapping[str, str] = compiler_options

    def for_model(self, model: nn.Module, *inputs: Any) -> "Strategy":
        """This strategy for the parameters of `model`, whose axes it then knows.

        `inputs` are those of `parameter_axes`. `sharded` strategies need it for parameters with
        more than two dimensions, and to divide axes by name.
        """
        strategy = copy.copy(self)
        strategy.axes = parameter_axes(model, *inputs)
        return strategy

    def init(self, make_state: Callable[[], Any]) -> Any:
        """The state that `make_state()` returns, each part created on the device that keeps it.

        The arguments of a `jax.tree_util.Partial` are data of the compiled program. Raises
        `ConfigError` where the state is larger than the devices' memory.
        """
        if not isinstance(make_state, Partial):
            make_state = Partial(make_state)
        abstract = self.abstract(make_state)
        check_fits(abstract)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        # XLA cannot divide a call of JAX's kernel among devices.
        kernel = _threefry_kernel() if self.mesh.size == 1 else nullcontext()
        with jax.set_mesh(self.mesh), kernel:
            return jax.jit(_call, out_shardings=shardings)(make_state)

    def abstract(self, make_state: Callable[[], Any]) -> Any:
        """The result of `init` as `jax.ShapeDtypeStruct` with shardings, to restore into."""
        shapes = jax.eval_shape(make_state)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            self.shardings(shapes),
        )

    def shard_state(self, tree: Any) -> Any:
        """A state or parameters from a file or other devices, moved to this strategy's devices.

        Every process gives the whole tree. Decoding with the result runs on all of the devices.
        """
        return jax.device_put(tree, self.shardings(tree))

    def gather(self, tree: Any) -> Any:
        """The whole `tree` as numpy arrays on every process; a PRNG key as its key data."""
        return jax.tree.map(to_numpy, tree)

    def shardings(self, tree: Any) -> Any:
        """The tree of `Sharding` for the leaves of a state, or of parameters alone.

        Moments and averages are divided like their parameter.
        """
        params = getattr(tree, "params", tree)
        specs = inherited_specs(tree, params, self._specs(params))
        return map_with_path(lambda path, _: self._sharding(specs[path]), tree)

    def step(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        grad_accumulation: int = 1,
        ema_decay: float = 0.0,
        gather_at: GatherAt = "step",
        gather_dtype: Any = None,
    ) -> CompiledStep:
        """The compiled `make_train_step`: (state, sharded batch) -> (state, metrics).

        Donates the state: its memory becomes that of the returned one. Parameters that fsdp divides
        are gathered for the loss; a reduce-scatter adds their gradient up and divides it again.
        `gather_at` says when:

          "step": once a step, before and after gradient accumulation, which moves the least. In
            between each device holds all parameters, and the whole gradient if it accumulates.
          "use": in each module that reads the parameter, in each part of the batch, and again where
            the backward pass rematerialises the module. A device holds few whole parameters at a
            time. The loss must read parameters through Flax modules, or call `flax.linen.unbox`.

        They are moved in `gather_dtype`: give the model's `dtype` (None: their own). A gradient is
        added up in the parameter's own type.

        Raises `ConfigError` for another `gather_at`, for a loss that reads a parameter otherwise
        with "use", and when `num_shards` x `grad_accumulation` does not divide the rows of a batch.
        """
        check_gather_at(gather_at)
        update = make_update(optimizer, ema_decay)

        def sums_of(specs: Any, params: Params, batch: Batch, rng: jax.Array) -> GradientSums:
            stages = torus_stages(self.mesh)
            gathering = Gathering(specs, self._axes, gather_at, gather_dtype, stages)
            return gathering.gradient_sums(loss, params, batch, rng, grad_accumulation)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            check_rows(batch, self.num_shards, grad_accumulation)
            specs = self._tree_of_specs(state.params)
            out_specs = specs, *[PartitionSpec()] * 3
            on_shards = self._on_shards(partial(sums_of, specs), specs, out_specs)
            state, metrics = update(state, on_shards(state.params, batch, state.dropout_rng))
            if self.mesh.size > 1:
                state = jax.lax.with_sharding_constraint(state, self.shardings(state))
            return state, metrics

        return CompiledStep(step, partial(self._jit, donate_argnums=0), self.mesh)

    def evaluate(
        self, loss: Loss, *, gather_at: GatherAt = "step", gather_dtype: Any = None
    ) -> CompiledStep:
        """The compiled `make_eval_step`: (params, sharded batch) -> metrics, which are sums.

        `gather_at` and `gather_dtype` are those of `step`, and the same losses are refused.
        """
        check_gather_at(gather_at)

        def sums_of(specs: Any, params: Params, batch: Batch) -> Metrics:
            gathering = Gathering(specs, self._axes, gather_at, gather_dtype)
            return gathering.sum(make_eval_step(gathering.of_parts(loss))(params, batch))

        def evaluate(params: Params, batch: Batch) -> Metrics:
            specs = self._tree_of_specs(params)
            return self._on_shards(partial(sums_of, specs), specs, PartitionSpec())(params, batch)

        return CompiledStep(evaluate, self._jit, self.mesh)

    @property
    def _axes(self) -> tuple[str, ...]:
        """The mesh axes that divide the rows of a batch among more than one group of devices."""
        return tuple(axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1)

    def _on_shards(
        self, function: Callable[..., Any], specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`function(params, batch, ...)`, each device with its parts of the parameters and rows.

        XLA partitions what is computed along the other axes.
        """
        if not self._axes:
            return function

        def mapped(params: Params, batch: Batch, *rest: Any) -> Any:
            rows = jax.tree.map(row_spec, batch)
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=(jax.tree.map(batch_spec, specs), rows, *[PartitionSpec()] * len(rest)),
                out_specs=jax.tree.map(batch_spec, out_specs),
                axis_names={*(BATCH_AXES if self.mesh.size > self.num_shards else AXES)},
                check_vma=False,
            )(params, batch, *rest)

        return mapped

    def _specs(self, params: Params) -> dict[str, PartitionSpec]:
        if self.rules is None:
            return dict.fromkeys(flatten(params), PartitionSpec())
        sizes = self.mesh.shape
        return partition_specs(params, sizes, self.rules, paths=self.paths, axes=self.axes)

    def _tree_of_specs(self, params: Params) -> Any:
        specs = self._specs(params)
        return map_with_path(lambda path, _: specs[path], params)

    def _jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiler_options = dict(self.compiler_options) or None
        return jax.jit(function, compiler_options=compiler_options, **options)


def single(
    device: Device | None = None,
    *,
    compiler_options: Mapping[str, str] = MappingProxyType({}),
) -> Strategy:
    """Everything on `device`, or on the first device of this process.

    >>> jf.single().num_shards
    1
    """
    device = jax.local_devices()[0] if device is None else device
    return Strategy(Mesh(np.array([device]), ("data",)), compiler_options=compiler_options)


def replicated(
    devices: Sequence[Device] | None = None,
    *,
    compiler_options: Mapping[str, str] = MappingProxyType({}),
) -> Strategy:
    """A copy of the state on each of `devices`, or on all devices of all processes.

    Each device computes on its rows. One sum per step adds gradients, losses and tokens up, also
    with gradient accumulation.

    >>> strategy = jf.replicated(jax.devices()[:1])
    >>> strategy.local_rows(6)  # of a batch of 6, on the devices of this process
    array([0, 1, 2, 3, 4, 5])
    """
    devices = jax.devices() if devices is None else devices
    return Strategy(Mesh(np.array(devices), ("data",)), compiler_options=compiler_options)


def sharded(
    mesh: Mesh,
    rules: Mapping[str, MeshAxes] = RULES,
    *,
    paths: Mapping[str, PartitionSpec] = MappingProxyType({}),
    axes: ModelAxes | None = None,
    compiler_options: Mapping[str, str] = MappingProxyType({}),
) -> Strategy:
    """The state divided over `mesh`, whose axes are named as those of `AXES`.

    `rules` say which mesh axis divides each axis of a parameter, by the names in `axes`, those of
    `parameter_axes(model)` (see also `Strategy.for_model`); `{**RULES, "vocab": None}` changes one.
    `paths` give a whole spec by a regular expression of a parameter's path. Explicit axes of the
    mesh are used as Auto axes.

    >>> from jax.sharding import PartitionSpec
    >>> from jaxformer.distributed import make_mesh
    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> mesh = make_mesh("data=1,fsdp=1,tensor=1", jax.devices()[:1])
    >>> whole_tables = {"(^|/)table$": PartitionSpec()}
    >>> strategy = jf.sharded(mesh, paths=whole_tables).for_model(jf.DecoderOnly(config))
    >>> strategy.num_shards
    1
    """
    return Strategy(mesh, rules, paths=paths, axes=axes, compiler_options=compiler_options)


def strategy_of(params: Any) -> Strategy:
    """The strategy whose devices hold `params`, divided as they are: the same object each time.

    >>> strategy_of({"scale": jnp.ones(3)}).num_shards
    1
    """
    placed = {k: x.sharding for k, x in flatten(params).items() if isinstance(x, jax.Array)}
    divided = {k: x for k, x in placed.items() if isinstance(x, NamedSharding)}
    if not divided:
        devices = [device for sharding in placed.values() for device in sharding.device_set]
        return _divided_so(Mesh(np.array((devices or jax.local_devices())[:1]), ("data",)), ())
    mesh = next(iter(divided.values())).mesh
    assert isinstance(mesh, Mesh)  # arrays outside of programs lie on devices
    return _divided_so(mesh, tuple((path, x.spec) for path, x in divided.items()))


@lru_cache(maxsize=16)
def _divided_so(mesh: Mesh, specs: tuple[tuple[str, PartitionSpec], ...]) -> Strategy:
    paths = {f"^{re.escape(path)}$": spec for path, spec in specs}
    return Strategy(mesh, {} if paths else None, paths=paths)


@contextmanager
def _threefry_kernel() -> Iterator[None]:
    """Within it, programs for a GPU call JAX's kernel for random numbers.

    A program that creates many parameters then compiles in a tenth of the time: otherwise each has
    a kernel of its own.
    """
    option = "jax_threefry_gpu_kernel_lowering"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def _call(function: Callable[[], Any]) -> Any:
    return function()
