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
    lasting,
    must_end,
    no_better,
    no_repeats,
    power,
    renormalized,
    repetition_penalty,
)
from jaxformer.pretrained.conventions import Conventions
from jaxformer.tokenizers import BOS, EOS, PAD


class Manner(NamedTuple):
    """Special ids and the values that `beam_search` takes; the defaults are those trained here.

    `more_ends` end a text as `end` does. `penalty` is made of an exponent. With `twice`, as many
    further candidates as there are hypotheses, for each end, stand ready for those that end.
    Tokens of `banned` are never written, and `first`, if given, is certainly the first one. A text
    has at least `least` tokens before its end and no run of `unrepeated` tokens
    twice (0: as it comes); what it holds is penalised by `repetition` in its log-probabilities,
    by `logit_repetition` in its logits. `renormalize` has what is left add up to one. A text has
    at most `longest` tokens, if given, whatever the search says of its source.
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
    more_ends: tuple[int, ...] = ()
    least: int = 0
    unrepeated: int = 0
    repetition: float = 1.0
    logit_repetition: float = 1.0
    longest: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return (self.end, *self.more_ends)

    def rules(self) -> list[Rule]:
        """What is penalised, banned and forced, as rules on log-probabilities."""
        before = [self.start]
        again = [] if self.repetition == 1 else [repetition_penalty(self.repetition, before)]
        again += [no_repeats(self.unrepeated, before)] if self.unrepeated else []
        never = [banned(self.banned)] if self.banned else []
        never += [lasting(self.least, self.ends)] if self.least else []
        begin = [] if self.first is None else [forced(self.first)]
        return [*again, *never, *begin, *([renormalized] if self.renormalize else [])]

    def logit_rules(self) -> list[Rule]:
        """What is penalised, as rules on logits."""
        penalty = self.logit_repetition
        return [] if penalty == 1 else [repetition_penalty(penalty, [self.start])]


OWN = Manner()
"""That of the models trained here."""


def manner_of(conventions: Conventions) -> Manner:
    """The search of `transformers` (version 5), as a folder of theirs asks for it.

    Scores are divided by length to a power. Twice as many candidates as hypotheses are looked at,
    and the search goes on from the best that have not ended. It stops with the first full set of
    finished texts (`early_stopping` true), when the best unfinished one would not be among them if
    it ended now (false), or at its limit ("never"). One hypothesis ends with its first end token,
    and is penalised for repetition in its logits, where several are in their log-probabilities.
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
        more_ends=conventions.more_ends,
        least=conventions.least,
        unrepeated=conventions.unrepeated,
        repetition=1.0 if greedy else conventions.repetition,
        logit_repetition=conventions.repetition if greedy else 1.0,
        longest=conventions.longest,
    )
