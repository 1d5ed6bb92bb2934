"""An emulator of Google's object storage on the loopback address.

`python -m tests.buckets` prints the environment of their clients as one line of JSON and serves
until its standard input ends. The storage is that of gcp-storage-emulator, in memory. What it
lacks is added here: a write that only succeeds for an expected generation, and the last byte of a
file that ends in a carriage return. Requests can be made to fail, to wait or to be refused: see
`tests.buckets.inject`.
"""

import io
import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "bucket"
CONTROL = "/_inject"


class Injections:
    """Faults of every request, changed by `PUT /_inject` with JSON."""

    def __init__(self) -> None:
        self.fail_every = self.slow_every = 0
        """One of so many requests is answered with 503, or waits `seconds`; 0: none."""
        self.seconds = 0.0
        self.read_only = False
        """Whether everything that writes is answered with 403."""
        self.closed = ""
        """A part of the names of objects, requests to which are answered with 403."""
        self.requests = self.failed = 0
        self._numbers = itertools.count(1)

    def change(self, changes: dict[str, Any]) -> None:
        self.__dict__.update(changes)

    def status(self, method: str, path: str) -> int:
        """The status to answer with at once; 0 to serve the request."""
        self.requests = number = next(self._numbers)
        if self.slow_every and number % self.slow_every == 0:
            time.sleep(self.seconds)
        if self.closed and self.closed in path or self.read_only and method not in ("GET", "HEAD"):
            return 403
        if self.fail_every and number % self.fail_every == 0:
            self.failed += 1
            return 503
        return 0


class ConditionNotMet(Exception):
    """The object has another generation than the request expects."""


class ConditionalStorage(Storage):
    """Objects in memory, created and deleted only if they have the `expected` generation."""

    expected: str | None = None
    generation: str | None = None  # that of the object of this request

    def get_file_obj(self, bucket: str, name: str) -> dict[str, Any]:
        described = super().get_file_obj(bucket, name)
        self.generation = described["generation"]
        return described

    def create_file(self, bucket: str, name: str, *args: Any, **named: Any) -> Any:
        self._check(bucket, name)
        return super().create_file(bucket, name, *args, **named)

    def delete_file(self, bucket: str, name: str, *args: Any, **named: Any) -> Any:
        self._check(bucket, name)
        return super().delete_file(bucket, name, *args, **named)

    def _check(self, bucket: str, name: str) -> None:
        try:
            generation = self.get_file_obj(bucket, name)["generation"]
        except NotFound:
            generation = "0"
        if self.expected not in (None, generation):
            raise ConditionNotMet


class GoogleServer(ThreadingHTTPServer):
    request_queue_size = 128  # a request beyond them waits for a second


class GoogleHandler(RequestHandler):
    """Google's storage, one request at a time, with `ifGenerationMatch` and `injections`."""

    injections = Injections()
    _one_at_a_time = threading.Lock()

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that was killed
            super().handle()

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.path == CONTROL:
            self.injections.change(json.loads(self.rfile.read(self._length()) or b"{}"))
            shown = {k: v for k, v in vars(self.injections).items() if not k.startswith("_")}
            return self._answer(200, json.dumps(shown).encode())
        if status := self.injections.status(self.command, self.path):
            self.rfile.read(self._length())
            return self._answer(status, b"{}")
        if self.headers.get_content_type() == "multipart/related":
            body = with_last_byte(self.rfile.read(self._length()))
            self.headers.replace_header("Content-Length", str(len(body)))
            self.rfile = io.BytesIO(body)  # a connection has one request
        return True

    def log_request(self, *_: Any) -> None:
        """No-op: tests read what is printed."""

    def do_GET(self) -> None:
        self._serve(super().do_GET)

    def do_POST(self) -> None:
        self._serve(super().do_POST)

    def do_PUT(self) -> None:
        self._serve(super().do_PUT)

    def do_DELETE(self) -> None:
        self._serve(super().do_DELETE)

    def end_headers(self) -> None:
        if self.storage.generation is not None:
            self.send_header("x-goog-generation", self.storage.generation)
        super().end_headers()

    def _length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _answer(self, status: int, body: bytes) -> bool:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = True
        return False

    def _serve(self, serve: Callable[[], None]) -> None:
        query = parse_qs(urlparse(self.path).query)
        with self._one_at_a_time:
            self.storage.expected = query.get("ifGenerationMatch", [None])[0]
            self.storage.generation = None
            try:
                serve()
            except ConditionNotMet:
                error = {"error": {"code": 412, "message": "conditionNotMet"}}
                self._answer(412, json.dumps(error).encode())


def with_last_byte(body: bytes) -> bytes:
    """The body of gcsfs's upload of a file, changed so that the emulator reads all of the file.

    A line feed stands between the file and the last boundary. After a carriage return, the
    emulator would take both for one line end.
    """
    before, _, boundary = body.rpartition(b"\n--")
    return before + b"\r\n--" + boundary


def main() -> None:
    logging.disable()  # they report each object that a client looks for and does not find
    storage = ConditionalStorage(use_memory_fs=True)
    buckets.create_bucket(BUCKET, storage)
    google = GoogleServer(("127.0.0.1", 0), partial(GoogleHandler, storage))
    threading.Thread(target=google.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{google.server_address[1]}"
    environment = {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GCE_METADATA_ROOT": "127.0.0.1:9",  # no search for credentials
        "NO_GCE_CHECK": "true",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks an interface that is not emulated
    }
    print(json.dumps(environment), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
