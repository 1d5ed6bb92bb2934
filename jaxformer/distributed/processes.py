"""Values of all processes: that they agree, the first process's number, whole arrays."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.errors import ConfigError, listed


def assert_processes_agree(values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` on every process, with the name, if a value differs between processes.

    `values`: what must be equal everywhere (settings, digests of files, the restored step), by the
    name that the error gives it. Call it before the first computation that uses them: processes
    with different programs or batches wait for each other for ever, or compute nonsense. Values
    are compared by their `repr`. With one process nothing is checked.

    >>> assert_processes_agree({"seed": 0, "step": 100})
    """
    if jax.process_count() == 1:
        return
    names = list(values)
    # One shape, whatever each process compares: else it would wait for ever.
    everyone = _gathered([_digest(names), _digest([repr(value) for value in values.values()])])
    if np.any(everyone[:, 0] != everyone[0, 0]):
        groups = _processes(everyone[:, 0])
        raise ConfigError(
            f"the processes compare different things: {groups}; here, on process "
            f"{jax.process_index()} of {jax.process_count()}, {listed(names)}. Start the same "
            "command on all, with the same settings"
        )
    if not np.any(everyone[:, 1] != everyone[0, 1]):
        return
    everyone = _gathered([_digest(repr(value)) for value in values.values()])
    different = [i for i in range(len(names)) if np.any(everyone[:, i] != everyone[0, i])]
    own_values = [f"{names[i]}={values[names[i]]!r}" for i in different]
    raise ConfigError(
        f"the processes do not agree on {', '.join(names[i] for i in different)}: "
        f"{_processes(everyone[:, different])}; process {jax.process_index()} of "
        f"{jax.process_count()} has {listed(own_values)}. Start all with the same settings and data"
    )


def _digest(value: Any) -> np.ndarray:
    """64 bits that change with the `repr` of a value."""
    return np.frombuffer(hashlib.sha256(repr(value).encode()).digest()[:8], np.uint32)


def _gathered(digests: list[np.ndarray]) -> np.ndarray:
    """The digests [process, value, word] of all processes."""
    return np.asarray(multihost_utils.process_allgather(np.stack(digests)))


def _processes(digests: np.ndarray) -> str:
    """The processes whose `digests` [process, ...] differ from what most processes have."""
    rows = [row.tobytes() for row in np.ascontiguousarray(digests)]
    usual = max(rows, key=rows.count)  # the first of equally many
    unlike = [str(i) for i, row in enumerate(rows) if row != usual]
    if len(unlike) == 1:
        differing = f"process {unlike[0]} differs"
    else:
        differing = f"processes {', '.join(unlike)} differ"
    return f"{differing} from process {rows.index(usual)}"


def agreed(number: float) -> float:
    """The `number` of the first process, in every process."""
    if jax.process_count() == 1:
        return number
    words = np.frombuffer(np.float64(number).tobytes(), np.uint32)
    try:
        return float(multihost_utils.broadcast_one_to_all(words).view(np.float64)[0])
    except ValueError as error:  # `jax.jit` raises it when another process is gone
        raise jax.errors.JaxRuntimeError(str(error)) from error


def to_numpy(leaf: Any) -> np.ndarray:
    """The whole array in numpy on every process; a PRNG key as its key data."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys."""
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
