"""The devices that compute the steps of a run."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax

from experiments.harness.training.training_config import StrategyName
from jaxformer.distributed import Strategy, make_mesh, replicated, sharded, single
from jaxformer.distributed.mesh import Device
from jaxformer.errors import ConfigError


def choose_devices(
    strategy: StrategyName,
    mesh: str,
    options: Mapping[str, str] = MappingProxyType({}),
    devices: Sequence[Device] | None = None,
) -> Strategy:
    """The devices that compute a run's steps: one of `devices`, or all; None: those JAX sees.

    "auto" is "replicated" where there are several devices, else "single". "replicated" keeps a copy
    of the state on each, "sharded" its parts on `mesh`, such as "data=2,fsdp=2,tensor=2" (empty:
    all of them along data). The compiler gets `options`. Raises `ConfigError` for a mesh without
    "sharded", or one with another number of devices.
    """
    count = jax.device_count() if devices is None else len(devices)
    if strategy == "sharded":
        return sharded(make_mesh(mesh or f"data={count}", devices), compiler_options=options)
    if mesh:
        raise ConfigError(f"mesh={mesh!r} needs --strategy sharded, got strategy={strategy!r}")
    if strategy == "replicated" or (strategy == "auto" and count > 1):
        return replicated(devices, compiler_options=options)
    return single(devices[0] if devices else None, compiler_options=options)
