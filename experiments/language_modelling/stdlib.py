"""The source text of Python's standard library, which every machine with Python has."""

import hashlib
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from jaxformer.errors import DataError

Part = Literal["train", "validation", "test"]

PACKAGES = (
    "asyncio",
    "concurrent",
    "email",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
)
"""Ten packages of every CPython from 3.11 on, with enough text to hold some of it out."""

_SHARE = 0.05  # of the files, for validation and again for test
_PACKAGE_SHARE = 0.15  # of the bytes of each of the ten packages, for test

# Packages installed beside the library, parts that a distribution may leave out, and test suites.
_FOREIGN = {"site-packages", "dist-packages", "lib-dynload", "sitecustomize.py", "usercustomize.py"}
_OPTIONAL = {"distutils", "ensurepip", "idlelib", "lib2to3", "msilib", "tkinter", "turtledemo"}
_TESTS = {"test", "tests"}
# Generated tables.
_TABLES = {"encodings", "pydoc_data", "entities.py", "stringprep.py", "_casefix.py"}
_LEFT_OUT = _FOREIGN | _OPTIONAL | _TESTS | _TABLES
_MACHINE = ("config-", "_sysconfigdata", "_sysconfig_vars")


def root() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def files(part: Part) -> list[Path]:
    """The library's files of source text in `part`, sorted by their path under `root()`.

    Test suites, generated tables and optional parts (tkinter, ensurepip, ..) are left out. Of
    each of `PACKAGES`, files go to "test" in the order of a hash of their path until they hold
    15 % of its bytes, and the rest to "train"; all others go by the same hash, about 90/5/5. The
    text is the running Python's, and differs a little from version to version. Raises
    `DataError` where the library's source is not installed.
    """
    folder = root()
    names = {path.relative_to(folder).as_posix(): path for path in _sources(folder)}
    if not names:
        raise DataError(
            f"{folder}: this Python comes without the source text of its library: use another "
            "one, or give files of your own with --data.train FILE"
        )
    parts = assign({name: path.stat().st_size for name, path in names.items()})
    return [names[name] for name in sorted(names) if parts[name] == part]


def assign(sizes: dict[str, int]) -> dict[str, Part]:
    """The part of each file, given the sizes in bytes by relative path (with forward slashes)."""
    packages: dict[str | None, list[str]] = defaultdict(list)
    for name in sizes:
        packages[package_of(name)].append(name)
    parts: dict[str, Part] = {name: _part(_share(name)) for name in packages.pop(None, [])}
    for names in packages.values():
        held_out = _hold_out(names, sizes)
        parts |= {name: "test" if name in held_out else "train" for name in names}
    return parts


def package_of(name: str) -> str | None:
    """The one of `PACKAGES` that the file of relative path `name` is in, if any."""
    first, _, inside = name.partition("/")
    return first if inside and first in PACKAGES else None


def _hold_out(names: Iterable[str], sizes: dict[str, int]) -> list[str]:
    """The files of one package for the test part; at least one stays."""
    ordered = sorted(names, key=_share)
    wanted = _PACKAGE_SHARE * sum(sizes[name] for name in ordered)
    chosen: list[str] = []
    for name in ordered[:-1]:
        if sum(sizes[name] for name in chosen) >= wanted:
            break
        chosen.append(name)
    return chosen


def _part(share: float) -> Part:
    """The part of a file of no package whose name has this `_share`."""
    if share < _SHARE:
        return "test"
    if share < 1 - _SHARE:
        return "train"
    return "validation"


def _sources(folder: Path) -> Iterator[Path]:
    """The files of Python in `folder` that are the library's own."""
    if not folder.is_dir():
        return
    # Top level first: what was installed beside the library may be many thousand files.
    for top in folder.iterdir():
        if not _belongs(Path(top.name)):
            continue
        for path in (top, *top.rglob("*.py")):
            if path.suffix == ".py" and _belongs(path.relative_to(folder)):
                yield path


def _belongs(path: Path) -> bool:
    """Whether the file or folder of relative path `path` may be in a part."""
    return not any(word in _LEFT_OUT or word.startswith(_MACHINE) for word in path.parts)


def _share(name: str) -> float:
    """A number from 0 to 1 that depends only on `name`."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
