import gc
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from pathlib import Path
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
from jaxformer.errors import CheckpointError, ConfigError, MissingExtra
from tests import two_processes


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


def as_bytes(tree):
    def raw(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return jax.tree.map(raw, tree)


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


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


def test_an_address_of_another_kind_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match="ftp://host/run .*: give a folder, gs://bucket/path or"):
        Checkpoints("ftp://host/run")


def test_a_bucket_without_its_package_is_refused_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtra, match=r"gcsfs is needed .*: pip install 'jaxformer\[gcs\]'"):
        Checkpoints("gs://bucket/run")


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
    raw = checkpoints.restore_params(tree="table")
    assert raw.dtype == np.int64 and raw.tolist() == [[0, 1, 2], [3, 4, 5]]
    restored, _ = checkpoints.restore({**state, "one": np.float64(0), "table": raw})
    assert (int(restored["step"]), float(restored["loss"])) == (5, 0.5)


def test_the_newest_steps_and_the_best_one_stay(checkpoints):
    metrics = {2: 0.5, 3: float("nan"), 5: 0.5, 7: 2.0, 11: None, 13: 0.75, 17: 3.0}
    for step, metric in metrics.items():
        checkpoints.save(step, make_state(step), {"step": step}, metric)
    checkpoints.wait()
    assert checkpoints.steps() == [5, 13, 17]
    assert checkpoints.best_step() == 5  # of equals the newer
    assert checkpoints.metadata(5) == {"step": 5}
    assert checkpoints.metadata() == {"step": 17}
    assert int(checkpoints.restore(make_state(0), 13)[0].step) == 13
    left = {entry.name for entry in checkpoints.folder.iterdir()}
    assert left == {"5", "13", "17", ".lock"}


def test_saving_a_complete_step_again_leaves_it_as_it_is(checkpoints):
    checkpoints.save(2, make_state(2), {"first": True})
    checkpoints.save(2, make_state(3), {"first": False})
    assert checkpoints.metadata() == {"first": True}


def test_a_step_that_was_removed_may_be_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, make_state(2), {})
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    assert checkpoints.steps() == [3]
    checkpoints.save(2, make_state(2), {}, 0.5)
    checkpoints.close()
    assert checkpoints.steps() == [2, 3]


def test_a_step_still_being_written_is_not_counted(checkpoints):
    checkpoints.save(2, make_state(2), {})
    checkpoints.wait()
    (checkpoints.folder / "3.orbax-checkpoint-tmp").mkdir()
    (checkpoints.folder / "5").mkdir()
    assert checkpoints.steps() == [2]
    assert int(checkpoints.restore(make_state(0))[0].step) == 2


def test_reading_changes_nothing_in_the_folder_and_writing_removes_what_a_kill_left(tmp_path):
    writer = Checkpoints(tmp_path)
    writer.save(2, make_state(2), {})
    writer.close()
    left = tmp_path / "3.orbax-checkpoint-tmp-1700000000"
    left.mkdir()
    reader = Checkpoints(tmp_path, keep=1)
    reader.restore(make_state(0))
    reader.restore_params()
    reader.close()
    assert left.is_dir()
    writer = Checkpoints(tmp_path)
    writer.save(5, make_state(5), {})
    writer.close()
    assert not left.exists()
    assert writer.steps() == [2, 5]


def test_no_complete_checkpoint_is_an_error_that_names_the_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path / "absent")
    assert checkpoints.steps() == [] and checkpoints.best_step() is None
    for read in (lambda: checkpoints.restore(make_state(0)), checkpoints.restore_params):
        with pytest.raises(CheckpointError, match=f"no committed checkpoint in {tmp_path}/absent"):
            read()
    assert not (tmp_path / "absent").exists()


def test_a_missing_step_is_an_error_that_names_the_steps_there(checkpoints):
    checkpoints.save(2, make_state(2), {})
    with pytest.raises(CheckpointError, match=r"of step 3 in .*: it has 2"):
        checkpoints.restore(make_state(0), 3)


