"""Where a step runs: one device, copies on several, or parts on a mesh. One protocol for all."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxformer.config import ConfigError
from jaxformer.losses import Loss
from jaxformer.parallel.memory import describe_memory, is_out_of_memory
from jaxformer.parallel.mesh import standard
from jaxformer.parallel.rules import RULES, Rule, following, partition_specs, path_of
from jaxformer.training import TrainState, make_eval_step, make_train_step

_ROWS = ("data", "fsdp")  # the mesh axes that divide the rows of a batch


class Program:
    """A function compiled once for each shape of its arguments.

    Attributes: `programs`, how many times it was traced so far.
    """

    def __init__(self, function: Callable[..., Any], devices: "Devices", **options: Any) -> None:
        @wraps(function)
        def counted(*args: Any) -> Any:
            self.programs += 1
            return function(*args)

        self.programs = 0
        self._devices = devices
        self._compiled = devices._compiled(counted, **options)

    def __call__(self, *args: Any) -> Any:
        """What the function returns; it may still be computing.

        Where a device has no memory left, a note at JAX's error says what the function needs.
        """
        with jax.set_mesh(self._devices.mesh):  # whichever mesh is set outside
            try:
                return self._devices._returned(self._compiled(*args))
            except jax.errors.JaxRuntimeError as error:
                if is_out_of_memory(error):
                    error.add_note(describe_memory(self, args))
                raise

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program for arguments of these shapes, before compilation."""
        with jax.set_mesh(self._devices.mesh):
            return self._compiled.lower(*args)


