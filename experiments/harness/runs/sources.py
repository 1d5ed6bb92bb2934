"""Text by a name: files of lines or records, data sets, your own functions.

a.txt                           lines or documents (.gz too)
a.tsv                           pairs: source<TAB>target
a.bin, a.npy                    ids that others made (`jaxformer.text.data.id_files`); a pattern of
                                such names too
a.jsonl, a.parquet              records with fields; .ndjson, .json (one a line), .gz too
hf:NAME[:CONFIG][@SPLIT]        a data set of the package `datasets`; NAME may be a folder of files,
                                or one that `save_to_disk` has written
package.module:name             your own function without arguments
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from experiments.harness.runs.text_cache import TextCache
from experiments.harness.runs.user_cache import cache_folder
from jaxformer import optional_dependencies
from jaxformer.config import import_by_name, is_import_name
from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.text.data import iterate_lines, read_tab_pairs

Kind = Literal["text", "ids", "table", "json lines", "parquet", "data set", "function"]


_ENDINGS: dict[str, Kind] = {
    ".bin": "ids",
    ".npy": "ids",
    ".json": "json lines",
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".parquet": "parquet",
    ".tsv": "table",
}


def kind_of(name: str | os.PathLike[str]) -> Kind:
    """The source that `name` stands for; a file that is there may look like another name.

    Raises `DataError` for a .json file that has not one record in each line.
    """
    name = str(name)
    is_there = os.path.isfile(name)
    if not is_there and name.startswith("hf:"):
        return "data set"
    if not is_there and is_import_name(name):
        return "function"
    ending = Path(name.lower().removesuffix(".gz")).suffix
    if is_there and ending == ".json":
        _check_record_lines(Path(name))
    return _ENDINGS.get(ending, "text")


def _check_record_lines(path: Path) -> None:
    first = next((line for line in iterate_lines(path) if line.strip()), "")
    try:
        is_record = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        is_record = False
    if not is_record:
        raise DataError(
            f"{path}: a .json file must have one record, {{...}}, in each line: write it so, or "
            "give its text in a .txt file"
        )


def share_of(name: str) -> tuple[str, float | None]:
    """The name and the share of `NAME=SHARE`; None without a share, and for a file with this name.

    >>> share_of("a.jsonl=0.7"), share_of("b.txt")
    (('a.jsonl', 0.7), ('b.txt', None))
    """
    text, sign, number = name.rpartition("=")
    if not sign or not text or os.path.isfile(name):
        return name, None
    try:
        return text, float(number)
    except ValueError:
        return name, None


def shares_of(names: Sequence[str]) -> dict[str, float]:
    """The texts of a mixture and their shares; empty where `names` are one text.

    Raises `ConfigError` where some have a share and others do not, and for a text that comes twice.
    """
    given = [share_of(name) for name in names]
    if all(share is None for _, share in given):
        return {}
    without = [name for name, share in given if share is None]
    if without:
        raise ConfigError(
            f"{without[0]} has no share, but others have: give each text one, as in "
            f"{without[0]}=0.5, or none"
        )
    texts = [name for name, _ in given]
    if len(set(texts)) < len(texts):
        raise ConfigError(f"a text of {', '.join(texts)} comes twice: give it one share")
    return {name: share for name, share in given if share is not None}


def read_texts(name: str, field: str) -> Iterator[str]:
    """The texts of `name`: its lines, or what its records have under `field`."""
    if kind_of(name) == "text":
        return iterate_lines(name)
    if kind_of(name) == "table":
        raise ConfigError(
            f"{name} holds pairs of texts, but single texts are needed: give a file of lines, "
            ".jsonl, .parquet, hf:NAME or package.module:name"
        )
    if kind_of(name) == "ids":
        raise ConfigError(f"{name} holds ids, but text is needed: give the text they are made from")
    return (text for (text,) in _read(name, (field,)))


def read_both(name: str, fields: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Source and target texts of `name`, which holds pairs; `fields` are their names in a record.

    Raises `ConfigError` for a file of lines, `DataError` for what cannot be read.
    """
    pairs = list(iterate_both(name, fields))
    if not pairs:
        raise DataError(f"{name} gave no pair of texts: give at least one")
    source, target = zip(*pairs, strict=True)
    return list(source), list(target)