@pytest.mark.parametrize(
    ("changes", "here"),
    [({"kernel": (5, 2)}, "float32[5,2]"), ({"dtype": "bfloat16"}, "bfloat16[5,3]")],
)
def test_another_shape_or_type_is_refused_with_the_parameter_and_not_cast(
    checkpoints, changes, here
):
    checkpoints.save(2, make_state(2), {})
    said = f"params/decoder/blocks_0/kernel is float32[5,3] in the checkpoint but {here} here"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        checkpoints.restore(make_state(2, **changes))


def test_params_are_named_before_the_optimizer_that_follows_their_shape(checkpoints):
    def grown(size):
        params = {f"block_{n}": jnp.zeros((3, size)) for n in range(7)}
        return {"params": params, "opt_state": optax.adam(0.1).init(params)}

    checkpoints.save(2, grown(5), {})
    with pytest.raises(CheckpointError, match=r"optimizer: params/block_0 is .*; and 16 more"):
        checkpoints.restore(grown(7))


def test_left_over_and_missing_parameters_are_named_and_the_rest_counted(checkpoints):
    state = make_state(2)
    checkpoints.save(2, state, {})
    with pytest.raises(CheckpointError, match=r"ema/decoder/blocks_1/bias is absent in the check"):
        checkpoints.restore(make_state(2, ema=True))
    with pytest.raises(CheckpointError, match=r"rng is uint32\[2\] .* but uint32\[4\] here"):
        checkpoints.restore(make_state(2, impl="rbg"))
    with pytest.raises(CheckpointError, match=r"/count is int32\[\] .*absent here.*; and 1 more"):
        checkpoints.restore(state.replace(opt_state=(), rng=jax.random.key(1)))


def test_params_are_read_as_numpy_without_the_optimizer(checkpoints):
    state = make_state(2)
    checkpoints.save(2, state, {})
    params = checkpoints.restore_params()
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(params))
    assert as_bytes(params) == as_bytes(state.params)
    with pytest.raises(CheckpointError, match="holds no 'ema'"):
        checkpoints.restore_params(tree="ema")


def test_an_average_is_the_mean_in_the_stored_dtype(checkpoints):
    kernels, biases = [1.0, 2.0, 9.0], [1.0, 1.0, 1.0078125]
    for step, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        params = {"k": jnp.full((2, 3), kernel), "b": jnp.full(5, bias, jnp.bfloat16)}
        state = {"params": params, "ema": {"k": jnp.float32(step)}}
        checkpoints.save(step, state, {}, metric=step)
    mean = checkpoints.average_params([0, 1, 2])
    assert mean["k"].dtype == np.float32 and np.all(mean["k"] == 4.0)
    assert mean["b"].dtype == ml_dtypes.bfloat16 and np.all(mean["b"] == 1.0)
    assert checkpoints.average_params([1, 2], tree="ema") == {"k": 1.5}
    with pytest.raises(CheckpointError, match="at least one step"):
        checkpoints.average_params([])


def test_metadata_that_are_not_json_are_refused_before_anything_is_written(checkpoints):
    with pytest.raises(CheckpointError, match="metadata must be JSON, use plain values: .* int64"):
        checkpoints.save(2, make_state(2), {"position": np.int64(3)})
    assert checkpoints.steps() == []


def flip(path, bit=5):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << bit
    path.write_bytes(content)


def largest(folder):
    """The file of a step with its arrays."""
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


@pytest.fixture
def three(tmp_path):
    """A folder with the committed steps 2, 3 and 5, which no process locks."""
    folder = tmp_path / "three"
    with Checkpoints(folder) as checkpoints:
        for step in (2, 3, 5):
            checkpoints.save(step, make_state(step), {"step": step}, float(step))
    return folder


def names(folder):
    return {entry.name for entry in folder.iterdir()} - {".lock"}


