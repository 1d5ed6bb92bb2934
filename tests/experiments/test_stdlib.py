"""The standard library's own text: what is in it, how it is split, and the snippets cut from it."""

import re
import textwrap
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from experiments.language_modelling import stdlib
from experiments.language_modelling.tasks import examples
from experiments.language_modelling.tasks.examples import cut_snippets, snippets
from jaxformer.errors import DataError

PARTS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def parts() -> dict[str, list[Path]]:
    return {part: stdlib.files(part) for part in PARTS}


def relative(path: Path) -> str:
    return path.relative_to(stdlib.root()).as_posix()


def make_library(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_the_parts_are_sorted_share_no_file_and_have_the_sizes_they_should(parts):
    paths = [path for part in PARTS for path in parts[part]]
    assert len(set(paths)) == len(paths)
    sizes = {part: sum(path.stat().st_size for path in parts[part]) for part in PARTS}
    total = sum(sizes.values())
    assert total > 5_000_000
    assert 0.75 < sizes["train"] / total < 0.92
    assert all(0.03 < sizes[part] / total < 0.17 for part in ("validation", "test"))
    for part in PARTS:
        names = [relative(path) for path in parts[part]]
        assert names == sorted(names)


def test_what_is_installed_beside_the_library_is_left_out(tmp_path, monkeypatch):
    make_library(
        tmp_path,
        {
            "abc.py": "",
            "json/decoder.py": "",
            "json/tests/test_json.py": "",
            "json/data.txt": "",
            "site-packages/numpy/core.py": "",
            "dist-packages/apt.py": "",
            "html/entities.py": "",
            "config-3.11-x86_64/python-config.py": "",
            "_sysconfigdata__linux_.py": "",
            "sitecustomize.py": "",
        },
    )
    monkeypatch.setattr(stdlib, "root", lambda: tmp_path)
    found = [relative(path) for part in PARTS for path in stdlib.files(part)]
    assert sorted(found) == ["abc.py", "json/decoder.py"]


def test_a_python_without_the_source_of_its_library_is_refused(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "python311.zip"):
        monkeypatch.setattr(stdlib, "root", lambda folder=folder: folder)
        with pytest.raises(DataError, match=str(folder)):
            stdlib.files("train")


def test_a_file_keeps_its_part_whatever_else_is_there():
    sizes = {"abc.py": 7, "sched.py": 11, "pickle.py": 13, "enum.py": 17, "json/tool.py": 19}
    expected = dict(zip(sizes, ("train", "test", "validation", "train", "train"), strict=True))
    assert stdlib.assign(sizes) == expected
    assert stdlib.assign(dict(reversed(sizes.items()))) == expected
    assert stdlib.assign({"sched.py": 3}) == {"sched.py": "test"}


def test_files_of_a_package_are_held_out_until_they_hold_15_percent_of_it():
    names = ["logging/config.py", "logging/handlers.py", "logging/__init__.py"]  # by their hash
    tests = []
    for first in (16, 14):
        found = stdlib.assign(dict(zip(names, (first, 30, 100 - first - 30), strict=True)))
        tests.append([name for name in names if found[name] == "test"])
    assert tests == [names[:1], names[:2]]
    assert stdlib.assign({"urllib/parse.py": 5})["urllib/parse.py"] != "test"


SOURCE = """
# A licence that every file of the package repeats.
import alpha, beta
from gamma import (
    delta,
    epsilon,
)
class Handler(Base):

    def first(self, one):
        import zeta
        self.one = one   # set
        if one:
            return self.one * 2
        else:
            return HTTPThing(one)
    def second(self, two):
        # a comment of many words
        return two + 1
    def third(self, three):
        return three + 2
    def fourth(self, four):
        return four + 3
"""


def test_a_snippet_has_8_counted_lines_and_does_not_say_where_it_is_from():
    found = list(cut_snippets(SOURCE, "http"))
    assert len(found) == 1
    expected = """\
        class Handler(Base):
            def first(self, one):
                self.one = one   # set
                if one:
                    return self.one * 2
                else:
            def second(self, two):
                return two + 1
        """
    counted = [line for line in found[0].split("\n") if len(re.findall("[a-zA-Z_]+", line)) > 1]
    assert len(counted) == examples.LINES
    assert found[0].startswith(textwrap.dedent(expected).rstrip())
    for word in ("import", "delta", "epsilon", "licence", "comment", "HTTP"):
        assert word not in found[0]


def test_the_test_set_is_balanced_and_shares_no_snippet_with_training(monkeypatch):
    once = lru_cache(snippets)  # those of the test text need those of training
    monkeypatch.setattr(examples, "snippets", once)
    test, train = once("test"), once("train")
    counts = Counter(label for label, _ in test)
    assert counts == dict.fromkeys(stdlib.PACKAGES, examples.TEST_TEXTS)
    assert min(Counter(label for label, _ in train)[package] for package in stdlib.PACKAGES) >= 50
    assert len({text for _, text in train + test}) == len(train) + len(test)
    assert not any(label in text.lower() for label, text in train + test)


def test_a_library_with_too_little_text_is_refused(tmp_path, monkeypatch):
    make_library(tmp_path, {"asyncio/a.py": "x = y\n" * 80, "asyncio/b.py": "x = y\n"})
    monkeypatch.setattr(stdlib, "root", lambda: tmp_path)
    with pytest.raises(DataError, match="asyncio: "):
        snippets("train")
