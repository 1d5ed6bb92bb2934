"""One process at a time writes in a folder."""

import importlib.util
import os
from pathlib import Path
from typing import TextIO

from jaxformer.config import ConfigError

NAME = ".lock"


def claim(folder: Path) -> TextIO:
    """A file whose closing gives `folder` free again; the end of the process closes it too.

    Makes the folder if need be. Raises `ConfigError` while another process, or another claim in
    this one, holds it. Where the system or the file system has no locks, nothing is held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file = path.open("a+", encoding="ascii", errors="replace")
    try:
        _lock(file)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read(20).strip() or "unknown"
        file.close()
        raise ConfigError(
            f"{folder} is being written by another run (process {owner}): wait until it ends, or "
            "give this one another folder"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _lock(file: TextIO) -> None:
    if importlib.util.find_spec("fcntl") is None:
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return  # a file system without locks is no reason not to train
