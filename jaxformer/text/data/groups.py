"""Items that come one after the other, in lists of some size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_groups(
    items: Iterable[Item],
    size_of: Callable[[Item], int],
    is_full: Callable[[list[Item], int], bool],
) -> Iterator[list[Item]]:
    """`items` in lists, each ended by the item with which `is_full(list, size)` becomes true.

    The size of a list is the sum of `size_of` its items.

    >>> list(in_groups(["a", "rose", "is", "a"], len, lambda group, size: size >= 5))
    [['a', 'rose'], ['is', 'a']]
    """
    group: list[Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if is_full(group, size):
            yield group
            group, size = [], 0
    if group:
        yield group
