"""What a translation model was trained to be asked with: special ids, and a way of searching."""

from collections.abc import Callable
from typing import NamedTuple

from jaxformer.decoding import (
    Limit,
    Outlook,
    Penalty,
    Rule,
    Stop,
    as_it_stands,
    at_best,
    at_the_limit,
    banned,
    ends_for_nothing,
    first_full,
    forced,
    gnmt,
    is_cut,
    must_end,
    no_better,
    power,
    renormalized,
)
from jaxformer.pretrained.conventions import Conventions
from jaxformer.tokenizers import BOS, EOS, PAD


class Manner(NamedTuple):
    """Special ids and the values that `beam_search` takes; the defaults are those trained here.

    `penalty` is made of an exponent. With `twice`, as many further candidates as there are
    hypotheses stand ready for those that end. Tokens of `banned` are never written, and `first`,
    if given, is certainly the first one; `renormalize` has the others share what that takes.
    """

    start: int = BOS
    end: int = EOS
    pad: int = PAD
    penalty: Callable[[float], Penalty] = gnmt
    stop: Stop = no_better
    outlook: Outlook = at_best
    limit: Limit = must_end
    twice: bool = False
    banned: tuple[int, ...] = ()
    first: int | None = None
    renormalize: bool = False

    def rules(self) -> list[Rule]:
        """What is banned and forced, as rules on log-probabilities."""
        never = [banned(self.banned)] if self.banned else []
        begin = [] if self.first is None else [forced(self.first)]
        return [*never, *begin, *([renormalized] if self.renormalize else [])]


OWN = Manner()
"""That of the models trained here."""


def manner_of(conventions: Conventions) -> Manner:
    """The search of `transformers` (version 5), as a folder of theirs asks for it.

    Scores are divided by length to a power. Twice as many candidates as hypotheses are looked at,
    and the search goes on from the best that have not ended. It stops with the first full set of
    finished texts (`early_stopping` true), when the best unfinished one would not be among them if
    it ended now (false), or at its limit ("never"). One hypothesis ends with its first end token.
    """
    greedy = conventions.width == 1
    outlook: Outlook = as_it_stands
    if conventions.early_stopping == "never" and conventions.length_penalty > 0:
        outlook = at_the_limit
    return Manner(
        start=conventions.start,
        end=conventions.end,
        pad=conventions.pad,
        penalty=power,
        stop=first_full if greedy or conventions.early_stopping is True else no_better,
        outlook=outlook,
        limit=ends_for_nothing if conventions.ends_at_limit else is_cut,
        twice=not greedy,
        banned=conventions.banned,
        first=conventions.first,
        renormalize=conventions.renormalize,
    )
