"""Folders that several tests read and none changes, made once a session by the first worker."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None], worker: str
) -> Path:
    """The folder `name`, filled by `make` unless another worker of this session has filled it.

    `worker` is xdist's fixture `worker_id`. A folder whose making failed is made again.
    """
    root = factory.getbasetemp()
    if worker != "master":
        root = root.parent  # the workers' folders stand next to each other
    folder, done = root / name, root / f"{name}.done"
    with FileLock(root / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
