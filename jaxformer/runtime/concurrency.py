"""The number of CPUs, and several programs at the same time to use them."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")


def cpu_count() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def concurrency(params: Any) -> int:
    """The number of programs with `params` to run at the same time: two on a CPU, else one.

    Many operations of a decoding step use one thread of a CPU while the other threads wait. Two
    programs with half the rows each produced 1.2 to 1.6 times as many tokens per second on two
    cores (2 to 64 rows of a GPT with 10.6 M parameters; similar for translation with a base-size
    model). Parameters on several devices allow only one program, because two could wait for each
    other forever.
    """
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    devices = set().union(*(leaf.devices() for leaf in arrays)) or {jax.local_devices()[0]}
    on_a_cpu = all(device.platform == "cpu" for device in devices)
    return 2 if on_a_cpu and len(devices) == 1 and cpu_count() > 1 else 1


def concurrently(runs: Iterable[Callable[[], Result]], count: int) -> Iterator[Result]:
    """The results of `runs`, in order; `count` of them run at the same time, in other threads.

    The next run is taken from `runs` in the caller's thread while others run, so code that depends
    on JAX's thread-local settings belongs in that iterator. If the generator is closed, or a run
    raises an error, it waits for at most `count` more runs.
    """
    begun: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for run in runs:
            if len(begun) > count:
                yield begun.popleft().result()
            begun.append(pool.submit(run))
        while begun:
            yield begun.popleft().result()
