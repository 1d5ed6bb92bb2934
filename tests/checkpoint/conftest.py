"""Folders for checkpoints, on this machine and in buckets."""

import functools
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints
from tests.faults import states


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder of this machine, or in a bucket: see `tests.checkpoint.places`."""
    scheme = getattr(request, "param", "here")
    if scheme == "here":
        return tmp_path / "place"
    request.getfixturevalue("object_storage")
    return storage.to_path(f"gs://bucket/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], str]:
    """The folder with the steps 2, 3 and 5 of a kind of place, to be copied."""

    @functools.cache
    def make(in_bucket: bool) -> str:
        here = str(tmp_path_factory.mktemp("template") / "three")
        folder = "gs://bucket/template" if in_bucket else here
        states.make_folder(folder, (2, 3, 5))
        return folder

    return make


@pytest.fixture
def three(place: Path, template: Callable[[bool], str]) -> Path:
    """A folder with the committed steps 2, 3 and 5, which no process locks."""
    system, path = fsspec.url_to_fs(str(place))
    system.copy(template(storage.is_in_bucket(place)), path, recursive=True)
    return place


@pytest.fixture
def checkpoints(tmp_path: Path):
    opened = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()
