"""Where the time of a training step goes."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import jax


def profiled(
    step: Callable[..., Any], folder: Path, *, first: int = 20, steps: int = 5
) -> Callable[..., Any]:
    """`step`, writing to `folder` a trace of its calls `first` to `first + steps - 1`.

    TensorBoard's profile plugin and Perfetto read it. The first calls compile and are left out.
    """
    calls = count()

    def traced(*args: Any) -> Any:
        call = next(calls)
        if call == first:
            jax.profiler.start_trace(folder)
        result = step(*args)
        if call == first + steps - 1:
            jax.block_until_ready(result)
            jax.profiler.stop_trace()
        return result

    return traced
