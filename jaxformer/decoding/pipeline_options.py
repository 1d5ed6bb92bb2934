"""Options of translating and completing texts beside the search: ids, lengths, batches."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.config import check_at_least, check_choices, check_types
from jaxformer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TranslationOptions:
    """Options of `translate` beside the search. Raises `ConfigError` for a wrong type or range.

    The ids are those of tokenizers trained here; `load_generation_config` gives a folder's own.

    >>> TranslationOptions(max_extra_tokens=10).bos
    1
    """

    max_extra_tokens: int = 50
    """The number of tokens by which a translation may be longer than its source, where the search
    has no max_new_tokens."""
    batch_size: int = 64
    """The most sentences that are searched together."""
    bos: int = 1
    """Token id before the first token of a translation (decoder_start_token_id)."""
    pad: int = 0
    """Token id that fills up the sources of a batch."""
    source_bos: bool = False
    """Whether each source begins with its tokenizer's BOS, if it has one, as BART reads it."""

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "batch_size")
        check_at_least(self, 0, "max_extra_tokens", "bos", "pad")


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    r"""Options of `complete` beside sampling. Raises `ConfigError` for a wrong type or range.

    >>> CompletionOptions(stop=("\n",)).overflow  # a prompt must fit
    'refuse'
    """

    eos: tuple[int, ...] | None = None
    """Token ids that end a text; None: the tokenizer's EOS, if it has one."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these strings."""
    overflow: Literal["refuse", "slide"] = "refuse"
    """The treatment of a prompt and continuation that are longer than max_len.

    refuse: raise an error. slide: continue in rounds of max_len // 2 tokens; each round sees the
    last tokens before it that fit.
    """
    seed: int = 0
    """Seed of the random numbers."""

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_at_least(self, 0, "seed")
        if min(self.eos or (), default=0) < 0:
            raise ConfigError(f"eos={self.eos}, but token ids must be at least 0")
        if self.seed >= 2**32:
            raise ConfigError(f"seed={self.seed}, but it must be below 2^32")
        if "" in self.stop:
            raise ConfigError(f"stop={self.stop!r}, but each must have at least one character")
