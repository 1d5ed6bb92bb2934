"""The lock of a folder: one run writes to it, and another is refused with the first one's name."""

import importlib.util
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from etils import epath

from jaxformer.checkpoint import storage
from jaxformer.errors import ConfigError

_NAME = ".lock"
_LEASE = 60.0  # seconds after which a run that does not renew its lock has lost it
_tokens: set[str] = set()
"""The leases that this process holds."""


class FileLock:
    """A lock of the operating system, which ends with `close` or with the process.

    Where the system or the file system has no locks, nothing is locked.
    """

    def __init__(self, folder: epath.Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = Path(folder, _NAME).open("a+", encoding="ascii", errors="replace")
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

    def check(self) -> None:
        """No-op: the operating system takes this lock from nobody."""

    def close(self) -> None:
        """Unlocks the folder."""
        self._file.close()


class Lease:
    """A lock in a bucket: the highest numbered object in `folder/.lock/`, renewed by a thread.

    An object is created only if there is none of its number, so each number has one owner. A run
    that has not renewed its object in time, or whose process is gone from this host, is followed by
    the owner of the next number; `check` then stops it before it commits anything. The clocks of
    two hosts that use the folder may differ by half a minute.
    """

    def __init__(self, folder: epath.Path) -> None:
        self._folder, self._objects = folder, folder / _NAME
        self._owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "token": uuid.uuid4().hex,
        }
        self._number = self._take()
        _tokens.add(self._owner["token"])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lock")
        self._thread.start()

    def check(self) -> None:
        """Raises `ConfigError` if another run has followed this one."""
        if self._expires - time.time() < _LEASE / 2:
            self._write(time.time() + _LEASE)
        newest = max(self._numbers(), default=0)
        if newest != self._number:
            _tokens.discard(self._owner["token"])
            raise ConfigError(
                f"{self._folder} was taken over by another run ({_name(self._read(newest))}), for "
                f"this one did not renew its lock for {_LEASE:.0f} s: this one stops, and its last "
                "save does not count"
            )

    def close(self) -> None:
        """Gives the lock back, if it is still held."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError, ConfigError):  # it will expire
            self.check()
            self._write(0.0)
        _tokens.discard(self._owner["token"])

    def _take(self) -> int:
        while True:
            numbers = self._numbers()
            newest = max(numbers, default=0)
            holder = self._read(newest) if numbers else {}
            if holder.get("token") == self._owner["token"]:
                break  # it was created, but the answer was lost
            if _is_alive(holder):
                left = max(0.0, holder["expires"] - time.time())
                expiry = f"; if it was killed on another host, its lock ends in {left:.0f} s"
                raise _refusal(self._folder, _name(holder), expiry)
            self._expires = time.time() + _LEASE
            if storage.create(self._objects / str(newest + 1), self._content()):
                newest += 1
                break
        for number in numbers:
            if number < newest:
                storage.remove(self._objects / str(number))
        return newest

    def _renew(self) -> None:
        while not self._ended.wait(_LEASE / 4):
            try:
                self.check()
            except ConfigError:
                return
            except OSError:
                pass  # the storage cannot be reached: try again

    def _numbers(self) -> list[int]:
        return [int(name) for name in storage.lengths(self._objects) if name.isdecimal()]

    def _read(self, number: int) -> dict[str, Any]:
        """The content of a lock; empty if it is gone or not one."""
        with suppress(FileNotFoundError, ValueError):
            content = json.loads(storage.read(self._objects / str(number)))
            if isinstance(content, dict) and self._owner.keys() < content.keys():
                return content
        return {}

    def _write(self, expires: float) -> None:
        self._expires = expires
        storage.write(self._objects / str(self._number), self._content())

    def _content(self) -> bytes:
        return json.dumps({**self._owner, "expires": self._expires}).encode()


def lock(folder: epath.Path) -> FileLock | Lease:
    """Locks `folder`, which is created if it is missing, until `close` or the end of the process.

    Raises `ConfigError` while another process, or another lock of this process, holds it.
    """
    return Lease(folder) if storage.is_bucket(folder) else FileLock(folder)


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the run of a lock may still write."""
    if not holder or holder["expires"] < time.time():
        return False
    if holder["host"] != socket.gethostname():
        return True
    if holder["pid"] == os.getpid():  # or that of a process before a restart of this container
        return holder["token"] in _tokens
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    return True


def _name(holder: dict[str, Any]) -> str:
    if not holder:
        return "unknown"
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}"


def _refusal(folder: epath.Path, owner: str, more: str = "") -> ConfigError:
    return ConfigError(
        f"{folder} is being written by another run ({owner}): wait until it ends, or use another "
        f"folder{more}"
    )
