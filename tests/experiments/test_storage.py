"""Paths lead to folders here and into buckets, and do the same in both."""

import os
import sys
from pathlib import Path

import pytest

from experiments.harness.runs import user_cache
from experiments.harness.runs.run_folder import Run
from experiments.harness.runs.text_cache import TextCache
from jaxformer import storage
from jaxformer.errors import ConfigError, DataError, MissingExtra
from jaxformer.storage import to_path
from tests import buckets
from tests.experiments.test_text_cache import Making


def test_a_local_path_is_that_of_pathlib_and_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for read in (to_path, storage.to_local_path):
        assert read("~/runs") == tmp_path / "runs" and read("a/~") == Path("a/~")
        assert read("~backup/runs") == Path("~backup/runs")
    assert type(to_path(tmp_path)) is type(tmp_path) and to_path("runs/../a") == Path("runs/../a")
    assert user_cache.local_copy(tmp_path / "a") == tmp_path / "a"
    with storage.written_here(tmp_path / "new") as folder:
        assert folder == tmp_path / "new" and folder.is_dir()


@pytest.mark.parametrize(
    "address", ["s3://bucket/runs", "https://bucket/runs", "gcs://bucket/runs"]
)
def test_an_address_of_another_kind_is_refused_with_those_that_are_allowed(address):
    with pytest.raises(ConfigError, match=address):
        to_path(address)


def test_without_the_package_of_a_bucket_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtra, match="gcsfs.*'gcs'"):
        to_path("gs://bucket/runs")


@pytest.fixture
def cached(tmp_path, monkeypatch) -> Path:
    """An empty cache of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache.cache_folder()


@pytest.mark.long
def test_a_folder_in_a_bucket_has_the_files_that_were_written(bucket_url, tmp_path):
    root, here = to_path(f"{bucket_url}/a/../runs"), tmp_path / "runs"
    assert str(root) == f"{bucket_url}/runs" and not root.exists() and not list(root.iterdir())
    for folder in (root, here):
        for name in ("config.json", "samples/b.tsv", "samples/a.tsv", "checkpoints/7/x"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            assert path.write_text("ä\n", encoding="utf-8") in (2, 3)
        (folder / "config.json").write_bytes(b"{}")
        (folder / "samples" / "b.tsv").unlink()
        (folder / "samples" / "b.tsv").unlink(missing_ok=True)
    for pattern in ("*", "*/*", "**/*.tsv", "checkpoints/[0-9]*", "none*"):
        names = [sorted(str(x.relative_to(y)) for x in y.glob(pattern)) for y in (root, here)]
        assert names[0] == names[1], pattern
    for name in ("config.json", "samples", "samples/a.tsv", "samples/b.tsv", "sam", "."):
        far, near = root / name, here / name
        assert (far.exists(), far.is_file(), far.is_dir()) == (
            near.exists(),
            near.is_file(),
            near.is_dir(),
        ), name
    assert (root / "samples" / "a.tsv").read_text(encoding="utf-8") == "ä\n"
    assert (root / "config.json").read_bytes() == b"{}"
    age = storage.modified(here / "config.json") - storage.modified(root / "config.json")
    assert abs(age) < 30


@pytest.mark.long
def test_a_file_in_a_bucket_keeps_its_bytes_whatever_it_ends_in(bucket_url, tmp_path):
    """The emulator took a carriage return at the end away; a checkpoint's file ends in any byte."""
    here, there = tmp_path / "here", to_path(f"{bucket_url}/there")
    here.mkdir()
    for end in (b"", b"\n", b"\r", b"\r\n", b"\0", b"-", b"\r\n--"):
        (here / f"end{end.hex()}").write_bytes(b"a\r\n--b\n" + end)
    storage.upload(here, there)
    for path in here.iterdir():
        assert (there / path.name).read_bytes() == path.read_bytes(), path.name
    assert storage.lengths(there) == storage.lengths(here)


