"""Emulated buckets refuse and delay what they are told to, and write under conditions."""

import fsspec
import pytest

from jaxformer.storage import to_path
from tests import buckets

pytestmark = pytest.mark.long


def test_an_object_is_created_once(bucket_url):
    system, path = fsspec.url_to_fs(f"{bucket_url}/lock")
    system.pipe_file(path, b"first", mode="create")
    with pytest.raises(FileExistsError):
        system.pipe_file(path, b"second", mode="create")
    assert to_path(bucket_url).joinpath("lock").read_bytes() == b"first"


def test_failing_requests_are_repeated_and_read_only_ones_are_refused(bucket_url):
    scheme, path = bucket_url[:2], to_path(bucket_url) / "a" / "b"
    with buckets.injected(scheme, fail_every=5):
        for number in range(5):
            path.write_bytes(b"x" * number)
            assert path.read_bytes() == b"x" * number
    assert buckets.inject(scheme)["failed"] > 0
    with buckets.injected(scheme, read_only=True), pytest.raises(OSError, match="Forbidden"):
        path.write_bytes(b"y")
    assert path.read_bytes() == b"xxxx"
