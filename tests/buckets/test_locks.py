"""Locks of folders in buckets."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints, lock
from jaxformer.errors import ConfigError
from jaxformer.storage import BucketPath
from tests.faults import states

pytestmark = pytest.mark.long


def objects(url):
    """The contents of the objects of a lock, by their numbers."""
    folder = storage.to_path(url) / ".lock"
    return {int(name): json.loads((folder / name).read_bytes()) for name in storage.lengths(folder)}


def change(url, **changes):
    """Rewrites the newest object of a lock."""
    number, content = max(objects(url).items())
    (storage.to_path(url) / ".lock" / str(number)).write_text(json.dumps(content | changes))


def test_a_second_run_is_refused_with_the_first_ones_host_and_process(bucket_url):
    message = f"{bucket_url} is being written .*process {os.getpid()} on {socket.gethostname()}"
    with Checkpoints(bucket_url) as checkpoints:
        states.save(checkpoints, 3)
        other = Checkpoints(bucket_url)
        for use in (other.__enter__, lambda: states.save(other, 7)):
            with pytest.raises(ConfigError, match=message):
                use()
        checkpoints.wait()
        assert states.is_right(other)
    with Checkpoints(bucket_url) as checkpoints:
        states.save(checkpoints, 7)
    assert Checkpoints(bucket_url).steps() == [3, 7]
    assert objects(bucket_url).keys() == {2}


def test_of_runs_that_lock_at_once_one_does(bucket_url, monkeypatch):
    create, held, folder = BucketPath.create, [], storage.to_path(bucket_url)

    def both(path, content):
        monkeypatch.setattr(BucketPath, "create", create)
        held.append(lock.lock(folder))  # between the other's look and its creation
        create(path, content)

    monkeypatch.setattr(BucketPath, "create", both)
    with pytest.raises(ConfigError, match="is being written by another run"):
        lock.lock(folder)
    held[0].check()
    held[0].close()


def test_a_lock_ends_with_a_process_of_this_host_that_was_killed(bucket_url):
    code = """
        import sys, time
        from jaxformer.checkpoint import Checkpoints

        with Checkpoints(sys.argv[1]):
            print("locked", flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), bucket_url]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on "):
            Checkpoints(bucket_url).__enter__()
        process.kill()
        process.wait()
        Checkpoints(bucket_url).__enter__().close()


def test_a_process_of_the_same_number_before_a_restart_holds_no_lock(bucket_url):
    with Checkpoints(bucket_url):
        change(bucket_url, token="that of the container's former process 1")
        Checkpoints(bucket_url).__enter__().close()


def test_a_lock_of_another_host_holds_until_it_expires_and_its_run_then_stops(bucket_url):
    first = Checkpoints(bucket_url, patience=3).__enter__()
    states.save(first, 3)
    first.wait()
    change(bucket_url, host="another-host", pid=1)
    with pytest.raises(ConfigError, match="process 1 on another-host .* its lock ends in [0-9]+ s"):
        Checkpoints(bucket_url).__enter__()
    states.save(first, 5)  # in the background, as the following happens
    first._committing.result()
    change(bucket_url, host="another-host", pid=1, expires=time.time() - 1)
    with Checkpoints(bucket_url) as second:
        assert second.newest_step() == 5
        states.save(second, 7)
        second.wait()
        with pytest.raises(ConfigError, match="taken over by another run .*: this one stops"):
            states.save(first, 11)
        first.close()
        states.save(second, 13)
    assert Checkpoints(bucket_url).steps() == [3, 5, 7, 13]


def test_a_run_that_is_taken_over_while_it_saves_does_not_commit(bucket_url, monkeypatch):
    first = Checkpoints(bucket_url, patience=3).__enter__()
    written = first._writer.wait_until_finished

    def taken_over():
        written()
        change(bucket_url, host="another-host", expires=0)
        second.append(Checkpoints(bucket_url).__enter__())

    second = []
    monkeypatch.setattr(first._writer, "wait_until_finished", taken_over)
    states.save(first, 3)
    with pytest.raises(ConfigError, match="taken over by another run"):
        first.wait()
    assert second[0].steps() == []
    second[0].close()
    first.close()
    assert Checkpoints(bucket_url).steps() == []


def test_a_lock_is_renewed_while_nothing_is_saved(bucket_url, monkeypatch):
    monkeypatch.setattr(lock, "_LEASE", 2.0)
    with Checkpoints(bucket_url):
        before = objects(bucket_url)[1]["expires"]
        time.sleep(3.0)
        assert objects(bucket_url)[1]["expires"] > before + 1
        with pytest.raises(ConfigError, match="is being written"):
            Checkpoints(bucket_url).__enter__()
