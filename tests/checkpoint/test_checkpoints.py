"""A state that was saved is restored as it was, and refused where it does not fit."""

import errno
import gc
import math
import os
import pickle
import re
import resource
import shutil
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints, manifest
from jaxformer.errors import CheckpointError
from tests.checkpoint.places import names
from tests.faults.states import as_bytes
from tests.stored import stored
from tests.two_processes import ended, finished, start


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    rng: jax.Array
    ema: dict | None = None


class Scale(NamedTuple):
    value: jax.Array


def make_state(seed, *, kernel=(5, 3), dtype=jnp.float32, ema=False, impl=None):
    draw = np.random.default_rng(seed).normal
    params = {
        "decoder": {
            "blocks_0": {"kernel": jnp.asarray(draw(size=kernel), dtype)},
            "blocks_1": {"bias": jnp.asarray(draw(size=7), jnp.bfloat16)},
        }
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt_state = (optimizer.init(params), Scale(jnp.float32(seed)))
    rng = jax.random.key(seed, impl=impl)
    return State(jnp.int32(seed), params, opt_state, rng, params if ema else None)


def small(step):
    """A state of one array, which tells its step."""
    return {"params": {"w": np.full(7, step, np.float32)}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the step 2 alone, which are only read."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(2, make_state(2), {})
    return Checkpoints(folder)


def test_a_state_is_restored_under_a_guard_against_transfers(saved):
    state = make_state(5)
    with jax.transfer_guard("disallow"):
        restored, _ = saved.restore(state, 2)
    assert as_bytes(restored) == as_bytes(make_state(2))


def test_a_restored_state_has_the_bytes_types_and_metadata_of_the_saved_one(checkpoints):
    state = make_state(11, ema=True)
    metadata = {"epoch": 3, "fingerprint": "ab", "best": 1.25, "names": ["en", None]}
    checkpoints.save(11, state, metadata)
    restored, found = checkpoints.restore(jax.eval_shape(lambda: state))
    assert found == metadata == checkpoints.metadata()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert as_bytes(restored) == as_bytes(state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    assert jax.random.bits(restored.rng) == jax.random.bits(state.rng)


def test_a_key_of_another_generator_and_a_missing_ema_come_back(checkpoints):
    state = make_state(13, impl="rbg")
    checkpoints.save(1, state)
    restored, metadata = checkpoints.restore(state)
    assert restored.ema is None and metadata == {} and checkpoints.best_step() is None
    assert jax.random.key_impl(restored.rng) == "rbg"
    assert as_bytes(restored) == as_bytes(state)


def test_plain_numbers_and_numpy_arrays_are_stored_as_arrays(checkpoints):
    state = {"step": 5, "loss": 0.5, "table": np.arange(6).reshape(2, 3), "one": np.float64(0.1)}
    checkpoints.save(1, state, {})
    raw = stored(checkpoints, tree="table")
    assert raw.dtype == np.int64 and raw.tolist() == [[0, 1, 2], [3, 4, 5]]
    restored, _ = checkpoints.restore({**state, "one": np.float64(0), "table": raw})
    assert (int(restored["step"]), float(restored["loss"])) == (5, 0.5)


def test_the_newest_steps_and_the_best_one_stay(checkpoints):
    metrics = {2: 0.5, 3: float("nan"), 5: 0.5, 7: None, 11: 0.75, 13: 3.0}
    for step, metric in metrics.items():
        checkpoints.save(step, small(step), {"step": step}, metric)
    checkpoints.wait()
    assert checkpoints.steps() == [5, 11, 13]
    assert checkpoints.best_step() == 5  # of equals the newer
    assert checkpoints.metadata(5) == {"step": 5}
    assert checkpoints.metadata() == {"step": 13}
    assert checkpoints.restore(small(0), 11)[0]["params"]["w"][0] == 11
    left = {entry.name for entry in checkpoints.folder.iterdir()}
    assert left == {"5", "11", "13", ".lock"}


def test_a_step_that_is_not_regular_goes_when_it_is_neither_the_newest_nor_the_best(checkpoints):
    metrics = {2: None, 3: 0.5, 5: None, 7: 0.25, 11: None, 13: math.inf}
    there = {}
    for step, metric in metrics.items():
        checkpoints.save(step, small(step), {}, metric, regular=step not in (3, 7, 13))
        checkpoints.wait()
        there[step] = checkpoints.steps()
    assert there[5] == [2, 3, 5] and there[7] == [2, 5, 7] and there[13] == [5, 7, 11, 13]
    assert checkpoints.best_step() == 7


def test_saving_a_complete_step_again_leaves_it_as_it_is(checkpoints):
    checkpoints.save(2, small(2), {"first": True})
    checkpoints.save(2, small(3), {"first": False})
    assert checkpoints.metadata() == {"first": True}


def test_a_step_that_was_removed_may_be_saved_again(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (2, 3):
            checkpoints.save(step, small(step))
        checkpoints.wait()
        assert checkpoints.steps() == [3]
        checkpoints.save(2, small(2), {}, 0.5)
    assert checkpoints.steps() == [2, 3]


def test_a_step_still_being_written_is_not_counted(checkpoints):
    checkpoints.save(2, small(2), {})
    checkpoints.wait()
    (checkpoints.folder / "3.orbax-checkpoint-tmp").mkdir()
    (checkpoints.folder / "5").mkdir()
    assert checkpoints.steps() == [2]
    assert checkpoints.restore(small(0))[0]["params"]["w"][0] == 2


def test_reading_changes_nothing_in_the_folder_and_writing_removes_what_a_kill_left(tmp_path):
    with Checkpoints(tmp_path) as writer:
        writer.save(2, small(2))
    left = tmp_path / "3.orbax-checkpoint-tmp-1700000000"
    left.mkdir()
    reader = Checkpoints(tmp_path, keep=1)
    reader.restore(small(0))
    reader.average_params([2])
    reader.close()
    assert left.is_dir()
    with Checkpoints(tmp_path) as writer:
        writer.save(5, small(5))
    assert not left.exists()
    assert writer.steps() == [2, 5]


def test_no_complete_checkpoint_is_an_error_that_names_the_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path / "absent")
    assert checkpoints.steps() == [] and checkpoints.best_step() is None
    for read in (lambda: checkpoints.restore(small(0)), checkpoints.param_shapes):
        with pytest.raises(CheckpointError, match=f"{tmp_path}/absent"):
            read()
    assert not (tmp_path / "absent").exists()


def test_a_missing_step_is_an_error_that_names_the_steps_there(saved):
    with pytest.raises(CheckpointError, match="step 3 "):
        saved.restore(make_state(0), 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernel": (5, 2)}, "blocks_0/kernel"),
        ({"dtype": "bfloat16"}, "bfloat16[5,3]"),
        ({"ema": True}, "ema/decoder/blocks_1/bias"),
        ({"impl": "rbg"}, "rng"),
    ],
)
def test_another_shape_type_or_parameter_is_refused_by_its_name_and_not_cast(saved, changes, said):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        saved.restore(make_state(2, **changes))


def test_what_is_left_over_is_named_and_the_rest_counted(saved):
    state = make_state(2).replace(opt_state=(), rng=jax.random.key(1))
    with pytest.raises(CheckpointError, match="/count"):
        saved.restore(state)


def test_params_are_named_before_the_optimizer_that_follows_their_shape(checkpoints):
    def grown(size):
        params = {f"block_{n}": np.zeros((3, size)) for n in range(7)}
        return {"params": params, "opt_state": {"mu": params, "nu": params}}

    checkpoints.save(2, grown(5), {})
    with pytest.raises(CheckpointError, match="params/block_0"):
        checkpoints.restore(grown(7))


def test_params_are_read_as_numpy_without_the_optimizer(saved):
    params = saved.average_params([2])
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(params))
    assert as_bytes(params) == as_bytes(make_state(2).params)
    with pytest.raises(CheckpointError, match="'ema'"):
        saved.average_params([2], tree="ema")


def test_an_average_is_the_mean_in_the_stored_dtype(checkpoints):
    kernels, biases = [1.0, 2.0, 9.0], [1.0, 1.0, 1.0078125]
    for step, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        params = {
            "k": np.full((2, 3), kernel, np.float32),
            "b": np.full(5, bias, ml_dtypes.bfloat16),
        }
        state = {"params": params, "ema": {"k": np.float32(step)}}
        checkpoints.save(step, state, {}, metric=step)
    mean = checkpoints.average_params([0, 1, 2])
    assert mean["k"].dtype == np.float32 and np.all(mean["k"] == 4.0)
    assert mean["b"].dtype == ml_dtypes.bfloat16 and np.all(mean["b"] == 1.0)
    assert checkpoints.average_params([1, 2], tree="ema") == {"k": 1.5}
    with pytest.raises(CheckpointError, match="at least one step"):
        checkpoints.average_params([])


def test_metadata_that_are_not_json_are_refused_before_anything_is_written(checkpoints):
    with pytest.raises(CheckpointError, match="int64"):
        checkpoints.save(2, small(2), {"position": np.int64(3)})
    with pytest.raises(CheckpointError, match="metadata "):
        checkpoints.save(2, small(2), {"loss": math.nan})
    assert checkpoints.steps() == []


def test_saving_does_not_wait_for_the_disk_and_a_step_counts_when_it_is_committed(
    checkpoints, monkeypatch
):
    commit, go_on = manifest.commit, threading.Event()

    def late(*args):
        assert go_on.wait(30)
        commit(*args)

    monkeypatch.setattr(manifest, "commit", late)
    metadata = {"position": [3]}
    checkpoints.save(2, small(2), metadata)
    metadata["position"].append(5)
    assert checkpoints.steps() == [] and checkpoints.newest_step() is None
    go_on.set()
    checkpoints.wait()
    assert checkpoints.steps() == [2] and checkpoints.metadata() == {"position": [3]}


def test_a_folder_that_cannot_be_written_is_an_os_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"{tmp_path}/file"):
        Checkpoints(tmp_path / "file").save(2, small(2), {})

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=f"'{tmp_path}/closed/.lock'"):
        Checkpoints(tmp_path / "closed").save(2, small(2), {})


