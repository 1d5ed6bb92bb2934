"""Weight maps: which tensor of `transformers` stores which parameter, for both directions.

A path names a parameter here, such as "encoder/blocks_0/attention/query/kernel"; a name is a
tensor's in the folder.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import ConfigError, DataError, listed

Shape = tuple[int, ...]


class Transform(NamedTuple):
    """A change of form in both directions, between our parameter and the tensor."""

    shape: Callable[[Shape], Shape]
    """Our shape -> the shape of the tensor."""
    to_hf: Callable[[np.ndarray], np.ndarray]
    """Our parameter -> the tensor."""
    to_jax: Callable[[np.ndarray, Shape], np.ndarray] = lambda array, shape: array.reshape(shape)
    """The tensor and our shape -> our parameter."""


SAME = Transform(shape=lambda shape: shape, to_hf=lambda array: array)
"""No change."""

FLAT = Transform(shape=lambda shape: (math.prod(shape),), to_hf=lambda array: array.reshape(-1))
"""All axes in one, such as a bias [N, H] stored as [N H]."""


def conv1d(inputs: int = 1) -> Transform:
    """A kernel stored as [in, out]; its first `inputs` axes are the input's."""
    return Transform(
        shape=lambda shape: (math.prod(shape[:inputs]), math.prod(shape[inputs:])),
        to_hf=lambda array: array.reshape(math.prod(array.shape[:inputs]), -1),
    )


def linear(inputs: int = 1) -> Transform:
    """A kernel stored as [out, in]; its first `inputs` axes are the input's."""
    plain = conv1d(inputs)
    return Transform(
        shape=lambda shape: plain.shape(shape)[::-1],
        to_hf=lambda array: plain.to_hf(array).T,
        to_jax=lambda array, shape: plain.to_jax(array.T, shape),
    )


def rotary_pairs(size: int) -> Transform:
    """A kernel [D, N, H] stored as [N H, D], of which rotary positions turn neighbours there.

    They are the first `size` numbers of each head. Ours turn number i with number i + `size` / 2.
    """
    plain = linear()

    def order(head_dim: int) -> np.ndarray:
        """The number in the tensor's head of each number in ours."""
        return np.concatenate([np.r_[0:size:2], np.r_[1:size:2], np.r_[size:head_dim]])

    return Transform(
        shape=plain.shape,
        to_hf=lambda array: plain.to_hf(array[..., np.argsort(order(array.shape[-1]))]),
        to_jax=lambda array, shape: plain.to_jax(array, shape)[..., order(shape[-1])],
    )


def scaled(transform: Transform, factor: float) -> Transform:
    """`transform` of a parameter that is `factor` times the tensor."""
    scale = np.float32(factor)
    return Transform(
        shape=transform.shape,
        to_hf=lambda array: transform.to_hf(array / scale),
        to_jax=lambda array, shape: transform.to_jax(array * scale, shape),
    )


def shifted(transform: Transform, amount: float) -> Transform:
    """`transform` of a parameter that is `amount` more than the tensor."""
    shift = np.float32(amount)
    return Transform(
        shape=transform.shape,
        to_hf=lambda array: transform.to_hf(array - shift),
        to_jax=lambda array, shape: transform.to_jax(array + shift, shape),
    )


def rows_after(count: int) -> Transform:
    """A table stored with `count` unused rows before it, which are written as zeros."""
    return Transform(
        shape=lambda shape: (shape[0] + count, *shape[1:]),
        to_hf=lambda array: np.pad(array, ((count, 0), (0, 0))),
        to_jax=lambda array, shape: array[count:],
    )


