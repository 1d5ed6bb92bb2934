"""Strategies: one device, copies of the state, or a state divided over a mesh."""

import contextlib
import copy
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import Partial
from jaxtyping import Int

from jaxformer.distributed.batch_rows import check_rows, global_array, row_spec
from jaxformer.distributed.compiled_step import CompiledStep, threefry_kernel
from jaxformer.distributed.device_memory import check_fits
from jaxformer.distributed.gathering import (
    GatherAt,
    Gathering,
    check_gather_at,
    on_shards,
    row_axes,
)
from jaxformer.distributed.mesh import BATCH_AXES, Device, count_slices, standardize
from jaxformer.distributed.processes import is_key, to_numpy
from jaxformer.distributed.sharding_rules import (
    RULES,
    MeshAxes,
    inherited_specs,
    loss_specs,
    partition_specs,
)
from jaxformer.distributed.torus import torus_stages
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import parameter_axes
from jaxformer.text.data import RowSelection, fill_rows
from jaxformer.text.data.batches import pad_rows
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import ModelAxes, Params, flatten, map_with_path
from jaxformer.training.train_step import (
    Batch,
    GradientSums,
    Metrics,
    TrainState,
    make_eval_step,
    make_update,
    mean_loss,
    refuse_line_search,
)


class Strategy:
    """A mesh of devices, and how a state is divided over it.

    `single`, `replicated` and `sharded` create one. A state has the same global shapes under each.
    The mesh axes data and fsdp divide the rows of a batch, fsdp, sequence and tensor parameters.

    Attributes:
      mesh: the devices that programs are compiled for.
      rules, paths, axes: as in `sharded`; `rules` None copies all parameters.
      compiler_options: passed to XLA (see `ProcessSetup.compiler_options`).
      num_shards: the number of parts of the rows of a batch.
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
        self.mesh: Mesh = standardize(mesh)
        self.num_shards: int = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        groups = self.mesh.devices.reshape(self.num_shards, -1)
        process = jax.process_index()
        self.local_shards: tuple[int, ...] = tuple(
            i for i, group in enumerate(groups) if any(d.process_index == process for d in group)
        )
        self.rules: Mapping[str, MeshAxes] | None = rules
        self.paths: Mapping[str, PartitionSpec] = paths
        self.axes: ModelAxes | None = axes
        self.compiler_options: Mapping[str, str] = compiler_options

    def for_model(
        self, model: nn.Module, *inputs: Any, method: Callable[..., Any] | str | None = None
    ) -> "Strategy":
        """This strategy for the parameters of `model`, whose axes it then knows.

        `inputs` and `method` go to `parameter_axes`. `sharded` strategies need it for parameters
        with more than two dimensions, and to divide axes by name.
        """
        strategy = copy.copy(self)
        strategy.axes = parameter_axes(model, *inputs, method=method)
        return strategy

    def init(self, make_state: Callable[..., Any], *donated: Any) -> Any:
        """The state `make_state(*donated)`, each part created on the device that keeps it.

        The arguments of a `jax.tree_util.Partial` are data of the compiled program. The memory of
        the arrays in `donated`, such as weights that were read for the state, becomes the state's
        where type and sharding are the same; they cannot be read any more. Raises `ConfigError`
        where the state is larger than the devices' memory.
        """
        if not isinstance(make_state, Partial):
            make_state = Partial(make_state)
        # XLA cannot divide a call of JAX's kernel among devices.
        with jax.set_mesh(self.mesh), threefry_kernel(self.mesh.size == 1):
            abstract = self.abstract(make_state, *donated)
            check_fits(abstract)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
            numbers = range(1, 1 + len(donated))
            create = jax.jit(operator.call, donate_argnums=numbers, out_shardings=shardings)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                return create(make_state, *donated)

    def abstract(self, make_state: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `init` as `jax.ShapeDtypeStruct` with shardings, to restore into."""
        if not isinstance(make_state, Partial):
            make_state = Partial(make_state)
        # A trace that `init` finds again.
        shapes = jax.eval_shape(operator.call, make_state, *arguments)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            self.shardings(shapes),
        )

    def local_rows(self, batch_size: int) -> Int[np.ndarray, " R"]:
        """The ascending indices of the rows of a global batch that this process has to build.

        Several processes build different rows, except where a mesh divides the work on one row
        among them. Raises `ConfigError` when `num_shards` does not divide `batch_size`.
        """
        if batch_size % self.num_shards:
            raise ConfigError(
                f"a batch has {batch_size} rows, but {self.num_shards} shards need a multiple of "
                f"{self.num_shards}: change one of the two"
            )
        size = batch_size // self.num_shards
        return np.concatenate([np.arange(size) + shard * size for shard in self.local_shards])

    def shard_batch(self, batch: Batch) -> Batch:
        """The global batch on the devices, from the rows that this process has built.

        `batch` holds scalars and numpy arrays [R, ...], the rows `local_rows(B)` of the global
        arrays [B, ...]. Raises `ConfigError` when `num_shards` does not divide B.
        """
        share = self.num_shards / len(self.local_shards)
        check_rows(batch, self.num_shards, share=share)
        return jax.tree.map(lambda leaf: self._place(leaf, BATCH_AXES, share), batch)

    def make_batch(self, make: Callable[[RowSelection], Batch], parts: int = 1) -> Batch:
        """The global batch on the devices; every process calls `make` for its own rows.

        `make(rows)` returns the rows of a batch of B that rows(B) selects, such as
        `functools.partial(batches.batch, step)`. Empty rows fill the batch up, so that the devices
        share it evenly, each in `parts` (see `fill_rows`).
        """
        sizes = []

        def select(batch_size: int) -> Int[np.ndarray, " R"]:
            rows = self.local_rows(batch_size + -batch_size % (self.num_shards * parts))
            sizes.append(len(rows))
            return rows[rows < batch_size]

        batch = make(select)
        return self.shard_batch(fill_rows(batch, sizes[0]) if sizes else batch)

    def divide(self, batch: Batch, axes: tuple[str, ...] = BATCH_AXES) -> Batch:
        """The batch on the devices, its rows divided along mesh `axes`; each process has all rows.

        `batch` holds arrays [B, ...] and scalars. Rows of zeros make B a multiple of the parts.
        """
        if self.mesh.size == 1:
            return batch
        return jax.tree.map(lambda leaf: self._place(self._padded(leaf, axes), axes), batch)

    def abstract_batch(
        self, batch: Batch, parts: int = 1, axes: tuple[str, ...] = BATCH_AXES
    ) -> Batch:
        """The result of `make_batch` or `divide` for all rows, as `jax.ShapeDtypeStruct`."""

        def describe(leaf: Any) -> jax.ShapeDtypeStruct:
            leaf = np.asarray(self._padded(leaf, axes, parts))
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            where = self._sharding(row_spec(leaf, axes))
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where)

        return jax.tree.map(describe, batch)

    def _padded(self, leaf: Any, axes: tuple[str, ...], parts: int = 1) -> Any:
        """A leaf with rows of zeros, so that mesh `axes` share its rows evenly, each in `parts`."""
        if is_key(leaf) or not np.ndim(leaf):
            return leaf
        count = math.prod(self.mesh.shape[axis] for axis in axes) * parts
        return pad_rows(np.asarray(leaf), len(leaf) + -len(leaf) % count)

    def _place(self, leaf: Any, axes: tuple[str, ...], share: float = 1.0) -> Any:
        """A leaf on the devices; this process has 1 / `share` of its rows."""
        where = self._sharding(row_spec(leaf, axes))
        return leaf if is_key(leaf) else global_array(leaf, where, share)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Within it programs are compiled for these devices."""
        return jax.set_mesh(self.mesh) if self.mesh.size > 1 else contextlib.nullcontext()

    def shard_state(self, tree: Any) -> Any:
        """A state or parameters from a file or other devices, moved to this strategy's devices.

        Every process gives the whole tree. Decoding with the result runs on all of the devices.
        The result shares no memory with `tree`, so a step that donates it leaves `tree` as it is.
        """

        def place(leaf: Any, where: Sharding) -> jax.Array:
            # On its own device an array would be shared, whatever `may_alias` says.
            return jax.device_put(jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, where)

        return jax.tree.map(place, tree, self.shardings(tree))

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

        Donates the state: its memory becomes the returned one's, and it cannot be read any
        more. `init`, `shard_state` and `init_train_state` make states of their own memory, so what
        they were made of stays. Parameters that fsdp divides
        are gathered for the loss; a reduce-scatter adds their gradient up and divides it again.
        `gather_at` says when:

          "step": once a step, before and after gradient accumulation, which moves the least. In
            between each device holds all parameters, and the whole gradient if it accumulates.
          "use": in each module that reads the parameter, in each part of the batch, and again where
            the backward pass rematerialises the module. A device holds few whole parameters at a
            time. The loss must read parameters through Flax modules, or call `flax.linen.unbox`.

        They are moved in `gather_dtype`: give the model's `dtype` (None: their own). A gradient is
        added up in the parameter's own type.

        A loss that is no sum over rows takes the rows of all devices by `jf.gather_rows`.

        Raises `ConfigError` for another `gather_at`, for a loss that reads a parameter otherwise
        with "use", and when `num_shards` x `grad_accumulation` does not divide the rows of a batch.
        """
        check_gather_at(gather_at)
        update = make_update(optimizer, ema_decay)

        def sums_of(
            specs: Any, kept: Any, params: Params, batch: Batch, rng: jax.Array
        ) -> GradientSums:
            stages = torus_stages(self.mesh)
            gathering = Gathering(specs, row_axes(self.mesh), gather_at, gather_dtype, stages, kept)
            return gathering.gradient_sums(loss, params, batch, rng, grad_accumulation)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            check_rows(batch, self.num_shards, grad_accumulation)
            specs = self._tree_of_specs(state.params)
            out_specs = specs, *[PartitionSpec()] * 3
            kept = self._loss_specs(state.params)
            sums = on_shards(partial(sums_of, specs, kept), self.mesh, specs, out_specs)
            sums_of_batch = sums(state.params, batch, state.dropout_rng)
            value_fn = refuse_line_search
            if self.mesh.size == 1:
                value_fn = mean_loss(loss, batch, state.dropout_rng, grad_accumulation)
            specs_by_path = self._specs(state.params)
            slices = count_slices(self.mesh)
            state, metrics = update(state, sums_of_batch, specs_by_path, value_fn, slices)
            if self.mesh.size > 1:
                state = jax.lax.with_sharding_constraint(state, self.shardings(state))
            return state, metrics

        compiled = CompiledStep(step, self.mesh, self.compiler_options, donate_argnums=0)
        compiled.loss = loss
        return compiled

    def evaluate(
        self, loss: Loss, *, gather_at: GatherAt = "step", gather_dtype: Any = None
    ) -> CompiledStep:
        """The compiled `make_eval_step`: (params, sharded batch) -> metrics, which are sums.

        `gather_at` and `gather_dtype` are as in `step`, and the same losses are refused.
        """
        check_gather_at(gather_at)

        def sums_of(specs: Any, kept: Any, params: Params, batch: Batch) -> Metrics:
            gathering = Gathering(specs, row_axes(self.mesh), gather_at, gather_dtype, kept=kept)
            return gathering.sum(make_eval_step(gathering.of_parts(loss))(params, batch))

        def evaluate(params: Params, batch: Batch) -> Metrics:
            specs = self._tree_of_specs(params)
            kept = self._loss_specs(params)
            sums = on_shards(partial(sums_of, specs, kept), self.mesh, specs, PartitionSpec())
            return sums(params, batch)

        return CompiledStep(evaluate, self.mesh, self.compiler_options)

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        if self.mesh.size == 1:
            return SingleDeviceSharding(self.mesh.devices.item())
        return NamedSharding(self.mesh, spec)

    def _specs(self, params: Params) -> dict[str, PartitionSpec]:
        if self.rules is None:
            return dict.fromkeys(flatten(params), PartitionSpec())
        sizes = self.mesh.shape
        return partition_specs(params, sizes, self.rules, paths=self.paths, axes=self.axes)

    def _tree_of_specs(self, params: Params) -> Any:
        specs = self._specs(params)
        return map_with_path(lambda path, _: specs[path], params)

    def _loss_specs(self, params: Params) -> Any:
        """The tree of specs of parameters within a loss."""
        specs = self._specs(params)
        if self.rules is not None:
            specs = loss_specs(params, specs, self.rules, paths=self.paths, axes=self.axes)
        return map_with_path(lambda path, _: specs[path], params)


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
    """The state divided over `mesh`, whose axes are named as in `MESH_AXES`.

    `rules` say which mesh axis divides each axis of a parameter, by the names in `axes`, which
    `parameter_axes(model)` gives (see also `Strategy.for_model`); `{**RULES, "vocab": None}`
    changes one. `paths` give a whole spec by a regular expression of a parameter's path. Explicit
    axes of the mesh are used as Auto axes.

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
        return _strategy_of_specs(
            Mesh(np.array((devices or jax.local_devices())[:1]), ("data",)), ()
        )
    mesh = next(iter(divided.values())).mesh
    assert isinstance(mesh, Mesh)  # arrays outside of programs lie on devices
    return _strategy_of_specs(mesh, tuple((path, x.spec) for path, x in divided.items()))


@lru_cache(maxsize=16)
def _strategy_of_specs(mesh: Mesh, specs: tuple[tuple[str, PartitionSpec], ...]) -> Strategy:
    paths = {f"^{re.escape(path)}$": spec for path, spec in specs}
    return Strategy(mesh, {} if paths else None, paths=paths)