def iterate_both(name: str, fields: tuple[str, str]) -> Iterator[tuple[str, ...]]:
    """The pairs of `read_both`, one after the other."""
    if kind_of(name) == "text":
        raise ConfigError(
            f"parallel text needs both files, but source={name!r} and target='' were given: only "
            ".tsv, .jsonl, .parquet, hf:NAME and package.module:name hold both"
        )
    if kind_of(name) == "ids":
        raise ConfigError(
            f"{name} holds ids, but pairs of texts are needed: only language modelling reads ids"
        )
    if kind_of(name) == "table":
        return zip(*read_tab_pairs(name), strict=True)
    return iter(_read(name, fields))


def identity(name: str, cache: TextCache) -> str:
    """A text that changes with the content of `name`, and with how it is read.

    Your own function is called for it. Raises `DataError` for a file that is not there, and for one
    that can be read only once.
    """
    kind, path = kind_of(name), Path(name)
    if kind == "data set":
        return _data_set_identity(name, cache)
    if kind == "function":
        digest = hashlib.sha256()
        for item in _called(name):
            digest.update(repr(item).encode() + b"\0")
        return digest.hexdigest()
    if not path.exists():
        raise DataError(f"{name}: cannot read the file: No such file or directory")
    if not path.is_file():
        raise DataError(
            f"{name} is no regular file, and a text is read several times: write it to a file, "
            "and give that"
        )
    return f"{kind} {cache.digest(path)}"


def called_once(name: str, fields: Sequence[str], cache: TextCache) -> str:
    """`name`; in place of your own function, the file of what it gives at this one call.

    A text is read several times, and your function may give another order each time, which would
    train on what it is tested with. The file has the `fields` that the text is read by, and is kept
    in `cache`, or in the user's.
    """
    if kind_of(name) != "function":
        return name
    folder = (cache.folder or cache_folder()) / "called"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile("wb", dir=folder, suffix=".jsonl", delete=False) as file:
        try:
            for texts in _called(name, len(fields)):
                line = json.dumps(_record_of(fields, texts)).encode() + b"\n"
                digest.update(line)
                file.write(line)
        except BaseException:
            os.unlink(file.name)
            raise
    path = folder / f"{name.partition(':')[2]}-{digest.hexdigest()[:32]}.jsonl"
    os.replace(file.name, path)
    return str(path)