def opened(folder):
    """Checkpoints that have locked the folder, as at the start of a `with` block."""
    return Checkpoints(folder).__enter__()


def step_of(restored):
    state, metadata = restored
    assert as_bytes(state) == as_bytes(make_state(metadata["step"]))
    return metadata["step"]


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flip,
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["arrays", "MANIFEST.json", "state/manifest.ocdbt"])
def test_a_damaged_newest_step_gives_way_to_the_one_before(three, kind, name):
    DAMAGE[kind](largest(three / "5") if name == "arrays" else three / "5" / name)
    with pytest.warns(UserWarning, match="and step 3 is used"):
        checkpoints = opened(three)
    assert checkpoints.newest_step() == 3
    assert step_of(checkpoints.restore(make_state(0))) == 3
    assert checkpoints.steps() == [2, 3]
    checkpoints.save(5, make_state(5), {"step": 5})
    checkpoints.close()
    assert step_of(Checkpoints(three).restore(make_state(0))) == 5


def test_a_damaged_step_is_set_aside_with_its_reason_and_only_once(three):
    for name in ("corrupt-5", "corrupt-5-2"):
        file = largest(three / "5")
        flip(file)
        message = rf"{file} is damaged: its CRC-32 .* it was renamed {name}, and step 3 is used"
        with pytest.warns(UserWarning, match=message), Checkpoints(three) as checkpoints:
            assert (three / name).is_dir() and not (three / "5").exists()
            checkpoints.save(5, make_state(5), {"step": 5})


def test_two_damaged_steps_give_way_to_the_third(three):
    flip(largest(three / "5"))
    flip(three / "3" / "MANIFEST.json")
    with pytest.warns(UserWarning) as said, Checkpoints(three) as checkpoints:
        assert step_of(checkpoints.restore(make_state(0))) == 2
    assert len(said) == 2
    assert names(three) == {"2", "corrupt-3", "corrupt-5"}


def test_a_reader_ignores_a_damaged_step_and_leaves_it_where_it_is(three):
    flip(largest(three / "5"))
    before = names(three)
    with pytest.warns(UserWarning, match="it is ignored, and step 3 is used"):
        assert step_of(Checkpoints(three).restore(make_state(0))) == 3
    with pytest.warns(UserWarning):
        assert Checkpoints(three).metadata() == {"step": 3}
    assert names(three) == before


def test_a_damaged_step_asked_for_by_number_is_refused_with_the_file(three):
    file = largest(three / "5")
    flip(file)
    checkpoints = Checkpoints(three)
    reads = (lambda: checkpoints.restore(make_state(0), 5), lambda: checkpoints.restore_params(5))
    for read in (*reads, lambda: checkpoints.average_params([3, 5])):
        with pytest.raises(CheckpointError, match=f"{file} is damaged: its CRC-32"):
            read()
    file.write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"is damaged: it has 3 bytes, and \d+ were saved"):
        checkpoints.restore(make_state(0), 5)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} cannot be read: No such file"):
        checkpoints.restore(make_state(0), 5)


def test_a_folder_whose_steps_are_all_damaged_is_refused_with_each_reason_and_untouched(three):
    files = [largest(three / str(step)) for step in (2, 3, 5)]
    for file in files:
        flip(file)
    before = names(three)
    checkpoints = Checkpoints(three)
    for use in (
        checkpoints.newest_step,
        lambda: checkpoints.save(7, {}, {}),
        lambda: opened(three),
    ):
        with pytest.raises(CheckpointError) as refused:
            use()
        said = str(refused.value)
        assert f"no checkpoint in {three} is intact" in said
        assert all(f"{file} is damaged" in said for file in files)
    assert names(three) == before