def test_a_full_disk_is_one_sentence_and_nothing_is_begun(checkpoints, monkeypatch):
    usage = shutil.disk_usage(checkpoints.folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=28))
    with pytest.raises(OSError, match="No space left") as full:
        checkpoints.save(2, small(2))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(checkpoints.folder))
    assert names(checkpoints.folder) == set()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**17))
    checkpoints.save(2, small(2))
    checkpoints.wait()
    assert checkpoints.steps() == [2]


def test_a_failed_write_is_an_os_error_and_the_steps_before_and_after_are_complete(
    checkpoints, caplog
):
    state = {"params": {"w": np.random.default_rng(0).normal(size=(97, 89))}}
    checkpoints.save(2, state, {}, 1.0)
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="checkpoints"):
            checkpoints.save(3, state, {}, 0.5)
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [line for line in caplog.records if line.exc_info]
    assert checkpoints.steps() == [2]
    assert names(checkpoints.folder) == {"2"}
    checkpoints.save(3, state, {}, 3.0)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]


def test_an_error_is_not_replaced_by_that_of_the_save_it_interrupts(tmp_path):
    def fail():
        raise OSError("no room")

    with pytest.raises(RuntimeError, match="the step failed"):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints._committing = checkpoints._thread.submit(fail)
            raise RuntimeError("the step failed")
    with pytest.raises(OSError, match="no room"), Checkpoints(tmp_path) as checkpoints:
        checkpoints._committing = checkpoints._thread.submit(fail)


