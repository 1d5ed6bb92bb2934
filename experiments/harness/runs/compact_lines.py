"""Lines of a large text in one block of memory."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

_ERRORS = "surrogatepass"  # a text that is no Unicode is refused where it is encoded to ids


class CompactLines(Sequence[str]):
    """A list of lines that grows at its end: UTF-8 one after the other, and eight bytes for each.

    A list of short strings takes twice to three times as much memory. A line is decoded when it is
    asked for.

    >>> lines = CompactLines(["eins", "zwei", ""])
    >>> lines[1], len(lines), lines == ["eins", "zwei", ""]
    ('zwei', 3, True)
    """

    def __init__(self, lines: Iterable[str] = ()):
        self._text = bytearray()
        self._stops = array("q")
        for line in lines:
            self.append(line)

    def append(self, line: str) -> None:
        """Adds `line` at the end."""
        self._text += line.encode("utf-8", _ERRORS)
        self._stops.append(len(self._text))

    def __len__(self) -> int:
        return len(self._stops)

    def __iter__(self) -> Iterator[str]:
        start = 0
        for stop in self._stops:
            yield self._text[start:stop].decode("utf-8", _ERRORS)
            start = stop

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self._line(number) for number in numbers]
        return self._line(numbers)

    def _line(self, number: int) -> str:
        start = self._stops[number - 1] if number else 0
        return self._text[start : self._stops[number]].decode("utf-8", _ERRORS)

    def __eq__(self, other: object) -> bool:
        """Whether `other` is a sequence of the same lines."""
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(map(str.__eq__, self, other))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} lines, {len(self._text):,} bytes)"