class Devices:
    """What the three ways share: a state has one global shape, whatever devices hold it.

    Attributes: `mesh`; `shards`, into how many parts the rows of a batch are divided; `share`, the
    numbers of the parts that devices of this process hold; `options`, those of the compiler.
    """

    mesh: Mesh
    shards: int
    share: tuple[int, ...]
    options: Mapping[str, str] = MappingProxyType({})
    _views = 1  # how many views of a batch there are, of which a program sees one

    def init(self, make_state: Callable[[], Any]) -> Any:
        """The state that `make_state()` returns, each part made where it will live."""
        shardings = self.shardings(jax.eval_shape(make_state))
        with jax.set_mesh(self.mesh):
            return jax.jit(make_state, out_shardings=shardings)()

    def abstract(self, make_state: Callable[[], Any]) -> Any:
        """`init` without arrays: `jax.ShapeDtypeStruct` with shardings, for restoring onto."""
        shapes = jax.eval_shape(make_state)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            self.shardings(shapes),
        )

    def put(self, tree: Any) -> Any:
        """A state or parameters from elsewhere (a file, other devices), moved to where they live.

        Every process gives the whole tree.
        """
        return jax.device_put(tree, self.shardings(tree))

    def rows(self, count: int) -> np.ndarray:
        """Which rows of a global batch of `count` this process has to give: ascending numbers.

        One process gives all. Several give different ones, except where a mesh divides the work
        on a row among them. Raises `ConfigError` when `shards` does not divide `count`.
        """
        if count % self.shards:
            raise ConfigError(
                f"a batch has {count} rows, but {self.shards} shards need a multiple of "
                f"{self.shards}: change one of the two"
            )
        size = count // self.shards
        return np.concatenate([np.arange(size) + part * size for part in self.share])

    def place(self, batch: Any) -> Any:
        """The global batch on the devices, from what this process has of it.

        `batch` holds numpy arrays [W, ...], the rows `rows(B)` of the global [B, ...], and
        scalars. Raises `ConfigError` when `shards` does not divide B.
        """
        self._check_rows(batch, 1, self.shards / len(self.share))
        return jax.tree.map(self._placed, batch)

    def gather(self, tree: Any) -> Any:
        """`tree` whole, as numpy, on every process; of a PRNG key its data."""
        return jax.tree.map(_whole, tree)

    def step(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        accumulation: int = 1,
        ema_decay: float = 0.0,
    ) -> Program:
        """`make_train_step` compiled: (state, placed batch) -> (state, metrics).

        The memory of the state given is used for the one returned. Raises `ConfigError` when
        `shards` x `accumulation` does not divide the rows of a batch.
        """

        def reduce(sums: Any) -> Any:
            grads, *rest = self._added(sums)
            return self._held(grads), *rest

        inner = make_train_step(
            self._spread(loss),
            optimizer,
            accumulation=accumulation,
            ema_decay=ema_decay,
            reduce=reduce,
        )

        def step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            self._check_rows(batch, accumulation, self._views)
            state, metrics = inner(state, batch)
            return self._held(state), metrics

        return Program(step, self, donate_argnums=0)

    def evaluate(self, loss: Loss) -> Program:
        """`make_eval_step` compiled: (params, placed batch) -> (sum in nats, tokens)."""
        sums = make_eval_step(self._spread(loss))

        def added(params: Any, batch: Any) -> Any:
            return self._added(sums(params, batch))

        return Program(added, self)

    def shardings(self, tree: Any) -> Any:
        """Where each leaf of a state, or of parameters alone, lives: a tree of `Sharding`."""
        raise NotImplementedError

    def _placed(self, leaf: Any) -> jax.Array:
        """One leaf of a batch on the devices."""
        raise NotImplementedError

    def _divided(self, leaf: np.ndarray, sharding: Sharding) -> jax.Array:
        """The global array whose rows here are `leaf`, each part where it belongs."""
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
        if leaf.ndim == 0:
            return jax.make_array_from_callback((), sharding, lambda _: leaf)
        size = len(leaf) // len(self.share)
        shape = (size * self.shards, *leaf.shape[1:])

        def part(index: tuple[slice, ...]) -> np.ndarray:
            first = self.share.index(index[0].indices(shape[0])[0] // size) * size
            return leaf[first : first + size]

        return jax.make_array_from_callback(shape, sharding, part)

    def _compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return jax.jit(function, compiler_options=dict(self.options) or None, **options)

    def _returned(self, tree: Any) -> Any:
        """What a program returns, as arrays of all processes."""
        return tree

    # What happens inside a program; nothing, on one device.

    def _spread(self, loss: Loss) -> Loss:
        return loss

    def _added(self, sums: Any) -> Any:
        return sums

    def _held(self, tree: Any) -> Any:
        return tree

    def _check_rows(self, batch: Any, accumulation: int, views: float = 1) -> None:
        need = self.shards * accumulation
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            rows = int(leaf.shape[0] * views) if jnp.ndim(leaf) else 0
            if rows % need:
                raise ConfigError(
                    f"{path_of(path)} has {rows} rows, but {self.shards} shards x accumulation="
                    f"{accumulation} need a multiple of {need}: change one of the three"
                )


class OneDevice(Devices):
    """One device, by jit. Made by `one_device`."""

    shards, share = 1, (0,)

    def __init__(self, device: jax.Device, options: Mapping[str, str]) -> None:
        self.options = options
        self.mesh = standard(Mesh(np.array([device]), ("data",)))
        self._sharding = SingleDeviceSharding(device)

    def shardings(self, tree: Any) -> Any:
        """The one device for every leaf."""
        return jax.tree.map(lambda _: self._sharding, tree)

    def _placed(self, leaf: Any) -> jax.Array:
        return jax.device_put(leaf, self._sharding)


class Replicated(Devices):
    """A copy of the state on each device, by `jax.pmap`. Made by `replicate`.

    Each device takes its rows; gradients, losses and tokens are added by one `psum` a step,
    whatever the accumulation.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = list(devices)
        self.shards = self._views = len(self._devices)
        self.share = _of_this_process(self._devices)
        self.mesh = Mesh(np.array(self._devices), ("data",))
        self._everywhere = NamedSharding(self.mesh, PartitionSpec())
        self._rows = NamedSharding(self.mesh, PartitionSpec("data"))

    def shardings(self, tree: Any) -> Any:
        """Every device for every leaf."""
        return jax.tree.map(lambda _: self._everywhere, tree)

    def _placed(self, leaf: Any) -> jax.Array:
        leaf, here = np.asarray(leaf), len(self.share)
        shape = (-1, *leaf.shape[1:]) if leaf.ndim else ()
        leaf = np.broadcast_to(leaf, leaf.shape or (here,))
        return self._divided(leaf.reshape(here, *shape), self._rows)

    def _compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`function` on every device: of one state, each with its own rows, to one state."""
        axes = {"in_axes": (None, 0), "out_axes": None}
        return jax.pmap(function, "data", devices=self._devices, **axes, **options)

    def _returned(self, tree: Any) -> Any:
        return tree if jax.process_count() == 1 else jax.tree.map(self._joined, tree)

    def _joined(self, leaf: jax.Array) -> jax.Array:
        """The copies of several processes, which `jax.pmap` keeps apart, as one array."""
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = self._joined(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        copies = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, self._everywhere, copies)

    def _added(self, sums: Any) -> Any:
        return jax.lax.psum(sums, "data")


class Partitioned(Devices):
    """One state in parts over a mesh, by `jax.jit`. Made by `partition`.

    The mesh axes data and fsdp divide rows, fsdp and tensor parameters, as `rules` say.
    """

    def __init__(self, mesh: Mesh, rules: Sequence[Rule], options: Mapping[str, str]) -> None:
        self.options = options
        self.mesh = standard(mesh)
        self.rules = tuple(rules)
        self.shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        self.share = _of_this_process(*self.mesh.devices.reshape(self.shards, -1).T)

    def shardings(self, tree: Any) -> Any:
        """By the rules for parameters; what belongs to one (moments, averages) lives with it."""
        params = getattr(tree, "params", tree)
        specs = following(tree, params, self._specs(params))
        return jax.tree_util.tree_map_with_path(
            lambda path, _: NamedSharding(self.mesh, specs[path_of(path)]), tree
        )

    def _placed(self, leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        spec = PartitionSpec(_ROWS) if leaf.ndim else PartitionSpec()
        return self._divided(leaf, NamedSharding(self.mesh, spec))

    def _spread(self, loss: Loss) -> Loss:
        """`loss` with a copy of the parameters for each group of devices that shares rows.

        Left alone, XLA divides activations where only parameters shall be divided, and moves far
        more. The gradient of a copy is a sum over the copies: one reduction for each
        parameter, however often the model uses it.
        """
        if self.shards == 1:
            return loss

        def summed(params: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, jax.Array]:
            specs = self._specs(params)
            copies = jax.tree_util.tree_map_with_path(
                lambda path, leaf: self._copied(leaf, specs[path_of(path)]), params
            )
            each = jax.vmap(lambda params, rows: loss(params, rows, rng), spmd_axis_name=_ROWS)
            return jax.tree.map(jnp.sum, each(copies, jax.tree.map(self._grouped, batch)))

        return summed

    def _held(self, tree: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def _specs(self, params: Any) -> dict[str, PartitionSpec]:
        return partition_specs(params, self.rules, self.mesh.shape)

    def _copied(self, leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A parameter [...] as [shards, ...], each copy whole but for what tensor divides."""
        copies = jnp.broadcast_to(leaf[None], (self.shards, *leaf.shape))
        return self._constrained(copies, PartitionSpec(_ROWS, *map(_without_rows, spec)))

    def _grouped(self, leaf: jax.Array) -> jax.Array:
        """A leaf [B, ...] of a batch as [shards, B / shards, ...]; a scalar as [shards]."""
        if leaf.ndim == 0:
            return jnp.broadcast_to(leaf, (self.shards,))
        leaf = leaf.reshape(self.shards, -1, *leaf.shape[1:])
        return self._constrained(leaf, PartitionSpec(_ROWS))

    def _constrained(self, leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))


def one_device(
    device: jax.Device | None = None, *, options: Mapping[str, str] = MappingProxyType({})
) -> OneDevice:
    """`device`, or JAX's first, does everything; `options` as of `runtime.tune`."""
    return OneDevice(jax.local_devices()[0] if device is None else device, options)


def replicate(devices: Sequence[jax.Device] | None = None) -> Replicated:
    """A copy of the state on each of `devices`, or on all devices of all processes."""
    return Replicated(jax.devices() if devices is None else devices)


def partition(
    mesh: Mesh,
    rules: Sequence[Rule] = RULES,
    *,
    options: Mapping[str, str] = MappingProxyType({}),
) -> Partitioned:
    """The state in parts over `mesh`, whose axes are named data, fsdp and tensor.

    `rules`: the first that finds a parameter's path places it; `(Rule(...), *RULES)` changes one.
    Explicit axes are taken as Auto ones. `options` as of `runtime.tune`.
    """
    return Partitioned(mesh, rules, options)


def _of_this_process(*lists: Sequence[jax.Device]) -> tuple[int, ...]:
    """The places at which at least one of `lists`, which are equally long, has an own device."""
    here = jax.process_index()
    columns = enumerate(zip(*lists, strict=True))
    return tuple(i for i, one in columns if any(device.process_index == here for device in one))


def _whole(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def _without_rows(axis: Any) -> Any:
    """An entry of a spec without the mesh axes that divide rows."""
    names = axis if isinstance(axis, tuple) else (axis,)
    return tuple(name for name in names if name not in (None, *_ROWS)) or None
