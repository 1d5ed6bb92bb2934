"""Speed is asked for in one call, which says what came of it and cannot fail a run."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import runtime as setup
from jaxformer.distributed import make_mesh, sharded, single

CHILD = """
import sys
from pathlib import Path
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxformer.runtime import concurrency, setup_process

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(setup_process())
print(setup_process(Path(sys.argv[1])))
weights = jax.jit(lambda x: x * 3.0)(jax.numpy.ones((2, 3)))
spread = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec())
print(concurrency(jax.device_put(weights, spread)), concurrency(weights))
"""


@pytest.fixture
def same_folder():
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def child(*args, **environment):
    kept = {name: value for name, value in os.environ.items() if name[:4] not in ("JAX_", "XLA_")}
    command = [sys.executable, "-c", CHILD, *map(str, args)]
    done = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def files(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def test_programs_are_kept_in_a_folder_for_this_kind_of_cpu(tmp_path):
    without, said, at_a_time = child(tmp_path, JAX_PLATFORMS="cpu").splitlines()
    assert "compiled programs are not kept" in without
    (kind,) = tmp_path.iterdir()
    assert re.fullmatch("cpu-[0-9a-f]{8}", kind.name) and files(kind)
    assert said.startswith("cpu; ") and f"compiled programs in {kind}" in said
    # Programs of several devices run one at a time: two could wait for each other forever.
    assert at_a_time == f"1 {min(2, len(os.sched_getaffinity(0)))}"


def test_a_folder_given_to_jax_goes_before_ours(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    said = child(ours, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(theirs))
    assert files(theirs) and not ours.exists() and said.count(f"programs in {theirs}") == 2


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch, same_folder):
    known = setup.setup_process().compiler_options
    monkeypatch.setattr(setup, "CPU_OPTIONS", {**setup.CPU_OPTIONS, "xla_cpu_no_such": "1"})
    assert setup.setup_process().compiler_options == known


def test_each_platform_gets_its_own_options(monkeypatch, same_folder):
    monkeypatch.setattr(setup, "_compiles", lambda option: True)
    for platform, options in (("gpu", setup.GPU_OPTIONS), ("tpu", {}), ("cpu", setup.CPU_OPTIONS)):
        monkeypatch.setattr(setup.jax, "default_backend", lambda platform=platform: platform)
        assert setup.setup_process().compiler_options == options


@pytest.mark.parametrize("strategy", ["single", "sharded"])
def test_the_options_reach_the_compiler(strategy):
    given = {"xla_cpu_no_such": "1"}
    mesh = make_mesh(f"data={jax.device_count()}")
    made = {"single": single, "sharded": partial(sharded, mesh)}
    devices = made[strategy](compiler_options=given)
    program = devices.evaluate(lambda params, batch, rng: (jnp.sum(batch), jnp.sum(params)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_no_such"):
        program(np.ones(3), devices.shard_batch(np.ones(jax.device_count() * 2)))


def test_with_glibc_there_is_one_heap_before_any_thread_and_freed_memory_is_kept(
    monkeypatch, same_folder
):
    asked = []

    class Library:
        def mallopt(self, name, value):
            asked.append(name)
            return 1

    monkeypatch.setattr(setup.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(setup.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(setup.jax, "default_backend", lambda: asked.append("threads") or "cpu")
    assert setup.setup_process().keeps_freed_memory and asked == [-8, "threads", -4, -1, -2]
    monkeypatch.setattr(setup.platform, "libc_ver", lambda: ("", ""))
    assert not setup.setup_process().keeps_freed_memory and asked[5:] == ["threads"]
