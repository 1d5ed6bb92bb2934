import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jaxformer.checkpoint import CheckpointError, Checkpoints


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


def test_a_restored_state_has_the_bytes_types_and_facts_of_the_saved_one(checkpoints):
    state = make_state(11, ema=True)
    facts = {"epoch": 3, "fingerprint": "ab", "best": 1.25, "names": ["en", None]}
    checkpoints.save(11, state, facts)
    restored, found = checkpoints.restore(jax.eval_shape(lambda: state))
    assert found == facts == checkpoints.facts()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert as_bytes(restored) == as_bytes(state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    assert jax.random.bits(restored.rng) == jax.random.bits(state.rng)


def test_a_key_of_another_generator_and_a_missing_ema_come_back(checkpoints):
    state = make_state(13, impl="rbg")
    checkpoints.save(1, state, {})
    restored, _ = checkpoints.restore(state)
    assert restored.ema is None
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
    metrics = {3: float("nan"), 5: 0.5, 7: 2.0, 11: None, 13: 0.75, 17: 3.0}
    for step, metric in metrics.items():
        checkpoints.save(step, make_state(step), {"step": step}, metric)
    checkpoints.wait()
    assert checkpoints.steps() == [5, 13, 17]
    assert checkpoints.best_step() == 5
    assert checkpoints.facts(5) == {"step": 5}
    assert checkpoints.facts() == {"step": 17}
    assert int(checkpoints.restore(make_state(0), 13)[0].step) == 13
    left = {entry.name for entry in checkpoints.folder.iterdir()}
    assert left == {"5", "13", "17"}


def test_of_equally_good_steps_the_newer_is_the_best(checkpoints):
    checkpoints.save(2, make_state(2), {}, 0.5)
    checkpoints.save(3, make_state(3), {}, 0.5)
    checkpoints.wait()
    assert checkpoints.best_step() == 3


def test_without_metrics_there_is_no_best_step(checkpoints):
    checkpoints.save(2, make_state(2), {})
    checkpoints.wait()
    assert checkpoints.best_step() is None


def test_saving_a_complete_step_again_leaves_it_as_it_is(checkpoints):
    checkpoints.save(2, make_state(2), {"first": True})
    checkpoints.save(2, make_state(3), {"first": False})
    assert checkpoints.facts() == {"first": True}


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
        with pytest.raises(CheckpointError, match=f"no complete checkpoint in {tmp_path}/absent"):
            read()
    assert not (tmp_path / "absent").exists()


def test_a_missing_step_is_an_error_that_names_the_steps_there(checkpoints):
    checkpoints.save(2, make_state(2), {})
    with pytest.raises(CheckpointError, match=r"of step 3 in .*: it has 2"):
        checkpoints.restore(make_state(0), 3)


def test_another_shape_is_refused_with_the_parameter_and_both_shapes(checkpoints):
    checkpoints.save(2, make_state(2), {})
    message = (
        r"params/decoder/blocks_0/kernel is float32\[5,3\] in the checkpoint "
        r"but float32\[5,2\] here"
    )
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(make_state(2, kernel=(5, 2)))


def test_params_are_named_before_the_optimizer_that_follows_their_shape(checkpoints):
    def grown(size):
        params = {f"block_{n}": jnp.zeros((3, size)) for n in range(7)}
        return {"params": params, "opt_state": optax.adam(0.1).init(params)}

    checkpoints.save(2, grown(5), {})
    with pytest.raises(CheckpointError, match=r"optimizer: params/block_0 is .*; and 16 more"):
        checkpoints.restore(grown(7))


def test_another_dtype_is_refused_and_not_cast(checkpoints):
    checkpoints.save(2, make_state(2), {})
    message = (
        r"params/decoder/blocks_0/kernel is float32\[5,3\] in the checkpoint "
        r"but bfloat16\[5,3\] here"
    )
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(make_state(2, dtype=jnp.bfloat16))


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


def test_facts_that_are_not_json_are_refused_before_anything_is_written(checkpoints):
    with pytest.raises(CheckpointError, match="facts must be JSON, but .* int64"):
        checkpoints.save(2, make_state(2), {"position": np.int64(3)})
    assert checkpoints.steps() == []


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0, but at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_a_damaged_file_is_a_checkpoint_error_that_names_it(checkpoints):
    checkpoints.save(2, make_state(2), {})
    checkpoints.wait()
    (checkpoints.folder / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="checkpoints/2/state is damaged"):
        checkpoints.restore_params()
    (checkpoints.folder / "2" / "facts" / "metadata").write_text("{")
    with pytest.raises(CheckpointError, match="checkpoints/2/facts is damaged"):
        checkpoints.facts()


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
    for step in (3, 5, 7):
        checkpoints.save(step, state, {}, float(step))
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 7]


def test_nothing_is_unpickled(checkpoints, monkeypatch):
    def refuse(*_):
        raise RuntimeError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    state = make_state(2)
    checkpoints.save(2, state, {})
    assert as_bytes(checkpoints.restore(state)[0]) == as_bytes(state)


def run_python(code, folder, *, devices=1):
    environment = dict(os.environ, XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}")
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_state_spread_over_devices_is_restored_spread_and_read_by_one(tmp_path):
    code = """
        import sys
        import jax, jax.numpy as jnp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec
        from jaxformer.checkpoint import Checkpoints

        mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = {"params": {"w": jax.device_put(jnp.arange(12.0).reshape(4, 3), sharding)},
                 "rng": jax.device_put(jax.random.key(5), everywhere)}
        checkpoints = Checkpoints(sys.argv[1])
        checkpoints.save(1, state, {})
        restored, _ = checkpoints.restore(state)
        assert restored["params"]["w"].sharding == sharding
        assert restored["rng"].sharding == everywhere
        assert jax.random.bits(restored["rng"]) == jax.random.bits(state["rng"])
        checkpoints.close()
    """
    done = run_python(code, tmp_path, devices=4)
    assert done.returncode == 0, done.stderr
    blank = {"params": {"w": jnp.zeros((4, 3))}, "rng": jax.random.key(0)}
    restored, _ = Checkpoints(tmp_path).restore(blank)
    assert restored["params"]["w"].tolist() == np.arange(12.0).reshape(4, 3).tolist()
    assert jax.random.bits(restored["rng"]) == jax.random.bits(jax.random.key(5))


def test_a_with_block_that_ends_in_an_error_has_saved_all(tmp_path):
    code = """
        import sys
        import jax.numpy as jnp
        from jaxformer.checkpoint import Checkpoints

        with Checkpoints(sys.argv[1]) as checkpoints:
            checkpoints.save(2, {"params": {"w": jnp.zeros((997, 991))}}, {})
            raise SystemExit(143)
    """
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stderr) == (143, "")
    assert Checkpoints(tmp_path).steps() == [2]


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


def test_after_a_kill_the_next_start_finds_a_complete_step(tmp_path):
    code = """
        import os, signal, sys
        import jax.numpy as jnp
        from jaxformer.checkpoint import Checkpoints

        checkpoints = Checkpoints(sys.argv[1], keep=2)
        for step in range(7):
            checkpoints.save(step, {"params": {"w": jnp.full((97, 89), step * 1.0)}}, {"n": step})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_python(code, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    checkpoints = Checkpoints(tmp_path, keep=2)
    newest = checkpoints.steps()[-1]
    assert newest >= 5
    params = checkpoints.restore_params()
    assert np.all(params["w"] == newest) and checkpoints.facts() == {"n": newest}
    checkpoints.save(7, {"params": {"w": jnp.zeros((97, 89))}}, {})
    checkpoints.close()
    assert len(checkpoints.steps()) == 2