class Entry(NamedTuple):
    """Parameters and the tensor that stores them."""

    paths: tuple[str, ...]
    """Paths of parameters; several are joined along the last axis."""
    names: tuple[str, ...]
    """Names of one tensor; several names are copies. At least one must be there, all that are
    there must be equal, and the first is written. Without a name the parameter must be zero."""
    transform: Transform = SAME
    """The change of form between the two, of each parameter before they are joined."""
    joined: Transform = SAME
    """The change of form of the joined parameters."""
    matrix: int | None = None
    """The tensor stores this one of the matrices that the first axis of its only parameter stacks,
    such as the matrices of experts; None: whole parameters."""

    def stored_shape(self, path: str, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of what the tensor stores of the parameter at `path`."""
        return shapes[path] if self.matrix is None else shapes[path][1:]

    def joined_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of the joined parameters, given the parameters' shapes by path."""
        parts = [self.transform.shape(self.stored_shape(path, shapes)) for path in self.paths]
        return (*parts[0][:-1], sum(part[-1] for part in parts))

    def tensor_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of the tensor, given the parameters' shapes by path."""
        return self.joined.shape(self.joined_shape(shapes))


WeightMap = Sequence[Entry]


def entry(path: str, name: str, transform: Transform = SAME) -> Entry:
    """One parameter that is one tensor."""
    return Entry((path,), (name,), transform)


def zero_entry(path: str) -> Entry:
    """A parameter without a tensor, which must be zero."""
    return Entry((path,), ())


def stacked(path: str, names: Sequence[str], transform: Transform = SAME) -> list[Entry]:
    """The entries of a parameter whose first axis stacks what the tensors `names` store."""
    return [Entry((path,), (name,), transform, matrix=index) for index, name in enumerate(names)]


def norm(path: str, name: str, *, bias: bool = True, scale: Transform = SAME) -> list[Entry]:
    """The entries of a norm."""
    entries = [entry(f"{path}/scale", f"{name}.weight", scale)]
    if bias:
        entries.append(entry(f"{path}/bias", f"{name}.bias"))
    return entries


def dense(
    path: str, name: str, *, bias: bool = True, kernel: Transform | None = None
) -> list[Entry]:
    """The entries of a dense layer; `kernel` None means `linear()`."""
    entries = [entry(f"{path}/kernel", f"{name}.weight", linear() if kernel is None else kernel)]
    if bias:
        entries.append(entry(f"{path}/bias", f"{name}.bias", FLAT))
    return entries


def layers(
    path: str,
    name: str,
    names: Mapping[str, str],
    *,
    bias: bool = True,
    kernel: Callable[[int], Transform] = linear,
    scale: Transform = SAME,
) -> list[Entry]:
    """The entries of a block's norms and dense layers at `path`; tensors' names begin with `name`.

    `names` are their paths in the block, such as "attention/query" and "attention_norm", and the
    tensors' names. `kernel(inputs)` is the transform of a kernel with so many axes of its input.
    """
    entries = []
    for ours, theirs in names.items():
        part_path, part_name = f"{path}/{ours}", f"{name}.{theirs}"
        if ours.endswith("norm"):
            entries += norm(part_path, part_name, bias=bias, scale=scale)
        else:
            inputs = 2 if part_path.endswith("/out") else 1
            entries += dense(part_path, part_name, bias=bias, kernel=kernel(inputs))
    return entries


def check_names(weight_map: WeightMap, stored: Iterable[str]) -> None:
    """Raises `DataError`, listing them, for names of tensors that are missing or unknown."""
    names = set(stored)
    known = {name for entry in weight_map for name in entry.names}
    wrong = [
        f"{entry.names[0]} is missing"
        for entry in weight_map
        if entry.names and not names.intersection(entry.names)
    ]
    _refuse(wrong + [f"{name} is unknown" for name in sorted(names - known)])


def check_shapes(
    weight_map: WeightMap, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]
) -> None:
    """Raises `DataError`, listing them, for tensors of another shape than the model needs.

    `shapes` are the parameters' by path, `stored` the tensors' by name.
    """
    wrong = []
    for entry in weight_map:
        needed = entry.tensor_shape(shapes) if entry.names else ()
        wrong += [
            f"{name} is {list(stored[name])}, but {list(needed)} is needed"
            for name in entry.names
            if name in stored and stored[name] != needed
        ]
    _refuse(wrong)


