"""Programs that run at the same time, where one alone leaves processors waiting."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from jaxformer.processors import cores

Result = TypeVar("Result")


def concurrency(params: Any) -> int:
    """How many programs that use `params` to run at a time: two on a CPU, else one.

    Many operations of a decoding step use one thread of a CPU, and the others wait. Two programs
    with half the rows each wrote 1.2 to 1.6 times as many tokens a second on two cores (2 to 64
    rows of a GPT of 10.6 M parameters; translations by a base-size model likewise). Weights on
    several devices make it one: their programs wait for each other and could wait for ever.
    """
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    devices = set().union(*(leaf.devices() for leaf in arrays)) or {jax.local_devices()[0]}
    on_a_cpu = all(device.platform == "cpu" for device in devices)
    return 2 if on_a_cpu and len(devices) == 1 and cores() > 1 else 1


def concurrently(runs: Iterable[Callable[[], Result]], count: int) -> Iterator[Result]:
    """What each of `runs` returns, in their order; `count` run at a time, in other threads.

    The next are taken from `runs` in the caller's thread, while those before are running: what
    depends on its settings of JAX, which other threads do not share, belongs there. Closed, or
    after an error, it waits for at most `count` more.
    """
    begun: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for run in runs:
            if len(begun) > count:
                yield begun.popleft().result()
            begun.append(pool.submit(run))
        while begun:
            yield begun.popleft().result()
