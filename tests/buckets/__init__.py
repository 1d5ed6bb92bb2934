"""A bucket on the loopback address, for tests and for processes that they start."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Serves `gs://bucket`, empty at first, to this process and its children.

    Yields the environment variables that it sets, and that lead clients there.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.buckets"]
    root = Path(__file__).parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, cwd=root, **pipes)
    assert server.stdin is not None and server.stdout is not None
    before = dict(os.environ)
    environment: dict[str, str] = {}
    try:
        environment = json.loads(server.stdout.readline())
        os.environ.update(environment)
        yield environment
    finally:
        for name in environment:
            os.environ.pop(name, None)
        os.environ.update(before)
        server.stdin.close()
        server.wait(10)
        server.stdout.close()


def inject(**changes: object) -> dict:
    """Changes the faults of requests; returns all faults and counts.

    `fail_every=10`: one of ten requests is answered with 503. `slow_every=10, seconds=0.5`: one of
    ten waits. `read_only=True`: every write is answered with 403; `closed="x"`: every request
    that names an x. 0 and "" end a fault.
    """
    body = json.dumps(changes).encode()
    url = os.environ["STORAGE_EMULATOR_HOST"] + "/_inject"
    with urllib.request.urlopen(urllib.request.Request(url, body, method="PUT")) as answer:
        return json.load(answer)


@contextmanager
def injected(**changes: object) -> Iterator[None]:
    """Within it, requests have these faults; see `inject`."""
    inject(**changes)
    try:
        yield
    finally:
        inject(**{name: type(value)() for name, value in changes.items()})