def test_what_fails_in_a_step_or_another_process_is_no_failure_of_the_disk(
    checkpoints, monkeypatch
):
    def lost(*_):
        raise ValueError("UNKNOWN: Gloo all-reduce failed")

    def failed(*_, **__):
        raise jax.errors.JaxRuntimeError("Gloo all-reduce failed")

    checkpoints.save(3, small(3), {})
    checkpoints.wait()
    with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"):
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(multihost_utils, "broadcast_one_to_all", lost)
        checkpoints.save(5, small(5), {})
    with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"):
        patch.setattr(checkpoints._writer, "save", failed)
        checkpoints.save(5, small(5), {})
    checkpoints.save(7, small(7), {})
    checkpoints.wait()
    assert checkpoints.steps() == [3, 7]


def test_nothing_is_unpickled(checkpoints, monkeypatch):
    def refuse(*_):
        raise RuntimeError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    state = make_state(2)
    checkpoints.save(2, state, {})
    assert as_bytes(checkpoints.restore(state)[0]) == as_bytes(state)


def test_a_with_block_that_ends_in_an_error_has_saved_all(tmp_path):
    with pytest.raises(SystemExit), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, {"params": {"w": np.zeros((997, 991))}})
        raise SystemExit(143)
    assert Checkpoints(tmp_path).steps() == [2]


