"""What a process tells its allocator and XLA before it computes, in one call that reports it."""

import contextlib
import ctypes
import os
import platform
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Of XLA's library for CPUs only the matrix products: its reductions and elementwise loops, small
# in a Transformer, take longer than those XLA compiles itself. And sums in one pass: in windows
# they are more exact (the gradient of 2,400 rows of 64 tokens to 1.2e-6, not 2.7e-6), but a step
# takes a tenth longer.
_CPU_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT",
    "xla_disable_hlo_passes": "tree_reduction_rewriter",
}

# glibc: have one heap. The threads of XLA, and those of each save, would get heaps of their own,
# in which what is freed adds up; a heap that is there stays, so this comes before any of them.
_ONE_HEAP = ((-8, 1),)  # M_ARENA_MAX

# glibc on a CPU: keep what is freed, and grow in large pieces. XLA allocates its temporary memory
# anew for each step there; given back to the kernel, it is cleared page by page every time.
_KEEP_FREED = (
    (-4, 0),  # M_MMAP_MAX
    (-1, 2**31 - 1),  # M_TRIM_THRESHOLD
    (-2, 2**28),  # M_TOP_PAD
)


class Tuning(NamedTuple):
    """What `tune` did. `allocator`: freed memory is kept; `options`: compiler options in force;
    `refused`: those this version of XLA does not know; `programs`: the folder of compiled programs.
    """

    platform: str
    allocator: bool
    options: dict[str, str]
    refused: tuple[str, ...]
    programs: Path | None

    def __str__(self) -> str:
        """One line."""
        facts = [self.platform]
        facts += ["freed memory is kept"] if self.allocator else []
        facts += [f"{name}={value}" for name, value in self.options.items()]
        facts += [f"{name} is unknown to this XLA" for name in self.refused]
        facts += [f"compiled programs in {self.programs}" if self.programs else "no program kept"]
        return "; ".join(facts)


def tune(programs: Path | None = None) -> Tuning:
    """Sets up this process for speed, and says what that came to.

    Threads that start from now on share one heap of glibc. On a CPU it keeps freed memory, and
    `options` holds what makes a training step faster, for `jax.jit(..., compiler_options=...)` or
    `one_device(options=...)`; each was tried in a small program first, so that none can fail a
    large one. Everywhere, programs that took more than a second to compile are kept in `programs`
    (None: nowhere) for the next process, on a CPU in a folder for its kind;
    JAX_COMPILATION_CACHE_DIR, if set, is used instead. Call it before anything asks JAX for its
    devices, which starts XLA's threads. With other options results may differ in rounding.
    """
    one_heap = _told_glibc(_ONE_HEAP)
    on = jax.default_backend()
    wanted = _CPU_OPTIONS if on == "cpu" else {}
    known = {name: value for name, value in wanted.items() if _compiles({name: value})}
    allocator = on == "cpu" and one_heap and _told_glibc(_KEEP_FREED)
    refused = tuple(name for name in wanted if name not in known)
    return Tuning(on, allocator, known, refused, _keep_programs(on, programs))


def _keep_programs(on: str, programs: Path | None) -> Path | None:
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if programs is None:
        return None
    folder = programs.expanduser() / (_cpu() if on == "cpu" else on)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def _cpu() -> str:
    """A name for this CPU's instructions: a program compiled for others may end the process."""
    facts = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts += "".join(next((line for line in lines if line.startswith("flags")), ""))
    return f"cpu-{zlib.crc32(facts.encode()):08x}"


def _compiles(options: dict[str, str]) -> bool:
    try:
        jax.jit(jnp.sum, compiler_options=options).lower(jnp.zeros((2, 3))).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _told_glibc(options: tuple[tuple[int, int], ...]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(name, value) for name, value in options])
