import gzip
import hashlib
import http.server
import threading

import pytest

from experiments.harness.runs import downloads
from experiments.harness.runs.downloads import DataSetFiles, find
from jaxformer.errors import DataError
from jaxformer.text.data import read_lines

TEXT = "ein Haus\n" * 7919
OTHER = hashlib.sha256(b"other").hexdigest()
PACKED = gzip.compress(TEXT.encode(), mtime=0)


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with what `pages` holds for a path: bytes, or an error code, or half of the bytes."""

    pages: dict[str, bytes | int] = {}
    cut: set[str] = set()

    def do_GET(self):
        page = self.pages.get(self.path, 404)
        if isinstance(page, int):
            self.send_error(page)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page[: len(page) // 2] if self.path in self.cut else page)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    class Own(Server):
        pages = {"/a.txt.gz": PACKED, "/b.txt": TEXT.encode()}
        cut = set()

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("JAXFORMER_DATA", raising=False)
    address = f"http://127.0.0.1:{web.server_port}/{{name}}"
    plain = DataSetFiles({"a.txt.gz": hashlib.sha256(PACKED).hexdigest()}, url=address)
    zipped = DataSetFiles(
        {"raw/b.txt.gz": hashlib.sha256(TEXT.encode()).hexdigest()}, address, True
    )
    lost = DataSetFiles({"c.txt.gz": "0" * 64}, source="c.txt of the moon, gzipped")
    monkeypatch.setattr(downloads, "known_datasets", lambda: {"houses": [plain, zipped, lost]})
    yield Own
    web.shutdown()
    web.server_close()
    thread.join()


def cached(tmp_path):
    return sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_a_file_is_downloaded_once_and_then_found(server, tmp_path, capsys):
    path = find("houses", "a.txt.gz")
    assert path == tmp_path / "cache" / "jaxformer" / "houses" / "a.txt.gz"
    assert path.read_bytes() == PACKED
    assert "downloading http://127.0.0.1" in capsys.readouterr().err
    server.pages = {}
    assert find("houses", "a.txt.gz") == path
    assert cached(tmp_path) == [path]


def test_plain_text_on_the_web_is_gzipped_here_with_the_same_bytes_each_time(server, tmp_path):
    path = find("houses", "raw/b.txt.gz")
    first = path.read_bytes()
    assert read_lines(path) == TEXT.split("\n")[:-1]
    assert first[4:8] == bytes(4), "the time of the download is no part of the file"
    path.unlink()
    assert find("houses", "raw/b.txt.gz").read_bytes() == first
    assert cached(tmp_path) == [path]


def test_a_file_in_ones_own_folder_comes_first_and_one_that_is_not_there_is_named(
    server, tmp_path, monkeypatch, capsys
):
    own = tmp_path / "own" / "houses" / "a.txt.gz"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"")
    monkeypatch.setenv("JAXFORMER_DATA", str(tmp_path / "own"))
    assert find("houses", "a.txt.gz") == own
    assert capsys.readouterr().err == ""
    assert find("houses", "raw/b.txt.gz").is_relative_to(tmp_path / "cache")
    said = capsys.readouterr().err
    assert said.startswith(f"JAXFORMER_DATA={tmp_path / 'own'} has no houses/raw/b.txt.gz\n")


@pytest.mark.parametrize(
    ("file", "page", "said"),
    [
        ("a.txt.gz", b"other", OTHER),
        ("raw/b.txt.gz", b"other", OTHER),
        ("a.txt.gz", "cut", r"http://127.0.0.1:\d+/a.txt.gz (gave|could not be)"),
        ("a.txt.gz", 404, "could not be downloaded .*404.*check the net"),
    ],
)
def test_a_download_that_is_not_whole_says_what_to_do_by_hand_and_the_next_one_succeeds(
    server, tmp_path, file, page, said
):
    whole = server.pages
    name = f"/{file.split('/')[-1]}".removesuffix(".gz" if file.startswith("raw") else "")
    if page == "cut":
        server.cut.add(name)
    else:
        server.pages = {name: page}
    with pytest.raises(DataError, match=said) as error:
        find("houses", file)
    assert f"put it at {tmp_path}/cache/jaxformer/houses/{file}, or set JAX" in str(error.value)
    assert cached(tmp_path) == []
    server.cut.clear()
    server.pages = whole
    assert find("houses", file).is_file()


def test_a_file_that_cannot_be_downloaded_says_where_it_is_from(server, tmp_path):
    message = r"houses/c.txt.gz cannot be downloaded: take c.txt of the moon, gzipped, and put it"
    with pytest.raises(DataError, match=message):
        find("houses", "c.txt.gz")
    assert cached(tmp_path) == []


def test_an_unknown_name_is_refused_and_leads_nowhere(server, tmp_path):
    with pytest.raises(DataError, match="'house'"):
        find("house", "a.txt.gz")
    for file in ("a.txt", "../a.txt.gz", "/etc/passwd", ""):
        with pytest.raises(DataError, match="houses"):
            find("houses", file)
    assert cached(tmp_path) == []


def test_every_known_file_has_a_whole_address_and_a_sha256():
    table = downloads.known_datasets()
    for group in (group for groups in table.values() for group in groups):
        assert bool(group.url) != bool(group.source)
        assert group.url is None or group.url.startswith("https://")
        assert group.url is None or "{name}" in group.url or len(group.files) == 1
        assert all(len(bytes.fromhex(digest)) == 32 for digest in group.files.values())


def test_the_known_files_that_lie_here_have_the_sha256_that_is_known(real_data):
    checked = 0
    for dataset, groups in downloads.known_datasets().items():
        for group in groups:
            for file, digest in group.files.items():
                content = (real_data / dataset / file).read_bytes()
                content = gzip.decompress(content) if group.zipped else content
                assert hashlib.sha256(content).hexdigest() == digest, file
                checked += 1
    assert checked == 34
