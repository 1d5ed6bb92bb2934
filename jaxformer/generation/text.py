"""A text in the making: from ids that come one by one to pieces of text that are certain."""

from collections.abc import Collection, Sequence

from jaxformer.tokenizers import Tokenizer

# What a decoder makes of bytes that are no character, and so of the first bytes of one.
_NO_CHARACTER = "\ufffd"
# So many tokens before the first new one show how it joins what stands before it.
_BEFORE = 8


class Text:
    """What follows the ids `prompt`, up to `length` ids, an id in `ends` or a text in `stop`.

    `ids` are those made so far, with their `log_probs`; `text` is what is certain of their text,
    without the stop string; `ended`: whether the end or a stop string has come; `done`: whether
    that or the length has.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        length: int,
        ends: Collection[int],
        stop: Sequence[str],
    ) -> None:
        self.number = number
        self.prompt = list(prompt)
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.text = ""
        self.ended = False
        self.done = False
        self._tokenizer = tokenizer
        self._length = length
        self._ends = ends
        self._stop = tuple(stop)
        self._known = self.prompt[-_BEFORE:]
        self._before = tokenizer.decode(self._known)
        self._unread: list[int] = []
        self._held = ""

    @property
    def left(self) -> int:
        """How many more ids the text may have."""
        return 0 if self.done else self._length - len(self.ids)

    def context(self, size: int) -> list[int]:
        """The last `size` ids, the prompt's among them."""
        return (self.prompt + self.ids)[-size:]

    def add(self, token: int) -> str:
        """The text that has become certain with `token`; never half a character.

        A character whose last bytes never come is left out, and so is what follows a stop string.
        """
        self.ids.append(token)
        self.ended = token in self._ends
        self.done = self.ended or len(self.ids) == self._length
        if not self.ended:
            self._unread.append(token)
        self._held += self._read()
        piece = self._release()
        self.text += piece
        return piece

    def _read(self) -> str:
        """The text of the unread ids, or nothing while it ends in the middle of a character."""
        whole = self._tokenizer.decode(self._known + self._unread)
        if self.done:
            whole = whole.rstrip(_NO_CHARACTER)
        new = whole[len(self._before) :]
        if not new or new.endswith(_NO_CHARACTER):
            return ""
        self._known, self._unread = self._unread, []
        self._before = self._tokenizer.decode(self._known)
        return new

    def _release(self) -> str:
        """What is held back, but for an end of it that a stop string might begin with."""
        found = [
            (self._held.find(stop) + len(stop), stop) for stop in self._stop if stop in self._held
        ]
        if found:
            # The one that was whole first, and of those the longest.
            at, stop = min(found, key=lambda each: (each[0], -len(each[1])))
            self.ended = self.done = True
            return self._held[: at - len(stop)]
        kept = 0 if self.done else self._beginning()
        piece = self._held[: len(self._held) - kept]
        self._held = self._held[len(piece) :]
        return piece

    def _beginning(self) -> int:
        """How many of the last characters held back are the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        ends = (size for size in sizes if self._begins_stop(self._held[-size:]))
        return next(ends, 0)

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)
