"""The text that a prompt's continuation has so far."""

from collections.abc import Sequence

from jaxformer.text.tokenizers import Tokenizer

# Tokenizers decode bytes that are no character to this, such as the first bytes of a character.
_NO_CHARACTER = "\ufffd"
# How many tokens before the first new one are decoded with it: they decide about its space.
_BEFORE = 8


class PartialText:
    """The continuation of a prompt: up to `max_new_tokens` ids, an id of `eos` or a `stop` string.

    `ids` are those so far, with their `log_probs`; `text` is the text that no later id changes,
    without the stop string. `ended`: whether EOS or a stop string is reached. `done`: whether it
    has ended or is as long as it may be.
    """

    def __init__(
        self,
        example_id: int,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        max_new_tokens: int,
        eos: tuple[int, ...],
        stop: tuple[str, ...],
    ) -> None:
        self.example_id = example_id
        self.prompt: list[int] = list(prompt)
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.text: str = ""
        self.ended: bool = False
        self.done: bool = False
        self._tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.eos = eos
        self._stop = stop
        self._known = self.prompt[-_BEFORE:]
        self._before = tokenizer.decode(self._known)
        self._unread: list[int] = []
        self._held = ""

    @property
    def left(self) -> int:
        """The number of ids that may follow."""
        return 0 if self.done else self.max_new_tokens - len(self.ids)

    def context(self, size: int) -> list[int]:
        """The last `size` ids of the prompt and its continuation."""
        return (self.prompt + self.ids)[-size:]

    def add(self, token: int) -> str:
        """The new text after `token`; never half a character.

        A character whose last bytes never come is left out, as is what follows a stop string.
        """
        self.ids.append(token)
        self.ended = token in self.eos
        self.done = self.ended or len(self.ids) == self.max_new_tokens
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
        """The text held back, without an end of it that may be the beginning of a stop string."""
        ends = [
            (self._held.find(stop) + len(stop), stop) for stop in self._stop if stop in self._held
        ]
        if ends:
            # The stop string that was complete first, and of several the longest.
            at, stop = min(ends, key=lambda each: (each[0], -len(each[1])))
            self.ended = self.done = True
            return self._held[: at - len(stop)]
        kept = 0 if self.done else self._stop_prefix()
        piece = self._held[: len(self._held) - kept]
        self._held = self._held[len(piece) :]
        return piece

    def _stop_prefix(self) -> int:
        """The number of last characters that may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        ends = (size for size in sizes if self._begins_stop(self._held[-size:]))
        return next(ends, 0)

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)
