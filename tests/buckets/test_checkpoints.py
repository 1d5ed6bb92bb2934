"""Checkpoints in buckets keep the promises of those in a folder."""

import warnings

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints, manifest
from jaxformer.errors import CheckpointError
from tests import buckets, two_processes
from tests.faults import states

pytestmark = pytest.mark.long


@pytest.fixture
def three(bucket_url):
    """A folder in a bucket with the committed steps 2, 3 and 5, which no run locks."""
    states.make_folder(bucket_url, (2, 3, 5))
    return bucket_url


def names(url):
    """The first parts of the names of objects, without the lock's."""
    return storage.folders(storage.to_path(url)).keys() - {".lock"}


def arrays(url, step):
    """The object of a step with most of its arrays."""
    lengths = storage.lengths(storage.to_path(url).joinpath(str(step)))
    return storage.to_path(url).joinpath(str(step), max(lengths, key=lengths.__getitem__))


def opened(url):
    """Checkpoints that have locked the folder, as at the start of a `with` block."""
    return Checkpoints(url).__enter__()


def test_a_state_from_a_bucket_has_the_bits_of_one_from_a_folder(bucket_url, tmp_path):
    read = []
    longer = storage.to_path(f"{bucket_url}-2")
    (longer / "11" / manifest.NAME).write_text("of a folder with a longer name")
    for folder in (bucket_url, tmp_path):
        with Checkpoints(folder, keep=2) as checkpoints:
            for step in (2, 3, 5, 7):
                states.save(checkpoints, step)
            checkpoints.annotate(5, {"loss": 0.25}, -11.0)
        checkpoints = Checkpoints(folder)
        assert (checkpoints.steps(), checkpoints.best_step()) == ([5, 7], 5)
        assert checkpoints.metadata(5) == {"step": 5, "loss": 0.25}
        state, metadata = checkpoints.restore(states.make_state(0))
        assert metadata == {"step": 7}
        params, mean = checkpoints.restore_params(5), checkpoints.average_params([5, 7])
        read.append(states.as_bytes((state, params, mean)))
    assert read[0] == read[1]
    assert states.as_bytes(state) == states.as_bytes(states.make_state(7))
    assert names(bucket_url) == {"5", "7"}


def test_parameters_are_read_from_a_bucket_to_the_devices_of_a_mesh(three):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    shardings = lambda tree: jax.tree.map(lambda _: spread, tree)  # noqa: E731
    params = Checkpoints(three).restore_params(3, shardings=shardings)
    assert all(leaf.sharding == spread for leaf in jax.tree.leaves(params))
    assert states.as_bytes(params) == states.as_bytes(states.make_state(3)["params"])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 32
    path.write_bytes(content)


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "flipped": flip,
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_step_with_a_damaged_object_is_set_aside_and_an_older_one_used(three, kind):
    path = arrays(three, 5)
    DAMAGE[kind](path)
    left = storage.lengths(storage.to_path(three).joinpath("5"))
    with pytest.warns(UserWarning, match=f"{path} .*ignored, and step 3 is used"):
        assert states.is_right(Checkpoints(three), 3) and Checkpoints(three).newest_step() == 3
    with pytest.raises(CheckpointError, match=str(path)):
        Checkpoints(three).restore_params(5)
    assert names(three) == {"2", "3", "5"}
    said = f"{path} .*renamed corrupt-5, and step 3 is used"
    with pytest.warns(UserWarning, match=said), Checkpoints(three) as checkpoints:
        assert states.is_right(checkpoints) and checkpoints.steps() == [2, 3]
        assert storage.lengths(storage.to_path(three).joinpath("corrupt-5")) == left
        states.save(checkpoints, 5)
        checkpoints.wait()
        assert states.is_right(checkpoints, 5)
    assert names(three) == {"2", "3", "5", "corrupt-5"}


def test_setting_a_step_aside_is_completed_after_a_kill_in_the_middle(three, monkeypatch):
    flip(arrays(three, 5))
    left, copies = storage.lengths(storage.to_path(three).joinpath("5")), []

    def copy_three(new, old, copy=storage.BucketPath.replace_by):
        if len(copies) == 3:
            raise KeyboardInterrupt
        copies.append(copy(new, old))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage.BucketPath, "replace_by", copy_three)
        opened(three)
    assert names(three) == {"2", "3", "5", "corrupt-5"}
    with pytest.warns(UserWarning, match="renamed corrupt-5, and step 3 is used"):
        opened(three).close()
    assert names(three) == {"2", "3", "corrupt-5"}
    assert storage.lengths(storage.to_path(three).joinpath("corrupt-5")) == left


