"""A trace of a few steps of a training, for TensorBoard or Perfetto."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from jaxformer import storage


def profiled(
    step: Callable[..., Any], folder: Path, *, first: int = 20, steps: int = 5
) -> Callable[..., Any]:
    """`step`, which also writes a trace of calls `first` to `first + steps - 1` to `folder`.

    TensorBoard's profile plugin and Perfetto read it. The first calls compile and are not traced.
    """
    calls, stack = itertools.count(), ExitStack()

    def traced(*args: Any) -> Any:
        call = next(calls)
        if call == first:
            jax.profiler.start_trace(stack.enter_context(storage.written_here(folder)))
        result = step(*args)
        if call == first + steps - 1:
            jax.block_until_ready(result)
            jax.profiler.stop_trace()
            stack.close()
        return result

    return traced
