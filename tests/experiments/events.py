"""The TensorBoard events of a run, read back."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def events(folder: Path) -> Iterator[Any]:
    """The events in the files of the run in `folder`, in the order of their writing."""
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield proto.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