def to_jax(
    weight_map: WeightMap,
    shapes: Mapping[str, Shape],
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    put: Callable[[str, np.ndarray], Any] = lambda path, value: np.array(value, order="C"),
) -> dict[str, Any]:
    """The parameters by path, from the tensors `names` that `read` gives, each in its type.

    A parameter is what `put(path, array)` returns; it is called before the next tensor is read.
    Raises `DataError` for copies of one tensor that differ.
    """
    there = set(names)
    params: dict[str, Any] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for entry in weight_map:
        present = [name for name in entry.names if name in there]
        for path, value in entry_params(entry, shapes, present, read):
            if entry.matrix is not None:
                parts.setdefault(path, []).append(value)
                if len(parts[path]) < shapes[path][0]:
                    continue
                value = np.stack(parts.pop(path))
            params[path] = put(path, value)
            del value  # before the next tensor is read
    return params


def entry_params(
    entry: Entry,
    shapes: Mapping[str, Shape],
    present: Sequence[str],
    read: Callable[[str], np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
    """Each path of `entry` and its parameter."""
    if not entry.names:
        yield from ((path, np.zeros(shapes[path], np.float32)) for path in entry.paths)
        return
    first, *copies = present
    tensor = read(first)
    for name in copies:
        if not np.array_equal(read(name), tensor):
            raise DataError(f"{name} and {first} are one tensor in this model, but differ")
    tensor = entry.joined.to_jax(tensor, entry.joined_shape(shapes))
    stored = {path: entry.stored_shape(path, shapes) for path in entry.paths}
    widths = [entry.transform.shape(shape)[-1] for shape in stored.values()]
    parts = np.split(tensor, np.cumsum(widths)[:-1], axis=-1)
    for (path, shape), part in zip(stored.items(), parts, strict=True):
        yield path, entry.transform.to_jax(part, shape).astype(tensor.dtype, copy=False)


def to_hf(
    weight_map: WeightMap, read: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor by its name, in the order of names, from the parameters that `read(path)` gives.

    A parameter is read when its tensor is asked for. Raises `ConfigError` for a parameter without
    a tensor that is not zero.
    """
    for entry in weight_map:
        if not entry.names:
            check_zero(entry, read)
    read_whole = _kept_until_read(weight_map, read)
    for entry in sorted(
        (entry for entry in weight_map if entry.names), key=lambda entry: entry.names
    ):
        yield entry.names[0], entry_tensor(entry, read if entry.matrix is None else read_whole)


def check_zero(entry: Entry, read: Callable[[str], np.ndarray]) -> None:
    """Raises `ConfigError` unless the parameters of `entry`, which has no tensor, are zero."""
    if any(np.any(read(path)) for path in entry.paths):
        raise ConfigError(
            f"{', '.join(entry.paths)} has no tensor in this family, so it must be zero, but "
            "it was trained; export the model to another family"
        )


def _kept_until_read(
    weight_map: WeightMap, read: Callable[[str], np.ndarray]
) -> Callable[[str], np.ndarray]:
    """`read` of a parameter that several entries read in part: it is kept until the last one."""
    remaining = Counter(path for entry in weight_map for path in entry.paths)
    kept: dict[str, np.ndarray] = {}

    def read_whole(path: str) -> np.ndarray:
        whole = kept.pop(path) if path in kept else read(path)
        remaining[path] -= 1
        if remaining[path]:
            kept[path] = whole
        return whole

    return read_whole


def entry_tensor(entry: Entry, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """The tensor of `entry`, from the parameters that `read(path)` gives."""
    stored = (
        read(path) if entry.matrix is None else read(path)[entry.matrix] for path in entry.paths
    )
    parts = [entry.transform.to_hf(part) for part in stored]
    joined = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    return entry.joined.to_hf(joined)


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise DataError(f"the tensors do not fit: {listed(wrong)}")
