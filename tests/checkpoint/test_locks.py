"""One run writes to a folder, here or in a bucket, until it ends or its lock expires."""

import json
import os
import socket
import textwrap
import time

import pytest

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints, lock
from jaxformer.errors import ConfigError
from jaxformer.storage import BucketPath
from tests import two_processes
from tests.checkpoint.places import everywhere, in_a_bucket
from tests.faults import states


def holder(place):
    """The content of the object of a lock in a bucket."""
    return json.loads((place / ".lock").read_bytes())


def change(place, **changes):
    """Rewrites the object of a lock in a bucket."""
    (place / ".lock").write_text(json.dumps(holder(place) | changes))


@everywhere
def test_a_second_run_is_refused_with_the_first_ones_process_and_host(place):
    owner = f"process {os.getpid()}"
    if storage.is_in_bucket(place):
        owner += f" on {socket.gethostname()}"
    with Checkpoints(place) as checkpoints:
        states.save(checkpoints, 3)
        other = Checkpoints(place)
        for use in (other.__enter__, lambda: states.save(other, 7)):
            with pytest.raises(ConfigError, match=f"{place} .*{owner}"):
                use()
        checkpoints.wait()
        assert states.is_right(other)
        other.close()
    with Checkpoints(place) as checkpoints:
        states.save(checkpoints, 7)
    assert Checkpoints(place).steps() == [3, 7]
    if storage.is_in_bucket(place):
        assert not (place / ".lock").exists()


HOLDING = """
    import sys, time
    from contextlib import ExitStack
    from jaxformer.checkpoint import Checkpoints

    with ExitStack() as stack:
        for place in sys.argv[1:]:
            stack.enter_context(Checkpoints(place))
        print("locked", flush=True)
        time.sleep(60)
"""


@pytest.mark.long
def test_a_lock_ends_with_a_process_of_this_host_that_was_killed(tmp_path, object_storage):
    places = [str(tmp_path), f"gs://bucket/{tmp_path.name}"]
    with two_processes.start("-c", textwrap.dedent(HOLDING), *places) as process:
        assert process.stdout.readline() == "locked\n"
        for place in places:
            with pytest.raises(ConfigError, match=f"process {process.pid}"):
                Checkpoints(place).__enter__()
        process.kill()
        process.wait()
        for place in places:
            Checkpoints(place).__enter__().close()


@in_a_bucket
def test_of_runs_that_lock_at_once_one_does(place, monkeypatch):
    create, held = BucketPath.create, []

    def both(path, content):
        monkeypatch.setattr(BucketPath, "create", create)
        held.append(lock.lock(place))  # between the other's look and its creation
        create(path, content)

    monkeypatch.setattr(BucketPath, "create", both)
    with pytest.raises(ConfigError, match=str(place)):
        lock.lock(place)
    held[0].check()
    held[0].close()


@in_a_bucket
def test_a_process_of_the_same_number_before_a_restart_holds_no_lock(place):
    with Checkpoints(place):
        change(place, token="that of the container's former process 1")
        Checkpoints(place).__enter__().close()


@in_a_bucket
def test_a_lock_of_another_host_holds_until_it_expires_and_its_run_then_stops(place):
    first = Checkpoints(place, keep=3).__enter__()
    states.save(first, 3)
    first.wait()
    change(place, host="another-host", pid=1)
    with pytest.raises(ConfigError, match="process 1 on another-host"):
        Checkpoints(place).__enter__()
    change(place, host="another-host", pid=1, expires=time.time() - 1)
    with Checkpoints(place) as second:
        assert second.newest_step() == 3
        with pytest.raises(ConfigError, match="another run"):
            states.save(first, 11)
        first.close()
        states.save(second, 13)
    assert Checkpoints(place).steps() == [3, 13]


@in_a_bucket
def test_a_run_that_is_taken_over_while_it_saves_does_not_commit(place, monkeypatch):
    first = Checkpoints(place, keep=3).__enter__()
    written = first._writer.wait_until_finished

    def taken_over():
        written()
        change(place, host="another-host", expires=0)
        second.append(Checkpoints(place).__enter__())

    second = []
    monkeypatch.setattr(first._writer, "wait_until_finished", taken_over)
    states.save(first, 3)
    with pytest.raises(ConfigError, match="another run"):
        first.wait()
    assert second[0].steps() == []
    second[0].close()
    first.close()
    assert Checkpoints(place).steps() == []


@in_a_bucket
def test_a_lock_is_renewed_by_each_save_and_not_by_a_run_that_has_lost_it(place):
    with Checkpoints(place) as first:
        change(place, expires=time.time() + 30)
        states.save(first, 3)
        first.wait()
        assert holder(place)["expires"] > time.time() + 500
        change(place, host="another-host", expires=0)
        with Checkpoints(place):
            kept = holder(place)
            with pytest.raises(ConfigError, match="10 minutes"):
                first.annotate(3, {"loss": 0.5})
            assert holder(place) == kept
            with pytest.raises(ConfigError, match=str(place)):
                Checkpoints(place).__enter__()