@pytest.mark.long
def test_what_fails_for_good_is_an_error_with_path_and_reason(bucket_url):
    path = to_path(f"{bucket_url}/a.json")
    for call in (path.read_bytes, path.unlink, lambda: storage.modified(path)):
        with pytest.raises(FileNotFoundError) as error:
            call()
        assert error.value.filename == str(path)
    with pytest.raises(OSError, match="bucket 'other'"):
        to_path("gs://other/a.json").write_bytes(b"")
    path.write_bytes(b"7")
    with buckets.injected(read_only=True):
        assert path.read_bytes() == b"7"
        with pytest.raises(OSError, match="Forbidden"):
            path.write_bytes(b"8")
    assert path.read_bytes() == b"7"


@pytest.mark.long
def test_an_object_is_created_once_and_requests_that_fail_for_a_while_are_tried_again(bucket_url):
    path = to_path(f"{bucket_url}/a.json")
    assert path.create(b"first") and not path.create(b"second")
    assert path.read_bytes() == b"first"
    with buckets.injected(fail_every=3):
        for number in range(5):
            path.write_bytes(b"%d" % number)
            assert path.read_bytes() == b"%d" % number and path.exists()
        assert buckets.inject()["failed"] > 2


@pytest.mark.long
def test_a_file_in_a_bucket_is_downloaded_once_and_again_when_it_has_changed(bucket_url, cached):
    path = to_path(f"{bucket_url}/a.txt")
    path.write_bytes(b"sun")
    copy = user_cache.local_copy(path)
    twin = path.with_name("twin.txt")
    twin.replace_by(path)
    inode = copy.stat().st_ino
    assert copy.read_bytes() == b"sun" and copy.is_relative_to(cached)
    assert user_cache.local_copy(path).stat().st_ino == inode
    assert user_cache.local_copy(twin).parent == copy.parent, "what is copied within a bucket"
    path.write_bytes(b"fog")
    assert user_cache.local_copy(path).read_bytes() == b"fog" and copy.read_bytes() == b"sun"


@pytest.mark.long
def test_texts_of_runs_in_a_bucket_are_made_once_a_machine(bucket_url, tmp_path, monkeypatch):
    make, runs = Making(), to_path(bucket_url)

    def filled(name: str, host: str) -> list[str]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        cache = TextCache(runs / "texts")
        cache.fill(runs / name, ["x"], make)
        assert list(cache.whole_tokens(runs / name / "a.tokens")[0]) == [3, 5, 7]
        return sorted(path.name for path in (runs / name).iterdir())

    assert filled("first", "one") == filled("second", "one") == ["a.tokens", "b.json"]
    assert make.calls == 1 and not (runs / "texts").exists()
    filled("third", "two")
    assert make.calls == 2
    TextCache().fill(runs / "alone", ["x"], make)
    assert len(list((runs / "alone").iterdir())) == 2


@pytest.mark.long
def test_a_damaged_copy_of_ids_is_refused_with_the_file_to_remove(bucket_url, cached):
    cache, path = TextCache(to_path(bucket_url) / "texts"), to_path(bucket_url) / "run" / "a.tokens"
    cache.fill(path.parent, ["x"], Making())
    copy = user_cache.local_copy(path)
    content = bytearray(copy.read_bytes())
    content[64] ^= 1
    copy.write_bytes(content)
    with pytest.raises(DataError, match=f"{copy} .*{path}"):
        cache.whole_tokens(path)


@pytest.mark.long
def test_metrics_in_a_bucket_are_there_after_a_flush_and_cost_one_request(bucket_url, capsys):
    folder = to_path(bucket_url)
    run = Run(folder)
    for step in range(1, 8):
        run.log(step, loss=step / 7)
    assert run.metrics() == []
    before = buckets.inject()["requests"]
    run.call("flush")
    asked = buckets.inject()["requests"] - before - 1
    assert asked <= 2, "metrics.jsonl and TensorBoard's file"
    reader = Run(folder, writes=False)
    assert [line["step"] for line in reader.metrics()] == [*range(1, 8)]
    run.resume(5)
    run.log(6, loss=0.5)
    with buckets.injected(read_only=True):
        run.call("flush")
    assert "the logger MetricsFile failed" in capsys.readouterr().err
    assert [line["step"] for line in reader.metrics()] == [*range(1, 6)]
    run.call("close")
    assert [line["step"] for line in reader.metrics()] == [*range(1, 7)]
    events = [x for x in (folder / "tensorboard").iterdir() if os.fspath(x).count("tfevents")]
    assert len(events) == 1 and len(events[0].read_bytes()) > 100
