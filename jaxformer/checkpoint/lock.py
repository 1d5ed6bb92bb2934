"""The lock of a folder: one run writes to it, and another is refused with the first one's name."""

import importlib.util
import json
import os
import socket
import time
import uuid
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

from jaxformer import storage
from jaxformer.errors import ConfigError

_NAME = ".lock"
_LEASE = 600.0  # seconds after which a run that has saved nothing may lose its lock
_held: set[str] = set()
"""The tokens of the leases of this process."""


class Lock(AbstractContextManager[Any]):
    """A lock that is held until `close` or the end of the process."""

    def check(self) -> None:
        """Raises `ConfigError` if another run has taken the folder over."""

    def close(self) -> None:
        """Unlocks the folder."""

    def __exit__(self, *_: object) -> None:
        self.close()


class FileLock(Lock):
    """An operating-system lock. It is never taken over.

    Where the system or the file system has no locks, nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _NAME).open("a+", encoding="ascii", errors="replace")
        try:
            if importlib.util.find_spec("fcntl") is not None:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read(20).strip() or "unknown"
            file.close()
            raise _refusal(folder, f"process {owner}") from error
        except OSError:
            pass  # the file system has no locks: train without one
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file

    def close(self) -> None:
        """Unlocks the folder."""
        self._file.close()


class Lease(Lock):
    """A lock in a bucket: the object `folder/.lock`, with the time when it ends.

    It is created only if there is none, and renewed whenever something is saved. A run that has
    saved nothing for ten minutes, or whose process is gone from this host, may be followed by
    another, and `check` then stops it before it commits anything. The clocks of two hosts that use
    the folder may differ by minutes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._object = folder, folder / _NAME
        self._token = uuid.uuid4().hex
        self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        _held.add(self._token)
        self._take()
        holder = self._read()  # an answer may be lost: whose object it is, is read
        if holder.get("token") != self._token:
            raise _refusal(folder, _owner(holder))

    def check(self) -> None:
        """Renews the lock; raises `ConfigError` if another run has taken the folder over."""
        holder = self._read()
        if holder.get("token") != self._token:
            _held.discard(self._token)
            raise ConfigError(
                f"{self._folder} was taken over by another run ({_owner(holder)}), for this one "
                f"did not renew its lock for {_LEASE / 60:.0f} minutes: this one stops, and what "
                "it has not committed does not count"
            )
        storage.write(self._object, self._content())

    def close(self) -> None:
        """Unlocks the folder if this run still holds it."""
        with suppress(OSError):  # then the lock expires
            if self._read().get("token") == self._token:
                storage.remove(self._object)
        _held.discard(self._token)

    def _take(self) -> None:
        holder = self._read()
        if _is_alive(holder):
            minutes = (holder["expires"] - time.time()) / 60
            expiry = f"; if it was killed on another host, its lock ends in {minutes:.0f} minutes"
            raise _refusal(self._folder, _owner(holder), expiry)
        if holder:
            storage.remove(self._object)
        new: Any = self._object
        new.create(self._content())

    def _read(self) -> dict[str, Any]:
        return _holder(self._object)

    def _content(self) -> bytes:
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._since,
            "token": self._token,
            "expires": time.time() + _LEASE,
        }
        return json.dumps(content).encode()


def wait_for_lock(file: IO[Any]) -> None:
    """Returns when no other process has the lock of an open file, and takes it until it is closed.

    Where the system or the file system has no locks, nothing is locked.
    """
    if importlib.util.find_spec("fcntl") is not None:
        import fcntl

        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)


def lock(folder: Path) -> Lock:
    """Locks `folder`, which is created if it is missing, until `close` or the end of the process.

    Raises `ConfigError` while another process, or another lock of this process, holds it.
    """
    return Lease(folder) if storage.is_in_bucket(folder) else FileLock(folder)


def _holder(path: Path) -> dict[str, Any]:
    """The content of a lock in a bucket; empty if it is not there, expired if it is a local one."""
    with suppress(FileNotFoundError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {"expires": 0.0}
    return {}


def is_locked(folder: Path) -> bool:
    """True while a process holds the lock of `folder`, which this neither takes nor creates."""
    path = folder / _NAME
    if not path.is_file():
        return False
    if storage.is_in_bucket(folder):
        return _is_alive(_holder(path))
    if importlib.util.find_spec("fcntl") is not None:
        import fcntl

        with path.open("rb") as file, suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the run of a lock may still write."""
    if not holder or holder["expires"] <= time.time():
        return False
    if holder["host"] != socket.gethostname():
        return True
    if holder["pid"] == os.getpid():  # or of a process before a restart of this container
        return holder["token"] in _held
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def _owner(holder: dict[str, Any]) -> str:
    if not holder:
        return "unknown"
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}"


def _refusal(folder: Path, owner: str, more: str = "") -> ConfigError:
    return ConfigError(
        f"{folder} is being written by another run ({owner}): wait until it ends, or use another "
        f"folder{more}"
    )