def _record_of(fields: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """A record that has `texts` under the dotted `fields`."""
    record: dict[str, Any] = {}
    for field, text in zip(fields, texts, strict=True):
        *groups, last = field.split(".")
        inner = record
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = text
    return record


def read_fields(path: str | os.PathLike[str], fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The texts under `fields` of each record of a file, in order.

    A dotted name names a field, or leads into a record within the record, as in
    `translation.en`. Raises `DataError`, with the number of the record, where a field is absent or
    holds no text, and for a file that cannot be read.

    >>> _ = Path("pairs.jsonl").write_text('{"en": "A house.", "de": "Ein Haus.", "id": 7}')
    >>> list(read_fields("pairs.jsonl", ["en", "de"]))
    [('A house.', 'Ein Haus.')]
    """
    path = Path(path)
    records = _parquet(path, fields) if kind_of(path) == "parquet" else json_lines(path)
    number = 0
    for number, record in records:
        yield tuple(_field_of(record, field, f"{path}:{number}") for field in fields)
    if number == 0:
        raise DataError(f"{path}: there are no records; give at least one")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not blank, from 1, and the JSON value in it."""
    for number, line in enumerate(iterate_lines(path), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a line of JSON: {error}") from error


def _read(name: str, fields: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """The texts under `fields` of each record of `name`."""
    kind = kind_of(name)
    if kind == "data set":
        records = enumerate(_hub_data_set(name))
        return (tuple(_field_of(x, field, f"{name}:{i}") for field in fields) for i, x in records)
    return _called(name, len(fields)) if kind == "function" else read_fields(name, fields)


def _field_of(record: Any, field: str, where: str) -> str:
    """The text under the dotted name `field` of `record`, which an error calls `where`."""
    value = record
    is_column = isinstance(record, dict) and field in record  # also one whose name has dots
    for name in [field] if is_column else field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else shorten(repr(value))
            raise DataError(f"{where}: there is no field {field!r}, but {known or 'nothing'}")
        value = value[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {field!r} must hold text, got {shorten(repr(value))}")
    if not _is_unicode(value):
        raise DataError(f"{where}: the field {field!r} holds half of a surrogate pair: correct it")
    return value


def _is_unicode(text: str) -> bool:
    """Whether `text` can be written in UTF-8, which half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    parquet = optional_dependencies.load("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        known = set(file.schema_arrow.names)
        columns = {field if field in known else field.split(".")[0] for field in fields} & known
        batches = file.iter_batches(columns=sorted(columns) or None)
        yield from enumerate((each for batch in batches for each in batch.to_pylist()), start=1)
    except (OSError, optional_dependencies.load("pyarrow").ArrowException) as error:
        raise DataError(f"{path}: cannot read the file: {error}") from error


def _called(name: str, count: int | None = None) -> Iterator[tuple[str, ...]]:
    """The texts, or tuples of `count` texts, that the function `name` yields; None: of any."""
    items = import_by_name(name, "data")()
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise DataError(f"{name} must give texts or pairs of texts, got {items!r:.80}")
    for number, item in enumerate(items, start=1):
        texts = tuple(item) if isinstance(item, tuple | list) else (item,)
        is_text = all(isinstance(text, str) and _is_unicode(text) for text in texts)
        if not is_text or len(texts) != (count or len(texts)):
            wanted = {1: "a text", 2: "a pair of texts"}.get(
                count or 0, "a text or a pair of texts"
            )
            raise DataError(f"{name}, item {number}: needed {wanted}, got {shorten(repr(item))}")
        yield texts


def _data_set_identity(name: str, cache: TextCache) -> str:
    """The SHA-256 of all texts of a data set.

    Where its Arrow files are known by their content, the texts are not read again.
    """
    data_set = _hub_data_set(name)

    def digest() -> dict[str, str]:
        hashed = hashlib.sha256()
        for record in data_set:
            for path, text in _texts_in(record):
                hashed.update(f"{path}\0{text}\0".encode("utf-8", "surrogatepass"))
            hashed.update(b"\n")
        return {"digest": hashed.hexdigest()}

    files = [cache.digest(Path(file["filename"])) for file in data_set.cache_files]
    if not files:  # in memory
        return digest()["digest"]
    return cache.record(["data set", name, *files], digest)["digest"]


def _texts_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The dotted name of each text in a record, and the text."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts_in(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _texts_in(part, f"{path}.{number}")


def _hub_data_set(name: str) -> Any:
    """The data set `hf:NAME[:CONFIG][@SPLIT]`; the split is train by default."""
    library = optional_dependencies.load("datasets")
    path, _, split = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition(":")
    try:
        if any(Path(path, file).is_file() for file in ("state.json", "dataset_dict.json")):
            saved = library.load_from_disk(path)
            return saved[split or "train"] if isinstance(saved, dict) else saved
        return library.load_dataset(path, config or None, split=split or "train")
    except Exception as error:  # the library raises many classes
        raise DataError(
            f"{name} could not be loaded: {error}: check the name, the split and the network, or "
            "give a folder that holds the data set, as in hf:FOLDER@SPLIT"
        ) from error
