"""Tables *our path <-> their name, transform*: one for each family, read in both directions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.pretrained.transforms import FLAT, SAME, Shape, Transform, linear
from jaxformer.tokenizers import DataError

_NAMED = 8  # names in an error before the rest is only counted


class Row(NamedTuple):
    """Parameters of ours and the tensor of theirs that holds them.

    Several of `ours` are joined along the last axis of theirs. Several names in `theirs` are
    copies of one tensor: any of them may be absent, but not all, and those that are there must be
    equal; the first is written. Without a name in `theirs` ours is zero.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: Transform = SAME

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Their shape, given those of ours by path."""
        parts = [self.transform.shape(shapes[path]) for path in self.ours]
        return (*parts[0][:-1], sum(part[-1] for part in parts))


Table = Sequence[Row]


def one(ours: str, theirs: str, transform: Transform = SAME) -> Row:
    """One parameter of ours that is one tensor of theirs."""
    return Row((ours,), (theirs,), transform)


def zero(ours: str) -> Row:
    """A parameter that only we have, and that must be zero."""
    return Row((ours,), ())


def norm(ours: str, theirs: str, bias: bool = True) -> list[Row]:
    """The rows of a norm."""
    rows = [one(f"{ours}/scale", f"{theirs}.weight")]
    return [*rows, one(f"{ours}/bias", f"{theirs}.bias")] if bias else rows


def dense(
    ours: str, theirs: str, bias: bool = True, *, kernel: Transform | None = None
) -> list[Row]:
    """The rows of a linear map, with their bias or with none; a `linear()` kernel if not given."""
    rows = [one(f"{ours}/kernel", f"{theirs}.weight", linear() if kernel is None else kernel)]
    return [*rows, one(f"{ours}/bias", f"{theirs}.bias", FLAT)] if bias else rows


def attention(ours: str, theirs: str, names: Sequence[str], bias: bool = True) -> list[Row]:
    """The rows of an attention whose linear maps are called `names`: query, key, value, out."""
    query, key, value, out = (f"{theirs}.{name}" for name in names)
    return [
        *dense(f"{ours}/query", query, bias),
        *dense(f"{ours}/key", key, bias),
        *dense(f"{ours}/value", value, bias),
        *dense(f"{ours}/out", out, bias, kernel=linear(inputs=2)),
    ]


def check_names(table: Table, given: Iterable[str]) -> None:
    """Raises `DataError`, listing them, for names of theirs that are missing or unknown."""
    given = set(given)
    known = {name for row in table for name in row.theirs}
    missing = [row.theirs[0] for row in table if row.theirs and not given.intersection(row.theirs)]
    wrong = [f"{name} is missing" for name in missing]
    wrong += [f"{name} is unknown" for name in sorted(given - known)]
    _refuse(wrong)


def check_shapes(table: Table, shapes: Mapping[str, Shape], given: Mapping[str, Shape]) -> None:
    """Raises `DataError`, listing them, for tensors of theirs of another shape than ours ask for.

    `shapes` are those of our parameters by path, `given` those of their tensors by name.
    """
    wrong = []
    for row in table:
        wanted = row.shape(shapes) if row.theirs else ()
        wrong += [
            f"{name} is {list(given[name])}, but {list(wanted)} is needed"
            for name in row.theirs
            if name in given and given[name] != wanted
        ]
    _refuse(wrong)


def to_ours(
    table: Table,
    shapes: Mapping[str, Shape],
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
) -> dict[str, np.ndarray]:
    """Our parameters by path, of the tensors `names` that `read` gives.

    Raises `DataError` for copies of one tensor that differ.
    """
    names = set(names)
    params = {}
    for row in table:
        if not row.theirs:
            params |= {path: np.zeros(shapes[path], np.float32) for path in row.ours}
            continue
        first, *copies = (name for name in row.theirs if name in names)
        tensor = read(first)
        for name in copies:
            if not np.array_equal(read(name), tensor):
                raise DataError(f"{name} and {first} are one tensor in this model, but differ")
        widths = [row.transform.shape(shapes[path])[-1] for path in row.ours]
        parts = np.split(tensor, np.cumsum(widths)[:-1], axis=-1)
        for path, part in zip(row.ours, parts, strict=True):
            ours = row.transform.to_ours(part, shapes[path])
            params[path] = np.ascontiguousarray(ours, np.float32)
    return params


def to_theirs(table: Table, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their tensors by name, of our parameters by path.

    Raises `ConfigError` for a parameter that they have no tensor for and that is not zero.
    """
    tensors = {}
    for row in table:
        if row.theirs:
            parts = [row.transform.to_theirs(params[path]) for path in row.ours]
            joined = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
            tensors[row.theirs[0]] = np.ascontiguousarray(joined)
        elif any(np.any(params[path]) for path in row.ours):
            raise ConfigError(
                f"{', '.join(row.ours)} has no tensor in this family, so it must be zero: it was "
                "trained; export the model to another family"
            )
    return tensors


def _refuse(wrong: list[str]) -> None:
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise DataError(f"the tensors do not fit: {'; '.join(wrong[:_NAMED])}{more}")
