"""Where the tests of this folder keep checkpoints."""

import pytest

from jaxformer import storage
from tests import buckets

_BUCKETS = [pytest.param(scheme, marks=pytest.mark.long) for scheme in buckets.SCHEMES]
everywhere = pytest.mark.parametrize("place", ["here", *_BUCKETS], indirect=True)
in_each_bucket = pytest.mark.parametrize("place", _BUCKETS, indirect=True)
in_a_bucket = pytest.mark.parametrize("place", _BUCKETS[:1], indirect=True)
"""Marks of tests, whose fixtures `place` and `three` are on this machine without them."""


def names(folder):
    """The names of the folders in `folder`, without the lock's."""
    return storage.folders(folder).keys() - {".lock"}


def arrays(step):
    """The file of a step with most of its arrays."""
    lengths = storage.lengths(step)
    return step / max(lengths, key=lengths.__getitem__)


def flip(path):
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 32
    path.write_bytes(content)
