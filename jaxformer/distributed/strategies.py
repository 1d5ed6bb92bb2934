"""Where a step runs: on one device, on copies of the state, or on a state divided over a mesh."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Int

from jaxformer.distributed.counted_jit import CountedJit
from jaxformer.distributed.mesh import Device, standardize
from jaxformer.distributed.sharding_rules import RULES, Rule, inherited_specs, partition_specs
from jaxformer.errors import ConfigError
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import Params, flatten, map_with_path
from jaxformer.training.train_step import (
    Batch,
    LossSums,
    Metrics,
    TrainState,
    checked_loss,
    make_eval_step,
    make_train_step,
)

_BATCH_AXES = ("data", "fsdp")  # the mesh axes that divide the rows of a batch


class Strategy:
    """Base class of the three strategies; a state has the same global shapes under each.

    Attributes:
      mesh: the devices that programs are compiled for.
      num_shards: into how many parts the rows of a batch are divided.
      local_shards: the indices of the parts that devices of this process hold.
      compiler_options: passed to XLA (see `ProcessSetup.compiler_options`).
    """

    mesh: Mesh
    num_shards: int
    local_shards: tuple[int, ...]
    compiler_options: Mapping[str, str] = MappingProxyType({})
    _views = 1  # how many parts of a batch run separate programs, each of which sees its part

    def init(self, make_state: Callable[[], Any]) -> Any:
        """The state that `make_state()` returns, each part created on the device that keeps it."""
        shardings = self.shardings(jax.eval_shape(make_state))
        with jax.set_mesh(self.mesh):
            return jax.jit(make_state, out_shardings=shardings)()

    def abstract(self, make_state: Callable[[], Any]) -> Any:
        """What `init` returns as `jax.ShapeDtypeStruct` with shardings, for restoring onto."""
        shapes = jax.eval_shape(make_state)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            self.shardings(shapes),
        )

    def shard_state(self, tree: Any) -> Any:
        """A state or parameters from a file or other devices, moved to this strategy's devices.

        Every process gives the whole tree.
        """
        return jax.device_put(tree, self.shardings(tree))

    def local_rows(self, batch_size: int) -> Int[np.ndarray, " R"]:
        """The ascending indices of the rows of a global batch that this process has to build.

        One process builds all rows. Several processes build different rows, except where a mesh
        divides the work on one row among them. Raises `ConfigError` when `num_shards` does not
        divide `batch_size`.
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
        self._check_rows(batch, 1, self.num_shards / len(self.local_shards))
        return jax.tree.map(self._shard_leaf, batch)

    def gather(self, tree: Any) -> Any:
        """The whole `tree` as numpy arrays on every process; a PRNG key as its key data."""
        return jax.tree.map(_whole, tree)

    def step(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        grad_accumulation: int = 1,
        ema_decay: float = 0.0,
    ) -> CountedJit:
        """The compiled `make_train_step`: (state, sharded batch) -> (state, metrics).

        The memory of the given state is reused for the returned one. Raises `ConfigError` when
        `num_shards` x `grad_accumulation` does not divide the rows of a batch.
        """

        def reduce(sums: Any) -> Any:
            grads, *rest = self._reduce(sums)
            return self._constrain(grads), *rest

        inner = make_train_step(
            self._distribute(loss),
            optimizer,
            grad_accumulation=grad_accumulation,
            ema_decay=ema_decay,
            reduce=reduce,
        )

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            self._check_rows(batch, grad_accumulation, self._views)
            state, metrics = inner(state, batch)
            return self._constrain(state), metrics

        jit = partial(self._jit, donate_argnums=0)
        return CountedJit(step, jit, self.mesh, self._to_global)

    def evaluate(self, loss: Loss) -> CountedJit:
        """The compiled `make_eval_step`: (params, sharded batch) -> metrics, which are sums."""
        eval_step = make_eval_step(self._distribute(loss))

        def reduced(params: Params, batch: Batch) -> Metrics:
            return self._reduce(eval_step(params, batch))

        return CountedJit(reduced, self._jit, self.mesh, self._to_global)

    def shardings(self, tree: Any) -> Any:
        """The tree of `Sharding` for the leaves of a state, or of parameters alone."""
        raise NotImplementedError

    def _shard_leaf(self, leaf: Any) -> jax.Array:
        """One leaf of a batch on the devices."""
        raise NotImplementedError

    def _from_local_rows(self, leaf: np.ndarray, sharding: Sharding) -> jax.Array:
        """The global array whose rows on this process are `leaf`."""
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
        if leaf.ndim == 0:
            return jax.make_array_from_callback((), sharding, lambda _: leaf)
        size = len(leaf) // len(self.local_shards)
        shape = (size * self.num_shards, *leaf.shape[1:])

        def part(index: Any) -> np.ndarray:
            first = self.local_shards.index(index[0].indices(shape[0])[0] // size) * size
            return leaf[first : first + size]

        return jax.make_array_from_callback(shape, sharding, part)

    def _jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiler_options = dict(self.compiler_options) or None
        return jax.jit(function, compiler_options=compiler_options, **options)

    def _to_global(self, tree: Any) -> Any:
        """What a program returned, as arrays of all processes."""
        return tree

    # The next three act inside a program. On one device they do nothing.

    def _distribute(self, loss: Loss) -> Loss:
        """`loss` computed on all devices that one program sees."""
        return loss

    def _reduce(self, sums: Any) -> Any:
        """The sums over all programs."""
        return sums

    def _constrain(self, tree: Any) -> Any:
        """`tree` with the shardings of a state."""
        return tree

    def _check_rows(self, batch: Any, grad_accumulation: int, views: float = 1) -> None:
        need = self.num_shards * grad_accumulation
        for path, leaf in flatten(batch).items():
            rows = int(leaf.shape[0] * views) if jnp.ndim(leaf) else 0
            if rows % need:
                raise ConfigError(
                    f"{path} has {rows} rows, but {self.num_shards} shards x grad_accumulation="
                    f"{grad_accumulation} need a multiple of {need}: change one of the three"
                )


class SingleDevice(Strategy):
    """One device, with `jax.jit`. Created by `single`."""

    num_shards: int = 1
    local_shards: tuple[int, ...] = (0,)

    def __init__(self, device: Device, compiler_options: Mapping[str, str]) -> None:
        self.compiler_options: Mapping[str, str] = compiler_options
        self.mesh: Mesh = standardize(Mesh(np.array([device]), ("data",)))
        self._sharding = SingleDeviceSharding(device)

    def shardings(self, tree: Any) -> Any:
        """The one device for every leaf."""
        return jax.tree.map(lambda _: self._sharding, tree)

    def _shard_leaf(self, leaf: Any) -> jax.Array:
        return jax.device_put(leaf, self._sharding)


class Replicated(Strategy):
    """A copy of the state on each device, with `jax.pmap`. Created by `replicated`.

    Each device computes on its rows. One `psum` per step adds gradients, losses and tokens, also
    with gradient accumulation.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = list(devices)
        self.num_shards: int = len(self._devices)
        self._views = self.num_shards
        self.local_shards: tuple[int, ...] = _of_this_process(self._devices)
        self.mesh: Mesh = Mesh(np.array(self._devices), ("data",))
        self._everywhere = NamedSharding(self.mesh, PartitionSpec())
        self._rows = NamedSharding(self.mesh, PartitionSpec("data"))

    def shardings(self, tree: Any) -> Any:
        """Every device for every leaf."""
        return jax.tree.map(lambda _: self._everywhere, tree)

    def _shard_leaf(self, leaf: Any) -> jax.Array:
        leaf, here = np.asarray(leaf), len(self.local_shards)
        shape = (-1, *leaf.shape[1:]) if leaf.ndim else ()
        leaf = np.broadcast_to(leaf, leaf.shape or (here,))
        return self._from_local_rows(leaf.reshape(here, *shape), self._rows)

    def _jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`function` on every device, on the same state and different rows."""
        axes: dict[str, Any] = {"in_axes": (None, 0), "out_axes": None}
        return jax.pmap(function, "data", devices=self._devices, **axes, **options)

    def _to_global(self, tree: Any) -> Any:
        return tree if jax.process_count() == 1 else jax.tree.map(self._join_copies, tree)

    def _join_copies(self, leaf: jax.Array) -> jax.Array:
        """The copies of several processes, which `jax.pmap` keeps apart, as one array."""
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = self._join_copies(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        copies = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, self._everywhere, copies)

    def _reduce(self, sums: Any) -> Any:
        return jax.lax.psum(sums, "data")


class Sharded(Strategy):
    """One state divided over a mesh, with `jax.jit`. Created by `sharded`.

    The mesh axes data and fsdp divide the rows of a batch. The axes fsdp and tensor divide
    parameters, according to `rules`.
    """

    def __init__(
        self, mesh: Mesh, rules: Sequence[Rule], compiler_options: Mapping[str, str]
    ) -> None:
        self.compiler_options: Mapping[str, str] = compiler_options
        self.mesh: Mesh = standardize(mesh)
        self.rules: tuple[Rule, ...] = tuple(rules)
        self.num_shards: int = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        self.local_shards: tuple[int, ...] = _of_this_process(
            *self.mesh.devices.reshape(self.num_shards, -1).T
        )

    def shardings(self, tree: Any) -> Any:
        """By the rules for parameters; moments and averages like their parameter."""
        params = getattr(tree, "params", tree)
        specs = inherited_specs(tree, params, self._specs(params))
        return map_with_path(lambda path, _: NamedSharding(self.mesh, specs[path]), tree)

    def _shard_leaf(self, leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        spec = PartitionSpec(_BATCH_AXES) if leaf.ndim else PartitionSpec()
        return self._from_local_rows(leaf, NamedSharding(self.mesh, spec))

    def _distribute(self, loss: Loss) -> Loss:
        """`loss` with a copy of the parameters for each group of devices that shares rows.

        Without the copies XLA also divides activations along the axes of the parameters, and moves
        far more data. The gradient is a sum over the copies: one reduction per parameter, however
        often the model uses it.
        """
        if self.num_shards == 1:
            return loss
        loss = checked_loss(loss)

        def summed(params: Params, batch: Batch, rng: jax.Array | None) -> LossSums:
            specs = self._specs(params)
            copies = map_with_path(lambda path, leaf: self._copy(leaf, specs[path]), params)
            each = jax.vmap(
                lambda params, rows: loss(params, rows, rng), spmd_axis_name=_BATCH_AXES
            )
            return jax.tree.map(jnp.sum, each(copies, jax.tree.map(self._group_rows, batch)))

        return summed

    def _constrain(self, tree: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def _specs(self, params: Params) -> dict[str, PartitionSpec]:
        return partition_specs(params, self.rules, self.mesh.shape)

    def _copy(self, leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A parameter [...] as [shards, ...]; only the tensor axis divides a copy."""
        copies = jnp.broadcast_to(leaf[None], (self.num_shards, *leaf.shape))
        return self._constrain_leaf(
            copies, PartitionSpec(_BATCH_AXES, *map(_without_batch_axes, spec))
        )

    def _group_rows(self, leaf: jax.Array) -> jax.Array:
        """A leaf [B, ...] of a batch as [shards, B / shards, ...]; a scalar as [shards]."""
        if leaf.ndim == 0:
            return jnp.broadcast_to(leaf, (self.num_shards,))
        leaf = leaf.reshape(self.num_shards, -1, *leaf.shape[1:])
        return self._constrain_leaf(leaf, PartitionSpec(_BATCH_AXES))

    def _constrain_leaf(self, leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))


def single(
    device: Device | None = None,
    *,
    compiler_options: Mapping[str, str] = MappingProxyType({}),
) -> SingleDevice:
    """Everything on `device`, or on the first device of this process."""
    return SingleDevice(jax.local_devices()[0] if device is None else device, compiler_options)


def replicated(devices: Sequence[Device] | None = None) -> Replicated:
    """A copy of the state on each of `devices`, or on all devices of all processes."""
    return Replicated(jax.devices() if devices is None else devices)


def sharded(
    mesh: Mesh,
    rules: Sequence[Rule] = RULES,
    *,
    compiler_options: Mapping[str, str] = MappingProxyType({}),
) -> Sharded:
    """The state divided over `mesh`, whose axes are named data, fsdp and tensor.

    The first of `rules` whose pattern matches a parameter's path decides; `(Rule(...), *RULES)`
    changes one. Explicit axes are used as Auto axes.
    """
    return Sharded(mesh, rules, compiler_options)


def _of_this_process(*lists: Iterable[Device]) -> tuple[int, ...]:
    """The indices at which one of the equally long `lists` has a device of this process."""
    here = jax.process_index()
    columns = enumerate(zip(*lists, strict=True))
    return tuple(i for i, one in columns if any(device.process_index == here for device in one))


def _whole(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def _without_batch_axes(axis: Any) -> Any:
    """An entry of a spec without the mesh axes that divide rows."""
    names = axis if isinstance(axis, tuple) else (axis,)
    return tuple(name for name in names if name not in (None, *_BATCH_AXES)) or None
