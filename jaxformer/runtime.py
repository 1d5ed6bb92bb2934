"""The process that runs programs: allocator, compiler options, compilation cache, concurrency."""

import contextlib
import ctypes
import os
import platform
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")

# The first option leaves only matrix products to XLA's library for CPUs. The library's reductions
# and elementwise loops, which are small in a Transformer, take longer than XLA's own loops.
# The second option computes sums in one pass. In windows they are more exact (the gradient of 2,400
# rows of 64 tokens to 1.2e-6, not 2.7e-6), but a step takes a tenth longer.
CPU_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT",
    "xla_disable_hlo_passes": "tree_reduction_rewriter",
}
"""Compiler options for a CPU, without the ones that its XLA does not know."""

GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": "0"}
"""Compiler options for a GPU: else XLA joins small products of one input, and takes their gradients
apart again. Compiled for an H100, a step of `wmt14_base` then moves 95.3 GB, not 97.4."""

# glibc: one heap. Otherwise each thread of XLA and of each save gets a heap of its own, in which
# freed memory adds up. Heaps are never merged, so this is set before any thread starts.
_ONE_HEAP = ((-8, 1),)  # M_ARENA_MAX

# glibc on a CPU: keep freed memory, and grow in large pieces. XLA allocates temporary memory in
# each step, and the kernel clears the memory that it gives back page by page every time.
_KEEP_FREED = (
    (-4, 0),  # M_MMAP_MAX
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD
    (-2, 2**28),  # M_TOP_PAD
)


class ProcessSetup(NamedTuple):
    """The settings that `setup_process` has made; `str()` of it is one line."""

    platform: str
    """JAX's default platform: "cpu", "gpu" or "tpu"."""
    keeps_freed_memory: bool
    """Whether the allocator keeps freed memory."""
    compiler_options: dict[str, str]
    """XLA options that make a training step faster, for `jax.jit` and the strategies."""
    compilation_cache_dir: Path | None
    """The folder of compiled programs; None: they are not kept."""

    def __str__(self) -> str:
        cache = self.compilation_cache_dir
        parts = [self.platform]
        if self.keeps_freed_memory:
            parts.append("freed memory is kept")
        parts += [f"{name}={value}" for name, value in self.compiler_options.items()]
        parts += [f"compiled programs in {cache}" if cache else "compiled programs are not kept"]
        return "; ".join(parts)


def setup_process(compilation_cache_dir: Path | None = None) -> ProcessSetup:
    """Sets up this process for speed and returns what it did.

    Call it before anything asks JAX for its devices, which starts XLA's threads. Threads that start
    later share one heap of glibc; on a CPU it keeps freed memory. The compiler options are tried in
    a small program first, so none of them can fail a large one; they can change results by
    rounding. Programs that took more than a second to compile are kept in `compilation_cache_dir`
    for the next process, on a CPU in a subfolder for its instruction set. The environment variable
    JAX_COMPILATION_CACHE_DIR takes precedence.
    """
    one_heap = _set_glibc_options(_ONE_HEAP)
    platform_name = jax.default_backend()
    on_cpu = platform_name == "cpu"
    options = {"cpu": CPU_OPTIONS, "gpu": GPU_OPTIONS}.get(platform_name, {})
    options = dict(filter(_compiles, options.items()))
    keeps_freed = on_cpu and one_heap and _set_glibc_options(_KEEP_FREED)
    cache = _keep_programs(platform_name, compilation_cache_dir)
    return ProcessSetup(platform_name, keeps_freed, options, cache)


def _keep_programs(platform_name: str, cache_dir: Path | None) -> Path | None:
    """The folder in which JAX keeps compiled programs from now on; None if it keeps none."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if cache_dir is None:
        return None
    folder = cache_dir.expanduser() / (cpu_kind() if platform_name == "cpu" else platform_name)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def cpu_kind() -> str:
    """A name for this CPU's instruction set: a program for another one could crash the process."""
    kind = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind += "".join(next((line for line in lines if line.startswith("flags")), ""))
    return f"cpu-{zlib.crc32(kind.encode()):08x}"


def _compiles(option: tuple[str, str]) -> bool:
    """Whether XLA accepts the `option` (name, value), tried with a small program."""
    try:
        jax.jit(jnp.sum, compiler_options=dict([option])).lower(jnp.zeros((2, 3))).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _set_glibc_options(options: tuple[tuple[int, int], ...]) -> bool:
    """Sets (option, value) pairs of glibc's `mallopt`; whether all of them were accepted."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(name, value) for name, value in options])


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
    with ThreadPoolExecutor(count) as pool:
        yield from _results_in_order(pool, runs, count)


def collect_concurrently(
    iterators: Iterable[Iterator[Result]], count: int
) -> Iterator[list[Result]]:
    """The items of each of `iterators`, in order; `count` are read at the same time, in threads.

    The next iterator is taken from `iterators` in the caller's thread while others are read. If
    the generator is closed, a Ctrl-C arrives, or an iterator raises an error, each thread ends
    after its next item.
    """
    is_over = threading.Event()

    def read(iterator: Iterator[Result]) -> list[Result]:
        items: list[Result] = []
        for item in iterator:
            items.append(item)
            if is_over.is_set():
                break
        return items

    with ThreadPoolExecutor(count) as pool:
        try:
            yield from _results_in_order(pool, (partial(read, x) for x in iterators), count)
        finally:  # leaving the pool waits for its threads
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _results_in_order(
    pool: ThreadPoolExecutor, runs: Iterable[Callable[[], Result]], count: int
) -> Iterator[Result]:
    """The results of `runs` in `pool`; one more than `count` of them is taken from `runs`."""
    begun: deque[Future[Result]] = deque()
    for run in runs:
        if len(begun) > count:
            yield begun.popleft().result()
        begun.append(pool.submit(run))
    while begun:
        yield begun.popleft().result()
