"""How a TPU keeps arrays in tiles of 128 lanes, and how much of them a step of a kernel takes."""

LANES = 128
"""The numbers of the last axis that lie side by side in a vector register of a TPU."""


def has_positions_in_lanes(value_size: int) -> bool:
    """Whether the lanes of cached values are their positions, as the lanes of keys are.

    Heads that do not fill the lanes would fill the memory of a cache up to whole ones.

    >>> has_positions_in_lanes(64), has_positions_in_lanes(128)
    (True, False)
    """
    return value_size % LANES != 0


def heads_at_once(heads: int, column_bytes: int, most_bytes: int) -> int:
    """The number of heads of a step: a divisor of `heads`, with at most `most_bytes` together.

    A head of a step has `LANES` columns of `column_bytes`; one head may have more.

    >>> heads_at_once(6, 256, 128 * 1024)
    3
    """
    most = max(1, most_bytes // (column_bytes * LANES))
    return max(count for count in range(1, heads + 1) if heads % count == 0 and count <= most)