def test_a_step_that_was_never_committed_does_not_count_and_is_replaced(three):
    (three / "5" / "MANIFEST.json").unlink()
    with pytest.warns(UserWarning, match="three/5 was never committed, so it does not count"):
        checkpoints = opened(three)
    assert checkpoints.steps() == [2, 3] and checkpoints.newest_step() == 3
    checkpoints.save(5, make_state(5), {"step": 5})
    checkpoints.close()
    assert names(three) == {"2", "3", "5"}


def test_a_removal_that_was_interrupted_is_completed_by_the_next_start(tmp_path, monkeypatch):
    def half(folder):
        for name in list(storage.lengths(folder))[1::2]:
            (folder / name).unlink()

    with monkeypatch.context() as patch, Checkpoints(tmp_path, keep=1) as checkpoints:
        patch.setattr(storage, "remove_tree", half)
        for step in (2, 3):
            checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
    assert Checkpoints(tmp_path).steps() == [3] and names(tmp_path) == {"2", "3"}
    opened(tmp_path).close()
    assert names(tmp_path) == {"3"}


@pytest.mark.parametrize("left", ["5", "5.orbax-checkpoint-tmp"])
def test_a_first_step_that_was_never_committed_is_said_and_training_may_start(tmp_path, left):
    (tmp_path / left).mkdir()
    with pytest.warns(UserWarning, match="never committed: there is nothing to resume"):
        checkpoints = opened(tmp_path)
    assert checkpoints.steps() == [] and checkpoints.newest_step() is None
    checkpoints.save(5, make_state(5), {"step": 5})
    checkpoints.close()
    assert step_of(Checkpoints(tmp_path).restore(make_state(0))) == 5


@pytest.mark.parametrize("left", [("2", "5"), ("corrupt-5",)])
def test_a_folder_that_was_trained_in_but_has_no_committed_step_is_refused(tmp_path, left):
    for name in left:
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="is committed, though a run has trained there"):
        opened(tmp_path)
    assert names(tmp_path) == set(left)


def rewritten(path, **changes):
    """A manifest with other content, and a CRC-32 of its own that is right."""
    content = json.loads(path.read_text()) | changes
    content.pop("crc32")
    rest = json.dumps(content).encode()[1:]
    path.write_bytes(b'{"crc32": "%08x", ' % zlib.crc32(rest) + rest)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../../secret": [3, 7]}},
        {"files": {"/etc/hostname": [3, 7]}},
        {"files": {"a\0b": [3, 7]}},
        {"files": {"state/_METADATA": [3]}},
        {"files": {"state/_METADATA": [3, "7"]}},
        {"files": None},
        {"leaves": {"step": 3}},
        {"metadata": []},
        {"metric": "low"},
    ],
)
def test_a_manifest_that_asks_for_something_else_is_refused(three, changes):
    rewritten(three / "5" / "MANIFEST.json", **changes)
    with pytest.raises(CheckpointError, match="5/MANIFEST.json is not a manifest"):
        Checkpoints(three).restore(make_state(0), 5)
    assert Checkpoints(three).steps() == [2, 3]


def test_a_manifest_of_another_format_or_too_deep_is_refused(three):
    path = three / "5" / "MANIFEST.json"
    rewritten(path, format=2)
    with pytest.raises(CheckpointError, match="has format 2, and this version reads format 1"):
        Checkpoints(three).metadata(5)
    rest = b'"format": ' + b"[" * 100_000
    path.write_bytes(b'{"crc32": "%08x", ' % zlib.crc32(rest) + rest)
    with pytest.raises(CheckpointError, match="MANIFEST.json is not JSON"):
        Checkpoints(three).metadata(5)


def test_a_manifest_that_is_still_json_but_not_the_one_written_is_refused(three):
    path = three / "5" / "MANIFEST.json"
    text = path.read_bytes()
    for old, new in ((b'"step": 5', b'"step": 7'), (b'"crc32": "', b'"crc32": "0')):
        assert text.count(old) == 1
        path.write_bytes(text.replace(old, new))
        with pytest.raises(CheckpointError, match="5/MANIFEST.json is damaged: its bytes are not"):
            Checkpoints(three).metadata(5)


