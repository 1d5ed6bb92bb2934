"""The lock of a folder: one run writes to it, and another is refused with the first one's name."""

import importlib.util
import json
import os
import socket
import threading
import time
import uuid
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from jaxformer import storage
from jaxformer.errors import ConfigError

_NAME = ".lock"
_LEASE = 60.0  # seconds after which a run that does not renew its lock has lost it
_held: set[str] = set()
"""The tokens of the leases of this process."""


class Lock(AbstractContextManager):
    """A lock that is held until `close` or the end of the process."""

    def check(self) -> None:
        """Raises `ConfigError` if another run has taken the folder over."""

    def close(self) -> None:
        """Unlocks the folder."""

    def __exit__(self, *_: object) -> None:
        self.close()


class FileLock(Lock):
    """A lock of the operating system, which takes it from nobody.

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
    """A lock in a bucket: the highest numbered object in `folder/.lock/`, renewed by a thread.

    An object is created only if there is none of its number, so each number has one owner. A run
    that has not renewed its object for a minute, or whose process is gone from this host, is
    followed by the owner of the next number, and `check` stops it before it commits anything. The
    clocks of two hosts that use the folder may differ by half a minute.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._objects = folder, folder / _NAME
        self._token = uuid.uuid4().hex
        self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._number = self._take()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lock")
        self._thread.start()

    def check(self) -> None:
        """Raises `ConfigError` if another run has taken the folder over."""
        if self._expires - time.time() < _LEASE / 2:
            storage.write(self._objects / str(self._number), self._content(_LEASE))
        newest = self._numbers()[-1]
        if newest != self._number:
            _held.discard(self._token)
            raise ConfigError(
                f"{self._folder} was taken over by another run ({_owner(self._read(newest))}), for "
                f"this one did not renew its lock for {_LEASE:.0f} s: this one stops, and what it "
                "has not committed does not count"
            )

    def close(self) -> None:
        """Unlocks the folder if this run still holds it."""
        self._closed.set()
        self._thread.join()
        with suppress(OSError, ConfigError):  # then the lock expires
            self.check()
            storage.write(self._objects / str(self._number), self._content(0.0))
        _held.discard(self._token)

    def _take(self) -> int:
        _held.add(self._token)
        while True:
            *older, newest = self._numbers()
            holder = self._read(newest)
            if holder.get("token") == self._token:
                break
            if _is_alive(holder):
                seconds = holder["expires"] - time.time()
                expiry = f"; if it was killed on another host, its lock ends in {seconds:.0f} s"
                raise _refusal(self._folder, _owner(holder), expiry)
            # An answer may be lost: whose object it is, is read.
            path: Any = self._objects / str(newest + 1)
            path.create(self._content(_LEASE))
        for number in older[1:]:
            storage.remove(self._objects / str(number))
        return newest

    def _renew(self) -> None:
        while not self._closed.wait(_LEASE / 4):
            with suppress(OSError):  # the bucket cannot be reached: try again
                try:
                    self.check()
                except ConfigError:
                    return

    def _numbers(self) -> list[int]:
        """The numbers of the objects, ascending, after 0."""
        names = storage.lengths(self._objects)
        return sorted([0, *(int(name) for name in names if name.isdecimal())])

    def _read(self, number: int) -> dict[str, Any]:
        """The content of an object; empty if it is gone or not JSON."""
        with suppress(FileNotFoundError, ValueError):
            return json.loads((self._objects / str(number)).read_bytes())
        return {}

    def _content(self, seconds: float) -> bytes:
        self._expires = time.time() + seconds
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._since,
            "token": self._token,
            "expires": self._expires,
        }
        return json.dumps(content).encode()


def lock(folder: Path) -> Lock:
    """Locks `folder`, which is created if it is missing, until `close` or the end of the process.

    Raises `ConfigError` while another process, or another lock of this process, holds it.
    """
    return Lease(folder) if storage.is_in_bucket(folder) else FileLock(folder)


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the run of a lock may still write."""
    if not holder or holder["expires"] <= time.time():
        return False
    if holder["host"] != socket.gethostname():
        return True
    if holder["pid"] == os.getpid():  # or that of a process before a restart of this container
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
