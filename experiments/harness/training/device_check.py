"""Attention functions and dense products, compared with the reference on a device.

Before a run's first step on a kind of device, what was selected for it is computed on a small call.
The result is recorded; a difference is printed.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.training.attention_inputs import (
    inputs_of,
    mask_of,
    options_of,
    small_call,
)
from jaxformer.ops.attention import AttentionSpec, DeviceInfo, Kernel, reference
from jaxformer.ops.dense import dense, logits_matmul

PRODUCTS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"dense": dense, "logits_matmul": logits_matmul}
)
"""The products of a model with its weights: x [B, D] times a matrix [D, F]."""

_SIZES = 384, 512, 640  # B, D, F of the small product: sums long enough to tell their type
_TIMES_REFERENCE = 8.0
"""The error that attention may have, in errors of `reference` in the same type."""
_TIMES_PRODUCT = 2.0
"""The error that a product may have, in errors of `jnp.matmul` in the same type."""
_MIN_ERROR = 1e-5
"""The error that both may have in any case."""
_LIMIT = 120.0  # seconds
_QUICKLY = {"xla_gpu_autotune_level": 0}
"""Options for a GPU: XLA takes the first program of a product, as it need not be a fast one."""


class CheckResult(NamedTuple):
    """The result of a comparison; `str()` of it is one line."""

    name: str
    """The attention function, or products in a type, such as "products in bfloat16"."""
    call: AttentionSpec | None
    """The small call of attention; None for products."""
    failure: str
    """Why the function is not to be used; empty where it agrees."""
    seconds: float

    def __str__(self) -> str:
        outcome = self.failure or "agrees with the reference"
        return f"{self.name} on a small call: {outcome} ({self.seconds:.1f} s)"


def compare(
    name: str, attention_fn: Any, spec: AttentionSpec, limit: float = _LIMIT
) -> CheckResult:
    """`attention_fn` and its three gradients, on a small call of the kinds of `spec`.

    The call is computed on the first device of this process, also while another program is traced.
    The truth is `reference` in float32; the error may be 8 times `reference`'s in the type of
    `spec`. What raises, or takes more than `limit` seconds to compile and run, fails.
    """
    call = small_call(spec)
    rng = np.random.default_rng(1)
    mask, options = mask_of(call, rng), options_of(call, rng)

    def attend(function: Any) -> Callable[..., Any]:
        return lambda q, k, v: function(q, k, v, mask, **options)

    def difference() -> str:
        functions = attend(attention_fn), attend(reference)
        return _difference(*functions, inputs_of(call), ("dq", "dk", "dv"), _TIMES_REFERENCE)

    return _check(name, call, difference, limit)


def compare_products(
    dtype: str, products: Mapping[str, Callable[[Any, Any], Any]] = PRODUCTS
) -> CheckResult:
    """The `products` of matrices in `dtype` and their gradients, as `compare` does.

    The error may be twice the error of `jnp.matmul`: sums in less than float32 do not pass.
    """

    def difference() -> str:
        rng, (rows, size, width) = np.random.default_rng(0), _SIZES
        shapes = (rows, size), (size, width)
        inputs = [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]
        names = "dx", "dmatrix"
        failures = {
            name: _difference(each, jnp.matmul, inputs, names, _TIMES_PRODUCT)
            for name, each in products.items()
        }
        return "; ".join(f"{name}: {failure}" for name, failure in failures.items() if failure)

    return _check(f"products in {dtype}", None, difference, _LIMIT)


def _check(
    name: str, call: AttentionSpec | None, difference: Callable[[], str], limit: float
) -> CheckResult:
    """`difference()` on the first device of this process, within `limit` seconds."""
    start = time.monotonic()
    failures: list[str] = []  # one, when the thread has ended

    def run() -> None:  # a thread of its own has no mesh, and no program that is being traced
        try:
            with jax.default_device(jax.local_devices()[0]):
                failures.append(difference())
        except Exception as error:
            failures.append(f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    thread = threading.Thread(target=run, name="device check", daemon=True)
    thread.start()
    thread.join(limit)
    failure = failures[0] if failures else f"took more than {limit:g} s"
    return CheckResult(name, call, failure, time.monotonic() - start)


def _difference(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: list[Any],
    names: tuple[str, ...],
    times: float,
) -> str:
    """The first of values and gradients that differs too much from float32's; else empty.

    The error may be `times` the error of `reference` in the type of `inputs`.
    """
    with jax.default_matmul_precision("highest"):
        exact = _outputs(reference, *(x.astype(np.float32) for x in inputs))
    outputs = _outputs(function, *inputs), _outputs(reference, *inputs), exact
    for name, result, near, true in zip(("values", *names), *outputs, strict=True):
        error, usual = _error(result, true), _error(near, true)
        if not error <= times * usual + _MIN_ERROR:
            return f"{name} differ by {error:.1e} of the largest, the reference's by {usual:.1e}"
    return ""


def _outputs(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """`function(*inputs)`, and the gradients of a weighted sum of it."""

    def loss(*inputs: Any) -> Any:
        out = function(*inputs).astype(jnp.float32)
        weights = jax.random.normal(jax.random.key(1), out.shape)
        return jnp.sum(out * weights), out

    differentiate = jax.value_and_grad(loss, tuple(range(len(inputs))), has_aux=True)
    options = _QUICKLY if jax.default_backend() == "gpu" else None
    (_, out), gradients = jax.jit(differentiate, compiler_options=options)(*inputs)
    return [out, *gradients]


def _error(result: Any, true: Any) -> float:
    """The largest difference, in parts of the largest true value."""
    true = np.asarray(true, np.float64)
    return float(
        np.abs(np.asarray(result, np.float64) - true).max() / max(np.abs(true).max(), 1e-30)
    )


def accept(spec: AttentionSpec, kernel: Kernel, checks: list[CheckResult]) -> bool:
    """Whether `kernel` agrees with `reference` on this process's devices.

    Adds the comparison to `checks`. All processes must agree. A program for devices that are absent
    is not compared: its kernel is accepted.
    """
    device = DeviceInfo.current()
    if device.platform != jax.local_devices()[0].platform:
        return True
    with ThreadPoolExecutor(1) as pool:  # this thread is tracing a program
        result = pool.submit(_compare_kernel, kernel, small_call(spec)).result()
    _record(result, checks, "the next attention function is taken")
    return not result.failure


def check_products(dtype: str, checks: list[CheckResult]) -> bool:
    """Whether products with weights in `dtype` agree with float32 on all processes' devices.

    Adds the comparison to `checks`.
    """
    result = _compare_products(dtype)
    _record(
        result,
        checks,
        "nothing replaces a product: update the driver, unset XLA_FLAGS, or give --model.dtype "
        "float32",
    )
    return not result.failure


def _record(result: CheckResult, checks: list[CheckResult], advice: str) -> None:
    """Adds `result` to `checks`; a failure is printed once for each list, with `advice`."""
    if result in checks:
        return
    checks.append(result)
    if result.failure:
        display.say(f"{result}; {advice}")


@cache
def _compare_kernel(kernel: Kernel, call: AttentionSpec) -> CheckResult:
    """The comparison of `kernel` on `call`, which fails where another process's does."""
    return _agreed(compare(kernel.name, kernel, call))


@cache
def _compare_products(dtype: str) -> CheckResult:
    """The comparison of products in `dtype`, which fails where another process's does."""
    return _agreed(compare_products(dtype))


def _agreed(result: CheckResult) -> CheckResult:
    """`result` of this process, as a failure where the comparison fails in another process."""
    if not distributed.is_several():
        return result
    failed = multihost_utils.process_allgather(np.array([bool(result.failure)])).ravel()
    if result.failure or not failed.any():
        return result
    return result._replace(failure=f"fails in process {np.argmax(failed)}")
