"""Checkpoints in buckets: the bits of a folder's, and what happens with requests."""

import warnings

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints, manifest
from jaxformer.errors import CheckpointError
from tests import buckets, two_processes
from tests.checkpoint.places import in_a_bucket, names
from tests.faults import states

pytestmark = pytest.mark.long


@in_a_bucket
def test_a_state_from_a_bucket_has_the_bits_of_one_from_a_folder(place, tmp_path):
    read = []
    longer = storage.to_path(f"{place}-2")
    (longer / "11" / manifest.NAME).write_text("of a folder with a longer name")
    for folder in (place, tmp_path):
        with Checkpoints(folder, keep=1) as checkpoints:
            states.save(checkpoints, 2)
            checkpoints.annotate(2, {"loss": 0.25}, -11.0)
            for step in (3, 5):
                states.save(checkpoints, step)
        checkpoints = Checkpoints(folder)
        assert (checkpoints.steps(), checkpoints.best_step()) == ([2, 5], 2)
        assert checkpoints.metadata(2) == {"step": 2, "loss": 0.25}
        state, metadata = checkpoints.restore(states.make_state(0))
        assert metadata == {"step": 5}
        params, mean = checkpoints.average_params([2]), checkpoints.average_params([2, 5])
        read.append(states.as_bytes((state, params, mean)))
    assert read[0] == read[1]
    assert states.as_bytes(state) == states.as_bytes(states.make_state(5))
    assert names(place) == {"2", "5"}
    # to the devices of a mesh
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    shardings = lambda tree: jax.tree.map(lambda _: spread, tree)  # noqa: E731
    placed = Checkpoints(place).average_params([2], shardings=shardings)
    assert all(leaf.sharding == spread for leaf in jax.tree.leaves(placed))
    assert states.as_bytes(placed) == states.as_bytes(params)


@in_a_bucket
def test_what_cannot_be_read_now_is_no_damage(three):
    for closed in ("/", manifest.NAME, "ocdbt"):
        with buckets.injected(closed=closed):
            for use in (Checkpoints(three).newest_step, Checkpoints(three).__enter__):
                with pytest.raises(OSError, match=f"'{three}"):
                    use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Checkpoints(three).__enter__().close()
    assert Checkpoints(three).steps() == [2, 3, 5]


@in_a_bucket
def test_slow_and_failing_requests_change_no_bit(place):
    with buckets.injected(fail_every=10, slow_every=7, seconds=0.1):
        states.make_folder(place, (2,))
        assert states.is_right(Checkpoints(place))
    assert buckets.inject()["failed"] > 10


@in_a_bucket
def test_who_may_only_read_is_refused_and_goes_on_when_it_may_write(three):
    opened = Checkpoints(three).__enter__()
    with buckets.injected(read_only=True):
        with pytest.raises(OSError, match=str(three)):
            states.save(opened, 7)
            opened.wait()
        assert opened.steps() == [2, 3, 5]
        assert states.is_right(Checkpoints(three))
    states.save(opened, 11)
    opened.close()
    with buckets.injected(read_only=True):
        with pytest.raises(OSError, match=f"'{three}"):
            states.save(Checkpoints(three), 13)
    assert names(three) == {"2", "3", "5", "11"}


def test_a_bucket_that_does_not_exist_is_refused_with_its_name(object_storage):
    checkpoints = Checkpoints("gs://absent/run")
    with pytest.raises(CheckpointError, match="gs://absent/run"):
        checkpoints.restore({})
    with pytest.raises(OSError, match="bucket 'absent'"):
        states.save(checkpoints, 2)


IN_TWO_PROCESSES = """
    from jax.experimental import multihost_utils
    from jaxformer import storage
    from jaxformer.distributed.processes import agreed
    from jaxformer.errors import CheckpointError

    def damage(step):
        multihost_utils.sync_global_devices("both have read")
        if index == "0":
            names = storage.lengths(checkpoints.folder / str(step))
            name = next(name for name in names if "ocdbt.process_1/d/" in name)
            file = checkpoints.folder / str(step) / name
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        multihost_utils.sync_global_devices("damaged")

    def shared():  # as a step of the other, of another size than what is agreed
        print(*multihost_utils.process_allgather(np.arange(32.0) + int(index)).sum(1))

    warnings.simplefilter("ignore")
    here, *there = folder.split()
    for place in (here, *there):
        with Checkpoints(place, keep=2) as checkpoints:
            for step in (2, 3, 5):
                checkpoints.save(step, state(step), {"step": step}, -step)
            checkpoints.annotate(5, {"loss": 0.5})
            restored, metadata = checkpoints.restore(state(0))
            check(restored["params"]["w"], 5)
            shardings = lambda tree: jax.tree.map(lambda _: spread, tree)
            check(checkpoints.average_params([3, 5], shardings=shardings)["w"], 4)
            print(place, *checkpoints.steps(), metadata)
        damage(5)
        with Checkpoints(place, keep=2) as checkpoints:
            restored, metadata = checkpoints.restore(state(0))
            check(restored["params"]["w"], 3)
            checkpoints.save(7, state(7), {"step": 7})
            checkpoints.wait()
            print(place, metadata, *checkpoints.steps())
        damage(3), damage(7)
        try:
            Checkpoints(place).__enter__()
        except CheckpointError:
            print(place, "is refused")
    try:
        with Checkpoints(here + "/alone") as checkpoints:
            checkpoints.save(2, state(2))
            if index == "1":
                raise RuntimeError("this process has failed alone")
            shared()
    except RuntimeError:
        shared()
        agreed(1)
    print(*checkpoints.steps())
"""


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory, object_storage):
    """The places of checkpoints of two processes, and the lines that each process has written."""
    here = tmp_path_factory.mktemp("two")
    places = [str(here), f"gs://bucket/{here.name}"]
    ended = two_processes.run(IN_TWO_PROCESSES, " ".join(places))
    assert [process.code for process in ended] == [0, 0], ended
    return places, [process.out.splitlines() for process in ended]


def test_two_processes_save_average_and_resume_alike_from_what_the_first_one_found_intact(
    of_two_processes,
):
    places, outputs = of_two_processes
    for lines in outputs:
        for place in places:
            assert [line.removeprefix(place) for line in lines if line.startswith(f"{place} ")] == [
                " 3 5 {'step': 5, 'loss': 0.5}",
                " {'step': 3} 3 7",
                " is refused",
            ]
    assert all(names(storage.to_path(place)) - {"alone"} == {"3", "7"} for place in places)


def test_a_process_that_fails_sends_nothing_that_another_takes_for_a_part_of_its_step(
    of_two_processes,
):
    for lines in of_two_processes[1]:
        assert lines[-2:] == ["496.0 528.0", "2"]