def test_the_manifest_says_what_is_stored(three):
    found = json.loads((three / "5" / "MANIFEST.json").read_text())
    assert found["leaves"]["params/decoder/blocks_1/bias"] == "bfloat16[7]"
    assert found["leaves"]["rng"] == "uint32[2]"
    assert (found["metadata"], found["metric"]) == ({"step": 5}, 5.0)
    there = {f.relative_to(three / "5").as_posix(): f for f in (three / "5").rglob("*")}
    files = {name for name, path in there.items() if path.is_file()}
    assert found["files"].keys() == files - {"MANIFEST.json"}
    for name, (length, crc) in found["files"].items():
        assert [length, crc] == [there[name].stat().st_size, zlib.crc32(there[name].read_bytes())]


def test_saving_does_not_wait_for_the_disk_and_a_step_counts_when_it_is_committed(
    checkpoints, monkeypatch
):
    commit, go_on = manifest.commit, threading.Event()

    def late(*args):
        assert go_on.wait(30)
        commit(*args)

    monkeypatch.setattr(manifest, "commit", late)
    metadata = {"position": [3]}
    checkpoints.save(2, make_state(2), metadata)
    metadata["position"].append(5)
    assert checkpoints.steps() == [] and checkpoints.newest_step() is None
    go_on.set()
    checkpoints.wait()
    assert checkpoints.steps() == [2] and checkpoints.metadata() == {"position": [3]}


def test_a_second_run_in_the_folder_is_refused_with_the_first_ones_process(three):
    message = rf"three is being written by another run \(process {os.getpid()}\)"
    with Checkpoints(three):
        other = Checkpoints(three)
        with pytest.raises(ConfigError, match=message):
            opened(three)
        with pytest.raises(ConfigError, match=message):
            other.save(7, make_state(7), {})
        assert step_of(other.restore(make_state(0))) == 5
        other.close()
    with Checkpoints(three) as checkpoints:
        checkpoints.save(7, make_state(7), {"step": 7})
    assert names(three) == {"2", "3", "5", "7"}