@pytest.mark.parametrize("closed", ["/", manifest.NAME, "ocdbt"])
def test_what_cannot_be_read_now_is_no_damage(three, closed):
    with buckets.injected(three[:2], closed=closed):
        for use in (Checkpoints(three).newest_step, lambda: opened(three)):
            with pytest.raises(OSError, match=f"cannot be read .*: use credentials .*'{three}"):
                use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(three).close()
    assert Checkpoints(three).steps() == [2, 3, 5]


def test_what_a_kill_left_of_a_save_or_a_removal_does_not_count_and_is_removed(three):
    for name in (manifest.NAME, "commit_success.txt"):  # in the middle of saving step 5
        storage.to_path(three).joinpath("5", name).unlink()
    # in the middle of removing step 2
    storage.to_path(three).joinpath("2", manifest.NAME).unlink()
    assert Checkpoints(three).steps() == [3] and names(three) == {"2", "3", "5"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(three).close()
    assert names(three) == {"3"}


def test_a_step_that_was_written_but_not_committed_is_said_and_replaced(three):
    storage.to_path(three).joinpath("5", manifest.NAME).unlink()
    with pytest.warns(UserWarning, match="/5 was never committed"):
        checkpoints = opened(three)
    states.save(checkpoints, 5)
    checkpoints.close()
    assert states.is_right(Checkpoints(three), 5)


def test_a_first_save_that_was_killed_is_said_and_training_may_start(bucket_url):
    states.make_folder(bucket_url, (2,))
    for name in (manifest.NAME, "commit_success.txt"):
        storage.to_path(bucket_url).joinpath("2", name).unlink()
    with pytest.warns(UserWarning, match="never committed: there is nothing to resume"):
        opened(bucket_url).close()
    assert names(bucket_url) == set()


def test_slow_and_failing_requests_change_no_bit(bucket_url):
    scheme = bucket_url[:2]
    with buckets.injected(scheme, fail_every=10, slow_every=7, seconds=0.1):
        states.make_folder(bucket_url, (2,))
        assert states.is_right(Checkpoints(bucket_url))
    assert buckets.inject(scheme)["failed"] > 10


def test_who_may_only_read_is_refused_with_a_sentence(three):
    with buckets.injected(three[:2], read_only=True):
        assert states.is_right(Checkpoints(three))
        with pytest.raises(OSError, match=f"cannot be written .*: use credentials .*'{three}"):
            states.save(Checkpoints(three), 7)
    assert Checkpoints(three).steps() == [2, 3, 5]


def test_a_run_that_may_no_longer_write_says_so_and_goes_on_when_it_may(three):
    checkpoints = opened(three)
    with buckets.injected(three[:2], read_only=True):
        with pytest.raises(OSError, match=f"could not be written to {three}: .*"):
            states.save(checkpoints, 7)
            checkpoints.wait()
    assert checkpoints.steps() == [2, 3, 5]
    states.save(checkpoints, 11)
    checkpoints.close()
    assert names(three) == {"2", "3", "5", "11"}


@pytest.mark.parametrize("scheme", buckets.SCHEMES)
def test_a_bucket_that_does_not_exist_is_refused_with_its_name(object_storage, scheme):
    checkpoints = Checkpoints(f"{scheme}://absent/run")
    with pytest.raises(CheckpointError, match=f"no committed checkpoint in {scheme}://absent/run"):
        checkpoints.restore({})
    with pytest.raises(OSError, match=r"written .*: create the bucket 'absent', or correct"):
        states.save(checkpoints, 2)


IN_TWO_PROCESSES = """
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (2, 3, 5):
            checkpoints.save(step, state(step), {"step": step}, -step)
        checkpoints.annotate(5, {"loss": 0.5})
        restored, metadata = checkpoints.restore(state(0))
        check(restored["params"]["w"], 5)
        shardings = lambda tree: jax.tree.map(lambda _: spread, tree)
        check(checkpoints.average_params([3, 5], shardings=shardings)["w"], 4)
        print(*checkpoints.steps(), metadata)
"""


def test_two_processes_save_restore_and_average_alike_in_a_bucket(bucket_url):
    for code, out, error in two_processes.run(IN_TWO_PROCESSES, bucket_url):
        assert (code, out.splitlines()[-1:]) == (0, ["3 5 {'step': 5, 'loss': 0.5}"]), error
    assert names(bucket_url) == {"3", "5"}
