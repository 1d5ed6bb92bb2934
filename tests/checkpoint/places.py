"""Where the tests of this folder keep checkpoints."""

import pytest

from jaxformer import storage

_BUCKET = pytest.param("gs", marks=pytest.mark.long)
everywhere = pytest.mark.parametrize("place", ["here", _BUCKET], indirect=True)
in_a_bucket = pytest.mark.parametrize("place", [_BUCKET], indirect=True)
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