SHORT_OF_MEMORY = """
import resource, sys
import jax.numpy as jnp
from jaxformer.checkpoint import Checkpoints

folder, room = sys.argv[1], int(sys.argv[2])

def state(step):
    return {"params": {f"w{i}": jnp.full(500_003, step + i, jnp.float32) for i in range(37)}}

with Checkpoints(folder) as checkpoints:
    checkpoints.save(1, state(1))
    checkpoints.wait()
    later = state(2)
    if room:
        most = 4096 * int(open("/proc/self/statm").read().split()[0]) + room
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    checkpoints.save(2, later)
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", [1_000_003, 20_000_003])
def test_a_save_that_runs_out_of_memory_names_its_folder_and_the_step_before_stays(tmp_path, room):
    """Of 74 MB, beside which the process has `room`: for no array, or for no thread that writes."""
    folder = tmp_path / "checkpoints"
    (done,) = ended(start("-c", SHORT_OF_MEMORY, folder, room))
    assert done.code not in (0, None), "there was room"
    assert f"a checkpoint could not be written to {folder}" in done.err
    assert Checkpoints(folder).steps() == [1]
    params = Checkpoints(folder).average_params([1])
    assert [params[f"w{i}"][-1] for i in (0, 36)] == [1.0, 37.0]
    finished(start("-c", SHORT_OF_MEMORY, folder, 0))
    assert Checkpoints(folder).steps() == [1, 2]


@pytest.mark.slow
def test_saves_leave_no_lists_behind(checkpoints):
    def lists() -> int:
        counts = []
        for _ in range(3):  # other threads have some for a moment
            time.sleep(0.05)
            gc.collect()
            counts.append(sum(type(item) is list for item in gc.get_objects()))
        return min(counts)

    counts = []
    for step in range(1, 7):
        checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
        if step in (3, 6):  # the first saves leave what is kept for all
            counts.append(lists())
    assert counts[1] - counts[0] < 12, counts  # what orbax asks of tensorstore left 24 a save


def test_a_donated_state_is_saved_as_it_was_when_save_returned(checkpoints):
    add = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"params": {"w": jnp.zeros((997, 491)), "b": jnp.zeros(3)}}
    for step in (1, 2):
        state = add(state)
        checkpoints.save(step, state, {})
        state = add(add(state))
    for step, value in ((1, 1), (2, 4)):
        params = stored(checkpoints, step)
        assert all(np.all(leaf == value) for leaf in params.values())


def test_a_file_system_that_flushes_nothing_is_warned_of_once_and_keeps_checkpoints(
    tmp_path, monkeypatch
):
    def refuse(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("os.fsync", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with Checkpoints(tmp_path) as checkpoints:
            for step in (3, 7, 11):
                checkpoints.save(step, {"w": np.full(5, step)})
    assert [str(x.message)[:38] for x in caught] == ["this file system does not flush what i"]
    assert Checkpoints(tmp_path).newest_step() == 11


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_write_that_fails_names_the_file(tmp_path, monkeypatch, number):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError) as caught:
        storage.write(tmp_path / "a.json", b"{}")
    assert caught.value.filename == str(tmp_path / "a.json") and caught.value.errno == number
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("arrays", [1, 97])
def test_a_save_for_which_the_disk_has_too_little_room_is_not_begun(tmp_path, monkeypatch, arrays):
    """Room for the numbers alone is too little; orbax would fail midway, with tracebacks."""
    state = {f"w{i}": np.ones((5, 113)) for i in range(arrays)}
    room = sum(array.nbytes for array in state.values()) + 1_000
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=room))
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(3, state)
        monkeypatch.undo()
        assert not any(tmp_path.glob("3*"))
