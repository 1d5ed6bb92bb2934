"""Kernels of attention, timed on a device: forward and backward, on a call like a run's."""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.training.attention_inputs import inputs_of, mask_of, options_of
from jaxformer.distributed import agreed
from jaxformer.ops.attention import KERNELS, AttentionSpec
from jaxformer.ops.masks import AttentionMask

MARGIN = 0.05
"""The second kernel is chosen where it takes less than the first one's time by more than this."""

_SECONDS = 1.0  # of both kernels together, compiling not included
_MIN_ROUNDS = 3
_MAX_ROUNDS = 50
_MAX_EXAMPLES = 8  # of the call that is timed
_MAX_WEIGHTS = 2**31  # attention weights of the call that is timed
_ARRAYS_OF_MASKS = "padding_mask", "query_segments", "key_segments", "explicit"


class Timing(NamedTuple):
    """The seconds of a forward and a backward pass of two kernels on a call."""

    call: AttentionSpec
    names: tuple[str, str]
    seconds: tuple[float, float]

    @property
    def choice(self) -> str:
        """The first kernel, or the second one where it is faster by more than `MARGIN`."""
        first, second = self.seconds
        if second < (1 - MARGIN) * first:
            return self.names[1]
        return self.names[0]

    def __str__(self) -> str:
        each = zip(self.names, self.seconds, strict=True)
        return ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in each)


def time_kernels(names: tuple[str, str], spec: AttentionSpec) -> Timing:
    """The timing of two kernels on a call like `spec`, on the first device of process 0.

    Every process calls it and gets the same result. Also while a program is traced.
    """
    with ThreadPoolExecutor(1) as pool:  # a thread of its own has no mesh and traces nothing
        return pool.submit(_agreed_timing, names, timed_call(spec)).result()


@cache
def _agreed_timing(names: tuple[str, str], call: AttentionSpec) -> Timing:
    functions = [kernel.compute for name in names for kernel in KERNELS if kernel.name == name]
    measured = [0.0, 0.0]
    if jax.process_index() == 0:
        with contextlib.suppress(Exception):  # the others wait for a result: the table's order
            measured = seconds_of(functions, call)
    first, second = map(agreed, measured)
    return Timing(call, names, (first, second))


def seconds_of(functions: Sequence[Callable[..., Any]], call: AttentionSpec) -> list[float]:
    """The least seconds of each function's forward and backward pass; infinite where it raises."""
    rng = np.random.default_rng(1)
    mask = mask_of(call, rng)
    options = {"bias": None, "dropout": None, "softcap": None} | options_of(call, rng)
    # Large arrays are arguments of the programs: as constants they would be compiled.
    given = {name: getattr(mask, name) for name in _ARRAYS_OF_MASKS}
    arrays = {name: x for name, x in given.items() if x is not None}
    bias = options.pop("bias")
    with jax.default_device(jax.local_devices()[0]):
        inputs = jax.tree.map(jnp.asarray, (*inputs_of(call), arrays, bias))
        programs = [_program(partial(each, **options), mask, inputs) for each in functions]
        best = [np.inf] * len(programs)
        end = time.monotonic() + _SECONDS
        for number in range(_MAX_ROUNDS):
            if number >= _MIN_ROUNDS and time.monotonic() > end:
                break
            for n, program in enumerate(programs):
                if program is not None:
                    start = time.perf_counter()
                    jax.block_until_ready(program(*inputs))
                    best[n] = min(best[n], time.perf_counter() - start)
    return best


def _program(
    function: Callable[..., Any], mask: AttentionMask, inputs: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """The compiled gradients of a function, which has run once; None where it raises."""

    @jax.jit
    def gradients(q, k, v, arrays, bias):
        def attend(q, k, v):
            return function(q, k, v, replace(mask, **arrays), bias=bias)

        out, pull = jax.vjp(attend, q, k, v)
        return pull(out)

    try:
        compiled = gradients.lower(*inputs).compile()
        jax.block_until_ready(compiled(*inputs))
    except Exception:  # the other one is chosen
        return None
    return compiled


def timed_call(spec: AttentionSpec) -> AttentionSpec:
    """A call with the lengths and kinds of `spec`, and with as many rows and heads as take long.

    Both are smaller in a call that would take more than some milliseconds.
    """
    batch, kv_heads = min(spec.batch, _MAX_EXAMPLES), spec.kv_heads
    group = spec.heads // spec.kv_heads
    while batch * kv_heads * group * spec.queries * spec.keys > _MAX_WEIGHTS:
        if batch > 1:
            batch //= 2
        elif kv_heads > 1:
            kv_heads //= 2
        else:
            break
    return replace(spec, batch=batch, heads=kv_heads * group, kv_heads=kv_heads)
