"""Text becomes ids once for all runs: found by content, shared, made again where damaged."""

import os
import shutil
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.harness import cli
from experiments.harness.runs import own_texts, text_cache
from experiments.harness.runs.text_cache import TextCache
from experiments.language_modelling import prepare as language
from experiments.language_modelling.presets import PRESETS as LANGUAGE
from experiments.translation import prepare as translation
from experiments.translation.presets import PRESETS as TRANSLATION
from jaxformer.text.data import open_tokens, write_tokens
from tests.experiments.tiny_runs import WORDS

LINES = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS[:3]]
opened: list[str] = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{line}\n" for line in LINES))
    (tmp_path / "b.txt").write_text("".join(f"{line[::-1]}\n" for line in LINES))
    age(tmp_path / "a.txt", tmp_path / "b.txt")
    return tmp_path


def age(*paths):
    """Lets the files rest: only what has been left alone is remembered."""
    for path in paths:
        os.utime(path, ns=(time.time_ns() - 60 * 10**9,) * 2)
    time.sleep(0.06)  # the time of their status is now


def prepared(experiment, folder, name, *more):
    """The run folder after `prepare`, and its first batch."""
    if experiment == "language_modelling":
        files = "" if "--data.train" in more else f"--data.train {folder}/a.txt"
        module, presets = language, LANGUAGE
        sizes = "--model.max_len 23 --data.seq_len 19 --data.batch_size 3"
    else:
        module, presets = translation, TRANSLATION
        files = f"--data.train.source {folder}/a.txt --data.train.target {folder}/b.txt"
        sizes = "--model.max_len 31 --data.batch_tokens 128"
    words = f"{files} {sizes} --model.vocab_size 283 --runs {folder}/runs --name {name}".split()
    config = cli.parse(presets, [*words, *more])
    run = folder / "runs" / experiment / name
    return run, module.prepare(config, run).batches.batch(0)


BOTH = pytest.mark.parametrize(
    "experiment, ids",
    [("language_modelling", "train.tokens"), ("translation", "source.tokens")],
)


@BOTH
def test_a_second_run_reads_no_text_and_has_the_ids_and_tokenizer_of_the_first(
    text, experiment, ids
):
    first, batch = prepared(experiment, text, "first")
    assert str(text / "a.txt") in opened
    opened.clear()
    second, other = prepared(experiment, text, "second", "--data.tokenizer", "bpe")
    assert not {str(text / "a.txt"), str(text / "b.txt")} & set(opened)
    assert [leaf.tobytes() for leaf in batch] == [leaf.tobytes() for leaf in other]
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)
    assert (first / "data" / ids).samefile(second / "data" / ids), "ids take their space once"
    tokenizers = [next(run.glob("tokenizer/*.json")) for run in (first, second)]
    assert not tokenizers[0].samefile(tokenizers[1]), "a person may edit one"
    shutil.rmtree(text / "runs" / "texts")
    for name in ("first", "alone"):  # a run needs no cache after it was prepared, nor before
        _, other = prepared(experiment, text, name, "--text_cache_dir", "")
        assert [leaf.tobytes() for leaf in batch] == [leaf.tobytes() for leaf in other]
        assert not (text / "runs" / "texts").exists()


@BOTH
def test_edited_text_is_read_and_makes_an_entry_of_its_own(text, experiment, ids):
    first, _ = prepared(experiment, text, "first")
    whole = (text / "a.txt").read_bytes()
    (text / "a.txt").write_bytes(whole.replace(b"moon", b"noon"))
    age(text / "a.txt")
    second, _ = prepared(experiment, text, "second")
    digests = {open_tokens(run / "data" / ids).fingerprint for run in (first, second)}
    assert len(digests) == 2
    (text / "a.txt").write_bytes(whole)
    third, _ = prepared(experiment, text, "third")
    assert (third / "data" / ids).samefile(first / "data" / ids)


@pytest.fixture
def cache(tmp_path):
    return TextCache(tmp_path / "texts")


class Making:
    """Writes an ids file and a small one, and counts how often it was asked to."""

    calls = 0

    def __call__(self, folder):
        self.calls += 1
        time.sleep(0.02)  # others come meanwhile
        write_tokens(folder / "a.tokens", [[3, 5, 7], [2]], vocab_size=11)
        (folder / "b.json").write_text("{}")