def test_a_lock_ends_with_its_process(tmp_path):
    code = """
        import os, signal, sys, time
        from jaxformer.checkpoint import Checkpoints

        with Checkpoints(sys.argv[1]):
            print("locked", flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"process {process.pid}"):
            opened(tmp_path)
        process.kill()
        process.wait()
        opened(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_an_os_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"{tmp_path}/file"):
        Checkpoints(tmp_path / "file").save(2, make_state(2), {})

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=f"Permission denied: '{tmp_path}/closed/.lock'"):
        Checkpoints(tmp_path / "closed").save(2, make_state(2), {})


def test_a_failed_write_is_an_os_error_and_the_steps_before_and_after_are_complete(checkpoints):
    state = {"params": {"w": np.random.default_rng(0).normal(size=(97, 89))}}
    checkpoints.save(2, state, {}, 1.0)
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="could not be written to .*checkpoints"):
            checkpoints.save(3, state, {}, 0.5)
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == [2]
    assert names(checkpoints.folder) == {"2"}
    for step in (3, 5, 7):
        checkpoints.save(step, state, {}, float(step))
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 7]


def test_an_error_is_not_replaced_by_that_of_the_save_it_interrupts(tmp_path):
    def fail():
        raise OSError("no room")

    with pytest.raises(RuntimeError, match="the step failed"):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints._committing = checkpoints._thread.submit(fail)
            raise RuntimeError("the step failed")
    with pytest.raises(OSError, match="no room"), Checkpoints(tmp_path) as checkpoints:
        checkpoints._committing = checkpoints._thread.submit(fail)


def test_a_process_that_is_gone_is_no_failure_of_the_disk(checkpoints, monkeypatch):
    def gone(value):
        raise ValueError("UNKNOWN: Gloo all-reduce failed")

    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"):
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(multihost_utils, "broadcast_one_to_all", gone)
        checkpoints.save(5, make_state(5), {})


def test_a_state_that_could_not_be_computed_is_no_failure_of_the_disk(checkpoints, monkeypatch):
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()

    def fail(*args, **named):
        raise jax.errors.JaxRuntimeError("Gloo all-reduce failed")

    with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"):
        patch.setattr(checkpoints._writer, "save", fail)
        checkpoints.save(5, make_state(5), {})
    checkpoints.save(7, make_state(7), {})
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
        checkpoints.save(2, {"params": {"w": jnp.zeros((997, 991))}})
        raise SystemExit(143)
    assert Checkpoints(tmp_path).steps() == [2]


@pytest.mark.long
def test_saves_leave_no_lists_behind(checkpoints):
    def lists() -> int:
        counts = []
        for _ in range(5):  # other threads have some for a moment
            time.sleep(0.05)
            gc.collect()
            counts.append(sum(type(item) is list for item in gc.get_objects()))
        return min(counts)

    counts = []
    for step in range(1, 7):
        checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
        counts.append(lists())
    assert counts[-1] - counts[2] < 12, counts  # what orbax asks of tensorstore left 24 a save


def test_a_donated_state_is_saved_as_it_was_when_save_returned(checkpoints):
    add = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"params": {"w": jnp.zeros((997, 491)), "b": jnp.zeros(3)}}
    for step in (1, 2):
        state = add(state)
        checkpoints.save(step, state, {})
        for _ in range(3):
            state = add(state)
        state = jax.tree.map(lambda leaf: leaf - 3, state)
    for step in (1, 2):
        params = checkpoints.restore_params(step)
        assert all(np.all(leaf == step) for leaf in params.values())


IN_TWO_PROCESSES = """
    warnings.simplefilter("ignore")
    with Checkpoints(folder, keep=2) as checkpoints:
        found = 0
        if checkpoints.steps():
            restored, metadata = checkpoints.restore(state(0))
            found = metadata["step"]
            check(restored["params"]["w"], found)
        for step in range(found + 1, found + 4):
            checkpoints.save(step, state(step), {"step": step})
        checkpoints.wait()
        print(found, *checkpoints.steps())
"""


def run_two_processes(folder):
    """The exit code and the last line of each, or the errors of one that failed."""
    ended = two_processes.run(IN_TWO_PROCESSES, folder)
    return [(code, out.split("\n")[-2:][0] if code == 0 else err) for code, out, err in ended]


@pytest.mark.long
def test_two_processes_save_and_resume_alike_from_what_the_first_one_found_intact(tmp_path):
    assert run_two_processes(tmp_path) == [(0, "0 2 3")] * 2
    flip(next(tmp_path.glob("3/state/ocdbt.process_1/d/*")))
    assert run_two_processes(tmp_path) == [(0, "2 4 5")] * 2
    for step in (4, 5):
        flip(next((tmp_path / str(step)).glob("state/ocdbt.process_1/d/*")))
    for code, said in run_two_processes(tmp_path):
        assert code != 0 and "CheckpointError" in said


ONE_FAILS = """
    from jax.experimental import multihost_utils
    from jaxformer.distributed.processes import agreed

    def shared():  # as a step of the other, of another size than what is agreed
        print(*multihost_utils.process_allgather(np.arange(32.0) + int(index)).sum(1))

    try:
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(2, state(2))
            if index == "1":
                raise RuntimeError("this process has failed alone")
            shared()
    except RuntimeError:
        shared()
        agreed(1)
    print(*Checkpoints(folder).steps())
"""


@pytest.mark.long
def test_a_process_that_fails_sends_nothing_that_another_takes_for_a_part_of_its_step(tmp_path):
    for code, out, error in two_processes.run(ONE_FAILS, tmp_path):
        assert (code, out.splitlines()[-2:]) == (0, ["496.0 528.0", "2"]), error
