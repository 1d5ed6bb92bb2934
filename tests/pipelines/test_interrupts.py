"""A Ctrl-C ends a call after the piece that is being computed, and the process goes on."""

import json

import pytest

from tests.two_processes import finished, start


@pytest.mark.long
def test_a_sigint_ends_completing_streaming_and_translating_after_one_piece():
    """Each call would take minutes; its pieces take a second."""
    (done,) = finished(start("-m", "tests.pipelines.interrupted_calls"))
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [each["call"] for each in found] == ["complete", "stream", "translate"]
    for each in found:
        assert each["waited"] is not None and each["waited"] < 12, each
        assert each["threads"] == [] and each["equal"], each