def test_of_several_that_need_it_at_once_one_makes_it(cache, tmp_path):
    make = Making()
    with ThreadPoolExecutor(7) as pool:
        folders = [tmp_path / str(number) for number in range(7)]
        list(pool.map(lambda folder: cache.fill(folder, ["x"], make), folders))
    assert make.calls == 1
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["a.tokens", "b.json"]
        assert list(open_tokens(folder / "a.tokens")[0]) == [3, 5, 7]


@pytest.mark.parametrize("name", ["a.tokens", "b.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_what_is_damaged_is_made_again(cache, tmp_path, name, damage, capsys):
    make = Making()
    cache.fill(tmp_path / "one", ["x"], make)
    (entry,) = (path for path in cache.folder.iterdir() if (path / name).is_file())
    content = bytearray((entry / name).read_bytes())
    (entry / name).unlink()
    if damage != "remove":
        content[len(content) // 2] ^= 4
        (entry / name).write_bytes(content[: -1 if damage == "cut" else None])
    cache.fill(tmp_path / "two", ["x"], make)
    assert make.calls == 2 and "is damaged: it is made again" in capsys.readouterr().out
    cache.fill(tmp_path / "three", ["x"], make)
    assert make.calls == 2
    found = [open_tokens(tmp_path / folder / "a.tokens").fingerprint for folder in ("one", "three")]
    assert found[0] == found[1]


def test_what_was_left_half_made_is_made_again(cache, tmp_path):
    def killed(folder):
        (folder / "a.tokens").write_bytes(b"half")
        (folder / "a.parts").mkdir(exist_ok=True)  # what the next start goes on from
        raise KeyboardInterrupt

    def killed_again(folder):
        assert [path.name for path in folder.iterdir()] == ["a.parts"]
        killed(folder)

    for make in (killed, killed_again):
        with pytest.raises(KeyboardInterrupt):
            cache.fill(tmp_path / "one", ["x"], make)
    assert not any((tmp_path / "one").iterdir())
    cache.fill(tmp_path / "one", ["x"], Making())
    assert len(open_tokens(tmp_path / "one" / "a.tokens")) == 2


def test_a_file_is_read_again_only_when_size_time_or_inode_change(cache, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"sun")
    age(path)
    before, status = cache.digest(path), path.stat()
    path.write_bytes(b"fog")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.digest(path) != before, "an archive may give any time of modification"
    fresh = tmp_path / "b.txt"
    fresh.write_bytes(b"sun")
    assert cache.digest(fresh) == before
    fresh.write_bytes(b"fog")
    assert cache.digest(fresh) != before, "a file changed just now may change again unseen"


def test_a_text_changed_in_the_second_of_its_digest_is_another_text(tmp_path, monkeypatch):
    """On a file system that keeps whole seconds, such as exFAT's and HFS+'s, and old NFS."""
    status_of = text_cache._status

    def in_seconds(path):
        *numbers, modified, changed = status_of(path)
        return [*numbers, modified // 10**9 * 10**9, changed // 10**9 * 10**9]

    monkeypatch.setattr(text_cache, "_status", in_seconds)
    cache, path = TextCache(tmp_path / "texts"), tmp_path / "a.txt"
    while time.time() % 1 > 0.3:
        time.sleep(0.05)
    path.write_text("a house\n")
    time.sleep(0.1)
    first = cache.digest(path)
    path.write_text("a mouse\n")
    assert cache.digest(path) != first
    time.sleep(2.6 - time.time() % 1 + 1)
    kept = cache.digest(path)
    assert cache.digest(path) == kept and any((tmp_path / "texts" / "records").iterdir())


def own_lines():
    """The texts of a function of the user."""
    return ["eins", "zwei"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_files_of_a_cache_may_be_read_by_whom_the_umask_says(mask, tmp_path):
    def make(folder):
        (folder / "a.json").write_text("{}")
        write_tokens(folder / "b.tokens", [[1, 2], [3]], vocab_size=5)

    before = os.umask(mask)
    try:
        cache = TextCache(tmp_path / "texts")
        cache.fill(tmp_path / "run" / "data", ["made from"], make)
        cache.record(["facts"], lambda: {"a": 1})
        name = own_texts.called_once(f"{__name__}:own_lines", ("text",), cache)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 6 and Path(name) in files
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path
    assert {path.suffix for path in Path(name).parent.iterdir()} == {".jsonl"}
