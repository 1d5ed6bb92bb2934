"""The special tokens around a text, and the ones that name its language to a translator."""

import difflib
from collections.abc import Mapping
from typing import NamedTuple

from jaxformer.errors import ConfigError


class Template(NamedTuple):
    """The ids of the special tokens that stand around a text."""

    first: tuple[int, ...] = ()
    """Those before it."""
    last: tuple[int, ...] = ()
    """Those after it."""


class Languages(NamedTuple):
    """The languages of a translator's texts, each with a special token.

    >>> from jaxformer.text.tokenizers import Languages
    >>> languages = Languages({"deu_Latn": 7, "eng_Latn": 9}, "eng_Latn", eos=2, begins=True)
    >>> languages.template(None)  # of the encoder's texts, NLLB's way
    Template(first=(9,), last=(2,))
    >>> languages.id_of("deu_Latin")
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: 'deu_Latin' is no language of this folder: give deu_Latn, ...
    """

    ids: Mapping[str, int]
    """The id of each language's token."""
    source: str
    """The language of a source for which none is given."""
    target: str | None = None
    """The language of a translation for which none is given; None: what the search says."""
    eos: int = 2
    """Ends a text."""
    begins: bool = True
    """Whether the token of its language begins a source; otherwise it follows EOS."""

    def template(self, source: str | None) -> Template:
        """The special tokens around a source of a language (None: the folder's)."""
        index = self.id_of(source or self.source)
        return Template((index,), (self.eos,)) if self.begins else Template((), (self.eos, index))

    def id_of(self, language: str) -> int:
        """The id of a language's token; `ConfigError` for an unknown one."""
        if language not in self.ids:
            near = difflib.get_close_matches(language, self.ids, n=3, cutoff=0.0)
            raise ConfigError(
                f"{language!r} is no language of this folder: give {', '.join(near)}"
                + (f", or another of its {len(self.ids)}" if len(near) < len(self.ids) else "")
            )
        return self.ids[language]
