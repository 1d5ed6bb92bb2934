"""What makes a family of other people's models: names, settings and a table."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.pretrained.settings import Setting, read_settings
from jaxformer.pretrained.subjects import Kind, Subject
from jaxformer.pretrained.table import Table
from jaxformer.tokenizers import DataError


def as_it_is(subject: Subject, names: Collection[str]) -> Subject:
    """`subject` itself."""
    return subject


class Family(NamedTuple):
    """A `model_type` of theirs.

    `architectures` says the kind of each of their classes; the first of a kind is written.
    `constants` are the fields of ours that all its models share; `settings` read the others.
    `table(subject, theirs)` gives the rows for a subject and their config.json. `adapt(subject,
    names)` is the subject that a folder with the tensors `names` holds. Tensors are called in the
    table as a model with a head calls them; a model without one leaves `prefix` out, and names
    that begin as one of `heads` never have it. `renamed` are older endings of names and today's,
    `ignored` (a regular expression) finds tensors that hold nothing of the model, `free` are keys
    that do not change what it computes. The tensor `head` [classes, D] says how many classes a
    classifier has.
    """

    model_type: str
    architectures: Mapping[str, Kind]
    constants: Mapping[str, Any]
    settings: Sequence[Setting]
    table: Callable[[Subject, Mapping[str, Any]], Table]
    prefix: str
    heads: tuple[str, ...]
    adapt: Callable[[Subject, Collection[str]], Subject] = as_it_is
    renamed: Mapping[str, str] = {}
    ignored: str = r"(?!)"
    free: frozenset[str] = frozenset()
    head: str = ""


def read_config(family: Family, theirs: Mapping[str, Any]) -> TransformerConfig:
    """Our config of their config.json; `ConfigError` names what cannot be said here."""
    fields = read_settings(family.settings, family.free, theirs)
    return TransformerConfig(**{**family.constants, **fields})


def write_config(family: Family, subject: Subject) -> dict[str, Any]:
    """Their config.json of `subject`, without the ids of tokens.

    Raises `ConfigError`, naming them, for fields that the family cannot say.
    """
    names = [name for name, kind in family.architectures.items() if kind == subject.kind]
    if not names:
        raise ConfigError(f"it has no {subject.kind.replace('_', ' ')}")
    theirs = {"architectures": names[:1], "model_type": family.model_type}
    for setting in family.settings:
        theirs |= setting.write(subject.config)
    read = Subject(subject.kind, read_config(family, theirs), subject.classes)
    read = family.adapt(
        read, {name for row in family.table(subject, theirs) for name in row.theirs}
    )
    ours, back = subject.facts(), read.facts()
    wrong = [
        f"{name}={ours[name]!r}, but it has {back.get(name)!r}"
        for name in ours
        if ours[name] != back.get(name)
    ]
    if read.kind != subject.kind or wrong:
        raise ConfigError("; ".join(wrong) or f"it has no {subject.kind.replace('_', ' ')}")
    return theirs


def canonical(family: Family, names: Iterable[str]) -> dict[str, str]:
    """The table's name -> the folder's, of each of `names` that is not ignored.

    Raises `DataError` for two names of one tensor.
    """
    names = list(names)
    bare = not any(name.startswith(family.prefix) for name in names)
    found: dict[str, str] = {}
    for name in names:
        table_name = _renamed(family, name)
        if bare and not table_name.startswith(family.heads):
            table_name = family.prefix + table_name
        if re.search(family.ignored, table_name):
            continue
        if table_name in found:
            raise DataError(f"{found[table_name]} and {name} are two names of one tensor")
        found[table_name] = name
    return found


def _renamed(family: Family, name: str) -> str:
    for old, new in family.renamed.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
