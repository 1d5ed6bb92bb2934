"""Attention functions and dense products, compared with the reference on a device.

Before a run's first step on a kind of device, what was selected for it is computed on a small call.
The result is recorded; a difference is printed.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from jaxformer.ops.attention import KERNELS, AttentionSpec, DeviceInfo, Kernel, reference
from jaxformer.ops.dense import dense, logits_matmul
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AttentionMask

PRODUCTS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"dense": dense, "logits_matmul": logits_matmul}
)
"""The products of a model with its weights: x [B, D] times a matrix [D, F]."""

_LONGEST = 512  # queries and keys of the small call: two blocks of every kernel
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
    """The attention function, or "products"."""
    call: AttentionSpec | str
    """The small call; of products their type."""
    failure: str
    """Why the function is not to be used; empty where it agrees."""
    seconds: float

    def __str__(self) -> str:
        outcome = self.failure or "agrees with the reference"
        kind = f" in {self.call}" if isinstance(self.call, str) else ""
        return f"{self.name}{kind} on a small call: {outcome} ({self.seconds:.1f} s)"


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

    return _check("products", dtype, difference, _LIMIT)


def _check(
    name: str, call: AttentionSpec | str, difference: Callable[[], str], limit: float
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


def small_call(spec: AttentionSpec) -> AttentionSpec:
    """A call of the kinds of `spec` with 2 examples and few heads, queries and keys."""
    kv_heads = min(spec.kv_heads, 2)
    queries = min(spec.queries, _LONGEST)
    return replace(
        spec,
        batch=2,
        heads=kv_heads * (spec.heads // spec.kv_heads),
        kv_heads=kv_heads,
        queries=queries,
        keys=queries if spec.keys == spec.queries else min(spec.keys, _LONGEST),
        window=None if spec.window is None else min(spec.window, max(queries // 3, 1)),
    )


def inputs_of(call: AttentionSpec) -> list[Any]:
    """Queries, keys and values."""
    rng = np.random.default_rng(0)
    shapes = (
        (call.batch, call.queries, call.heads, call.key_size),
        (call.batch, call.keys, call.kv_heads, call.key_size),
        (call.batch, call.keys, call.kv_heads, call.value_size),
    )
    return [rng.standard_normal(shape).astype(jnp.dtype(call.dtype)) for shape in shapes]


def mask_of(call: AttentionSpec, rng: np.random.Generator) -> AttentionMask:
    """A mask of the kinds of `call`; a third of the keys of every second example is padding."""
    keys = np.arange(call.keys)[None]
    is_second = np.arange(call.batch)[:, None] % 2 == 1
    facts: dict[str, Any] = {"from_cache": call.from_cache}
    if call.padding_mask:
        facts["padding_mask"] = keys < np.where(is_second, max(2 * call.keys // 3, 1), call.keys)
    if call.segments:
        second = np.where(is_second, call.keys // 2, call.keys // 3)
        segments = 1 + (keys >= second).astype(np.int32)
        facts |= {"query_segments": segments[:, -call.queries :], "key_segments": segments}
    if call.explicit:
        facts["explicit"] = rng.random((call.batch, call.queries, call.keys)) < 0.9
    offset = call.keys - call.queries if call.offset is None else call.offset
    return AttentionMask(causal=call.causal, window=call.window, offset=offset, **facts)


def options_of(call: AttentionSpec, rng: np.random.Generator) -> dict[str, Any]:
    """The other arguments of a call of these kinds."""
    options: dict[str, Any] = {"scale": call.key_size**-0.5}
    if call.bias:
        shape = 1, call.heads, call.queries, call.keys
        options["bias"] = rng.standard_normal(shape).astype(np.float32)
    if call.dropout:
        random = DropoutRng(jax.random.key(0), jnp.arange(call.batch))
        options["dropout"] = DropoutMask(random, "device_check", call.dropout)
    return options | ({} if call.softcap is None else {"softcap": call.softcap})


def accept(spec: AttentionSpec, kernel: Kernel, checks: list[CheckResult]) -> bool:
    """Whether `kernel` agrees with `reference` on this process's devices.

    Adds the comparison to `checks`. All processes must agree. A program for devices that are absent
    is not compared: its kernel is accepted.
    """
    device = DeviceInfo.current()
    if device.platform != jax.local_devices()[0].platform:
        return True
    with ThreadPoolExecutor(1) as pool:  # this thread is tracing a program
        return pool.submit(_agrees, kernel.name, small_call(spec), checks).result()


def check_products(dtype: str, checks: list[CheckResult]) -> bool:
    """Whether products with weights in `dtype` agree with float32 on all processes' devices.

    Adds the comparison to `checks`.
    """
    return _agrees("products", dtype, checks)


def _agrees(name: str, call: AttentionSpec | str, checks: list[CheckResult]) -> bool:
    """Whether the comparison succeeds; its failure is printed once for each list of `checks`."""
    result = _compared(name, call)
    if result not in checks:
        checks.append(result)
        if result.failure:
            advice = _NO_OTHER if isinstance(call, str) else "the next attention function is taken"
            display.say(f"{result}; {advice}")
    return not result.failure


_NO_OTHER = (
    "nothing replaces a product: update the driver, unset XLA_FLAGS, or give --model.dtype float32"
)


@cache
def _compared(name: str, call: AttentionSpec | str) -> CheckResult:
    """The comparison on this process, which fails if another process's does."""
    if isinstance(call, str):
        result = compare_products(call)
    else:
        kernel = next(kernel for kernel in KERNELS if kernel.name == name)
        result = compare(name, kernel, call)
    if distributed.is_several():
        failed = multihost_utils.process_allgather(np.array([bool(result.failure)])).ravel()
        if failed.any() and not result.failure:
            result = result._replace(failure=f"fails in process {np.argmax(failed)}")
    return result
