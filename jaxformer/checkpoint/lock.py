"""A lock file: only one process at a time writes to a folder."""

import importlib.util
import os
from pathlib import Path
from typing import TextIO

from jaxformer.errors import ConfigError

NAME = ".lock"


def lock(folder: Path) -> TextIO:
    """Locks `folder` and returns the lock file; closing it, or the end of the process, unlocks.

    Creates the folder if it is missing. Raises `ConfigError` while another process, or another
    lock of this process, holds it. Where the system or the file system has no locks, nothing is
    locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file = path.open("a+", encoding="ascii", errors="replace")
    try:
        _flock(file)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read(20).strip() or "unknown"
        file.close()
        raise ConfigError(
            f"{folder} is being written by another run (process {owner}): wait until it ends, or "
            "use another folder"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _flock(file: TextIO) -> None:
    if importlib.util.find_spec("fcntl") is None:
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return  # the file system has no locks: train without one
